// The launch of sparse attention's kernels. They gather the caches' rows and queries by address, so that nothing is encoded.
#pragma once

#include "common/launch.h"
#include "decode/cta/token_splits.h"
#include "params.h"

namespace etap::sparse {

// CTAs of a cluster that holds the pieces of a token and sums them; 1 where they do not, and a token in several pieces wants the
// combination: where pieces are not 2, 4 or 8, and where a CTA has 64 rows. Larger clusters would need nearly all SMs of a GPC, of which
// a communication kernel may hold some for as long as it likes.
inline int cluster_pieces(const DecodeParams& params) {
  const int pieces = equal_splits(params.division);
  return params.row_tile < kMaxRowTile && (pieces == 2 || pieces == 4 || pieces == 8) ? pieces : 1;
}

// Whether consumers convert the rows; else they multiply bfloat16, which for 64 rows producers make of V4's.
inline bool consumers_convert(RowFormat format, int row_tile) {
  return format == RowFormat::kScaledFp8 || (format == RowFormat::kPageScaledFp8 && row_tile < kMaxRowTile);
}

KernelLaunch prepare_bf16(int row_tile, bool rope, dim3 blocks, int cluster);  // V4's rows, too
KernelLaunch prepare_scaled_fp8(int row_tile, dim3 blocks, int cluster);
KernelLaunch prepare_page_scaled_fp8(int row_tile, dim3 blocks, int cluster);  // up to 32 rows

inline KernelLaunch prepare(const DecodeParams& params, int cluster) {
  const dim3 blocks(params.partitions * params.row_groups);
  if (!consumers_convert(params.sparse.format, params.row_tile)) {
    return prepare_bf16(params.row_tile, params.q_rope != nullptr, blocks, cluster);
  }
  return params.sparse.format == RowFormat::kScaledFp8 ? prepare_scaled_fp8(params.row_tile, blocks, cluster)
                                                       : prepare_page_scaled_fp8(params.row_tile, blocks, cluster);
}

}  // namespace etap::sparse

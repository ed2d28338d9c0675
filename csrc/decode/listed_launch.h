// The launch of sparse attention's kernels. They gather the caches' rows and queries by address, so that nothing is encoded.
#pragma once

#include "decode/cta/token_splits.h"
#include "decode/kernels.h"

namespace etap::sparse {

// CTAs of a cluster that holds the splits of a token and sums them; 1 where they do not, and a token in several splits wants the
// combination: where splits are not 2, 4 or 8, and where a CTA has 64 rows. Larger clusters would need nearly all SMs of a GPC, of which
// a communication kernel may hold some for as long as it likes.
inline int cluster_splits(const DecodeParams& params) {
  const int splits = equal_splits(params.division);
  return params.row_tile < kMaxRowTile && (splits == 2 || splits == 4 || splits == 8) ? splits : 1;
}

// Of V4's rows producers make bfloat16 for 64 query rows.
inline Operands operands(RowFormat format, bool rope, int row_tile) {
  if (format == RowFormat::kScaledFp8) return Operands::kListedV32;
  if (format == RowFormat::kPageScaledFp8 && row_tile < kMaxRowTile) return Operands::kListedV4;
  return rope ? Operands::kListedBf16 : Operands::kListedLatent;
}

inline KernelLaunch prepare(const DecodeParams& params, const DecodeKernel& kernel, int cluster) {
  KernelLaunch launch = kernel.launch;
  launch.blocks = dim3(params.partitions * params.row_groups);
  launch.cluster = cluster;
  return launch;
}

}  // namespace etap::sparse

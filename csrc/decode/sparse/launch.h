// The launch of sparse attention's kernels. They gather the caches' rows and queries by address, so that nothing is encoded.
#pragma once

#include "common/launch.h"
#include "decode/sparse/pieces.h"
#include "params.h"

namespace etap::sparse {

// CTAs of a cluster that holds the pieces of a token and sums them; 1 where they do not, and a token in several pieces wants the
// combination: where pieces are not 2, 4 or 8, and where a CTA has 64 rows. More than 8 CTAs need a GPU that nobody else uses:
// they are not placed while a communication kernel holds some of their neighbours.
inline int cluster_pieces(const DecodeParams& params) {
  const int pieces = equal_pieces(params.sparse.division);
  return params.row_tile < kMaxRowTile && (pieces == 2 || pieces == 4 || pieces == 8) ? pieces : 1;
}

KernelLaunch prepare(const DecodeParams& params, int cluster);

}  // namespace etap::sparse

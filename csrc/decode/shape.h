// The one answer to what a call's query rows mean for the host: which kernel decodes them, how many a CTA holds, in how
// many groups, and how much of the workspace a piece's partial result takes.
#pragma once

#include <cstdint>

#include "params.h"

namespace etap {

enum class DecodeKernelKind : int32_t {
  kTransposed,     // a 16-bit cache, tiles alternate between the consumers
  kTransposedFp8,  // a cache of e4m3
  kQueryMajor,     // a 16-bit cache, 64 rows on WGMMA's M
  kSparseFp8,      // listed FP8 rows with scales; those of 16 bits take kTransposed and kQueryMajor
};

constexpr const char* name_of(DecodeKernelKind kind) {
  return kind == DecodeKernelKind::kTransposed      ? "transposed"
         : kind == DecodeKernelKind::kTransposedFp8 ? "transposed_fp8"
         : kind == DecodeKernelKind::kQueryMajor    ? "query_major"
                                                    : "sparse_fp8";
}

struct DecodeShape {
  DecodeKernelKind kernel;
  int32_t row_tile;      // query rows that a CTA computes
  int32_t row_groups;    // CTAs that share a piece, each with other rows of it
  int32_t group_rows;    // of all groups but the last
  int64_t piece_floats;  // a CTA's partial result of one piece: output rows and log-sum-exps

  // A partition begins in one request and ends in another: it holds at most two pieces of split ones.
  constexpr int64_t partial_rows(int64_t partitions) const { return 2 * partitions * row_groups * row_tile; }
  constexpr int64_t workspace_floats(int64_t partitions) const { return 2 * partitions * row_groups * piece_floats; }
};

constexpr DecodeShape decode_shape(DecodeKernelKind kernel, int64_t rows, int32_t row_tile, int32_t group_rows) {
  const auto groups = int32_t((rows + group_rows - 1) / group_rows);
  return {kernel, row_tile, groups, group_rows, int64_t(row_tile) * (kLatentDim + 1)};
}

// rows: query tokens * heads.
constexpr DecodeShape decode_shape(int64_t rows, bool fp8_cache) {
  int32_t row_tile = kMinRowTile;
  while (row_tile < kMaxRowTile && row_tile < rows) row_tile *= 2;
  const auto kernel = fp8_cache                 ? DecodeKernelKind::kTransposedFp8
                      : row_tile == kMaxRowTile ? DecodeKernelKind::kQueryMajor
                                                : DecodeKernelKind::kTransposed;
  return decode_shape(kernel, rows, row_tile, kMaxRowTile);
}

// Of sparse attention, where the rows are a token's heads.
constexpr DecodeShape sparse_shape(int64_t heads, bool fp8_cache) {
  DecodeShape shape = decode_shape(heads, false);
  if (fp8_cache) shape.kernel = DecodeKernelKind::kSparseFp8;
  return shape;
}

}  // namespace etap

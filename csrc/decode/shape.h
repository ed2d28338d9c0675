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
  int32_t row_groups;    // CTAs that share a piece, each with another row tile of it
  int64_t piece_floats;  // a CTA's partial result of one piece: output rows and log-sum-exps

  // A partition begins in one request and ends in another: it holds at most two pieces of split ones.
  constexpr int64_t partial_rows(int64_t partitions) const { return 2 * partitions * row_groups * row_tile; }
  constexpr int64_t workspace_floats(int64_t partitions) const { return 2 * partitions * row_groups * piece_floats; }
};

constexpr int64_t padded(int64_t rows, int32_t row_tile) { return (rows + row_tile - 1) / row_tile * row_tile; }

// few_tensor_cores: the GPU has few for its memory, as an H20 has. There groups of 16 rows, each of which reads the cache,
// take less time than groups of 64 with an eighth more of padding. Of more groups some CTAs would have no part.
constexpr int32_t row_tile_of(int64_t rows, bool few_tensor_cores) {
  constexpr int32_t kSmallGroup = 16, kMostGroups = 7;
  const bool less_padding = 8 * padded(rows, kSmallGroup) <= 7 * padded(rows, kMaxRowTile);
  if (few_tensor_cores && rows > 32 && rows <= kMostGroups * kSmallGroup && less_padding) return kSmallGroup;
  int32_t row_tile = kMinRowTile;
  while (row_tile < kMaxRowTile && row_tile < rows) row_tile *= 2;
  return row_tile;
}

// rows: query tokens * heads.
constexpr DecodeShape decode_shape(int64_t rows, bool fp8_cache, bool few_tensor_cores) {
  const int32_t row_tile = row_tile_of(rows, few_tensor_cores);
  const auto kernel = fp8_cache                 ? DecodeKernelKind::kTransposedFp8
                      : row_tile == kMaxRowTile ? DecodeKernelKind::kQueryMajor
                                                : DecodeKernelKind::kTransposed;
  return {kernel, row_tile, int32_t(padded(rows, row_tile) / row_tile), int64_t(row_tile) * (kLatentDim + 1)};
}

// Of sparse attention, where the rows are a token's heads.
constexpr DecodeShape sparse_shape(int64_t heads, bool fp8_cache) {
  DecodeShape shape = decode_shape(heads, false, false);
  if (fp8_cache) shape.kernel = DecodeKernelKind::kSparseFp8;
  return shape;
}

}  // namespace etap

// Beside FP8 rows the consumers read the query rows of a token: the latent part becomes float16, scaled into its range row by row, the
// rope part stays as it is.
#pragma once

#include <algorithm>

#include "decode/layouts/sparse_fp8.h"
#include "decode/load/scaled_queries.cuh"

namespace etap::sparse_fp8 {

constexpr int kLatentUnits = kLatentDim / transposed_fp8::kUnitColumns / kWarpSize;  // of a lane
constexpr int kRopeLanes = kRopeDim / transposed_fp8::kUnitColumns;                  // the first ones have a unit each, or the last

// Where the rope part is value dims it lies behind those that have scales.
template <class T>
CUTE_DEVICE constexpr int first_rope_lane() {
  return T::Row::kRopeIsValue ? kWarpSize - kRopeLanes : 0;
}

// Scales a row and writes it where WGMMA reads it.
template <class T>
CUTE_DEVICE void write_query(Shared<T>& shared, const DecodeParams& params, int row,
                             const transposed_fp8::QueryUnit (&units)[kLatentUnits], uint4 rope) {
  using transposed_fp8::operand_unit;
  const int lane = threadIdx.x % kWarpSize;
  const int rope_unit = lane - first_rope_lane<T>();
  const auto scaled = [&](int u) { return u * kWarpSize + lane < T::kScaledDims / transposed_fp8::kUnitColumns; };
  uint32_t largest = 0;
  CUTE_UNROLL
  for (int u = 0; u < kLatentUnits; ++u) {
    CUTE_UNROLL
    for (float value : units[u].values) {
      if (scaled(u)) largest = max(largest, __float_as_uint(fabsf(value)));
    }
  }
  // Near 1: products are multiplied with the tokens' scales first, which may be large.
  const int exponent = transposed_fp8::scale_exponent<T, 0>(__reduce_max_sync(0xffffffff, largest));
  CUTE_UNROLL
  for (int u = 0; u < kLatentUnits; ++u) {
    if (!scaled(u)) continue;
    transposed_fp8::write_unit<T, typename T::ScoreElement>(shared.query, row, u * kWarpSize + lane, units[u],
                                                            transposed_fp8::power_of_two(exponent));
  }
  char* rope_chunk = shared.query + T::kScaledDims / kChunkColumns * T::kQueryChunkBytes;
  if (uint32_t(rope_unit) < kRopeLanes) *reinterpret_cast<uint4*>(rope_chunk + operand_unit<T>(row, rope_unit)) = rope;
  const float scale_log2 = T::kScoresScaledLast ? 1.0f : params.scale_log2;
  if (lane == 0) shared.score_scales[row] = scale_log2 * transposed_fp8::power_of_two(-exponent);
}

// The query rows of a token that a warp brings, on their way.
template <class T>
struct QueryRows {
  static constexpr int kAtOnce = std::min(4, T::kRowTile / kConsumerWarps);  // whose reads do not wait for each other's
  // Whether all of them are asked for while the split before is finished: at 32 rows registers are short.
  static constexpr bool kAhead = T::kRowTile <= 16;

  uint4 raw[kAtOnce][kLatentUnits], rope[kAtOnce];

  // Asks for the row tile's rows from `first` on. Rows of the tile behind the last one repeat it.
  CUTE_DEVICE void ask(const DecodeParams& params, int request, int row_group, int first = 0) {
    using transposed_fp8::kUnitColumns;
    const int lane = threadIdx.x % kWarpSize;
    const auto* q = static_cast<const cutlass::bfloat16_t*>(params.q) + request * params.q_stride_batch + lane * kUnitColumns;
    const auto* q_rope =
        static_cast<const cutlass::bfloat16_t*>(params.q_rope) + request * params.q_rope_stride_batch + lane * kUnitColumns;
    const int warp = anew(threadIdx.x) / kWarpSize;
    const bool reads_rope = !T::Row::kRopeIsValue && lane < kRopeLanes && params.q_rope != nullptr;
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = min(row_group * T::kRowTile + first + i * kConsumerWarps + warp, params.heads - 1);
      const auto* from = reinterpret_cast<const uint4*>(q + head * params.q_stride_head);
      CUTE_UNROLL
      for (int u = 0; u < kLatentUnits; ++u) raw[i][u] = from[u * kWarpSize];
      rope[i] = reads_rope ? *reinterpret_cast<const uint4*>(q_rope + head * params.q_rope_stride_head) : uint4{};
    }
  }

  CUTE_DEVICE void write(Shared<T>& shared, const DecodeParams& params, int first = 0) const {
    const int warp = anew(threadIdx.x) / kWarpSize;
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      transposed_fp8::QueryUnit units[kLatentUnits];
      CUTE_UNROLL
      for (int u = 0; u < kLatentUnits; ++u) {
        units[u] = transposed_fp8::to_floats<cutlass::bfloat16_t>(raw[i][u]);
      }
      write_query<T>(shared, params, first + i * kConsumerWarps + warp, units,
                     T::Row::kRopeIsValue ? raw[i][kLatentUnits - 1] : rope[i]);
    }
  }
};

// Both consumers call it when they are done with the last split's scores; the rows are there for both on return.
template <class T>
CUTE_DEVICE void load_queries(Shared<T>& shared, const DecodeParams& params, QueryRows<T>& rows, int request, int row_group) {
  if constexpr (QueryRows<T>::kAhead) {
    rows.write(shared, params);
  } else {
#pragma unroll 1
    for (int first = 0; first < T::kRowTile; first += QueryRows<T>::kAtOnce * kConsumerWarps) {
      rows.ask(params, request, row_group, first);
      rows.write(shared, params, first);
    }
  }
  ETAP_MARKED(queries_fence, cutlass::arch::fence_view_async_shared());  // these writes, for WGMMA
  ETAP_MARKED(queries_sync, event::queries_written().sync());
}

}  // namespace etap::sparse_fp8

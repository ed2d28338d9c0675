// A split's result goes to the output or, where the request has several splits, to the workspace.
#pragma once

#include "decode/cta/splits.cuh"
#include "common/sinks.cuh"
#include "decode/layouts/common.h"

namespace etap {

// Says where a split's rows go: to the result itself, or to a partial one with a log2-sum-exp.
template <class T>
struct Destination {
  using Partial = std::conditional_t<T::kPartials == PartialLayout::kHalfPairedColumns, uint2, float4>;  // four values: see params.h
  static constexpr int kPartialFloats = kLatentDim / 4 * int(sizeof(Partial) / sizeof(float));  // that a row takes the place of

  uint16_t* out;        // float16 or bfloat16 [rows of the group, 512]; null: the partial
  float* lse;           // [rows of the group], natural logarithm
  float empty_lse;      // there of rows that see no token
  const float* sinks;   // [rows of the group]; null: none, or combine applies them
  int64_t out_stride;   // of rows that may lie apart, elements
  Partial* partial_out;  // [8 slices of 64 value dims, row_tile / 8 column blocks, 128 threads]
  float* partial_lse;   // [row_tile], log2
  int rows;             // of the group, which the row tile may exceed
  bool float16_out;

  CUTE_DEVICE Destination(const DecodeParams& params, const Split& split, int row_group) {
    const int64_t first = row_group * T::kRowTile;
    const int64_t row = int64_t(split.request) * params.rows + first;
    const int64_t partial_row = (int64_t(split.slot) * params.row_groups + row_group) * T::kRowTile;
    const bool whole = split.slot < 0;
    out_stride = params.out_stride_row;
    const int64_t place = T::kSparse ? split.request * params.out_stride_batch + first * out_stride : row * kLatentDim;
    out = whole ? static_cast<uint16_t*>(params.out) + place : nullptr;
    lse = params.lse + row;
    empty_lse = params.empty_lse;
    sinks = whole && T::kSparse && params.sinks != nullptr ? params.sinks + row_group * T::kRowTile : nullptr;
    partial_out = reinterpret_cast<Partial*>(params.partial_out + partial_row * kPartialFloats);
    partial_lse = params.partial_lse + partial_row;
    rows = min(params.rows - row_group * T::kRowTile, T::kRowTile);
    float16_out = params.float16_out;
  }

  CUTE_DEVICE int64_t row_stride() const { return T::kSparse ? out_stride : kLatentDim; }

  // Makes one word of two value dims in the result's type, which beside an FP8 cache is not the products'.
  CUTE_DEVICE uint32_t pack_out(float low, float high) const {
    if constexpr (!T::kFp8Cache) return pack<typename T::Element>(low, high);
    return float16_out ? pack<cutlass::half_t>(low, high) : pack<cutlass::bfloat16_t>(low, high);
  }

  // Returns what attention sinks leave of a row.
  CUTE_DEVICE float beside_sink(int row, float log2_sum_exp) const {
    if (!T::kSparse || sinks == nullptr || row >= rows) return 1.0f;
    return etap::beside_sink(sinks[row], log2_sum_exp);
  }

  CUTE_DEVICE void write_lse(int row, float log2_sum_exp) const {
    if (out != nullptr) {
      lse[row] = log2_sum_exp == -INFINITY ? empty_lse : log2_sum_exp * kLn2;
    } else {
      partial_lse[row] = log2_sum_exp;
    }
  }
};

// Writes the result of a split without tokens, whose request has none or fewer than the schedule was built for: zeros, and the
// log-sum-exp of rows that see none. Combine adds nothing of such a partial result (-inf), but multiplies what lies there.
template <class T>
CUTE_DEVICE void write_empty(const Destination<T>& to) {
  const bool whole = to.out != nullptr;
  float* lse = whole ? to.lse : to.partial_lse;
  const float none = whole ? to.empty_lse : -INFINITY;
  constexpr int kRowUnits = kLatentDim / 8;  // of 16 bytes
  const int units = whole ? to.rows * kRowUnits : T::kRowTile * to.kPartialFloats / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < units; i += kConsumerThreads) {
    auto* out = whole ? reinterpret_cast<uint4*>(to.out + i / kRowUnits * to.row_stride()) + i % kRowUnits
                      : reinterpret_cast<uint4*>(to.partial_out) + i;
    *out = make_uint4(0, 0, 0, 0);
  }
#pragma unroll 1
  for (int row = threadIdx.x; row < to.rows; row += kConsumerThreads) lse[row] = none;
}

}  // namespace etap

// The weighted sum of partial results by their log-sum-exps, of what a lane holds of it, and that written as the result.
#pragma once

#include <cutlass/numeric_types.h>

#include <cfloat>

#include "common/ptx.cuh"
#include "common/warp.cuh"
#include "common/sinks.cuh"
#include "params.h"

namespace etap {

// Below every log2-sum-exp, and finite, so that a split that saw no token (-inf) weighs 0 and not NaN.
constexpr float kNoSplit = -FLT_MAX;

// How a lane holds a partial, four values at a time: see PartialLayout.
//
// O^T, of which the lanes have two neighbouring rows of the output (columns of O^T) and two value dims. They are 8 apart or
// neighbours, which whoever writes the result has to say.
template <class Vector_>
struct OfColumns {
  using Vector = Vector_;
  static constexpr bool kOneRow = false;
  static constexpr int kRowLanes = 4;  // that have different rows
  CUTE_DEVICE static int row_lane() { return threadIdx.x % 4; }
  CUTE_DEVICE static int row() { return row_lane() * 2; }  // of eight, the first
};
using Columns = OfColumns<float4>;
using HalfColumns = OfColumns<uint2>;

// O, of which they have one row, whose weights have two copies, and twice two value dims.
struct Rows {
  using Vector = float4;
  static constexpr bool kOneRow = true;
  static constexpr int kRowLanes = 8;
  CUTE_DEVICE static int row_lane() { return threadIdx.x % kWarpSize / 4; }
  CUTE_DEVICE static int row() { return row_lane(); }
};

// What a lane holds of a sum. Each step rounds as it is written, whatever the compiler makes of what surrounds it: the kernels' forms
// give the same bits.
struct Sum {
  float4 value = {0.0f, 0.0f, 0.0f, 0.0f};

  CUTE_DEVICE void scale(float2 weight) {
    value = {__fmul_rn(value.x, weight.x), __fmul_rn(value.y, weight.y), __fmul_rn(value.z, weight.x), __fmul_rn(value.w, weight.y)};
  }
  CUTE_DEVICE void add(float2 weight, float4 more) {
    value = {__fmaf_rn(weight.x, more.x, value.x), __fmaf_rn(weight.y, more.y, value.y), __fmaf_rn(weight.x, more.z, value.z),
             __fmaf_rn(weight.y, more.w, value.w)};
  }
};

// Of each of the lane's two rows: a reference at or above every log2-sum-exp seen, and the splits' sum against it.
struct Totals {
  float2 reference = {kNoSplit, kNoSplit};
  float2 sum = {0.0f, 0.0f};

  // Weigh what was summed so far for a reference that may be larger; returns the weight.
  CUTE_DEVICE float2 raise(float2 maximum) {
    maximum = {fmaxf(reference.x, maximum.x), fmaxf(reference.y, maximum.y)};
    const float2 weight = {ptx::ex2(reference.x - maximum.x), ptx::ex2(reference.y - maximum.y)};
    reference = maximum;
    sum = {__fmul_rn(sum.x, weight.x), __fmul_rn(sum.y, weight.y)};
    return weight;
  }
};

// What a lane's two rows are multiplied with at last: 1 over the splits' sum, which is at least 1, that of the reference, or 0. An
// attention sink is one more term of that sum. The rows are a token's heads.
template <class Form>
CUTE_DEVICE float2 last_scale(const ResultParams& params, const Totals& totals, int first_row) {
  float2 sum = totals.sum;
  if (params.sinks != nullptr) {
    const int low = first_row + Form::row(), high = Form::kOneRow ? low : low + 1;
    const auto term = [&](int row, float reference) { return ptx::ex2(__fmaf_rn(params.sinks[row], kLog2OfE, -reference)); };
    if (low < params.rows) sum.x = __fadd_rn(sum.x, term(low, totals.reference.x));
    if (high < params.rows) sum.y = __fadd_rn(sum.y, term(high, totals.reference.y));
  }
  return {sum.x == 0.0f ? 0.0f : __fdividef(1.0f, sum.x), sum.y == 0.0f ? 0.0f : __fdividef(1.0f, sum.y)};
}

// Write a lane's part of the result, two rows of it transposed between the lanes to rows of 8 value dims. paired: the two value dims
// are neighbours.
template <class Form>
CUTE_DEVICE void write_rows(const ResultParams& params, const Sum& sum, const Totals& totals, int request, int first_row, int dim,
                            bool paired) {
  const int lane = threadIdx.x % kWarpSize;
  const float2 scale = last_scale<Form>(params, totals, first_row);
  const auto pack_out = [&](float a, float b) {
    return params.float16_out ? pack<cutlass::half_t>(a, b) : pack<cutlass::bfloat16_t>(a, b);
  };
  uint32_t low = pack_out(sum.value.x * scale.x, sum.value.y * scale.y);
  uint32_t high = pack_out(sum.value.z * scale.x, sum.value.w * scale.y);
  if constexpr (!Form::kOneRow) {
    low = ptx::movmatrix_trans(low);
    high = ptx::movmatrix_trans(high);
  }
  const int row = first_row + lane / 4;
  auto* out = static_cast<uint16_t*>(params.out) + dim;
  out += request * params.out_stride_batch + row * params.out_stride_row;
  paired = paired && !Form::kOneRow;
  const uint2 dims = paired ? neighbouring_dims<true>(low, high) : neighbouring_dims<false>(low, high);
  if (row < params.rows) *reinterpret_cast<uint2*>(out + (paired ? lane_dim<true>(lane) : lane_dim<false>(lane))) = dims;
}

template <class Form>
CUTE_DEVICE void write_lse(const ResultParams& params, const Totals& totals, int request, int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + (Form::kOneRow ? lane / 4 : lane * 2);
  float* lse = params.lse + int64_t(request) * params.rows + row;
  // A sum of 0 has the logarithm -inf. Asked of the sum instead, the compiler branches, and spills where registers are few.
  const auto natural = [&](float reference, float sum) {
    const float value = (reference + __log2f(sum)) * kLn2;
    return value == -INFINITY ? params.empty_lse : value;
  };
  if ((Form::kOneRow ? lane % 4 == 0 : lane < 4) && row < params.rows) lse[0] = natural(totals.reference.x, totals.sum.x);
  if (!Form::kOneRow && lane < 4 && row + 1 < params.rows) lse[1] = natural(totals.reference.y, totals.sum.y);
}

// Four values of a partial result: float32, or bfloat16.
CUTE_DEVICE float4 widened(float4 vector) { return vector; }
CUTE_DEVICE float4 widened(uint2 vector) {
  const float2 low = unpack<cutlass::bfloat16_t>(vector.x), high = unpack<cutlass::bfloat16_t>(vector.y);
  return {low.x, low.y, high.x, high.y};
}

// Splits on their way: log-sum-exps of the lane's rows, and values of kTasks tasks.
template <class Form, int kAhead, int kTasks>
struct Flight {
  float2 lse[kAhead];
  typename Form::Vector value[kAhead][kTasks];

  CUTE_DEVICE void add_to(Totals& totals, Sum (&sums)[kTasks]) const {
    float2 maximum = lse[0];
#pragma unroll
    for (int a = 1; a < kAhead; ++a) maximum = {fmaxf(maximum.x, lse[a].x), fmaxf(maximum.y, lse[a].y)};
    const float2 rescale = totals.raise(maximum);
#pragma unroll
    for (int t = 0; t < kTasks; ++t) sums[t].scale(rescale);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const float2 weight = {ptx::ex2(lse[a].x - totals.reference.x), ptx::ex2(lse[a].y - totals.reference.y)};
      totals.sum = {__fadd_rn(totals.sum.x, weight.x), __fadd_rn(totals.sum.y, weight.y)};
#pragma unroll
      for (int t = 0; t < kTasks; ++t) sums[t].add(weight, widened(value[a][t]));
    }
  }
};

}  // namespace etap

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

// Each step rounds as it is written, whatever the compiler makes of what surrounds it: the kernels' forms give the same bits.
//
// What a lane holds of a partial: two neighbouring rows of the output (columns of O^T) and two value dims, 8 apart; or,
// where the rows were on WGMMA's M (one_row), one row, of which the weights have two copies, and twice two value dims.
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

// Of eight rows the one that a lane holds, or the first of its two.
CUTE_DEVICE int row_of_lane(bool one_row) {
  const int lane = threadIdx.x % kWarpSize;
  return one_row ? lane / 4 : lane % 4 * 2;
}

// What a lane's two rows are multiplied with at last: 1 over the splits' sum, which is at least 1, that of the reference, or 0. An
// attention sink is one more term of that sum. The rows are a token's heads.
CUTE_DEVICE float2 last_scale(const ResultParams& params, bool one_row, const Totals& totals, int first_row) {
  float2 sum = totals.sum;
  if (params.sinks != nullptr) {
    const int low = first_row + row_of_lane(one_row), high = one_row ? low : low + 1;
    const auto term = [&](int row, float reference) { return ptx::ex2(__fmaf_rn(params.sinks[row], kLog2OfE, -reference)); };
    if (low < params.rows) sum.x = __fadd_rn(sum.x, term(low, totals.reference.x));
    if (high < params.rows) sum.y = __fadd_rn(sum.y, term(high, totals.reference.y));
  }
  return {sum.x == 0.0f ? 0.0f : __fdividef(1.0f, sum.x), sum.y == 0.0f ? 0.0f : __fdividef(1.0f, sum.y)};
}

// Write a lane's part of the result, two rows of it transposed between the lanes to rows of 8 value dims.
CUTE_DEVICE void write_rows(const ResultParams& params, bool one_row, const Sum& sum, const Totals& totals, int request,
                            int first_row, int dim) {
  const int lane = threadIdx.x % kWarpSize;
  const float2 scale = last_scale(params, one_row, totals, first_row);
  const auto pack_out = [&](float a, float b) {
    return params.float16_out ? pack<cutlass::half_t>(a, b) : pack<cutlass::bfloat16_t>(a, b);
  };
  uint32_t low = pack_out(sum.value.x * scale.x, sum.value.y * scale.y);
  uint32_t high = pack_out(sum.value.z * scale.x, sum.value.w * scale.y);
  if (!one_row) {
    low = ptx::movmatrix_trans(low);
    high = ptx::movmatrix_trans(high);
  }
  const int row = first_row + lane / 4;
  auto* out = static_cast<uint16_t*>(params.out) + dim;
  out += request * params.out_stride_batch + row * params.out_stride_row;
  const bool paired = params.paired_dims;
  const uint2 dims = paired ? neighbouring_dims<true>(low, high) : neighbouring_dims<false>(low, high);
  if (row < params.rows) *reinterpret_cast<uint2*>(out + (paired ? lane_dim<true>(lane) : lane_dim<false>(lane))) = dims;
}

CUTE_DEVICE void write_lse(const ResultParams& params, bool one_row, const Totals& totals, int request, int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + (one_row ? lane / 4 : lane * 2);
  float* lse = params.lse + int64_t(request) * params.rows + row;
  // A sum of 0 has the logarithm -inf. Asked of the sum instead, the compiler branches, and spills where registers are few.
  const auto natural = [&](float reference, float sum) {
    const float value = (reference + __log2f(sum)) * kLn2;
    return value == -INFINITY ? params.empty_lse : value;
  };
  if ((one_row ? lane % 4 == 0 : lane < 4) && row < params.rows) lse[0] = natural(totals.reference.x, totals.sum.x);
  if (!one_row && lane < 4 && row + 1 < params.rows) lse[1] = natural(totals.reference.y, totals.sum.y);
}

// Four values of a partial result: float32, or bfloat16 (see half_partials).
CUTE_DEVICE float4 widened(float4 vector) { return vector; }
CUTE_DEVICE float4 widened(uint2 vector) {
  const float2 low = unpack<cutlass::bfloat16_t>(vector.x), high = unpack<cutlass::bfloat16_t>(vector.y);
  return {low.x, low.y, high.x, high.y};
}

// Splits on their way, log-sum-exps and values, so that nothing waits for anything but memory.
template <class Vector, int kAhead, int kTasks>
struct Flight {
  float2 lse[kAhead];
  Vector value[kAhead][kTasks];

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

// Attention sinks: one more logit a head in the softmax's denominator, which has no value.
#pragma once

#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace etap {

constexpr float kLog2OfE = 1.4426950408889634f;

// 1 / (1 + e^sink / sum of e^score): what an output without the sink is multiplied with. Without a sink's or a token's share
// (-inf) nothing of the other is left over or lost.
CUTE_DEVICE float beside_sink(float sink, float log2_sum_exp) {
  const float above = sink * kLog2OfE - log2_sum_exp;
  return sink == -INFINITY ? 1.0f : 1.0f / (1.0f + ptx::ex2(above));
}

}  // namespace etap

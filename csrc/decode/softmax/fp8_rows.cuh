// The softmax is online, along the rows of S; P then lies where both consumers multiply it.
#pragma once

#include <cuda_fp16.h>

#include <cute/arch/copy_sm90.hpp>

#include "decode/layouts/mixed_major.h"
#include "decode/softmax/rows.cuh"

namespace etap::mixed_major {

// The first of a thread's two rows of S.
CUTE_DEVICE int first_row() { return fragment_row(anew(threadIdx.x % kGroupThreads)); }

using query_major::RowState;

// Four e4m3 values of a row a word: tokens t, t + 8, t + 1, t + 9 of each 16, in the order of V^T's operand.
template <class T>
using Probabilities = uint32_t[2][T::kWords];

// Computes P = 2^(scale * S - reference), rounded, of a tile whose references may be renewed: see query_major/softmax.cuh.
template <class T>
CUTE_DEVICE bool exponentiate(const Shared<T>& shared, const typename T::Scores& s, RowState& state, Probabilities<T>& p,
                              float (&factor)[2]) {
  const float scale[2] = {shared.score_scales[first_row()], shared.score_scales[first_row() + 8]};  // to the log2 domain
  factor[0] = factor[1] = 1.0f;
  const bool renew =
      query_major::renew_references(s, scale, T::kLargestExponent, T::kProbabilityShift, state, factor);
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    float sum = 0.0f;
    __half2 rounded_sums;  // 16 values of at most 448: float16 holds their sum more exactly than e4m3 does each
    CUTE_UNROLL
    for (int word = 0; word < T::kWords; ++word) {
      const auto exponential = [&](int block, int bit) {
        return ptx::ex2(fmaf(s(8 * word + 4 * block + 2 * h + bit), scale[h], -state.reference[h]));
      };
      const float a = exponential(0, 0), b = exponential(1, 0), c = exponential(0, 1), d = exponential(1, 1);
      p[h][word] = pack_four<typename T::Element>(a, b, c, d);
      sum += (a + b) + (c + d);
      const uint2 rounded = transposed_fp8::to_halves(p[h][word]);
      const __half2 pairs = __hadd2(reinterpret_cast<const __half2&>(rounded.x), reinterpret_cast<const __half2&>(rounded.y));
      rounded_sums = word == 0 ? pairs : __hadd2(rounded_sums, pairs);
    }
    state.sums[h] += sum;
    state.rounded_sums[h] += __low2float(rounded_sums) + __high2float(rounded_sums);
  }
  return renew;
}

// Writes P, [64 rows x 64 tokens] in the swizzle of operand B, over rope, and tells the other warpgroup of it. `tile` is the split's.
template <class T>
CUTE_DEVICE void publish_probabilities(Shared<T>& shared, char* probabilities, int group, int tile, const RowState& state,
                           const Probabilities<T>& p, bool renewed, const float (&factor)[2]) {
  const int lane = anew(threadIdx.x % kWarpSize);
  const int row = first_row() - lane / 4 + lane % 8;  // that the lane points at, of unit lane / 8
  char* const target = probabilities + row * T::kOperandLine + (lane / 8 ^ swizzle<T::kOperandLine>(row)) * kUnitBytes;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    auto& units = *reinterpret_cast<cute::uint128_t*>(target + h * 8 * T::kOperandLine);
    cute::SM90_U32x4_STSM_N::copy(p[h][0], p[h][1], p[h][2], p[h][3], units);
    if (lane % 4 == 0) shared.rows[tile % T::kTilesTold][first_row() + 8 * h] = {state.reference[h], factor[h]};
  }
  if (lane == 0) shared.renewed[tile % T::kTilesTold][first_row() / 16] = renewed;
  ETAP_MARKED(published_fence, cutlass::arch::fence_view_async_shared());  // P, for WGMMA
  event::tile_written(group).arrive();
}

// Waits for P of a tile of the other warpgroup, and takes its references.
template <class T>
CUTE_DEVICE void take_probabilities(const Shared<T>& shared, int owner, int tile, RowState& state) {
  ETAP_MARKED(tile_sync, event::tile_written(owner).sync());
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) state.raise(h, shared.rows[tile % T::kTilesTold][first_row() + 8 * h].reference);
}

}  // namespace etap::mixed_major

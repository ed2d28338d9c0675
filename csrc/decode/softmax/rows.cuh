// The softmax is online, along the rows of S; P then goes to the other consumer.
#pragma once

#include <cuda_fp16.h>

#include <cute/arch/copy_sm90.hpp>

#include "decode/cta/splits.cuh"
#include "decode/layouts/mixed_major.h"
#include "decode/layouts/query_major.h"
#include "decode/layouts/tile_mask.cuh"
#include "decode/mma/registers.cuh"

namespace etap::query_major {

// A thread keeps this of its two rows, r and r + 8, over a split. Sums are of its own tokens of the tiles its warpgroup owns.
struct RowState {
  float reference[2];
  float sums[2];
  float rounded_sums[2];

  CUTE_DEVICE RowState() {
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      reference[h] = kNoMaximum;
      sums[h] = rounded_sums[h] = 0.0f;
    }
  }

  // Takes a reference that is at least the old one; what was summed so far is to be multiplied with the result.
  CUTE_DEVICE float raise(int h, float to) {
    const float factor = ptx::ex2(reference[h] - to);
    reference[h] = to;
    sums[h] *= factor;
    rounded_sums[h] *= factor;
    return factor;
  }
};

// How many tokens a thread's two rows may see.
struct VisibleTokens {
  int of[2];

  CUTE_DEVICE VisibleTokens(const DecodeParams& params, const Split& split, int row_group) {
    const int row = row_group * kMaxRowTile + threadIdx.x % kGroupThreads / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) of[h] = split.seq_len - params.s_q + min((row + 8 * h) / params.heads, params.s_q - 1) + 1;
  }
};

// Hides the tokens that a row must not see: those behind the request's end, and for s_q > 1 those behind the row's own.
template <class T>
CUTE_DEVICE void mask_scores(const VisibleTokens& visible, int tile, typename T::Scores& s) {
  const int token = tile * kTileTokens + threadIdx.x % 4 * 2;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(s); ++i) {
    if (token + i / 4 * 8 + i % 2 >= visible.of[i / 2 % 2]) s(i) = -INFINITY;
  }
}

// Renews the rows' references, each `shift` below its maximum, when a score lies too far above one. It returns true when O is to be
// multiplied with `factor`.
template <class Scores>
CUTE_DEVICE bool renew_references(const Scores& s, const float (&scale)[2], float largest_exponent, float shift, RowState& state,
                                  float (&factor)[2]) {
  float maximum[2] = {s(0), s(2)};
  CUTE_UNROLL
  for (int i = 0; i < cute::size(s); ++i) maximum[i / 2 % 2] = fmaxf(maximum[i / 2 % 2], s(i));
  bool exceeds = false;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) exceeds |= fmaf(maximum[h], scale[h], -state.reference[h]) > largest_exponent;
  const bool renew = __any_sync(0xffffffff, exceeds);
  if (renew) {
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffff, maximum[h], 1));
      maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffff, maximum[h], 2));
      factor[h] = state.raise(h, fmaxf(state.reference[h], maximum[h] * scale[h] - shift));
    }
  }
  return renew;
}

// Computes P = 2^(scale * S - reference), rounded, of a tile whose references may be renewed.
template <class T>
CUTE_DEVICE bool exponentiate(const typename T::Scores& s, float scale, RowState& state, uint32_t (&p)[T::kWords],
                              float (&factor)[2]) {
  const bool renew = renew_references(s, {scale, scale}, kLazyMaximum, 0.0f, state, factor);
  float sums[2] = {0.0f, 0.0f};
  float rounded_sums[2] = {0.0f, 0.0f};
  CUTE_UNROLL
  for (int word = 0; word < T::kWords; ++word) {
    const int h = word % 2;
    const float low = ptx::ex2(fmaf(s(2 * word), scale, -state.reference[h]));
    const float high = ptx::ex2(fmaf(s(2 * word + 1), scale, -state.reference[h]));
    p[word] = pack<typename T::Element>(low, high);
    const float2 rounded = unpack<typename T::Element>(p[word]);
    sums[h] += low + high;
    rounded_sums[h] += rounded.x + rounded.y;
  }
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    state.sums[h] += sums[h];
    state.rounded_sums[h] += rounded_sums[h];
  }
  return renew;
}

// Hands P to the same thread of the other warpgroup.
template <class T>
CUTE_DEVICE void publish_probabilities(Shared<T>& shared, int group, const RowState& state, const uint32_t (&p)[T::kWords]) {
  const int thread = threadIdx.x % kGroupThreads;
  CUTE_UNROLL
  for (int i = 0; i < T::kWords / 4; ++i) {
    shared.probabilities[i][thread] = make_uint4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  }
  if (thread % 4 == 0) shared.references[thread / 4] = make_float2(state.reference[0], state.reference[1]);
  event::row_probabilities_written(group).arrive();
}

// Takes P of the other warpgroup's tile, and its reference. It returns true when O is to be multiplied with `factor`.
template <class T>
CUTE_DEVICE bool take_probabilities(Shared<T>& shared, int owner, RowState& state, uint32_t (&p)[T::kWords], float (&factor)[2]) {
  const int thread = threadIdx.x % kGroupThreads;
  ETAP_MARKED(published_sync, event::row_probabilities_written(owner).sync());
  CUTE_UNROLL
  for (int i = 0; i < T::kWords / 4; ++i) {
    const uint4 four = shared.probabilities[i][thread];
    p[4 * i] = four.x;
    p[4 * i + 1] = four.y;
    p[4 * i + 2] = four.z;
    p[4 * i + 3] = four.w;
  }
  const float2 reference = shared.references[thread / 4];
  __syncwarp();  // all lanes have read, before a lane's next P takes the place of it
  const bool renewed = __any_sync(0xffffffff, reference.x != state.reference[0] || reference.y != state.reference[1]);
  factor[0] = state.raise(0, reference.x);
  factor[1] = state.raise(1, reference.y);
  return renewed;
}

}  // namespace etap::query_major

namespace etap::mixed_major {

// The first of a thread's two rows of S.
CUTE_DEVICE int first_row() { return fragment_row(anew(threadIdx.x % kGroupThreads)); }

using query_major::RowState;

// Four e4m3 values of a row a word: tokens t, t + 8, t + 1, t + 9 of each 16, in the order of V^T's operand.
template <class T>
using Probabilities = uint32_t[2][T::kWords];

// Computes P = 2^(scale * S - reference), rounded, of a tile whose references may be renewed: see query_major above.
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

// Writes P, [64 rows x 64 tokens] in the swizzle of operand B, over rope, and tells the other warpgroup of it. `tile` is the
// split's.
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

namespace etap::sparse {

// Hides the scores of entries that name no row, in S.
template <class Scores>
CUTE_DEVICE void hide_invalid_columns(const TileMask& mask, Scores& s) {
  const int lane = threadIdx.x % kWarpSize;
  const int first = lane % 4 / 2 * 8 + lane % 2 * 2;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(s); ++i) {
    const int eight = i / 4;  // tokens
    const uint32_t bit = mask.word(eight / 2) >> (first + eight % 2 * 16 + i % 2) & 1;
    if (!bit) s(i) = -INFINITY;
  }
}

}  // namespace etap::sparse

// The softmax is online, down the columns of S^T, against a reference maximum that is renewed only when it must be.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "decode/cta/splits.cuh"
#include "decode/layouts/tile_mask.cuh"
#include "decode/mma/shared.cuh"

namespace etap::transposed {

// The running state of a warpgroup's columns of S^T, spread over its threads as the fragment is.
template <class T>
struct Softmax {
  static constexpr int kBlocks = T::kScoreColumns / 8;
  static constexpr int kColumns = 2 * kBlocks;

  Shared<T>& shared;
  const int group;
  typename T::ScoreScales scale;  // of a column, to the log2 domain
  float inverse_value_scale;      // 1 / what V's values are multiplied with
  float reference[kColumns];      // equal in all threads of a column
  float sums[kColumns];           // of P^T, this thread's tokens only: for the log-sum-exp
  float rounded_sums[kColumns];   // of P^T as the products see it: what O^T is divided by
  float tile_sums[kColumns];      // this tile's share of `sums`
  // P^T of this tile as the products see it: [column block][token bit] of two columns each, or, in 8 bits,
  // [column block] of the two tokens of both columns.
  static constexpr bool kEightBits = sizeof(typename T::Probability) == 1;
  static constexpr int kWords = kEightBits ? kBlocks : 2 * kBlocks;
  uint32_t rounded[kWords];

  CUTE_DEVICE Softmax(Shared<T>& shared, float scale_log2, float value_scale, int group)
      : shared(shared), group(group), scale(shared, scale_log2, T::first_column(group)),
        inverse_value_scale(1.0f / value_scale) {}

  // Begins a split, when its queries are there.
  CUTE_DEVICE void reset() {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      reference[i] = kNoMaximum;
      sums[i] = rounded_sums[i] = 0.0f;
      scale.load(i);
    }
  }

  // P^T = 2^(scale * S^T - reference), rounded; true when an exponent is too far above the reference.
  CUTE_DEVICE bool exponentiate(const ScoreFragment<T>& st) {
    bool exceeds = false;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int column = i / 2 * 2;
      const float low = fmaf(st(2 * i), scale(column), -reference[column]);
      const float high = fmaf(st(2 * i + 1), scale(column + 1), -reference[column + 1]);
      exceeds |= low > T::kLargestExponent || high > T::kLargestExponent;
      const float p_low = ptx::ex2(low);
      const float p_high = ptx::ex2(high);
      if constexpr (!kEightBits) {
        rounded[i] = pack<typename T::Probability>(p_low, p_high);
      } else if (i % 2 == 1) {  // the sums have the first token's alone
        rounded[i / 2] = pack_four<typename T::Probability>(tile_sums[column], p_low, tile_sums[column + 1], p_high);
      }
      tile_sums[column] = i % 2 == 0 ? p_low : tile_sums[column] + p_low;
      tile_sums[column + 1] = i % 2 == 0 ? p_high : tile_sums[column + 1] + p_high;
    }
    return exceeds;
  }

  // Writes P^T with its tokens contiguous, [rows x 64 tokens] in the swizzle of operand B.
  CUTE_DEVICE void store(char* probabilities) const {
    if constexpr (kEightBits) {
      store_fours(probabilities);
    } else {
      store_pairs(rounded, probabilities);
    }
    // P^T (and zeroed V tokens), for WGMMA once all threads have synced.
    ETAP_MARKED(probabilities_fence, cutlass::arch::fence_view_async_shared());
  }

  // A warp's 16 tokens are two units; lanes 0 to 7 point at the first of eight columns, the next eight at the second, the
  // other 16 at those of the next column block.
  CUTE_DEVICE void store_pairs(const uint32_t (&words)[kWords], char* probabilities) const {
    constexpr int kBlockBytes = 8 * kTileTokens * 2;
    const int warp = threadIdx.x / kWarpSize % kWarpsPerGroup;
    const int lane = threadIdx.x % kWarpSize;
    const int row = lane % 8;
    const int token_unit = (warp * 2 + lane / 8 % 2) ^ swizzle<128>(row);
    char* target = probabilities + T::first_column(group) * kTileTokens * 2 + lane / 16 * kBlockBytes + row * 128 +
                   token_unit * kUnitBytes;
    if constexpr (kBlocks == 1) {
      target -= lane / 16 * kBlockBytes;
      cute::SM90_U16x4_STSM_T::copy(words[0], words[1], *reinterpret_cast<cute::uint128_t*>(target));
    } else {
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; block += 2) {
        cute::SM90_U16x8_STSM_T::copy(words[2 * block], words[2 * block + 1], words[2 * block + 2],
                                      words[2 * block + 3],
                                      *reinterpret_cast<cute::uint128_t*>(target + block * kBlockBytes));
      }
    }
  }

  // In 8 bits a warp's 16 tokens are one unit, in the order 0, 8, 1, 9, ...: as V^T's operand has them.
  CUTE_DEVICE void store_fours(char* probabilities) const {
    const int warp = threadIdx.x / kWarpSize % kWarpsPerGroup;
    const int row = T::first_column(group) + threadIdx.x % (8 * kBlocks) % kWarpSize;
    auto& target = *reinterpret_cast<cute::uint128_t*>(probabilities + row * 64 + (warp ^ swizzle<64>(row)) * kUnitBytes);
    if constexpr (kBlocks == 1) {
      cute::SM90_U16x2_STSM_T::copy(rounded[0], target);
    } else if constexpr (kBlocks == 2) {
      cute::SM90_U16x4_STSM_T::copy(rounded[0], rounded[1], target);
    } else {
      cute::SM90_U16x8_STSM_T::copy(rounded[0], rounded[1], rounded[2], rounded[3], target);
    }
  }

  // Takes this tile's column maxima into the reference and rescales the sums; O^T is to be multiplied with `correction`. All
  // threads of the warpgroup call it.
  CUTE_DEVICE void renew(const ScoreFragment<T>& st, float (&correction)[kColumns]) {
    const int warp = threadIdx.x / kWarpSize % kWarpsPerGroup;
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const int at = i / 2 * 4 + i % 2;
      float maximum = fmaxf(st(at), st(at + 2)) * scale(i) - T::kProbabilityShift;
      CUTE_UNROLL
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, lanes));
      }
      if (threadIdx.x % kWarpSize < 4) shared.maximum(group, warp, fragment_column(i / 2, i % 2)) = maximum;
    }
    event::maxima_written(group).sync();
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const int column = fragment_column(i / 2, i % 2);
      float maximum = reference[i];
      CUTE_UNROLL
      for (int w = 0; w < kWarpsPerGroup; ++w) maximum = fmaxf(maximum, shared.maximum(group, w, column));
      correction[i] = ptx::ex2(reference[i] - maximum);
      reference[i] = maximum;
      sums[i] *= correction[i];
      rounded_sums[i] *= correction[i];
    }
  }

  // Ends a split.
  CUTE_DEVICE void finish() {}

  // O^T is divided by the sum of what the products see, so that the rounding of a dominating key cancels; the
  // log-sum-exp takes the sum before rounding.
  CUTE_DEVICE void accumulate() {
    accumulate_unrounded();
    accumulate_rounded<typename T::Probability>();
  }
  CUTE_DEVICE void accumulate_unrounded() {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) sums[i] += tile_sums[i];
  }
  template <class E>
  CUTE_DEVICE void accumulate_rounded() {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (!kEightBits) {
        const float2 pair = unpack<E>(rounded[i]);
        rounded_sums[i / 2 * 2] += pair.x;
        rounded_sums[i / 2 * 2 + 1] += pair.y;
      } else {
        const float4 four = unpack_four<E>(rounded[i]);
        rounded_sums[2 * i] += four.x + four.y;
        rounded_sums[2 * i + 1] += four.z + four.w;
      }
    }
  }
};

// Hides the tokens a row must not see: those behind the request's end, and for s_q > 1 those behind the row's own token.
template <class T>
CUTE_DEVICE void mask_scores(const DecodeParams& params, const Split& split, int tile, int row_group, int group,
                             ScoreFragment<T>& st) {
  const int thread = threadIdx.x % kGroupThreads;
  const int token = tile * kTileTokens + thread / kWarpSize * 16 + thread % kWarpSize / 4;
  const int first_row = row_group * T::kRowTile + T::first_column(group);
  CUTE_UNROLL
  for (int i = 0; i < Softmax<T>::kColumns; ++i) {
    const int query_token = min((first_row + fragment_column(i / 2, i % 2)) / params.heads, params.s_q - 1);
    const int visible = split.seq_len - params.s_q + query_token + 1;
    const int at = i / 2 * 4 + i % 2;
    if (token >= visible) st(at) = -INFINITY;
    if (token + 8 >= visible) st(at + 2) = -INFINITY;
  }
}

// Writes P^T of a tile for the threads that sync over it. `first`: it is their first in the split. rescale(correction) is called
// where O^T is to be multiplied with that for a new reference.
template <class T, class Rescale>
CUTE_DEVICE void write_probabilities(Softmax<T>& softmax, const ScoreFragment<T>& st, bool first, char* probabilities,
                                     Rescale&& rescale) {
  const NamedBarrier written = event::probabilities_written<T>(softmax.group);
  bool renew = first;
  if (!renew) {
    const bool exceeds = softmax.exponentiate(st);
    softmax.store(probabilities);
    ETAP_MARKED(probabilities_sync, renew = written.any(exceeds));
  }
  if (renew) {
    float correction[Softmax<T>::kColumns];
    softmax.renew(st, correction);
    rescale(correction);
    softmax.exponentiate(st);
    softmax.store(probabilities);
    written.sync();
  }
}

// Zeros V's tokens behind the request's end: they may hold NaN, and 0 * NaN is NaN.
template <class T>
CUTE_DEVICE void zero_value_tail(Shared<T>& shared, KeyPosition<T> at, const Split& split, int tile, int first_chunk = 0,
                                 int end_chunk = T::kTileValueChunks) {
  const int valid = split.seq_len - tile * kTileTokens;
  const int thread = anew(threadIdx.x % T::kScoreThreads);
  constexpr int kLineBytes = 128;  // of a chunk's token
  const int units = (kTileTokens - valid) * (kLineBytes / kUnitBytes);
#pragma unroll 1
  for (int i = thread; i < units; i += T::kScoreThreads) {
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      char* tail = shared.ring + at.ahead(chunk / T::kChunksPerStage).stage * T::kStageBytes +
                   (chunk % T::kChunksPerStage * kTileTokens + valid) * kLineBytes;
      reinterpret_cast<uint4*>(tail)[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace etap::transposed

namespace etap::sparse {

// Hides the scores of entries that name no row, in S^T: its fragment holds tokens as layouts/transposed.h says.
template <class Scores>
CUTE_DEVICE void hide_invalid_rows(const TileMask& mask, Scores& st) {
  const uint32_t valid = valid_tokens(mask);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(st); ++i) {
    const uint32_t bit = valid >> (i / 2 % 2 * 16) & 1;
    if (!bit) st(i) = -INFINITY;
  }
}

}  // namespace etap::sparse

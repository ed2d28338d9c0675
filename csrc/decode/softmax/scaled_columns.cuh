// The softmax of columns.cuh, but P^T is stored once for each group of columns, times the tokens' scales, and
// as it is where the rope part is value dims, too.
#pragma once

#include "decode/mma/fp8_rows.cuh"
#include "decode/softmax/columns.cuh"

namespace etap::sparse_fp8 {

template <class T>
struct ScaledSoftmax : transposed::Softmax<T> {
  using Base = transposed::Softmax<T>;
  using Base::Base, Base::kBlocks, Base::kColumns, Base::kWords, Base::reference, Base::rounded, Base::sums, Base::rounded_sums,
      Base::tile_sums;

  float p[4 * kBlocks];  // as the fragment of S^T has them

  // P^T = 2^(S^T - reference); true when an exponent is too far above the reference.
  CUTE_DEVICE bool exponentiate(const transposed::ScoreFragment<T>& st) {
    bool exceeds = false;
    CUTE_UNROLL
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const int column = i / 4 * 2 + i % 2;
      const float exponent = st(i) - reference[column];
      exceeds |= exponent > T::kLargestExponent;
      p[i] = ptx::ex2(exponent);
      tile_sums[column] = i / 2 % 2 == 0 ? p[i] : tile_sums[column] + p[i];
    }
    return exceeds;
  }

  // As E, times the scales and the factor. Where the rope part is value dims, P^T is rounded to its type first: powers of two round
  // nothing, so that all products see the same P.
  template <class E>
  CUTE_DEVICE void store(const TokenScales<T>& scales, char* probabilities, float factor = 1.0f) {
    if constexpr (T::Row::kRopeIsValue) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) rounded[i] = pack<typename T::RopeElement>(p[2 * i], p[2 * i + 1]);
      Base::store_pairs(rounded, probabilities + T::Row::kScales * T::kScaledBytes);
    }
    CUTE_UNROLL
    for (int scaled = 0; scaled < T::Row::kScales; ++scaled) {
      const float scale[2] = {scales.of(0, scaled) * factor, scales.of(1, scaled) * factor};
      uint32_t words[kWords];
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) {
        const float2 pair = T::Row::kRopeIsValue ? unpack<typename T::RopeElement>(rounded[i]) : make_float2(p[2 * i], p[2 * i + 1]);
        words[i] = pack<E>(pair.x * scale[i % 2], pair.y * scale[i % 2]);
      }
      Base::store_pairs(words, probabilities + scaled * T::kScaledBytes);
    }
    ETAP_MARKED(probabilities_fence, cutlass::arch::fence_view_async_shared());
  }

  CUTE_DEVICE void accumulate() {
    Base::accumulate_unrounded();
    if constexpr (T::Row::kRopeIsValue) Base::template accumulate_rounded<typename T::RopeElement>();
  }

  // At the end of a split. Where each scaled P^T is rounded in its own way, O^T is divided by the sum before rounding.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      if (!T::Row::kRopeIsValue) rounded_sums[i] = sums[i];
    }
  }
};

// Writes P^T of a tile, times the tokens' scales, as transposed::write_probabilities does; returns what V of the wide type is
// multiplied with if P^T is of that, else 0.
template <class T, class Rescale>
CUTE_DEVICE uint32_t write_probabilities(ScaledSoftmax<T>& softmax, const transposed::ScoreFragment<T>& st,
                                     const TokenScales<T>& scales, bool first, char* probabilities,
                                     Rescale&& rescale) {
  const NamedBarrier written = event::probabilities_written<T>(softmax.group);
  bool renew = first, wide = scales.beyond(T::kLeastScale, T::kLargestScale);
  uint32_t factor = 0;
  if (!renew) {
    const bool exceeds = softmax.exponentiate(st);
    softmax.template store<typename T::Probability>(scales, probabilities);
    ETAP_MARKED(probabilities_sync, renew = written.any(exceeds || wide));
  }
  if (renew) {
    float correction[transposed::Softmax<T>::kColumns];
    softmax.renew(st, correction);
    rescale(correction);
    softmax.exponentiate(st);
    wide = written.any(wide);
    if (wide) {
      const bool widest = written.any(scales.beyond(-127, T::kWidestScale));
      factor = widest ? transposed_fp8::kFactorTimes128 : kWidenedBias;
      softmax.template store<typename T::WideProbability>(scales, probabilities, widest ? 0x1p-7f : 1.0f);
    } else {
      softmax.template store<typename T::Probability>(scales, probabilities);
    }
    written.sync();
  }
  return factor;
}

}  // namespace etap::sparse_fp8

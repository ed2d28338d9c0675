// This is the softmax of transposed/softmax.cuh, but P^T is stored four times: times the scales of each 128 columns.
#pragma once

#include "decode/sparse_fp8/products.cuh"
#include "decode/transposed/softmax.cuh"

namespace etap::sparse_fp8 {

template <class T>
struct ScaledSoftmax : transposed::Softmax<T> {
  using Base = transposed::Softmax<T>;
  using Base::Base, Base::kBlocks, Base::kColumns, Base::reference, Base::rounded, Base::sums, Base::rounded_sums, Base::tile_sums;

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

  template <class E>
  CUTE_DEVICE void store(const TokenScales& scales, char* probabilities) {
    CUTE_UNROLL
    for (int scaled = 0; scaled < kScales; ++scaled) {
      CUTE_UNROLL
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const float scale = scales.of[i % 2][scaled];
        rounded[i] = pack<E>(p[2 * i] * scale, p[2 * i + 1] * scale);
      }
      Base::store_pairs(probabilities + scaled * T::kScaledBytes);
    }
    ETAP_MARKED(probabilities_fence, cutlass::arch::fence_view_async_shared());
  }

  CUTE_DEVICE void accumulate() {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) sums[i] += tile_sums[i];
  }

  // At the end of a piece. Each scaled P^T is rounded in its own way, so that O^T is divided by the sum before rounding.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) rounded_sums[i] = sums[i];
  }
};

}  // namespace etap::sparse_fp8

// Which entries of a tile name a row. What an invalid one brings is zeros, so that only its scores must be hidden.
#pragma once

#include "decode/roles.h"

namespace etap::sparse {

// Four entries a byte, in its lower half.
struct alignas(16) TileMask {
  uint8_t fours[16];

  __device__ __forceinline__ uint32_t word(int i) const { return reinterpret_cast<const uint32_t*>(fours)[i]; }
};

// Of S^T or S, tokens as the fragments hold them: see transposed/traits.h and query_major/softmax.cuh.
template <class T, class Scores>
__device__ __forceinline__ void hide_invalid(const TileMask& mask, Scores& scores) {
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (T::kRowTile == 64) {
    const int first = lane % 4 / 2 * 8 + lane % 2 * 2;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      const int eight = i / 4;  // tokens
      const uint32_t bit = mask.word(eight / 2) >> (first + eight % 2 * 16 + i % 2) & 1;
      if (!bit) scores(i) = -INFINITY;
    }
  } else {
    const uint32_t sixteen = mask.word(threadIdx.x / kWarpSize % kWarpsPerGroup) >> (lane / 16 * 8 + lane / 4 % 4);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      const uint32_t bit = sixteen >> (i / 2 % 2 * 16) & 1;
      if (!bit) scores(i) = -INFINITY;
    }
  }
}

}  // namespace etap::sparse

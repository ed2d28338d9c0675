// A mask says which entries of a tile name a row. An invalid one brings zeros, so that only its scores must be hidden.
#pragma once

#include "decode/cta/roles.h"

namespace etap::sparse {

// A byte has four entries, in its lower half.
struct alignas(16) TileMask {
  uint8_t fours[16];

  CUTE_DEVICE uint32_t word(int i) const { return reinterpret_cast<const uint32_t*>(fours)[i]; }
};

// Bits 0 and 16 say whether a thread's two tokens of S^T name a row.
CUTE_DEVICE uint32_t valid_tokens(const TileMask& mask) {
  const int lane = threadIdx.x % kWarpSize;
  return mask.word(threadIdx.x / kWarpSize % kWarpsPerGroup) >> (lane / 16 * 8 + lane / 4 % 4);
}

// Hides scores of S^T, whose fragment holds tokens as transposed/traits.h says.
template <class Scores>
CUTE_DEVICE void hide_invalid_rows(const TileMask& mask, Scores& st) {
  const uint32_t valid = valid_tokens(mask);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(st); ++i) {
    const uint32_t bit = valid >> (i / 2 % 2 * 16) & 1;
    if (!bit) st(i) = -INFINITY;
  }
}

// Hides scores of S: see query_major/softmax.cuh.
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

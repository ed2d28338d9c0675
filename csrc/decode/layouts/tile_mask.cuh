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

}  // namespace etap::sparse

// The one swizzle of shared memory: TMA writes it, WGMMA's descriptors and our own loads and stores read it.
#pragma once

namespace etap {

constexpr int kUnitBytes = 16;  // what the swizzle moves as a whole

// Where unit `unit` of a line of 128 or 64 bytes lies in it: units change places by the line's number in eight (128), or in
// four pairs (64), so that the same unit of eight lines touches all banks. Line 0 lies at a multiple of 1,024.
template <int kLineBytes>
__device__ __forceinline__ int swizzled(int line, int unit) {
  static_assert(kLineBytes == 128 || kLineBytes == 64);
  return unit ^ (line / (128 / kLineBytes) % (kLineBytes / kUnitBytes));
}

}  // namespace etap

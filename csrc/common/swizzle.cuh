// The one swizzle of shared memory: TMA writes it, WGMMA's descriptors and the kernels' loads and stores read it.
#pragma once

#include <cute/config.hpp>

namespace etap {

constexpr int kUnitBytes = 16;        // what the swizzle moves as a whole
constexpr int kSwizzlePeriod = 1024;  // bytes: eight lines of 128

// Unit u of a line of 128 or 64 bytes lies at u ^ swizzle<kLineBytes>(line): units change places by the line's number in
// eight (128), or in four pairs (64), so that the same unit of eight lines touches all banks. Line 0 lies at a multiple
// of eight lines.
template <int kLineBytes>
CUTE_DEVICE int swizzle(int line) {
  static_assert(kLineBytes == 128 || kLineBytes == 64);
  return line / (128 / kLineBytes) % (kLineBytes / kUnitBytes);
}

}  // namespace etap

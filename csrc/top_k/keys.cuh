// The order of logits as integers, intervals of them, and the bins that an interval's keys are counted in.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace etap::top_k {

constexpr int kBins = 128, kBinBits = 7;
constexpr int32_t kNoKey = INT32_MIN;       // where there is no logit
constexpr int32_t kLowest = INT32_MIN + 1;  // NaN

// The same both ways.
CUTE_DEVICE int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

// Rises with the logit; -0 is 0, and NaN below all.
CUTE_DEVICE int32_t key_of(float logit) { return logit == logit ? ordered(__float_as_int(logit + 0.0f)) : kLowest; }

struct Interval {
  int32_t lo, hi;  // both are in it

  CUTE_DEVICE bool holds(int32_t key) const { return lo <= key && key <= hi; }
};

// Parts of 2^shift keys from `lo` on, the highest first. What lies below is in the last bin, what lies above in the first.
struct Bins {
  int32_t lo;
  int shift;

  CUTE_DEVICE static Bins from(const Interval& keys) {
    return {keys.lo, max(32 - kBinBits - __clz(int(uint32_t(keys.hi) - uint32_t(keys.lo))), 0)};
  }
  CUTE_DEVICE int bin_of(int32_t key) const {
    return kBins - 1 - int(min((uint32_t(max(key, lo)) - uint32_t(lo)) >> shift, uint32_t(kBins - 1)));
  }
  // What a bin has of an interval.
  CUTE_DEVICE Interval part(int bin, const Interval& of) const {
    const uint32_t digit = kBins - 1 - bin, offset = digit << shift, most = uint32_t(of.hi) - uint32_t(lo);
    const uint32_t last = bin == 0 ? most : min(offset + (1u << shift) - 1, most);
    return {digit == 0 ? of.lo : int32_t(uint32_t(lo) + offset), int32_t(uint32_t(lo) + last)};
  }
};

}  // namespace etap::top_k

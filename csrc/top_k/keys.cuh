// The order of logits as integers, and the bins that a first histogram counts them in.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace etap::top_k {

constexpr int kBins = 4096;
constexpr int32_t kLowest = INT32_MIN;  // NaN, and what lies behind a row's end

// Rises with the logit; -0 is 0, and NaN below all.
CUTE_DEVICE int32_t key_of(float logit) {
  const int32_t bits = __float_as_int(logit + 0.0f);
  const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return logit == logit ? key : kLowest;
}

// Keys from `lo` to `lo + last`.
struct Interval {
  int32_t lo;
  uint32_t last;

  CUTE_DEVICE bool holds(int32_t key) const { return uint32_t(key) - uint32_t(lo) <= last; }
  // Bits in which its keys may differ.
  CUTE_DEVICE int bits() const { return 32 - __clz(int(last)); }
  // One of the parts of 2^shift keys.
  CUTE_DEVICE Interval part(uint32_t digit, int shift) const {
    const uint32_t offset = digit << shift;
    return {int32_t(uint32_t(lo) + offset), min(last - offset, (1u << shift) - 1)};
  }
};

// A key's bin, from the largest down: sign, five bits of exponent and six of mantissa, where 0 has a bin of its own, and sizes
// below 2^-14 or from 2^17.9 on have one for each sign.
constexpr int kDroppedBits = 17;
constexpr int kSmall = (113 << 23 >> kDroppedBits) - 1;  // what sizes below 2^-14 have in the upper bits, at most
constexpr int kLastStep = kBins / 2 - 2;

CUTE_DEVICE int step_of(int upper) { return max(min(upper - kSmall, kLastStep), 0); }

CUTE_DEVICE int bin_of(int32_t key) {
  const int upper = key >> kDroppedBits, sign = max(min(key, 1), -1);
  return kBins / 2 - (step_of(upper) - step_of(~upper) + sign);
}

CUTE_DEVICE Interval interval_of(int bin) {
  const int signed_bin = kBins / 2 - bin;
  if (signed_bin == 0) return {0, 0};
  const int step = abs(signed_bin) - 1;
  const int32_t lo = step == 0 ? 1 : (step + kSmall) << kDroppedBits;
  const int32_t hi = step == kLastStep ? INT32_MAX : ((step + kSmall + 1) << kDroppedBits) - 1;
  return {signed_bin > 0 ? lo : ~hi, uint32_t(hi - lo)};
}

}  // namespace etap::top_k

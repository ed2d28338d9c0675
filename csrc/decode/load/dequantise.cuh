// V4's rows on their way through registers to bfloat16, for 64 query rows: what a lane holds of a row, and how it becomes columns of K.
//
// Four lanes share a row, a quarter of the columns of each chunk (64 columns) each. So a warp's store of 16 bytes a lane touches
// all banks, with the swizzle of eight rows.
#pragma once

#include <cutlass/numeric_types.h>

#include "common/ptx.cuh"
#include "common/swizzle.cuh"
#include "common/warp.cuh"
#include "decode/layouts/common.h"

namespace etap::sparse {

constexpr int kRowLanes = 4;

// Two values of e4m3, bytes kFirst and kFirst + 1 of a word, as bfloat16 times 2^-120: exponent and mantissa are moved to where
// bfloat16 has them.
template <int kFirst>
CUTE_DEVICE uint32_t widen(uint32_t word) {
  const uint32_t high = __byte_perm(word, 0, kFirst == 0 ? 0x1404 : 0x3424);  // each in the upper half of 16 bits
  return (high & 0x80008000) | (high >> 4 & 0x07f007f0);
}
constexpr uint32_t kWidenedBias = 0x7b807b80;  // 2^120, twice

// What 64 columns of V4's are multiplied with, exactly: a power of two, ue8m0, and what makes up for the bias, twice. kLarge: it may
// be 2 or more, which takes two products.
template <bool kLarge>
struct PowerOfTwo {
  uint32_t value;

  CUTE_DEVICE explicit PowerOfTwo(uint32_t byte)
      : value(byte * 0x00800080 + (kLarge ? 0 : kWidenedBias - 0x3f803f80)) {
    if (kLarge && byte == 0) value = 0x00400040;  // a subnormal
  }
  CUTE_DEVICE uint32_t times(uint32_t widened) const {
    return ptx::mul_bf16x2(kLarge ? ptx::mul_bf16x2(widened, kWidenedBias) : widened, value);
  }
};

// 16 values of e4m3 times a scale, as 16 of bfloat16. A NaN counts as 480.
template <class Scale>
CUTE_DEVICE void dequantise(const uint4& values, const Scale& scale, uint4 (&columns)[2]) {
  columns[0] = {scale.times(widen<0>(values.x)), scale.times(widen<2>(values.x)), scale.times(widen<0>(values.y)),
                scale.times(widen<2>(values.y))};
  columns[1] = {scale.times(widen<0>(values.z)), scale.times(widen<2>(values.z)), scale.times(widen<0>(values.w)),
                scale.times(widen<2>(values.w))};
}

// A lane's quarter of a row: of seven chunks of e4m3 a unit each, of one of 64 bfloat16 two, and the row's powers of two, which lie
// apart. Rows are loaded from where this lane's first unit begins.
struct HeldRow {
  static constexpr int kNopeChunks = (kLatentDim - kRopeDim) / kChunkColumns;
  static constexpr int kNopeBytes = kUnitBytes * kRowLanes;  // of a chunk

  uint4 nope[kNopeChunks];
  uint4 rope[2];
  uint2 scales = {};
  uint2 next_scales = {};

  // The lane's place among those of its row, and its row's in an octet.
  CUTE_DEVICE static int lane() { return threadIdx.x % kRowLanes; }
  CUTE_DEVICE static int row() { return threadIdx.x % kWarpSize / kRowLanes; }
  // Of a chunk's units, those of this lane. Neighbouring rows take bfloat16 from different halves on, so that a store touches all
  // banks.
  template <int kChunk>
  CUTE_DEVICE static int unit(int half) {
    return kChunk < kNopeChunks ? 2 * lane() + half : lane() + (row() + half) % 2 * kRowLanes;
  }

  // Takes the scales that were asked for, and asks for the next row's, so many bytes behind it.
  CUTE_DEVICE void advance_scales(bool present, uint64_t from, int32_t behind) {
    scales = next_scales;
    ptx::load_once_if(present, from - lane() * kUnitBytes + behind, next_scales);
  }
  // Whether one of the warp's is 2 or more.
  CUTE_DEVICE bool large() const {
    return __any_sync(0xffffffff, (scales.x & 0x80808080) != 0 || (scales.y & 0x00808080) != 0);
  }

  template <int kChunk>
  CUTE_DEVICE void load(bool present, uint64_t from) {
    if constexpr (kChunk < kNopeChunks) {
      ptx::load_once_if(present, from + kChunk * kNopeBytes, nope[kChunk]);
    } else {
      const int half = row() % 2 * kRowLanes * kUnitBytes;
      ptx::load_once_if(present, from + kNopeChunks * kNopeBytes + half, rope[0]);
      ptx::load_once_if(present, from + kNopeChunks * kNopeBytes + (kRowLanes * kUnitBytes - half), rope[1]);
    }
  }

  template <int kChunk, bool kLarge>
  CUTE_DEVICE void columns(uint4 (&to)[2]) const {
    if constexpr (kChunk < kNopeChunks) {
      const uint32_t byte = __byte_perm(kChunk < 4 ? scales.x : scales.y, 0, 0x4440 + kChunk % 4);
      dequantise(nope[kChunk], PowerOfTwo<kLarge>(byte), to);
    } else {
      to[0] = rope[0], to[1] = rope[1];
    }
  }
};

}  // namespace etap::sparse

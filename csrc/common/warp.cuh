// What every kernel says of warps, and of two 16-bit values in one register.
#pragma once

#include <cute/config.hpp>
#include <cutlass/numeric_conversion.h>

#include <cstdint>

namespace etap {

constexpr int kWarpSize = 32;
constexpr float kLn2 = 0.6931471805599453f;  // kernels work with base 2, results have natural logarithms

// Returns x, of which the compiler knows nothing: what follows from it is worked out behind this place, and not kept
// in registers over a loop before.
CUTE_DEVICE int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The same of an address, which is kept in registers: the compiler does not work it out again where it is used.
CUTE_DEVICE uint64_t kept(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Two values in one register, the lower column in the lower half.
template <class Element>
CUTE_DEVICE uint32_t pack(float low, float high) {
  const cutlass::NumericArrayConverter<Element, float, 2> convert;
  const cutlass::Array<float, 2> pair{low, high};
  const auto packed = convert(pair);
  return reinterpret_cast<const uint32_t&>(packed);
}

// Four 8-bit values in one register, the first in the lowest byte.
template <class Element>
CUTE_DEVICE uint32_t pack_four(float a, float b, float c, float d) {
  const cutlass::NumericArrayConverter<Element, float, 4> convert;
  const auto packed = convert(cutlass::Array<float, 4>{a, b, c, d});
  return reinterpret_cast<const uint32_t&>(packed);
}

template <class Element>
CUTE_DEVICE float4 unpack_four(uint32_t packed) {
  const cutlass::NumericArrayConverter<float, Element, 4> convert;
  const auto four = convert(reinterpret_cast<const cutlass::Array<Element, 4>&>(packed));
  return {four[0], four[1], four[2], four[3]};
}

template <class Element>
CUTE_DEVICE float2 unpack(uint32_t packed) {
  const auto& pair = reinterpret_cast<const cutlass::Array<Element, 2>&>(packed);
  return {float(pair[0]), float(pair[1])};
}

// Two values of e4m3 as bfloat16 times 2^-120, whose exponents and mantissas have been moved to where bfloat16 has them: the values
// lie in the upper bytes of each 16 bits of `signs`, and four bits lower in `magnitudes`. A NaN becomes 480.
CUTE_DEVICE uint32_t widen_e4m3(uint32_t signs, uint32_t magnitudes) { return (signs & 0x80008000) | (magnitudes & 0x07f007f0); }
constexpr uint32_t kWidenedBias = 0x7b807b80;  // 2^120, twice

// What a lane has of one row and 16 value dims, first and second: pairs of neighbours, 8 apart, or, where the tile's rows r and
// r + 8 are dims 2r and 2r + 1 (kPairedDims), the even ones and the odd ones of four. To be stored as four neighbours, from
// lane_dim on: so the four lanes of a row fill a sector of memory.
template <bool kPairedDims>
CUTE_DEVICE uint2 neighbouring_dims(uint32_t first, uint32_t second) {
  if constexpr (kPairedDims) return make_uint2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
  const bool odd = threadIdx.x % 2;
  const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
  return odd ? make_uint2(other, second) : make_uint2(first, other);
}

template <bool kPairedDims>
CUTE_DEVICE int lane_dim(int lane) {
  return kPairedDims ? lane % 4 * 4 : lane % 2 * 8 + lane % 4 / 2 * 4;
}

}  // namespace etap

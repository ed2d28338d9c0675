// What every kernel says of warps, and of two 16-bit values in one register.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cstdint>

namespace etap {

constexpr int kWarpSize = 32;
constexpr float kLn2 = 0.6931471805599453f;  // kernels work with base 2, results have natural logarithms

// Two values in one register, the lower column in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const cutlass::NumericArrayConverter<Element, float, 2> convert;
  const cutlass::Array<float, 2> pair{low, high};
  const auto packed = convert(pair);
  return reinterpret_cast<const uint32_t&>(packed);
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  const auto& pair = reinterpret_cast<const cutlass::Array<Element, 2>&>(packed);
  return {float(pair[0]), float(pair[1])};
}

}  // namespace etap

// The compiled decode kernels as the host knows them.
#pragma once

#include <type_traits>

#include "decode/kernel.cuh"
#include "decode/launch.h"

namespace etap {

template <class Element>
constexpr CUtensorMapDataType tensor_map_type() {
  return std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

template <class T, bool kWholeTiles = true>
KernelLaunch launch_of(dim3 blocks, int cluster = 1) {
  constexpr int kSharedBytes = sizeof(typename T::SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  static_assert(T::registers(kWholeTiles).launch != kBesideCombination.launch ||
                kSharedBytes + kBlockBytes + kCombinationBytes <= kMaxSharedBytes);
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(decode_kernel<T, kWholeTiles>), __PRETTY_FUNCTION__, &handles, blocks,
          kDecodeThreads, kSharedBytes, cluster};
}

template <class T, bool kWholeTiles>
DecodeKernel describe() {
  DecodeKernel kernel{};
  kernel.launch = launch_of<T, kWholeTiles>({});
  kernel.lean_combination = kWholeTiles && T::kLeanCombination;
  if constexpr (T::kFp8Cache) {
    kernel.map_type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;  // each NaN of which has one of e4m3 in its upper byte
    kernel.chunks = T::kWideChunks;
    kernel.copied_chunks = kWholeTiles ? T::kWideChunks : 1;
    kernel.rope_apart = true;
  } else {
    kernel.map_type = tensor_map_type<typename T::Element>();
    kernel.chunks = kWholeTiles ? kChunks : kValueChunks;
    kernel.copied_chunks = kWholeTiles ? T::kChunksPerStage : 1;
    kernel.rope_apart = !kWholeTiles;
  }
  return kernel;
}

template <class T>
DecodeKernel describe(bool whole_tiles) {
  return whole_tiles ? describe<T, true>() : describe<T, false>();
}

template <class Element>
DecodeKernel sixteen_bit_kernel(int row_tile, bool whole_tiles) {
  switch (row_tile) {
    case 8: return describe<transposed::Traits<Element, 8>>(whole_tiles);
    case 16: return describe<transposed::Traits<Element, 16>>(whole_tiles);
    case 32: return describe<transposed::Traits<Element, 32>>(whole_tiles);
    default: return describe<query_major::Traits<Element>>(whole_tiles);
  }
}

template <class Math>
DecodeKernel fp8_kernel(int row_tile, bool whole_tiles) {
  switch (row_tile) {
    case 8: return describe<transposed_fp8::Traits<Math, 8>>(whole_tiles);
    case 16: return describe<transposed_fp8::Traits<Math, 16>>(whole_tiles);
    case 32: return describe<transposed_fp8::Traits<Math, 32>>(whole_tiles);
    default:
      return describe<std::conditional_t<sizeof(Math) == 1, mixed_major::Traits, transposed_fp8::SharedTilesTraits>>(whole_tiles);
  }
}

}  // namespace etap

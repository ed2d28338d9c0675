// The table of the compiled decode kernels, and how the host sees one. What asks for them: kernels.h.
#pragma once

#include <type_traits>

#include "decode/kernel.cuh"
#include "decode/kernels.h"

namespace etap {

template <class T, bool kWholeTiles = true>
KernelLaunch launch_of() {
  constexpr int kSharedBytes = sizeof(typename T::SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  static_assert(T::registers(kWholeTiles).launch != kBesideCombination.launch ||
                kSharedBytes + kBlockBytes + kCombinationBytes <= kMaxSharedBytes);
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(decode_kernel<T, kWholeTiles>), __PRETTY_FUNCTION__, &handles, {}, kDecodeThreads,
          kSharedBytes};
}

template <class T, bool kWholeTiles>
DecodeKernel describe() {
  DecodeKernel kernel{};
  kernel.launch = launch_of<T, kWholeTiles>();
  kernel.partials = T::kPartials;
  kernel.leaves_room = kWholeTiles && T::kLeanCombination;
  if constexpr (T::kGathered) {
    return kernel;
  } else if constexpr (T::kFp8Cache) {
    kernel.map_type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;  // each NaN of which has one of e4m3 in its upper byte
    kernel.chunks = T::kWideChunks;
    kernel.copied_chunks = kWholeTiles ? T::kWideChunks : 1;
    kernel.rope_apart = true;
  } else {
    constexpr bool kFloat16 = std::is_same_v<typename T::Element, cutlass::half_t>;
    kernel.map_type = kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    kernel.chunks = kWholeTiles ? kChunks : kValueChunks;
    kernel.copied_chunks = kWholeTiles ? T::kChunksPerStage : 1;
    kernel.rope_apart = !kWholeTiles;
  }
  return kernel;
}

// Kernels for one kind of operands, each with another row tile. kAnyPages: each also copies tiles in parts or row by row.
template <bool kAnyPages, class... Traits>
struct KernelList {
  static const DecodeKernel* find(int row_tile, bool whole_tiles) {
    const DecodeKernel* found = nullptr;
    (void)((Traits::kRowTile == row_tile && (found = of<Traits>(whole_tiles), true)) || ...);
    return found;
  }

 private:
  template <class T>
  static const DecodeKernel* of(bool whole_tiles) {
    static const DecodeKernel whole = describe<T, true>();
    if (whole_tiles) return &whole;
    if constexpr (kAnyPages) {
      static const DecodeKernel parts = describe<T, false>();
      return &parts;
    }
    return nullptr;
  }
};

using Bf16 = cutlass::bfloat16_t;
using Fp16 = cutlass::half_t;
using E4m3 = cutlass::float_e4m3_t;

template <Operands kOperands>
struct Kernels;

template <>
struct Kernels<Operands::kBf16> : KernelList<true, transposed::Traits<Bf16, 8>, transposed::Traits<Bf16, 16>,
                                             transposed::Traits<Bf16, 32>, query_major::Traits<Bf16>> {};
template <>
struct Kernels<Operands::kFp16> : KernelList<false, transposed::Traits<Fp16, 8>, transposed::Traits<Fp16, 16>,
                                             transposed::Traits<Fp16, 32>, query_major::Traits<Fp16>> {};
template <>
struct Kernels<Operands::kFp8> : KernelList<true, transposed_fp8::Traits<Fp16, 8>, transposed_fp8::Traits<Fp16, 16>,
                                            transposed_fp8::Traits<Fp16, 32>, transposed_fp8::SharedTilesTraits> {};
template <>
struct Kernels<Operands::kFp8Math> : KernelList<true, transposed_fp8::Traits<E4m3, 8>, transposed_fp8::Traits<E4m3, 16>,
                                                transposed_fp8::Traits<E4m3, 32>, mixed_major::Traits> {};
template <>
struct Kernels<Operands::kListedBf16> : KernelList<false, sparse::Traits<8, kChunks>, sparse::Traits<16, kChunks>,
                                                   sparse::Traits<32, kChunks>, sparse::WideTraits<kChunks>> {};
template <>
struct Kernels<Operands::kListedLatent> : KernelList<false, sparse::Traits<8, kValueChunks>, sparse::Traits<16, kValueChunks>,
                                                     sparse::Traits<32, kValueChunks>, sparse::WideTraits<kValueChunks>> {};
template <>
struct Kernels<Operands::kListedV32>
    : KernelList<false, sparse_fp8::Traits<8, sparse_fp8::V32Row>, sparse_fp8::Traits<16, sparse_fp8::V32Row>,
                 sparse_fp8::Traits<32, sparse_fp8::V32Row>, sparse_fp8::SharedTilesTraits> {};
template <>
struct Kernels<Operands::kListedV4> : KernelList<false, sparse_fp8::Traits<8, sparse_fp8::V4Row>,
                                                 sparse_fp8::Traits<16, sparse_fp8::V4Row>,
                                                 sparse_fp8::Traits<32, sparse_fp8::V4Row>> {};

template <Operands kOperands>
const DecodeKernel* find_kernel(int row_tile, bool whole_tiles) {
  return Kernels<kOperands>::find(row_tile, whole_tiles);
}

}  // namespace etap

#pragma once

#include <cudaTypedefs.h>

#include <atomic>
#include <string>
#include <type_traits>

#include "common/launch.cuh"
#include "decode/kernel.cuh"
#include "decode/launch.h"

namespace etap {

// The driver's tensor-map encoder, found through the runtime so that the library needs no libcuda to load.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    ETAP_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encoder;
}

// The cache as (64 columns, tokens of a page, 9 column chunks, pages); a copy takes 64 tokens of some chunks.
template <class T>
CUtensorMap make_cache_map(const CacheParams& cache) {
  constexpr cuuint64_t kElementBytes = sizeof(typename T::Element);
  constexpr auto kType = std::is_same_v<typename T::Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t extents[] = {kChunkColumns, cuuint64_t(cache.page_size), kChunks, cuuint64_t(cache.pages)};
  const cuuint64_t strides[] = {cache.row_stride * kElementBytes, kChunkColumns * kElementBytes,
                                cache.page_stride * kElementBytes};
  const cuuint32_t box[] = {kChunkColumns, kTileTokens, T::kChunksPerStage, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  // Promotion to 256 bytes costs 6% of the bandwidth: rows are 1152 bytes, so it fetches across their ends.
  const CUresult status = tensor_map_encoder()(
      &map, kType, 4, const_cast<void*>(cache.data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(int(status)));
  return map;
}

// Shared memory above 48 KB is granted once for each kernel and device.
template <class T>
void allow_shared_memory() {
  static std::atomic<uint64_t> granted{0};
  int device;
  ETAP_CUDA_CHECK(cudaGetDevice(&device));
  const uint64_t bit = uint64_t(1) << (device % 64);
  if (granted.load(std::memory_order_relaxed) & bit) return;
  ETAP_CUDA_CHECK(cudaFuncSetAttribute(decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(sizeof(typename T::SharedStorage))));
  granted.fetch_or(bit, std::memory_order_relaxed);
}

template <class Element, int kRowTile>
void launch_row_tile(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream) {
  using T = Traits<Element, kRowTile>;
  allow_shared_memory<T>();
  const CUtensorMap cache_map = make_cache_map<T>(cache);
  launch_overlapping(decode_kernel<T>, params.partitions * params.row_groups, kDecodeThreads,
                     sizeof(typename T::SharedStorage), stream, params, cache_map);
}

template <class Element>
void launch_decode(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream) {
  switch (params.row_tile) {
    case 8: return launch_row_tile<Element, 8>(params, cache, stream);
    case 16: return launch_row_tile<Element, 16>(params, cache, stream);
    case 32: return launch_row_tile<Element, 32>(params, cache, stream);
    default: return launch_row_tile<Element, 64>(params, cache, stream);
  }
}

}  // namespace etap

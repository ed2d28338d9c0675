#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
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

template <class Element>
constexpr CUtensorMapDataType tensor_map_type() {
  if (sizeof(Element) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Swizzled over rows as wide as the box: 128 or 64 bytes.
template <class Element, int kRank>
CUtensorMap encode_tensor_map(const void* data, const cuuint64_t (&extents)[kRank], const cuuint64_t (&strides)[kRank - 1],
                              const cuuint32_t (&box)[kRank]) {
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  const auto swizzle = box[0] * sizeof(Element) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  // Promotion to 256 bytes costs 6% of the bandwidth: rows are 1152 bytes, so it fetches across their ends.
  const CUresult status = tensor_map_encoder()(
      &map, tensor_map_type<Element>(), kRank, const_cast<void*>(data), extents, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(int(status)));
  return map;
}

template <class T>
typename T::CacheMaps make_cache_maps(const CacheParams& cache) {
  const auto tokens = cuuint64_t(cache.page_size), pages = cuuint64_t(cache.pages);
  if constexpr (T::kFp8Cache) {
    const auto row = cuuint64_t(cache.row_stride), page = cuuint64_t(cache.page_stride);
    return {encode_tensor_map<uint8_t, 4>(cache.data, {T::kWideColumns, tokens, T::kWideChunks, pages},
                                          {row, T::kWideColumns, page}, {T::kWideColumns, kTileTokens, T::kWideChunks, 1}),
            encode_tensor_map<uint8_t, 3>(static_cast<const char*>(cache.data) + kLatentDim, {kRopeDim, tokens, pages},
                                          {row, page}, {kRopeDim, kTileTokens, 1})};
  } else {
    constexpr cuuint64_t kElementBytes = sizeof(typename T::Element);
    return {encode_tensor_map<typename T::Element, 4>(
        cache.data, {kChunkColumns, tokens, kChunks, pages},
        {cache.row_stride * kElementBytes, kChunkColumns * kElementBytes, cache.page_stride * kElementBytes},
        {kChunkColumns, kTileTokens, T::kChunksPerStage, 1})};
  }
}

template <class T>
QueryMaps make_query_maps(const DecodeParams& params) {
  constexpr cuuint64_t kElementBytes = sizeof(typename T::Element);
  const int box_heads = std::min(params.heads, T::kRowTile);
  QueryMaps maps{};
  // A stride of 0 (an expanded tensor) is none that TMA knows; those of single heads, tokens or requests mean nothing.
  const auto known = [](int64_t extent, int64_t stride) { return extent == 1 || stride > 0; };
  maps.usable = params.heads % box_heads == 0 && T::kRowTile % box_heads == 0 &&
                known(params.heads, std::min(params.q_stride_head, params.q_rope_stride_head)) &&
                known(params.s_q, std::min(params.q_stride_token, params.q_rope_stride_token)) &&
                known(params.batch, std::min(params.q_stride_batch, params.q_rope_stride_batch));
  if (!maps.usable) return maps;
  const auto bytes = [](int64_t extent, int64_t stride) { return extent == 1 ? kHeadDim * kElementBytes : stride * kElementBytes; };
  const auto encode = [&](const void* data, int64_t head, int64_t token, int64_t request, cuuint32_t chunks) {
    return encode_tensor_map<typename T::Element, 5>(
        data, {kChunkColumns, cuuint64_t(params.heads), cuuint64_t(params.s_q), chunks, cuuint64_t(params.batch)},
        {bytes(params.heads, head), bytes(params.s_q, token), kChunkColumns * kElementBytes, bytes(params.batch, request)},
        {kChunkColumns, cuuint32_t(box_heads), cuuint32_t(T::kRowTile / box_heads), chunks, 1});
  };
  maps.latent = encode(params.q, params.q_stride_head, params.q_stride_token, params.q_stride_batch, kValueChunks);
  maps.rope = encode(params.q_rope, params.q_rope_stride_head, params.q_rope_stride_token, params.q_rope_stride_batch,
                     kChunks - kValueChunks);
  return maps;
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

template <class T>
void launch_kernel(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream) {
  static_assert(sizeof(typename T::SharedStorage) <= kMaxSharedBytes);
  allow_shared_memory<T>();
  const typename T::CacheMaps cache_maps = make_cache_maps<T>(cache);
  QueryMaps query_maps{};
  if constexpr (!T::kFp8Cache) query_maps = make_query_maps<T>(params);
  launch_overlapping(decode_kernel<T>, params.partitions * params.row_groups, kDecodeThreads,
                     sizeof(typename T::SharedStorage), stream, params, cache_maps, query_maps);
}

template <template <class, int> class T, class Element>
void launch_row_tile(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream) {
  switch (params.row_tile) {
    case 8: return launch_kernel<T<Element, 8>>(params, cache, stream);
    case 16: return launch_kernel<T<Element, 16>>(params, cache, stream);
    case 32: return launch_kernel<T<Element, 32>>(params, cache, stream);
    default: return launch_kernel<T<Element, 64>>(params, cache, stream);
  }
}

template <class Element, int kRowTile>
using SixteenBitTraits =
    std::conditional_t<kRowTile == 64, query_major::Traits<Element>, transposed::Traits<Element, kRowTile>>;

template <class Element>
void launch_decode(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream) {
  launch_row_tile<SixteenBitTraits, Element>(params, cache, stream);
}

template <class Math, int kRowTile>
using Fp8Traits =
    std::conditional_t<kRowTile == 64, transposed_fp8::SharedTilesTraits<Math>, transposed_fp8::Traits<Math, kRowTile>>;

template <class Math>
void launch_fp8_decode(const DecodeParams& params, const CacheParams& cache, cudaStream_t stream) {
  launch_row_tile<Fp8Traits, Math>(params, cache, stream);
}

}  // namespace etap

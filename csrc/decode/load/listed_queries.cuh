// Both consumers gather the query rows of a token as they are: a split begins with that, and 64 rows take one producer warp several
// microseconds.
#pragma once

#include "common/ptx.cuh"
#include "decode/cta/splits.cuh"
#include "decode/layouts/common.h"

namespace etap::sparse {

// Both consumers ask for the rows when they are done with the last split's scores. A lane has two units of a row's latent part, and
// each of the first eight lanes one of the rope part.
template <class T>
CUTE_DEVICE void gather_queries(Shared<T>& shared, const DecodeParams& params, int request, int row_group) {
  using Element = typename T::Element;
  constexpr int kUnitColumns = kUnitBytes / sizeof(Element);
  constexpr int kUnitsPerChunk = kChunkColumns / kUnitColumns;
  constexpr int kLatentUnits = kLatentDim / kUnitColumns;
  constexpr int kChunkBytes = sizeof(typename T::QueryChunk);
  const int warp = anew(threadIdx.x) / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto* q = static_cast<const Element*>(params.q) + request * params.q_stride_batch + lane * kUnitColumns;
  const auto* q_rope = static_cast<const Element*>(params.q_rope) + request * params.q_rope_stride_batch + lane * kUnitColumns;
  const uint32_t target = cute::cast_smem_ptr_to_uint(shared.query) + lane / kUnitsPerChunk * kChunkBytes;
  CUTE_UNROLL
  for (int first = 0; first < T::kRowTile; first += kConsumerWarps) {
    const int row = first + warp;
    const int head = row_group * T::kRowTile + row;
    const bool exists = head < params.heads;  // rows of the tile behind the last one are zeros
    const Element* latent = exists ? q + head * params.q_stride_head : q;
    const Element* rope = exists ? q_rope + head * params.q_rope_stride_head : q;
    const int unit = lane % kUnitsPerChunk ^ swizzle<kChunkColumns * sizeof(Element)>(row);
    const uint32_t to = target + (row * kUnitsPerChunk + unit) * kUnitBytes;
    CUTE_UNROLL
    for (int u = 0; u < kLatentUnits; u += kWarpSize) {
      ptx::copy_async_16(to + u / kUnitsPerChunk * kChunkBytes, reinterpret_cast<uint64_t>(latent + u * kUnitColumns), exists);
    }
    if (T::kTileChunks > kValueChunks && lane < kUnitsPerChunk) {
      ptx::copy_async_16(to + kValueChunks * kChunkBytes, reinterpret_cast<uint64_t>(rope), exists);
    }
  }
}

// Both consumers call it; the rows are there for both on return.
CUTE_DEVICE void await_queries() {
  cute::cp_async_wait<0>();
  // For WGMMA the consumers fence before every product, for the cache's rows too.
  ETAP_MARKED(queries_sync, event::queries_written().sync());
}

}  // namespace etap::sparse

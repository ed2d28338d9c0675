// The query producers beside a cache of the queries' own type: one warp copies the rows of each split with TMA, or, where their
// strides allow no tensor map, three warps gather them (one where pages are small).
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "decode/cta/splits.cuh"
#include "decode/layouts/common.h"

namespace etap {

// Query rows whose heads fill row tiles are one TMA copy of the latent part and one of the rope part. Asked for before the
// split's length is known: behind the first tiles of the cache they would arrive up to 5 us later.
template <class T>
CUTE_DEVICE void copy_queries(Shared<T>& shared, const DecodeParams& params, const QueryMaps& maps, int partition,
                              int row_group) {
  const int token = row_group * T::kRowTile / params.heads;
  const int head = row_group * T::kRowTile - token * params.heads;
  RingPosition<1> at;
  SplitWalk walk(params, partition);
  if (params.early_loads) ETAP_MARKED(queries_wait, cudaGridDependencySynchronize());
  for (; !walk.done(); walk.skip(), at.advance(1)) {
    shared.queries.acquire(at);
    if (threadIdx.x % kWarpSize != 0) continue;
    shared.queries.expect_bytes(at, T::kQueryBytes);
    const auto copy = [&](const CUtensorMap& map, int first_chunk) {
      cute::SM90_TMA_LOAD_5D::copy(&map, shared.queries.full_barrier(at),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   &item<typename T::QueryChunk>(shared.query, first_chunk), 0, head, token, 0,
                                   walk.request());
    };
    copy(maps.latent, 0);
    copy(maps.rope, kValueChunks);
  }
  shared.queries.acquire(at);  // somebody's patience must end where consumers are stuck in the last split
}

// Query rows of any strides go through cp.async, 16 bytes a lane, into the swizzle that WGMMA's operand B reads. A warp
// takes every kWarps-th row and steps from row to row without a division.
template <class T, int kWarps>
CUTE_DEVICE void gather_queries(Shared<T>& shared, const DecodeParams& params, int partition, int row_group) {
  using Element = typename T::Element;
  constexpr int kUnitElements = kUnitBytes / sizeof(Element);
  constexpr int kUnitsPerChunk = kChunkColumns / kUnitElements;
  constexpr int kChunkBytes = sizeof(typename T::QueryChunk);
  constexpr int kLatentUnits = kLatentDim / kUnitElements;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x % kGroupThreads / kWarpSize - 1;
  const int first_token = (row_group * T::kRowTile + warp) / params.heads;
  const int first_head = row_group * T::kRowTile + warp - first_token * params.heads;
  RingPosition<1> at;
  SplitWalk walk(params, partition);
  if (params.early_loads) ETAP_MARKED(queries_wait, cudaGridDependencySynchronize());
  while (!walk.done()) {
    const int64_t request = walk.request();
    const auto* q = static_cast<const Element*>(params.q) + request * params.q_stride_batch + lane * kUnitElements;
    const auto* q_rope = static_cast<const Element*>(params.q_rope) + request * params.q_rope_stride_batch + lane * kUnitElements;
    int token = first_token;
    int head = first_head;
    shared.queries.acquire(at);
#pragma unroll 1
    for (int row = warp; row < T::kRowTile; row += kWarps) {
      const bool valid = token < params.s_q;  // rows of the tile behind the last one are zeros
      const Element* latent = valid ? q + token * params.q_stride_token + head * params.q_stride_head : q;
      const Element* rope = valid ? q_rope + token * params.q_rope_stride_token + head * params.q_rope_stride_head : q;
      const int unit = (lane % kUnitsPerChunk) ^ swizzle<kChunkColumns * sizeof(Element)>(row);
      char* target = shared.query + lane / kUnitsPerChunk * kChunkBytes + (row * kUnitsPerChunk + unit) * kUnitBytes;
      const auto copy = [&](int chunk, const Element* source, bool exists) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(source),
            *reinterpret_cast<cute::uint128_t*>(target + chunk * kChunkBytes), exists);
      };
      CUTE_UNROLL
      for (int unit = 0; unit < kLatentUnits; unit += kWarpSize) {
        copy(unit / kUnitsPerChunk, latent + unit * kUnitElements, valid);
      }
      if (lane < kUnitsPerChunk) copy(kValueChunks, rope, valid);
      for (head += kWarps; head >= params.heads; head -= params.heads) ++token;
    }
    cute::cp_async_wait<0>();
    cutlass::arch::fence_view_async_shared();  // these writes, for WGMMA
    shared.queries.commit(at);
    at.advance(1);
    walk.skip();
  }
}

// kWarps says how many may gather.
template <class T, int kWarps>
CUTE_DEVICE void load_queries(Shared<T>& shared, const DecodeParams& params, const QueryMaps& maps, int partition,
                              int row_group, WarpRole role) {
  if (!maps.usable) {
    gather_queries<T, kWarps>(shared, params, partition, row_group);
  } else if (role == WarpRole::kQueryProducer) {
    copy_queries<T>(shared, params, maps, partition, row_group);
  }
}

}  // namespace etap

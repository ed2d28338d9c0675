// The producer warpgroup: one warp copies the cache tile by tile with TMA, three gather the query rows (of an FP8 cache's
// queries the consumers take care).
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "decode/pieces.cuh"
#include "decode/traits.h"

namespace etap {

// The page of each tile is fetched 32 tiles at a time, a lane each, one batch ahead of its use. The first fetch does not
// wait for the request's length: what lies behind it in the table is read, but never used.
class PageFetcher {
 public:
  __device__ __forceinline__ PageFetcher(const DecodeParams& params, int request, int begin_tile)
      : row_(params.block_table + request * params.block_table_stride),
        tiles_per_page_(params.tiles_per_page),
        max_pages_(params.max_pages),
        lane_(threadIdx.x % kWarpSize),
        next_(fetch(begin_tile)) {}

  // Page of begin_tile + i; called by the whole warp with i = 0, 1, 2, ...
  __device__ __forceinline__ int page(int tile, int i) {
    if (i % kWarpSize == 0) {
      current_ = next_;
      next_ = fetch(tile + kWarpSize);
    }
    return __shfl_sync(0xffffffff, current_, i % kWarpSize);
  }

 private:
  __device__ __forceinline__ int fetch(int first_tile) const {
    const int page = tiles_per_page_.div(first_tile + lane_);
    return page < max_pages_ ? row_[page] : 0;
  }

  const int32_t* row_;
  const cutlass::FastDivmod& tiles_per_page_;
  int max_pages_;
  int lane_;
  int current_ = 0;
  int next_;
};

// Fill a ring stage with its columns of 64 tokens, from `row` of the page on.
template <class T>
__device__ __forceinline__ void copy_stage(const typename T::CacheMaps& maps, uint64_t* barrier, char* target, int page,
                                           int row, int chunk) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
  if constexpr (T::kFp8Cache) {
    cute::SM90_TMA_LOAD_4D::copy(&maps.latent, barrier, kHint, target, 0, row, 0, page);
    cute::SM90_TMA_LOAD_3D::copy(&maps.rope, barrier, kHint, target + T::kWideChunks * T::kWideBytes, 0, row, page);
  } else {
    cute::SM90_TMA_LOAD_4D::copy(&maps.rows, barrier, kHint, target, 0, row, chunk, page);
  }
}

template <class T>
__device__ __forceinline__ void load_keys(typename T::SharedStorage& shared, const DecodeParams& params,
                                          const typename T::CacheMaps& maps, int partition) {
  constexpr int kStagesInFlight = (kBytesInFlight + T::kStageBytes / 2) / T::kStageBytes;
  // A tile of an FP8 cache is one stage: two at a time would come at half the speed, and work on the first begin later.
  constexpr int kTilesAlone = T::kFp8Cache ? 4 : 0;
  const bool elected = threadIdx.x % kWarpSize == 0;
  RingPosition<T::kStages> at;
  int tiles_begun = 0;
  uint32_t even = 0, odd = 0;  // grants that consumers 0 and 1 got in earlier pieces
  PieceWalk walk(params, partition);
  while (!walk.done()) {
    PageFetcher pages(params, walk.request(), walk.begin_tile());
    const Piece piece = walk.next();
    if (piece.tiles() == 0) continue;
    for (int tile = piece.begin_tile; tile < piece.end_tile; ++tile, ++tiles_begun) {
      const int page = pages.page(tile, tile - piece.begin_tile);
      const int row = params.tiles_per_page.rem(tile) * kTileTokens;
#pragma unroll
      for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
        shared.keys.wait(at.behind(tiles_begun < kTilesAlone ? 1 : kStagesInFlight));
        shared.keys.acquire(at);
        if (!elected) continue;
        shared.keys.expect_bytes(at, T::kStageBytes);
        copy_stage<T>(maps, shared.keys.full_barrier(at), shared.ring + at.stage * T::kStageBytes, page, row,
                      T::first_chunk(stage, tile - piece.begin_tile));
        if constexpr (!T::kSharedTiles) {
          const int i = tile - piece.begin_tile;
          const uint32_t before = i % kConsumerGroups == 0 ? even : odd;
          if (stage == 0) shared.granted[i % kConsumerGroups].signal(before + i / kConsumerGroups);
        }
      }
    }
    if constexpr (!T::kSharedTiles) {
      // Stages lent to the consumers for merging their halves: granted, not filled.
      for (int stage = 0; stage < kConsumerGroups * T::kMergeStages; ++stage, at.advance(1)) {
        shared.keys.acquire(at);
        if (elected) shared.keys.commit(at);
      }
      even += (piece.tiles() + 1) / kConsumerGroups;
      odd += piece.tiles() / kConsumerGroups;
      if (elected) {
        shared.granted[0].signal(even);
        shared.granted[1].signal(odd);
      }
      ++even;
      ++odd;
    }
  }
}

// Query rows whose heads fill row tiles are one TMA copy of the latent part and one of the rope part. Asked for before the
// piece's length is known: behind the first tiles of the cache they would arrive up to 5 us later.
template <class T>
__device__ __forceinline__ void copy_queries(typename T::SharedStorage& shared, const DecodeParams& params,
                                             const QueryMaps& maps, int partition, int row_group) {
  const int token = row_group * kMaxRowTile / params.heads;
  const int head = row_group * kMaxRowTile - token * params.heads;
  RingPosition<1> at;
  for (PieceWalk walk(params, partition); !walk.done(); walk.skip(), at.advance(1)) {
    shared.queries.acquire(at);
    if (threadIdx.x % kWarpSize != 0) continue;
    shared.queries.expect_bytes(at, T::kQueryBytes);
    const auto copy = [&](const CUtensorMap& map, int first_chunk) {
      cute::SM90_TMA_LOAD_5D::copy(&map, shared.queries.full_barrier(at),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   shared.query + first_chunk * T::kQueryChunkBytes, 0, head, token, 0, walk.request());
    };
    copy(maps.latent, 0);
    copy(maps.rope, kValueChunks);
  }
}

// Query rows of any strides go through cp.async, 16 bytes a lane, into the swizzle that WGMMA's operand B reads. A warp
// takes every kWarps-th row and steps from row to row without a division.
template <class T>
__device__ __forceinline__ void gather_queries(typename T::SharedStorage& shared, const DecodeParams& params,
                                             int partition, int row_group) {
  using Element = typename T::Element;
  constexpr int kWarps = kQueryLoaderThreads / kWarpSize;
  constexpr int kUnitElements = 16 / sizeof(Element);
  constexpr int kUnitsPerChunk = kChunkColumns / kUnitElements;
  constexpr int kLatentUnits = kLatentDim / kUnitElements;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x % kGroupThreads / kWarpSize - 1;
  const int first_token = (row_group * kMaxRowTile + warp) / params.heads;
  const int first_head = row_group * kMaxRowTile + warp - first_token * params.heads;
  RingPosition<1> at;
  PieceWalk walk(params, partition);
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
      const Element* rope = valid ? q_rope + token * params.q_rope_stride_token + head * params.q_rope_stride_head : q_rope;
      const int swizzled = (lane % kUnitsPerChunk) ^ (row % 8);
      char* target = shared.query + lane / kUnitsPerChunk * T::kQueryChunkBytes + (row * kUnitsPerChunk + swizzled) * 16;
      const auto copy = [&](int chunk, const Element* source) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(source),
            *reinterpret_cast<cute::uint128_t*>(target + chunk * T::kQueryChunkBytes), valid);
      };
      CUTE_UNROLL
      for (int unit = 0; unit < kLatentUnits; unit += kWarpSize) {
        copy(unit / kUnitsPerChunk, latent + unit * kUnitElements);
      }
      if (lane < kUnitsPerChunk) copy(kValueChunks, rope);
      for (head += kWarps; head >= params.heads; head -= params.heads) ++token;
    }
    cute::cp_async_wait<0>();
    cutlass::arch::fence_view_async_shared();  // these writes, for WGMMA
    shared.queries.commit(at);
    at.advance(1);
    walk.skip();
  }
}

}  // namespace etap

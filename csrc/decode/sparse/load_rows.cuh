// The row producers of sparse attention: warps that gather listed rows of the cache with cp.async, 16 bytes a lane, into the
// key ring. One bulk copy a row is up to twice as slow.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "decode/pieces.cuh"
#include "decode/sparse/cache.h"
#include "decode/sparse/validity.cuh"
#include "decode/traits.h"

namespace etap::sparse {

// Row groups of four are dealt to the warps in turn. A lane fetches one row of its warp's: lane 4k + j the j-th of its k-th
// group, its index two tiles before it is copied and its page one, so that neither is waited for.
template <int kWarps>
class RowFetcher {
 public:
  __device__ __forceinline__ RowFetcher(const GatheredCache& cache, int warp)
      : cache_(cache), row_((warp + threadIdx.x % kWarpSize / 4 * kWarps) * 4 + threadIdx.x % 4) {}

  __device__ __forceinline__ void begin(const Piece& piece) {
    list_ = cache_.indices + piece.request * cache_.index_stride;
    listed_ = row_ < kTileTokens ? piece.seq_len : 0;
    table_ = nullptr;
    if (cache_.block_table != nullptr) {
      const int request = cache_.request_ids[piece.request];
      if (uint32_t(request) < uint32_t(cache_.requests)) table_ = cache_.block_table + request * cache_.block_table_stride;
    }
    index_ = fetch_index(piece.begin_tile);
    next_index_ = fetch_index(piece.begin_tile + 1);
    page_ = fetch_page(index_);
  }

  // The next tile's row; null where the entry names none. Called by the whole warp with each tile in turn.
  __device__ __forceinline__ const char* next(int tile) {
    const char* row = nullptr;
    if (uint32_t(page_) < uint32_t(cache_.pages)) {
      row = cache_.data + page_ * cache_.page_stride + cache_.page_size.rem(index_) * cache_.row_stride;
    }
    index_ = next_index_;
    page_ = fetch_page(index_);
    next_index_ = fetch_index(tile + 2);
    return row;
  }

 private:
  __device__ __forceinline__ int fetch_index(int tile) const {
    const int entry = tile * kTileTokens + row_;
    return entry < listed_ ? list_[entry] : -1;
  }

  __device__ __forceinline__ int fetch_page(int index) const {
    if (index < 0) return -1;
    const int page = cache_.page_size.div(index);
    if (cache_.block_table == nullptr) return uint32_t(index) < cache_.rows ? page : -1;
    return table_ != nullptr && page < cache_.max_pages ? table_[page] : -1;
  }

  const GatheredCache& cache_;
  const int row_;  // of a tile; behind its end: this lane has none
  const int32_t* list_ = nullptr;
  const int32_t* table_ = nullptr;  // of the token's request
  int listed_ = 0;
  int index_ = -1;
  int next_index_ = -1;
  int page_ = -1;
};

// A warp's rows of a tile, as its lanes hold them.
struct WarpRows {
  const char* row;     // of this lane
  uint32_t valid;      // a bit a lane
  const GatheredCache& cache;

  __device__ __forceinline__ WarpRows(const char* row, const GatheredCache& cache)
      : row(row), valid(__ballot_sync(0xffffffff, row != nullptr)), cache(cache) {}

  // The row that another lane holds. Called by the whole warp.
  __device__ __forceinline__ const char* held_by(int lane) const {
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(row), lane));
  }
  // 16 bytes of it, or zeros where it does not exist or is no wider.
  __device__ __forceinline__ void copy(const char* from, int lane, int offset, char* target) const {
    const bool exists = (valid >> lane & 1) && offset < cache.row_bytes;
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<const cute::uint128_t*>(exists ? from + offset : cache.data),
        *reinterpret_cast<cute::uint128_t*>(target), exists);
  }
};

// The chunks of a stage, [tokens x 64 columns] each in WGMMA's swizzle: eight lanes a row.
template <class T>
__device__ __forceinline__ void copy_chunks(const WarpRows& rows, int warp, int first_chunk, char* stage) {
  constexpr int kLineBytes = kChunkColumns * sizeof(typename T::Element);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 2
  for (int group = warp, k = 0; group < kTileTokens / 4; group += T::kGatherWarps, ++k) {
    const int row = group * 4 + lane / 8;
    const int holder = k * 4 + lane / 8;
    const char* from = rows.held_by(holder);
    char* target = stage + row * kLineBytes + (lane % 8 ^ swizzle<kLineBytes>(row)) * kUnitBytes;
    CUTE_UNROLL
    for (int c = 0; c < T::kChunksPerStage; ++c) {
      rows.copy(from, holder, (first_chunk + c) * kLineBytes + lane % 8 * kUnitBytes, target + c * kTileTokens * kLineBytes);
    }
  }
}

// Whole rows as they are: the latent part by 32 lanes, then what is behind it of all rows in one run of units.
template <class T>
__device__ __forceinline__ void copy_rows(const WarpRows& rows, int warp, char* stage) {
  constexpr int kLatentUnits = kLatentDim / kUnitBytes;
  constexpr int kTailUnits = T::kRowBytes / kUnitBytes - kLatentUnits;
  constexpr int kWarpRows = kTileTokens / T::kGatherWarps;
  static_assert(kLatentUnits == kWarpSize && kTileTokens / 4 % T::kGatherWarps == 0);
  const int lane = threadIdx.x % kWarpSize;
  const auto place = [&](int held) { return stage + ((warp + held / 4 * T::kGatherWarps) * 4 + held % 4) * T::kRowBytes; };
#pragma unroll 4
  for (int held = 0; held < kWarpRows; ++held) {
    const int offset = lane * kUnitBytes;
    rows.copy(rows.held_by(held), held, offset, place(held) + offset);
  }
#pragma unroll 1
  for (int first = 0; first < kWarpRows * kTailUnits; first += kWarpSize) {
    const int held = min((first + lane) / kTailUnits, kWarpRows - 1);
    const int unit = kLatentUnits + first + lane - held * kTailUnits;
    const char* from = rows.held_by(held);
    if (unit < kLatentUnits + kTailUnits) rows.copy(from, held, unit * kUnitBytes, place(held) + unit * kUnitBytes);
  }
}

template <class T>
__device__ __forceinline__ void load_rows(typename T::SharedStorage& shared, const DecodeParams& params,
                                          const GatheredCache& cache, int partition, int warp) {
  const int lane = threadIdx.x % kWarpSize;
  RingPosition<T::kStages> at;
  uint32_t even = 0, odd = 0;  // grants that consumers 0 and 1 got in earlier pieces
  RowFetcher<T::kGatherWarps> fetcher(cache, warp);
  EvenWalk walk(params, partition);
  while (!walk.done()) {
    const Piece piece = walk.next();
    if (piece.tiles() == 0) continue;
    fetcher.begin(piece);
    for (int tile = piece.begin_tile; tile < piece.end_tile; ++tile) {
      const int i = tile - piece.begin_tile;
      const WarpRows rows(fetcher.next(tile), cache);
#pragma unroll 1
      for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
        ETAP_MARKED(rows_room, shared.keys.acquire(at));
        if (stage == 0 && lane * T::kGatherWarps + warp < kTileTokens / 4) {
          shared.valid[at.stage].fours[lane * T::kGatherWarps + warp] = rows.valid >> (lane * 4) & 15;
        }
        char* target = shared.ring + at.stage * T::kStageBytes;
        if constexpr (T::kFp8Cache) {
          copy_rows<T>(rows, warp, target);
        } else {
          copy_chunks<T>(rows, warp, T::first_chunk(stage, i), target);
        }
        // The stage is full when the copies of all lanes are there, which each of them counts, and the warps say so.
        ETAP_MARKED(rows_arrival, cutlass::arch::cpasync_barrier_arrive(shared.keys.full_barrier(at)));
        __syncwarp();
        if (lane != 0) continue;
        ETAP_MARKED(rows_commit, shared.keys.commit(at));
        if constexpr (T::kGrantsTiles) {
          const uint32_t before = i % kConsumerGroups == 0 ? even : odd;
          if (stage == 0) {
            ETAP_MARKED(rows_grant, shared.granted[i % kConsumerGroups].signal(before + i / kConsumerGroups));
          }
        }
      }
    }
    if constexpr (T::kGrantsTiles) {
      // Stages lent to the consumers for merging their halves: granted, not filled. Nobody waits for them to be full, so that
      // the grant must tell that all warps have passed them: one that has not would count in the stages' next round.
      for (int stage = 0; stage < kConsumerGroups * T::kMergeStages; ++stage, at.advance(1)) {
        ETAP_MARKED(lent_room, shared.keys.acquire(at));
        if (lane == 0) ETAP_MARKED(lent_commit, shared.keys.commit(at));
      }
      even += (piece.tiles() + 1) / kConsumerGroups;
      odd += piece.tiles() / kConsumerGroups;
      if (lane == 0) {
        shared.granted[0].signal(even);
        shared.granted[1].signal(odd);
      }
      ++even;
      ++odd;
    }
  }
}

}  // namespace etap::sparse

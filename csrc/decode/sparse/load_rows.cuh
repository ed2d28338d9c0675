// The row producers of sparse attention: warps that gather listed rows of the cache with cp.async, 16 bytes a lane, into the
// key ring. One bulk copy a row is up to twice as slow.
#pragma once

#include "common/ptx.cuh"
#include "decode/pieces.cuh"
#include "decode/sparse/cache.h"
#include "decode/sparse/validity.cuh"
#include "decode/traits.h"

namespace etap::sparse {

// A warp copies eight rows at a time, four by each instruction: eight lanes a row, a line of 128 bytes each.
constexpr int kOctetRows = 8;
constexpr int kOctets = kTileTokens / kOctetRows;
constexpr int kHalfRows = kOctetRows / 2;
constexpr int kLineUnits = 8;
constexpr int kLineBytes = kLineUnits * kUnitBytes;

// Octets are dealt to the warps in turn. A lane fetches one row of its warp's: lane 8k + j the j-th of its k-th octet, its
// index two tiles before it is copied and its page one, so that neither is waited for.
template <int kWarps>
class RowFetcher {
 public:
  __device__ __forceinline__ RowFetcher(const GatheredCache& cache, int warp)
      : cache_(cache), row_((warp + threadIdx.x % kWarpSize / kOctetRows * kWarps) * kOctetRows + threadIdx.x % kOctetRows) {}

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
  bool exists = false;  // this lane's row
  uint64_t row = 0;     // where it begins; one that does not exist: where the cache begins, which is not read
  uint32_t valid = 0;   // a bit a lane

  WarpRows() = default;
  __device__ __forceinline__ WarpRows(const char* row, const GatheredCache& cache)
      : exists(row != nullptr), row(reinterpret_cast<uint64_t>(exists ? row : cache.data)),
        valid(__ballot_sync(0xffffffff, exists)) {}

  // The row that another lane holds. Called by the whole warp.
  __device__ __forceinline__ uint64_t held_by(int lane) const { return __shfl_sync(0xffffffff, row, lane); }
};

// Half octets of a warp.
template <class T>
constexpr int kHalvesOf = 2 * kOctets / T::kGatherWarps;

// The rows of a tile that a lane copies lines of, one of each half octet of its warp's, for chunks of [tokens x 64 columns]
// each in WGMMA's swizzle.
template <class T>
class ChunkCopier {
 public:
  __device__ __forceinline__ ChunkCopier(const GatheredCache& cache, int warp)
      : has_rope_(cache.row_bytes > kLatentDim * int(sizeof(typename T::Element))) {
    const int row = threadIdx.x % kWarpSize / kLineUnits, unit = threadIdx.x % kLineUnits;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row_of_octet = half * kHalfRows + row;
      places_[half] = (warp * kOctetRows + row_of_octet) * kLineBytes + (unit ^ swizzle<kLineBytes>(row_of_octet)) * kUnitBytes;
    }
  }

  // Takes the rows of a tile. Called by the whole warp.
  __device__ __forceinline__ void take(const WarpRows& rows) {
    const int row = threadIdx.x % kWarpSize / kLineUnits;
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      from_[i] = rows.held_by(i * kHalfRows + row) + threadIdx.x % kLineUnits * kUnitBytes;
    }
    valid_ = rows.valid >> row;
  }

  // Copies chunks that follow each other in the rows and in shared memory, from this address on. The last of a run may be
  // rope.
  template <int kRunChunks, bool kRope>
  __device__ __forceinline__ void copy(int first_chunk, uint32_t target) const {
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const uint64_t from = from_[i] + first_chunk * kLineBytes;
      const uint32_t to = target + places_[i % 2] + i / 2 * T::kGatherWarps * kOctetRows * kLineBytes;
      const bool exists = valid_ >> (i * kHalfRows) & 1;
      CUTE_UNROLL
      for (int c = 0; c < kRunChunks; ++c) {
        const bool within = !kRope || c < kRunChunks - 1 || has_rope_;
        ptx::copy_async_16(to + c * kTileTokens * kLineBytes, from + c * kLineBytes, exists && within);
      }
    }
  }

 private:
  static constexpr int kHalves = kHalvesOf<T>;

  const bool has_rope_;  // otherwise its columns are zeros
  int places_[2];        // in a chunk, of the warp's first octet's halves
  uint64_t from_[kHalves];
  uint32_t valid_ = 0;  // bit 4i: the i-th of them
};

// The same for whole rows as they are. Eight lanes take the five lines of 128 bytes of the cache in which a row begins, those
// before its beginning what lies in the sixth; so no sector is fetched twice. The 41st unit comes from the lanes that hold the
// rows.
template <class T>
class RowCopier {
 public:
  __device__ __forceinline__ RowCopier(const GatheredCache& cache, int warp)
      : row_bytes_(cache.row_bytes),
        lane_(anew(threadIdx.x % kWarpSize)),
        offset_(lane_ % kLineUnits * kUnitBytes),
        place_((warp * kOctetRows + lane_ / kLineUnits) * T::kRowBytes),
        own_place_(((warp + lane_ / kOctetRows * T::kGatherWarps) * kOctetRows + lane_ % kOctetRows) * T::kRowBytes) {}

  __device__ __forceinline__ void take(const WarpRows& rows) { rows_ = rows; }

  // Called by the whole warp.
  template <int, bool>
  __device__ __forceinline__ void copy(int, uint32_t tile) const {
    const int row = lane_ / kLineUnits;
    const uint32_t valid = rows_.valid >> row;
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const uint64_t from = rows_.held_by(i * kHalfRows + row);
      const uint32_t to = tile + place_ + (i / 2 * T::kGatherWarps * kOctetRows + i % 2 * kHalfRows) * T::kRowBytes;
      const bool exists = valid >> (i * kHalfRows) & 1;
      const int begin = offset_ - int(from % kLineBytes);  // of this lane's unit of the first line, in the row
      CUTE_UNROLL
      for (int line = 0; line < kLines; ++line) {
        const int at = line == 0 && begin < 0 ? begin + kLast : begin + line * kLineBytes;
        // Units of the second to fourth line are latent columns.
        const bool within = (line > 0 && (line + 1) * kLineBytes <= kLatentDim) || at < row_bytes_;
        ptx::copy_async_16(to + at, from + at, exists && within);
      }
    }
    if (lane_ < kHalves * kHalfRows) {
      ptx::copy_async_16(tile + own_place_ + kLast, rows_.row + kLast, rows_.exists && kLast < row_bytes_);
    }
  }

 private:
  static constexpr int kLines = T::kRowBytes / kLineBytes;
  static constexpr int kLast = kLines * kLineBytes;  // where the last unit begins
  static constexpr int kHalves = kHalvesOf<T>;
  static_assert(T::kRowBytes == kLast + kUnitBytes);

  const int row_bytes_;  // units behind them are zeros
  const int lane_;
  const int offset_;     // of this lane, in a line
  const int place_;      // in a tile, of the row of the warp's first four that this lane copies
  const int own_place_;  // of the row that this lane holds
  WarpRows rows_;
};

// Tiles of a partition from which on a call is taken for a prompt's: its tokens name the same rows again and again, which then
// come from L2, whose answers more requests do not delay.
constexpr int kPromptTiles = 256;

template <class T>
__device__ __forceinline__ void load_rows(typename T::SharedStorage& shared, const DecodeParams& params,
                                          const GatheredCache& cache, int partition, int warp) {
  static_assert(kOctets % T::kGatherWarps == 0);
  const int lane = threadIdx.x % kWarpSize;
  const int four = (warp + lane / 2 * T::kGatherWarps) * 2 + lane % 2;  // rows whose bits of the mask this lane writes
  const uint32_t ring = cute::cast_smem_ptr_to_uint(shared.ring);
  constexpr int kStagesInFlight = (kBytesInFlight + T::kStageBytes / 2) / T::kStageBytes;
  // In a smaller ring, as at 64 rows, holding back gains nothing; and a late warp would wait for a round of a stage that the
  // others fill again already.
  constexpr bool kHoldsBack = T::kRowTile < 64 && T::kStages >= 2 * kStagesInFlight;
  RingPosition<T::kStages> at;
  uint32_t even = 0, odd = 0;  // grants that consumers 0 and 1 got in earlier pieces
  RowFetcher<T::kGatherWarps> fetcher(cache, warp);
  std::conditional_t<T::kFp8Cache, RowCopier<T>, ChunkCopier<T>> copier(cache, warp);
  typename T::Walk walk(params, partition);
  while (!walk.done()) {
    const Piece piece = walk.next();
    if (piece.tiles() == 0) continue;
    fetcher.begin(piece);
    for (int tile = piece.begin_tile; tile < piece.end_tile; ++tile) {
      const int i = tile - piece.begin_tile;
      const WarpRows rows(fetcher.next(tile), cache);
      copier.take(rows);
      cute::for_each(cute::make_seq<T::kRuns>{}, [&](auto run) {
        constexpr int kBegin = T::run_begin(run), kRunStages = T::run_begin(run + 1) - kBegin;
        // No more in flight than wanted; room in the ring.
        if (kHoldsBack && params.partition_tiles < kPromptTiles) shared.keys.wait(at.behind(kStagesInFlight));
        CUTE_UNROLL
        for (int s = 0; s < kRunStages; ++s) ETAP_MARKED(rows_room, shared.keys.acquire(at.ahead(s)));
        if (kBegin == 0 && four < kTileTokens / kHalfRows) {
          shared.valid[at.stage].fours[four] = rows.valid >> (lane * kHalfRows) & 15;
        }
        copier.template copy<kRunStages * T::kChunksPerStage, run == T::kRopeRun>(T::first_chunk(kBegin, i),
                                                                                 ring + at.stage * T::kStageBytes);
        // A stage is full when the copies of all lanes are there, which each of them counts, and the warps say so.
        CUTE_UNROLL
        for (int s = 0; s < kRunStages; ++s) {
          ETAP_MARKED(rows_arrival, cutlass::arch::cpasync_barrier_arrive(shared.keys.full_barrier(at.ahead(s))));
        }
        __syncwarp();
        if (lane == 0) {
          CUTE_UNROLL
          for (int s = 0; s < kRunStages; ++s) ETAP_MARKED(rows_commit, shared.keys.commit(at.ahead(s)));
          if constexpr (T::kGrantsTiles) {
            const uint32_t before = i % kConsumerGroups == 0 ? even : odd;
            if (kBegin == 0) ETAP_MARKED(rows_grant, shared.granted[i % kConsumerGroups].signal(before + i / kConsumerGroups));
          }
        }
        at.advance(kRunStages);
      });
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

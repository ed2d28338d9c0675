// The producers of sparse attention are four warps that bring listed rows of the caches into the key ring. Rows are copied with
// cp.async (one bulk copy a row is up to twice as slow). Consumers find chunks of [tokens x 64 columns] in WGMMA's swizzle, or FP8
// rows as they are; but for 64 query rows V4's go through registers and become bfloat16.
#pragma once

#include "decode/load/dequantise.cuh"
#include "decode/load/row_stream.cuh"
#include "decode/layouts/tile_mask.cuh"
#include "decode/layouts/common.h"

namespace etap::sparse {

constexpr int kLineBytes = 128;  // of a chunk's row
constexpr int kHalfRows = kOctetRows / 2;
constexpr int kLineUnits = kLineBytes / kUnitBytes;

// Whether a lane says that its warp's part of a stage is there: one does, in debug builds each for itself, as with releases().
CUTE_DEVICE bool commits(bool elected) { return elected || kReleasingLanes > 1; }

// Tells a tile's consumers which of its rows there are. The warp that brings them calls it.
CUTE_DEVICE void write_mask(TileMask& mask, uint32_t present) {
  const int thread = anew(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize - kConsumerWarps;
  if (lane >= 2 * kOctets) return;
  mask.fours[(warp + lane / 2 * kWarpsPerGroup) * 2 + lane % 2] = present >> (lane * kHalfRows) & 15;
}

// Tells the consumers that their tiles have been begun, and that stages for merging are theirs: see producers/load_tiles.cuh. One lane of each
// producer warp signals.
template <class T>
class ListedTileReady {
 public:
  // The i-th tile of a split.
  CUTE_DEVICE void signal_tile(Shared<T>& shared, int i) const {
    if constexpr (T::kAlternatingTiles) {
      const uint32_t before = i % kConsumerGroups == 0 ? even_ : odd_;
      ETAP_MARKED(rows_ready, shared.tile_ready[i % kConsumerGroups].signal(before + i / kConsumerGroups));
    }
  }

  // Stages lent to the consumers for merging their halves: granted, not filled. Nobody waits for them to be full, so that the
  // grant must tell that all warps have passed them: one that has not would count in the stages' next round.
  CUTE_DEVICE void end_split(Shared<T>& shared, KeyPosition<T>& at, int tiles) {
    if constexpr (T::kAlternatingTiles) {
      const bool elected = threadIdx.x % kWarpSize == 0;
      for (int stage = 0; stage < kConsumerGroups * T::kMergeStages; ++stage, at.advance(1)) {
        ETAP_MARKED(lent_room, shared.keys.acquire(at));
        if (commits(elected)) ETAP_MARKED(lent_commit, shared.keys.commit(at));
      }
      even_ += (tiles + 1) / kConsumerGroups;
      odd_ += tiles / kConsumerGroups;
      if (T::kMergeStages == 0) return;
      if (elected) {
        shared.tile_ready[0].signal(even_);
        shared.tile_ready[1].signal(odd_);
      }
      ++even_;
      ++odd_;
    }
  }

 private:
  uint32_t even_ = 0, odd_ = 0;  // that consumers 0 and 1 got in earlier splits
};

// Copies rows of bfloat16: eight lanes take a line of 128 bytes of a row, one instruction four rows.
template <class T>
class LineCopier {
 public:
  CUTE_DEVICE LineCopier(const SparseParams&, int warp) {
    const int row = threadIdx.x % kWarpSize / kLineUnits, unit = threadIdx.x % kLineUnits;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row_of_octet = half * kHalfRows + row;
      places_[half] = (warp * kOctetRows + row_of_octet) * kLineBytes + (unit ^ swizzle<kLineBytes>(row_of_octet)) * kUnitBytes;
    }
  }

  // Takes the rows of a tile. The whole warp calls it.
  CUTE_DEVICE void take(const WarpRows& rows) {
    const int row = threadIdx.x % kWarpSize / kLineUnits;
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      from_[i] = rows.row_of(i * kHalfRows + row) + threadIdx.x % kLineUnits * kUnitBytes;
    }
    present_ = rows.present >> row;
  }

  // Copies chunks that follow each other in the rows and in shared memory, from this address on.
  template <int kRunChunks>
  CUTE_DEVICE void copy(int first_chunk, uint32_t target) const {
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const uint64_t from = from_[i] + first_chunk * kLineBytes;
      const uint32_t to = target + places_[i % 2] + i / 2 * kWarpsPerGroup * kOctetRows * kLineBytes;
      const bool exists = present_ >> (i * kHalfRows) & 1;
      CUTE_UNROLL
      for (int c = 0; c < kRunChunks; ++c) {
        ptx::copy_async_16(to + c * kTileTokens * kLineBytes, from + c * kLineBytes, exists);
      }
    }
  }

 private:
  static constexpr int kHalves = 2 * kOctets;

  int places_[2];  // in a chunk, of the warp's first octet's halves
  uint64_t from_[kHalves];
  uint32_t present_ = 0;  // bit 4i: the i-th of them
};

// The rows of a tile that a warp copies as they are, kLanes lanes a row.
template <class T, int kLanes>
class WholeRows {
 public:
  CUTE_DEVICE explicit WholeRows(int warp)
      : lane_(anew(threadIdx.x % kWarpSize)),
        place_((warp * kOctetRows + lane_ / kLanes) * T::kRowBytes),
        own_place_(((warp + lane_ / kOctetRows * kWarpsPerGroup) * kOctetRows + lane_ % kOctetRows) * T::kRowBytes) {}

  CUTE_DEVICE void take(const WarpRows& rows) { rows_ = rows; }

 protected:
  const int lane_;
  const int place_;      // in a tile, of the row that this lane copies, the warp's first time
  const int own_place_;  // of the row that this lane holds
  WarpRows rows_;
};

// Copies whole rows as they are, instead of lines. Eight lanes take the five lines of 128 bytes of the cache in which a row begins, those
// before its beginning what lies in the sixth; so no sector is fetched twice. The 41st unit comes from the lanes that hold the
// rows.
template <class T>
class RowCopier : public WholeRows<T, kLineUnits> {
  using Rows = WholeRows<T, kLineUnits>;
  using Rows::lane_, Rows::place_, Rows::own_place_, Rows::rows_;

 public:
  CUTE_DEVICE RowCopier(const SparseParams& params, int warp)
      : Rows(warp), row_bytes_(params.row_bytes), offset_(lane_ % kLineUnits * kUnitBytes) {}

  // The whole warp calls it.
  template <int>
  CUTE_DEVICE void copy(int, uint32_t tile) const {
    const int row = lane_ / kLineUnits;
    const uint32_t valid = rows_.present >> row;
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      const uint64_t from = rows_.row_of(i * kHalfRows + row);
      const uint32_t to = tile + place_ + (i / 2 * kWarpsPerGroup * kOctetRows + i % 2 * kHalfRows) * T::kRowBytes;
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
      ptx::copy_async_16(tile + own_place_ + kLast, rows_.row + kLast, (rows_.present >> lane_ & 1) && kLast < row_bytes_);
    }
  }

 private:
  static constexpr int kLines = T::kRowBytes / kLineBytes;
  static constexpr int kLast = kLines * kLineBytes;  // where the last unit begins
  static constexpr int kHalves = 2 * kOctets;
  static_assert(T::kRowBytes == kLast + kUnitBytes);

  const int row_bytes_;  // units behind them are zeros
  const int offset_;     // of this lane, in a line
};

// Does the same with V4's rows, whose scales come from behind their page's rows. Four lanes take 64 bytes of a row, one instruction
// those of an octet.
template <class T>
class PageRowCopier : public WholeRows<T, kRowLanes> {
  using Rows = WholeRows<T, kRowLanes>;
  using Rows::lane_, Rows::place_, Rows::own_place_, Rows::rows_;

 public:
  CUTE_DEVICE PageRowCopier(const SparseParams&, int warp) : Rows(warp) {}

  // The whole warp calls it.
  template <int>
  CUTE_DEVICE void copy(int, uint32_t tile) const {
    if (lane_ < kOctets * kOctetRows) {
      ptx::copy_async_8(tile + own_place_ + T::Row::kScaleOffset, rows_.row + rows_.scales, rows_.present >> lane_ & 1);
    }
    CUTE_UNROLL
    for (int octet = 0; octet < kOctets; ++octet) {
      const int holder = octet * kOctetRows + lane_ / kRowLanes;
      const int unit = lane_ % kRowLanes * kUnitBytes;
      const uint64_t from = rows_.row_of(holder) + unit;
      const uint32_t to = tile + place_ + unit + octet * kWarpsPerGroup * kOctetRows * T::kRowBytes;
      const bool exists = rows_.present >> holder & 1;
      CUTE_UNROLL
      for (int i = 0; i < T::Row::kScaleOffset; i += kRowLanes * kUnitBytes) ptx::copy_async_16(to + i, from + i, exists);
    }
  }
};

template <class T>
using CopierOf = std::conditional_t<!T::kFp8Cache, LineCopier<T>, std::conditional_t<T::kScalesApart, PageRowCopier<T>, RowCopier<T>>>;

// Tiles of a partition from which on a call is taken for a prompt's: its tokens name the same rows again and again, which then
// come from L2, whose answers more requests do not delay.
constexpr int kPromptTiles = 256;

// kLists: see RowStream.
template <class T, int kLists>
CUTE_DEVICE void copy_rows(Shared<T>& shared, const DecodeParams& params, int partition, int warp) {
  const bool elected = threadIdx.x % kWarpSize == 0;
  const uint32_t ring = cute::cast_smem_ptr_to_uint(shared.ring);
  // In a smaller ring, as at 64 rows, holding back gains nothing; and a late warp would wait for a round of a stage that the
  // others fill again already. Few of V4's smaller rows are on their way as it is.
  const bool holds_back = T::kRowTile < 64 && !T::kScalesApart && T::kStages >= 2 * kStagesInFlight<T> &&
                          params.sparse.partition_tiles < kPromptTiles;
  KeyPosition<T> at;
  ListedTileReady<T> ready;
  RowStream<kLists> stream(params, partition, warp);
  CopierOf<T> copier(params.sparse, warp);
  int i = -RowStream<kLists>::kAhead;  // of the split's tiles; below 0 there are none yet
  while (true) {
    const WarpRows rows = stream.next();
    if (i < 0) {
      ++i;
      continue;
    }
    if (!rows.is_tile) return;
    copier.take(rows);
    cute::for_each(cute::make_seq<T::kRuns>{}, [&](auto run) {
      constexpr int kRun = decltype(run)::value;
      constexpr int kBegin = T::run_begin(kRun), kRunStages = T::run_begin(kRun + 1) - kBegin;
      // No more in flight than wanted; room in the ring.
      if (holds_back) shared.keys.wait(at.behind(kStagesInFlight<T>));
      CUTE_UNROLL
      for (int s = 0; s < kRunStages; ++s) ETAP_MARKED(rows_room, shared.keys.acquire(at.ahead(s)));
      if (kBegin == 0) write_mask(shared.valid[at.stage], rows.present);
      copier.template copy<kRunStages * T::kChunksPerStage>(T::first_chunk(kBegin, i), ring + at.stage * T::kStageBytes);
      // A stage is full when the copies of all lanes are there, which each of them counts, and the warps say so.
      CUTE_UNROLL
      for (int s = 0; s < kRunStages; ++s) {
        ETAP_MARKED(rows_arrival, cutlass::arch::cpasync_barrier_arrive(shared.keys.full_barrier(at.ahead(s))));
      }
      __syncwarp();
      if (commits(elected)) {
        CUTE_UNROLL
        for (int s = 0; s < kRunStages; ++s) ETAP_MARKED(rows_commit, shared.keys.commit(at.ahead(s)));
        if (kBegin == 0 && elected) ready.signal_tile(shared, i);
      }
      at.advance(kRunStages);
    });
    if (rows.last) ready.end_split(shared, at, i + 1);
    i = rows.last ? 0 : i + 1;
  }
}

// Brings V4's rows for 64 query rows. A warp holds an octet in registers; when the chunks of a stage have become columns, the same ones of the octet behind it
// are asked for. Stages of a tile are few: the hardware counts loads on their way in few counters, and a wait for early ones would be
// one for late ones, too.
template <class T>
class Dequantiser {
 public:
  CUTE_DEVICE Dequantiser(Shared<T>& shared, const DecodeParams& params, int partition, int warp)
      : shared_(shared),
        stream_(params, partition, warp),
        place_(cute::cast_smem_ptr_to_uint(shared.ring) + (warp * kOctetRows + HeldRow::row()) * kLineBytes) {
#pragma unroll 1
    for (int i = 0; i <= RowStream<2>::kAhead; ++i) tile_ = stream_.next();
    aim(0);
    cute::for_each(cute::make_seq<T::kTileChunks>{}, [&](auto chunk) { held_.template load<decltype(chunk)::value>(present_, from_); });
  }

  CUTE_DEVICE bool done() const { return !tile_.is_tile; }

  // Brings the next tile, its split's i-th, into the ring; returns whether it is the split's last.
  CUTE_DEVICE bool fill(KeyPosition<T>& at, int i) {
    const bool last = tile_.last;
    cute::for_each(cute::make_seq<kOctets>{}, [&](auto octet) {
      constexpr int kOctet = decltype(octet)::value;
      const uint32_t present = tile_.present;
      // The octet behind this one: of this tile, or the first of the next one.
      if (kOctet == kOctets - 1) tile_ = stream_.next();
      aim((kOctet + 1) % kOctets);
      if (held_.large()) {
        fill_octet<kOctet, true>(at, i, present);
      } else {
        fill_octet<kOctet, false>(at, i, present);
      }
    });
    at.advance(T::kStagesPerTile);
    return last;
  }

 private:
  // Takes an octet of the tile for the one that is asked for next, and asks for its scales at once. The whole warp calls it.
  CUTE_DEVICE void aim(int octet) {
    const int holder = octet * kOctetRows + HeldRow::row();
    from_ = tile_.row_of(holder) + HeldRow::lane() * kUnitBytes;
    present_ = tile_.present >> holder & 1;
    held_.advance_scales(present_, from_, tile_.scales_of(holder));
  }

  template <int kOctet, bool kLarge>
  CUTE_DEVICE void fill_octet(KeyPosition<T> at, int i, uint32_t present) {
    constexpr bool kFirst = kOctet == 0, kLast = kOctet == kOctets - 1;
    cute::for_each(cute::make_seq<T::kStagesPerTile>{}, [&](auto stage) {
      constexpr int kStage = decltype(stage)::value;
      const auto to = at.ahead(kStage);
      if (kFirst) ETAP_MARKED(rows_room, shared_.keys.acquire(to));
      if (kFirst && kStage == 0) write_mask(shared_.valid[to.stage], present);
      convert_stage<kOctet, kStage, kLarge>(to.stage, i);
      if (kLast) {
        // For WGMMA the consumers fence, as they do where rows are copied: here a fence would wait for all loads on their way.
        __syncwarp();
        if (commits(cute::elect_one_sync())) ETAP_MARKED(rows_commit, shared_.keys.commit(to));
      }
    });
  }

  // Converts the chunks of a stage. Which these are depends on the tile's place in its split.
  template <int kOctet, int kStage, bool kLarge>
  CUTE_DEVICE void convert_stage(int stage, int i) {
    constexpr int kEven = T::first_chunk(kStage, 0), kOdd = T::first_chunk(kStage, 1);
    const uint32_t to = place_ + stage * T::kStageBytes;
    if (kEven == kOdd || i % kConsumerGroups == 0) {
      convert_chunks<kOctet, kEven, kLarge>(to);
    } else {
      convert_chunks<kOctet, kOdd, kLarge>(to);
    }
  }

  template <int kOctet, int kFirstChunk, bool kLarge>
  CUTE_DEVICE void convert_chunks(uint32_t target) {
    cute::for_each(cute::make_seq<T::kChunksPerStage>{}, [&](auto chunk) {
      constexpr int kChunk = decltype(chunk)::value;
      uint4 columns[2];
      held_.template columns<kFirstChunk + kChunk, kLarge>(columns);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        constexpr int kPlace = (kChunk * kTileTokens + kOctet * kWarpsPerGroup * kOctetRows) * kLineBytes;
        const int unit = HeldRow::unit<kFirstChunk + kChunk>(half) ^ swizzle<kLineBytes>(HeldRow::row());
        ptx::store_shared(target + kPlace + unit * kUnitBytes, columns[half]);
      }
    });
    cute::for_each(cute::make_seq<T::kChunksPerStage>{}, [&](auto chunk) {
      held_.template load<kFirstChunk + decltype(chunk)::value>(present_, from_);
    });
  }

  Shared<T>& shared_;
  RowStream<2> stream_;
  const uint32_t place_;  // of this lane's row of the warp's first octet, in the first stage
  WarpRows tile_;         // whose octets are asked for
  uint64_t from_;
  bool present_;
  HeldRow held_;
};

template <class T>
CUTE_DEVICE void dequantise_rows(Shared<T>& shared, const DecodeParams& params, int partition, int warp) {
  static_assert(!T::kAlternatingTiles);
  KeyPosition<T> at;
  Dequantiser<T> rows(shared, params, partition, warp);
  for (int i = 0; !rows.done();) i = rows.fill(at, i) ? 0 : i + 1;  // of the split's tiles
}

template <class T>
CUTE_DEVICE void load_rows(Shared<T>& shared, const DecodeParams& params, int partition, int warp) {
  if constexpr (T::kDequantises) {
    if (params.sparse.format == RowFormat::kPageScaledFp8) return dequantise_rows<T>(shared, params, partition, warp);
  }
  if constexpr (!T::kScalesApart) {  // of which the stream of one list knows nothing
    if (params.sparse.lists[1].width == 0) return copy_rows<T, 1>(shared, params, partition, warp);
  }
  copy_rows<T, 2>(shared, params, partition, warp);
}

}  // namespace etap::sparse

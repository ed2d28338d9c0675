// The source of sparse attention: four warps bring listed rows of the caches into the ring with cp.async (one bulk copy a row is up
// to twice as slow). Consumers find chunks of [tokens x 64 columns] in WGMMA's swizzle, or FP8 rows as they are.
#pragma once

#include "decode/load/fill_ring.cuh"
#include "decode/load/row_stream.cuh"

namespace etap::sparse {

constexpr int kLineUnits = kLineBytes / kUnitBytes;

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

// Copies whole rows as they are, instead of lines. Eight lanes take the five lines of 128 bytes of the cache in which a row begins,
// those before its beginning what lies in the sixth; so no sector is fetched twice. The 41st unit comes from the lanes that hold
// the rows.
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

// Copies V4's rows as they are, whose scales come from behind their page's rows. Four lanes take 64 bytes of a row, one instruction
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

// Copies the rows of lists as they are. kLists: see RowStream.
template <class T, int kLists>
class ListedRows {
 public:
  static constexpr int kAhead = RowStream<kLists>::kAhead;
  static constexpr bool kGathers = true;

  CUTE_DEVICE ListedRows(Shared<T>& shared, const DecodeParams& params, int partition, int warp)
      : shared_(shared),
        ring_(cute::cast_smem_ptr_to_uint(shared.ring)),
        holds_back_(kMayHoldBack && params.sparse.partition_tiles < kPromptTiles),
        stream_(params, partition, warp),
        copier_(params.sparse, warp) {}

  CUTE_DEVICE bool next_tile(int i) {
    rows_ = stream_.next();
    if (i < 0) return true;
    if (!rows_.is_tile) return false;
    copier_.take(rows_);
    return true;
  }
  CUTE_DEVICE bool single() const { return false; }
  CUTE_DEVICE bool last() const { return rows_.last; }
  CUTE_DEVICE void acquire_lent(KeyPosition<T> at) { ETAP_MARKED(lent_room, shared_.keys.acquire(at)); }
  CUTE_DEVICE void finish() {}

  // Rows of bfloat16 fill some stages together.
  template <class Begun>
  CUTE_DEVICE void fill_tile(KeyPosition<T>& at, int i, Begun&& begun) {
    cute::for_each(cute::make_seq<T::kRuns>{}, [&](auto run) {
      constexpr int kRun = decltype(run)::value;
      constexpr int kBegin = T::run_begin(kRun), kRunStages = T::run_begin(kRun + 1) - kBegin;
      if (holds_back_) hold_back<T>(shared_, at.behind(kStagesInFlight<T>));
      // Consumers that are stuck keep the first stage of a run: that wait traps.
      CUTE_UNROLL
      for (int s = 0; s < kRunStages; ++s) ETAP_MARKED(rows_room, shared_.keys.acquire(at.ahead(s), s == 0));
      if (kBegin == 0) write_mask(shared_.valid[at.stage], rows_.present);
      copier_.template copy<kRunStages * T::kChunksPerStage>(T::first_chunk(kBegin, i), ring_ + at.stage * T::kStageBytes);
      // A stage is full when the copies of all lanes are there, which each of them counts, and the warps say so.
      CUTE_UNROLL
      for (int s = 0; s < kRunStages; ++s) {
        ETAP_MARKED(rows_arrival, cutlass::arch::cpasync_barrier_arrive(shared_.keys.full_barrier(at.ahead(s))));
      }
      __syncwarp();
      if (commits<kGathers>()) {
        CUTE_UNROLL
        for (int s = 0; s < kRunStages; ++s) ETAP_MARKED(rows_commit, shared_.keys.commit(at.ahead(s)));
        if (kBegin == 0 && threadIdx.x % kWarpSize == 0) begun();
      }
      at.advance(kRunStages);
    });
  }

 private:
  // In a smaller ring, as at 64 rows, holding back gains nothing; and a late warp would wait for a round of a stage that the others
  // fill again already. Few of V4's smaller rows are on their way as it is.
  static constexpr bool kMayHoldBack = T::kRowTile < 64 && !T::kScalesApart && T::kStages >= 2 * kStagesInFlight<T>;

  Shared<T>& shared_;
  const uint32_t ring_;
  const bool holds_back_;
  RowStream<kLists> stream_;
  CopierOf<T> copier_;
  WarpRows rows_;
};

}  // namespace etap::sparse

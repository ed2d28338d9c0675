// The source where pages are too small for TMA: warps copy the cache row by row with cp.async, 16 bytes a lane.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "decode/load/fill_ring.cuh"

namespace etap {

// The rows of a tile that a warp copies. Groups of four are dealt to the warps in turn: lane 4k + j has the j-th row of its warp's
// k-th group, and fetches its page one tile ahead. As with TMA, what lies behind the request's end in the table is read, but never
// used. A row behind that end, which the consumers hide, or on a page that the cache lacks is NaN.
template <int kWarps>
class PagedRows {
 public:
  CUTE_DEVICE PagedRows(const DecodeParams& params, int warp)
      : params_(params), row_((warp + threadIdx.x % kWarpSize / 4 * kWarps) * 4 + threadIdx.x % 4) {}

  // Begins a split.
  CUTE_DEVICE void begin(int request, int begin_tile) {
    pages_ = table_row(params_, request);
    next_page_ = fetch(begin_tile);
  }
  // Goes to the next tile, the split's first one to begin with.
  CUTE_DEVICE void advance(int tile, int seq_len) {
    const int token = tile * kTileTokens + row_;
    exists_ = row_ < kTileTokens && token < seq_len && uint32_t(next_page_) < uint32_t(params_.cache.pages);
    const uint32_t page = exists_ ? next_page_ : 0;
    const uint32_t place = params_.parts_per_page.rem(token);
    latent_ = page * params_.latent_steps.page + place * params_.latent_steps.row;
    rope_ = page * params_.rope_steps.page + place * params_.rope_steps.row;
    next_page_ = fetch(tile + 1);
  }

  // Whether this lane's row exists, and where both of its parts lie, in units.
  CUTE_DEVICE bool exists() const { return exists_; }
  CUTE_DEVICE uint32_t latent() const { return latent_; }
  CUTE_DEVICE uint32_t rope() const { return rope_; }

 private:
  CUTE_DEVICE int fetch(int tile) const {
    const int page = params_.parts_per_page.div(tile * kTileTokens + row_);
    return uint32_t(page) < uint32_t(params_.max_pages) ? pages_[page] : -1;
  }

  const DecodeParams& params_;
  const int row_;         // of a tile; behind its end: this lane has none
  const int32_t* pages_;  // of the request: [max_pages]
  int next_page_ = -1;
  bool exists_ = false;
  uint32_t latent_ = 0;
  uint32_t rope_ = 0;
};

// The latent part of a row that does not exist: NaN in every type of a cache.
struct NanRow {
  alignas(16) char bytes[kChunks * 128];
  constexpr NanRow() : bytes() {
    for (char& byte : bytes) byte = char(0xff);
  }
};
__device__ const NanRow kNanRow;

// Copies these rows, 16 bytes a lane: eight lanes take a line of 128 bytes of a row, a warp those of a group.
// Each lane gets the addresses that it needs once a tile, so that a stage costs little more than its copies.
template <class T>
class CopiedRows {
 public:
  CUTE_DEVICE CopiedRows(const PagedRows<T::kGatherWarps>& rows, const DecodeParams& params, int warp)
      : params_(params), warp_(warp), exist_(__ballot_sync(0xffffffff, rows.exists())), rope_(rows.rope()) {
    CUTE_UNROLL
    for (int k = 0; k < kHeld; ++k) latent_[k] = kHeld == 1 ? rows.latent() : held_by(k * 4 + lane() / 8, rows.latent());
  }

  // Copies so many lines of the latent part from `offset` on, each [tokens x line] in the swizzle.
  template <int kLines>
  CUTE_DEVICE void copy_latent(int offset, char* target) const {
    const char* const columns = params_.cache.latent + offset + lane() % 8 * kUnitBytes;
    const int row = warp_ * 4 + uint32_t(anew(lane())) / 8;
    const int first = row * kLineBytes + (lane() % 8 ^ swizzle<kLineBytes>(row)) * kUnitBytes;
#pragma unroll(kHeld)
    for (int k = 0; k < kGroups; ++k) {
      if (!has_group(k)) continue;
      // Worked out anew for each stage: there are no registers for all addresses.
      const uint32_t latent = kHeld == 1 ? held_by(k * 4 + lane() / 8, latent_[0]) : anew(latent_[k]);
      const bool exists = exist_ >> (k * 4 + lane() / 8) & 1;
      const char* const from = exists ? columns + uint64_t(latent) * params_.latent_steps.unit_bytes : kNanRow.bytes;
      // A step of an odd number of groups of four is half a turn of the swizzle.
      char* const to = target + k * T::kGatherWarps * 4 * kLineBytes + (first ^ k * T::kGatherWarps % 2 * 4 * kUnitBytes);
      CUTE_UNROLL
      for (int line = 0; line < kLines; ++line) {
        copy(from + line * kLineBytes, to + line * kTileTokens * kLineBytes);
      }
    }
  }

  // Copies the rope part. It is a line, or half of one: then half the lanes take it, and a warp two groups at a time.
  template <int kRopeBytes>
  CUTE_DEVICE void copy_rope(char* target) const {
    constexpr int kRowUnits = kRopeBytes / kUnitBytes;
    const char* const columns = params_.cache.rope + lane() % kRowUnits * kUnitBytes;
#pragma unroll(kHeld)
    for (int k = 0; k < kGroups; k += 8 / kRowUnits) {
      const uint32_t at = uint32_t(anew(lane())) / kRowUnits;  // of the rows of these groups
      const int held = k * 4 + at;
      const char* const row_at = columns + uint64_t(held_by(held, rope_)) * params_.rope_steps.unit_bytes;
      const char* const from = exist_ >> held & 1 ? row_at : kNanRow.bytes;
      const uint32_t row = (warp_ + (k + at / 4) * T::kGatherWarps) * 4 + at % 4;
      char* const to = target + row * kRopeBytes + (lane() % kRowUnits ^ swizzle<kRopeBytes>(row)) * kUnitBytes;
      if (has_group(k)) copy(from, to);
    }
  }

 private:
  static constexpr int kLineBytes = 128;
  static constexpr int kAllGroups = kTileTokens / 4;
  static constexpr int kGroups = (kAllGroups + T::kGatherWarps - 1) / T::kGatherWarps;  // the last warps may have one less

  static constexpr int kHeld = T::kStagesPerTile > 1 ? kGroups : 1;  // one: what this lane has fetched

  CUTE_DEVICE static int lane() { return threadIdx.x % kWarpSize; }
  // Returns what another lane holds. The whole warp calls it.
  CUTE_DEVICE static uint32_t held_by(int lane, uint32_t value) {
    return __shfl_sync(0xffffffff, value, lane);
  }
  CUTE_DEVICE bool has_group(int k) const {
    return kAllGroups % T::kGatherWarps == 0 || k + 1 < kGroups || warp_ < kAllGroups % T::kGatherWarps;
  }
  CUTE_DEVICE static void copy(const char* from, char* to) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(from),
                                                           *reinterpret_cast<cute::uint128_t*>(to));
  }

  const DecodeParams& params_;
  const int warp_;
  const uint32_t exist_;  // a bit a lane
  const uint32_t rope_;
  uint32_t latent_[kHeld];
};

// Copies a warp's rows of a stage.
template <class T>
CUTE_DEVICE void copy_stage(const CopiedRows<T>& rows, int first_chunk, char* target) {
  if constexpr (T::kFp8Cache) {
    rows.template copy_latent<T::kWideChunks>(0, target);
    rows.template copy_rope<kRopeDim>(target + kTileTokens * kLatentDim);
  } else {
    constexpr int kChunkBytes = kTileTokens * kChunkColumns * sizeof(typename T::Element);
    constexpr int kRowBytes = kChunkBytes / kTileTokens;
    constexpr int kBefore = T::kChunksPerStage - 1;  // rope is the last chunk of its stage
    if (first_chunk + kBefore < kValueChunks) {
      rows.template copy_latent<T::kChunksPerStage>(first_chunk * kRowBytes, target);
    } else {
      rows.template copy_latent<kBefore>(first_chunk * kRowBytes, target);
      rows.template copy_rope<kRowBytes>(target + kBefore * kChunkBytes);
    }
  }
}

// Holds the stages that a warp has asked for, oldest first. cp.async writes as ordinary stores do: so that WGMMA sees it, the warp
// that copied waits, passes a proxy fence and only then says that its share is there.
template <class T>
class Landing {
 public:
  static constexpr int kMost = kStagesInFlight<T>;

  // Takes the copies since the last call for this stage's.
  CUTE_DEVICE void begin(int stage) {
    cute::cp_async_fence();
    stages_ |= decltype(stages_)(stage) << kStageBits * count_++;
  }
  CUTE_DEVICE bool full() const { return count_ == kMost; }

  // Waits until at most so many have not arrived.
  template <int kOutstanding>
  CUTE_DEVICE void land(Shared<T>& shared) {
    ETAP_MARKED(rows_wait, cute::cp_async_wait<kOutstanding>());
    ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    __syncwarp();
    for (; count_ > kOutstanding; --count_, stages_ >>= kStageBits) {
      if (commits<true>()) shared.keys.full[stages_ & ((1 << kStageBits) - 1)].arrive();
    }
  }

 private:
  static constexpr int kStageBits = 5;
  static_assert(T::kStages <= 1 << kStageBits && kMost * kStageBits <= 64);
  std::conditional_t<kMost * kStageBits <= 32, uint32_t, uint64_t> stages_ = 0;
  int count_ = 0;
};

// Stages of a 16-bit cache land: see Landing. For an FP8 cache cp.async's own arrivals will do, since matrix loads read it, and
// before WGMMA the consumers pass a fence: a stage is full when all lanes' copies are there, and the warps have said so.
template <class T>
class CacheRows : public DenseTiles<T, PagedRows<T::kGatherWarps>> {
  using Tiles = DenseTiles<T, PagedRows<T::kGatherWarps>>;
  using Tiles::shared_, Tiles::params_, Tiles::pages_, Tiles::split_, Tiles::tile_, Tiles::tiles_begun_;

 public:
  static constexpr bool kGathers = true;

  CUTE_DEVICE CacheRows(Shared<T>& shared, const DecodeParams& params, int partition, int warp)
      : Tiles(shared, params, partition, {params, warp}), warp_(warp) {}

  CUTE_DEVICE bool next_tile(int i) {
    if (!Tiles::go_on(i, warp_ == 0)) return false;
    pages_.advance(tile_, split_.seq_len);
    return true;
  }

  CUTE_DEVICE void acquire_lent(KeyPosition<T> at) { acquire(at); }

  template <class Begun>
  CUTE_DEVICE void fill_tile(KeyPosition<T>& at, int i, Begun&& begun) {
    const bool elected = threadIdx.x % kWarpSize == 0;
    const CopiedRows<T> copied(pages_, params_, warp_);
#pragma unroll 1
    for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
      acquire(at);
      copy_stage<T>(copied, T::first_chunk(stage, i), shared_.ring + at.stage * T::kStageBytes);
      if constexpr (T::kFp8Cache) {
        ETAP_MARKED(rows_arrival, cutlass::arch::cpasync_barrier_arrive(shared_.keys.full_barrier(at)));
        __syncwarp();
        if (commits<kGathers>()) ETAP_MARKED(rows_commit, shared_.keys.commit(at));
      } else {
        landing_.begin(at.stage);
        if (landing_.full()) landing_.template land<Landing<T>::kMost - 1>(shared_);
      }
      if (stage == 0 && elected) begun();
    }
  }

  CUTE_DEVICE void finish() {
    if constexpr (!T::kFp8Cache) landing_.template land<0>(shared_);
  }

 private:
  CUTE_DEVICE void acquire(KeyPosition<T> at) {
    if constexpr (T::kFp8Cache) {
      hold_back<T>(shared_, at.behind(tiles_begun_ <= T::kSerializedTiles ? 1 : kStagesInFlight<T>));
    } else {
      // Consumers may wait for what has not been announced before they make room.
      if (!__all_sync(0xffffffff, shared_.keys.has_room(at))) landing_.template land<0>(shared_);
    }
    ETAP_MARKED(rows_room, shared_.keys.acquire(at));
  }

  const int warp_;
  [[maybe_unused]] Landing<T> landing_;
};

}  // namespace etap

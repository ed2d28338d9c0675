// The one loop by which producers fill the ring of keys. A source knows the tiles of a partition and fills the stages of each:
// whole tiles or parts of them by TMA (tiles.cuh), paged rows (paged_rows.cuh), listed rows (listed_rows.cuh), or listed rows that
// become bfloat16 on the way (dequantise.cuh). Where several warps bring a tile, each runs the loop and arrives at every barrier.
#pragma once

#include "decode/layouts/common.h"

namespace etap {

// One lane of a warp commits for all. In debug builds each commits for itself what the lanes have gathered, as with releases().
template <bool kGathers>
CUTE_DEVICE bool commits() { return threadIdx.x % kWarpSize < (kGathers ? kReleasingLanes : 1); }

// Tells consumers that take tiles in turn that their next tile has been begun, and that stages are theirs to merge through: see
// consumers/split_loop.cuh. One lane of each producer warp signals.
template <class T>
class TileReady {
 public:
  CUTE_DEVICE explicit TileReady(Shared<T>& shared) : shared_(shared) {}

  // The split's i-th tile has been begun. A single one is both consumers'.
  CUTE_DEVICE void signal_tile(int i, bool single) const {
    if constexpr (T::kAlternatingTiles) {
      const uint32_t before = i % kConsumerGroups == 0 ? even_ : odd_;
      ETAP_MARKED(tile_ready, shared_.tile_ready[i % kConsumerGroups].signal(before + i / kConsumerGroups));
      if (single) shared_.tile_ready[1].signal(odd_);
    }
  }

  // Lends the consumers stages behind the split's last tile, unless it was a single one, which leaves nothing to merge. Nobody
  // waits for a lent stage to be full. So the signal says that all warps have passed them: one that has not would count in the
  // stages' next round.
  template <bool kGathers, class Acquire>
  CUTE_DEVICE void end_split(KeyPosition<T>& at, int tiles, bool single, Acquire&& acquire) {
    if constexpr (T::kAlternatingTiles) {
      even_ += (tiles + 1) / kConsumerGroups;
      odd_ += single ? 1 : tiles / kConsumerGroups;
      if constexpr (T::kMergeStages > 0) {
        if (single) return;
        for (int stage = 0; stage < kConsumerGroups * T::kMergeStages; ++stage, at.advance(1)) {
          acquire(at);
          if (commits<kGathers>()) ETAP_MARKED(lent_commit, shared_.keys.commit(at));
        }
        if (threadIdx.x % kWarpSize == 0) {
          shared_.tile_ready[0].signal(even_);
          shared_.tile_ready[1].signal(odd_);
        }
        ++even_;
        ++odd_;
      }
    }
  }

 private:
  Shared<T>& shared_;
  uint32_t even_ = 0, odd_ = 0;  // signals that consumers 0 and 1 got in earlier splits
};

// Without a producer of queries, who traps when consumers do not go on, those of keys do: where they wait for each other, and at
// their end.
template <class T>
constexpr bool kKeyProducersTrap = T::kSparse || T::kFp8Cache;

// Waits until this stage has been filled: no more is in flight than wanted. Where tiles of a dense cache alternate, consumers trap.
template <class T>
CUTE_DEVICE void hold_back(Shared<T>& shared, KeyPosition<T> at) {
  if constexpr (!kKeyProducersTrap<T> || (T::kAlternatingTiles && !T::kSparse)) {
    shared.keys.wait(at);
  } else if (!shared.keys.filled(at)) {
    spin<true>(shared.keys.full[at.stage], at.parity);
  }
}

// Waits until the consumers have given back all stages, the oldest first.
template <class T>
CUTE_DEVICE void await_release(Shared<T>& shared, KeyPosition<T> at) {
  if constexpr (kKeyProducersTrap<T>) {
#pragma unroll 1
    for (int stage = 0; stage < T::kStages; ++stage, at.advance(1)) spin<true>(shared.keys.empty[at.stage], at.parity ^ 1);
  }
}

// A source has
//   kAhead           tiles that next_tile() passes before the first one, to read ahead
//   kGathers         whether the lanes of its warps copy rows, and not TMA: see commits()
//   next_tile(i)     goes to the next tile, the i-th of its split; false behind the last one
//   single(), last() whether the tile is its split's only one, which both consumers share, or its last one
//   fill_tile(at, i, begun)  fills the tile's stages from `at` on, goes behind them, and calls begun() with one lane behind the first
//   acquire_lent(at) waits for room for a stage that is lent
//   finish()         ends the work that is under way
template <class T, class Source>
CUTE_DEVICE void fill_ring(Shared<T>& shared, Source&& source) {
  KeyPosition<T> at;
  TileReady<T> ready(shared);
  for (int i = -source.kAhead; source.next_tile(i); i = source.last() ? 0 : i + 1) {
    if (i < 0) continue;
    const bool single = T::kHalvesSingleTiles && source.single();
    source.fill_tile(at, i, [&] { ready.signal_tile(i, single); });
    const auto acquire_lent = [&](KeyPosition<T> lent) { source.acquire_lent(lent); };
    if (source.last()) ready.template end_split<Source::kGathers>(at, i + 1, single, acquire_lent);
  }
  source.finish();
  await_release<T>(shared, at);
}

// The tiles of a partition of dense attention, as its sources walk them. Pages: what fetches a split's pages; it is told where a
// split begins before its length is known.
template <class T, class Pages>
class DenseTiles {
 public:
  static constexpr int kAhead = 0;
  static constexpr bool kGathers = false;

  CUTE_DEVICE bool single() const { return split_.tiles() == 1; }
  CUTE_DEVICE bool last() const { return tile_ + 1 == split_.end_tile; }
  CUTE_DEVICE void acquire_lent(KeyPosition<T> at) { ETAP_MARKED(lent_room, shared_.keys.acquire(at)); }
  CUTE_DEVICE void finish() {}

 protected:
  CUTE_DEVICE DenseTiles(Shared<T>& shared, const DecodeParams& params, int partition, const Pages& pages)
      : shared_(shared), params_(params), walk_(params, partition), pages_(pages) {}

  // Goes to the next tile. One warp of those that bring a tile tells the consumers how long its request is.
  CUTE_DEVICE bool go_on(int i, bool puts_length) {
    ++tiles_begun_;
    if (i > 0) {
      ++tile_;
      return true;
    }
    while (!walk_.done()) {
      pages_.begin(walk_.request(), walk_.begin_tile());
      split_ = walk_.next();
      if (puts_length) shared_.lengths.put(splits_, split_.seq_len);
      ++splits_;
      tile_ = split_.begin_tile;
      if (split_.tiles() > 0) return true;
    }
    return false;
  }

  // Whether this tile is asked for when the one before it has come: the first ones of a CTA, in splits that are short enough.
  CUTE_DEVICE bool serialize_first_loads() const {
    if constexpr (T::kSerializedTiles > 0) {
      return tiles_begun_ <= T::kSerializedTiles && split_.tiles() <= T::kLongestSerialized;
    }
    return false;
  }

  Shared<T>& shared_;
  const DecodeParams& params_;
  SplitWalk walk_;
  Pages pages_;
  Split split_{};
  int tile_ = 0;
  int tiles_begun_ = 0;
  int splits_ = 0;
};

}  // namespace etap

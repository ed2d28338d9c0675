// The key producer: one warp copies the cache tile by tile with TMA into the key ring. (Where a page does not hold whole tiles,
// load_parts.cuh or gather_rows.cuh does it.)
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "decode/pieces.cuh"
#include "decode/traits.h"

namespace etap {

// The page of each part of a tile (of whole tiles, of each tile) is fetched 32 parts at a time, a lane each, one batch ahead
// of its use. The first fetch does not wait for the request's length: what lies behind it in the table is read, but never
// used. Behind the table there is page -1, of which TMA writes NaN: a length that is too long reads no other request's rows.
class PageFetcher {
 public:
  CUTE_DEVICE PageFetcher(const DecodeParams& params, int request, int begin_part)
      : pages_(params.block_table + request * params.block_table_stride),
        parts_per_page_(params.parts_per_page),
        max_pages_(params.max_pages),
        lane_(threadIdx.x % kWarpSize),
        next_(fetch(begin_part)) {}

  // Goes to `part`, begin_part + i. It is called with i = 0, 1, 2, ..., or with that of each tile's first part.
  CUTE_DEVICE void advance(int part, int i) {
    if (i % kWarpSize == 0) {
      current_ = next_;
      next_ = fetch(part + kWarpSize);
    }
  }
  // Returns the page of begin_part + i, or of one that follows in its tile. The whole warp calls it.
  CUTE_DEVICE int page(int i) const { return __shfl_sync(0xffffffff, current_, i % kWarpSize); }

 private:
  CUTE_DEVICE int fetch(int first_part) const {
    const int page = parts_per_page_.div(first_part + lane_);
    return page < max_pages_ ? pages_[page] : -1;
  }

  const int32_t* pages_;  // of the request: [max_pages_]
  const cutlass::FastDivmod& parts_per_page_;
  int max_pages_;
  int lane_;
  int current_ = 0;
  int next_;
};

// Tells consumers that take tiles in turn that theirs has been begun, and that the stages for merging are theirs: see
// transposed/consumer.cuh. A single tile of a piece is both consumers', and nothing is left to merge: transposed/single_tile.cuh.
// One lane of each producer warp signals.
template <class T>
class Grants {
 public:
  CUTE_DEVICE void begin_piece(int tiles) {
    alone_ = T::kHalvesSingleTiles && tiles == 1;
    of_first_ = (tiles + 1) / kConsumerGroups;
    of_second_ = alone_ ? 1 : tiles / kConsumerGroups;
  }
  // The i-th tile.
  CUTE_DEVICE void grant_tile(Shared<T>& shared, int i) const {
    const uint32_t before = i % kConsumerGroups == 0 ? before_first_ : before_second_;
    shared.granted[i % kConsumerGroups].signal(before + i / kConsumerGroups);
    if (alone_) shared.granted[1].signal(before_second_);
  }
  // Whether stages are lent behind the last tile, and that they are.
  CUTE_DEVICE bool lends() const { return T::kGrantsTiles && !alone_; }
  CUTE_DEVICE void grant_merge(Shared<T>& shared) const {
    if constexpr (T::kGrantsTiles) {
      shared.granted[0].signal(before_first_ + of_first_);
      shared.granted[1].signal(before_second_ + of_second_);
    }
  }
  CUTE_DEVICE void end_piece() {
    before_first_ += of_first_ + lends();
    before_second_ += of_second_ + lends();
  }

 private:
  uint32_t before_first_ = 0, before_second_ = 0;  // that consumers 0 and 1 got in earlier pieces
  uint32_t of_first_, of_second_;                  // tiles of this one
  bool alone_;
};

// Whether a tile is asked for when the one before it has come: the first ones of a CTA in pieces that are short enough.
template <class T>
CUTE_DEVICE bool alone(int tiles_begun, int tiles_of_piece) {
  if constexpr (T::kTilesAlone > 0) return tiles_begun < T::kTilesAlone && tiles_of_piece <= T::kLongestAlone;
  return false;
}

// Where the combination before may work beside this CTA, stages are asked for one by one until it has ended: more would queue ahead
// of its reads, which the queries wait for. But a piece of one tile wants it at once.
template <class T>
constexpr bool kLoadsSparingly = T::registers(true).launch == kBesideCombination.launch;

template <class T>
CUTE_DEVICE void load_keys(Shared<T>& shared, const DecodeParams& params, const typename T::CacheMaps& maps, int partition) {
  const bool elected = threadIdx.x % kWarpSize == 0;
  KeyPosition<T> at;
  int tiles_begun = 0;
  Grants<T> grants;
  bool ahead = kLoadsSparingly<T> && params.early_loads;  // the predecessor may still run
  PieceWalk walk(params, partition);
  for (int pieces = 0; !walk.done(); ++pieces) {
    PageFetcher pages(params, walk.request(), walk.begin_tile());
    const Piece piece = walk.next();
    shared.lengths.put(pieces, piece.seq_len);
    if (piece.tiles() == 0) continue;
    grants.begin_piece(piece.tiles());
    for (int tile = piece.begin_tile; tile < piece.end_tile; ++tile, ++tiles_begun) {
      const int i = tile - piece.begin_tile;
      const bool new_tokens = (tile + 1) * kTileTokens > piece.seq_len - params.s_q;
      if (params.early_loads && new_tokens) ETAP_MARKED(new_tokens_wait, cudaGridDependencySynchronize());
      pages.advance(tile, i);
      const int page = pages.page(i);
      const int token = params.parts_per_page.rem(tile) * kTileTokens;  // of the page
#pragma unroll
      for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
        // No more is in flight than wanted, and the ring has room. Loads are sparing until the first queries are there; later ones
        // may be, too, when the ring goes round: a stage given back tells that.
        if (ahead) ahead = at.parity == 0 && !shared.queries.filled({});
        const bool one = (ahead && piece.tiles() > 1) || alone<T>(tiles_begun, piece.tiles());
        shared.keys.wait(at.behind(one ? 1 : kStagesInFlight<T>));
        shared.keys.acquire(at);
        if (!elected) continue;
        ETAP_MARKED(expected_bytes, shared.keys.expect_bytes(at, T::kStageBytes));
        auto& target = item<typename T::KeyStage>(shared.ring, at.stage);
        maps.copy(shared.keys.full_barrier(at), target, page, token, T::first_chunk(stage, i));
        if constexpr (T::kGrantsTiles) {
          if (stage == 0) grants.grant_tile(shared, i);
        }
      }
    }
    if (grants.lends()) {
      // Stages lent to the consumers for merging their halves: granted, not filled.
      for (int stage = 0; stage < kConsumerGroups * T::kMergeStages; ++stage, at.advance(1)) {
        shared.keys.acquire(at);
        if (elected) shared.keys.commit(at);
      }
      if (elected) grants.grant_merge(shared);
    }
    grants.end_piece();
  }
}

}  // namespace etap

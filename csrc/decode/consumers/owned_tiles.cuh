// A consumer warpgroup of 64 rows on M. Time going down, s the scores of a tile, o an addition to this half of O:
//
//   warpgroup 0: s(0)      softmax(0) o(0)          s(2) o(1) softmax(2) o(2)
//   warpgroup 1:      s(1)            o(0) softmax(1) o(1)               s(3) o(2) ...
#pragma once

#include "decode/epilogue/rows.cuh"
#include "decode/mma/query_major.cuh"
#include "decode/load/listed_queries.cuh"
#include "decode/layouts/tile_mask.cuh"

namespace etap::query_major {

// This is what a consumer knows of its CTA, and what it holds. Tiles of a CTA are counted through all splits (n), those of a split from
// its beginning (i).
template <class T>
struct Consumer {
  Shared<T>& shared;
  const DecodeParams& params;
  const int group;
  typename T::Output o;

  // Decodes a partition's splits.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    Consumer consumer{shared, params, group};
    RingPosition<1> queries;
    int n = 0;  // tiles of earlier splits
    int splits = 0;
    int walked = 0;
    typename T::Walk walk(params, partition);
    if constexpr (T::kSparse) {
      ETAP_MARKED(queries_wait, pdl_wait_then_trigger());
      walk.begin();
    }
    for (; !walk.done(); queries.advance(1)) {
      if constexpr (T::kSparse) sparse::gather_queries<T>(shared, params, walk.request(), row_group);
      const Split split = next_split<T>(shared, params, walk, walked++);
      const int tiles = split.tiles();
      const int first = (n + group) % kConsumerGroups;  // own tile
      if (tiles == 0) write_empty<T>(Destination<T>(params, split, row_group));
      if constexpr (!T::kSparse) {
        shared.queries.wait(queries);
        if (tiles <= first) {  // no tile of this warpgroup's
          __syncwarp();        // all lanes have seen this round
          if (releases()) shared.queries.release(queries);
        }
      }
      if constexpr (T::kSparse) sparse::await_queries();
      if (tiles == 0) continue;
      RowState state;
      const VisibleTokens visible(params, split, row_group);
      cute::clear(consumer.o);
      for (int i = first; i < tiles; i += kConsumerGroups) {
        consumer.own_tile(split, split.begin_tile + i, n + i, i + kConsumerGroups >= tiles, queries, visible, state);
      }
      if ((n + tiles - 1 + group) % kConsumerGroups != 0) {
        consumer.other_tile<0>(split, split.end_tile - 1, n + tiles - 1, state, [] {});
      }
      n += tiles;
      finish_split<T>(shared, Destination<T>(params, split, row_group), splits++, group, state, consumer.o);
    }
  }

  // Consumes an own tile, the CTA's n-th, and adds the output of the one before it if it follows one in the split: between two shares
  // of the scores, when P of that tile is there and the value dims of this one may still be on their way.
  CUTE_DEVICE void own_tile(const Split& split, int tile, int n, bool last, RingPosition<1> queries,
                            const VisibleTokens& visible, RowState& state) {
    const int i = tile - split.begin_tile;
    const auto at = tile_position<T>(n);

    // S: rope and the half that comes first; O of the tile before; S: the other half. Each is started while the one before is under way.
    typename T::Scores s;
    start_scores<T, 0, T::kFirstScores>(shared, at, i, s);
    const auto start_other_half = [&] { start_scores<T, T::kFirstScores, T::kStagesPerTile>(shared, at, i, s); };
    if (i > 0) {
      other_tile<1>(split, tile - 1, n - 1, state, start_other_half);
    } else {
      start_other_half();
      ETAP_MARKED(rope_wait, cute::warpgroup_wait<1>());
    }

    // Release rope's stage, which no value dims are in. The next tile's mask may take this one's place as soon as that is given back.
    [[maybe_unused]] sparse::TileMask valid;
    if constexpr (T::kSparse) {
      valid = shared.valid[at.stage];
      __syncwarp();
    }
    if (T::kRopeStages > 0 && releases()) shared.keys.release(at);

    // Wait for S, release the queries.
    finish_scores<T>(s);
    if (!T::kSparse && last && releases()) shared.queries.release(queries);

    // Softmax.
    if constexpr (T::kSparse) {
      sparse::hide_invalid_columns(valid, s);
    } else if ((tile + 1) * kTileTokens > split.seq_len - params.s_q + 1) {
      mask_scores<T>(visible, tile, s);
    }
    uint32_t p[T::kWords];
    float factor[2];
    const bool renewed = exponentiate<T>(s, params.scale_log2, state, p, factor);
    publish_probabilities<T>(shared, group, state, p);
    if (renewed && i > 0) scale_rows<T>(o, factor);  // before a split's first tile O is zero

    // O, release.
    add_output<0>(split, tile, n, p, [] {});
  }

  // Adds the output of the other warpgroup's tile, the CTA's n-th. start_behind: see add_output.
  template <int kBehind, class StartBehind>
  CUTE_DEVICE void other_tile(const Split& split, int tile, int n, RowState& state, StartBehind&& start_behind) {
    uint32_t p[T::kWords];
    float factor[2];
    const bool renewed = take_probabilities<T>(shared, 1 - group, state, p, factor);
    if (renewed) scale_rows<T>(o, factor);
    add_output<kBehind>(split, tile, n, p, start_behind);
  }

  // start_behind: starts kBehind groups of other WGMMAs, which are under way on return.
  template <int kBehind, class StartBehind>
  CUTE_DEVICE void add_output(const Split& split, int tile, int n, const uint32_t (&p)[T::kWords], StartBehind&& start_behind) {
    const int valid = split.seq_len - tile * kTileTokens;
    const int first = half_stage(n, tile - split.begin_tile);
    if (!T::kSparse && valid < kTileTokens) zero_value_tail<T>(shared, first, group, valid);
    start_output<T>(shared, first, p, o);
    start_behind();
    finish_output<T, kBehind>(shared, first, o);
  }

  // This warpgroup's half of the CTA's n-th tile, its split's i-th, begins at this stage.
  CUTE_DEVICE int half_stage(int n, int i) const {
    return n % kConsumerGroups * T::kStagesPerTile + T::kRopeStages + (T::first_half(i) == group ? 0 : T::kHalfChunks);
  }
};

}  // namespace etap::query_major

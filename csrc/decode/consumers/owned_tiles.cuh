// A consumer warpgroup of 64 rows on M. Time going down, s the scores of a tile, o an addition to this half of O:
//
//   warpgroup 0: s(0)      softmax(0) o(0)          s(2) o(1) softmax(2) o(2)
//   warpgroup 1:      s(1)            o(0) softmax(1) o(1)               s(3) o(2) ...
#pragma once

#include "decode/epilogue/rows.cuh"
#include "decode/mma/query_major.cuh"
#include "decode/load/queries.cuh"

namespace etap::query_major {

// This is what a consumer knows of its CTA, and what it holds. Tiles of a CTA are counted through all splits (n), those of a split
// from its beginning (i).
template <class T>
struct Consumer {
  Shared<T>& shared;
  const DecodeParams& params;
  const int group;
  typename T::Output o;

  // Decodes a partition's splits.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    Consumer consumer{shared, params, group};
    PlainQueries<T> queries;
    int n = 0;  // tiles of earlier splits
    int splits = 0;
    int walked = 0;
    typename T::Walk walk(params, partition);
    queries.begin(params, walk, row_group);
    while (!walk.done()) {
      queries.begin_split(shared, params, walk.request(), row_group);
      const Split split = next_split<T>(shared, params, walk, walked++);
      const int tiles = split.tiles();
      const int first = (n + group) % kConsumerGroups;  // own tile
      if (tiles == 0) write_empty<T>(Destination<T>(params, split, row_group));
      queries.await(shared, params, split.request, row_group);
      if (tiles <= first) queries.release_unread(shared);
      if (tiles > 0) {
        RowState state;
        const VisibleTokens visible(params, split, row_group);
        cute::clear(consumer.o);
        for (int i = first; i < tiles; i += kConsumerGroups) {
          consumer.own_tile(split, split.begin_tile + i, n + i, i + kConsumerGroups >= tiles, queries, visible, state);
        }
        if ((n + tiles - 1 + group) % kConsumerGroups != 0) {
          consumer.template other_tile<0>(split, split.end_tile - 1, n + tiles - 1, state, [] {});
        }
        n += tiles;
        finish_split<T>(shared, Destination<T>(params, split, row_group), splits++, group, state, consumer.o);
      }
      queries.end_split();
    }
  }

  // Consumes an own tile, the CTA's n-th, and adds the output of the one before it if it follows one in the split: between two
  // shares of the scores, when P of that tile is there and the value dims of this one may still be on their way.
  CUTE_DEVICE void own_tile(const Split& split, int tile, int n, bool last, PlainQueries<T>& queries,
                            const VisibleTokens& visible, RowState& state) {
    const int i = tile - split.begin_tile;
    const auto at = tile_position<T>(n);

    // S = Q K^T: rope and the half that comes first; O of the tile before; S of the other half. Each is started while the one
    // before is under way.
    typename T::Scores s;
    start_scores<0, T::kFirstScores>(at, i, s);
    const auto start_other_half = [&] { start_scores<T::kFirstScores, T::kStagesPerTile>(at, i, s); };
    if (i > 0) {
      other_tile<1>(split, tile - 1, n - 1, state, start_other_half);
    } else {
      start_other_half();
      ETAP_MARKED(rope_wait, cute::warpgroup_wait<1>());
    }

    // Release rope's stage, which no value dims are in. The next tile's mask may take this one's place as soon as that is given
    // back.
    const auto mask = take_mask(at);
    if (T::kRopeStages > 0 && releases()) shared.keys.release(at);

    // Wait for S, release the queries.
    wait_scores<T>(s);
    if (last) queries.release(shared);

    // P = 2^(S - reference), for both warpgroups. O is zero before a split's first tile.
    if constexpr (T::kSparse) {
      sparse::hide_invalid_columns(mask, s);
    } else if ((tile + 1) * kTileTokens > split.seq_len - params.s_q + 1) {
      mask_scores<T>(visible, tile, s);
    }
    uint32_t p[T::kWords];
    float factor[2];
    const bool renewed = exponentiate<T>(s, params.scale_log2, state, p, factor);
    publish_probabilities<T>(shared, group, state, p);
    if (renewed && i > 0) scale_rows<T>(o, factor);

    // O += P V, release.
    add_output<0>(split, tile, n, p, [] {});
  }

  // Starts a group of WGMMAs: the share of S that stages [kBegin, kEnd) of a tile have, one by one as they arrive.
  template <int kBegin, int kEnd>
  CUTE_DEVICE void start_scores(KeyPosition<T> at, int i, typename T::Scores& s) {
    typename T::ScoreMma mma;
    mma.accumulate_ = kBegin == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
    cute::warpgroup_fence_operand(s);
    CUTE_UNROLL
    for (int stage = kBegin; stage < kEnd; ++stage) {
      shared.keys.wait({at.stage + stage, at.parity});
      if constexpr (T::kSparse) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());  // what cp.async wrote, for WGMMA
      add_scores<T>(shared, mma, at, stage, i, s);
    }
    cute::warpgroup_commit_batch();
  }

  // Takes what says which tokens of a listed tile there are.
  CUTE_DEVICE auto take_mask(KeyPosition<T> at) {
    if constexpr (T::kSparse) {
      const sparse::TileMask mask = shared.valid[at.stage];
      __syncwarp();
      return mask;
    } else {
      return 0;
    }
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

  // Adds P V of a tile's half, and gives each stage back as soon as its WGMMAs are done. start_behind starts kBehind groups of
  // other WGMMAs, which are under way on return.
  template <int kBehind, class StartBehind>
  CUTE_DEVICE void add_output(const Split& split, int tile, int n, const uint32_t (&p)[T::kWords], StartBehind&& start_behind) {
    const int valid = split.seq_len - tile * kTileTokens;
    const int first = half_stage(n, tile - split.begin_tile);
    if (!T::kSparse && valid < kTileTokens) zero_value_tail<T>(shared, first, group, valid);
    // What cp.async wrote of a tile that the other warpgroup waited for, for WGMMA.
    if constexpr (T::kSparse) ETAP_MARKED(other_rows_fence, cutlass::arch::fence_view_async_shared());
    start_output<T>(shared, first, p, o);
    start_behind();
    constexpr int kStages = T::kHalfChunks / T::kProducts;
    cute::for_each(cute::make_seq<T::kProducts>{}, [&](auto product) {
      cute::warpgroup_wait<T::kProducts - 1 - product + kBehind>();
      if (!releases()) return;
      CUTE_UNROLL
      for (int stage = 0; stage < kStages; ++stage) {
        ETAP_MARKED(stage_release, shared.keys.release({first + product * kStages + stage, 0}));
      }
    });
    cute::warpgroup_fence_operand(o);
  }

  // This warpgroup's half of the CTA's n-th tile, its split's i-th, begins at this stage.
  CUTE_DEVICE int half_stage(int n, int i) const {
    return n % kConsumerGroups * T::kStagesPerTile + T::kRopeStages + (T::first_half(i) == group ? 0 : T::kHalfChunks);
  }
};

}  // namespace etap::query_major

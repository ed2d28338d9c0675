// The frame of the consumers that compute O^T: the loop over the splits of a CTA. What they do with a tile is in alternating.cuh (a
// cache or lists of the queries' type), fp8_cache.cuh (a cache of e4m3), fp8_rows.cuh and shared_tiles.cuh (lists of FP8 rows, of
// up to 32 query rows and of 64).
#pragma once

#include "decode/consumers/single_tile.cuh"

namespace etap::transposed {

// This is what a consumer knows of its CTA, and what it holds. Both consumers run the same instructions, so that they share the
// instruction cache. Own is the kernel's consumer: it consumes tiles, and computes its share of a single one that both halve.
// Queries is how it comes by the query rows: see load/queries.cuh.
//
// Tiles either alternate between the consumers, whose O^T are merged at the end of a split, or both consumers share every tile and
// each holds the O^T of its value dims.
template <class T, class Own, class Queries, template <class> class SoftmaxOf>
struct SplitLoop {
  Shared<T>& shared;
  const DecodeParams& params;
  const int row_group_of_cta;
  Queries& queries;
  SoftmaxOf<T>& softmax;
  OutputFragment<T>& ot;

  // Decodes a partition's splits.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    Queries queries;
    SoftmaxOf<T> softmax(shared, params.scale_log2, queries.value_scale(params), group);
    OutputFragment<T> ot;
    Own consumer{{shared, params, row_group, queries, softmax, ot}};
    KeyPosition<T> keys;
    uint32_t signals = 0;  // that this consumer has waited for: see load/fill_ring.cuh
    int splits = 0;
    char* const probabilities = shared.probabilities + (T::kAlternatingTiles ? 2 * group * T::kProbabilityBytes : 0);
    typename T::Walk walk(params, partition);
    queries.begin(params, walk, row_group);
    for (int n = 0; !walk.done(); ++n) {
      queries.begin_split(shared, params, walk.request(), consumer.row_group());
      const Split split = next_split<T>(shared, params, walk, n);
      if (split.tiles() == 0) {
        finish_empty<T>(shared, Destination<T>(params, split, consumer.row_group()));
        queries.ask(params, walk, row_group);
        if constexpr (Queries::kAheadOfLength && T::kAlternatingTiles) continue;
      }
      if (T::kFp8Cache && split.tiles() == 0) continue;  // the same; ptxas orders a kernel's instructions after where it stands
      queries.await(shared, params, split.request, row_group);
      softmax.reset();
      if (T::kFp8Cache) cute::clear(ot);
      if constexpr (T::kHalvesSingleTiles) {
        if (split.tiles() == 1) {
          shared.tile_ready[group].wait(signals++);
          decode_single_tile<T>(consumer, split, keys, splits++, probabilities);
          queries.end_split();
          keys.advance(T::kStagesPerTile);
          continue;
        }
      }
      if (!T::kFp8Cache) cute::clear(ot);
      for (int i = 0; i < split.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        int own = i;  // of this consumer's tiles
        if constexpr (T::kAlternatingTiles) {
          if (i % kConsumerGroups != group) continue;
          // A stage's barrier tells odd rounds from even ones only, and the other consumer's tile that lay there before this one
          // may not have arrived yet. Once this tile's first stage is being filled, it has: a tile gives back its first stage only
          // when its last one has arrived.
          shared.tile_ready[group].wait(signals++);
          own = i / kConsumerGroups;
        }
        const bool last = i + kConsumerGroups >= split.tiles();
        consumer.consume_tile(split, split.begin_tile + i, own == 0, last, keys,
                              probabilities + own % T::kProbabilityBuffers * T::kProbabilityBytes);
      }
      if (split.tiles() <= group) queries.release_unread(shared);
      queries.end_split();
      if (split.tiles() == 0) continue;
      softmax.finish();
      queries.ask(params, walk, row_group);
      if constexpr (T::kAlternatingTiles) {
        // The stages for merging are waited for as a tile's are, for the same reason.
        if (T::kMergeStages > 0) ETAP_MARKED(merge_ready, shared.tile_ready[group].wait(signals++));
        merge_and_write<T>(shared, keys, splits++, Destination<T>(params, split, consumer.row_group()), softmax, ot);
        keys.advance(kConsumerGroups * T::kMergeStages);
      } else {
        write_shared<T>(shared, Destination<T>(params, split, consumer.row_group()), softmax, ot);
      }
    }
    if constexpr (kSumsInClusters<T>) {
      if (clustered<T>()) sum_cluster<T>(shared, params, partition, row_group);
    }
  }

  CUTE_DEVICE int row_group() const { return Queries::row_group(params, row_group_of_cta); }

  // Hides what rows must not see of a tile at the request's end, and zeros V's tokens behind it.
  CUTE_DEVICE void mask_tail(KeyPosition<T> at, const Split& split, int tile, ScoreFragment<T>& st) const {
    const int tile_end = (tile + 1) * kTileTokens;
    if (tile_end > split.seq_len - params.s_q + 1) {
      mask_scores<T>(params, split, tile, row_group(), softmax.group, st);
      if (tile_end > split.seq_len) {
        // Matrix loads of the scores may still read there. What they get is masked; they should read no half-written value.
        if constexpr (T::kFp8Cache) event::scores_read<T>(softmax.group).sync();
        zero_value_tail<T>(shared, at, split, tile);
      }
    }
  }
};

}  // namespace etap::transposed

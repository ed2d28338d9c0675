// A consumer warpgroup of the transposed kernels: the loop over its CTA's splits, which all of them share, and how it decodes a tile of
// a cache of the queries' type or of e4m3. (FP8 rows of lists: sparse_fp8/consumer.cuh.)
#pragma once

#include "decode/load/listed_queries.cuh"
#include "decode/layouts/tile_mask.cuh"
#include "decode/load/scaled_listed_queries.cuh"
#include "decode/epilogue/merge.cuh"
#include "decode/consumers/single_tile.cuh"
#include "decode/mma/registers.cuh"
#include "decode/load/scaled_queries.cuh"

namespace etap::transposed {

// Where no queries are asked for while the split before is finished.
struct NoQueries {
  static constexpr bool kAhead = false;
};

// This is what a consumer knows of its CTA, and what it holds. Both consumers run the same instructions, so that they share the
// instruction cache. Own is the kernel's consumer: it consumes tiles, and computes its share of a single one that both halve.
//
// Tiles either alternate between the consumers, whose O^T are merged at the end of a split, or both consumers share every tile and
// each holds the O^T of its value dims.
template <class T, class Own, template <class> class SoftmaxOf>
struct SplitLoop {
  static constexpr bool kProducerBringsQueries = !T::kSparse && !T::kFp8Cache;
  static constexpr bool kQueriesBeforeLength = !T::kSparse && T::kFp8Cache;  // while the length is on its way

  static constexpr bool kConvertsLists = T::kSparse && T::kFp8Cache;
  using Queries = typename std::conditional_t<kConvertsLists, sparse_fp8::QueryRows<T>, NoQueries>;
  static constexpr bool kQueriesAhead = Queries::kAhead;

  Shared<T>& shared;
  const DecodeParams& params;
  const int row_group_of_cta;
  SoftmaxOf<T>& softmax;
  OutputFragment<T>& ot;

  // Decodes a partition's splits.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    float value_scale = 1.0f;
    if constexpr (kQueriesBeforeLength) {
      if (!T::kAlternatingTiles && params.early_loads) pdl_wait_then_trigger();
      value_scale = transposed_fp8::scale_of(params.kv_scale);
    }
    SoftmaxOf<T> softmax(shared, params.scale_log2, value_scale, group);
    OutputFragment<T> ot;
    Own consumer{{shared, params, row_group, softmax, ot}};
    KeyPosition<T> keys;
    RingPosition<1> queries;
    uint32_t tiles_begun = 0;  // in all splits
    int splits = 0;
    char* const probabilities = shared.probabilities + (T::kAlternatingTiles ? 2 * group * T::kProbabilityBytes : 0);
    typename T::Walk walk(params, partition);
    Queries queries_ahead;
    const auto ask_queries = [&] {
      if constexpr (kQueriesAhead) {
        if (!walk.done()) queries_ahead.ask(params, walk.request(), row_group);
      }
    };
    if constexpr (T::kSparse) {
      ETAP_MARKED(queries_wait, pdl_wait_then_trigger());
      ask_queries();
      walk.begin();
    }
    for (int n = 0; !walk.done(); ++n) {
      if constexpr (kQueriesBeforeLength) {
        transposed_fp8::load_queries<T>(shared, params, walk.request(), consumer.row_group(), value_scale);
      }
      if constexpr (T::kSparse && !kConvertsLists) sparse::gather_queries<T>(shared, params, walk.request(), row_group);
      const Split split = next_split<T>(shared, params, walk, n);
      if (split.tiles() == 0) {
        finish_empty<T>(shared, Destination<T>(params, split, consumer.row_group()));
        ask_queries();
        if constexpr (kQueriesBeforeLength && T::kAlternatingTiles) continue;
      }
      if (T::kFp8Cache && split.tiles() == 0) continue;  // the same; ptxas orders a kernel's instructions after where it stands
      if constexpr (kProducerBringsQueries) {
        shared.queries.wait(queries);
      } else if constexpr (kConvertsLists) {
        sparse_fp8::load_queries<T>(shared, params, queries_ahead, split.request, row_group);
      } else if constexpr (T::kSparse) {
        sparse::await_queries();
      }
      softmax.reset();
      if (T::kFp8Cache) cute::clear(ot);
      if constexpr (T::kHalvesSingleTiles) {
        if (split.tiles() == 1) {
          shared.tile_ready[group].wait(tiles_begun++);
          decode_single_tile<T>(
              shared, params, split, consumer.row_group(), keys, splits++, softmax, ot,
              [&](ScoreFragment<T>& st) {
                Own::compute_score_share(shared, params, keys, group, st);
                if (kProducerBringsQueries && releases()) shared.queries.release(queries);
              },
              [&](auto&& meanwhile) { Own::compute_output_share(shared, keys, group, probabilities, ot, meanwhile); });
          queries.advance(1);
          keys.advance(T::kStagesPerTile);
          continue;
        }
      }
      if (!T::kFp8Cache) cute::clear(ot);
      for (int i = 0; i < split.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        int mine = i;
        if constexpr (T::kAlternatingTiles) {
          if (i % kConsumerGroups != group) continue;
          // A stage's barrier tells odd rounds from even ones only, and the other consumer's tile that lay there before ours
          // may not have arrived yet. Once our first stage is being filled, it has: a tile gives back its first stage only
          // when its last one has arrived.
          shared.tile_ready[group].wait(tiles_begun++);
          mine = i / kConsumerGroups;
        }
        const bool last = i + kConsumerGroups >= split.tiles();
        consumer.consume_tile(split, split.begin_tile + i, mine == 0, last, queries, keys,
                              probabilities + mine % T::kProbabilityBuffers * T::kProbabilityBytes);
      }
      if constexpr (kProducerBringsQueries) {
        if (split.tiles() <= group) {  // no tile for this consumer
          __syncwarp();                // all lanes have seen this round
          if (releases()) shared.queries.release(queries);
        }
        queries.advance(1);
      }
      if (split.tiles() == 0) continue;
      softmax.finish();
      ask_queries();
      if constexpr (T::kAlternatingTiles) {
        // The stages for merging are waited for as a tile's are, for the same reason.
        if (T::kMergeStages > 0) ETAP_MARKED(merge_ready, shared.tile_ready[group].wait(tiles_begun++));
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

  // Beside an FP8 cache it is worked out where it is wanted: a register that kept it through the products would be spilled.
  CUTE_DEVICE int row_group() const {
    if constexpr (!kQueriesBeforeLength || !T::kAlternatingTiles) return row_group_of_cta;
    return params.row_groups == 1 ? 0 : anew(blockIdx.x) % params.row_groups;
  }

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

template <class T>
struct Consumer : SplitLoop<T, Consumer<T>, Softmax> {
  using Loop = SplitLoop<T, Consumer<T>, Softmax>;
  using Loop::shared, Loop::params, Loop::softmax, Loop::ot;

  // Consumes one tile: wait for K, S^T, softmax, O^T, release. `first` and `last` say that it is this consumer's in the split.
  CUTE_DEVICE void consume_tile(const Split& split, int tile, bool first, bool last, RingPosition<1> queries, KeyPosition<T> at,
                                char* probabilities) {
    const int group = softmax.group;
    // Wait for K, S^T.
    ScoreFragment<T> st;
    if constexpr (T::kFp8Cache) {
      transposed_fp8::compute_scores<T>(shared, params, at, group, st);
    } else {
      compute_scores<T>(shared, at, st);
    }
    if (Loop::kProducerBringsQueries && last && releases()) shared.queries.release(queries);

    // Softmax.
    if constexpr (T::kSparse) {
      sparse::hide_invalid_rows(shared.valid[at.stage], st);
    } else {
      Loop::mask_tail(at, split, tile, st);
    }
    write_probabilities<T>(softmax, st, first, probabilities,
                           [&](const auto& correction) { rescale_output<T>(shared, group, correction, ot); });

    // O^T of this warpgroup's value dims, release.
    if constexpr (T::kFp8Cache) {
      transposed_fp8::add_output<T>(shared, at, T::kAlternatingTiles ? 0 : group * T::kOutputSlices, probabilities, ot,
                                    [&] { softmax.accumulate(); });
    } else {
      start_output<T>(shared, at, probabilities, ot);
      softmax.accumulate();
      finish_output<T>(shared, at, ot);
    }
  }

  // These do a consumer's share of a split's only tile: see single_tile.cuh.
  CUTE_DEVICE static void compute_score_share(Shared<T>& shared, const DecodeParams& params, KeyPosition<T> at, int group,
                                              ScoreFragment<T>& st) {
    if constexpr (T::kFp8Cache) {
      transposed_fp8::compute_scores<T, kConsumerGroups>(shared, params, at, group, st);
    } else {
      transposed::compute_score_share<T>(shared, at, group, st);
    }
  }
  template <class Meanwhile>
  CUTE_DEVICE static void compute_output_share(Shared<T>& shared, KeyPosition<T> at, int group, const char* probabilities,
                                               OutputFragment<T>& ot, Meanwhile&& meanwhile) {
    if constexpr (T::kFp8Cache) {
      constexpr int kShare = T::kOutputSlices / kConsumerGroups;
      transposed_fp8::add_output<T, kShare>(shared, at, group * kShare, probabilities, ot, meanwhile);
    } else {
      transposed::compute_output_share<T>(shared, at, group, probabilities, ot, meanwhile);
    }
  }
};

}  // namespace etap::transposed

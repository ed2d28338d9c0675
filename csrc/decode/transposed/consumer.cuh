// A consumer warpgroup of the transposed kernel: an attention of its own over every other tile.
#pragma once

#include "decode/sparse/queries.cuh"
#include "decode/sparse/validity.cuh"
#include "decode/transposed/merge.cuh"
#include "decode/transposed/single_tile.cuh"

namespace etap::transposed {

// What a consumer knows of its CTA, and what it holds. Both consumers run the same instructions, so that they share the
// instruction cache.
template <class T>
struct Consumer {
  Shared<T>& shared;
  const DecodeParams& params;
  const int row_group;
  Softmax<T>& softmax;
  OutputFragment<T>& ot;

  // Decodes a partition's pieces.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    Softmax<T> softmax(shared, params.scale_log2, 1.0f, group);
    OutputFragment<T> ot;
    Consumer consumer{shared, params, row_group, softmax, ot};
    KeyPosition<T> keys;
    RingPosition<1> queries;
    uint32_t grants_taken = 0;  // in all pieces
    int pieces = 0;
    char* const probabilities = shared.probabilities + 2 * group * T::kProbabilityBytes;  // this consumer's two
    typename T::Walk walk(params, partition);
    for (int n = 0; !walk.done(); ++n) {
      const Piece piece = next_piece<T>(shared, params, walk, n);
      if (piece.tiles() == 0) finish_empty<T>(shared, Destination<T>(params, piece, row_group));
      if constexpr (!T::kGathered) {
        shared.queries.wait(queries);
      } else if (piece.tiles() > 0) {
        sparse::gather_queries<T>(shared, params, piece.request, row_group);
      }
      softmax.reset();
      if constexpr (T::kHalvesSingleTiles) {
        if (piece.tiles() == 1) {
          shared.granted[group].wait(grants_taken++);
          decode_single_tile<T>(
              shared, params, piece, row_group, keys, pieces++, softmax, ot,
              [&](ScoreFragment<T>& st) {
                compute_score_share<T>(shared, keys, group, st);
                if (releases()) shared.queries.release(queries);
              },
              [&](auto&& meanwhile) { compute_output_share<T>(shared, keys, group, probabilities, ot, meanwhile); });
          queries.advance(1);
          keys.advance(T::kStagesPerTile);
          continue;
        }
      }
      cute::clear(ot);
      for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        if (i % kConsumerGroups != group) continue;
        // A stage's barrier tells odd rounds from even ones only, and the other consumer's tile that lay there before ours
        // may not have arrived yet. Once our first stage is being filled, it has: a tile gives back its first stage only
        // when its last one has arrived.
        shared.granted[group].wait(grants_taken++);
        const int mine = i / kConsumerGroups;
        const bool last = i + kConsumerGroups >= piece.tiles();
        consumer.consume_tile(piece, piece.begin_tile + i, mine == 0, last, queries, keys,
                              probabilities + mine % 2 * T::kProbabilityBytes);
      }
      if (!T::kGathered && piece.tiles() <= group) {  // no tile for this consumer
        __syncwarp();                                 // all lanes have seen this round
        if (releases()) shared.queries.release(queries);
      }
      queries.advance(1);
      if (piece.tiles() == 0) continue;
      // The stages for merging, for the same reason.
      ETAP_MARKED(merge_grant, shared.granted[group].wait(grants_taken++));
      merge_and_write<T>(shared, keys, pieces++, Destination<T>(params, piece, row_group), softmax, ot);
      keys.advance(kConsumerGroups * T::kMergeStages);
    }
    if constexpr (T::kGathered) {
      if (clustered<T>()) sum_cluster<T>(shared, params, partition, row_group);
    }
  }

  // One tile: wait for K, S^T, softmax, O^T, release. `first` and `last`: of this consumer's in the piece.
  CUTE_DEVICE void consume_tile(const Piece& piece, int tile, bool first, bool last, RingPosition<1> queries, KeyPosition<T> at,
                                char* probabilities) {
    const int group = softmax.group;
    // Wait for K, S^T.
    ScoreFragment<T> st;
    compute_scores<T>(shared, at, st);
    if (!T::kGathered && last && releases()) shared.queries.release(queries);

    // Softmax.
    const int tile_end = (tile + 1) * kTileTokens;
    if constexpr (T::kGathered) {
      sparse::hide_invalid_rows(shared.valid[at.stage], st);
    } else if (tile_end > piece.seq_len - params.s_q + 1) {
      mask_scores<T>(params, piece, tile, row_group, group, st);
      if (tile_end > piece.seq_len) zero_value_tail<T>(shared, at, piece, tile);
    }
    bool renew = first;
    if (!renew) {
      const bool exceeds = softmax.exponentiate(st);
      softmax.store(probabilities);
      ETAP_MARKED(probabilities_meeting, renew = event::probabilities_written(group).any(exceeds));
    }
    if (renew) {
      float correction[Softmax<T>::kColumns];
      softmax.renew(st, correction);
      scale_columns<T>(ot, [&](int block, int bit) { return correction[2 * block + bit]; });
      softmax.exponentiate(st);
      softmax.store(probabilities);
      event::probabilities_written(group).sync();
    }

    // O^T, release.
    start_output<T>(shared, at, probabilities, ot);
    softmax.accumulate();
    finish_output<T>(shared, at, ot);
  }
};

}  // namespace etap::transposed

// A consumer warpgroup beside FP8 rows with 64 query rows: both go through every tile in step, as in
// transposed_fp8/shared_tiles_consumer.cuh, but each has columns of K, not rows of Q.
#pragma once

#include "decode/sparse_fp8/consumer.cuh"
#include "decode/sparse_fp8/shared_tiles_scores.cuh"
#include "decode/transposed_fp8/shared_tiles_consumer.cuh"

namespace etap::sparse_fp8 {

// What a consumer knows of its CTA, and what it holds.
template <class T>
struct SharedTilesConsumer {
  Shared<T>& shared;
  const DecodeParams& params;
  ScaledSoftmax<T>& softmax;
  transposed::OutputFragment<T>& ot;

  // Decodes a partition's pieces.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    ScaledSoftmax<T> softmax(shared, params.scale_log2, 1.0f, group);
    transposed::OutputFragment<T> ot;
    SharedTilesConsumer consumer{shared, params, softmax, ot};
    KeyPosition<T> keys;
    typename T::Walk walk(params, partition);
    while (!walk.done()) {
      const Piece piece = walk.next();
      if (piece.tiles() == 0) write_empty<T>(Destination<T>(params, piece, row_group));
      if (piece.tiles() == 0) continue;
      load_queries<T>(shared, params, piece.request, row_group);
      softmax.reset();
      cute::clear(ot);
      for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) consumer.consume_tile(i == 0, keys);
      softmax.finish();
      transposed_fp8::write_shared<T>(shared, Destination<T>(params, piece, row_group), softmax, ot);
    }
  }

  // One tile: wait for K, S^T, softmax, O^T, release. `first`: of the piece.
  CUTE_DEVICE void consume_tile(bool first, KeyPosition<T> at) {
    const int group = softmax.group;
    // Wait for K, S^T: this warpgroup's columns of all rows, then all columns of its rows.
    ETAP_MARKED(rows_wait, shared.keys.wait(at));
    const char* tile = shared.ring + at.stage * T::kStageBytes;
    transposed::ScoreFragment<T> st;
    ValueFetches<T> values{tile + group * (kLatentDim / kConsumerGroups)};
    TokenScales scales;
    compute_shared_scores<T>(shared, tile, group, params.scale_log2, st, [&] {
      scales = TokenScales::read<T>(tile);
      if (T::kFetchesAhead) values.begin();
    });
    sparse::hide_invalid_rows(shared.valid[at.stage], st);

    // Softmax.
    const bool wide = write_probabilities<T>(
        softmax, st, scales, first, event::both_probabilities_written(), shared.probabilities,
        [&](const auto& correction) { transposed_fp8::scale_shared<T>(shared, group, correction, ot); });

    // O^T of this warpgroup's value dims, release.
    const char* probabilities = shared.probabilities + group * (kScales / kConsumerGroups) * T::kScaledBytes;
    const auto accumulate = [&] { softmax.accumulate(); };
    if (wide) {
      add_output<typename T::WideProbability>(shared, at, values, probabilities, ot, accumulate);
    } else {
      add_output<typename T::Probability>(shared, at, values, probabilities, ot, accumulate);
    }
  }
};

}  // namespace etap::sparse_fp8

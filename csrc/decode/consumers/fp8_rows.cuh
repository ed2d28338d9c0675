// A consumer beside lists of FP8 rows, up to 32 query rows: it takes every other tile of a split. The scales of a token's columns
// multiply its scores and its P^T.
#pragma once

#include "decode/consumers/split_loop.cuh"
#include "decode/load/scaled_queries.cuh"
#include "decode/mma/fp8_rows.cuh"
#include "decode/softmax/scaled_columns.cuh"

namespace etap::sparse_fp8 {

template <class T>
struct Consumer : transposed::SplitLoop<T, Consumer<T>, ScaledListedQueries<T>, ScaledSoftmax> {
  using Loop = transposed::SplitLoop<T, Consumer<T>, ScaledListedQueries<T>, ScaledSoftmax>;
  using Loop::shared, Loop::params, Loop::softmax, Loop::ot;

  // Consumes one tile, which is one stage. `first` and `last` say that it is this consumer's in the split.
  CUTE_DEVICE void consume_tile(const Split&, int, bool first, bool last, KeyPosition<T> at, char* probabilities) {
    // S^T = K Q^T.
    ETAP_MARKED(rows_wait, shared.keys.wait(at));
    const char* tile = shared.ring + at.stage * T::kStageBytes;
    transposed::ScoreFragment<T> st;
    TokenScales<T> scales;
    ValueFetches<T> values{tile};
    scales.read(tile, shared.valid[at.stage]);
    compute_scores<T>(shared, tile, scales, params.scale_log2, st);
    sparse::hide_invalid_rows(shared.valid[at.stage], st);
    if (T::kFetchesAhead) {
      values.begin();
    } else {
      scales.read(tile, shared.valid[at.stage]);  // again: registers are short
    }

    // P^T = 2^(S^T - reference). Where it has one buffer, a sync before its first store tells that no product of the last tile
    // reads it.
    if constexpr (T::kProbabilityBuffers == 1) {
      ETAP_MARKED(products_sync, event::scores_read<T>(softmax.group).sync());
    }
    const uint32_t factor = write_probabilities<T>(softmax, st, scales, first, probabilities, [&](const auto& correction) {
      transposed::rescale_output<T>(shared, softmax.group, correction, ot);
    });

    // O^T += V^T P^T: the tile is given back when V^T is in registers.
    const auto values_read = [&] { if (releases()) ETAP_MARKED(stage_release, shared.keys.release(at)); };
    add_output<T>(values, probabilities, factor, ot, values_read, [&] { softmax.accumulate(); });
    if (T::Row::kRopeIsValue && last) pair_rope_dims<T>(ot);
  }
};

}  // namespace etap::sparse_fp8

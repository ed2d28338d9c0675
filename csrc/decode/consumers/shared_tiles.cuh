// A consumer beside lists of FP8 rows with 33 to 64 query rows: both share every tile. Each converts half of K's columns, whose
// products with all query rows it shares with the other one, and holds the O^T of half of the value dims.
#pragma once

#include "decode/consumers/split_loop.cuh"
#include "decode/load/scaled_queries.cuh"
#include "decode/mma/fp8_row_shares.cuh"
#include "decode/softmax/scaled_columns.cuh"

namespace etap::sparse_fp8 {

template <class T>
struct SharedTilesConsumer : transposed::SplitLoop<T, SharedTilesConsumer<T>, ScaledListedQueries<T>, ScaledSoftmax> {
  using Loop = transposed::SplitLoop<T, SharedTilesConsumer<T>, ScaledListedQueries<T>, ScaledSoftmax>;
  using Loop::shared, Loop::params, Loop::softmax, Loop::ot;

  // Consumes one tile, which is one stage. `first` says that it is the split's.
  CUTE_DEVICE void consume_tile(const Split&, int, bool first, bool, KeyPosition<T> at, char* probabilities) {
    const int group = softmax.group;
    // S^T = K Q^T: of this consumer's columns and all rows, then of all columns and its rows.
    ETAP_MARKED(rows_wait, shared.keys.wait(at));
    const char* tile = shared.ring + at.stage * T::kStageBytes;
    transposed::ScoreFragment<T> st;
    TokenScales<T> scales;
    ValueFetches<T> values{tile + group * (kLatentDim / kConsumerGroups)};
    ScoreShare<T> share;
    compute_share<T>(shared, tile, group, share);
    of_group(group, [&](auto own) { give_share<T, own>(shared, share); });
    scales.read(tile, shared.valid[at.stage]);  // the other warpgroup may be late
    values.begin();
    ETAP_MARKED(shares_sync, event::shares_written().sync());
    of_group(group, [&](auto own) { take_share<T, own>(shared, share, params.scale_log2, st); });
    sparse::hide_invalid_rows(shared.valid[at.stage], st);

    // P^T = 2^(S^T - reference), in one buffer for both: when shares have been given, both are done with the last tile's.
    const uint32_t factor = write_probabilities<T>(softmax, st, scales, first, probabilities, [&](const auto& correction) {
      transposed::rescale_output<T>(shared, group, correction, ot);
    });

    // O^T += V^T P^T: the tile is given back when V^T is in registers.
    probabilities += group * (T::Row::kScales / kConsumerGroups) * T::kScaledBytes;
    const auto values_read = [&] { if (releases()) ETAP_MARKED(stage_release, shared.keys.release(at)); };
    add_output<T>(values, probabilities, factor, ot, values_read, [&] { softmax.accumulate(); });
  }
};

}  // namespace etap::sparse_fp8

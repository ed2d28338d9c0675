// How a consumer warpgroup beside FP8 rows decodes a tile: as in transposed/consumer.cuh, with the scales of each token's columns.
#pragma once

#include "decode/mma/fp8_rows.cuh"
#include "decode/mma/fp8_row_shares.cuh"
#include "decode/softmax/scaled_columns.cuh"
#include "decode/consumers/alternating.cuh"

namespace etap::sparse_fp8 {

// Writes P^T of a tile, times the tokens' scales, as transposed::write_probabilities does; returns what V of the wide type is
// multiplied with if P^T is of that, else 0.
template <class T, class Rescale>
CUTE_DEVICE uint32_t write_probabilities(ScaledSoftmax<T>& softmax, const transposed::ScoreFragment<T>& st,
                                     const TokenScales<T>& scales, bool first, char* probabilities,
                                     Rescale&& rescale) {
  const NamedBarrier written = event::probabilities_written<T>(softmax.group);
  bool renew = first, wide = scales.beyond(T::kLeastScale, T::kLargestScale);
  uint32_t factor = 0;
  if (!renew) {
    const bool exceeds = softmax.exponentiate(st);
    softmax.template store<typename T::Probability>(scales, probabilities);
    ETAP_MARKED(probabilities_sync, renew = written.any(exceeds || wide));
  }
  if (renew) {
    float correction[transposed::Softmax<T>::kColumns];
    softmax.renew(st, correction);
    rescale(correction);
    softmax.exponentiate(st);
    wide = written.any(wide);
    if (wide) {
      const bool widest = written.any(scales.beyond(-127, T::kWidestScale));
      factor = widest ? transposed_fp8::kFactorTimes128 : transposed_fp8::kFactor;
      softmax.template store<typename T::WideProbability>(scales, probabilities, widest ? 0x1p-7f : 1.0f);
    } else {
      softmax.template store<typename T::Probability>(scales, probabilities);
    }
    written.sync();
  }
  return factor;
}

template <class T>
struct Consumer : transposed::SplitLoop<T, Consumer<T>, ScaledSoftmax> {
  using Loop = transposed::SplitLoop<T, Consumer<T>, ScaledSoftmax>;
  using Loop::shared, Loop::params, Loop::softmax, Loop::ot;

  // One tile: wait for K, S^T, softmax, O^T, release. `first`: of this consumer's in the split.
  CUTE_DEVICE void consume_tile(const Split&, int, bool first, bool last, RingPosition<1>, KeyPosition<T> at, char* probabilities) {
    const int group = softmax.group;
    // Wait for K, S^T. Where consumers share the tile: of this one's columns and all rows, then of all columns and its rows.
    ETAP_MARKED(rows_wait, shared.keys.wait(at));
    const char* tile = shared.ring + at.stage * T::kStageBytes;
    transposed::ScoreFragment<T> st;
    TokenScales<T> scales;
    ValueFetches<T> values{tile + (T::kAlternatingTiles ? 0 : group * (kLatentDim / kConsumerGroups))};
    if constexpr (T::kAlternatingTiles) {
      scales.read(tile, shared.valid[at.stage]);
      compute_scores<T>(shared, tile, scales, params.scale_log2, st);
      sparse::hide_invalid_rows(shared.valid[at.stage], st);
      if (T::kFetchesAhead) {
        values.begin();
      } else {
        scales.read(tile, shared.valid[at.stage]);  // again: registers are short
      }
    } else {
      compute_shared_scores<T>(shared, tile, group, params.scale_log2, st, [&] {
        scales.read(tile, shared.valid[at.stage]);
        if (T::kFetchesAhead) values.begin();
      });
      sparse::hide_invalid_rows(shared.valid[at.stage], st);
    }

    // Softmax. Where P^T has one buffer, meeting before its first store tells that no product of the last tile reads it.
    if constexpr (T::kAlternatingTiles && T::kProbabilityBuffers == 1) {
      ETAP_MARKED(products_sync, event::scores_read<T>(group).sync());
    }
    const uint32_t factor =
        write_probabilities<T>(softmax, st, scales, first, probabilities,
                               [&](const auto& correction) { transposed::rescale_output<T>(shared, group, correction, ot); });

    // O^T of this warpgroup's value dims, release.
    if (!T::kAlternatingTiles) probabilities += group * (T::Row::kScales / kConsumerGroups) * T::kScaledBytes;
    const auto accumulate = [&] { softmax.accumulate(); };
    if (factor != 0) {
      add_output<typename T::WideProbability>(shared, at, values, probabilities, factor, ot, accumulate);
    } else {
      add_output<typename T::Probability>(shared, at, values, probabilities, 0, ot, accumulate);
    }
    if (T::Row::kRopeIsValue && last) pair_rope_dims<T>(ot);
  }
};

}  // namespace etap::sparse_fp8

// A consumer warpgroup beside FP8 rows: as transposed_fp8/consumer.cuh, with the scales of each token's 128 columns.
#pragma once

#include "decode/sparse_fp8/products.cuh"
#include "decode/sparse_fp8/queries.cuh"
#include "decode/sparse_fp8/softmax.cuh"
#include "decode/transposed/merge.cuh"

namespace etap::sparse_fp8 {

// P^T of a tile, times the tokens' scales, for the threads of `meeting`; whether it is of the wide type. `first`: of theirs in
// the piece. rescale(correction) where O^T is to be multiplied with that for a new reference.
template <class T, class Rescale>
CUTE_DEVICE bool write_probabilities(ScaledSoftmax<T>& softmax, const transposed::ScoreFragment<T>& st,
                                     const TokenScales& scales, bool first, NamedBarrier meeting, char* probabilities,
                                     Rescale&& rescale) {
  bool renew = first, wide = scales.template beyond_half<T>();
  if (!renew) {
    const bool exceeds = softmax.exponentiate(st);
    softmax.template store<typename T::Probability>(scales, probabilities);
    ETAP_MARKED(probabilities_meeting, renew = meeting.any(exceeds || wide));
  }
  if (renew) {
    float correction[transposed::Softmax<T>::kColumns];
    softmax.renew(st, correction);
    rescale(correction);
    softmax.exponentiate(st);
    wide = meeting.any(wide);
    if (wide) {
      softmax.template store<typename T::WideProbability>(scales, probabilities);
    } else {
      softmax.template store<typename T::Probability>(scales, probabilities);
    }
    meeting.sync();
  }
  return wide;
}

// What a consumer knows of its CTA, and what it holds.
template <class T>
struct Consumer {
  Shared<T>& shared;
  const DecodeParams& params;
  const int row_group;
  ScaledSoftmax<T>& softmax;
  transposed::OutputFragment<T>& ot;

  // Decodes a partition's pieces.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    ScaledSoftmax<T> softmax(shared, params.scale_log2, 1.0f, group);
    transposed::OutputFragment<T> ot;
    Consumer consumer{shared, params, row_group, softmax, ot};
    KeyPosition<T> keys;
    uint32_t grants_taken = 0;  // in all pieces
    int pieces = 0;
    char* const probabilities = shared.probabilities + 2 * group * T::kProbabilityBytes;
    typename T::Walk walk(params, partition);
    while (!walk.done()) {
      const Piece piece = walk.next();
      if (piece.tiles() == 0) transposed::finish_empty<T>(shared, Destination<T>(params, piece, row_group));
      if (piece.tiles() == 0) continue;
      load_queries<T>(shared, params, piece.request, row_group);
      softmax.reset();
      cute::clear(ot);
      for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        if (i % kConsumerGroups != group) continue;
        shared.granted[group].wait(grants_taken++);
        const int mine = i / kConsumerGroups;
        consumer.consume_tile(mine == 0, keys,
                              probabilities + mine % T::kProbabilityBuffers * kScales * T::kScaledBytes);
      }
      softmax.finish();
      ETAP_MARKED(merge_grant, shared.granted[group].wait(grants_taken++));
      transposed::merge_and_write<T>(shared, keys, pieces++, Destination<T>(params, piece, row_group), softmax, ot);
      keys.advance(kConsumerGroups * T::kMergeStages);
    }
    if (transposed::clustered<T>()) transposed::sum_cluster<T>(shared, params, partition, row_group);
  }

  // One tile: wait for K, S^T, softmax, O^T, release. `first`: of this consumer's in the piece.
  CUTE_DEVICE void consume_tile(bool first, KeyPosition<T> at, char* probabilities) {
    const int group = softmax.group;
    // Wait for K, S^T.
    ETAP_MARKED(rows_wait, shared.keys.wait(at));
    const char* tile = shared.ring + at.stage * T::kStageBytes;
    transposed::ScoreFragment<T> st;
    const auto scales = TokenScales::read<T>(tile);
    compute_scores<T>(shared, tile, scales, params.scale_log2, st);
    sparse::hide_invalid_rows(shared.valid[at.stage], st);
    ValueFetches<T> values{tile};
    if (T::kFetchesAhead) values.begin();

    // Softmax. Where P^T has one buffer, meeting before its first store tells that no product of the last tile reads it.
    if constexpr (T::kProbabilityBuffers == 1) ETAP_MARKED(products_meeting, event::scores_read(group).sync());
    const bool wide = write_probabilities<T>(
        softmax, st, scales, first, event::probabilities_written(group), probabilities, [&](const auto& correction) {
          transposed::scale_columns<T>(ot, [&](int block, int bit) { return correction[2 * block + bit]; });
        });

    // O^T, release.
    const auto accumulate = [&] { softmax.accumulate(); };
    if (wide) {
      add_output<typename T::WideProbability>(shared, at, values, probabilities, ot, accumulate);
    } else {
      add_output<typename T::Probability>(shared, at, values, probabilities, ot, accumulate);
    }
  }
};

}  // namespace etap::sparse_fp8

// Short calls have splits of a single tile. Both consumers decode it, each with half of K's columns and half of the value dims, so
// that nothing is left to merge.
#pragma once

#include "decode/epilogue/merge.cuh"

namespace etap::transposed {

// Adds the other consumer's share. It crosses where the receiver's P^T will lie.
template <class T>
CUTE_DEVICE void add_score_shares(Shared<T>& shared, int group, ScoreFragment<T>& st) {
  using Share = float4[T::kScoreColumns / 8][kGroupThreads];
  static_assert(sizeof(Share) <= 2 * T::kProbabilityBytes);
  const int thread = threadIdx.x % kGroupThreads;
  const auto share_for = [&](int receiver) -> Share& {
    return *reinterpret_cast<Share*>(shared.probabilities + 2 * receiver * T::kProbabilityBytes);
  };
  CUTE_UNROLL
  for (int i = 0; i < T::kScoreColumns / 8; ++i) {
    share_for(1 - group)[i][thread] = make_float4(st(4 * i), st(4 * i + 1), st(4 * i + 2), st(4 * i + 3));
  }
  ETAP_MARKED(shares_sync, event::shares_written().sync());
  CUTE_UNROLL
  for (int i = 0; i < T::kScoreColumns / 8; ++i) {
    const float4 other = share_for(group)[i][thread];
    st(4 * i) += other.x;
    st(4 * i + 1) += other.y;
    st(4 * i + 2) += other.z;
    st(4 * i + 3) += other.w;
  }
}

// Both consumers call it; `splits` counts those finished before. The consumer has compute_score_share(at, st), the scores of its
// share of the columns, and compute_output_share(at, probabilities, meanwhile), O^T of its value dims, in the first slices.
template <class T, class Consumer>
CUTE_DEVICE void decode_single_tile(Consumer& consumer, const Split& split, KeyPosition<T> at, int splits, char* probabilities) {
  auto& shared = consumer.shared;
  auto& softmax = consumer.softmax;
  auto& ot = consumer.ot;
  const auto& params = consumer.params;
  const int group = softmax.group;
  ScoreFragment<T> st;
  consumer.compute_score_share(at, st);
  add_score_shares<T>(shared, group, st);

  // P^T. The shares have been exchanged: nobody reads K any more.
  const int tile_end = (split.begin_tile + 1) * kTileTokens;
  if (tile_end > split.seq_len - params.s_q + 1) {
    mask_scores<T>(params, split, split.begin_tile, consumer.row_group(), group, st);
    if (tile_end > split.seq_len) {
      constexpr int kChunks = T::kTileValueChunks / kConsumerGroups;
      zero_value_tail<T>(shared, at, split, split.begin_tile, group * kChunks, (group + 1) * kChunks);
    }
  }
  write_probabilities<T>(softmax, st, true, probabilities, [](const auto&) {});

  auto& columns = shared.columns[splits % 2];
  consumer.compute_output_share(at, probabilities, [&] {
    softmax.accumulate();
    publish_columns<T>(columns, softmax);
  });
  ETAP_MARKED(outputs_sync, event::sums_written().sync());
  if (group == 0 && releases()) {
    CUTE_UNROLL
    for (int stage = 0; stage < T::kStagesPerTile; ++stage) shared.keys.release(at.ahead(stage));
  }
  const WarpFactors<T> factors([&](int, int column) {
    return normalised(1.0f, 0.0f, total(columns.sums[group][column]), total(columns.rounded_sums[group][column]),
                      columns.references[group][column]);
  });
  scale_columns<T, T::kMergeSlices>(ot, [&](int block, int bit) { return factors.own(block, bit); });
  const Destination<T> to(params, split, consumer.row_group());
  write_output<T, T::kMergeSlices>(to, group * kLatentDim / kConsumerGroups, 0, ot);
  if (group == 0) factors.write_lse(to);
}

}  // namespace etap::transposed

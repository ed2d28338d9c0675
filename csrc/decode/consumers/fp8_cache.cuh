// A consumer beside a cache of e4m3: up to 32 rows it takes every other tile of a split, and at 64 rows of float16 products both
// consumers share every tile.
#pragma once

#include "decode/consumers/split_loop.cuh"
#include "decode/load/scaled_queries.cuh"
#include "decode/mma/fp8_cache.cuh"

namespace etap::transposed_fp8 {

template <class T>
struct Consumer : transposed::SplitLoop<T, Consumer<T>, ScaledQueries<T>, transposed::Softmax> {
  using Loop = transposed::SplitLoop<T, Consumer<T>, ScaledQueries<T>, transposed::Softmax>;
  using Loop::shared, Loop::params, Loop::softmax, Loop::ot;

  // Consumes one tile, which is one stage. `first` says that it is this consumer's in the split.
  CUTE_DEVICE void consume_tile(const Split& split, int tile, bool first, bool, KeyPosition<T> at, char* probabilities) {
    const int group = softmax.group;
    // S^T = K Q^T.
    transposed::ScoreFragment<T> st;
    await_tile(at);
    compute_scores<T>(shared, at, group, st);

    // P^T = 2^(S^T - reference), written for those who share the tile; O^T is rescaled where the reference is renewed.
    Loop::mask_tail(at, split, tile, st);
    transposed::write_probabilities<T>(softmax, st, first, probabilities, [&](const auto& correction) {
      transposed::rescale_output<T>(shared, group, correction, ot);
    });

    // O^T += V^T P^T: the tile is given back when V^T is in registers.
    add_output<T>(shared.ring + at.stage * T::kStageBytes, T::kAlternatingTiles ? 0 : group * T::kOutputSlices, probabilities, ot,
                  [&] { if (releases()) shared.keys.release(at); }, [&] { softmax.accumulate(); });
  }

  // Computes S^T of this consumer's share of a single tile's columns.
  CUTE_DEVICE void compute_score_share(KeyPosition<T> at, transposed::ScoreFragment<T>& st) {
    await_tile(at);
    compute_scores<T, kConsumerGroups>(shared, at, softmax.group, st);
  }

  // Computes O^T of this consumer's half of a single tile's value dims; `meanwhile` runs beside the products.
  template <class Meanwhile>
  CUTE_DEVICE void compute_output_share(KeyPosition<T> at, const char* probabilities, Meanwhile&& meanwhile) {
    constexpr int kShare = T::kOutputSlices / kConsumerGroups;
    add_output<T, kShare>(shared.ring + at.stage * T::kStageBytes, softmax.group * kShare, probabilities, ot, [] {}, meanwhile);
  }

 private:
  CUTE_DEVICE void await_tile(KeyPosition<T> at) {
    shared.keys.wait(at);
    if constexpr (T::kFp8Math) {  // what cp.async wrote, for WGMMA
      if (params.key_load == KeyLoad::kRows) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    }
  }
};

}  // namespace etap::transposed_fp8

// A consumer beside a cache or lists of the queries' type, up to 32 rows: it takes every other tile of a split, and holds a whole
// O^T.
#pragma once

#include "decode/consumers/split_loop.cuh"
#include "decode/load/queries.cuh"

namespace etap::transposed {

template <class T>
struct Consumer : SplitLoop<T, Consumer<T>, PlainQueries<T>, Softmax> {
  using Loop = SplitLoop<T, Consumer<T>, PlainQueries<T>, Softmax>;
  using Loop::shared, Loop::params, Loop::queries, Loop::softmax, Loop::ot;

  // Consumes one tile, whose stages begin at `at`. `first` and `last` say that it is this consumer's in the split.
  CUTE_DEVICE void consume_tile(const Split& split, int tile, bool first, bool last, KeyPosition<T> at, char* probabilities) {
    // S^T = K Q^T: products start stage by stage as the tile arrives.
    ScoreFragment<T> st;
    typename T::ScoreMma mma;
    begin_scores<T>(mma, st);
    CUTE_UNROLL
    for (int stage = 0; stage < T::kStagesPerTile; ++stage) {
      shared.keys.wait(at.ahead(stage));
      if constexpr (T::kSparse) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());  // what cp.async wrote, for WGMMA
      add_scores<T>(shared, mma, at.ahead(stage), stage, st);
    }
    wait_scores<T>(st);
    if (last) queries.release(shared);

    // P^T = 2^(S^T - reference), written for the warpgroup's products; O^T is rescaled where the reference is renewed.
    if constexpr (T::kSparse) {
      sparse::hide_invalid_rows(shared.valid[at.stage], st);
    } else {
      Loop::mask_tail(at, split, tile, st);
    }
    write_probabilities<T>(softmax, st, first, probabilities,
                           [&](const auto& correction) { rescale_output<T>(shared, softmax.group, correction, ot); });

    // O^T += V^T P^T: a stage is given back as soon as its own products are done.
    start_output<T>(shared, at, probabilities, ot);
    softmax.accumulate();
    cute::for_each(cute::make_seq<kValueStages<T>>{}, [&](auto stage) {
      ETAP_MARKED(output_wait, cute::warpgroup_wait<kValueStages<T> - 1 - stage>());
      if (releases()) ETAP_MARKED(stage_release, shared.keys.release(at.ahead(stage)));
    });
    cute::warpgroup_fence_operand(ot);
  }

  // Computes S^T of this consumer's share of a single tile's columns: half of the value dims' chunks, and half of rope's, the last
  // one's.
  CUTE_DEVICE void compute_score_share(KeyPosition<T> at, ScoreFragment<T>& st) {
    typename T::ScoreMma mma;
    begin_scores<T>(mma, st);
    CUTE_UNROLL
    for (int c = 0; c <= kShareChunks; ++c) {
      const int chunk = c < kShareChunks ? softmax.group * kShareChunks + c : kValueChunks;
      shared.keys.wait(at.ahead(chunk / T::kChunksPerStage));
      add_score_share<T>(shared, mma, at, chunk, softmax.group, st);
    }
    wait_scores<T>(st);
    queries.release(shared);
  }

  // Computes O^T of this consumer's half of a single tile's value dims; `meanwhile` runs beside the products.
  template <class Meanwhile>
  CUTE_DEVICE void compute_output_share(KeyPosition<T> at, const char* probabilities, Meanwhile&& meanwhile) {
    start_output_share<T>(shared, at, softmax.group, probabilities, ot);
    meanwhile();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(ot);
  }
};

}  // namespace etap::transposed

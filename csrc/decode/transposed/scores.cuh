// S^T = K·Q^T of one tile: [64 tokens x score columns] in float32 registers.
#pragma once

#include "decode/transposed/traits.h"

namespace etap::transposed {

template <class T>
using ScoreFragment = decltype(cute::partition_fragment_C(typename T::ScoreMma{},
                                                          cute::Shape<cute::_64, cute::Int<T::kScoreColumns>>{}));

// The products start stage by stage as the tile arrives, and are complete on return.
template <class T>
CUTE_DEVICE void compute_scores(Shared<T>& shared, KeyPosition<T> at, ScoreFragment<T>& st) {
  using namespace cute;
  typename T::ScoreMma mma;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  const auto slice = mma.get_thread_slice(0);  // operands in shared memory do not depend on the thread

  warpgroup_fence_operand(st);
  CUTE_UNROLL
  for (int stage = 0; stage < T::kStagesPerTile; ++stage) {
    const auto from = at.ahead(stage);
    shared.keys.wait(from);
    // What cp.async wrote, for WGMMA.
    if constexpr (T::kGathered) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    warpgroup_arrive();
    CUTE_UNROLL
    for (int c = 0; c < T::kChunksPerStage; ++c) {
      const int chunk = stage * T::kChunksPerStage + c;
      auto s_key = make_tensor(make_smem_ptr(&item<typename T::KeyStage>(shared.ring, from.stage)[c][0][0]),
                               typename T::KeyOperand{});  // (64 tokens, 64 columns)
      auto s_query = make_tensor(make_smem_ptr(&item<typename T::QueryChunk>(shared.query, chunk)[0][0]),
                                 typename T::QueryOperand{});  // (score columns, 64 columns)
      auto r_key = slice.make_fragment_A(slice.partition_A(s_key));
      auto r_query = slice.make_fragment_B(slice.partition_B(s_query));
      CUTE_UNROLL
      for (int k = 0; k < size<2>(r_key); ++k) {
        gemm(mma, r_key(_, 0, k), r_query(_, 0, k), st(_, 0, 0));
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
  }
  ETAP_MARKED(scores_commit, warpgroup_commit_batch());
  ETAP_MARKED(scores_wait, warpgroup_wait<0>());
  warpgroup_fence_operand(st);
}

}  // namespace etap::transposed

// S = Q·K^T of one tile: [64 rows x 64 tokens] in float32 registers.
#pragma once

#include "decode/query_major/traits.h"

namespace etap::query_major {

// The n-th tile of a CTA.
template <class T>
CUTE_DEVICE KeyPosition<T> tile_position(int n) {
  return {n % kConsumerGroups * T::kStagesPerTile, uint32_t(n / kConsumerGroups % 2)};
}

// Start the share of S of an own tile, its piece's i-th, that stages [kBegin, kEnd) have, one by one as they arrive: a
// group of WGMMAs.
template <class T, int kBegin, int kEnd>
CUTE_DEVICE void start_scores(Shared<T>& shared, KeyPosition<T> at, int i, typename T::Scores& s) {
  using namespace cute;
  using Element = typename T::Element;
  typename T::ScoreMma mma;
  mma.accumulate_ = kBegin == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  const auto slice = mma.get_thread_slice(0);  // operands in shared memory do not depend on the thread
  const auto chunk_at = [](const Element* chunk) { return make_tensor(make_smem_ptr(chunk), typename T::Chunk{}); };
  warpgroup_fence_operand(s);
  CUTE_UNROLL
  for (int stage = kBegin; stage < kEnd; ++stage) {
    shared.keys.wait({at.stage + stage, at.parity});
    // What cp.async wrote, for WGMMA.
    if constexpr (T::kGathered) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    warpgroup_arrive();
    const auto* query = &item<typename T::QueryChunk>(shared.query, T::first_chunk(stage, i))[0][0];
    const auto* key = &item<typename T::KeyStage>(shared.ring, at.stage + stage)[0][0];
    auto r_query = slice.make_fragment_A(slice.partition_A(chunk_at(query)));
    auto r_key = slice.make_fragment_B(slice.partition_B(chunk_at(key)));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_key); ++k) {
      gemm(mma, r_query(_, 0, k), r_key(_, 0, k), s(_, 0, 0));
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }
  warpgroup_commit_batch();
}

// Complete on return.
template <class T>
CUTE_DEVICE void finish_scores(typename T::Scores& s) {
  ETAP_MARKED(scores_wait, cute::warpgroup_wait<0>());
  cute::warpgroup_fence_operand(s);
}

}  // namespace etap::query_major

// S = Q·K^T of one tile, [64 rows x 64 tokens] in float32 registers. (The output: transposed_fp8/products.cuh.)
#pragma once

#include "decode/mixed_major/traits.h"
#include "decode/transposed_fp8/products.cuh"

namespace etap::mixed_major {

// multiply(where, layout, first step): of a chunk of K, which is half of a wide one, or rope.
template <class T, class Multiply>
CUTE_DEVICE void with_chunk(const char* tile, int chunk, Multiply&& multiply) {
  if (chunk < kValueChunks) {
    multiply(tile + chunk / 2 * T::kWideBytes, typename T::LatentOperand{}, chunk % 2 * 2);
  } else {
    multiply(tile + T::kWideChunks * T::kWideBytes, typename T::RopeOperand{}, 0);
  }
}

// Waits for a tile and computes its scores, which are complete on return. The products of kPartChunks chunks have a sum of their own,
// which float32 additions take over: see transposed_fp8/products.cuh. The first one's is the scores', so two are under way at first.
template <class T>
CUTE_DEVICE void compute_scores(Shared<T>& shared, const DecodeParams& params, KeyPosition<T> at, typename T::Scores& s) {
  using namespace cute;
  typename T::ScoreMma mma;
  const char* tile = shared.ring + at.stage * T::kStageBytes;
  const auto start_part = [&](int first_chunk, auto& sum) {
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int chunk = first_chunk; chunk < first_chunk + T::kPartChunks && chunk < kChunks; ++chunk) {
      const auto r_query = wgmma::operand_a<typename T::QueryOperand>(mma, shared.query + chunk * T::kQueryChunkBytes);
      with_chunk<T>(tile, chunk, [&](const char* from, auto layout, int first_step) {
        const auto r_key = wgmma::operand_b<decltype(layout)>(mma, from);
        wgmma::multiply(mma, r_query, 0, r_key, first_step, size<2>(r_query), sum(_, 0, 0));
      });
    }
    warpgroup_commit_batch();
  };

  shared.keys.wait(at);
  // What cp.async wrote, for WGMMA.
  if (params.key_load == KeyLoad::kRows) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
  typename T::Scores part;
  start_part(0, s);
  CUTE_UNROLL
  for (int chunk = T::kPartChunks; chunk < kChunks; chunk += T::kPartChunks) {
    start_part(chunk, part);
    ETAP_MARKED(scores_wait, warpgroup_wait<0>());
    if (chunk == T::kPartChunks) warpgroup_fence_operand(s);
    warpgroup_fence_operand(part);
    CUTE_UNROLL
    for (int i = 0; i < size(s); ++i) s(i) += part(i);
  }
}

}  // namespace etap::mixed_major

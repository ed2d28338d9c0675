// S = Q·K^T of one tile, [64 rows x 64 tokens] in float32 registers. (The output: transposed_fp8/products.cuh.)
#pragma once

#include "decode/mixed_major/traits.h"
#include "decode/transposed_fp8/products.cuh"

namespace etap::mixed_major {

// Waits for a tile and computes its scores, which are complete on return. The products of kPartChunks chunks have a sum of their own,
// which float32 additions take over: see transposed_fp8/products.cuh. The first one's is the scores', so two are under way at first.
template <class T>
CUTE_DEVICE void compute_scores(Shared<T>& shared, const DecodeParams& params, KeyPosition<T> at, typename T::Scores& s) {
  using namespace cute;
  using Element = typename T::Element;
  typename T::ScoreMma mma;
  const auto slice = mma.get_thread_slice(0);  // operands in shared memory do not depend on the thread
  const char* tile = shared.ring + at.stage * T::kStageBytes;
  const auto operand = [](const char* from, auto layout) {
    return make_tensor(make_smem_ptr(reinterpret_cast<const Element*>(from)), layout);
  };
  const auto multiply_chunk = [&](int chunk, const auto& r_key, int first_step, auto& sum) {
    const auto s_query = operand(shared.query + chunk * T::kQueryChunkBytes, typename T::QueryOperand{});  // (64 rows, 64 columns)
    const auto r_query = slice.make_fragment_A(slice.partition_A(s_query));
    CUTE_UNROLL
    for (int step = 0; step < size<2>(r_query); ++step) {
      gemm(mma, r_query(_, 0, step), r_key(_, 0, first_step + step), sum(_, 0, 0));
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  };
  const auto start_part = [&](int first_chunk, auto& sum) {
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int chunk = first_chunk; chunk < first_chunk + T::kPartChunks && chunk < kChunks; ++chunk) {
      if (chunk < kValueChunks) {
        const auto s_key = operand(tile + chunk / 2 * T::kWideBytes, typename T::LatentOperand{});
        multiply_chunk(chunk, slice.make_fragment_B(slice.partition_B(s_key)), chunk % 2 * 2, sum);
      } else {
        const auto s_key = operand(tile + T::kRopeOffset, typename T::RopeOperand{});
        multiply_chunk(chunk, slice.make_fragment_B(slice.partition_B(s_key)), 0, sum);
      }
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

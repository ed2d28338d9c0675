// S = Q·K^T of one tile, [64 rows x 64 tokens], and this half of O^T += V^T·P^T of two, in float32 registers.
#pragma once

#include "decode/layouts/mixed_major.h"
#include "decode/mma/registers.cuh"

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

// Adds V^T·P^T of two tiles, slices first_slice and those behind it. The products of both have a sum of their own.
template <class T>
CUTE_DEVICE void add_outputs(const char* const (&tiles)[2], int first_slice, transposed::OutputFragment<T>& ot) {
  using namespace cute;
  constexpr int kTileLoads = 2;  // of a slice
  transposed_fp8::LoadedProducts<T, typename T::OutputMma, 2 * kTileLoads * T::kOutputSlices, decltype(make_fragment_like(ot(_, 0, 0))),
                                 2 * kTileLoads>
      products;
  const auto operand = [&](int i) { return wgmma::operand_b<typename T::ProbabilityOperand>(products.mma, tiles[i] + T::kRopeOffset); };
  const decltype(operand(0)) r_pt[2] = {operand(0), operand(1)};
  const auto result = [&](int load) { return ot(_, load / (2 * kTileLoads), 0); };
  const int offset = first_slice / 2 * T::kWideBytes;
  warpgroup_fence_operand(ot);
  products.start(
      [&](int load, auto& words) {
        transposed_fp8::load_values_words<T>(tiles[load / kTileLoads % 2] + offset, load / (2 * kTileLoads), load % kTileLoads, words);
      },
      [](const auto& words, auto& operand) { transposed_fp8::convert_values<typename T::Element>(words, operand); },
      [&](int load) { return r_pt[load / kTileLoads % 2]; }, result);
  products.finish(result);
  warpgroup_fence_operand(ot);
}

}  // namespace etap::mixed_major

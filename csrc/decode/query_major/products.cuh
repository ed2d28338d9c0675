// S = Q·K^T of one tile, [64 rows x 64 tokens], and this warpgroup's half of O += P·V, [64 rows x 256 value dims]; both in float32
// registers.
#pragma once

#include "decode/query_major/traits.h"

namespace etap::query_major {

// The n-th tile of a CTA begins there.
template <class T>
CUTE_DEVICE KeyPosition<T> tile_position(int n) {
  return {n % kConsumerGroups * T::kStagesPerTile, uint32_t(n / kConsumerGroups % 2)};
}

// Starts the share of S of an own tile, its piece's i-th, that stages [kBegin, kEnd) have, one by one as they arrive: a group of
// WGMMAs.
template <class T, int kBegin, int kEnd>
CUTE_DEVICE void start_scores(Shared<T>& shared, KeyPosition<T> at, int i, typename T::Scores& s) {
  using namespace cute;
  typename T::ScoreMma mma;
  mma.accumulate_ = kBegin == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  warpgroup_fence_operand(s);
  CUTE_UNROLL
  for (int stage = kBegin; stage < kEnd; ++stage) {
    shared.keys.wait({at.stage + stage, at.parity});
    // What cp.async wrote, for WGMMA.
    if constexpr (T::kGathered) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    warpgroup_arrive();
    const auto& query = item<typename T::QueryChunk>(shared.query, T::first_chunk(stage, i));
    const auto& key = item<typename T::KeyStage>(shared.ring, at.stage + stage);
    wgmma::multiply(mma, wgmma::operand_a<typename T::Chunk>(mma, &query), wgmma::operand_b<typename T::Chunk>(mma, &key),
                    s(_, 0, 0));
  }
  warpgroup_commit_batch();
}

// Waits for the scores, which are complete on return.
template <class T>
CUTE_DEVICE void finish_scores(typename T::Scores& s) {
  ETAP_MARKED(scores_wait, cute::warpgroup_wait<0>());
  cute::warpgroup_fence_operand(s);
}

template <class T>
CUTE_DEVICE void scale_rows(typename T::Output& o, const float (&factor)[2]) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(o); ++i) o(i) *= factor[i / 2 % 2];
}

// Starts this warpgroup's half of P·V, from stage `first` on: kProducts groups of WGMMAs, which own P's registers meanwhile.
template <class T>
CUTE_DEVICE void start_output(Shared<T>& shared, int first, const uint32_t (&p)[T::kWords], typename T::Output& o) {
  using namespace cute;
  using Element = typename T::Element;
  typename T::OutputMma mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
  constexpr int kStages = T::kProductDims / kChunkColumns;
  // What cp.async wrote of a tile that the other warpgroup waited for, for WGMMA.
  if constexpr (T::kGathered) ETAP_MARKED(other_rows_fence, cutlass::arch::fence_view_async_shared());
  warpgroup_fence_operand(o);
  ETAP_MARKED(output_fence, warpgroup_arrive());
  CUTE_UNROLL
  for (int n = 0; n < T::kProducts; ++n) {
    const auto r_value =
        wgmma::operand_b<typename T::ValueChunks>(mma, &item<typename T::KeyStage>(shared.ring, first + n * kStages));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_value); ++k) {
      const auto a = make_tensor(make_rmem_ptr(reinterpret_cast<const Element*>(&p[4 * k])), Layout<_8>{});
      gemm(mma, a, r_value(_, 0, k), o(_, 0, n));
    }
    warpgroup_commit_batch();
  }
}

// Waits for the products, but not for kBehind groups started behind them, and gives their stages back as soon as those of a WGMMA are
// done.
template <class T, int kBehind>
CUTE_DEVICE void finish_output(Shared<T>& shared, int first, typename T::Output& o) {
  constexpr int kStages = T::kHalfChunks / T::kProducts;
  cute::for_each(cute::make_seq<T::kProducts>{}, [&](auto n) {
    cute::warpgroup_wait<T::kProducts - 1 - n + kBehind>();
    if (!releases()) return;
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) ETAP_MARKED(stage_release, shared.keys.release({first + n * kStages + stage, 0}));
  });
  cute::warpgroup_fence_operand(o);
}

// Zeros this half of V's tokens behind the request's end: they may hold NaN, and 0 * NaN is NaN. Scores may still read there, which are
// masked.
template <class T>
CUTE_DEVICE void zero_value_tail(Shared<T>& shared, int first, int group, int valid) {
  constexpr int kLineBytes = kChunkColumns * sizeof(typename T::Element);
  const int units = (kTileTokens - valid) * (kLineBytes / kUnitBytes);  // of a chunk
#pragma unroll 1
  for (int i = anew(threadIdx.x % kGroupThreads); i < units; i += kGroupThreads) {
    CUTE_UNROLL
    for (int stage = 0; stage < T::kHalfChunks; ++stage) {
      char* tail = shared.ring + (first + stage) * T::kStageBytes + valid * kLineBytes;
      reinterpret_cast<uint4*>(tail)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  // These writes, for WGMMA once the warpgroup has met.
  ETAP_MARKED(tail_fence, cutlass::arch::fence_view_async_shared());
  ETAP_MARKED(tail_meeting, event::tail_zeroed(group).sync());
}

}  // namespace etap::query_major

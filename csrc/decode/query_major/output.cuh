// O += P·V of one tile: [64 rows x 256 value dims], this warpgroup's half, in float32 registers.
#pragma once

#include "decode/query_major/traits.h"

namespace etap::query_major {

template <class T>
CUTE_DEVICE void scale_rows(typename T::Output& o, const float (&factor)[2]) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(o); ++i) o(i) *= factor[i / 2 % 2];
}

// Start this warpgroup's half of P·V, from stage `first` on: kProducts groups of WGMMAs, which own P's registers meanwhile.
template <class T>
CUTE_DEVICE void start_output(Shared<T>& shared, int first, const uint32_t (&p)[T::kWords], typename T::Output& o) {
  using namespace cute;
  using Element = typename T::Element;
  typename T::OutputMma mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
  const auto slice = mma.get_thread_slice(0);
  constexpr int kStages = T::kProductDims / kChunkColumns;
  // What cp.async wrote of a tile that the other warpgroup waited for, for WGMMA.
  if constexpr (T::kGathered) ETAP_MARKED(other_rows_fence, cutlass::arch::fence_view_async_shared());
  warpgroup_fence_operand(o);
  ETAP_MARKED(output_fence, warpgroup_arrive());
  CUTE_UNROLL
  for (int n = 0; n < T::kProducts; ++n) {
    auto s_value = make_tensor(make_smem_ptr(&item<typename T::KeyStage>(shared.ring, first + n * kStages)[0][0]),
                               typename T::ValueChunks{});  // (64 value dims, 64 tokens)
    auto r_value = slice.make_fragment_B(slice.partition_B(s_value));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_value); ++k) {
      const auto a = make_tensor(make_rmem_ptr(reinterpret_cast<const Element*>(&p[4 * k])), Layout<_8>{});
      gemm(mma, a, r_value(_, 0, k), o(_, 0, n));
    }
    warpgroup_commit_batch();
  }
}

// Wait for the products and give their stages back as soon as those of a WGMMA are done.
template <class T, int kOutstanding = T::kProducts - 1>
CUTE_DEVICE void finish_output(Shared<T>& shared, int first, typename T::Output& o) {
  constexpr int kStages = T::kHalfChunks / T::kProducts;
  cute::warpgroup_wait<kOutstanding>();
  if (releases()) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      shared.keys.release({first + (T::kProducts - 1 - kOutstanding) * kStages + stage, 0});
    }
  }
  if constexpr (kOutstanding > 0) {
    finish_output<T, kOutstanding - 1>(shared, first, o);
  } else {
    cute::warpgroup_fence_operand(o);
  }
}

// Zero this half of V's tokens behind the request's end: they may hold NaN, and 0 * NaN is NaN. Scores may still read
// there, which are masked.
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

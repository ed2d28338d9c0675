// O^T += V^T·P^T of one tile: slices of 64 value dims x all rows, in float32 registers.
#pragma once

#include "decode/transposed/traits.h"

namespace etap::transposed {

template <class T>
using OutputFragment = decltype(cute::partition_fragment_C(
    typename T::OutputMma{}, cute::Shape<cute::Int<64 * T::kOutputSlices>, cute::Int<T::kRowTile>>{}));

// Multiply each column of O^T, its first kSlices slices, by factor(column block, column bit).
template <class T, int kSlices = T::kOutputSlices, class Factor>
CUTE_DEVICE void scale_columns(OutputFragment<T>& ot, Factor&& factor) {
  CUTE_UNROLL
  for (int block = 0; block < T::kRowTile / 8; ++block) {
    CUTE_UNROLL
    for (int bit = 0; bit < 2; ++bit) {
      const float scale = factor(block, bit);
      CUTE_UNROLL
      for (int m = 0; m < kSlices; ++m) {
        ot(cute::make_coord(bit, 0, block), m, 0) *= scale;
        ot(cute::make_coord(bit, 1, block), m, 0) *= scale;
      }
    }
  }
}

// Stages of a tile that hold value dims, which a warpgroup multiplies with P^T.
template <class T>
constexpr int kValueStages = (T::kOutputSlices + T::kChunksPerStage - 1) / T::kChunksPerStage;

// Start the products, one group of WGMMAs a stage.
template <class T>
CUTE_DEVICE void start_output(Shared<T>& shared, KeyPosition<T> at, const char* probabilities, OutputFragment<T>& ot) {
  using namespace cute;
  typename T::OutputMma mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
  const auto slice = mma.get_thread_slice(0);
  auto s_pt = make_tensor(make_smem_ptr(reinterpret_cast<const typename T::Element*>(probabilities)),
                          typename T::ProbabilityOperand{});  // (rows, 64 tokens)
  auto r_pt = slice.make_fragment_B(slice.partition_B(s_pt));

  warpgroup_fence_operand(ot);
  ETAP_MARKED(output_fence, warpgroup_arrive());
  CUTE_UNROLL
  for (int stage = 0; stage < kValueStages<T>; ++stage) {
    const auto from = at.ahead(stage);
    CUTE_UNROLL
    for (int c = 0; c < T::kChunksPerStage; ++c) {
      const int m = stage * T::kChunksPerStage + c;
      if (m >= T::kOutputSlices) continue;
      auto s_value = make_tensor(make_smem_ptr(&item<typename T::KeyStage>(shared.ring, from.stage)[c][0][0]),
                                 typename T::ValueOperand{});  // (64 value dims, 64 tokens)
      auto r_value = slice.make_fragment_A(slice.partition_A(s_value));
      CUTE_UNROLL
      for (int k = 0; k < size<2>(r_value); ++k) gemm(mma, r_value(_, 0, k), r_pt(_, 0, k), ot(_, m, 0));
    }
    warpgroup_commit_batch();
  }
}

template <int kOutstanding, class T>
CUTE_DEVICE void finish_output_stages(Shared<T>& shared, KeyPosition<T> at) {
  ETAP_MARKED(output_wait, cute::warpgroup_wait<kOutstanding>());
  constexpr int kStage = kValueStages<T> - 1 - kOutstanding;
  if (releases()) ETAP_MARKED(stage_release, shared.keys.release(at.ahead(kStage)));
  if constexpr (kOutstanding > 0) finish_output_stages<kOutstanding - 1, T>(shared, at);
}

// Wait for the products and give each stage back as soon as its own are done.
template <class T>
CUTE_DEVICE void finish_output(Shared<T>& shared, KeyPosition<T> at, OutputFragment<T>& ot) {
  finish_output_stages<kValueStages<T> - 1, T>(shared, at);
  cute::warpgroup_fence_operand(ot);
}

}  // namespace etap::transposed

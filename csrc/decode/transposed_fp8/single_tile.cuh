// S^T of a piece's single tile of e4m3, of a consumer's share of the columns: see transposed/single_tile.cuh.
#pragma once

#include "decode/transposed_fp8/products.cuh"

namespace etap::transposed_fp8 {

// e4m3 products. Sums are of two steps, as in products.cuh; rope's share is one step.
template <class T>
CUTE_DEVICE void multiply_shared_key_share(const char* tile, const char* query, int group, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  using Element = typename T::Element;
  constexpr int kShareChunks = kValueChunks / kConsumerGroups;
  typename T::ScoreMma mma;
  const auto slice = mma.get_thread_slice(0);
  decltype(make_fragment_like(st(_, 0, 0))) sums[kShareChunks + 1];
  const auto query_chunk = [&](int chunk) {
    auto s_query = make_tensor(make_smem_ptr(reinterpret_cast<const Element*>(query + chunk * T::kQueryChunkBytes)),
                               typename T::QueryOperand{});
    return slice.make_fragment_B(slice.partition_B(s_query));
  };
  const auto key_operand = [&](const char* at, auto operand) {
    auto s_key = make_tensor(make_smem_ptr(reinterpret_cast<const Element*>(at)), operand);
    return slice.make_fragment_A(slice.partition_A(s_key));
  };
  CUTE_UNROLL
  for (auto& sum : sums) warpgroup_fence_operand(sum);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int c = 0; c < kShareChunks; ++c) {
    const auto r_query = query_chunk(group * kShareChunks + c);
    const auto r_key = key_operand(tile + (group * kShareChunks + c) / 2 * T::kWideBytes, typename T::LatentOperand{});
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int step = 0; step < size<2>(r_query); ++step) {
      gemm(mma, r_key(_, 0, c % 2 * 2 + step), r_query(_, 0, step), sums[c]);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  gemm(mma, key_operand(tile + T::kWideChunks * T::kWideBytes, typename T::RopeOperand{})(_, 0, group),
       query_chunk(kValueChunks)(_, 0, group), sums[kShareChunks]);
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (auto& sum : sums) warpgroup_fence_operand(sum);
  CUTE_UNROLL
  for (int i = 0; i < size(sums[0]); ++i) {
    st(i) = sums[0](i);
    CUTE_UNROLL
    for (int c = 1; c <= kShareChunks; ++c) st(i) += sums[c](i);
  }
}

// float16 products, K through registers.
template <class T>
CUTE_DEVICE void multiply_loaded_key_share(const char* tile, const char* query, int group, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  using Element = typename T::Element;
  constexpr int kLatentLoads = kLatentDim / 32 / kConsumerGroups;  // of a share; rope's is one more
  LoadedProducts<T, typename T::ScoreMma, kLatentLoads + 1, decltype(make_fragment_like(st(_, 0, 0)))> products;
  const auto slice = products.mma.get_thread_slice(0);
  const auto result = [&](int) { return st(_, 0, 0); };
  products.mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(st);
  products.start(
      [&](int load, auto& words) {
        load_keys_words<T>(tile, load < kLatentLoads ? group * kLatentLoads + load : kConsumerGroups * kLatentLoads + group,
                           words);
      },
      [](const auto& words, auto& operand) { convert_keys<T>(words, operand); },
      [&](int load) {
        const int chunk = load < kLatentLoads ? (group * kLatentLoads + load) / 2 : kValueChunks;
        const int column = load < kLatentLoads ? 0 : group * 32;  // of the chunk
        auto s_query = make_tensor(
            make_smem_ptr(reinterpret_cast<const Element*>(query + chunk * T::kQueryChunkBytes) + column),
            typename T::QueryOperand{});
        return slice.make_fragment_B(slice.partition_B(s_query));
      },
      result);
  products.finish(result);
  warpgroup_fence_operand(st);
}

template <class T>
CUTE_DEVICE void compute_score_share(Shared<T>& shared, const DecodeParams& params, KeyPosition<T> at, int group,
                                     transposed::ScoreFragment<T>& st) {
  const char* tile = shared.ring + at.stage * T::kStageBytes;
  shared.keys.wait(at);
  if constexpr (T::kFp8Math) {
    // What cp.async wrote, for WGMMA.
    if (params.key_load == KeyLoad::kRows) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    multiply_shared_key_share<T>(tile, shared.query, group, st);
  } else {
    multiply_loaded_key_share<T>(tile, shared.query, group, st);
  }
}

}  // namespace etap::transposed_fp8

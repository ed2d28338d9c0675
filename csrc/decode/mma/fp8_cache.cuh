// S^T = K·Q^T and O^T += V^T·P^T of one tile of e4m3, or S = Q·K^T where 64 rows are on M. V^T comes through registers, and so does
// K where products are float16; else K is an operand as it lies in shared memory.
#pragma once

#include "decode/layouts/mixed_major.h"
#include "decode/mma/registers.cuh"
#include "decode/mma/shared.cuh"

namespace etap::transposed_fp8 {

// Computes S^T = K·Q^T of one tile in e4m3, K as it lies in shared memory. Sums are of two steps, as above.
template <class T>
CUTE_DEVICE void multiply_shared_keys(const char* tile, const char* query, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  typename T::ScoreMma mma;
  decltype(make_fragment_like(st(_, 0, 0))) sums[T::kScoreSums];
  const auto multiply_chunk = [&](int chunk, const auto& r_key, int first_step) {
    const auto r_query = wgmma::operand_b<typename T::QueryOperand>(mma, query + chunk * T::kQueryChunkBytes);
    auto& sum = sums[chunk % T::kScoreSums];
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    wgmma::multiply(mma, r_key, first_step, r_query, 0, size<2>(r_query), sum);
    warpgroup_commit_batch();
  };
  const auto add_part = [&](int chunk) {
    auto& sum = sums[chunk % T::kScoreSums];
    warpgroup_fence_operand(sum);
    CUTE_UNROLL
    for (int i = 0; i < size(sum); ++i) st(i) = chunk == 0 ? sum(i) : st(i) + sum(i);
  };

  constexpr int kMostWaiting = 7;  // that a wait can name
  CUTE_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= T::kScoreSums) {
      warpgroup_wait<cute::min(kMostWaiting, T::kScoreSums - 1)>();
      add_part(chunk - T::kScoreSums);
    }
    if (chunk < kValueChunks) {
      multiply_chunk(chunk, wgmma::operand_a<typename T::LatentOperand>(mma, tile + chunk / 2 * T::kWideBytes), chunk % 2 * 2);
    } else {
      multiply_chunk(chunk, wgmma::operand_a<typename T::RopeOperand>(mma, tile + T::kWideChunks * T::kWideBytes), 0);
    }
  }
  for_each(make_seq<T::kScoreSums>{}, [&](auto i) {
    warpgroup_wait<cute::min(kMostWaiting, T::kScoreSums - 1 - i)>();
    add_part(kChunks - T::kScoreSums + i);
  });
}

// Computes S^T of a consumer's share of the columns, where both halve a tile: see consumers/single_tile.cuh. Rope's share is one
// step.
template <class T>
CUTE_DEVICE void multiply_shared_key_share(const char* tile, const char* query, int group, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  using transposed::kShareChunks;
  typename T::ScoreMma mma;
  decltype(make_fragment_like(st(_, 0, 0))) sums[kShareChunks + 1];
  const auto query_chunk = [&](int chunk) {
    return wgmma::operand_b<typename T::QueryOperand>(mma, query + chunk * T::kQueryChunkBytes);
  };
  CUTE_UNROLL
  for (auto& sum : sums) warpgroup_fence_operand(sum);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int c = 0; c < kShareChunks; ++c) {
    const int chunk = group * kShareChunks + c;
    const auto r_query = query_chunk(chunk);
    const auto r_key = wgmma::operand_a<typename T::LatentOperand>(mma, tile + chunk / 2 * T::kWideBytes);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    wgmma::multiply(mma, r_key, c % 2 * 2, r_query, 0, size<2>(r_query), sums[c]);
  }
  const auto rope_key = wgmma::operand_a<typename T::RopeOperand>(mma, tile + T::kWideChunks * T::kWideBytes);
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  wgmma::multiply(mma, rope_key, group, query_chunk(kValueChunks), group, 1, sums[kShareChunks]);
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

// Computes S^T in float16, K through registers, of all columns or of a consumer's share of them (of two).
template <class T, int kShares>
CUTE_DEVICE void multiply_loaded_keys(const char* tile, const char* query, int share, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  using Element = typename T::Element;
  constexpr int kLatentLoads = kLatentDim / 32 / kShares, kRopeLoads = kRopeDim / 32 / kShares;
  LoadedProducts<T, typename T::ScoreMma, kLatentLoads + kRopeLoads, decltype(make_fragment_like(st(_, 0, 0)))> products;
  const auto result = [&](int) { return st(_, 0, 0); };
  static_assert(kShares == 1 || kRopeLoads == 1);
  const auto of_tile = [&](int load) {  // the share's load, counted through the tile
    if (kShares == 1) return load;
    return load < kLatentLoads ? share * kLatentLoads + load : kShares * kLatentLoads + share;
  };
  products.mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(st);
  products.start([&](int load, auto& words) { load_keys_words<T>(tile, of_tile(load), words); },
                 [](const auto& words, auto& operand) { convert_keys(words, operand); },
                 [&](int load) {
                   const int column = kShares == 1 || load < kLatentLoads ? 0 : share * 32;  // of the chunk
                   const int chunk = load < kLatentLoads ? of_tile(load) / 2 : kValueChunks;
                   const auto* from = reinterpret_cast<const Element*>(query + chunk * T::kQueryChunkBytes) + column;
                   return wgmma::operand_b<typename T::QueryOperand>(products.mma, from);
                 },
                 result);
  products.finish(result);
  warpgroup_fence_operand(st);
}

// Computes S^T of a tile that has arrived, or a consumer's share of it (of two), which is complete on return.
template <class T, int kShares = 1>
CUTE_DEVICE void compute_scores(Shared<T>& shared, KeyPosition<T> at, int group, transposed::ScoreFragment<T>& st) {
  const char* query = shared.query + T::first_column(group) * kChunkColumns * sizeof(typename T::Element);  // where nothing is shared
  const char* tile = shared.ring + at.stage * T::kStageBytes;
  if constexpr (!T::kFp8Math) {
    multiply_loaded_keys<T, kShares>(tile, kShares == 1 ? query : shared.query, kShares == 1 ? 0 : group, st);
  } else if constexpr (kShares == 1) {
    multiply_shared_keys<T>(tile, query, st);
  } else {
    multiply_shared_key_share<T>(tile, shared.query, group, st);
  }
}

// Adds V^T·P^T of one tile to O^T, kSlices of it from first_slice on. values_read() is called when V^T is in registers, `meanwhile`
// runs beside the last products, or before the first where its registers are wanted.
template <class T, int kSlices = T::kOutputSlices, class ValuesRead, class Meanwhile>
CUTE_DEVICE void add_output(const char* tile, int first_slice, const char* probabilities, transposed::OutputFragment<T>& ot,
                            ValuesRead&& values_read, Meanwhile&& meanwhile) {
  using namespace cute;
  const char* values = tile + first_slice / 2 * T::kWideBytes;
  LoadedProducts<T, typename T::OutputMma, 2 * kSlices, decltype(make_fragment_like(ot(_, 0, 0)))> products;
  products.mma.accumulate_ = GMMA::ScaleOut::One;
  const auto r_pt = wgmma::operand_b<typename T::ProbabilityOperand>(products.mma, probabilities);
  const auto result = [&](int load) { return ot(_, load / 2, 0); };

  constexpr bool kFewRegisters = T::kFp8Math && T::kRowTile > 16;  // beside the parts
  if (kFewRegisters) meanwhile();
  warpgroup_fence_operand(ot);
  products.start([&](int load, auto& words) { load_values_words<T>(values, load / 2, load % 2, words); },
                 [](const auto& words, auto& operand) { convert_values<typename T::Element>(words, operand); },
                 [&](int) { return r_pt; }, result);
  __syncwarp();
  values_read();
  if (!kFewRegisters) meanwhile();
  products.finish(result);
  warpgroup_fence_operand(ot);
}

}  // namespace etap::transposed_fp8

namespace etap::mixed_major {

// S = Q·K^T of one tile, [64 rows x 64 tokens], and this half of O^T += V^T·P^T of two, in float32 registers.

// multiply(where, layout, first step): of a chunk of K, which is half of a wide one, or rope.
template <class T, class Multiply>
CUTE_DEVICE void with_chunk(const char* tile, int chunk, Multiply&& multiply) {
  if (chunk < kValueChunks) {
    multiply(tile + chunk / 2 * T::kWideBytes, typename T::LatentOperand{}, chunk % 2 * 2);
  } else {
    multiply(tile + T::kWideChunks * T::kWideBytes, typename T::RopeOperand{}, 0);
  }
}

// Computes the scores of a tile that has arrived, which are complete on return. The products of kPartChunks chunks have a sum of
// their own, which float32 additions take over: see registers.cuh. The first one's is the scores', so two are under way at first.
template <class T>
CUTE_DEVICE void compute_scores(Shared<T>& shared, KeyPosition<T> at, typename T::Scores& s) {
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

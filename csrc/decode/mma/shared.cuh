// S^T = K·Q^T of one tile, [64 tokens x score columns], and O^T += V^T·P^T, slices of 64 value dims x all rows; both in float32
// registers.
#pragma once

#include "decode/layouts/transposed.h"

namespace etap::transposed {

template <class T>
using ScoreFragment = wgmma::Result<typename T::ScoreMma, kTileTokens, T::kScoreColumns>;

template <class T>
CUTE_DEVICE auto& key_chunk(Shared<T>& shared, KeyPosition<T> at, int chunk) {
  return item<typename T::KeyStage>(shared.ring, at.ahead(chunk / T::kChunksPerStage).stage)[chunk % T::kChunksPerStage];
}

constexpr int kShareChunks = kValueChunks / kConsumerGroups;

// Start the product of a chunk of K with that of the queries, `steps` times 16 columns from the first step on.
template <class T, class Mma, class Chunk>
CUTE_DEVICE void multiply_keys(Shared<T>& shared, Mma& mma, const Chunk& key, int chunk, int first, int steps,
                               ScoreFragment<T>& st) {
  const auto r_key = wgmma::operand_a<typename T::KeyOperand>(mma, &key);
  const auto r_query = wgmma::operand_b<typename T::QueryOperand>(mma, &item<typename T::QueryChunk>(shared.query, chunk));
  wgmma::multiply(mma, r_key, first, r_query, first, steps, st(cute::_, 0, 0));
}
constexpr int kChunkSteps = kChunkColumns / 16;

// S^T of one tile. The products start stage by stage as the tile arrives, and are complete on return.
template <class T>
CUTE_DEVICE void compute_scores(Shared<T>& shared, KeyPosition<T> at, ScoreFragment<T>& st) {
  using namespace cute;
  typename T::ScoreMma mma;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(st);
  CUTE_UNROLL
  for (int stage = 0; stage < T::kStagesPerTile; ++stage) {
    const auto from = at.ahead(stage);
    shared.keys.wait(from);
    // What cp.async wrote, for WGMMA.
    if constexpr (T::kSparse) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    warpgroup_arrive();
    CUTE_UNROLL
    for (int c = 0; c < T::kChunksPerStage; ++c) {
      const auto& key = item<typename T::KeyStage>(shared.ring, from.stage)[c];
      multiply_keys<T>(shared, mma, key, stage * T::kChunksPerStage + c, 0, kChunkSteps, st);
    }
  }
  ETAP_MARKED(scores_commit, warpgroup_commit_batch());
  ETAP_MARKED(scores_wait, warpgroup_wait<0>());
  warpgroup_fence_operand(st);
}

// The same of a consumer's share of a single tile's columns: half of the value dims' chunks, and half of rope's, the last one's.
template <class T>
CUTE_DEVICE void compute_score_share(Shared<T>& shared, KeyPosition<T> at, int group, ScoreFragment<T>& st) {
  using namespace cute;
  typename T::ScoreMma mma;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(st);
  CUTE_UNROLL
  for (int c = 0; c <= kShareChunks; ++c) {
    const int chunk = c < kShareChunks ? group * kShareChunks + c : kValueChunks;
    shared.keys.wait(at.ahead(chunk / T::kChunksPerStage));
    warpgroup_arrive();
    const int steps = c < kShareChunks ? kChunkSteps : kChunkSteps / kConsumerGroups;
    multiply_keys<T>(shared, mma, key_chunk<T>(shared, at, chunk), chunk, c < kShareChunks ? 0 : group * steps, steps, st);
  }
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  warpgroup_fence_operand(st);
}

template <class T>
using OutputFragment = wgmma::Result<typename T::OutputMma, 64 * T::kOutputSlices, T::kRowTile>;

// Multiply each column of O^T, its first kSlices slices, by factor(column block, column bit); of some blocks of columns or all.
template <class T, int kSlices = T::kOutputSlices, class Factor>
CUTE_DEVICE void scale_columns(OutputFragment<T>& ot, Factor&& factor, int first_block = 0, int end_block = T::kRowTile / 8) {
  CUTE_UNROLL
  for (int block = first_block; block < end_block; ++block) {
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

// Multiply O^T with what the consumers have found for their columns: all of them where tiles alternate, half of them where both
// share a tile.
template <class T, int kColumns>
CUTE_DEVICE void rescale_output(Shared<T>& shared, int group, const float (&correction)[kColumns], OutputFragment<T>& ot) {
  if constexpr (T::kAlternatingTiles) {
    scale_columns<T>(ot, [&](int block, int bit) { return correction[2 * block + bit]; });
  } else {
    constexpr int kBlocks = kColumns / 2;
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      if (threadIdx.x % kGroupThreads < 4) shared.factors[group][fragment_column(i / 2, i % 2)] = correction[i];
    }
    event::factors_written().sync();
    scale_columns<T>(ot, [&](int block, int bit) {
      return shared.factors[block / kBlocks][fragment_column(block % kBlocks, bit)];
    });
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
  const auto r_pt = wgmma::operand_b<typename T::ProbabilityOperand>(mma, probabilities);

  warpgroup_fence_operand(ot);
  ETAP_MARKED(output_fence, warpgroup_arrive());
  CUTE_UNROLL
  for (int stage = 0; stage < kValueStages<T>; ++stage) {
    const auto from = at.ahead(stage);
    CUTE_UNROLL
    for (int c = 0; c < T::kChunksPerStage; ++c) {
      const int m = stage * T::kChunksPerStage + c;
      if (m >= T::kOutputSlices) continue;
      const auto& chunk = item<typename T::KeyStage>(shared.ring, from.stage)[c];
      wgmma::multiply(mma, wgmma::operand_a<typename T::ValueOperand>(mma, &chunk), r_pt, ot(_, m, 0));
    }
    warpgroup_commit_batch();
  }
}

// Wait for the products and give each stage back as soon as its own are done.
template <class T>
CUTE_DEVICE void finish_output(Shared<T>& shared, KeyPosition<T> at, OutputFragment<T>& ot) {
  cute::for_each(cute::make_seq<kValueStages<T>>{}, [&](auto stage) {
    ETAP_MARKED(output_wait, cute::warpgroup_wait<kValueStages<T> - 1 - stage>());
    if (releases()) ETAP_MARKED(stage_release, shared.keys.release(at.ahead(stage)));
  });
  cute::warpgroup_fence_operand(ot);
}

}  // namespace etap::transposed

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

// Begins S^T of a tile, to which products are then added.
template <class T>
CUTE_DEVICE void begin_scores(typename T::ScoreMma& mma, ScoreFragment<T>& st) {
  mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
  cute::warpgroup_fence_operand(st);
}

// Starts the products of a tile's stage that lies at `at`.
template <class T>
CUTE_DEVICE void add_scores(Shared<T>& shared, typename T::ScoreMma& mma, KeyPosition<T> at, int stage, ScoreFragment<T>& st) {
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int c = 0; c < T::kChunksPerStage; ++c) {
    const auto& key = item<typename T::KeyStage>(shared.ring, at.stage)[c];
    multiply_keys<T>(shared, mma, key, stage * T::kChunksPerStage + c, 0, kChunkSteps, st);
  }
}

// Starts a consumer's share of a single tile's products with one chunk: all of it, but of rope's half of the columns.
template <class T>
CUTE_DEVICE void add_score_share(Shared<T>& shared, typename T::ScoreMma& mma, KeyPosition<T> at, int chunk, int group,
                                 ScoreFragment<T>& st) {
  cute::warpgroup_arrive();
  const bool whole = chunk < kValueChunks;
  const int steps = whole ? kChunkSteps : kChunkSteps / kConsumerGroups;
  multiply_keys<T>(shared, mma, key_chunk<T>(shared, at, chunk), chunk, whole ? 0 : group * steps, steps, st);
}

// Waits for the scores, which are complete on return.
template <class T>
CUTE_DEVICE void wait_scores(ScoreFragment<T>& st) {
  ETAP_MARKED(scores_commit, cute::warpgroup_commit_batch());
  ETAP_MARKED(scores_wait, cute::warpgroup_wait<0>());
  cute::warpgroup_fence_operand(st);
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

// Starts O^T of a consumer's half of a single tile's value dims, in the first slices of the fragment.
template <class T>
CUTE_DEVICE void start_output_share(Shared<T>& shared, KeyPosition<T> at, int group, const char* probabilities, OutputFragment<T>& ot) {
  using namespace cute;
  typename T::OutputMma mma;
  const auto r_pt = wgmma::operand_b<typename T::ProbabilityOperand>(mma, probabilities);
  warpgroup_fence_operand(ot);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int m = 0; m < kShareChunks; ++m) {
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    const auto& chunk = key_chunk<T>(shared, at, group * kShareChunks + m);
    wgmma::multiply(mma, wgmma::operand_a<typename T::ValueOperand>(mma, &chunk), r_pt, ot(_, m, 0));
  }
  warpgroup_commit_batch();
}

}  // namespace etap::transposed

// Numbers and layouts of the kernel for 64 query rows with e4m3 products: S = Q·K^T with the rows on WGMMA's M, O^T += V^T·P^T with
// the value dims there. K is operand B as it lies, and so is P as it comes from S; V^T comes through registers, which transpose it.
//
// A warpgroup owns every other tile of a split, whose scores and softmax it does, and half of the value dims of all tiles. A row's
// maximum needs four lanes only. P of a tile takes the place of its rope columns, which are as many bytes and which the owner alone
// reads: so it lasts as long as the tile does.
#pragma once

#include "decode/layouts/transposed_fp8.h"

namespace etap::mixed_major {

template <class T>
struct Consumer;

// What a tile's owner tells of a row: P's reference, and what O is multiplied with for it.
struct RowReference {
  float reference;
  float factor;
};

struct RowSums {
  float sum;
  float rounded_sum;
};

template <class T>
struct SharedMemory {
  alignas(1024) char ring[T::kStages * T::kStageBytes];  // KeyStage [kStages]
  alignas(1024) char query[T::kQueryBytes];              // QueryChunk [kChunks]
  // What a tile's owner says of its rows. Four tiles' in turn: a warpgroup may write its next one's while it has not yet multiplied
  // the other's before.
  RowReference rows[T::kTilesTold][T::kRowTile];
  alignas(uint32_t) uint8_t renewed[T::kTilesTold][kWarpsPerGroup];  // whether a warp's rows have another reference than the tile before
  RowSums sums[kConsumerGroups][T::kRowTile];      // at the end of a split, over the tiles of each warpgroup
  float score_scales[T::kRowTile];                 // of each query row
  Ring<T::kStages> keys;
  Ring<1> queries;
  LengthQueue lengths;
};

struct Traits : transposed_fp8::Products<cutlass::float_e4m3_t, transposed_fp8::SharedTiles> {
  using SharedStorage = SharedMemory<Traits>;
  using Consumer = mixed_major::Consumer<Traits>;
  static constexpr bool kFitsLaunchRegisters = false;
  static constexpr PartialLayout kPartials = PartialLayout::kHalfPairedColumns;  // e4m3 products round ten times as coarsely
  static constexpr int kStages = 5;
  static constexpr int kTilesTold = 4;
  static constexpr int kFewTiles = 8;  // of a split, for which the code that multiplies two together is not worth its loading
  static constexpr int kScoreThreads = kGroupThreads;  // a warpgroup zeros the tail of its own value dims
  static constexpr bool kProbabilitiesInTile = true;
  static_assert(kProbabilityBytes == kTileTokens * kRopeDim);
  static constexpr int kRopeOffset = kWideChunks * kWideBytes;  // of a stage, where P lies in the end

  // Half of what the others have, which leaves room for larger scores before references are renewed: a warp's 16 rows take new
  // ones together.
  static constexpr float kProbabilityShift = 7.0f;

  static constexpr int kOperands = 4;  // beside O there are registers for two parts: none of S is held by then

  static constexpr int kPartChunks = 3;  // of 64 columns, that tensor cores add up: with 5, log-sum-exps err too much
  using ScoreMma = wgmma::OfShared<Element, kTileTokens>;
  using Scores = wgmma::Result<ScoreMma, kRowTile, kTileTokens>;
  using QueryOperand = wgmma::Layout<Swizzle, kRowTile>;
  static constexpr int kWords = kTileTokens / 16;  // of a thread's P in each of its rows
};

}  // namespace etap::mixed_major

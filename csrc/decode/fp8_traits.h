// Layouts of the decode kernel for a cache of e4m3: both products take K and V from registers, where they arrive through
// matrix loads that transpose V, and are float16 by then (every e4m3 value is one) or still e4m3.
#pragma once

#include <cutlass/float8.h>

#include "decode/traits.h"

namespace etap {

// Math: the type of the products, half_t or float_e4m3_t.
template <class Math, int kRowTile_>
struct Fp8Traits : RowTile<kRowTile_> {
  using Base = RowTile<kRowTile_>;
  using Base::kRowTile, Base::kSharedTiles, Base::kScoreColumns, Base::kSliceBytes, Base::kMergeSlices;
  using SharedStorage = SharedMemory<Fp8Traits>;
  using Element = Math;
  using Probability = Math;
  static constexpr bool kFp8Cache = true;
  static constexpr bool kFp8Math = sizeof(Math) == 1;
  // The producer warpgroup has no query rows to gather.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // A stage is a whole tile: four chunks of 128 latent columns (128 bytes, one swizzle row), then the rope columns.
  static constexpr int kWideColumns = 128;
  static constexpr int kWideChunks = kLatentDim / kWideColumns;
  static constexpr int kWideBytes = kTileTokens * kWideColumns;
  static constexpr int kRopeBytes = kTileTokens * kRopeDim;
  static constexpr bool kRowsOnM = false;
  __device__ __forceinline__ static int first_chunk(int, int) { return 0; }
  static constexpr int kTileValueChunks = kWideChunks;
  static constexpr int kChunksPerStage = kWideChunks;
  static constexpr int kStagesPerTile = 1;
  static constexpr int kStageBytes = kWideChunks * kWideBytes + kRopeBytes;
  static_assert(kStageBytes == kTileTokens * kHeadDim);
  static constexpr int kStages = kFp8Math || kRowTile <= 16 ? 5 : kRowTile == 32 ? 4 : 3;
  static constexpr int kSlicesPerMergeStage = kSharedTiles ? 1 : kStageBytes / kSliceBytes;
  static constexpr int kMergeStages = (kMergeSlices + kSlicesPerMergeStage - 1) / kSlicesPerMergeStage;
  static_assert(kConsumerGroups * kMergeStages <= kStages);
  static_assert(kSharedTiles || grants_fit(kStages, kStagesPerTile, kMergeStages));

  // P^T is kept this many powers of two above its value against the reference: small ones stay out of float16's and
  // e4m3's subnormal numbers. What lies above the reference still fits: 2^15 of float16's 2^16, and 448 of e4m3.
  static constexpr float kProbabilityShift = kFp8Math ? 8.0f : 7.0f;
  static constexpr float kLargestExponent = kFp8Math ? 8.8f : 15.0f;

  // WGMMAs take kStepColumns of the contraction; a matrix load brings 32 of them to a thread.
  static constexpr int kStepColumns = kFp8Math ? 32 : 16;
  static constexpr int kStepsPerLoad = 32 / kStepColumns;
  static constexpr int kValuesPerStep = 4 * 4 / sizeof(Math);  // of operand A, a thread
  // Operands that may wait for the tensor cores while the next are converted.
  static constexpr int kOperands = kRowTile <= 16 ? 4 : 2;

  static constexpr auto kMajorK = cute::GMMA::Major::K;
  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Math, Math, float, cute::Shape<cute::_64, cute::Int<kScoreColumns>, cute::_64>, kMajorK,
                                 kMajorK>()));
  using OutputMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Math, Math, float, cute::Shape<cute::_64, cute::Int<kRowTile>, cute::_64>, kMajorK,
                                 kMajorK>()));

  // Q chunk [score columns x 64 columns] and P^T [rows x 64 tokens], both K-major for operand B.
  using SwizzledRows = std::conditional_t<kFp8Math, cute::GMMA::Layout_K_SW64_Atom<Math>, cute::GMMA::Layout_K_SW128_Atom<Math>>;
  using QueryChunk =
      decltype(cute::tile_to_shape(SwizzledRows{}, cute::Shape<cute::Int<kScoreColumns>, cute::_64>{}));
  using Probabilities = decltype(cute::tile_to_shape(SwizzledRows{}, cute::Shape<cute::Int<kRowTile>, cute::_64>{}));

  static constexpr int kQueryChunkBytes = kRowTile * kChunkColumns * sizeof(Math);
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kProbabilityBytes = kRowTile * kTileTokens * sizeof(Math);

  // The latent part as (128 columns, tokens of a page, 4 column chunks, pages), the rope part as (64 columns, tokens, pages).
  struct CacheMaps {
    CUtensorMap latent;
    CUtensorMap rope;
  };
};

// Byte of a 16-byte unit in rows of 64 elements of operand B, where the swizzle of the row's width puts it.
template <class T>
__device__ __forceinline__ int operand_unit(int row, int unit) {
  return T::kFp8Math ? row * 64 + (unit ^ (row / 2 % 4)) * 16 : row * 128 + (unit ^ (row % 8)) * 16;
}

}  // namespace etap

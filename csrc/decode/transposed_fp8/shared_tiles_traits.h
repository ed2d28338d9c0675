// 64 query rows of an FP8 cache ("shared tiles"): O^T of 512 x 64 needs both register files, so each warpgroup holds
// half of the value dims of every tile and half of the columns of S^T, and P^T is shared. (With a 16-bit cache:
// query_major/.)
#pragma once

#include "decode/transposed_fp8/traits.h"

namespace etap::transposed_fp8 {

struct SharedTiles {
  static constexpr int kRowTile = 64;
  static constexpr bool kHalvesSingleTiles = false;
  static constexpr bool kGrantsTiles = false;  // a consumer sees every round of a stage
  static constexpr int kMergeStages = 0;
  static constexpr bool kFitsLaunchRegisters = true;
  static constexpr int kStageReleases = kConsumerWarps;
  static constexpr int kScoreColumns = kRowTile / kConsumerGroups;
  __host__ __device__ static constexpr int first_column(int group) { return group * kScoreColumns; }
  static constexpr int kScoreThreads = kConsumerThreads;
  static constexpr int kOutputSlices = kValueChunks / kConsumerGroups;
};

template <class T>
struct SharedTilesMemory {
  alignas(1024) char ring[T::kStages * T::kStageBytes];       // KeyStage [kStages]
  alignas(1024) char query[T::kQueryBytes];                   // QueryChunk [kChunks]
  alignas(1024) char probabilities[2 * T::kProbabilityBytes];  // Probabilities [2]: see transposed::SharedMemory
  transposed::ColumnSums<T::kScoreColumns> columns;
  float factors[kConsumerGroups][T::kScoreColumns];  // what O^T is scaled by for a new reference
  float score_scales[T::kRowTile];                   // of each query row
  Ring<T::kStages> keys;
  Ring<1> queries;
  LengthQueue lengths;

  CUTE_DEVICE void init_grants(int) {}
  // Each warp's column maxima of one tile: only the place of the sums is left for them.
  CUTE_DEVICE float& maximum(int group, int warp, int column) {
    return reinterpret_cast<float*>(columns.sums)[(group * kWarpsPerGroup + warp) * T::kScoreColumns + column];
  }
};

template <class T>
struct SharedTilesConsumer;

template <class Math>
struct SharedTilesTraits : Products<Math, SharedTiles> {
  using SharedStorage = SharedTilesMemory<SharedTilesTraits>;
  using ScoreScales = ReadScales<SharedTilesTraits>;
  using Consumer = SharedTilesConsumer<SharedTilesTraits>;
  static constexpr int kStages = Products<Math, SharedTiles>::kFp8Math ? 5 : 3;
};

}  // namespace etap::transposed_fp8

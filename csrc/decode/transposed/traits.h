// Numbers and layouts of the transposed kernel. Up to 32 query rows each of the two consumer warpgroups holds a whole O^T
// (512 x rows), and they take the tiles in turn ("alternate tiles").
#pragma once

#include "decode/traits.h"

namespace etap::transposed {

// A fragment of S^T gives a thread two neighbouring columns (query rows) in every block of eight, and two tokens (8
// apart) of each: register i holds column bit i & 1, token bit (i >> 1) & 1 and column block i >> 2.
CUTE_DEVICE int fragment_column(int column_block, int column_bit) {
  return column_block * 8 + threadIdx.x % 4 * 2 + column_bit;
}

// What scores are multiplied with for the log2 domain, the same for all columns.
struct UniformScale {
  float value;

  template <class SharedStorage>
  CUTE_DEVICE UniformScale(const SharedStorage&, float scale_log2, int) : value(scale_log2) {}
  CUTE_DEVICE void load(int) {}
  CUTE_DEVICE float operator()(int) const { return value; }
};

// What the warpgroups tell each other of their columns at the end of a piece.
template <int kColumns>
struct ColumnSums {
  float4 sums[kConsumerGroups][kColumns];  // of each warp
  float4 rounded_sums[kConsumerGroups][kColumns];
  float references[kConsumerGroups][kColumns];  // log2 domain
};

// What follows from the number of query rows alone, where tiles alternate.
template <int kRowTile_>
struct AlternateTiles : CommonTraits {
  static constexpr int kRowTile = kRowTile_;
  static constexpr bool kGrantsTiles = true;
  static constexpr int kStageReleases = kWarpsPerGroup;
  static constexpr int kProbabilityBuffers = 2;         // P^T that a consumer has room for
  static constexpr int kScoreColumns = kRowTile;        // of a warpgroup's S^T
  __host__ __device__ static constexpr int first_column(int) { return 0; }  // of a warpgroup's, in the row tile
  static constexpr int kScoreThreads = kGroupThreads;   // that meet over one P^T
  static constexpr int kOutputSlices = kValueChunks;    // of 64 value dims, of a warpgroup's O^T
  // The two O^T are merged through ring stages borrowed at the end of a piece: each warpgroup hands half of its own over in
  // float32.
  static constexpr int kMergeSlices = kOutputSlices / kConsumerGroups;
  static constexpr int kSliceBytes = 64 * kRowTile * 4;
  __host__ __device__ static constexpr int merge_stages(int stage_bytes) {
    const int slices_per_stage = stage_bytes / kSliceBytes;
    return (kMergeSlices + slices_per_stage - 1) / slices_per_stage;
  }
};

template <class T>
struct SharedMemory {
  // Of swizzled operands, at multiples of kSwizzlePeriod. The whole is not padded to one, and so leaves a block of the combination
  // room.
  static_assert(T::kStageBytes % kSwizzlePeriod == 0);
  char ring[T::kStages * T::kStageBytes];                                                // KeyStage [kStages]
  char query[(T::kQueryBytes + kSwizzlePeriod - 1) / kSwizzlePeriod * kSwizzlePeriod];  // QueryChunk [kTileChunks]
  // Two buffers a consumer: a warp may write the next P^T while a slower warp's product still reads this one.
  char probabilities[2 * kConsumerGroups * T::kProbabilityBytes];  // Probabilities [kConsumerGroups][2]
  // Two, for every other piece: one consumer may have finished the next piece while the other still reads.
  ColumnSums<T::kScoreColumns> columns[2];
  float maxima[kConsumerGroups * kWarpsPerGroup * T::kScoreColumns];  // of each warp, of one tile
  float factors[1][T::kScoreColumns];
  float score_scales[T::kFp8Cache ? T::kRowTile : 1];               // of each query row
  Ring<T::kStages> keys;
  Ring<1> queries;
  LengthQueue lengths;
  Turns<turns<T>(), !T::kGathered> granted[kConsumerGroups];  // begun for each consumer: its tiles, its stages for merging

  CUTE_DEVICE void init_grants(int warp, int signals) {
    constexpr int kTurns = turns<T>();
    each_of_warp<kConsumerGroups * kTurns>(warp, [&](int i) { granted[i / kTurns].init(i % kTurns, signals); });
  }
  CUTE_DEVICE float& maximum(int group, int warp, int column) {
    return maxima[(group * kWarpsPerGroup + warp) * T::kScoreColumns + column];
  }
};

template <class T>
struct Consumer;

// Three chunks a stage (24 KB a copy) load faster than one.
constexpr int chunks_per_stage(int tile_chunks) { return tile_chunks == kChunks ? 3 : 4; }

// Of a cache of the queries' own type.
template <class Element, int kRowTile_, int kTileChunks_ = kChunks>
struct Traits : SixteenBitCache<AlternateTiles<kRowTile_>, Element, kTileChunks_, chunks_per_stage(kTileChunks_)> {
  using Base = SixteenBitCache<AlternateTiles<kRowTile_>, Element, kTileChunks_, chunks_per_stage(kTileChunks_)>;
  using Base::kRowTile, Base::kScoreColumns, Base::kTileChunks, Base::kChunksPerStage;
  static_assert(kRowTile <= 32);
  using Probability = Element;
  using ScoreScales = UniformScale;
  using SharedStorage = SharedMemory<Traits>;
  using Consumer = transposed::Consumer<Traits>;
  static constexpr Registers registers(bool whole_tiles) {
    return whole_tiles && kRowTile <= 16 ? kBesideCombination : Registers{168, 40, 232};
  }
  static constexpr bool kLeanCombination = kRowTile <= 16;
  static constexpr bool kPairedDims = false;
  static constexpr bool kHalvesSingleTiles = true;

  static constexpr int kStages = kTileChunks == kChunks ? (kRowTile == 32 ? 7 : 8) : kRowTile == 32 ? 5 : 6;
  static constexpr int kTileValueChunks = kValueChunks;  // 128 bytes of each token of a tile
  __host__ __device__ static constexpr int first_chunk(int stage, int) { return stage * kChunksPerStage; }
  static constexpr int kMergeStages = Base::merge_stages(Base::kStageBytes);

  // Powers of two: how far P^T lies above its value against the reference, and how far above 1 it may get.
  static constexpr float kProbabilityShift = 0.0f;
  static constexpr float kLargestExponent = kLazyMaximum;

  using ScoreMma = wgmma::OfShared<Element, kScoreColumns>;
  using OutputMma = wgmma::OfShared<Element, kRowTile, wgmma::kMajorMN>;

  using Swizzle = cute::GMMA::Layout_K_SW128_Atom<Element>;
  // K chunk [tokens x 64 columns], and the same bytes as V^T [64 value dims x tokens].
  using KeyOperand = wgmma::Layout<Swizzle, kTileTokens>;
  using ValueOperand = wgmma::Layout<cute::GMMA::Layout_MN_SW128_Atom<Element>, 64>;
  // Q chunk [score columns x 64 columns] and P^T [rows x 64 tokens], both K-major for operand B.
  using QueryOperand = wgmma::Layout<Swizzle, kScoreColumns>;
  using ProbabilityOperand = wgmma::Layout<Swizzle, kRowTile>;

  using Probabilities = Probability[kRowTile][kTileTokens];  // swizzled
  static constexpr int kProbabilityBytes = sizeof(Probabilities);
};

}  // namespace etap::transposed

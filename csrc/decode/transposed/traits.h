// Numbers and layouts of the transposed kernel. Up to 32 query rows each of the two consumer warpgroups holds a whole O^T
// (512 x rows), and they take the tiles in turn ("alternate tiles").
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "decode/pieces.cuh"
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
struct AlternateTiles {
  static constexpr int kRowTile = kRowTile_;
  static constexpr bool kGrantsTiles = true;
  static constexpr bool kHalvesSingleTiles = false;
  static constexpr bool kFitsLaunchRegisters = true;
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
  Ring<T::kStages, !T::kGathered> keys;  // producers of lists have no registers for patience
  Ring<1> queries;
  LengthQueue lengths;
  Turns<turns<T>(), !T::kGathered> granted[kConsumerGroups];  // begun for each consumer: its tiles, its stages for merging

  CUTE_DEVICE void init_grants(int signals) {
    if (threadIdx.x < kConsumerGroups) granted[threadIdx.x].init(signals);
  }
  CUTE_DEVICE float& maximum(int group, int warp, int column) {
    return maxima[(group * kWarpsPerGroup + warp) * T::kScoreColumns + column];
  }
};

template <class T>
struct Consumer;

// A cache of the queries' own type, multiplied as it lies in shared memory. kTileChunks: of a tile, those of value dims and, where
// rows have one, rope.
template <class Element_, int kRowTile_, int kTileChunks_ = kChunks>
struct Traits : AlternateTiles<kRowTile_> {
  using Base = AlternateTiles<kRowTile_>;
  using Base::kRowTile, Base::kScoreColumns;
  static_assert(kRowTile <= 32);
  using Element = Element_;
  using Probability = Element;
  using ScoreScales = UniformScale;
  using SharedStorage = SharedMemory<Traits>;
  using Consumer = transposed::Consumer<Traits>;
  using Walk = PieceWalk;
  static_assert(sizeof(Element) == 2);
  static constexpr Registers registers(bool whole_tiles) {
    return whole_tiles && kRowTile <= 16 ? kBesideCombination : Registers{168, 40, 232};
  }
  static constexpr bool kLeanCombination = kRowTile <= 16;
  static constexpr bool kFp8Cache = false;
  static constexpr bool kGathered = false;
  static constexpr int kGatherWarps = 3;  // beside the one that brings the queries
  static constexpr bool kPairedDims = false;
  static constexpr bool kHalvesSingleTiles = true;

  // Three chunks a stage (24 KB a copy) load faster than one.
  static constexpr int kTileChunks = kTileChunks_;
  static constexpr int kChunksPerStage = kTileChunks == kChunks ? 3 : 4;
  using KeyStage = Element[kChunksPerStage][kTileTokens][kChunkColumns];  // swizzled
  static constexpr int kStageBytes = sizeof(KeyStage);
  static constexpr int kStagesPerTile = kTileChunks / kChunksPerStage;
  static constexpr int kStages = kTileChunks == kChunks ? (kRowTile == 32 ? 7 : 8) : kRowTile == 32 ? 5 : 6;
  static constexpr int kTilesAlone = 0;
  static constexpr int kTileValueChunks = kValueChunks;  // 128 bytes of each token of a tile
  __host__ __device__ static constexpr int first_chunk(int stage, int) { return stage * kChunksPerStage; }
  static_assert(kTileChunks % kChunksPerStage == 0);
  static constexpr int kMergeStages = Base::merge_stages(kStageBytes);

  // Powers of two: how far P^T lies above its value against the reference, and how far above 1 it may get.
  static constexpr float kProbabilityShift = 0.0f;
  static constexpr float kLargestExponent = kLazyMaximum;

  static constexpr auto kMajorK = cute::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::GMMA::Major::MN;
  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kScoreColumns>, cute::_64>,
                                 kMajorK, kMajorK>()));
  using OutputMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kRowTile>, cute::_64>,
                                 kMajorMN, kMajorK>()));

  using Swizzle = cute::GMMA::Layout_K_SW128_Atom<Element>;
  // K chunk [tokens x 64 columns], and the same bytes as V^T [64 value dims x tokens].
  using KeyOperand = decltype(cute::tile_to_shape(Swizzle{}, cute::Shape<cute::_64, cute::_64>{}));
  using ValueOperand = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                  cute::Shape<cute::_64, cute::_64>{}));
  // Q chunk [score columns x 64 columns] and P^T [rows x 64 tokens], both K-major for operand B.
  using QueryOperand = decltype(cute::tile_to_shape(Swizzle{}, cute::Shape<cute::Int<kScoreColumns>, cute::_64>{}));
  using ProbabilityOperand = decltype(cute::tile_to_shape(Swizzle{}, cute::Shape<cute::Int<kRowTile>, cute::_64>{}));

  using QueryChunk = Element[kRowTile][kChunkColumns];        // swizzled
  using Probabilities = Probability[kRowTile][kTileTokens];  // swizzled
  static constexpr int kQueryBytes = kTileChunks * sizeof(QueryChunk);
  static constexpr int kProbabilityBytes = sizeof(Probabilities);

  using CacheMaps = ChunkMaps;
  // Of a part alone, whose tokens are the tile's from `first` on.
  CUTE_DEVICE static void copy_part(const PartMaps& maps, uint64_t* barrier, KeyStage& stage, int first, int page, int token,
                                    int chunk) {
    CUTE_UNROLL
    for (int c = 0; c < kChunksPerStage; ++c) {
      char* const target = reinterpret_cast<char*>(&stage[c][first]);
      if (chunk + c < kValueChunks) {
        maps.copy_latent(barrier, target, page, token, chunk + c);
      } else {
        maps.copy_rope(barrier, target, page, token);
      }
    }
  }
};

}  // namespace etap::transposed

// Numbers and layouts for a cache of e4m3. float16 products take K and V from registers, where they arrive through matrix
// loads that transpose V, and are float16 by then (every e4m3 value is one). e4m3 products take K as it lies in shared
// memory, V from registers, since WGMMA transposes 16-bit numbers only.
#pragma once

#include <cutlass/float8.h>

#include <climits>

#include "decode/layouts/transposed.h"

namespace etap::transposed_fp8 {

CUTE_DEVICE float power_of_two(int exponent) { return __uint_as_float(uint32_t(exponent + 127) << 23); }

// What scores are multiplied with for the log2 domain: each query row has its own scale, which its thread holds.
template <class T>
struct HeldScales {
  Shared<T>& shared;
  float values[T::kScoreColumns / 4];

  CUTE_DEVICE HeldScales(Shared<T>& shared, float scale_log2, int)
      : shared(shared), values{scale_log2} {}
  CUTE_DEVICE void load(int i) {
    values[i] = shared.score_scales[transposed::fragment_column(i / 2, i % 2)];
  }
  CUTE_DEVICE float operator()(int i) const { return values[i]; }
};

// With many rows no registers are left for the scales: each is read where it is wanted.
template <class T>
struct ReadScales {
  Shared<T>& shared;
  const int first;  // column of this warpgroup

  CUTE_DEVICE ReadScales(Shared<T>& shared, float, int first)
      : shared(shared), first(first) {}
  CUTE_DEVICE void load(int) {}
  CUTE_DEVICE float operator()(int i) const {
    return shared.score_scales[first + transposed::fragment_column(i / 2, i % 2)];
  }
};

template <class T>
struct Consumer;

// What the products' type and the row tile settle. Math: the type of the products, half_t or float_e4m3_t. Tiles: how the
// consumers divide the work, AlternateTiles or SharedTiles.
template <class Math, class Tiles>
struct Products : Tiles {
  using Tiles::kRowTile, Tiles::kScoreColumns;
  using Element = Math;
  using Probability = Math;
  static constexpr bool kFp8Cache = true;
  static constexpr bool kFp8Math = sizeof(Math) == 1;
  // Matrix loads bring pairs of value dims: rows r and r + 8 of O^T's 16 are dims 2r and 2r + 1.
  static constexpr bool kPairedDims = true;
  static constexpr PartialLayout kPartials = PartialLayout::kPairedColumns;
  // The producer warpgroup has no query rows to gather.
  static constexpr Registers registers(bool) { return {168, 24, 240}; }

  // A stage is a whole tile: four chunks of 128 latent columns (128 bytes, one swizzle line), then the rope columns.
  static constexpr int kWideColumns = 128;
  static constexpr int kWideChunks = kLatentDim / kWideColumns;
  struct KeyStage {
    uint8_t latent[kWideChunks][kTileTokens][kWideColumns];  // swizzled over 128 bytes
    uint8_t rope[kTileTokens][kRopeDim];                     // swizzled over 64 bytes
  };
  static constexpr int kWideBytes = kTileTokens * kWideColumns;
  static constexpr int kStageBytes = sizeof(KeyStage);
  static_assert(kStageBytes == kTileTokens * kHeadDim);
  // As WGMMA's descriptors have them: swizzled lines of two chunks, then rope's, from multiples of 1,024 on.
  static_assert(kWideColumns == 2 * kChunkColumns && kChunks == kValueChunks + 1 && kRopeDim == kChunkColumns);
  static_assert(offsetof(KeyStage, rope) == kWideChunks * kWideBytes && kWideBytes % 1024 == 0 && kStageBytes % 1024 == 0);
  static constexpr int kChunksPerStage = kWideChunks;
  static constexpr int kTileValueChunks = kWideChunks;
  // Two tiles at a time would come at half the speed, and work on the first begin later. Up to 16 rows that counts only where
  // there are no more: a split that goes on makes up for it.
  static constexpr int kSerializedTiles = kRowTile <= 16 ? 2 : 4;
  static constexpr int kLongestSerialized = kRowTile <= 16 ? 2 : INT_MAX;

  // P^T is kept this many powers of two above its value against the reference: small ones stay out of float16's and
  // e4m3's subnormal numbers. What lies above the reference still fits: 2^15 of float16's 2^16, and 448 of e4m3.
  static constexpr float kProbabilityShift = kFp8Math ? 8.0f : 7.0f;
  static constexpr float kLargestExponent = kFp8Math ? 8.8f : 15.0f;

  // Sums of e4m3 products, of 64 columns of K each, under way at once.
  static constexpr int kScoreSums = kRowTile <= 16 ? kChunks : 2;

  // WGMMAs take kStepColumns of the contraction; a matrix load brings 32 of them to a thread.
  static constexpr int kStepColumns = kFp8Math ? 32 : 16;
  static constexpr int kStepsPerLoad = 32 / kStepColumns;
  // Operands that may wait for the tensor cores while the next are converted.
  static constexpr int kOperands = kRowTile <= 16 ? 4 : 2;
  static constexpr int kFetches = kRowTile <= 16 ? 3 : 2;  // matrix loads on their way while one is converted

  using ScoreMma =
      std::conditional_t<kFp8Math, wgmma::OfShared<Math, kScoreColumns>, wgmma::OfRegisters<Math, kScoreColumns>>;
  using OutputMma = wgmma::OfRegisters<Math, kRowTile>;

  // K as it lies in shared memory, [tokens x 128 latent columns] and [tokens x 64 rope columns].
  using LatentOperand = wgmma::Layout<cute::GMMA::Layout_K_SW128_Atom<cutlass::float_e4m3_t>, kTileTokens, kWideColumns>;
  using RopeOperand = wgmma::Layout<cute::GMMA::Layout_K_SW64_Atom<cutlass::float_e4m3_t>, kTileTokens, kRopeDim>;
  // Q chunk [score columns x 64 columns] and P^T [rows x 64 tokens], both K-major for operand B.
  using Swizzle = std::conditional_t<kFp8Math, cute::GMMA::Layout_K_SW64_Atom<Math>, cute::GMMA::Layout_K_SW128_Atom<Math>>;
  using QueryOperand = wgmma::Layout<Swizzle, kScoreColumns>;
  using ProbabilityOperand = wgmma::Layout<Swizzle, kRowTile>;

  static constexpr int kOperandLine = kChunkColumns * sizeof(Math);  // bytes of a row of operand B
  using QueryChunk = Math[kRowTile][kChunkColumns];   // swizzled
  using Probabilities = Math[kRowTile][kTileTokens];  // swizzled
  static constexpr int kQueryChunkBytes = sizeof(QueryChunk);
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kProbabilityBytes = sizeof(Probabilities);
  static constexpr bool kProbabilitiesInTile = false;  // the consumer gives such a tile back

  struct CacheMaps {
    CUtensorMap latent;  // (128 columns, tokens of a page, 4 column chunks, pages)
    CUtensorMap rope;    // (64 columns, tokens, pages)

    // A tile, `token` the first of its page.
    CUTE_DEVICE void copy(uint64_t* barrier, KeyStage& stage, int page, int token, int) const {
      cute::SM90_TMA_LOAD_4D::copy(&latent, barrier, kReadOnce, &stage.latent, 0, token, 0, page);
      cute::SM90_TMA_LOAD_3D::copy(&rope, barrier, kReadOnce, &stage.rope, 0, token, page);
    }
  };
  // A part alone, whose tokens are the tile's from `first` on.
  CUTE_DEVICE static void copy_part(const PartMaps& maps, uint64_t* barrier, KeyStage& stage, int first, int page, int token,
                                    int) {
    CUTE_UNROLL
    for (int c = 0; c < kWideChunks; ++c) maps.copy_latent(barrier, &stage.latent[c][first], page, token, c);
    maps.copy_rope(barrier, &stage.rope[first], page, token);
  }
};

// Up to 32 query rows tiles alternate. Up to 16 rows e4m3 products leave combine room, at the price of registers.
template <class Math, int kRowTile_>
struct Traits : Products<Math, transposed::AlternateTiles<kRowTile_>> {
  using Base = Products<Math, transposed::AlternateTiles<kRowTile_>>;
  static constexpr bool kLeanCombination = Base::kFp8Math && kRowTile_ <= 16;
  static constexpr Registers registers(bool whole_tiles) {
    return kLeanCombination && whole_tiles ? kBesideCombination : Base::registers(whole_tiles);
  }
  static constexpr int kScoreSums = kLeanCombination && kRowTile_ == 16 ? 4 : Base::kScoreSums;
  using Base::kRowTile, Base::kFp8Math, Base::kStageBytes;
  using SharedStorage = transposed::SharedMemory<Traits>;
  using ScoreScales = std::conditional_t<kRowTile <= 16, HeldScales<Traits>, ReadScales<Traits>>;
  using Consumer = transposed_fp8::Consumer<Traits>;
  static constexpr bool kHalvesSingleTiles = true;
  static constexpr int kProbabilityBytes = kRowTile * kTileTokens * 2;  // with room for a single tile's scores to cross
  static constexpr int kStages = kFp8Math || kRowTile <= 16 ? 5 : 4;
  static constexpr int kMergeStages = Base::merge_stages(kStageBytes);
};

// 64 query rows ("shared tiles"): O^T of 512 x 64 needs both register files, so each warpgroup holds half of the value dims of
// every tile and half of the columns of S^T, and P^T is shared. (A 16-bit cache has query_major.h, e4m3 products mixed_major.h.)
struct SharedTiles : CommonTraits {
  static constexpr int kRowTile = 64;
  static constexpr bool kAlternatingTiles = false;  // a consumer sees every round of a stage
  static constexpr int kMergeStages = 0;
  static constexpr int kStageReleases = kConsumerWarps;
  static constexpr int kProbabilityBuffers = 2;
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

  // Each warp's column maxima of one tile: only the place of the sums is left for them.
  CUTE_DEVICE float& maximum(int group, int warp, int column) {
    return reinterpret_cast<float*>(columns.sums)[(group * kWarpsPerGroup + warp) * T::kScoreColumns + column];
  }
};

struct SharedTilesTraits : Products<cutlass::half_t, SharedTiles> {
  using SharedStorage = SharedTilesMemory<SharedTilesTraits>;
  using ScoreScales = ReadScales<SharedTilesTraits>;
  using Consumer = transposed_fp8::Consumer<SharedTilesTraits>;
  static constexpr int kStages = 3;
};

}  // namespace etap::transposed_fp8

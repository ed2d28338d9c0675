// Numbers and layouts of sparse attention over FP8 rows, values of e4m3 with a scale for each 128 (V3.2) or 64 (V4) of them, and 64
// values of bfloat16. Rows lie in shared memory as they do in the cache, an odd number of 16-byte units apart, so that matrix loads
// of eight rows touch all banks. Their values reach the products through registers as float16, exactly; the scales are applied to
// the scores of their columns and to P^T. A tile with a scale that float16 has no room for beside P takes the output's product in
// bfloat16, which has float32's range, at three times the instructions.
#pragma once

#include "decode/layouts/sparse.h"
#include "decode/layouts/tile_mask.cuh"
#include "decode/layouts/transposed.h"
#include "decode/layouts/transposed_fp8.h"

namespace etap::sparse_fp8 {

// What a row of DeepSeek-V3.2's cache holds, as it lies in shared memory.
struct V32Row {
  static constexpr int kScaledColumns = 128;  // that have a scale
  static constexpr int kScales = kLatentDim / kScaledColumns;
  static constexpr bool kRopeIsValue = false;  // it lies behind the value dims
  static constexpr int kScaleOffset = kLatentDim;
  static constexpr int kRopeOffset = kScaleOffset + kScales * 4;
  static constexpr int kBytes = kRopeOffset + kRopeDim * 2;
};

// And one of DeepSeek-V4's, whose scales lie apart in the cache and come to its end.
struct V4Row {
  static constexpr int kScaledColumns = 64;
  static constexpr int kScales = (kLatentDim - kRopeDim) / kScaledColumns;
  static constexpr bool kRopeIsValue = true;  // the last value dims
  static constexpr int kRopeOffset = kLatentDim - kRopeDim;
  static constexpr int kScaleOffset = kRopeOffset + kRopeDim * 2;
  static constexpr int kBytes = kScaleOffset + kUnitBytes;
};

// Scores are in the log2 domain already.
struct NoScale {
  template <class SharedStorage>
  CUTE_DEVICE NoScale(const SharedStorage&, float, int) {}
  CUTE_DEVICE void load(int) {}
  CUTE_DEVICE float operator()(int) const { return 1.0f; }
};

template <class T>
struct Consumer;
template <class T>
struct SharedTilesConsumer;

template <class T>
struct SharedMemory : transposed::SharedMemory<T> {
  sparse::TileMask valid[T::kStages];
};

// What does not depend on the number of query rows. Tiles: how the consumers divide the work, AlternateTiles or SharedTiles.
template <class Tiles, class Row_>
struct Products : Tiles {
  using Row = Row_;
  using Tiles::kRowTile, Tiles::kScoreColumns;
  static constexpr bool kSparse = true;
  static constexpr bool kDequantises = false;
  static constexpr bool kScalesApart = Row::kRopeIsValue;
  static constexpr int kRuns = 1;
  static constexpr int run_begin(int r) { return r; }
  using Walk = sparse::TokenWalk<>;
  using CacheMaps = sparse::NoMaps;
  using Element = cutlass::bfloat16_t;  // of queries, rope part and output
  using ScoreElement = cutlass::half_t;
  using RopeElement = cutlass::bfloat16_t;
  // P's type, and its type where a tile's scales are beyond these powers of two. P is at most 2^15, so that P times a scale
  // stays finite; that of a tile's largest score, 2^7 when its reference was set, is a normal number. Then P is at most 2^7: beyond
  // the widest scale V has that shift instead.
  using Probability = cutlass::half_t;
  using WideProbability = cutlass::bfloat16_t;
  static constexpr int kLeastScale = -13, kLargestScale = 0, kWidestScale = 120;
  static constexpr bool kFp8Cache = true;
  static constexpr bool kFp8Math = false;
  static constexpr bool kPairedDims = true;
  static constexpr PartialLayout kPartials = PartialLayout::kPairedColumns;
  using ScoreScales = NoScale;

  // A stage is a whole tile.
  static constexpr int kRowBytes = Row::kBytes;
  static_assert(kRowBytes / kUnitBytes % 2 == 1);
  static constexpr int kScaledDims = Row::kScales * Row::kScaledColumns;  // of e4m3
  using KeyStage = uint8_t[kTileTokens][kRowBytes];
  static constexpr int kStageBytes = sizeof(KeyStage);
  static constexpr int kChunksPerStage = 1;

  static constexpr float kProbabilityShift = 7.0f;
  static constexpr float kLargestExponent = kProbabilityShift + kLazyMaximum;

  // A matrix load brings 32 columns of K, or 32 tokens of 16 value dims, for two steps of WGMMA.
  static constexpr int kStepsPerLoad = 2;

  using ScoreMma = wgmma::OfRegisters<ScoreElement, kScoreColumns>;  // has the fragment of finished scores
  using RopeMma = wgmma::OfRegisters<RopeElement, kRowTile>;
  using OutputMma = wgmma::OfRegisters<Probability, kRowTile>;

  // Q chunk [score columns x 64 columns], the last one rope, and P^T [rows x 64 tokens], K-major for operand B.
  template <class E>
  using Operand = wgmma::Layout<cute::GMMA::Layout_K_SW128_Atom<E>, kRowTile>;
  static constexpr int kOperandLine = 128;  // bytes of a row of operand B
  using QueryChunk = ScoreElement[kRowTile][kChunkColumns];   // swizzled
  using Probabilities = Probability[kRowTile][kTileTokens];  // swizzled
  static constexpr int kQueryChunkBytes = sizeof(QueryChunk);
  static constexpr int kQueryBytes = (kScaledDims + kRopeDim) / kChunkColumns * kQueryChunkBytes;
  static constexpr int kScaledBytes = sizeof(Probabilities);
  static constexpr int kScaledProbabilities = Row::kScales + Row::kRopeIsValue;
};

// Up to 32 query rows: alternate tiles.
template <int kRowTile_, class Row>
struct Traits : Products<transposed::AlternateTiles<kRowTile_>, Row> {
  using Base = Products<transposed::AlternateTiles<kRowTile_>, Row>;
  using Base::kRowTile, Base::kStageBytes, Base::kScaledBytes, Base::kScaledProbabilities;
  using Base::kMergeSlices, Base::kSliceBytes;
  static_assert(kRowTile <= 32);
  using SharedStorage = SharedMemory<Traits>;
  using Consumer = sparse_fp8::Consumer<Traits>;
  static constexpr bool kFitsLaunchRegisters = kRowTile < 16;
  static constexpr Registers registers(bool) { return {168, 40, 232}; }
  // Whether scores are brought into the log2 domain when their parts have been added up, or each part as it is added.
  static constexpr bool kScoresScaledLast = false;

  static constexpr int kStages = kRowTile == 32 ? 3 : 4;

  static constexpr int kOperands = kRowTile <= 16 ? 4 : 2;
  // Loads on their way while one is in work; whether the first ones, and what else is known to be wanted, are asked for before
  // the last phase's end. At 32 rows registers are short.
  static constexpr int kFetches = kRowTile <= 16 ? 3 : 2;
  static constexpr bool kFetchesAhead = kRowTile <= 16;
  // Sums of scores under way: those of the operands that wait for the tensor cores, and one more.
  static constexpr int kParts = kRowTile > 16 ? 1 : Row::kScaledColumns == 64 ? 3 : 2;

  // P^T times the scales of each group of columns. Where they are large there is room for one of a consumer, not two.
  static constexpr int kProbabilityBuffers = kScaledProbabilities * kScaledBytes > 8192 ? 1 : 2;
  static constexpr int kProbabilityBytes = kScaledProbabilities * kScaledBytes * kProbabilityBuffers / 2;
  // P^T's room takes half of O^T too, unless V3.2's rows meet 32 query rows: then no stage is lent, and the next split's tiles come
  // while this one's halves are merged.
  static constexpr int kMergeStages =
      2 * kProbabilityBytes >= kMergeSlices * kSliceBytes ? 0 : Base::merge_stages(kStageBytes);
};

template <class T>
struct SharedTilesMemory : transposed_fp8::SharedTilesMemory<T> {
  sparse::TileMask valid[T::kStages];
  // What each warpgroup is given for its columns of S^T: by the same thread of the other one, which has the same places.
  float4 shares[kConsumerGroups][T::kScoreColumns / 8][kGroupThreads];
};

// 33 to 64 query rows: shared tiles. A warpgroup has half of the latent columns, as columns of K and as value dims, and half of
// the rope columns; so that no value is converted twice. Of S^T it has its columns' share for all rows, and finishes half of
// the rows with the other's share.
struct SharedTilesTraits : Products<transposed_fp8::SharedTiles, V32Row> {
  using SharedStorage = SharedTilesMemory<SharedTilesTraits>;
  using Consumer = SharedTilesConsumer<SharedTilesTraits>;
  static constexpr bool kFitsLaunchRegisters = false;
  static constexpr Registers registers(bool) { return {168, 40, 232}; }
  static constexpr bool kScoresScaledLast = true;
  static constexpr int kProbabilityBuffers = 1;

  static constexpr int kStages = 2;
  static constexpr int kOperands = 2;
  static constexpr int kFetches = 2;
  static constexpr bool kFetchesAhead = true;
  using ShareMma = wgmma::OfRegisters<ScoreElement, kRowTile>;

  // One P^T for both: when shares of scores have been given, both are done with the last one.
  static constexpr int kProbabilityBytes = kScaledProbabilities * kScaledBytes / 2;
};

}  // namespace etap::sparse_fp8

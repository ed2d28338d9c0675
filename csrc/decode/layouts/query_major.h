// Numbers and layouts of the kernel for 64 query rows with a cache of their type, which fill WGMMA's M:
// S = Q·K^T, O += P·V.
//
// A warpgroup owns every other tile, whose scores and softmax it does, and half of the value dims of all tiles. Its
// threads hold the same rows of S, P and O, so a row's maximum needs four lanes only, and P goes from a thread to the
// same thread of the other warpgroup as it is.
#pragma once

#include "decode/layouts/common.h"

namespace etap::query_major {

template <class T>
struct Consumer;

template <class T>
struct SharedMemory {
  alignas(1024) char ring[T::kStages * T::kStageBytes];  // KeyStage [kStages]
  alignas(1024) char query[T::kQueryBytes];              // QueryChunk [kTileChunks]
  uint4 probabilities[T::kWords / 4][kGroupThreads];  // the owner's of the last tile, for the same thread of the other
  float2 references[T::kQuads];                       // of that tile's P: rows r and r + 8
  float4 sums[2][kConsumerGroups][T::kQuads];         // at the end of every other split: of P and of rounded P
  Ring<T::kStages, false> keys;  // each instruction of the producer is waited for: a trap would slow long calls
  Ring<1> queries;
  LengthQueue lengths;
};

// How the consumers divide the work.
struct OwnedTiles : CommonTraits {
  static constexpr int kRowTile = 64;
  static constexpr bool kAlternatingTiles = false;  // a consumer sees every round of a stage
  static constexpr int kMergeStages = 0;
  static constexpr int kStageReleases = kWarpsPerGroup;
  static constexpr PartialLayout kPartials = PartialLayout::kRows;
};

template <class Element, int kTileChunks_ = kChunks>
struct Traits : SixteenBitCache<OwnedTiles, Element, kTileChunks_, 1> {
  using Base = SixteenBitCache<OwnedTiles, Element, kTileChunks_, 1>;
  using Base::kRowTile, Base::kTileChunks;
  using Consumer = query_major::Consumer<Traits>;
  static constexpr bool kFitsLaunchRegisters = false;
  static constexpr Registers registers(bool) { return {168, 40, 232}; }

  // The ring is two tiles, one of each warpgroup, and comes chunk by chunk.
  static constexpr int kRopeStages = kTileChunks - kValueChunks;  // the first of a tile, or none
  static constexpr int kStages = kConsumerGroups * kTileChunks;
  static constexpr int kHalfChunks = kValueChunks / kConsumerGroups;
  // The order in which a tile's chunks come: rope, which its owner's scores give back first, the value dims of one
  // warpgroup, the other's. The owner's come first, unless earlier splits of the CTA had an odd number of tiles: scores are
  // added up in this order, which follows from the tile's place i in its split, so that no bit depends on other requests.
  __host__ __device__ static constexpr int first_half(int i) { return uint32_t(i) % kConsumerGroups; }
  __host__ __device__ static constexpr int first_chunk(int stage, int i) {
    return stage < kRopeStages ? kValueChunks : uint32_t(first_half(i) * kHalfChunks + stage - kRopeStages) % kValueChunks;
  }

  static constexpr int kOutputDims = kLatentDim / kConsumerGroups;
  static constexpr int kFirstScores = kRopeStages + kHalfChunks;  // chunks of the first share of a tile's scores: rope and half of the value dims
  static constexpr int kProductDims = 128;  // of one WGMMA
  static constexpr int kProducts = kOutputDims / kProductDims;
  using ScoreMma = wgmma::OfShared<Element, kTileTokens>;
  using OutputMma = wgmma::OfRegisters<Element, kProductDims, wgmma::kMajorMN>;
  // Q chunk [64 rows x 64 columns] and K chunk [64 tokens x 64 columns].
  using Chunk = wgmma::Layout<cute::GMMA::Layout_K_SW128_Atom<Element>, 64>;
  // Value chunks side by side, as [value dims x 64 tokens].
  using ValueChunks = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                   cute::Shape<cute::Int<kProductDims>, cute::_64>{},
                                                   cute::Step<cute::_2, cute::_1>{}));
  using Scores = wgmma::Result<ScoreMma, kRowTile, kTileTokens>;
  using Output = wgmma::Result<OutputMma, kRowTile, kOutputDims>;

  static constexpr int kWords = kTileTokens / 4;  // of a thread's P: pairs of neighbouring tokens
  static constexpr int kQuads = kGroupThreads / 4;

  using SharedStorage = SharedMemory<Traits>;
};

}  // namespace etap::query_major

// Every number and layout of the transposed decode kernels, with the facts derived from them asserted.
//
// Two consumer warpgroups divide the work in one of two ways:
//  - up to 32 query rows each holds a whole O^T (512 x rows) and they take the tiles in turn ("alternate tiles");
//  - at 64 rows of an FP8 cache O^T of 512 x 64 needs both register files, so each holds half of the value dim of every
//    tile and half of the columns of S^T, and P^T is shared ("shared tiles"). 64 rows of a 16-bit cache are not transposed:
//    rows.cuh.
#pragma once

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include <cuda.h>

#include <cfloat>

#include "common/pipeline.cuh"
#include "common/warp.cuh"
#include "params.h"

namespace etap {

constexpr int kWarpsPerGroup = 4;
constexpr int kGroupThreads = kWarpSize * kWarpsPerGroup;
constexpr int kConsumerGroups = 2;
constexpr int kConsumerThreads = kConsumerGroups * kGroupThreads;
constexpr int kDecodeThreads = kConsumerThreads + kGroupThreads;
constexpr int kQueryLoaderThreads = kGroupThreads - kWarpSize;  // the producer warpgroup less its TMA warp

constexpr int kChunkColumns = 64;  // 128 bytes, one swizzle row
constexpr int kChunks = kHeadDim / kChunkColumns;
constexpr int kValueChunks = kLatentDim / kChunkColumns;
constexpr int kChunkBytes = kTileTokens * kChunkColumns * 2;
constexpr int kMaxSharedBytes = 232448;

// What a CTA asks of memory at a time. The ring has more room, but further requests would only queue ahead of other CTAs'.
constexpr int kBytesInFlight = 72 * 1024;

// Named barriers; 0 is __syncthreads'.
constexpr int kConsumersBarrier = 1;
constexpr int kGroupBarrier = 2;     // + warpgroup
constexpr int kHandOverBarrier = 4;  // + warpgroup and warp

// P^T is taken against a reference maximum that may lag: exponents up to this much above it are let through, since
// 2^8 costs neither float32 sums nor bf16/fp16 P^T any precision, and a new maximum then costs nothing in most tiles.
constexpr float kLazyMaximum = 8.0f;
// "No token seen yet": finite, so that -inf (a masked score) minus it stays -inf and not NaN; and below every finite score.
constexpr float kNoMaximum = -FLT_MAX;

// Grants to one consumer that may be open at once: see Turns. Tiles and merges take their stages in turn, and the most are
// open when every piece has one tile; a grant counts from its first stage on.
constexpr int kTurns = 4;
constexpr bool grants_fit(int stages, int stages_of_tile, int stages_of_half_merge) {
  return stages < kTurns / 2 * (stages_of_tile + kConsumerGroups * stages_of_half_merge) + 1;
}

// What follows from the number of query rows alone.
template <int kRowTile_>
struct RowTile {
  static constexpr int kRowTile = kRowTile_;
  static constexpr bool kSharedTiles = kRowTile > 32;
  static constexpr int kScoreColumns = kSharedTiles ? kRowTile / kConsumerGroups : kRowTile;
  static constexpr int kOutputSlices = kSharedTiles ? kValueChunks / kConsumerGroups : kValueChunks;
  // Alternate tiles are merged through ring stages borrowed at the end of a request piece: each warpgroup hands half of
  // its O^T over in float32.
  static constexpr int kMergeSlices = kSharedTiles ? 0 : kValueChunks / kConsumerGroups;
  static constexpr int kSliceBytes = 64 * kRowTile * 4;
  // Warps that release a K stage: one warpgroup's where tiles alternate, both where they are shared.
  static constexpr int kStageReleases = kSharedTiles ? kConsumerThreads / kWarpSize : kWarpsPerGroup;
  // Threads that meet over one P^T, and where.
  static constexpr int kScoreThreads = kSharedTiles ? kConsumerThreads : kGroupThreads;
  static constexpr int score_barrier(int group) { return kSharedTiles ? kConsumersBarrier : kGroupBarrier + group; }
  // Two buffers each: a warp may write the next P^T while a slower warp's product still reads this one.
  static constexpr int kProbabilityBuffers = kSharedTiles ? 2 : 2 * kConsumerGroups;

  // What the warpgroups tell each other of their columns at the end of a piece. Two where tiles alternate: one of them may
  // have finished the next piece while the other still reads.
  struct Columns {
    float4 sums[kConsumerGroups][kScoreColumns];  // of each warp
    float4 rounded_sums[kConsumerGroups][kScoreColumns];
    float references[kConsumerGroups][kScoreColumns];  // log2 domain
  };
  static constexpr int kColumnBuffers = kSharedTiles ? 1 : 2;
};

template <class T>
struct SharedMemory {
  alignas(1024) char ring[T::kStages * T::kStageBytes];
  alignas(1024) char query[T::kQueryBytes];
  alignas(1024) char probabilities[T::kProbabilityBuffers * T::kProbabilityBytes];
  typename T::Columns columns[T::kColumnBuffers];
  float maxima_alone[T::kSharedTiles ? 1 : kConsumerGroups * kWarpsPerGroup * T::kScoreColumns];
  float factors[T::kSharedTiles ? kConsumerGroups : 1][T::kScoreColumns];  // what O^T is scaled by for a new reference
  float score_scales[T::kFp8Cache ? T::kRowTile : 1];  // of each query row
  Ring<T::kStages> keys;
  Ring<1> queries;
  // Where tiles alternate: what the producer has begun for each consumer, its tiles and the stages for merging.
  Turns<kTurns> granted[kConsumerGroups];

  // Each warp's column maxima of one tile. Where tiles are shared only the place of the sums is left for them.
  __device__ __forceinline__ float& maximum(int group, int warp, int column) {
    float* maxima = T::kSharedTiles ? reinterpret_cast<float*>(columns[0].sums) : maxima_alone;
    return maxima[(group * kWarpsPerGroup + warp) * T::kScoreColumns + column];
  }
};

// A cache of the queries' own type, multiplied as it lies in shared memory: up to 32 rows.
template <class Element_, int kRowTile_>
struct Traits : RowTile<kRowTile_> {
  static_assert(!RowTile<kRowTile_>::kSharedTiles);
  using Base = RowTile<kRowTile_>;
  using Base::kRowTile, Base::kSharedTiles, Base::kScoreColumns, Base::kSliceBytes, Base::kMergeSlices;
  using SharedStorage = SharedMemory<Traits>;
  using Element = Element_;
  using Probability = Element;
  static_assert(sizeof(Element) == 2);
  // setmaxnreg: what the role needs, within the register file.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr bool kFp8Cache = false;
  // Three chunks a stage (24 KB a copy) load faster than one.
  static constexpr int kChunksPerStage = 3;
  static constexpr int kTileValueChunks = kValueChunks;  // 128 bytes of each row of a tile
  static constexpr int kStagesPerTile = kChunks / kChunksPerStage;
  static constexpr int kStageBytes = kChunksPerStage * kChunkBytes;
  static constexpr bool kRowsOnM = false;
  __device__ __forceinline__ static int first_chunk(int stage, int) { return stage * kChunksPerStage; }
  static constexpr int kStages = kRowTile == 32 ? 7 : 8;
  static_assert(kChunks % kChunksPerStage == 0 && kStages >= kStagesPerTile);
  static constexpr int kSlicesPerMergeStage = kStageBytes / kSliceBytes;
  static constexpr int kMergeStages = (kMergeSlices + kSlicesPerMergeStage - 1) / kSlicesPerMergeStage;
  static_assert(kConsumerGroups * kMergeStages <= kStages);
  static_assert(grants_fit(kStages, kStagesPerTile, kMergeStages));

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

  using SwizzledRows = cute::GMMA::Layout_K_SW128_Atom<Element>;
  // K chunk [tokens x 64 columns], and the same bytes as V^T [64 value dims x tokens].
  using KeyChunk = decltype(cute::tile_to_shape(SwizzledRows{}, cute::Shape<cute::_64, cute::_64>{}));
  using ValueChunk = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                  cute::Shape<cute::_64, cute::_64>{}));
  // Q chunk [score columns x 64 columns] and P^T [rows x 64 tokens], both K-major for operand B.
  using QueryChunk =
      decltype(cute::tile_to_shape(SwizzledRows{}, cute::Shape<cute::Int<kScoreColumns>, cute::_64>{}));
  using Probabilities = decltype(cute::tile_to_shape(SwizzledRows{}, cute::Shape<cute::Int<kRowTile>, cute::_64>{}));

  static constexpr int kQueryChunkBytes = kRowTile * kChunkColumns * 2;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kProbabilityBytes = kRowTile * kTileTokens * 2;

  // The cache as (64 columns, tokens of a page, 9 column chunks, pages).
  struct CacheMaps {
    CUtensorMap rows;
  };
};

}  // namespace etap

// The numbers that all decode kernels share, and the list of what each kernel's traits provide.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cuda.h>

#include <cfloat>

#include "common/swizzle.cuh"
#include "decode/cta/splits.cuh"
#include "decode/cta/roles.h"
#include "common/wgmma.cuh"
#include "params.h"

namespace etap {

constexpr int kChunkColumns = 64;  // of 16 bits: 128 bytes, the swizzle's widest line
constexpr int kChunks = kHeadDim / kChunkColumns;
constexpr int kValueChunks = kLatentDim / kChunkColumns;
constexpr int kMaxSharedBytes = 232448;

// What a CTA asks of memory at a time. The ring has more room, but further requests would only queue ahead of other CTAs'.
constexpr int kBytesInFlight = 72 * 1024;
template <class T>
constexpr int kStagesInFlight = (kBytesInFlight + T::kStageBytes / 2) / T::kStageBytes;

// P is taken against a reference maximum that may lag: exponents up to this much above it are let through, since
// 2^8 costs neither float32 sums nor bf16/fp16 P any precision, and a new maximum then costs nothing in most tiles.
constexpr float kLazyMaximum = 8.0f;
// "No token seen yet": finite, so that -inf (a masked score) minus it stays -inf and not NaN; and below every finite score.
constexpr float kNoMaximum = -FLT_MAX;

// Signals to one consumer that may be open at once: see Turns. The most are when every split has one tile. Then tiles and merges
// take stages of the ring in turn, or, where a single tile leaves nothing to merge, tiles alone; a signal counts from its first
// stage on.
template <class T>
constexpr int turns() {
  constexpr int merge = kConsumerGroups * T::kMergeStages;
  static_assert(merge <= T::kStages);
  constexpr bool tiles_alone = merge == 0 || (T::kHalvesSingleTiles && T::kStagesPerTile < merge);
  constexpr int of_two = T::kStagesPerTile + (tiles_alone ? T::kStagesPerTile : merge);
  static_assert(T::kStages <= 4 * of_two);
  return T::kStages <= 2 * of_two ? 4 : 8;
}

// An item of an array in shared memory, whose place is worked out in 32 bits as all of that memory can be.
template <class Item>
CUTE_DEVICE Item& item(char* array, int i) {
  return *reinterpret_cast<Item*>(array + i * int(sizeof(Item)));
}

// A cache row is read once for each row group: it should push nothing else out of L2.
constexpr auto kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);

// A cache of the queries' type as TMA sees it.
struct ChunkMaps {
  CUtensorMap chunks;  // (64 columns, tokens of a page, 9 column chunks, pages)

  // A stage's chunks, `chunk` the first, of 64 tokens, `token` the first of its page.
  CUTE_DEVICE void copy(uint64_t* barrier, void* stage, int page, int token, int chunk) const {
    cute::SM90_TMA_LOAD_4D::copy(&chunks, barrier, kReadOnce, stage, 0, token, chunk, page);
  }
};

// The cache as TMA sees it where tiles are copied in parts, a chunk at a time.
struct PartMaps {
  CUtensorMap latent;  // (columns of a chunk, tokens of a page, chunks, pages)
  CUtensorMap rope;    // (64 columns, tokens, pages)

  // All copy a part's tokens, `token` the first of its page. Chunks of 16 bits behind the value dims are rope.
  CUTE_DEVICE void copy(uint64_t* barrier, void* target, int page, int token, int chunk) const {
    if (chunk < kValueChunks) {
      copy_latent(barrier, target, page, token, chunk);
    } else {
      copy_rope(barrier, target, page, token);
    }
  }
  CUTE_DEVICE void copy_latent(uint64_t* barrier, void* target, int page, int token, int chunk) const {
    cute::SM90_TMA_LOAD_4D::copy(&latent, barrier, kReadOnce, target, 0, token, chunk, page);
  }
  CUTE_DEVICE void copy_rope(uint64_t* barrier, void* target, int page, int token) const {
    cute::SM90_TMA_LOAD_3D::copy(&rope, barrier, kReadOnce, target, 0, token, page);
  }
};

// What traits say where a kernel does not say otherwise.
struct CommonTraits {
  using Walk = SplitWalk;
  static constexpr bool kSparse = false;
  static constexpr int kGatherWarps = kWarpsPerGroup;
  static constexpr bool kHalvesSingleTiles = false;
  static constexpr int kSerializedTiles = 0;
  static constexpr int kStagesPerTile = 1;
  __host__ __device__ static constexpr int first_chunk(int, int) { return 0; }
  static constexpr bool kFitsLaunchRegisters = true;
  static constexpr bool kLeanCombination = false;
  static constexpr PartialLayout kPartials = PartialLayout::kColumns;
};

// What follows from a cache of the queries' own type, multiplied as it lies in shared memory. Tiles: how the consumers divide the
// work. kTileChunks: of a tile, those of value dims and, where rows have one, rope.
template <class Tiles, class Element_, int kTileChunks_, int kChunksPerStage_>
struct SixteenBitCache : Tiles {
  using Element = Element_;
  static_assert(sizeof(Element) == 2);
  static constexpr bool kFp8Cache = false;
  static constexpr int kGatherWarps = 3;  // beside the one that brings the queries
  static constexpr int kTileChunks = kTileChunks_;
  static constexpr int kChunksPerStage = kChunksPerStage_;
  static_assert(kTileChunks % kChunksPerStage == 0);
  using KeyStage = Element[kChunksPerStage][kTileTokens][kChunkColumns];  // swizzled
  static constexpr int kStageBytes = sizeof(KeyStage);
  static constexpr int kStagesPerTile = kTileChunks / kChunksPerStage;
  using QueryChunk = Element[Tiles::kRowTile][kChunkColumns];  // swizzled
  static constexpr int kQueryBytes = kTileChunks * sizeof(QueryChunk);

  using CacheMaps = ChunkMaps;
  // Copies a part alone, whose tokens are the tile's from `first` on.
  CUTE_DEVICE static void copy_part(const PartMaps& maps, uint64_t* barrier, KeyStage& stage, int first, int page, int token,
                                    int chunk) {
    CUTE_UNROLL
    for (int c = 0; c < kChunksPerStage; ++c) maps.copy(barrier, &stage[c][first], page, token, chunk + c);
  }
};

// What traits provide for what all kernels share: the kernel itself, its launch, the producers, where results go. What else
// they have is between a kernel's own files.
template <class T>
constexpr bool are_traits() {
  constexpr auto is_flag = [](auto flag) { return std::is_same_v<decltype(flag), bool>; };
  // The type of both products' operands.
  static_assert(sizeof(typename T::Element) <= 2);
  // The cache as TMA sees it, copy() fills a stage, and copy_part() from PartMaps; or lists of its rows.
  static_assert(sizeof(typename T::CacheMaps) > 0);
  static_assert(T::kGatherWarps <= kWarpsPerGroup);                   // that copy rows where TMA does not
  static_assert(is_flag(T::kLeanCombination));                        // of whole tiles: see combine.h
  static_assert(T::kPartials <= PartialLayout::kRows);                // how partial results lie: see params.h
  // The splits of a partition.
  static_assert(sizeof(typename T::Walk) > 0);
  // ring (KeyStage [kStages]), query (QueryChunk [kChunks]), Ring<kStages> keys, Ring<1> queries; where tiles alternate
  // init_tile_ready(warp, signals).
  static_assert(sizeof(typename T::SharedStorage) <= kMaxSharedBytes);
  // Consumer::run(shared, params, partition, row group, warpgroup) decodes the partition.
  static_assert(sizeof(typename T::Consumer) > 0);
  static_assert(T::kRowTile % 8 == 0 && T::kRowTile <= kMaxRowTile);  // query rows of a CTA
  static_assert(T::registers(true).launch > 0);                       // of a thread, where tiles are copied whole
  static_assert(is_flag(T::kFitsLaunchRegisters));                    // consumers need no more than the launch gives
  static_assert(is_flag(T::kSparse));                               // lists name the rows
  static_assert(is_flag(T::kFp8Cache));                               // e4m3: consumers load the queries
  static_assert(T::kStages >= T::kStagesPerTile);                     // the key ring; how many of it a tile takes
  static_assert(sizeof(typename T::KeyStage) == T::kStageBytes);      // what TMA brings to one
  static_assert(T::first_chunk(0, 0) < kChunks);                      // of (stage of a tile, its place in the split)
  static_assert(T::kStageReleases % kWarpsPerGroup == 0);             // warps that give a stage back
  static_assert(T::kSerializedTiles >= 0);                            // a CTA's first, loaded one by one: serialize_first_loads()
  static_assert(T::kMergeStages >= 0);                                // lent to each consumer at the end of a split
  static_assert(is_flag(T::kHalvesSingleTiles));                      // a split's only tile is both consumers'
  static_assert(is_flag(T::kAlternatingTiles));                            // tiles alternate, and consumers wait for tile_ready
  return true;
}

}  // namespace etap

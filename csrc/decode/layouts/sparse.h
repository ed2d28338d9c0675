// Sparse attention: the dense kernels for bfloat16, with another way for the cache into shared memory.
#pragma once

#include "decode/layouts/query_major.h"
#include "decode/layouts/tile_mask.cuh"
#include "decode/cta/token_walk.cuh"
#include "decode/layouts/transposed.h"

namespace etap::sparse {

struct NoMaps {};

// The traits of a dense kernel, and its consumer and shared memory for those made of them.
template <class Dense, template <class> class DenseConsumer, template <class> class DenseMemory>
struct GatheredTraits : Dense {
  using Dense::kRowTile, Dense::kTileChunks;
  static constexpr bool kSparse = true;
  static constexpr bool kHalvesSingleTiles = false;
  static constexpr bool kScalesApart = false;
  // V4's rows come without rope behind the latent part.
  static constexpr bool kRope = kTileChunks > kValueChunks;
  static constexpr bool kDequantises = !kRope && kRowTile == kMaxRowTile;  // with fewer rows: sparse_fp8.h
  // The consumers gather the queries.
  static constexpr int kGatherWarps = 4;
  static constexpr bool kFitsLaunchRegisters = !kDequantises && Dense::kFitsLaunchRegisters;
  static constexpr Registers registers(bool) { return kDequantises ? Registers{168, 88, 208} : Registers{168, 40, 232}; }
  // Stages of a tile that rows of bfloat16 fill together, chunks that follow each other in a row: the r-th run's begin.
  static constexpr int kRuns = kRope ? 3 : 2;
  static constexpr int run_begin(int r) {
    if constexpr (kRowTile == 64) return kRope ? (r == 0 ? 0 : 1 + (r - 1) * Dense::kHalfChunks) : r * Dense::kHalfChunks;
    return r;
  }
  using CacheMaps = NoMaps;
  using Walk = TokenWalk<>;
  using Consumer = DenseConsumer<GatheredTraits>;
  struct SharedStorage : DenseMemory<GatheredTraits> {
    TileMask valid[Dense::kStages];  // of each tile, at its first stage
  };
};

template <int kRowTile, int kTileChunks>
using Traits = GatheredTraits<transposed::Traits<cutlass::bfloat16_t, kRowTile, kTileChunks>, transposed::Consumer,
                              transposed::SharedMemory>;
template <int kTileChunks>
using WideTraits =
    GatheredTraits<query_major::Traits<cutlass::bfloat16_t, kTileChunks>, query_major::Consumer, query_major::SharedMemory>;

}  // namespace etap::sparse

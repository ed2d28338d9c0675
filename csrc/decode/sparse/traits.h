// Sparse attention over rows of bfloat16: the dense kernels, with another way for the cache into shared memory.
#pragma once

#include "decode/query_major/traits.h"
#include "decode/sparse/cache.h"
#include "decode/sparse/validity.cuh"
#include "decode/transposed/traits.h"

namespace etap::sparse {

// The traits of a dense kernel, and its consumer and shared memory for those made of them.
template <class Dense, template <class> class DenseConsumer, template <class> class DenseMemory, bool kClustered_>
struct GatheredTraits : Dense {
  static constexpr bool kGathered = true;
  static constexpr Registers registers(bool) { return {168, 40, 232}; }
  static constexpr bool kHalvesSingleTiles = false;
  static constexpr bool kClustered = kClustered_;
  static constexpr int kGatherWarps = 4;  // the consumers gather the queries
  // Stages of a tile that are filled together, chunks that follow each other in a row: the r-th run's begin.
  static constexpr int kRuns = 3;
  static constexpr int kRopeRun = Dense::kRowTile == 64 ? 0 : kRuns - 1;
  static constexpr int run_begin(int r) {
    if constexpr (Dense::kRowTile == 64) return r == 0 ? 0 : 1 + (r - 1) * Dense::kHalfChunks;
    return r;
  }
  using Walk = std::conditional_t<kClustered, ClusterWalk, EvenWalk>;
  using CacheMaps = GatheredCache;
  using Consumer = DenseConsumer<GatheredTraits>;
  struct SharedStorage : DenseMemory<GatheredTraits> {
    TileMask valid[Dense::kStages];  // of each tile, at its first stage
  };
};

template <int kRowTile, bool kClustered>
using Traits = GatheredTraits<transposed::Traits<cutlass::bfloat16_t, kRowTile>, transposed::Consumer, transposed::SharedMemory,
                              kClustered>;
using WideTraits =
    GatheredTraits<query_major::Traits<cutlass::bfloat16_t>, query_major::Consumer, query_major::SharedMemory, false>;

}  // namespace etap::sparse

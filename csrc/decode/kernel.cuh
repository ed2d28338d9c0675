// MLA decode. This file is the frame of all decode kernels: it says who does what, and in which order a CTA starts. Each folder
// builds on the ones above it:
//
//   cta/        roles, barriers, and the splits that a CTA walks
//   layouts/    the traits of each family: numbers, layouts, shared memory
//   mma/        the two products, with operands in shared memory or by way of registers
//   softmax/    P, down the columns of S^T or along the rows of S
//   epilogue/   what becomes of O at the end of a split
//   load/       producers: the cache (fill_ring.cuh) and the queries (queries.cuh, scaled_queries.cuh)
//   consumers/  what a consumer does with a tile, a file each family (split_loop.cuh is the frame of all but two):
//
//     alternating   S^T = K·Q^T, O^T = V^T·P^T: multiplies a cache of the queries' type, or lists of bfloat16, up to 32 rows
//     fp8_cache     does that with a cache of e4m3, V^T by way of registers; at 64 rows of float16 products the consumers share tiles
//     fp8_rows      multiplies lists of FP8 rows, whose scales and values the consumers convert, up to 32 rows: V3.2's and V4's
//     shared_tiles  does that for 64 rows of V3.2's
//     owned_tiles   S = Q·K^T, O = P·V: multiplies 64 rows of a cache of the queries' type, or of lists, which fill WGMMA's M
//     mixed_major   S = Q·K^T, O^T = V^T·P^T: multiplies 64 rows of a cache of e4m3 as such
//
// Grid             CTAs: partitions x row groups, those of a partition neighbours. One CTA decodes the splits of its
//                  partition's work range for its row group (a row tile of the rows), one after the other. One CTA an SM.
//                  Where the splits of a token of sparse attention are a cluster, a row group's are neighbours.
//
// Glossary         tile: 64 tokens   split: a run of tiles of one request   row: (query token, head), packed
//                  st: S^T [64 tokens x query rows]   pt: P^T [rows x tokens]   ot: O^T [value dims x rows]
//                  s, p, o: the same not transposed   chunk: 64 columns (e4m3: 128) of a tile   stage: of the key ring
//                  stack: requests that are decoded as one as far as their pages are the same
//
// Role             warps  registers (*)   does
// consumer 0, 1    4 + 4  232 (FP8 240)   scores, softmax, output of tiles; merge; write
// key producer     1      40 (FP8 24)     K tiles, TMA, stage by stage into the key ring
// query producer   1      40 (FP8 24)     the query rows of each split, TMA (lists: rows; FP8: signals the end of the kernel before)
// query helper     2      40 (FP8 24)     with it, by cp.async, where TMA cannot
// (*) up to 16 rows 152 and 32 where a block of the combination finds room beside the CTA: kBesideCombination
//
// Pipeline         stages                 producer -> consumer                    released by
// keys             8 x 24 KB (+)          TMA bytes -> the tile's consumer(s)     4 warps, or 8 that share tiles
// queries          1                      TMA bytes or 96 threads -> both         8 warps, after the split's last scores
// lengths          4                      key producer -> both                    8 warps, at once
// tile_ready       4 or 8 a consumer      key producer -> the tile's consumer     (nothing to release)
// (+) 7 at 32 rows; query major: 18 x 8 KB; of an FP8 cache 3 to 5 whole tiles of 36 KB. There, and beside lists, consumers
// read the query rows. Consumers wait for K in consumers/ by keys.wait(), where tiles alternate by tile_ready before; a tile of
// the other consumer by the P that it hands over. hold_back() in load/ limits what is in flight.
//
// Up to 32 rows, time going down:
//   consumer 0: st(0) softmax(0) ot(0)         st(2) ...          The tensor cores alternate between the two; each
//   consumer 1:            st(1) softmax(1) ot(1)    st(3) ...    one's softmax hides behind the other's products.
// A split of one tile is both consumers', half of the columns each.
//
// Early loads: the kernel before may still run while the schedule and the cache's older rows are read. The key producer waits for
// it before a tile with new tokens, the query producer and the consumers when they know their first split.
//
// Where pages hold no whole tiles (kWholeTiles is false), the key producer and the query helpers (beside an FP8 cache all four
// warps) share the copies, in parts by TMA or row by row: load/tiles.cuh, paged_rows.cuh.
#pragma once

#include "decode/consumers/alternating.cuh"
#include "decode/consumers/fp8_cache.cuh"
#include "decode/consumers/fp8_rows.cuh"
#include "decode/consumers/mixed_major.cuh"
#include "decode/consumers/owned_tiles.cuh"
#include "decode/consumers/shared_tiles.cuh"
#include "decode/layouts/sparse.h"
#include "decode/load/dequantise.cuh"
#include "decode/load/listed_rows.cuh"
#include "decode/load/paged_rows.cuh"
#include "decode/load/queries.cuh"
#include "decode/load/tiles.cuh"

namespace etap {

// This is what a kernel is given of the cache.
template <class T, bool kWholeTiles>
using Cache = std::conditional_t<kWholeTiles, typename T::CacheMaps, PartMaps>;

// The number of warps that gather queries which TMA cannot bring: where tiles are not whole, the others are there for the cache.
template <bool kWholeTiles>
constexpr int kQueryWarps = kWholeTiles ? kQueryProducerThreads / kWarpSize : 1;

// Brings the rows of lists.
template <class T>
CUTE_DEVICE void load_listed_rows(Shared<T>& shared, const DecodeParams& params, int partition, int warp) {
  using namespace sparse;
  if constexpr (T::kDequantises) {
    if (params.sparse.format == RowFormat::kPageScaledFp8) return dequantise_rows<T>(shared, params, partition, warp);
  }
  if constexpr (!T::kScalesApart) {  // of which the stream of one list knows nothing
    if (params.sparse.lists[1].width == 0) return fill_ring<T>(shared, ListedRows<T, 1>(shared, params, partition, warp));
  }
  fill_ring<T>(shared, ListedRows<T, 2>(shared, params, partition, warp));
}

// Does the work of a warp of the third warpgroup. Beside an FP8 cache and beside lists the consumers read the queries.
template <class T, bool kWholeTiles>
CUTE_DEVICE void produce(Shared<T>& shared, const DecodeParams& params, const Cache<T, kWholeTiles>& cache,
                         const QueryMaps& query_maps, int partition, int row_group) {
  const WarpRole role = producer_role();
  if constexpr (T::kSparse) {
    load_listed_rows<T>(shared, params, partition, cutlass::canonical_warp_idx_sync() - kConsumerWarps);
  } else if constexpr (kWholeTiles) {
    if (role == WarpRole::kKeyProducer) {
      fill_ring<T>(shared, WholeTiles<T>(shared, params, cache, partition));
    } else if constexpr (!T::kFp8Cache) {
      load_queries<T, kQueryWarps<true>>(shared, params, query_maps, partition, row_group, role);
    } else if (kLoadsSparingly<T> && params.early_loads && role == WarpRole::kQueryProducer) {
      cudaGridDependencySynchronize();
      if (threadIdx.x % kWarpSize == 0) shared.queries.commit({});  // for the key producer
    }
  } else if (T::kFp8Cache || role != WarpRole::kQueryProducer) {
    const int producer = cutlass::canonical_warp_idx_sync() % kWarpsPerGroup;
    const int warp = T::kFp8Cache || producer == 0 ? producer : producer - 1;
    if (params.key_load == KeyLoad::kRows) {
      fill_ring<T>(shared, CacheRows<T>(shared, params, partition, warp));
    } else {
      fill_ring<T>(shared, TileParts<T>(shared, params, cache, partition, warp));
    }
  } else if constexpr (!T::kFp8Cache) {
    load_queries<T, kQueryWarps<false>>(shared, params, query_maps, partition, row_group, role);
  }
}

// Sets up those barriers that are this warp's. Short rings go to the last warps, whose share of the key stages is the smallest.
// gathered: TMA does not bring the cache.
template <class T, bool kWholeTiles>
CUTE_DEVICE void init_barriers(Shared<T>& shared, bool gathered, bool query_maps_usable, int warp) {
  static_assert(kSetupWarps == kDecodeThreads / kWarpSize);
  const int from_last = kSetupWarps - 1 - warp;
  // kKeyArrivals fill a stage of keys, and as many signals say that a tile is ready; query_arrivals fill the queries.
  constexpr int kKeyArrivals = T::kSparse || !kWholeTiles ? T::kGatherWarps : 1;
  const int query_arrivals = query_maps_usable || T::kFp8Cache ? 1 : kQueryWarps<kWholeTiles> * kWarpSize;
  shared.keys.init(warp, kKeyArrivals * (gathered ? kReleasingLanes : 1), T::kStageReleases);
  shared.queries.init(from_last, query_arrivals, kConsumerWarps);
  if constexpr (!T::kSparse) shared.lengths.init(from_last);
  if constexpr (T::kAlternatingTiles) shared.init_tile_ready(warp, kKeyArrivals);
  cutlass::arch::fence_barrier_init();
}

// Whether a call of stacks has none in this step; most calls have none, and then the next kernel shall not wait for this one. So all
// CTAs but one end at once, which leaves their room to the next kernel's. That one waits for the predecessor, the call of own tiles: the
// next kernel waits until this one has ended, and may then take the predecessor for ended, too, as behind a call that waits in every CTA.
CUTE_DEVICE bool is_without_stacks(const DecodeParams& params) {
  if (!params.early_loads) ETAP_MARKED(stacks_wait, cudaGridDependencySynchronize());
  if (*params.stack_count > 0) return false;
  if (blockIdx.x == 0) {
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
  }
  return true;
}

// kWholeTiles says that one copy brings a tile of the cache; else it comes in parts or rows, as params says. A kernel for both
// would cost the former: ptxas orders the consumers' instructions otherwise for it.
template <class T, bool kWholeTiles = true>
__global__ void __maxnreg__((registers<T, kWholeTiles>().launch))
    decode_kernel(const __grid_constant__ DecodeParams params, const __grid_constant__ Cache<T, kWholeTiles> cache,
                  const __grid_constant__ QueryMaps query_maps) {
  static_assert(are_traits<T>());
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename T::SharedStorage*>(shared_bytes);
  const bool gathered = T::kSparse || (!kWholeTiles && params.key_load == KeyLoad::kRows);  // no TMA for the cache
  if (threadIdx.x < kWarpSize) {
    if (!T::kSparse && !gathered && threadIdx.x < sizeof(cache) / sizeof(CUtensorMap)) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const CUtensorMap*>(&cache) + threadIdx.x);
    }
    if (threadIdx.x == 0 && query_maps.usable) {
      cute::prefetch_tma_descriptor(&query_maps.latent);
      cute::prefetch_tma_descriptor(&query_maps.rope);
    }
  }
  const int warp = cutlass::canonical_warp_idx_sync();
  if (threadIdx.x % kWarpSize == 0) init_barriers<T, kWholeTiles>(shared, gathered, query_maps.usable, warp);
  // Asked behind the barriers' set-up: the parameters that it reads arrive while other warps read theirs.
  if constexpr (kStacks<T>) {
    if (params.call_of == CallOf::kStacks && is_without_stacks(params)) return;
  }
  ETAP_MARKED(launch_sync, __syncthreads());
  // With lists each role waits for the predecessor by itself, when it has worked out where it begins.
  if (!T::kSparse && (!kWholeTiles || !params.early_loads)) ETAP_MARKED(launch_wait, pdl_wait_then_trigger());

  const unsigned cluster = T::kSparse ? ptx::cluster_size() : 1;  // 1, 2, 4 or 8
  unsigned place = blockIdx.x >> ((cluster > 1) + (cluster > 2) + (cluster > 4));
  int row_group = 0;
  // With lists one group is usual, and the rows wait for the division. Elsewhere ptxas would spill for the question.
  if (!T::kSparse || params.row_groups > 1) {
    row_group = place % params.row_groups;
    place /= params.row_groups;
  }
  const int partition = place * cluster + (blockIdx.x & (cluster - 1));
  const int group = cutlass::canonical_warp_group_idx();
  if (group >= kConsumerGroups) {
    adjust_registers<T, kWholeTiles, false>();
    produce<T, kWholeTiles>(shared, params, cache, query_maps, partition, row_group);
  } else {
    adjust_registers<T, kWholeTiles, true>();
    T::Consumer::run(shared, params, partition, row_group, group);
  }
}

}  // namespace etap

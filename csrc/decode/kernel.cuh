// MLA decode, transposed: S^T = K·Q^T, O^T = V^T·P^T. (64 rows of a 16-bit cache are not: rows.cuh.)
//
// Glossary   st: S^T [64 tokens x query rows]   pt: P^T [rows x tokens in shared memory]   ot: O^T [value dims x rows]
//            tile: 64 tokens   piece: a run of tiles of one request   row: (query token, head), packed
//
// Role             warps  registers  does
// key producer     1      40         K tiles, TMA, stage by stage into the key ring
// query producer   3      40         the query rows of each piece, TMA (1 warp) or cp.async
// consumer 0, 1    4 + 4  232        st, softmax, ot; merge; write
//
// Pipeline         stages            producer -> consumer                    released by
// keys             8 x 24 KB (*)     TMA bytes -> both consumers             4 warps (tiles alternate) or 8 (shared)
// queries          1                 TMA bytes or 96 threads -> both         8 warps, after the piece's last S^T
// grants           4 a consumer      key producer -> the tile's consumer     (nothing to release)
// (*) 7 at 32 rows; of an FP8 cache 3 to 5 whole tiles of 36 KB, and the consumers read the query rows
//
// Up to 32 rows, time going down:
//   consumer 0: st(0) softmax(0) ot(0)         st(2) ...          The tensor cores alternate between the two; each
//   consumer 1:            st(1) softmax(1) ot(1)    st(3) ...    one's softmax hides behind the other's products.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "decode/epilogue.cuh"
#include "decode/fp8_products.cuh"
#include "decode/fp8_queries.cuh"
#include "decode/load.cuh"
#include "decode/rows.cuh"

namespace etap {

// One tile: wait K, S^T, softmax, O^T, release.
template <class T>
__device__ __forceinline__ void consume_tile(typename T::SharedStorage& shared, const DecodeParams& params,
                                             const Piece& piece, int tile, int row_group, bool first, bool last,
                                             RingPosition<1> query_at,
                                             RingPosition<T::kStages> at, char* probabilities, Softmax<T>& softmax,
                                             OutputFragment<T>& ot) {
  const int group = softmax.group;
  ScoreFragment<T> st;
  if constexpr (T::kFp8Cache) {
    compute_scores_fp8<T>(shared, at, group, st);
  } else {
    compute_scores<T>(shared, at, st);
    if (last && threadIdx.x % kWarpSize == 0) shared.queries.release(query_at);
  }
  const int tile_end = (tile + 1) * kTileTokens;
  if (tile_end > piece.seq_len - params.s_q + 1) {
    mask_scores<T>(params, piece, tile, row_group, group, st);
    if (tile_end > piece.seq_len) {
      // Matrix loads of the scores may still read there. What they get is masked; they should read no half-written value.
      if constexpr (T::kFp8Cache) ptx::barrier_sync(T::score_barrier(group), T::kScoreThreads);
      zero_value_tail<T>(shared, at, piece, tile);
    }
  }
  bool renew = first;
  if (!renew) {
    const bool exceeds = softmax.exponentiate(st);
    softmax.store(probabilities);
    renew = ptx::barrier_any(exceeds, T::score_barrier(group), T::kScoreThreads);
  }
  if (renew) {
    softmax.renew(st, ot);
    softmax.exponentiate(st);
    softmax.store(probabilities);
    ptx::barrier_sync(T::score_barrier(group), T::kScoreThreads);
  }
  if constexpr (T::kFp8Cache) {
    add_output_fp8<T>(shared, at, group, probabilities, ot, [&] { softmax.accumulate(); });
  } else {
    start_output<T>(shared, at, probabilities, ot);
    softmax.accumulate();
    finish_output<T>(shared, at, ot);
  }
}

// Both consumers run the same instructions, so that they share the instruction cache.
template <class T>
__device__ __forceinline__ void consume(typename T::SharedStorage& shared, const DecodeParams& params, int partition,
                                        int row_group, int group) {
  float kv_scale = 1.0f, q_scale = 1.0f;
  if constexpr (T::kFp8Cache) {
    if (params.kv_scale != nullptr) kv_scale = *params.kv_scale;
    if (params.q_scale != nullptr) q_scale = *params.q_scale;
  }
  Softmax<T> softmax(shared, params.scale_log2, kv_scale, group);
  OutputFragment<T> ot;
  RingPosition<T::kStages> keys;
  RingPosition<1> queries;
  uint32_t grants_taken = 0;  // in all pieces, where tiles alternate
  int pieces = 0;
  char* const probabilities = shared.probabilities + (T::kSharedTiles ? 0 : 2 * group * T::kProbabilityBytes);
  PieceWalk walk(params, partition);
  while (!walk.done()) {
    const Piece piece = walk.next();
    if (piece.tiles() == 0) write_empty<T>(Destination<T>(params, piece, row_group));
    if constexpr (T::kFp8Cache) {
      if (piece.tiles() == 0) continue;
      load_queries<T>(shared, params, piece.request, row_group, params.scale_log2 * kv_scale * q_scale);
    } else {
      shared.queries.wait(queries);
    }
    softmax.reset();
    cute::clear(ot);
    for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
      if constexpr (!T::kSharedTiles) {
        if (i % kConsumerGroups != group) continue;
        // A stage's barrier tells odd rounds from even ones only, and the other consumer's tile that lay there before ours
        // may not have arrived yet. Once our first stage is being filled, it has: a tile gives back its first stage only
        // when its last one has arrived.
        shared.granted[group].wait(grants_taken++);
      }
      constexpr int kStep = T::kSharedTiles ? 1 : kConsumerGroups;
      const int mine = i / kStep;
      consume_tile<T>(shared, params, piece, piece.begin_tile + i, row_group, mine == 0, i + kStep >= piece.tiles(),
                      queries, keys,
                      probabilities + mine % 2 * T::kProbabilityBytes, softmax, ot);
    }
    if constexpr (!T::kFp8Cache) {
      if (piece.tiles() <= (T::kSharedTiles ? 0 : group)) {  // no tile for this consumer
        __syncwarp();                                        // all lanes have seen this round
        if (threadIdx.x % kWarpSize == 0) shared.queries.release(queries);
      }
      queries.advance(1);
      if (piece.tiles() == 0) continue;
    }
    // For the same reason as above: the stages for merging may still be filled with an earlier tile.
    if constexpr (!T::kSharedTiles) shared.granted[group].wait(grants_taken++);
    finish_piece<T>(shared, keys, pieces++, Destination<T>(params, piece, row_group), softmax, ot);
    keys.advance(kConsumerGroups * T::kMergeStages);
  }
}

// Debug builds keep the registers of the launch: sanitizers instrument code that setmaxnreg then leaves too few for. With 64
// rows on M they would spill, and what memcheck does at a spill changes registers that a product may still read.
template <class T, bool kConsumer>
__device__ __forceinline__ void adjust_registers() {
#ifdef ETAP_SPIN_LIMIT
  if constexpr (!T::kRowsOnM) return;
#endif
  if constexpr (kConsumer) {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
  }
}

template <class T>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams params, const __grid_constant__ typename T::CacheMaps cache_maps,
                  const __grid_constant__ QueryMaps query_maps) {
  static_assert(T::kProducerRegisters * kGroupThreads + T::kConsumerRegisters * kConsumerThreads <= 168 * kDecodeThreads);
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename T::SharedStorage*>(shared_bytes);
  if (threadIdx.x < kWarpSize) {
    if (threadIdx.x < sizeof(cache_maps) / sizeof(CUtensorMap)) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const CUtensorMap*>(&cache_maps) + threadIdx.x);
    }
    if (threadIdx.x == 0 && query_maps.usable) {
      cute::prefetch_tma_descriptor(&query_maps.latent);
      cute::prefetch_tma_descriptor(&query_maps.rope);
    }
    shared.keys.init(threadIdx.x, 1, T::kStageReleases);
    shared.queries.init(threadIdx.x, query_maps.usable ? 1 : kQueryLoaderThreads, kConsumerThreads / kWarpSize);
    if constexpr (!T::kRowsOnM) {
      if (threadIdx.x < kConsumerGroups) shared.granted[threadIdx.x].init();
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();  // only now: the combination may read the schedule as soon as it begins

  const int partition = blockIdx.x / params.row_groups;
  const int row_group = blockIdx.x % params.row_groups;
  const int group = cutlass::canonical_warp_group_idx();
  if (group == kConsumerGroups) {
    adjust_registers<T, false>();
    const int warp = cutlass::canonical_warp_idx_sync() % kWarpsPerGroup;
    if (warp == 0) {
      load_keys<T>(shared, params, cache_maps, partition);
    } else if constexpr (!T::kFp8Cache) {
      if (!query_maps.usable) {
        gather_queries<T>(shared, params, partition, row_group);
      } else if (warp == 1) {
        copy_queries<T>(shared, params, query_maps, partition, row_group);
      }
    }
  } else {
    adjust_registers<T, true>();
    if constexpr (T::kRowsOnM) {
      consume_rows<T>(shared, params, partition, row_group, group);
    } else {
      consume<T>(shared, params, partition, row_group, group);
    }
  }
}

}  // namespace etap

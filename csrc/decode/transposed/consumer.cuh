// A consumer warpgroup of the transposed kernel: an attention of its own over every other tile.
#pragma once

#include "decode/transposed/merge.cuh"

namespace etap::transposed {

// One tile: wait for K, S^T, softmax, O^T, release.
template <class T>
__device__ __forceinline__ void consume_tile(typename T::SharedStorage& shared, const DecodeParams& params,
                                             const Piece& piece, int tile, int row_group, bool first, bool last,
                                             RingPosition<1> query_at, RingPosition<T::kStages> at, char* probabilities,
                                             Softmax<T>& softmax, OutputFragment<T>& ot) {
  const int group = softmax.group;
  ScoreFragment<T> st;
  compute_scores<T>(shared, at, st);
  if (last && threadIdx.x % kWarpSize == 0) shared.queries.release(query_at);
  const int tile_end = (tile + 1) * kTileTokens;
  if (tile_end > piece.seq_len - params.s_q + 1) {
    mask_scores<T>(params, piece, tile, row_group, group, st);
    if (tile_end > piece.seq_len) zero_value_tail<T>(shared, at, piece, tile);
  }
  bool renew = first;
  if (!renew) {
    const bool exceeds = softmax.exponentiate(st);
    softmax.store(probabilities);
    renew = event::probabilities_written(group).any(exceeds);
  }
  if (renew) {
    float correction[Softmax<T>::kColumns];
    softmax.renew(st, correction);
    scale_columns<T>(ot, [&](int block, int bit) { return correction[2 * block + bit]; });
    softmax.exponentiate(st);
    softmax.store(probabilities);
    event::probabilities_written(group).sync();
  }
  start_output<T>(shared, at, probabilities, ot);
  softmax.accumulate();
  finish_output<T>(shared, at, ot);
}

template <class T>
struct Consumer {
  // Both consumers run the same instructions, so that they share the instruction cache.
  __device__ __forceinline__ static void run(typename T::SharedStorage& shared, const DecodeParams& params, int partition,
                                             int row_group, int group) {
    Softmax<T> softmax(shared, params.scale_log2, 1.0f, group);
    OutputFragment<T> ot;
    RingPosition<T::kStages> keys;
    RingPosition<1> queries;
    uint32_t grants_taken = 0;  // in all pieces
    int pieces = 0;
    char* const probabilities = shared.probabilities + 2 * group * T::kProbabilityBytes;
    PieceWalk walk(params, partition);
    while (!walk.done()) {
      const Piece piece = walk.next();
      if (piece.tiles() == 0) write_empty<T>(Destination<T>(params, piece, row_group));
      shared.queries.wait(queries);
      softmax.reset();
      cute::clear(ot);
      for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        if (i % kConsumerGroups != group) continue;
        // A stage's barrier tells odd rounds from even ones only, and the other consumer's tile that lay there before ours
        // may not have arrived yet. Once our first stage is being filled, it has: a tile gives back its first stage only
        // when its last one has arrived.
        shared.granted[group].wait(grants_taken++);
        const int mine = i / kConsumerGroups;
        consume_tile<T>(shared, params, piece, piece.begin_tile + i, row_group, mine == 0,
                        i + kConsumerGroups >= piece.tiles(), queries, keys, probabilities + mine % 2 * T::kProbabilityBytes,
                        softmax, ot);
      }
      if (piece.tiles() <= group) {  // no tile for this consumer
        __syncwarp();                // all lanes have seen this round
        if (threadIdx.x % kWarpSize == 0) shared.queries.release(queries);
      }
      queries.advance(1);
      if (piece.tiles() == 0) continue;
      shared.granted[group].wait(grants_taken++);  // the stages for merging, for the same reason
      merge_and_write<T>(shared, keys, pieces++, Destination<T>(params, piece, row_group), softmax, ot);
      keys.advance(kConsumerGroups * T::kMergeStages);
    }
  }
};

}  // namespace etap::transposed

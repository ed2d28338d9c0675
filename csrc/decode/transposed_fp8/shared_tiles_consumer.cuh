// A consumer warpgroup beside an FP8 cache with 64 rows: both go through every tile in step. Each computes the scores of
// half of the columns and half of the value dims.
#pragma once

#include "decode/transposed_fp8/products.cuh"
#include "decode/transposed_fp8/queries.cuh"
#include "decode/transposed_fp8/shared_tiles_epilogue.cuh"

namespace etap::transposed_fp8 {

// Multiply O^T, which has the columns of both warpgroups, with what both have found for their own.
template <class T>
CUTE_DEVICE void scale_shared(Shared<T>& shared, int group, const float (&correction)[transposed::Softmax<T>::kColumns],
                              transposed::OutputFragment<T>& ot) {
  constexpr int kBlocks = T::kScoreColumns / 8;
  CUTE_UNROLL
  for (int i = 0; i < 2 * kBlocks; ++i) {
    if (threadIdx.x % kGroupThreads < 4) shared.factors[group][transposed::fragment_column(i / 2, i % 2)] = correction[i];
  }
  event::factors_written().sync();
  transposed::scale_columns<T>(ot, [&](int block, int bit) {
    return shared.factors[block / kBlocks][transposed::fragment_column(block % kBlocks, bit)];
  });
}

// What a consumer knows of its CTA, and what it holds.
template <class T>
struct SharedTilesConsumer {
  Shared<T>& shared;
  const DecodeParams& params;
  const int row_group;
  transposed::Softmax<T>& softmax;
  transposed::OutputFragment<T>& ot;

  // Decodes a partition's pieces.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    if (params.early_loads) follow_predecessor();
    const float kv_scale = scale_of(params.kv_scale);
    transposed::Softmax<T> softmax(shared, params.scale_log2, kv_scale, group);
    transposed::OutputFragment<T> ot;
    SharedTilesConsumer consumer{shared, params, row_group, softmax, ot};
    KeyPosition<T> keys;
    PieceWalk walk(params, partition);
    for (int n = 0; !walk.done(); ++n) {
      load_queries<T>(shared, params, walk.request(), row_group, kv_scale);  // while its length is on its way
      const Piece piece = next_piece<T>(shared, params, walk, n);
      if (piece.tiles() == 0) write_empty<T>(Destination<T>(params, piece, row_group));
      if (piece.tiles() == 0) continue;
      softmax.reset();
      cute::clear(ot);
      for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        consumer.consume_tile(piece, piece.begin_tile + i, i == 0, keys,
                              shared.probabilities + i % 2 * T::kProbabilityBytes);
      }
      write_shared<T>(shared, Destination<T>(params, piece, row_group), softmax, ot);
    }
  }

  // One tile: wait for K, S^T, softmax, O^T, release. `first`: of the piece.
  CUTE_DEVICE void consume_tile(const Piece& piece, int tile, bool first, KeyPosition<T> at, char* probabilities) {
    const int group = softmax.group;
    // Wait for K, S^T: this warpgroup's columns.
    transposed::ScoreFragment<T> st;
    compute_scores<T>(shared, params, at, group, st);

    // Softmax.
    const int tile_end = (tile + 1) * kTileTokens;
    if (tile_end > piece.seq_len - params.s_q + 1) {
      transposed::mask_scores<T>(params, piece, tile, row_group, group, st);
      if (tile_end > piece.seq_len) {
        // Matrix loads of the scores may still read there. What they get is masked; they should read no half-written value.
        event::both_scores_read().sync();
        transposed::zero_value_tail<T>(shared, at, piece, tile);
      }
    }
    bool renew = first;
    if (!renew) {
      const bool exceeds = softmax.exponentiate(st);
      softmax.store(probabilities);
      renew = event::both_probabilities_written().any(exceeds);
    }
    if (renew) {
      float correction[transposed::Softmax<T>::kColumns];
      softmax.renew(st, correction);
      scale_shared<T>(shared, group, correction, ot);
      softmax.exponentiate(st);
      softmax.store(probabilities);
      event::both_probabilities_written().sync();
    }

    // O^T of this warpgroup's value dims, release.
    add_output<T>(shared, at, group * T::kOutputSlices, probabilities, ot, [&] { softmax.accumulate(); });
  }
};

}  // namespace etap::transposed_fp8

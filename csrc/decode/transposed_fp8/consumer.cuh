// A consumer warpgroup beside an FP8 cache, up to 32 rows: as transposed/consumer.cuh, but V, and K where
// products are float16, come through registers, and the consumers read the queries.
#pragma once

#include "decode/transposed/single_tile.cuh"
#include "decode/transposed_fp8/products.cuh"
#include "decode/transposed_fp8/queries.cuh"
#include "decode/transposed_fp8/single_tile.cuh"

namespace etap::transposed_fp8 {

// What a consumer knows of its CTA, and what it holds.
template <class T>
struct Consumer {
  Shared<T>& shared;
  const DecodeParams& params;
  transposed::Softmax<T>& softmax;
  transposed::OutputFragment<T>& ot;

  // The CTA's, worked out where it is wanted: a register that kept it through the products would be spilled.
  CUTE_DEVICE static int row_group_of(const DecodeParams& params) {
    return params.row_groups == 1 ? 0 : anew(blockIdx.x) % params.row_groups;
  }

  // Decodes a partition's pieces.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int /* row_group */, int group) {
    const float kv_scale = scale_of(params.kv_scale);
    transposed::Softmax<T> softmax(shared, params.scale_log2, kv_scale, group);
    transposed::OutputFragment<T> ot;
    Consumer consumer{shared, params, softmax, ot};
    KeyPosition<T> keys;
    uint32_t grants_taken = 0;  // in all pieces
    int pieces = 0;
    char* const probabilities = shared.probabilities + 2 * group * T::kProbabilityBytes;
    PieceWalk walk(params, partition);
    for (int n = 0; !walk.done(); ++n) {
      load_queries<T>(shared, params, walk.request(), row_group_of(params), kv_scale);  // while its length is on its way
      const Piece piece = next_piece<T>(shared, params, walk, n);
      if (piece.tiles() == 0) {
        write_empty<T>(Destination<T>(params, piece, row_group_of(params)));
        continue;
      }
      softmax.reset();
      cute::clear(ot);
      if (piece.tiles() == 1) {
        shared.granted[group].wait(grants_taken++);
        transposed::decode_single_tile<T>(
            shared, params, piece, row_group_of(params), keys, pieces++, softmax, ot,
            [&](transposed::ScoreFragment<T>& st) { compute_score_share<T>(shared, params, keys, group, st); },
            [&](auto&& meanwhile) {
              add_output<T, T::kOutputSlices / kConsumerGroups>(shared, keys, group * T::kOutputSlices / kConsumerGroups,
                                                                probabilities, ot, meanwhile);
            });
        keys.advance(T::kStagesPerTile);
        continue;
      }
      for (int i = 0; i < piece.tiles(); ++i, keys.advance(T::kStagesPerTile)) {
        if (i % kConsumerGroups != group) continue;
        shared.granted[group].wait(grants_taken++);
        const int mine = i / kConsumerGroups;
        consumer.consume_tile(piece, piece.begin_tile + i, mine == 0, keys,
                              probabilities + mine % 2 * T::kProbabilityBytes);
      }
      shared.granted[group].wait(grants_taken++);
      transposed::merge_and_write<T>(shared, keys, pieces++, Destination<T>(params, piece, row_group_of(params)), softmax, ot);
      keys.advance(kConsumerGroups * T::kMergeStages);
    }
  }

  // One tile: wait for K, S^T, softmax, O^T, release. `first`: of this consumer's in the piece.
  CUTE_DEVICE void consume_tile(const Piece& piece, int tile, bool first, KeyPosition<T> at, char* probabilities) {
    const int group = softmax.group;
    // Wait for K, S^T.
    transposed::ScoreFragment<T> st;
    compute_scores<T>(shared, params, at, group, st);

    // Softmax.
    const int tile_end = (tile + 1) * kTileTokens;
    if (tile_end > piece.seq_len - params.s_q + 1) {
      transposed::mask_scores<T>(params, piece, tile, row_group_of(params), group, st);
      if (tile_end > piece.seq_len) {
        // Matrix loads of the scores may still read there. What they get is masked; they should read no half-written value.
        event::scores_read(group).sync();
        transposed::zero_value_tail<T>(shared, at, piece, tile);
      }
    }
    bool renew = first;
    if (!renew) {
      const bool exceeds = softmax.exponentiate(st);
      softmax.store(probabilities);
      renew = event::probabilities_written(group).any(exceeds);
    }
    if (renew) {
      float correction[transposed::Softmax<T>::kColumns];
      softmax.renew(st, correction);
      transposed::scale_columns<T>(ot, [&](int block, int bit) { return correction[2 * block + bit]; });
      softmax.exponentiate(st);
      softmax.store(probabilities);
      event::probabilities_written(group).sync();
    }

    // O^T, release.
    add_output<T>(shared, at, 0, probabilities, ot, [&] { softmax.accumulate(); });
  }
};

}  // namespace etap::transposed_fp8

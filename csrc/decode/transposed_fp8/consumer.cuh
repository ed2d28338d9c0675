// A consumer warpgroup beside an FP8 cache, up to 32 rows: as transposed/consumer.cuh, but K and V come through
// registers, and the consumers read the queries.
#pragma once

#include "decode/transposed/merge.cuh"
#include "decode/transposed_fp8/products.cuh"
#include "decode/transposed_fp8/queries.cuh"

namespace etap::transposed_fp8 {

// What a consumer knows of its CTA, and what it holds.
template <class T>
struct Consumer {
  typename T::SharedStorage& shared;
  const DecodeParams& params;
  transposed::Softmax<T>& softmax;
  transposed::OutputFragment<T>& ot;
  SharedKeyProducts<T> ahead;  // of the next tile, where scores are begun ahead
  uint32_t grants_taken = 0;   // in all pieces

  // The CTA's, worked out where it is wanted: a register that kept it through the products would be spilled.
  __device__ __forceinline__ static int row_group_of(const DecodeParams& params) {
    return params.row_groups == 1 ? 0 : anew(blockIdx.x) % params.row_groups;
  }

  // Decodes a partition's pieces.
  __device__ __forceinline__ static void run(typename T::SharedStorage& shared, const DecodeParams& params, int partition,
                                             int /* row_group */, int group) {
    const CacheScales scales(params);
    transposed::Softmax<T> softmax(shared, params.scale_log2, scales.kv, group);
    transposed::OutputFragment<T> ot;
    Consumer consumer{shared, params, softmax, ot};
    RingPosition<T::kStages> keys;
    int pieces = 0;
    char* const probabilities = shared.probabilities + 2 * group * T::kProbabilityBytes;
    PieceWalk walk(params, partition);
    while (!walk.done()) {
      const Piece piece = walk.next();
      if (piece.tiles() == 0) write_empty<T>(Destination<T>(params, piece, row_group_of(params)));
      if (piece.tiles() == 0) continue;
      load_queries<T>(shared, params, piece.request, row_group_of(params), params.scale_log2 * scales.kv * scales.q);
      softmax.reset();
      cute::clear(ot);
      int i = group;
      keys.advance(group * T::kStagesPerTile);
      const auto consume = [&](auto begins) {
        consumer.template consume_tile<begins>(piece, i, keys,
                                                        probabilities + i / kConsumerGroups % 2 * T::kProbabilityBytes);
        keys.advance(kConsumerGroups * T::kStagesPerTile);
        i += kConsumerGroups;
      };
      if constexpr (T::kScoresAhead) {
        if (i < piece.tiles()) {
          consumer.begin_tile(keys);
          while (i + kConsumerGroups < piece.tiles()) consume(cute::true_type{});
          consume(cute::false_type{});
        }
      } else {
        while (i < piece.tiles()) consume(cute::false_type{});
      }
      keys = keys.behind((i - piece.tiles()) * T::kStagesPerTile);
      shared.granted[group].wait(consumer.grants_taken++);
      transposed::merge_and_write<T>(shared, keys, pieces++, Destination<T>(params, piece, row_group_of(params)), softmax, ot);
      keys.advance(kConsumerGroups * T::kMergeStages);
    }
  }

  // Wait for a tile's K and begin its S^T.
  __device__ __forceinline__ void begin_tile(RingPosition<T::kStages> at) {
    shared.granted[softmax.group].wait(grants_taken++);
    wait_for_keys<T>(shared, params, at);
    ahead.start(tile_of<T>(shared, at), query_of<T>(shared, softmax.group));
  }

  // The piece's i-th tile: wait for K, S^T, softmax, O^T, release.
  // `kBegins`: the next of its own is begun on the way.
  template <bool kBegins>
  __device__ __forceinline__ void consume_tile(const Piece& piece, int i, RingPosition<T::kStages> at, char* probabilities) {
    const int group = softmax.group;
    const int tile = piece.begin_tile + i;
    // Wait for K, S^T.
    transposed::ScoreFragment<T> st;
    if constexpr (T::kScoresAhead) {
      ahead.finish(tile_of<T>(shared, at), query_of<T>(shared, group), st);
    } else {
      shared.granted[group].wait(grants_taken++);
      compute_scores<T>(shared, params, at, group, st);
    }

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
    bool renew = i < kConsumerGroups;  // the first of this consumer's in the piece
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
    if constexpr (kBegins) begin_tile(at.ahead(kConsumerGroups * T::kStagesPerTile));
    add_output<T>(shared, at, 0, probabilities, ot, [&] { softmax.accumulate(); });
  }
};

}  // namespace etap::transposed_fp8

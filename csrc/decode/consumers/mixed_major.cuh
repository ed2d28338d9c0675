// A consumer warpgroup of 64 rows with e4m3 products. Time going down, s the scores of a tile, o an addition to this half of O^T:
//
//   warpgroup 0: s(0) softmax(0)      o(0)  s(2)  softmax(2) o(1, 2)  s(4) ...
//   warpgroup 1: s(1)      softmax(1) o(0, 1)  s(3)  softmax(3) o(2, 3) ...
#pragma once

#include "decode/epilogue/rows.cuh"
#include "decode/load/scaled_queries.cuh"
#include "decode/mma/fp8_cache.cuh"

namespace etap::mixed_major {

// This is what a consumer knows of its CTA, and what it holds. Tiles are counted from their split's beginning.
template <class T>
struct Consumer {
  Shared<T>& shared;
  const DecodeParams& params;
  const int row_group;
  const int group;
  KeyPosition<T> at;  // of the next tile that this warpgroup multiplies P with
  transposed::OutputFragment<T> ot;

  // Decodes a partition's splits.
  CUTE_DEVICE static void run(Shared<T>& shared, const DecodeParams& params, int partition, int row_group, int group) {
    if (params.early_loads) pdl_wait_then_trigger();
    const float value_scale = transposed_fp8::scale_of(params.kv_scale);
    Consumer consumer{shared, params, row_group, group};
    typename T::Walk walk(params, partition);
    for (int n = 0; !walk.done(); ++n) {
      transposed_fp8::load_queries<T>(shared, params, walk.request(), row_group, value_scale);
      const Split split = next_split<T>(shared, params, walk, n);
      const int tiles = split.tiles();
      if (tiles == 0) {
        write_empty<T>(Destination<T>(params, split, row_group));
        continue;
      }
      RowState state;
      cute::clear(consumer.ot);
      // Own tiles, and behind them the split's last one if that is the other's.
      for (int i = group; i <= tiles; i += kConsumerGroups) {
        if (i < tiles) {
          consumer.start_own_tile(split, i, state);
        } else {
          take_probabilities<T>(shared, 1 - group, i - 1, state);
        }
        consumer.add_outputs(split, max(i - 1, 0), min(i + 1, tiles));
      }
      finish_split<T>(shared, Destination<T>(params, split, row_group), group, tiles - 1, value_scale, state, consumer.ot);
    }
  }

  // Computes an own tile's P, against a reference that follows that of the tile before, and hands it over.
  CUTE_DEVICE void start_own_tile(const Split& split, int tile, RowState& state) {
    const auto own = tile == 0 ? at : at.ahead(1);
    typename T::Scores s;
    shared.keys.wait(own);
    // What cp.async wrote, for WGMMA.
    if (params.key_load == KeyLoad::kRows) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
    compute_scores<T>(shared, own, s);
    // All warps of this group have read rope when they have met.
    if (tile == 0) {
      ETAP_MARKED(rope_sync, event::of_consumer(group).sync());
    } else {
      take_probabilities<T>(shared, 1 - group, tile - 1, state);
    }
    if ((split.begin_tile + tile + 1) * kTileTokens > split.seq_len - params.s_q + 1) {
      query_major::mask_scores<T>({params, split, row_group}, split.begin_tile + tile, s);
    }
    Probabilities<T> p;
    float factor[2];
    const bool renewed = exponentiate<T>(shared, s, state, p, factor);
    publish_probabilities<T>(shared, stage(own) + T::kRopeOffset, group, tile, state, p, renewed, factor);
  }

  // Adds the outputs of tiles [begin, end): an own one, the other's before it, or both. Their P is there, but for what other warps
  // of this group have of an own one's. Both go in one sum if they have the same references.
  CUTE_DEVICE void add_outputs(const Split& split, int begin, int end) {
    ETAP_MARKED(own_tile_sync, event::of_consumer(group).sync());
    if ((split.begin_tile + end) * kTileTokens > split.seq_len) zero_tail(split, end - 1, end - 1 == begin ? at : at.ahead(1));
    if (split.tiles() > T::kFewTiles && end - begin == 2 && renewed(begin + 1) == 0) {
      if (begin > 0) scale_output(begin);
      const auto second = at.ahead(1);
      mixed_major::add_outputs<T>({stage(at), stage(second)}, group * T::kOutputSlices, ot);
      if (releases()) {
        shared.keys.release(at);
        shared.keys.release(second);
      }
      at.advance(2);
      return;
    }
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      if (tile > 0) scale_output(tile);
      transposed_fp8::add_output<T>(stage(at), group * T::kOutputSlices, stage(at) + T::kRopeOffset, ot, [] {}, [] {});
      if (releases()) shared.keys.release(at);
      at.advance(1);
    }
  }

  // Overwrites the rows behind the request's end of a tile, in this half of the value dims.
  CUTE_DEVICE void zero_tail(const Split& split, int tile, KeyPosition<T> of) {
    constexpr int kChunksOfGroup = T::kWideChunks / kConsumerGroups;
    transposed::zero_value_tail<T>(shared, of, split, split.begin_tile + tile, group * kChunksOfGroup, (group + 1) * kChunksOfGroup);
    cutlass::arch::fence_view_async_shared();  // before TMA writes there again
    ETAP_MARKED(half_tail_sync, event::tail_zeroed(group).sync());
  }

  // Multiplies the columns of warps whose rows have a new reference.
  CUTE_DEVICE void scale_output(int tile) {
    const int told = tile % T::kTilesTold;
    const uint32_t renewed = this->renewed(tile);
    CUTE_UNROLL
    for (int warp = 0; warp < kWarpsPerGroup; ++warp) {
      constexpr int kBlocks = T::kRowTile / 8 / kWarpsPerGroup;
      if ((renewed >> 8 * warp & 1) == 0) continue;
      transposed::scale_columns<T>(
          ot, [&](int block, int bit) { return shared.rows[told][transposed::fragment_column(block, bit)].factor; },
          warp * kBlocks, (warp + 1) * kBlocks);
    }
  }

  // A byte a warp's rows.
  CUTE_DEVICE uint32_t renewed(int tile) const { return reinterpret_cast<const uint32_t&>(shared.renewed[tile % T::kTilesTold]); }
  CUTE_DEVICE char* stage(KeyPosition<T> of) const { return shared.ring + of.stage * T::kStageBytes; }
};

}  // namespace etap::mixed_major

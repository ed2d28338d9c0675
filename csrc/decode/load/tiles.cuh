// Sources that copy the cache with TMA: one warp whole tiles, or, where a page holds a part of a tile or latent and rope are no
// neighbours, several warps the parts of a tile. One warp alone would take as long to ask for 36 copies as memory to bring them.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "decode/load/fill_ring.cuh"

namespace etap {

// A lane fetches the page of one part of a tile (of a whole tile, where TMA copies those), the warp those of 32 parts at a time,
// one batch ahead of its use. The first fetch does not wait for the request's length: what lies behind it in the table is read, but
// never used. Behind the table there is page -1, of which TMA writes NaN: a length that is too long reads no other request's
// rows.
class PageFetcher {
 public:
  CUTE_DEVICE PageFetcher(const DecodeParams& params, int parts)
      : params_(params), parts_(parts), lane_(threadIdx.x % kWarpSize) {}

  // Begins a split.
  CUTE_DEVICE void begin(int request, int begin_tile) {
    pages_ = table_row(params_, request);
    next_ = fetch(begin_tile * parts_);
  }
  // Goes to `part`, the split's i-th. It is called with i = 0, 1, 2, ..., or with that of each tile's first part.
  CUTE_DEVICE void advance(int part, int i) {
    if (i % kWarpSize == 0) {
      current_ = next_;
      next_ = fetch(part + kWarpSize);
    }
  }
  // Returns the page of the split's i-th part, or of one that follows in its tile. The whole warp calls it.
  CUTE_DEVICE int page(int i) const { return __shfl_sync(0xffffffff, current_, i % kWarpSize); }

 private:
  CUTE_DEVICE int fetch(int first_part) const {
    const int page = params_.parts_per_page.div(first_part + lane_);
    return uint32_t(page) < uint32_t(params_.max_pages) ? ptx::load_in_order(pages_ + page) : -1;
  }

  const DecodeParams& params_;
  const int parts_;  // of a tile
  const int lane_;
  const int32_t* pages_;  // of the request: [max_pages]
  int current_ = 0;
  int next_ = 0;
};

// Where a block of combine may work beside this CTA, stages are asked for one by one until the predecessor has ended: more would
// queue ahead of its reads, which the queries wait for. But a split of one tile wants it at once.
template <class T>
constexpr bool kLoadsSparingly = T::registers(true).launch == kBesideCombination.launch;

template <class T>
class WholeTiles : public DenseTiles<T, PageFetcher> {
  using Tiles = DenseTiles<T, PageFetcher>;
  using Tiles::shared_, Tiles::params_, Tiles::pages_, Tiles::split_, Tiles::tile_;

 public:
  CUTE_DEVICE WholeTiles(Shared<T>& shared, const DecodeParams& params, const typename T::CacheMaps& maps, int partition)
      : Tiles(shared, params, partition, {params, 1}), maps_(maps), before_predecessors_end_(kLoadsSparingly<T> && params.early_loads) {}

  CUTE_DEVICE bool next_tile(int i) {
    if (!Tiles::go_on(i, true)) return false;
    const bool new_tokens = (tile_ + 1) * kTileTokens > split_.seq_len - params_.s_q;
    if (params_.early_loads && new_tokens) ETAP_MARKED(new_tokens_wait, cudaGridDependencySynchronize());
    pages_.advance(tile_, i);
    return true;
  }

  template <class Begun>
  CUTE_DEVICE void fill_tile(KeyPosition<T>& at, int i, Begun&& begun) {
    const int page = pages_.page(i);
    const int token = params_.parts_per_page.rem(tile_) * kTileTokens;  // of the page
#pragma unroll
    for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
      // Loads are sparing until the first queries are there. Later ones may be, too, when the ring goes round: its parity tells
      // that.
      if (before_predecessors_end_) before_predecessors_end_ = at.parity == 0 && !shared_.queries.filled({});
      const bool one = (before_predecessors_end_ && split_.tiles() > 1) || Tiles::serialize_first_loads();
      hold_back<T>(shared_, at.behind(one ? 1 : kStagesInFlight<T>));
      shared_.keys.acquire(at);
      if (threadIdx.x % kWarpSize != 0) continue;
      ETAP_MARKED(expected_bytes, shared_.keys.expect_bytes(at, T::kStageBytes));
      auto& target = item<typename T::KeyStage>(shared_.ring, at.stage);
      maps_.copy(shared_.keys.full_barrier(at), target, page, token, T::first_chunk(stage, i));
      if (stage == 0) begun();
    }
  }

 private:
  const typename T::CacheMaps& maps_;
  bool before_predecessors_end_;  // the predecessor may still run
};

// All warps arrive at each stage, also where a warp has no part of it; the first one says how many bytes are to come.
template <class T>
class TileParts : public DenseTiles<T, PageFetcher> {
  using Tiles = DenseTiles<T, PageFetcher>;
  using Tiles::shared_, Tiles::params_, Tiles::pages_, Tiles::split_, Tiles::tile_;

 public:
  CUTE_DEVICE TileParts(Shared<T>& shared, const DecodeParams& params, const PartMaps& maps, int partition, int warp)
      : Tiles(shared, params, partition, {params, kTileTokens / params.part_tokens}),
        maps_(maps), warp_(warp), parts_(kTileTokens / params.part_tokens) {}

  CUTE_DEVICE bool next_tile(int i) {
    if (!Tiles::go_on(i, warp_ == 0)) return false;
    pages_.advance(tile_ * parts_, i * parts_);
    return true;
  }

  template <class Begun>
  CUTE_DEVICE void fill_tile(KeyPosition<T>& at, int i, Begun&& begun) {
    const bool elected = threadIdx.x % kWarpSize == 0;
#pragma unroll
    for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
      hold_back<T>(shared_, at.behind(Tiles::serialize_first_loads() ? 1 : kStagesInFlight<T>));
      shared_.keys.acquire(at);
      if (elected) {
        if (warp_ == 0) {
          ETAP_MARKED(part_bytes, shared_.keys.expect_bytes(at, T::kStageBytes));
        } else {
          ETAP_MARKED(part_arrival, shared_.keys.commit(at));
        }
        if (stage == 0) begun();
      }
      // The warps take turns in beginning, so that over the stages of a tile each has as many parts as the others.
#pragma unroll 1
      for (int part = (warp_ + stage) % T::kGatherWarps; part < parts_; part += T::kGatherWarps) {
        // Nothing is read of a part behind the request's end: there is no page -1, and the consumers hide it.
        const int held = pages_.page(i * parts_ + part);
        const int page = (tile_ * parts_ + part) * params_.part_tokens < split_.seq_len ? held : -1;
        const int token = params_.parts_per_page.rem(tile_ * parts_ + part) * params_.part_tokens;
        if (!elected) continue;
        T::copy_part(maps_, shared_.keys.full_barrier(at), item<typename T::KeyStage>(shared_.ring, at.stage),
                     part * params_.part_tokens, page, token, T::first_chunk(stage, i));
      }
    }
  }

 private:
  const PartMaps& maps_;
  const int warp_;
  const int parts_;  // of a tile
};

}  // namespace etap

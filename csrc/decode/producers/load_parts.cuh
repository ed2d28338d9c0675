// Where a page holds a part of a tile, or latent and rope are no neighbours, the key producers are warps that share the parts of a
// tile, each a TMA copy a chunk. One warp alone would take as long to ask for 36 copies as memory to bring them.
#pragma once

#include "decode/producers/load_tiles.cuh"

namespace etap {

// All warps go through all stages and arrive at each, so that none falls a round behind, also where it has no part; the first
// one says how many bytes are to come.
template <class T>
CUTE_DEVICE void load_parts(Shared<T>& shared, const DecodeParams& params, const PartMaps& maps, int partition, int warp) {
  const bool elected = threadIdx.x % kWarpSize == 0;
  const int parts = kTileTokens / params.part_tokens;
  KeyPosition<T> at;
  int tiles_begun = 0;
  Grants<T> grants;
  PieceWalk walk(params, partition);
  for (int pieces = 0; !walk.done(); ++pieces) {
    PageFetcher pages(params, walk.request(), walk.begin_tile() * parts);
    const Piece piece = walk.next();
    if (warp == 0) shared.lengths.put(pieces, piece.seq_len);
    if (piece.tiles() == 0) continue;
    grants.begin_piece(piece.tiles());
    for (int tile = piece.begin_tile; tile < piece.end_tile; ++tile, ++tiles_begun) {
      const int i = tile - piece.begin_tile;
      pages.advance(tile * parts, i * parts);
#pragma unroll
      for (int stage = 0; stage < T::kStagesPerTile; ++stage, at.advance(1)) {
        // As in load_keys.
        shared.keys.wait(at.behind(alone<T>(tiles_begun, piece.tiles()) ? 1 : kStagesInFlight<T>));
        shared.keys.acquire(at);
        if (elected) {
          if (warp == 0) {
            ETAP_MARKED(part_bytes, shared.keys.expect_bytes(at, T::kStageBytes));
          } else {
            ETAP_MARKED(part_arrival, shared.keys.commit(at));
          }
          if constexpr (T::kGrantsTiles) {
            if (stage == 0) ETAP_MARKED(part_grant, grants.grant_tile(shared, i));
          }
        }
        // The warps take turns in beginning, so that over the stages of a tile each has as many parts as the others.
#pragma unroll 1
        for (int part = (warp + stage) % T::kGatherWarps; part < parts; part += T::kGatherWarps) {
          // Of a part behind the request's end nothing is read: there is no page -1, and the consumers hide it.
          const int held = pages.page(i * parts + part);
          const int page = (tile * parts + part) * params.part_tokens < piece.seq_len ? held : -1;
          const int token = params.parts_per_page.rem(tile * parts + part) * params.part_tokens;
          if (!elected) continue;
          T::copy_part(maps, shared.keys.full_barrier(at), item<typename T::KeyStage>(shared.ring, at.stage),
                       part * params.part_tokens, page, token, T::first_chunk(stage, i));
        }
      }
    }
    if (grants.lends()) {
      // All warps must have passed these stages before consumers give them back: one that has not would count in their next
      // round.
      for (int stage = 0; stage < kConsumerGroups * T::kMergeStages; ++stage, at.advance(1)) {
        shared.keys.acquire(at);
        if (elected) shared.keys.commit(at);
      }
      if (elected) grants.grant_merge(shared);
    }
    grants.end_piece();
  }
}

}  // namespace etap

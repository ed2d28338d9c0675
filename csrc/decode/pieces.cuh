// The request pieces of a partition, as every role of a CTA walks them.
#pragma once

#include "params.h"

namespace etap {

struct Piece {
  int request;
  int seq_len;
  int begin_tile;
  int end_tile;
  int slot;  // of the partial result, -1 when this piece is the whole request

  __device__ __forceinline__ int tiles() const { return max(end_tile - begin_tile, 0); }
};

// Walks the pieces of a partition in order.
class PieceWalk {
 public:
  __device__ __forceinline__ PieceWalk(const DecodeParams& params, int partition)
      : params_(params), range_(params.work_ranges[partition]), request_(range_.begin_request) {}

  __device__ __forceinline__ bool next(Piece& piece) {
    if (request_ > range_.end_request || (request_ == range_.end_request && range_.end_tile == 0)) return false;
    const int seq_len = max(params_.seq_lens[request_], 0);
    const int tiles = (seq_len + kTileTokens - 1) / kTileTokens;
    const int slots = params_.split_offsets[request_];
    const bool split = params_.split_offsets[request_ + 1] > slots;
    piece = {request_, seq_len, 0, tiles, -1};
    if (request_ == range_.begin_request) piece.begin_tile = range_.begin_tile;
    // A schedule of other lengths gives wrong sums, but must not send a load past the request's pages.
    if (request_ == range_.end_request) piece.end_tile = min(range_.end_tile, tiles);
    if (split) piece.slot = slots + (piece.begin_tile > 0 ? range_.begin_split : 0);
    ++request_;
    return true;
  }

 private:
  const DecodeParams& params_;
  const WorkRange range_;
  int request_;
};

}  // namespace etap

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
  __device__ __forceinline__ PieceWalk(const DecodeParams& params, int partition) : params_(params) {
    const WorkRange& range = params.work_ranges[partition];
    request_ = range.begin_request;
    begin_tile_ = range.begin_tile;
    begin_split_ = range.begin_split;
    end_request_ = range.end_request;
    end_tile_ = range.end_tile;
  }

  __device__ __forceinline__ bool done() const {
    return request_ > end_request_ || (request_ == end_request_ && end_tile_ == 0);
  }
  // Where the next piece begins: known before its length is.
  __device__ __forceinline__ int request() const { return request_; }
  __device__ __forceinline__ int begin_tile() const { return begin_tile_; }

  // Past the next piece without asking how long it is.
  __device__ __forceinline__ void skip() {
    ++request_;
    begin_tile_ = begin_split_ = 0;  // all but the first piece begin their request
  }

  __device__ __forceinline__ Piece next() {
    const int seq_len = max(params_.seq_lens[request_], 0);
    const int tiles = (seq_len + kTileTokens - 1) / kTileTokens;
    const int slots = params_.split_offsets[request_];
    const bool split = params_.split_offsets[request_ + 1] > slots;
    // The schedule may be one of other lengths: a piece ends with its request, and may lie behind it.
    const int end_tile = request_ == end_request_ ? min(end_tile_, tiles) : tiles;
    const Piece piece{request_, seq_len, begin_tile_, end_tile, split ? slots + begin_split_ : -1};
    skip();
    return piece;
  }

 private:
  const DecodeParams& params_;
  int request_;
  int begin_tile_;
  int begin_split_;
  int end_request_;
  int end_tile_;
};

}  // namespace etap

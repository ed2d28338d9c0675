// Every role of a CTA walks the splits of a partition of sparse attention on its own.
#pragma once

#include "decode/cta/splits.cuh"
#include "decode/cta/token_splits.h"

namespace etap::sparse {

// Walks the tokens that a partition meets, from begin() on. A token's counts are read while the one before it is decoded.
template <int kLists = 2>
class TokenWalk {
 public:
  CUTE_DEVICE TokenWalk(const DecodeParams& params, int partition)
      : params_(params),
        partition_(partition),
        token_(first_token(params_.division, partition)),
        end_token_(end_token(params_.division, partition)) {}

  // Reads the first token's counts, behind the predecessor's end.
  CUTE_DEVICE void begin() {
    if (!done()) next_ = token_lists<kLists>(params_.sparse, token_);
  }

  CUTE_DEVICE bool done() const { return token_ >= end_token_; }
  // The token of the next split.
  CUTE_DEVICE int request() const { return token_; }

  CUTE_DEVICE Split next() {
    lists_ = next_;
    const TileRange tiles = tile_range(params_.division, token_, partition_, lists_.tiles());
    const bool divided = splits(params_.division, token_) > 1;
    const Split split{token_, 0, tiles.begin, tiles.end, divided ? slot(params_.division, token_, partition_) : -1};
    ++token_;
    if (!done()) next_ = token_lists<kLists>(params_.sparse, token_);
    return split;
  }

  // Returns the lists of the token whose split next() has returned.
  CUTE_DEVICE const TokenLists& lists() const { return lists_; }

 private:
  const DecodeParams& params_;
  const int partition_;
  int token_;
  const int end_token_;
  TokenLists lists_ = {};
  TokenLists next_ = {};
};

}  // namespace etap::sparse

// A partition's splits, which every role of a CTA walks on its own. A split is a run of tiles of one request, or of one stack.
#pragma once

#include "common/mark.h"
#include "common/pipeline.cuh"
#include "decode/cta/roles.h"
#include "params.h"

namespace etap {

struct Split {
  int request;
  int seq_len;
  int begin_tile;
  int end_tile;
  int slot;  // of the partial result, -1 when this split is the whole request

  CUTE_DEVICE int tiles() const { return max(end_tile - begin_tile, 0); }
};

// The lengths of the splits' requests on their way from the key producer to the consumers. Were each to read them for itself, one
// that changes meanwhile would leave them waiting for each other's tiles.
struct LengthQueue {
  static constexpr int kPlaces = 4;

  int lengths[kPlaces];
  Ring<kPlaces> ring;

  CUTE_DEVICE void init(int warp) { ring.init(warp, 1, kConsumerWarps); }
  // Hands over that of the partition's n-th split. One whole warp calls it.
  CUTE_DEVICE void put(int n, int length) {
    const RingPosition<kPlaces> at = position(n);
    if (n >= kPlaces) ring.acquire(at);
    if (threadIdx.x % kWarpSize != 0) return;
    lengths[at.stage] = length;
    ETAP_MARKED(length_commit, ring.commit(at));
  }
  // All warps of the consumers call it.
  CUTE_DEVICE int take(int n) {
    const RingPosition<kPlaces> at = position(n);
    ETAP_MARKED(length_wait, ring.wait(at));
    const int length = lengths[at.stage];
    __syncwarp();
    if (releases()) ETAP_MARKED(length_release, ring.release(at));
    return length;
  }

 private:
  CUTE_DEVICE static RingPosition<kPlaces> position(int n) {
    return {n % kPlaces, uint32_t(n / kPlaces % 2)};
  }
};

// Walks the splits of a partition in order. The schedule may have been built again since, for another batch: then the result is
// wrong, but the walk meets no request and no slot that the call does not have.
class SplitWalk {
 public:
  CUTE_DEVICE SplitWalk(const DecodeParams& params, int partition) : params_(params) {
    // Both loads are issued together. Left to itself, the compiler waits for the first before it issues the second.
    uint4 range, splits;
    const auto* const words = reinterpret_cast<const char*>(params.work_ranges + partition);
    ptx::load_if(true, words, range);
    ptx::load_if(true, words + offsetof(WorkRange, begin_split), splits);
    request_ = range.x;
    begin_tile_ = range.y;
    begin_split_ = splits.x;
    end_request_ = min(int(range.z), params.batch);
    end_tile_ = int(range.z) < params.batch ? range.w : 0;
  }

  CUTE_DEVICE bool done() const {
    return request_ > end_request_ || (request_ == end_request_ && end_tile_ == 0);
  }
  // The next split begins there, which is known before its length is.
  CUTE_DEVICE int request() const { return request_; }
  CUTE_DEVICE int begin_tile() const { return begin_tile_ + first_tile(); }

  // Goes past the next split without asking how long it is.
  CUTE_DEVICE void skip() {
    ++request_;
    begin_tile_ = begin_split_ = 0;  // all but the first split begin their request
  }

  // The producers walk so: they read its length, behind what they have asked for of its pages.
  CUTE_DEVICE Split next() {
    return next([&] { return min(max(ptx::load_in_order(params_.seq_lens + request_), 0), kMostTokens); });
  }
  // The consumers are told it; what else there is to read is on its way meanwhile.
  template <class Length>
  CUTE_DEVICE Split next(Length&& length) {
    const int slots = params_.split_offsets[request_];
    const int end_of_slots = params_.split_offsets[request_ + 1];
    const int first = first_tile();
    const int seq_len = length();
    const int tiles = (seq_len + kTileTokens - 1) / kTileTokens;
    const bool divided = end_of_slots > slots || params_.call_of == CallOf::kStacks;
    // The schedule may be one of other lengths: a split ends with its request, and may lie behind it.
    const int end_tile = request_ == end_request_ ? min(end_tile_ + first, tiles) : tiles;
    const int slot = min(slots + begin_split_, params_.last_slot);
    const Split split{request_, seq_len, begin_tile_ + first, end_tile, divided ? slot : -1};
    skip();
    return split;
  }

 private:
  // The schedule counts a request's tiles from there on: those before it are its stack's.
  CUTE_DEVICE int first_tile() const { return params_.call_of == CallOf::kOwnTiles ? params_.first_tiles[request_] : 0; }

  const DecodeParams& params_;
  int request_;
  int begin_tile_;
  int begin_split_;
  int end_request_;
  int end_tile_;
};

// A stack's pages are those of its first member. Of a plan that was built again since, for another batch, no row is taken that the call
// does not have.
CUTE_DEVICE const int32_t* table_row(const DecodeParams& params, int request) {
  if (params.call_of == CallOf::kStacks) {
    const int member = params.members[request * params.stack_places];
    request = uint32_t(member) < uint32_t(params.requests) ? member : 0;
  }
  return params.block_table + request * params.block_table_stride;
}

// Returns the next split as the consumers walk, the partition's n-th, behind the predecessor's end. Lists are no longer than their
// tensor, and nobody reads them earlier: there the consumers read their lengths, too.
template <class T>
CUTE_DEVICE Split next_split(Shared<T>& shared, const DecodeParams& params, typename T::Walk& walk, int n) {
  if constexpr (T::kSparse) {
    return walk.next();
  } else {
    return walk.next([&] {
      if (params.early_loads) ETAP_MARKED(first_split_wait, pdl_wait_then_trigger());
      return shared.lengths.take(n);
    });
  }
}

}  // namespace etap

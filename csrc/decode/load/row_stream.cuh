// A stream says where the listed rows of a partition's tiles lie: indices and pages are read ahead, across the ends of lists and
// splits.
#pragma once

#include "common/warp.cuh"
#include "decode/cta/roles.h"
#include "decode/layouts/tile_mask.cuh"
#include "decode/cta/token_walk.cuh"

namespace etap::sparse {

// A warp copies eight rows at a time: an octet. Octets of a tile are dealt to the four warps in turn.
constexpr int kOctetRows = 8;
constexpr int kOctets = kTileTokens / kOctetRows / kWarpsPerGroup;  // of a warp
constexpr int kHalfRows = kOctetRows / 2;
constexpr int kLineBytes = 128;  // of a chunk's row
constexpr int kRowLanes = 4;     // that share a row of V4

// The rows of a tile that a warp copies, as its lanes hold them: lane 8k + j the j-th of its warp's k-th octet.
struct WarpRows {
  bool is_tile = false;  // else the last one has been passed
  bool last = false;     // of its split
  uint64_t row = 0;      // where this lane's begins; where there is none: an address that is not read
  int32_t scales = 0;    // of V4's rows: bytes from there to the row's scales
  uint32_t present = 0;  // a bit a lane

  // Both return what another lane holds. The whole warp calls them.
  CUTE_DEVICE uint64_t row_of(int lane) const { return __shfl_sync(0xffffffff, row, lane); }
  CUTE_DEVICE int32_t scales_of(int lane) const { return __shfl_sync(0xffffffff, scales, lane); }
};

// The tiles of a partition in order, through all splits, for the warp that copies each fourth octet. An entry's index is read
// two tiles before its row is wanted, and its page one, so that neither is waited for. kLists: 1 where it is known that there is no
// second one and rows are not V4's, which takes fewer instructions.
template <int kLists>
class RowStream {
 public:
  CUTE_DEVICE RowStream(const DecodeParams& params, int partition, int warp)
      : params_(params.sparse),
        row_((warp + threadIdx.x % kWarpSize / kOctetRows * kWarpsPerGroup) * kOctetRows + threadIdx.x % kOctetRows),
        guess_(guess_first(params.division, partition)),
        walk_(params, partition) {
    ETAP_MARKED(lists_wait, pdl_wait_then_trigger());
    if (guess_.exists) guess_.index = *guess_.from;
    walk_.begin();
    if (!walk_.done()) prefetch_lists(walk_.request());
    find_tile();
  }

  // The first kAhead calls of next() only read ahead. They are the caller's, in one loop with the others, because the instructions
  // that a call begins with are in no cache yet.
  static constexpr int kAhead = 2;

  // Returns the next tile's rows; there are none the first kAhead times and behind the last tile. The whole warp calls it.
  CUTE_DEVICE WarpRows next() {
    WarpRows rows;
    if (paged_.marks & kIsTile) {
      const RowList& list = params_.lists[paged_.list()];
      const bool present = uint32_t(page_) < uint32_t(list.pages);
      if (present) {
        const int place = list.page_size.rem(paged_.index);
        rows.row = reinterpret_cast<uint64_t>(list.rows + page_ * list.page_stride + place * list.row_stride);
        if (kLists > 1 && params_.format == RowFormat::kPageScaledFp8) {
          rows.scales = (list.page_size.divisor - place) * int32_t(list.row_stride) + place * kPageScaleBytes;
        }
      } else {
        rows.row = reinterpret_cast<uint64_t>(params_.lists[0].rows);
      }
      rows.present = __ballot_sync(0xffffffff, present);
      rows.is_tile = true;
      rows.last = paged_.marks & kLast;
    }
    const Entry before = listed_;
    fetch_index();  // on its way while that of the one before is waited for
    fetch_page(before);
    return rows;
  }

 private:
  // Marks of an entry's tile: it is of the second list, it is one, it is its split's last.
  static constexpr uint32_t kSecond = 1, kIsTile = 2, kLast = 4;
  struct Entry {
    int index = -1;
    int request = 0;  // of the block table
    uint32_t marks = 0;

    CUTE_DEVICE uint32_t list() const { return kLists > 1 ? marks & kSecond : 0; }
  };

  // What the partition begins with where its first token's lists are full, as in a long context: asked for before their counts are
  // there.
  struct Guess {
    const int32_t* from;
    bool exists;  // else this lane has none
    int index = -1;
  };

  // Where that lies. The predecessor may still run.
  CUTE_DEVICE Guess guess_first(const TokenDivision& division, int partition) const {
    const int token = first_token(division, partition);
    const int first_tiles = tiles_of(params_.lists[0].width), second_tiles = kLists > 1 ? tiles_of(params_.lists[1].width) : 0;
    const int tile = tile_range(division, token, partition, first_tiles + second_tiles).begin;
    const bool second = kLists > 1 && tile >= first_tiles;
    const int entry = (tile - (second ? first_tiles : 0)) * kTileTokens + row_;
    const RowList& list = params_.lists[second];
    return {list.indices + token * list.index_stride + entry, token < division.tokens && row_ < kTileTokens && entry < list.width};
  }

  // Asks L2 for a token's lists, a line of 32 entries a lane of the producers.
  CUTE_DEVICE void prefetch_lists(int token) const {
    constexpr int kLineEntries = 32;
    const int entry = threadIdx.x % kGroupThreads * kLineEntries;
    CUTE_UNROLL
    for (int i = 0; i < kLists; ++i) {
      const RowList& list = params_.lists[i];
      if (entry < list.width) ptx::prefetch_l2(list.indices + token * list.index_stride + entry);
    }
  }

  // Goes to a tile that exists, or behind the last split.
  CUTE_DEVICE void find_tile() {
    while (tile_ >= end_tile_ && !walk_.done()) {
      const Split split = walk_.next();
      tile_ = split.begin_tile;
      end_tile_ = split.end_tile;
      token_ = split.request;
      request_ = params_.request_ids != nullptr ? params_.request_ids[token_] : 0;
    }
  }

  CUTE_DEVICE void fetch_index() {
    const TokenLists& lists = walk_.lists();
    const int first_tiles = lists.first_tiles();
    const bool second = kLists > 1 && tile_ >= first_tiles, is_tile = tile_ < end_tile_;
    listed_ = {-1, request_, (second ? kSecond : 0) | (is_tile ? kIsTile : 0) | (tile_ + 1 == end_tile_ ? kLast : 0)};
    const int entry = (tile_ - (second ? first_tiles : 0)) * kTileTokens + row_;
    const RowList& list = params_.lists[second];
    if (row_ < kTileTokens && is_tile && entry < (second ? lists.entries[1] : lists.entries[0])) {
      const int32_t* from = list.indices + token_ * list.index_stride + entry;
      listed_.index = guess_.exists && from == guess_.from ? guess_.index : *from;
    }
    ++tile_;
    find_tile();
  }

  CUTE_DEVICE void fetch_page(const Entry& entry) {
    paged_ = entry;
    page_ = -1;
    const RowList& list = params_.lists[paged_.list()];
    if (paged_.index < 0) return;
    const int page = list.page_size.div(paged_.index);
    if (list.block_table == nullptr) {
      if (uint32_t(paged_.index) < list.row_count) page_ = page;
    } else if (uint32_t(paged_.request) < uint32_t(list.requests) && page < list.max_pages) {
      page_ = list.block_table[paged_.request * list.block_table_stride + page];
    }
  }

  const SparseParams& params_;
  const int row_;  // of a tile; behind its end: this lane has none
  Guess guess_;
  TokenWalk<kLists> walk_;
  int token_ = 0;
  int request_ = 0;
  int tile_ = 0;
  int end_tile_ = 0;
  Entry listed_;  // whose index was asked for last
  Entry paged_;   // whose page was
  int page_ = -1;
};

// Tells a tile's consumers which of its rows there are. The warp that brings them calls it.
CUTE_DEVICE void write_mask(TileMask& mask, uint32_t present) {
  const int thread = anew(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize - kConsumerWarps;
  if (lane >= 2 * kOctets) return;
  mask.fours[(warp + lane / 2 * kWarpsPerGroup) * 2 + lane % 2] = present >> (lane * kHalfRows) & 15;
}

}  // namespace etap::sparse

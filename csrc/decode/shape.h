// The one answer to what a call's query rows mean for the host: how many a CTA holds, in how many groups, and how much of the
// workspace a split's partial result takes. Which kernel decodes them: decode/kernels.h.
#pragma once

#include <cstdint>

#include "params.h"
#include "schedule/policies.h"

namespace etap {

struct DecodeShape {
  int32_t row_tile;      // query rows that a CTA computes
  int32_t row_groups;    // CTAs that share a split, each with another row tile of it
  int64_t split_floats;  // a CTA's partial result of one split: output rows and log-sum-exps
  int64_t split_rows;    // what the schedule weighs a split by; sparse calls have none
  int64_t split_cost;    // what it takes a split for beside its tiles, in tiles
  int64_t single_tiles;  // of the longest request that a schedule cuts into single tiles where each has a partition

  // A partition begins in one request and ends in another: at most two of its splits have partial results.
  constexpr int64_t partial_rows(int64_t partitions) const { return 2 * partitions * row_groups * row_tile; }
  // One partition alone splits no request.
  constexpr int64_t workspace_floats(int64_t partitions) const {
    return partitions > 1 ? 2 * partitions * row_groups * split_floats : 0;
  }
};

constexpr int32_t kSmallGroup = 16;

constexpr int64_t padded(int64_t rows, int32_t row_tile) { return (rows + row_tile - 1) / row_tile * row_tile; }

// The smallest tile that holds the rows, or the largest.
constexpr int32_t least_row_tile(int64_t rows) {
  int32_t row_tile = kMinRowTile;
  while (row_tile < kMaxRowTile && row_tile < rows) row_tile *= 2;
  return row_tile;
}

// A Hopper GPU with few tensor cores for its memory: an H20 has 78 multiprocessors, an H100 at least 114.
constexpr bool few_tensor_cores(int64_t num_sms) { return num_sms < 100; }

// What a schedule is told of its calls. Results are as right with others, later where tensor cores are few.
struct PlannedCalls {
  int64_t num_sms;  // CTAs that the work is divided for
  int64_t batch;    // kAnyBatch: the rows shall lie alike whatever it is, and whatever the cache
  bool fp8_cache;
  bool fp8_math;
};
constexpr int64_t kAnyBatch = 0;

// Where tensor cores are few, groups of 16 rows, each of which reads the cache, take less time than groups of 64 with an
// eighth more of padding. Where one tile of 32 or 64 would do, they are for few requests, whose short calls leave CTAs without
// work (long ones of an FP8 cache take up to 5% more); for 32 rows of e4m3 products, beside which V's way through registers is
// the bound; and for 64 rows of a 16-bit cache, whose long calls take 2% more, and short ones up to a tenth less. Of more groups some CTAs
// would have no part.
constexpr bool takes_small_groups(int64_t rows, const PlannedCalls& calls) {
  constexpr int64_t kMostGroups = 7, kFewRequests = 8;
  if (!few_tensor_cores(calls.num_sms) || rows <= kSmallGroup || rows > kMostGroups * kSmallGroup) return false;
  if (rows > kMaxRowTile / 2 && 8 * padded(rows, kSmallGroup) <= 7 * padded(rows, kMaxRowTile)) return true;
  if (calls.batch == kAnyBatch || rows > kMaxRowTile) return false;
  const bool sixty_four = rows > kMaxRowTile / 2;
  return calls.batch <= kFewRequests || (calls.fp8_cache ? calls.fp8_math && !sixty_four : sixty_four);
}

// Requests of at most so many tiles are cut into single ones where each has a partition; as measured on an H200. Where tensor cores
// are few, none.
constexpr int64_t single_tiles(int32_t row_tile, const PlannedCalls& calls) {
  constexpr int64_t kFew = kShortTiles / 2;
  if (few_tensor_cores(calls.num_sms)) return 0;
  if (!calls.fp8_cache) return row_tile <= kSmallGroup ? kShortTiles : row_tile < kMaxRowTile ? kFew : 0;
  if (row_tile < kSmallGroup) return 0;
  return row_tile == kMaxRowTile ? kShortTiles : row_tile > kSmallGroup || calls.fp8_math ? kFew : kFew / 2;
}

// What a split takes beside its tiles, in tiles: its start and end are longer with more rows. Where tensor cores are few, so is a
// tile, and few rows' takes a third of what a second split was measured to take.
constexpr int64_t split_cost(int32_t row_tile, bool few_tensor_cores) {
  constexpr int64_t kSplitCostRows = 8, kFewRowsSplit = 3;
  if (few_tensor_cores) return row_tile <= kSmallGroup ? kFewRowsSplit : 1;
  return row_tile / kSplitCostRows;
}

// The rows in tiles of so many.
constexpr DecodeShape shape_of(int64_t rows, int32_t row_tile) {
  const auto groups = int32_t(padded(rows, row_tile) / row_tile);
  return {row_tile, groups, int64_t(row_tile) * (kLatentDim + 1), row_tile, split_cost(row_tile, false), 0};
}

// As a schedule takes them. rows: query tokens * heads.
constexpr DecodeShape decode_shape(int64_t rows, const PlannedCalls& calls) {
  const bool small = takes_small_groups(rows, calls);
  DecodeShape shape = shape_of(rows, small ? kSmallGroup : least_row_tile(rows));
  if (few_tensor_cores(calls.num_sms)) {
    shape.split_rows = kCheapSplits;
    shape.split_cost = split_cost(shape.row_tile, true);
  } else if (shape.row_tile == kMaxRowTile && !calls.fp8_cache && calls.batch != kAnyBatch) {
    // Tiles of a 16-bit cache take twice as long, a split's start and end do not.
    shape.split_cost /= 2;
  }
  shape.single_tiles = single_tiles(shape.row_tile, calls);
  return shape;
}

// Requests that are decoded together as far as their pages are the same: see schedule/shared_prefixes.h.
struct StackShape {
  int32_t row_tile;  // of the CTA that decodes a stack
  int32_t places;    // requests that fill it; less than 2: none are stacked
  int32_t least;     // that it needs
  // Tiles of all members in their stacks, below which a batch has none: another call and a merge cost more than is saved. On an H200
  // 16 requests with 16K tokens in common and 64 with 4K (31 tiles a multiprocessor) took 42 and 57 us beside 40 and 51 without
  // stacks, 64 with 16K 96 beside 139.
  int64_t least_tiles;

  constexpr bool exists() const { return places > 1; }
  constexpr int64_t most_stacks(int64_t batch) const { return batch / least; }
};

// Where L2 has the cache, a tile of 64 rows takes 2.1 us and one of 16 rows 0.95 (an H200, bf16): three requests of four places pay, two
// do not. Where tensor cores are few, a tile of 64 rows takes as long as four of 16; there two requests of 8 rows share one of 16.
constexpr StackShape stack_shape(int64_t rows, int64_t num_sms) {
  const bool few = few_tensor_cores(num_sms);
  const int32_t row_tile = few ? kSmallGroup : kMaxRowTile;
  const bool fits = rows > 0 && row_tile % rows == 0 && (!few || rows == kMinRowTile);
  const auto places = int32_t(fits ? row_tile / rows : 1);
  return {row_tile, places, (3 * places + 3) / 4, 32 * num_sms};
}

// Slots of calls in which requests (or stacks) have partial results even where one split holds them: each split ends with its partition
// or with its request.
constexpr int64_t merged_slots(int64_t partitions, int64_t requests) { return partitions + requests; }

// Of sparse attention, where the rows are a token's heads, whatever the caches.
constexpr DecodeShape sparse_shape(int64_t heads) { return shape_of(heads, least_row_tile(heads)); }

}  // namespace etap

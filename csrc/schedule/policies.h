// Ways to divide a batch among partitions, all closed formulas in a request's place on a line, so that all requests and
// partitions are computed at once; host and device share them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "params.h"

namespace etap {

// Where tensor cores are few, no CTA reads faster because others have ended: splits are as cheap as those of no rows, whatever the
// rows.
constexpr int64_t kCheapSplits = 0;
// Own partitions may hold this part of a tile count more than the line's: a GPU bound by memory does not feel the uneven
// load, but it does feel the second split and the combination that the line brings.
constexpr int64_t kOwnTolerance = 24;
// Whole requests may cost a partition a tile more for so many query rows, where every partition would else hold an end of
// a split one. That is twice what writing and reading partial results and combining them take on a GPU bound by memory,
// where partitions that go on alone are faster; elsewhere, and with FP8 caches, whose tiles take half the time, about what
// they do. Own partitions, which begin and end no second request, are three quarters as dear: an H200 takes up to a fifth less for
// 17 to 65 requests of 3 to 16 tiles so (16 rows of e4m3 products 1% to 10% more at 9 tiles).
constexpr int64_t kSplitRows = 2;
// More rows than kMemoryRows are bound by tensor cores: their tiles take longer, and no less where others have ended.
constexpr int64_t kMemoryRows = 32;
constexpr int64_t kManySplitRows = 8;
// A request of at most so many tiles may be cut into single ones: LeastSplit would not say two.
constexpr int64_t kShortTiles = 16;
// Fixed splits are no shorter than this: with fewer tiles a split's start and its combination outweigh them.
constexpr int64_t kFixedTiles = 16;

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ inline int64_t tiles_of(int32_t seq_len) {
  return seq_len > 0 ? ceil_div(seq_len, kTileTokens) : 0;
}

// How small a split of a request may be.
struct LeastSplit {
  int64_t single;  // requests of at most so many tiles may be cut into single ones
  bool pairs;      // all others into two

  // In tiles, of a request of n. Halving a split saves half of its tiles' time, and doubles what the combination reads.
  // Measured, sqrt(n) / 4 tiles balance the two.
  __host__ __device__ int64_t tiles(int64_t n) const {
    if (n <= single) return 1;
    const auto balanced = int64_t(ceil(sqrt(double(n)) / 4.0));
    return pairs || balanced < 2 ? 2 : balanced;
  }
};

// Partitions a request of n tiles takes when each holds at most `most_tiles`, or what a split holds at least. In 32 bits and
// without the root wherever that is known to be less: the device goes through this many times, one after another.
__host__ __device__ inline int64_t own_partitions(int64_t n, int64_t most_tiles, const LeastSplit& least) {
  const bool known = most_tiles > 1 && 16 * most_tiles * most_tiles >= n;
  const int64_t least_tiles = known ? 1 : least.tiles(n);
  const int64_t split = most_tiles > least_tiles ? most_tiles : least_tiles;
  return n > split ? uint32_t(n + split - 1) / uint32_t(split) : 1;
}

// Splits of a request of n tiles where its length alone decides.
__host__ __device__ inline int64_t fixed_splits(int64_t n, int64_t most) {
  const int64_t splits = ceil_div(n, kFixedTiles);
  return splits < 1 ? 1 : splits < most ? splits : most;
}

enum class Policy : int32_t {
  // A batch takes that one of these whose busiest partition has least to do, what splitting costs included:
  kOwnPartitions,  // a request gets as many as keep each within so many tiles; every partition has one split
  kCostLine,       // a request costs its start and one unit a tile; the line is cut into equal parts wherever that falls
  kCountedWhole,   // as many whole requests each, for those about as long as each other: only their number is evened out
  // Where the same sums are wanted for a request whatever shares its batch, its splits follow from its length alone:
  kFixedSplits,    // own partitions, as many as the length says
  kLineOfWhole,    // the cost line, cut between requests only
};

// What the schedule knows of a batch besides the requests' lengths, and what the policies would cost.
struct BatchShape {
  int64_t batch;
  int64_t tiles;  // of all requests
  int64_t partitions;
  int64_t split_rows;  // see ScheduleParams
  int64_t split_cost;
  int64_t single_tiles;

  __host__ __device__ static BatchShape of(const ScheduleParams& params, int64_t tiles) {
    return {params.batch, tiles, params.partitions, params.split_rows, params.split_cost, params.single_tiles};
  }

  // The line's cost of a batch, and what its busiest partition does beside the fixed cost of one split.
  __host__ __device__ int64_t line_total() const { return tiles + batch * split_cost; }
  __host__ __device__ int64_t line_share() const { return ceil_div(line_total(), partitions); }

  // Splits of two tiles leave half as many partial results, and each consumer takes one; single tiles are both consumers'. So
  // requests are cut into these where half of the partitions would else have no work, or three quarters: many rows' partial results
  // are dear; short ones, where each tile has a partition; and all into splits of two where there are not many more tiles than
  // partitions.
  __host__ __device__ LeastSplit least_split() const {
    const bool few_rows = split_rows <= kMemoryRows;
    const int64_t always = few_rows ? tiles : kShortTiles;
    const int64_t single = (few_rows ? 2 : 4) * tiles <= partitions ? always : tiles <= partitions ? single_tiles : 0;
    return {single, few_rows && 2 * tiles <= 3 * partitions};
  }

  // The smallest bound that own partitions may have.
  __host__ __device__ int64_t least_bound() const {
    const int64_t share = ceil_div(tiles, partitions);
    const int64_t least = least_split().single > 0 ? 1 : 2;
    return share > least ? share : least;
  }

  // The largest bound with which own partitions are taken instead of the line.
  __host__ __device__ int64_t most_bound() const {
    const int64_t share = line_share();
    const int64_t least = least_bound();
    return (share > least ? share : least) + share / kOwnTolerance;
  }

  // Own partitions' bound where they are taken, 0 where the line is. own_tiles: the smallest with which they suffice, 0
  // when none does.
  __host__ __device__ int64_t taken_bound(int64_t own_tiles) const {
    return own_tiles > 0 && own_tiles <= most_bound() ? own_tiles : 0;
  }

  // The most that a partition of whole requests may cost, if they are to be taken instead of what splits them.
  __host__ __device__ int64_t whole_bound(int64_t own_tiles) const {
    const int64_t share = line_share();
    const int64_t own = taken_bound(own_tiles);
    const int64_t most_split = batch < partitions ? batch : partitions;
    const int64_t rows = most_split * split_rows;
    const int64_t many = kManySplitRows * partitions;
    const int64_t few = own > 0 ? ceil_div(3 * rows, 4 * kSplitRows * partitions) : ceil_div(rows, kSplitRows * partitions);
    const int64_t saved = split_rows > kMemoryRows ? (rows + many / 2) / many : few;
    return (own > 0 ? own : share) + split_cost + saved + share / kOwnTolerance;
  }
};

// The first request of partition p where each gets as many whole ones.
__host__ __device__ inline int64_t first_counted(int64_t p, int64_t batch, int64_t partitions) {
  return ceil_div(p * batch, partitions);
}

struct Division {
  Policy policy;
  int64_t most;        // tiles of an own partition, or splits of a request where they are fixed
  int64_t split_cost;  // on a cost line
  int64_t total;       // length of the line
  LeastSplit least;
  int64_t partitions;  // in use; on a cost line at most `total`: more would leave empty ones between splits of a request

  // By the batch. whole: no partition of whole requests costs more than whole_bound. One request at most each is their own.
  __host__ __device__ static Division of_batch(const BatchShape& of, int64_t own_tiles, bool whole) {
    const bool single = whole && of.batch <= of.partitions;
    const int64_t most = single ? of.whole_bound(own_tiles) : of.taken_bound(own_tiles);
    const Policy policy = whole && !single ? Policy::kCountedWhole : most > 0 ? Policy::kOwnPartitions : Policy::kCostLine;
    return Division(of, policy, most);
  }

  // By each request's length. More splits than one need as many partitions for every request.
  __host__ __device__ static Division of_lengths(const BatchShape& of, int64_t splits) {
    return Division(of, splits > 1 ? Policy::kFixedSplits : Policy::kLineOfWhole, splits);
  }

  // Every split has a partition to itself.
  __host__ __device__ bool own() const { return policy == Policy::kOwnPartitions || policy == Policy::kFixedSplits; }
  // Partitions hold whole requests.
  __host__ __device__ bool whole() const { return policy == Policy::kCountedWhole || policy == Policy::kLineOfWhole; }
  // A request is a unit of the line.
  __host__ __device__ bool counted() const { return policy == Policy::kCountedWhole; }

  // Length of a request of n tiles on the line: partitions, requests, or costs.
  __host__ __device__ int64_t length(int64_t n) const {
    return own() ? own_splits(n) : counted() ? 1 : n + split_cost;
  }

  // Where request r lies on the line, with so many tiles before it; not of own partitions, which follow from each request.
  __host__ __device__ int64_t place(int64_t r, int64_t tiles_before) const {
    return counted() ? r : tiles_before + r * split_cost;
  }

  // Where partition p begins on the line.
  __host__ __device__ int64_t begin(int64_t p) const {
    if (own()) return p;
    if (counted()) return first_counted(p, total, partitions);
    return p < partitions ? p * total / partitions : total;
  }

  // The tile at which partition p begins, in the request of n tiles that lies at `place`.
  __host__ __device__ int64_t begin_tile(int64_t p, int64_t place, int64_t n) const {
    if (own()) return (p - place) * n / own_splits(n);
    const int64_t cost = begin(p) - place;
    return cost > split_cost ? cost - split_cost : 0;
  }

  // How many earlier partitions hold splits of the request at `place` in whose middle partition p begins.
  __host__ __device__ int64_t begin_split(int64_t p, int64_t place) const {
    return own() ? p - place : p - holder(place);
  }

  // In how many splits the request of this length at `place` is decoded.
  __host__ __device__ int64_t splits(int64_t place, int64_t length) const {
    if (own()) return length;
    if (whole()) return 1;
    const int64_t extra = begun_before(place + length) - 1 - holder(place);
    return extra > 0 ? 1 + extra : 1;
  }

 private:
  __host__ __device__ Division(const BatchShape& of, Policy policy, int64_t most)
      : policy(policy), most(most), split_cost(of.split_cost), least(of.least_split()) {
    total = counted() ? of.batch : of.line_total();
    partitions = own() || counted() || of.partitions < total ? of.partitions : total;
  }

  __host__ __device__ int64_t own_splits(int64_t n) const {
    return policy == Policy::kFixedSplits ? fixed_splits(n, most) : own_partitions(n, most, least);
  }

  // How many partitions of a cost line begin before position x.
  __host__ __device__ int64_t begun_before(int64_t x) const { return ceil_div(x * partitions, total); }

  // The last partition of a cost line that begins at or before the first tile of the request at `place`: it holds it.
  __host__ __device__ int64_t holder(int64_t place) const { return begun_before(place + split_cost + 1) - 1; }
};

}  // namespace etap

// From request lengths to balanced WorkRanges.
//
// Ways to divide a batch, all closed formulas in a request's place on a line, so that all requests and partitions are
// computed at once; host and device share them. A batch takes that one of two whose busiest partition has less to do:
//  - Own partitions: a request gets as many partitions as it needs to keep each within `most_tiles` tiles. Every
//    partition has one piece.
//  - One cost line: every request costs kPieceCost for starting it and one unit a tile; the line is cut into equal parts
//    wherever the cuts fall.
// Where the same sums are wanted for a request whatever shares its batch, its pieces follow from its length alone:
//  - Fixed pieces: own partitions, but as many as the length says; or, where one piece is the most, whole requests, the
//    cost line being cut between them only.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "params.h"

namespace etap {

constexpr int64_t kPieceCost = 1;  // what a request piece costs beside its tiles, in tiles
// Own partitions may hold this part of a tile count more than the line's: a GPU bound by memory does not feel the uneven
// load, but it does feel the second piece and the combination that the line brings.
constexpr int64_t kOwnTolerance = 24;
// Fixed pieces are no shorter than this: with fewer tiles a piece's start and its combination outweigh them.
constexpr int64_t kFixedTiles = 16;

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ inline int64_t tiles_of(int32_t seq_len) {
  return seq_len > 0 ? ceil_div(seq_len, kTileTokens) : 0;
}

// A piece of a request of n tiles is no smaller than this: halving it saves half of its tiles' time, and doubles what the
// combination reads. Measured, sqrt(n) / 4 tiles balance the two.
__host__ __device__ inline int64_t least_tiles(int64_t n) { return int64_t(ceil(sqrt(double(n)) / 4.0)); }

// Partitions a request of n tiles takes when each holds at most `most_tiles`, or what a piece holds at least.
__host__ __device__ inline int64_t own_partitions(int64_t n, int64_t most_tiles) {
  const int64_t piece = most_tiles > least_tiles(n) ? most_tiles : least_tiles(n);
  return n > piece ? ceil_div(n, piece) : 1;
}

// Pieces of a request of n tiles where its length alone decides.
__host__ __device__ inline int64_t fixed_pieces(int64_t n, int64_t most) {
  const int64_t pieces = ceil_div(n, kFixedTiles);
  return pieces < 1 ? 1 : pieces < most ? pieces : most;
}

struct Plan {
  int64_t fixed;       // most pieces of a request whose length alone decides; 0: the batch decides
  int64_t most_tiles;  // of own partitions; 0: one cost line
  int64_t total;       // length of the line
  int64_t partitions;  // in use; on a cost line at most `total`: more would leave empty ones between pieces of a request

  // The line's cost of a batch, and what its busiest partition does beside the fixed cost of one piece.
  __host__ __device__ static int64_t line_total(int64_t batch, int64_t tiles) { return tiles + batch * kPieceCost; }

  // The smallest bound that own partitions may have. A piece of two tiles takes little longer than one of one, since each
  // consumer takes one; single tiles are for batches that would leave half of the partitions without work.
  __host__ __device__ static int64_t least_bound(int64_t tiles, int64_t partitions) {
    const int64_t share = ceil_div(tiles, partitions);
    const int64_t least = 2 * tiles > partitions ? 2 : 1;
    return share > least ? share : least;
  }

  // The largest bound with which own partitions are taken instead of the line.
  __host__ __device__ static int64_t most_bound(int64_t batch, int64_t tiles, int64_t partitions) {
    const int64_t share = ceil_div(line_total(batch, tiles), partitions);
    const int64_t least = least_bound(tiles, partitions);
    return (share > least ? share : least) + share / kOwnTolerance;
  }

  // own_tiles: the smallest bound with which own partitions suffice, 0 when none does. Fixed pieces do not need it, but
  // `fixed` > 1 needs `fixed` partitions for every request.
  __host__ __device__ Plan(int64_t batch, int64_t tiles, int64_t partitions, int64_t own_tiles, int64_t fixed)
      : fixed(fixed) {
    const int64_t line = line_total(batch, tiles);
    most_tiles = own_tiles > 0 && own_tiles <= most_bound(batch, tiles, partitions) ? own_tiles : 0;
    total = line;
    this->partitions = own() ? partitions : partitions < line ? partitions : line;
  }

  // Every piece has a partition to itself.
  __host__ __device__ bool own() const { return fixed > 1 || most_tiles > 0; }
  // Partitions hold whole requests.
  __host__ __device__ bool whole() const { return fixed == 1; }

  // Length of a request of n tiles on the line: partitions, or costs.
  __host__ __device__ int64_t length(int64_t n) const { return own() ? own_pieces(n) : n + kPieceCost; }

  // Where partition p begins on the line.
  __host__ __device__ int64_t begin(int64_t p) const {
    if (own()) return p;
    return p < partitions ? p * total / partitions : total;
  }

  // The tile at which partition p begins, in the request of n tiles that lies at `place`.
  __host__ __device__ int64_t begin_tile(int64_t p, int64_t place, int64_t n) const {
    if (own()) return (p - place) * n / own_pieces(n);
    const int64_t cost = begin(p) - place;
    return cost > kPieceCost ? cost - kPieceCost : 0;
  }

  // How many earlier partitions hold pieces of the request at `place` in whose middle partition p begins.
  __host__ __device__ int64_t begin_split(int64_t p, int64_t place) const {
    return own() ? p - place : p - holder(place);
  }

  // In how many pieces the request of n tiles at `place` is decoded.
  __host__ __device__ int64_t pieces(int64_t place, int64_t n) const {
    if (own()) return own_pieces(n);
    if (whole()) return 1;
    const int64_t extra = begun_before(place + length(n)) - 1 - holder(place);
    return extra > 0 ? 1 + extra : 1;
  }

 private:
  __host__ __device__ int64_t own_pieces(int64_t n) const {
    return fixed > 1 ? fixed_pieces(n, fixed) : own_partitions(n, most_tiles);
  }

  // How many partitions of a cost line begin before position x.
  __host__ __device__ int64_t begun_before(int64_t x) const { return ceil_div(x * partitions, total); }

  // The last partition of a cost line that begins at or before the first tile of the request at `place`: it holds it.
  __host__ __device__ int64_t holder(int64_t place) const { return begun_before(place + kPieceCost + 1) - 1; }
};

// Build the schedule on the device (asynchronously on `stream`) or on host memory.
void build_schedule_on_device(const ScheduleParams& params, cudaStream_t stream);
void build_schedule_on_host(const ScheduleParams& params);

}  // namespace etap

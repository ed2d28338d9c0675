// How sparse attention is divided among partitions: every token has as many tiles, laid one behind the other, and every
// partition decodes as many of them. All of it follows from shapes, so that no schedule is built.
#pragma once

#include "params.h"

namespace etap {

struct EvenSplit {
  int tiles;            // of a token
  int partition_tiles;

  __host__ __device__ explicit EvenSplit(const DecodeParams& params)
      : tiles(params.list_tiles), partition_tiles(params.partition_tiles) {}

  __host__ __device__ int first_partition(int token) const { return token * tiles / partition_tiles; }
  __host__ __device__ int pieces(int token) const {
    return ((token + 1) * tiles - 1) / partition_tiles - first_partition(token) + 1;
  }
  // Of a split token's first piece; the others' follow. A partition begins in one token and ends in another, so that two
  // slots a partition suffice.
  __host__ __device__ int first_slot(int token) const { return 2 * first_partition(token); }

  // The tokens that may be split, in order: all where partitions are shorter than them, else those at the partitions' ends.
  __host__ __device__ int candidates(int tokens) const {
    return partition_tiles < tiles ? tokens : (tokens * tiles - 1) / partition_tiles;
  }
  __host__ __device__ int candidate(int i) const {
    return partition_tiles < tiles ? i : (i + 1) * partition_tiles / tiles;
  }
};

// The tiles of a partition. Where a little longer ones end with the tokens, that is less work: a second piece takes a CTA
// about as long as a tile.
constexpr int64_t even_partition_tiles(int64_t tokens, int64_t tiles, int64_t partitions) {
  const int64_t least = tokens * tiles / partitions + (tokens * tiles % partitions != 0);
  for (int64_t longer = least; longer <= least + 1; ++longer) {
    if (longer > 0 && (tiles % longer == 0 || longer % tiles == 0)) return longer;
  }
  return least;
}

// CTAs of a cluster that holds the pieces of a token, 1 where pieces are no partitions, or none that clusters have room for
// (more than 8 take the GPU's leave), or where a CTA has 64 rows: those kernels sum nothing themselves.
inline int cluster_pieces(const DecodeParams& params) {
  if (params.row_tile == kMaxRowTile || params.list_tiles % params.partition_tiles != 0) return 1;
  const int pieces = params.list_tiles / params.partition_tiles;
  return pieces == 2 || pieces == 4 || pieces == 8 || pieces == 16 ? pieces : 1;
}

}  // namespace etap

// How the work of sparse attention is divided. Shapes alone decide where a partition begins and ends in the sequence of tokens,
// so that no schedule is built; a token's own counts decide which of its tiles that is, so that a wide list costs what its valid
// entries cost. A token's bits therefore depend on shapes and on its own lists only.
//
// A partition decodes step_tokens / step_parts tokens: partition p those from p * step_tokens / step_parts on, in exact fractions.
// A token's tiles are those of its first list and, behind them, those of its second; the share [a, b) / step_parts of a token
// with n tiles is the tiles from a * n / step_parts to b * n / step_parts, rounded down. A share may hold no tile. All products
// fit into 32 bits: the library refuses calls in which tokens or tiles times partitions do not.
#pragma once

#include "params.h"

namespace etap::sparse {

// What an end takes, in halves of a tile: combine behind the partitions; a cluster that sums its CTAs' splits itself; a second
// split of a partition.
constexpr int64_t kCombinationHalves = 3, kClusterHalves = 2, kSecondSplitHalves = 2;
constexpr int64_t kMostClusterSplits = 8;

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The division among at most `partitions` partitions of tokens that have at most so many tiles each, by which the longest partition
// and what follows it take least: whole tokens; equal splits of tokens, which a cluster sums (2, 4 or 8, where there are
// `clusters`) or combine; or all tiles evenly, which combine sums.
inline TokenDivision divide(int64_t tokens, int64_t most_tiles, int64_t partitions, bool clusters) {
  const int64_t all = tokens * most_tiles;
  const int64_t used = all < 1 ? 1 : all < partitions ? all : partitions;
  struct {
    int64_t partitions, step_tokens, step_parts;
  } best{used, tokens > 0 ? tokens : 1, used};
  const auto division = [&] {
    return TokenDivision{int32_t(tokens), int32_t(best.partitions), int32_t(best.step_tokens), int32_t(best.step_parts)};
  };
  if (all < 1) return division();
  int64_t least = 2 * divide_up(all, used) + kCombinationHalves + (used % tokens != 0 ? kSecondSplitHalves : 0);
  const auto consider = [&](int64_t halves, int64_t of_partitions, int64_t step_tokens, int64_t step_parts) {
    if (halves > least) return;
    best = {of_partitions, step_tokens, step_parts};
    least = halves;
  };
  const int64_t step = divide_up(tokens, partitions);  // whole tokens of a partition
  if (partitions > tokens && most_tiles > 1) {
    const int64_t most = partitions / tokens < most_tiles ? partitions / tokens : most_tiles;
    const int64_t longest = divide_up(most_tiles, most), splits = divide_up(most_tiles, longest);
    if (splits > 1) consider(2 * longest + kCombinationHalves, tokens * splits, 1, splits);
  }
  for (int64_t splits = 2; clusters && splits <= kMostClusterSplits && tokens * splits <= partitions; splits *= 2) {
    if (splits <= most_tiles) consider(2 * divide_up(most_tiles, splits) + kClusterHalves, tokens * splits, 1, splits);
  }
  consider(2 * step * most_tiles, divide_up(tokens, step), step, 1);
  return division();
}

// The tokens that a partition meets: [first_token, end_token).
__host__ __device__ inline int first_token(const TokenDivision& of, int partition) {
  return of.step_parts.div(partition * of.step_tokens.divisor);
}
__host__ __device__ inline int end_token(const TokenDivision& of, int partition) {
  const int end = of.step_parts.div((partition + 1) * of.step_tokens.divisor + of.step_parts.divisor - 1);
  return end < of.tokens ? end : of.tokens;
}

// The partitions that share a token: splits() of them from first_partition() on, whatever its counts.
__host__ __device__ inline int first_partition(const TokenDivision& of, int token) {
  return of.step_tokens.div(token * of.step_parts.divisor);
}
__host__ __device__ inline int splits(const TokenDivision& of, int token) {
  return of.step_tokens.div((token + 1) * of.step_parts.divisor - 1) - first_partition(of, token) + 1;
}

// Where a split token's partial result from a partition lies; those of its other splits follow each other. A partition begins in
// one token and ends in another, so that two slots a partition suffice.
__host__ __device__ inline int first_slot(const TokenDivision& of, int token) { return 2 * first_partition(of, token); }
__host__ __device__ inline int slot(const TokenDivision& of, int token, int partition) {
  return first_partition(of, token) + partition;
}

// The tokens that may be split, in order: all where partitions are shorter than they are, none where partitions end with tokens,
// else those in which a partition ends.
__host__ __device__ inline int split_candidates(const TokenDivision& of) {
  const int tokens = of.step_tokens.divisor, parts = of.step_parts.divisor;
  return tokens < parts ? of.tokens : of.step_parts.rem(tokens) == 0 ? 0 : of.partitions - 1;
}
__host__ __device__ inline int split_candidate(const TokenDivision& of, int i) {
  return of.step_tokens.divisor < of.step_parts.divisor ? i : first_token(of, i + 1);
}

// Splits of every token, all of them equal shares, one a partition; 0 where tokens do not have as many.
inline int equal_splits(const TokenDivision& of) {
  return of.step_parts.divisor % of.step_tokens.divisor == 0 ? of.step_parts.divisor / of.step_tokens.divisor : 0;
}

struct TileRange {
  int begin;
  int end;
};

// The tile of a token, of so many, at which the partitions before this one end.
__host__ __device__ inline int end_tile(const TokenDivision& of, int token, int partition, int tiles) {
  const int parts = of.step_parts.divisor, share = partition * of.step_tokens.divisor - token * parts;
  const int within = share < 0 ? 0 : share < parts ? share : parts;
  return of.step_parts.div(within * tiles);
}

// What a partition decodes of a token's so many tiles.
__host__ __device__ inline TileRange tile_range(const TokenDivision& of, int token, int partition, int tiles) {
  return {end_tile(of, token, partition, tiles), end_tile(of, token, partition + 1, tiles)};
}

// Entries of a token's list that count, and the tiles that they take.
__host__ __device__ constexpr int entries(const RowList& list, int token) {
  const int count = list.counts == nullptr ? list.width : list.counts[token];
  return count < 0 ? 0 : count < list.width ? count : list.width;
}
__host__ __device__ constexpr int tiles_of(int entries) { return entries / kTileTokens + (entries % kTileTokens != 0); }

// A token's two lists: the tiles of the first, and the entries of both.
struct TokenLists {
  int entries[2];

  __host__ __device__ constexpr int first_tiles() const { return tiles_of(entries[0]); }
  __host__ __device__ constexpr int tiles() const { return tiles_of(entries[0]) + tiles_of(entries[1]); }
};

// kLists: 1 where it is known that there is no second one.
template <int kLists = 2>
__host__ __device__ constexpr TokenLists token_lists(const SparseParams& params, int token) {
  return {{entries(params.lists[0], token), kLists > 1 ? entries(params.lists[1], token) : 0}};
}

}  // namespace etap::sparse

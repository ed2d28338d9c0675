// What crosses from the host to the kernels: plain structs, one fact a line. Strides count elements.
#pragma once

#include <cuda.h>
#include <cutlass/fast_math.h>

#include <cstdint>

namespace etap {

constexpr int kTileTokens = 64;   // tokens of one schedule unit: WGMMA's M
constexpr int kLatentDim = 512;   // columns of V, the first of K
constexpr int kRopeDim = 64;      // columns of K behind the latent
constexpr int kHeadDim = kLatentDim + kRopeDim;
constexpr int kMostTokens = INT32_MAX - 127;  // of a request: the ends of the tiles behind its last one are int32, too
constexpr int kMinRowTile = 8;    // query rows (tokens x heads) that one CTA computes: 8, 16, 32 or 64
constexpr int kMaxRowTile = 64;

// The tiles one partition decodes: [begin, end) in (request, tile) order. Kernels load the halves, 16 bytes each.
struct alignas(16) WorkRange {
  int32_t begin_request;
  int32_t begin_tile;
  int32_t end_request;
  int32_t end_tile;
  int32_t begin_split;  // splits of begin_request that earlier partitions hold
  // The p-th request in several splits (-1 behind the last; then the next two mean nothing), for the combination.
  int32_t split_request;
  int32_t split_slot;    // of its first split's partial result
  int32_t split_count;  // how many
};

struct ScheduleParams {
  const int32_t* seq_lens;  // [batch]
  WorkRange* work_ranges;   // [partitions]
  int32_t* split_offsets;   // [batch + 1]
  int32_t batch;
  int32_t partitions;
  int32_t fixed_splits;  // most splits of a request where its length alone decides; 0: the batch does
  int32_t split_rows;    // query rows by which a split is dear, those of a CTA, or kCheapSplits; nothing to fixed splits
  int32_t split_cost;    // what a request's split takes beside its tiles, in tiles
  int32_t single_tiles;  // requests of at most so many tiles may be cut into single ones where each tile has a partition
  const int32_t* batch_count = nullptr;  // what the device knows of the batch, which is then the most; null: `batch`
  // [batch]; those with 0 or more there have a partial result even when one split is all of them; null: none.
  const int32_t* merged = nullptr;
};

enum class QueryType : uint8_t { kBFloat16, kFloat16, kE4M3 };

// The paged cache. Strides in bytes.
struct PagedCache {
  const char* latent;  // [pages, page_size, 512]
  const char* rope;    // [pages, page_size, 64]
  int64_t latent_page_stride;
  int64_t latent_row_stride;
  int64_t rope_page_stride;
  int64_t rope_row_stride;
  int32_t pages;
  int32_t page_size;
};

// The distances of rows in units such that 32 bits count all, for those who hold many addresses.
struct RowSteps {
  uint32_t unit_bytes;  // a power of two, of which both are multiples
  uint32_t page;
  uint32_t row;
};

// How a tile of it comes to shared memory.
enum class KeyLoad : int32_t {
  kTiles,  // by TMA, whole
  kParts,  // by TMA, in parts that a page holds, or where latent and rope are no neighbours
  kRows,   // row by row, with cp.async
};

// How a row of sparse attention's caches is stored.
enum class RowFormat : int32_t {
  kBFloat16,   // 512 elements, and 64 of rope or none
  kScaledFp8,  // 512 e4m3, 4 float32 scales, and 64 bfloat16 of rope or none: V3.2
  // 448 e4m3 and 64 bfloat16; behind all rows of a page 8 bytes for each, 7 powers of two (ue8m0) and a 0: V4. Values are all 512.
  kPageScaledFp8,
};
constexpr int kPageScaleBytes = 8;

// A list of rows for each token, and the cache that it names them in.
struct RowList {
  const char* rows;     // the cache's first
  int64_t page_stride;  // bytes
  int64_t row_stride;   // bytes; of V4's rows 576, to the next row's data
  cutlass::FastDivmod page_size;
  int32_t pages;
  uint32_t row_count;      // that a physical index may name
  const int32_t* indices;  // [tokens, width]: physical rows, or, with a block table, positions in the token's request
  int64_t index_stride;
  const int32_t* counts;       // [tokens], entries that count; null: all
  const int32_t* block_table;  // [requests, max_pages], null: none
  int64_t block_table_stride;
  int32_t requests;
  int32_t max_pages;
  int32_t width;  // 0: there is no list, and the rest means nothing
};

// Where partitions begin and end in the sequence of tokens: see decode/cta/token_splits.h.
struct TokenDivision {
  int32_t tokens;
  int32_t partitions;
  cutlass::FastDivmod step_tokens;  // a partition decodes step_tokens / step_parts tokens
  cutlass::FastDivmod step_parts;
};

struct SparseParams {
  RowList lists[2];  // one softmax over both
  RowFormat format;  // of the rows of both caches
  int32_t row_bytes;
  const int32_t* request_ids;  // [tokens], rows of the block tables; null where there are none
  int32_t partition_tiles;  // of the longest partition, if all entries count
};

// How a partial result lies in memory, so that copies are wide and coalesced: see `partial_out`.
enum class PartialLayout : uint8_t {
  kColumns,            // O^T as WGMMA's registers hold it, float32
  kPairedColumns,      // the same, but rows r and r + 8 of WGMMA's 16 are value dims 2r and 2r + 1
  kHalfPairedColumns,  // and bfloat16: of products of e4m3, whose own rounding is the coarser
  kRows,               // O = P·V as WGMMA's registers hold it, float32
};

// What a dense call decodes. Where requests share prefixes (schedule/shared_prefixes.h), one call decodes stacks, each a request of one
// token whose rows are those of its members, and another one the tiles that requests have of their own.
enum class CallOf : uint8_t { kRequests, kStacks, kOwnTiles };

// What decode kernels and the combination behind them share: how the work is divided, where partial results lie, where results go. The
// combination is given no more, because a kernel waits when it first reads each 64 bytes of its parameters.
struct ResultParams {
  // [slots, row_groups, 8 slices of 64 value dims, row_tile / 8 column blocks, 128 threads, 4], as `partials` says
  float* partial_out;
  float* partial_lse;                      // [slots, row_groups, row_tile], log2
  const WorkRange* work_ranges = nullptr;  // [partitions]; of sparse attention none
  int32_t batch;
  int32_t partitions;
  int32_t rows;        // s_q * heads
  int32_t row_tile;    // 8, 16, 32 or 64
  int32_t row_groups;  // ceil(rows / row_tile)
  float empty_lse;     // of rows that see no token; partial_lse has -inf of them
  bool float16_out;    // else bfloat16
  // Schedule, lengths, block table, kv_scale and the cache's rows of all but the last s_q tokens are older than the kernel before this
  // one: they are read before that has ended. Of whole tiles of dense attention alone.
  bool early_loads = false;
  PartialLayout partials = PartialLayout::kColumns;  // the decode kernel's
  CallOf call_of = CallOf::kRequests;
  int32_t last_slot = 0;     // of the workspace; of a dense call
  void* out;                 // [batch, rows, 512]; strides in elements, of a dense call contiguous
  int64_t out_stride_batch;
  int64_t out_stride_row;
  float* lse;                    // [batch, rows], natural log
  const float* sinks = nullptr;  // [heads], null: none; natural logarithms; of sparse attention
  TokenDivision division = {};   // of sparse attention; of a dense call no partitions
};

struct DecodeParams : ResultParams {
  const void* q;       // [batch, s_q, heads, 512 or 576]
  const void* q_rope;  // [batch, s_q, heads, 64]
  int64_t q_stride_batch;
  int64_t q_stride_token = 0;
  int64_t q_stride_head;
  int64_t q_rope_stride_batch;
  int64_t q_rope_stride_token = 0;
  int64_t q_rope_stride_head;
  const int32_t* block_table = nullptr;  // [batch, max_pages]
  int64_t block_table_stride = 0;
  const int32_t* seq_lens = nullptr;       // [batch]
  const int32_t* split_offsets = nullptr;  // [batch + 1]
  const int32_t* first_tiles = nullptr;    // [batch], of a call of own tiles alone: where they begin
  int32_t s_q;
  int32_t heads;
  cutlass::FastDivmod parts_per_page = {};
  float scale_log2;  // softmax scale * log2(e)
  // For an FP8 cache alone: what its values and those of e4m3 queries are multiplied with (null: 1), and what the queries are.
  const float* kv_scale = nullptr;
  const float* q_scale = nullptr;
  QueryType query_type;
  // Of a row's number within its member, in a call of stacks; rows fill tiles, so they are powers of two. Here, since the compiler reads
  // them in every call.
  uint8_t member_row_bits = 0;
  uint8_t member_head_bits = 0;
  int32_t max_pages = 0;
  // Dense attention alone.
  PagedCache cache = {};
  KeyLoad key_load = KeyLoad::kTiles;
  RowSteps latent_steps = {};
  RowSteps rope_steps = {};
  int32_t part_tokens = kTileTokens;  // that are copied together: 64, 32, 16 or, row by row, 1
  // Sparse attention alone, where each query token is a request of its own, and no schedule divides the work: there are no
  // work_ranges, split_offsets, seq_lens and block_table.
  SparseParams sparse = {};
  // Of a call of stacks alone.
  const int32_t* members = nullptr;      // [batch, stack_places], requests of q and block_table, -1: none
  const int32_t* stack_count = nullptr;  // of this step
  int32_t stack_places = 0;              // members that a stack has room for
  int32_t requests = 0;                  // of q and block_table
};

// Partial results as the merge of a call with shared prefixes reads them: of stacks, or of what requests have of their own.
struct PartialRuns {
  const float* out;
  const float* lse;
  const int32_t* offsets;  // [stacks or requests, + 1], of the slots
  int32_t slots;
  int32_t slot_rows;
  int32_t row_tile;
  PartialLayout layout;
};

struct MergeParams {
  PartialRuns runs[2];         // of stacks, of requests
  const int32_t* places;       // [batch], a request's place among all stacks' members; -1: none
  const int32_t* stack_count;  // of this step
  int32_t stack_places;
  int32_t batch;
  int32_t rows;
  float empty_lse;
  bool float16_out;
  void* out;   // [batch, rows, 512]
  float* lse;  // [batch, rows]
};

// The query rows as TMA sees them, when their heads fill row tiles: (64 columns, heads, query tokens, column chunks,
// requests); a copy takes a row tile.
struct QueryMaps {
  CUtensorMap latent;
  CUtensorMap rope;
  bool usable;
};

}  // namespace etap

// Query rows as they are, beside a cache or lists of their own type. One producer warp copies those of each split with TMA, or,
// where their strides allow no tensor map, three warps gather them (one where pages are small); the rows of lists the consumers
// gather.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "decode/cta/splits.cuh"
#include "decode/layouts/common.h"

namespace etap {

// Query rows whose heads fill row tiles are one TMA copy of the latent part and one of the rope part. Asked for before the
// split's length is known: behind the first tiles of the cache they would arrive up to 5 us later.
template <class T>
CUTE_DEVICE void copy_queries(Shared<T>& shared, const DecodeParams& params, const QueryMaps& maps, int partition,
                              int row_group) {
  const int token = row_group * T::kRowTile / params.heads;
  const int head = row_group * T::kRowTile - token * params.heads;
  RingPosition<1> at;
  SplitWalk walk(params, partition);
  if (params.early_loads) ETAP_MARKED(queries_wait, cudaGridDependencySynchronize());
  for (; !walk.done(); walk.skip(), at.advance(1)) {
    shared.queries.acquire(at);
    if (threadIdx.x % kWarpSize != 0) continue;
    shared.queries.expect_bytes(at, T::kQueryBytes);
    const auto copy = [&](const CUtensorMap& map, int first_chunk) {
      cute::SM90_TMA_LOAD_5D::copy(&map, shared.queries.full_barrier(at),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   &item<typename T::QueryChunk>(shared.query, first_chunk), 0, head, token, 0,
                                   walk.request());
    };
    copy(maps.latent, 0);
    copy(maps.rope, kValueChunks);
  }
  shared.queries.acquire(at);  // a wait that traps, if consumers are stuck in the last split
}

// Copies a query row with cp.async, 16 bytes a lane, into the swizzle that WGMMA's operand B reads. A lane has two units of the
// latent part, and each of the first eight lanes one of rope. The pointers are this lane's first units. A row that does not exist
// becomes zeros.
template <class T>
CUTE_DEVICE void copy_query_row(Shared<T>& shared, int row, const typename T::Element* latent, const typename T::Element* rope,
                                bool exists) {
  using Element = typename T::Element;
  constexpr int kUnitColumns = kUnitBytes / sizeof(Element);
  constexpr int kUnitsPerChunk = kChunkColumns / kUnitColumns;
  constexpr int kLatentUnits = kLatentDim / kUnitColumns;
  constexpr int kChunkBytes = sizeof(typename T::QueryChunk);
  const int lane = threadIdx.x % kWarpSize;
  const int unit = lane % kUnitsPerChunk ^ swizzle<kChunkColumns * sizeof(Element)>(row);
  const uint32_t to = cute::cast_smem_ptr_to_uint(shared.query) + lane / kUnitsPerChunk * kChunkBytes +
                      (row * kUnitsPerChunk + unit) * kUnitBytes;
  CUTE_UNROLL
  for (int u = 0; u < kLatentUnits; u += kWarpSize) {
    ptx::copy_async_16(to + u / kUnitsPerChunk * kChunkBytes, reinterpret_cast<uint64_t>(latent + u * kUnitColumns), exists);
  }
  if (T::kTileChunks > kValueChunks && lane < kUnitsPerChunk) {
    ptx::copy_async_16(to + kValueChunks * kChunkBytes, reinterpret_cast<uint64_t>(rope), exists);
  }
}

// This lane's first units of a request's query rows, latent and rope.
template <class T>
struct QueryPointers {
  using Element = typename T::Element;
  static constexpr int kUnitColumns = kUnitBytes / sizeof(Element);

  const Element *latent, *rope;

  CUTE_DEVICE QueryPointers(const DecodeParams& params, int64_t request)
      : latent(static_cast<const Element*>(params.q) + request * params.q_stride_batch + threadIdx.x % kWarpSize * kUnitColumns),
        rope(static_cast<const Element*>(params.q_rope) + request * params.q_rope_stride_batch + threadIdx.x % kWarpSize * kUnitColumns) {}
};

// Whether a kernel decodes stacks of requests, too (see schedule/shared_prefixes.h and stack_shape): its query rows are then those
// of several requests.
template <class T>
constexpr bool kStacks = !T::kSparse && (T::kRowTile == kMaxRowTile || T::kRowTile == kMaxRowTile / 4);

// Where a query row comes from. A stack's row is one of a member's. Rows of absent members do not exist; of a plan that was built again
// since, for another batch, no request is taken that the call does not have.
struct QueryRow {
  int request;
  int token;
  int head;
  bool exists;

  CUTE_DEVICE QueryRow(int request, int token, int head, bool exists) : request(request), token(token), head(head), exists(exists) {}
  CUTE_DEVICE QueryRow(const DecodeParams& params, int stack, int row) {
    const int member = row >> params.member_row_bits, rest = row & ((1 << params.member_row_bits) - 1);
    const int found = params.members[stack * params.stack_places + member];
    exists = uint32_t(found) < uint32_t(params.requests);
    request = exists ? found : 0;
    token = rest >> params.member_head_bits;
    head = rest & ((1 << params.member_head_bits) - 1);
  }

  CUTE_DEVICE int64_t latent(const DecodeParams& params) const {
    return request * params.q_stride_batch + token * params.q_stride_token + head * params.q_stride_head;
  }
  CUTE_DEVICE int64_t rope(const DecodeParams& params) const {
    return request * params.q_rope_stride_batch + token * params.q_rope_stride_token + head * params.q_rope_stride_head;
  }
};

// Producer warps copy query rows of any strides. A warp takes every kWarps-th row and steps from row to row without a division.
template <class T, int kWarps>
CUTE_DEVICE void gather_queries(Shared<T>& shared, const DecodeParams& params, int partition, int row_group) {
  const int warp = threadIdx.x % kGroupThreads / kWarpSize - 1;
  const int first_token = (row_group * T::kRowTile + warp) / params.heads;
  const int first_head = row_group * T::kRowTile + warp - first_token * params.heads;
  const QueryPointers<T> q(params, 0);
  RingPosition<1> at;
  SplitWalk walk(params, partition);
  if (params.early_loads) ETAP_MARKED(queries_wait, cudaGridDependencySynchronize());
  for (; !walk.done(); walk.skip(), at.advance(1)) {
    int token = first_token;
    int head = first_head;
    shared.queries.acquire(at);
#pragma unroll 1
    for (int row = warp; row < T::kRowTile; row += kWarps) {
      const bool exists = token < params.s_q;  // rows of the tile behind the last one do not
      QueryRow of(walk.request(), exists ? token : 0, exists ? head : 0, exists);
      if (kStacks<T> && params.call_of == CallOf::kStacks) of = QueryRow(params, walk.request(), row);
      copy_query_row<T>(shared, row, q.latent + of.latent(params), q.rope + of.rope(params), of.exists);
      for (head += kWarps; head >= params.heads; head -= params.heads) ++token;
    }
    cute::cp_async_wait<0>();
    cutlass::arch::fence_view_async_shared();  // these writes, for WGMMA
    shared.queries.commit(at);
  }
  shared.queries.acquire(at);  // as copy_queries does
}

// kWarps says how many may gather.
template <class T, int kWarps>
CUTE_DEVICE void load_queries(Shared<T>& shared, const DecodeParams& params, const QueryMaps& maps, int partition,
                              int row_group, WarpRole role) {
  if (!maps.usable) {
    gather_queries<T, kWarps>(shared, params, partition, row_group);
  } else if (role == WarpRole::kQueryProducer) {
    copy_queries<T>(shared, params, maps, partition, row_group);
  }
}

// How a consumer comes by the query rows of its splits. A policy holds what it must between these calls:
//   begin(params, walk, row_group)                   before the first split: where there are lists, goes behind the predecessor's end
//   begin_split(shared, params, request, row_group)  what can be done before the split's length is known
//   await(shared, params, request, row_group)        returns when the rows are there
//   release(shared)                                  this consumer's last scores of the split are done
//   release_unread(shared)                           this consumer has no tile of the split
//   end_split()                                      goes to the next split's rows
//   ask(params, walk, row_group)                     may ask for the next split's rows
// It says what V's values are multiplied with (value_scale), which row group is meant (row_group), and whether the rows come while
// the split's length is on its way (kAheadOfLength).
struct QueryPolicy {
  static constexpr bool kAheadOfLength = false;
  CUTE_DEVICE static float value_scale(const DecodeParams&) { return 1.0f; }
  CUTE_DEVICE static int row_group(const DecodeParams&, int of_cta) { return of_cta; }

  // What a policy does not say does nothing.
  CUTE_DEVICE void begin(const DecodeParams&, SplitWalk&, int) {}
  template <class SharedStorage>
  CUTE_DEVICE void begin_split(SharedStorage&, const DecodeParams&, int, int) {}
  template <class SharedStorage>
  CUTE_DEVICE void await(SharedStorage&, const DecodeParams&, int, int) {}
  template <class SharedStorage>
  CUTE_DEVICE void release(SharedStorage&) {}
  template <class SharedStorage>
  CUTE_DEVICE void release_unread(SharedStorage&) {}
  CUTE_DEVICE void end_split() {}
  template <class Walk>
  CUTE_DEVICE void ask(const DecodeParams&, Walk&, int) {}
};

// Producers bring the rows.
template <class T>
struct ProducedQueries : QueryPolicy {
  RingPosition<1> at;

  CUTE_DEVICE void await(Shared<T>& shared, const DecodeParams&, int, int) { shared.queries.wait(at); }
  CUTE_DEVICE void release(Shared<T>& shared) {
    if (releases()) shared.queries.release(at);
  }
  CUTE_DEVICE void release_unread(Shared<T>& shared) {
    __syncwarp();  // all lanes have seen this round
    release(shared);
  }
  CUTE_DEVICE void end_split() { at.advance(1); }
};

// Both consumers copy the rows of a token of sparse attention: a split begins with that, and 64 rows take one producer warp several
// microseconds. They ask for the rows when they are done with the last split's scores.
template <class T>
struct ListedQueries : QueryPolicy {
  CUTE_DEVICE void begin(const DecodeParams&, typename T::Walk& walk, int) {
    ETAP_MARKED(queries_wait, pdl_wait_then_trigger());
    walk.begin();
  }
  CUTE_DEVICE void begin_split(Shared<T>& shared, const DecodeParams& params, int request, int row_group) {
    const int warp = anew(threadIdx.x) / kWarpSize;
    const QueryPointers<T> q(params, request);
    CUTE_UNROLL
    for (int first = 0; first < T::kRowTile; first += kConsumerWarps) {
      const int head = row_group * T::kRowTile + first + warp;
      const bool exists = head < params.heads;  // rows of the tile behind the last one do not
      copy_query_row<T>(shared, first + warp, exists ? q.latent + head * params.q_stride_head : q.latent,
                        exists ? q.rope + head * params.q_rope_stride_head : q.rope, exists);
    }
  }
  CUTE_DEVICE void await(Shared<T>&, const DecodeParams&, int, int) {
    cute::cp_async_wait<0>();
    // For WGMMA the consumers fence before every product, for the cache's rows too.
    ETAP_MARKED(queries_sync, event::queries_written().sync());
  }
};

template <class T>
using PlainQueries = std::conditional_t<T::kSparse, ListedQueries<T>, ProducedQueries<T>>;

}  // namespace etap

#include "schedule/shared_prefixes.h"

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <numeric>
#include <vector>

#include "common/cuda_check.h"
#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace etap {
namespace {

constexpr int kThreads = 1024;
constexpr int kStackThreads = 256;
constexpr int kPagesAtOnce = 8;     // of a thread that compares
constexpr int kLeastTiles = 8;      // of a stack: fewer are not worth its partial results
constexpr int kMembersShift = 25;  // a stack in one word: kMostTokens are 2^25 tiles
static_assert(kMostTokens / kTileTokens < 1 << kMembersShift && kMaxRowTile < 1 << (32 - kMembersShift));

// Tiles of a request that hold no token of this step. Entries of the block table behind them are not looked at.
__host__ __device__ int old_tiles(const SharedParams& params, int request) {
  const int64_t table = int64_t(params.max_pages) * params.page_size;
  const int64_t most = table < kMostTokens ? table : kMostTokens;
  const int64_t tokens = int64_t(params.seq_lens[request]) - params.s_q;
  return tokens > 0 ? int((tokens < most ? tokens : most) / kTileTokens) : 0;
}

__host__ __device__ const int32_t* pages_of(const SharedParams& params, int request) {
  return params.block_table + request * params.block_table_stride;
}

// Requests with the same leading pages get the same key, and those with more of them neighbouring keys. Where others get it, too, less
// is found.
__host__ __device__ uint64_t key_of(const SharedParams& params, int request) {
  constexpr int kTiles[] = {0, 4, 16, 64, 256}, kBits[] = {16, 12, 12, 12, 12};
  const int tiles = old_tiles(params, request);
  uint64_t key = 0;
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    uint32_t page = 0;
    if (kTiles[i] < tiles) page = uint32_t(pages_of(params, request)[int64_t(kTiles[i]) * kTileTokens / params.page_size]) + 1;
    key = key << kBits[i] | page * 0x9e3779b1u >> (32 - kBits[i]);
  }
  return key;
}

// How many pages two requests' old tiles are on, and how many tiles so many of them hold.
__host__ __device__ int old_pages(const SharedParams& params, int tiles) {
  return int((int64_t(tiles) * kTileTokens + params.page_size - 1) / params.page_size);
}
__host__ __device__ int tiles_on(const SharedParams& params, int pages, int most) {
  const int64_t tiles = int64_t(pages) * params.page_size / kTileTokens;
  return tiles < most ? int(tiles) : most;
}

// Forms stacks along a run of places, from its first one on: found(place, members, depth) of each. A member that makes a stack
// shallower joins if the stack saves no less than before; the first two form one unless the second has twice as much in common with
// the third.
template <class Found>
__host__ __device__ void for_each_stack(const SharedParams& params, const int32_t* common, int place, Found&& found) {
  int begin = place, members = 1, depth = 0;
  for (bool more = true; more;) {
    const int shared = ++place < params.batch ? common[place] : 0;
    more = shared >= kLeastTiles;
    const int joined = members == 1 || shared < depth ? shared : depth;
    const bool worth = members == 1 ? place + 1 >= params.batch || common[place + 1] / 2 < shared
                                    : (members + 1) * int64_t(joined) >= members * int64_t(depth);
    if (more && members < params.stack_places && worth) {
      ++members;
      depth = joined;
      continue;
    }
    if (members >= params.least_members) found(begin, members, depth);
    begin = place;
    members = 1;
  }
}

// Whether a run begins there: its second request has enough in common with the first.
__host__ __device__ bool begins_run(const int32_t* common, int place) { return place == 0 || common[place] < kLeastTiles; }

__host__ __device__ uint32_t packed_stack(int members, int depth) { return uint32_t(members) << kMembersShift | uint32_t(depth); }
__host__ __device__ int members_of(uint32_t stack) { return int(stack >> kMembersShift); }
__host__ __device__ int depth_of(uint32_t stack) { return int(stack & ((1u << kMembersShift) - 1)); }

__host__ __device__ void write_unshared(const SharedParams& params, int request) {
  params.plan.own_lens()[request] = params.seq_lens[request];
  params.plan.first_tiles()[request] = 0;
  params.plan.places()[request] = -1;
}

// The stack that begins at `place`.
__host__ __device__ void write_stack(const SharedParams& params, int index, int place, uint32_t stack) {
  const SharedPlan& plan = params.plan;
  plan.stack_lens()[index] = depth_of(stack) * kTileTokens;
  for (int i = 0; i < params.stack_places; ++i) {
    const int at = index * params.stack_places + i;
    const int request = i < members_of(stack) ? plan.order()[place + i] : -1;
    plan.members()[at] = request;
    if (request < 0) continue;
    plan.own_lens()[request] = params.seq_lens[request] - depth_of(stack) * kTileTokens;
    plan.first_tiles()[request] = depth_of(stack);
    plan.places()[request] = at;
  }
}

// One block sorts the requests by key, then by number.
__global__ void __launch_bounds__(kThreads, 1) order_kernel(const __grid_constant__ SharedParams params) {
  __shared__ uint64_t s_keys[kMostShared];
  __shared__ uint16_t s_requests[kMostShared];
  int places = 2;
  while (places < params.batch) places *= 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < places; i += kThreads) {
    s_keys[i] = i < params.batch ? key_of(params, i) : UINT64_MAX;
    s_requests[i] = uint16_t(i);
  }
#pragma unroll 1
  for (int size = 2; size <= places; size *= 2) {
#pragma unroll 1
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < places / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64_t a = s_keys[low], b = s_keys[high];
        const uint16_t of_a = s_requests[low], of_b = s_requests[high];
        const bool greater = a > b || (a == b && of_a > of_b);
        if (greater != ((low & size) == 0)) continue;
        s_keys[low] = b;
        s_keys[high] = a;
        s_requests[low] = of_b;
        s_requests[high] = of_a;
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < params.batch; i += kThreads) params.plan.order()[i] = s_requests[i];
}

// A block compares a place with the one before it, page by page, because equal keys do not tell. Most have no page in common.
__global__ void __launch_bounds__(kThreads, 1) compare_kernel(const __grid_constant__ SharedParams params) {
  __shared__ int s_first[kThreads / kWarpSize];
  const int place = blockIdx.x;
  if (place == 0) {
    if (threadIdx.x == 0) params.plan.common()[0] = 0;
    return;
  }
  const int one = params.plan.order()[place - 1], other = params.plan.order()[place];
  const int tiles = min(old_tiles(params, one), old_tiles(params, other));
  const int32_t *const of_one = pages_of(params, one), *const of_other = pages_of(params, other);
  const int pages = old_pages(params, tiles);
  int common = tiles > 0 && of_one[0] == of_other[0] ? pages : 0;
#pragma unroll 1
  for (int begin = 0; begin < common; begin += kThreads * kPagesAtOnce) {
    int first = pages;  // that differs
#pragma unroll
    for (int i = kPagesAtOnce - 1; i >= 0; --i) {
      const int page = begin + i * kThreads + threadIdx.x;
      if (page < pages && of_one[page] != of_other[page]) first = page;
    }
    if (!ptx::barrier_any(first < pages, 0, kThreads)) continue;
    first = __reduce_min_sync(0xffffffff, uint32_t(first));
    if (threadIdx.x % kWarpSize == 0) s_first[threadIdx.x / kWarpSize] = first;
    __syncthreads();
    common = __reduce_min_sync(0xffffffff, uint32_t(s_first[threadIdx.x % kWarpSize]));
  }
  static_assert(kThreads == kWarpSize * kWarpSize);
  if (threadIdx.x == 0) params.plan.common()[place] = tiles_on(params, common, tiles);
}

// One block forms the stacks: a thread for each run, since a stack's members depend on those of the stack before.
__global__ void __launch_bounds__(kStackThreads, 1) stack_kernel(const __grid_constant__ SharedParams params) {
  using Scan = cub::BlockScan<int64_t, kStackThreads>;
  constexpr int kCountShift = 48;  // stacks and their members' tiles, packed so that one scan counts both
  __shared__ typename Scan::TempStorage storage;
  __shared__ int32_t s_common[kMostShared];
  __shared__ uint32_t s_stacks[kMostShared];  // by the place at which they begin
#pragma unroll 1
  for (int i = threadIdx.x; i < params.batch; i += kStackThreads) {
    s_common[i] = params.plan.common()[i];
    s_stacks[i] = 0;
    write_unshared(params, i);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < params.batch; i += kStackThreads) {
    if (!begins_run(s_common, i)) continue;
    for_each_stack(params, s_common, i, [&](int place, int members, int depth) { s_stacks[place] = packed_stack(members, depth); });
  }
  __syncthreads();
  constexpr int kPlaces = kMostShared / kStackThreads;
  int64_t mine = 0, before, all;
#pragma unroll 1
  for (int i = 0; i < kPlaces; ++i) {
    const int place = threadIdx.x * kPlaces + i;
    const uint32_t stack = place < params.batch ? s_stacks[place] : 0;
    if (stack != 0) mine += (int64_t(1) << kCountShift) + members_of(stack) * int64_t(depth_of(stack));
  }
  Scan(storage).ExclusiveSum(mine, before, all);
  const bool worth = (all & ((int64_t(1) << kCountShift) - 1)) >= params.least_tiles;
  if (threadIdx.x == 0) *params.plan.stack_count() = worth ? int(all >> kCountShift) : 0;
  if (!worth) return;
  int index = int(before >> kCountShift);
#pragma unroll 1
  for (int i = 0; i < kPlaces; ++i) {
    const int place = threadIdx.x * kPlaces + i;
    if (place < params.batch && s_stacks[place] != 0) write_stack(params, index++, place, s_stacks[place]);
  }
}

}  // namespace

void find_stacks_on_device(const SharedParams& params, cudaStream_t stream) {
  order_kernel<<<1, kThreads, 0, stream>>>(params);
  if (params.batch > 0) compare_kernel<<<params.batch, kThreads, 0, stream>>>(params);
  stack_kernel<<<1, kStackThreads, 0, stream>>>(params);
  ETAP_CUDA_CHECK(cudaGetLastError());
}

void find_stacks_on_host(const SharedParams& params) {
  const SharedPlan& plan = params.plan;
  std::vector<uint64_t> keys(params.batch);
  for (int i = 0; i < params.batch; ++i) {
    keys[i] = key_of(params, i);
    write_unshared(params, i);
  }
  std::iota(plan.order(), plan.order() + params.batch, 0);
  std::stable_sort(plan.order(), plan.order() + params.batch, [&](int a, int b) { return keys[a] < keys[b]; });
  for (int place = 0; place < params.batch; ++place) {
    plan.common()[place] = 0;
    if (place == 0) continue;
    const int one = plan.order()[place - 1], other = plan.order()[place];
    const int tiles = std::min(old_tiles(params, one), old_tiles(params, other));
    const int32_t* const pages = pages_of(params, one);
    const int32_t* const differing = std::mismatch(pages, pages + old_pages(params, tiles), pages_of(params, other)).first;
    plan.common()[place] = tiles_on(params, int(differing - pages), tiles);
  }
  std::vector<uint32_t> stacks(params.batch, 0);
  int64_t tiles = 0;
  for (int i = 0; i < params.batch; ++i) {
    if (!begins_run(plan.common(), i)) continue;
    for_each_stack(params, plan.common(), i, [&](int place, int members, int depth) {
      stacks[place] = packed_stack(members, depth);
      tiles += members * int64_t(depth);
    });
  }
  int count = 0;
  for (int place = 0; place < params.batch && tiles >= params.least_tiles; ++place) {
    if (stacks[place] != 0) write_stack(params, count++, place, stacks[place]);
  }
  *plan.stack_count() = count;
}

}  // namespace etap

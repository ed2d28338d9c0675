#include "schedule/schedule.h"

#include <algorithm>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <numeric>
#include <vector>

#include "common/cuda_check.h"
#include "common/ptx.cuh"
#include "common/warp.cuh"
#include "schedule/policies.h"

namespace etap {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
using Scan = cub::BlockScan<int64_t, kThreads>;

// The smallest bound on the tiles of a partition with which `fits(bound)` holds lies in [low, high]; high fits.
// Every warp tries another bound, so that the range shrinks to an eighth with each round.
template <class Fits>
__device__ int64_t smallest_bound(int64_t low, int64_t high, Fits&& fits, int64_t (&s_bound)[kWarps]) {
  const int warp = threadIdx.x / kWarpSize;
  while (low < high) {
    const int64_t bound = low + (high - low) * warp / kWarps;
    const bool fit = fits(bound);
    if (threadIdx.x % kWarpSize == 0) s_bound[warp] = fit ? bound : -1;
    __syncthreads();
    int64_t first_fit = high, last_miss = low - 1;
    for (int w = kWarps - 1; w >= 0; --w) {
      const int64_t tried = low + (high - low) * w / kWarps;
      if (s_bound[w] >= 0) {
        first_fit = tried;
      } else {
        last_miss = max(last_miss, tried);
      }
    }
    low = last_miss + 1;
    high = first_fit;
    __syncthreads();
  }
  return high;
}

// What the schedule of a batch is built from, as a block holds it: thread t has the `chunk` requests from `first` on.
struct Batch {
  const ScheduleParams& params;
  int chunk;
  int first;
  int last;

  __device__ explicit Batch(const ScheduleParams& params) : params(params) {
    chunk = (params.batch + kThreads - 1) / kThreads;
    first = min(int(threadIdx.x) * chunk, params.batch);
    last = min(first + chunk, params.batch);
  }
  __device__ int64_t tiles(int r) const { return tiles_of(params.seq_lens[r]); }
};

// The cost of the heaviest partition among those first, first + step, ... where each gets as many whole requests.
__host__ __device__ int64_t heaviest_whole(const ScheduleParams& params, int first, int step) {
  int64_t heaviest = 0;
#pragma unroll 1
  for (int p = first; p < params.partitions; p += step) {
    const int64_t end = first_counted(p + 1, params.batch, params.partitions);
    int64_t cost = 0;
#pragma unroll 1
    for (int64_t r = first_counted(p, params.batch, params.partitions); r < end; ++r) {
      cost += tiles_of(params.seq_lens[r]) + params.split_cost;
    }
    heaviest = cost > heaviest ? cost : heaviest;
  }
  return heaviest;
}

// tiles_before: those of the requests before the thread's.
__device__ Division choose_division(const Batch& batch, typename Scan::TempStorage& storage, int64_t (&s_bound)[kWarps],
                            int64_t& tiles_before) {
  const ScheduleParams& params = batch.params;
  const bool decides = params.fixed_splits == 0;
  int64_t mine = 0;
#pragma unroll 1
  for (int r = batch.first; r < batch.last; ++r) mine += batch.tiles(r);
  const int64_t heaviest = decides ? heaviest_whole(params, threadIdx.x, kThreads) : 0;
  int64_t tiles;
  Scan(storage).ExclusiveSum(mine, tiles_before, tiles);
  __syncthreads();
  const BatchShape shape = BatchShape::of(params, tiles);
  int64_t own_tiles = 0;
  if (decides && params.batch <= params.partitions) {
    const LeastSplit least = shape.least_split();
    const auto fits = [&](int64_t bound) {
      int64_t wanted = 0;
#pragma unroll 1
      for (int r = threadIdx.x % kWarpSize; r < params.batch; r += kWarpSize) {
        wanted += own_partitions(batch.tiles(r), bound, least);
      }
      return __reduce_add_sync(0xffffffff, uint32_t(wanted)) <= uint32_t(params.partitions);
    };
    // What lies behind the largest bound that is taken need not be searched.
    own_tiles = smallest_bound(shape.least_bound(), shape.most_bound() + 1, fits, s_bound);
  }
  const bool over = heaviest > shape.whole_bound(own_tiles);
  const bool whole = decides && !ptx::barrier_any(over, 0, kThreads);
  return decides ? Division::of_batch(shape, own_tiles, whole) : Division::of_lengths(shape, params.fixed_splits);
}

__host__ __device__ bool is_merged(const ScheduleParams& params, int r) { return params.merged != nullptr && params.merged[r] >= 0; }

// Slots for the partial results of a request in so many splits.
__host__ __device__ int64_t slots_of(const ScheduleParams& params, int r, int64_t splits) {
  return splits > 1 || is_merged(params, r) ? splits : 0;
}

// Partial slots, and the list of split requests for the combination, which merged ones are not in.
__device__ void write_splits(const Batch& batch, const Division& division, int64_t place, typename Scan::TempStorage& storage) {
  const ScheduleParams& params = batch.params;
  constexpr int kCountShift = 32;  // slots and split requests, packed so that one scan counts both
  const auto for_each_request = [&](auto&& visit) {  // with its slots
    int64_t walk = place;
#pragma unroll 1
    for (int r = batch.first; r < batch.last; ++r) {
      const int64_t length = division.length(batch.tiles(r));
      visit(r, slots_of(params, r, division.splits(walk, length)));
      walk += length;
    }
  };
  int64_t packed = 0;
  const auto packed_of = [&](int r, int64_t slots) { return slots + (int64_t(slots > 0 && !is_merged(params, r)) << kCountShift); };
  for_each_request([&](int r, int64_t slots) { packed += packed_of(r, slots); });
  int64_t before, all;
  Scan(storage).ExclusiveSum(packed, before, all);
  for_each_request([&](int r, int64_t slots) {
    params.split_offsets[r] = int32_t(before);
    if (slots > 0 && !is_merged(params, r)) {
      // Lengths that change meanwhile may have more split requests than were counted.
      WorkRange& entry = params.work_ranges[min(int(before >> kCountShift), params.partitions - 1)];
      entry.split_request = r;
      entry.split_slot = int32_t(before);
      entry.split_count = int32_t(slots);
    }
    before += packed_of(r, slots);
  });
  if (threadIdx.x == 0) params.split_offsets[params.batch] = int32_t(all);
}

// r: the request at whose place on the line, or behind it, partition p begins.
__device__ __host__ void write_range(const ScheduleParams& params, const Division& division, int p, int r, int64_t place) {
  const bool next_whole = division.whole() && r < params.batch && place < division.begin(p);
  r += next_whole;
  const int64_t n = r < params.batch ? tiles_of(params.seq_lens[r]) : 0;
  // `place` is of another n where lengths change meanwhile.
  const bool within = r < params.batch && !division.whole();
  const int32_t tile = within ? int32_t(std::min(division.begin_tile(p, place, n), n)) : 0;
  WorkRange& range = params.work_ranges[p];
  range.begin_request = r;
  range.begin_tile = tile;
  range.begin_split = tile > 0 ? int32_t(division.begin_split(p, place)) : 0;
  if (p > 0) {
    params.work_ranges[p - 1].end_request = r;
    params.work_ranges[p - 1].end_tile = tile;
  }
  if (p == params.partitions - 1) {
    range.end_request = params.batch;
    range.end_tile = 0;
  }
}

__global__ void __launch_bounds__(kThreads, 1) schedule_kernel(const __grid_constant__ ScheduleParams given) {
  __shared__ typename Scan::TempStorage storage;
  __shared__ int64_t s_bound[kWarps];
  __shared__ int64_t s_place[kThreads];  // where each thread's first request lies on the line
  ScheduleParams params = given;
  if (given.batch_count != nullptr) params.batch = min(*given.batch_count, given.batch);
  const Batch batch(params);
#pragma unroll 1
  for (int p = threadIdx.x; p < params.partitions; p += kThreads) params.work_ranges[p].split_request = -1;
  int64_t tiles_before;
  const Division division = choose_division(batch, storage, s_bound, tiles_before);

  int64_t place = division.place(batch.first, tiles_before);
  if (division.own()) {
    int64_t length = 0;
#pragma unroll 1
    for (int r = batch.first; r < batch.last; ++r) length += division.length(batch.tiles(r));
    Scan(storage).ExclusiveSum(length, place);
  }
  s_place[threadIdx.x] = place;
  __syncthreads();
  write_splits(batch, division, place, storage);

  // Partition p begins in the last thread's chunk that lies at or before its position.
#pragma unroll 1
  for (int p = threadIdx.x; p < params.partitions; p += kThreads) {
    const int64_t x = division.begin(p);
    int holder = 0;
    for (int step = kThreads / 2; step > 0; step /= 2) {
      const int probe = holder + step;
      if (probe * batch.chunk < params.batch && s_place[probe] <= x) holder = probe;
    }
    int r = holder * batch.chunk;
    int64_t place_r = s_place[holder];
#pragma unroll 1
    for (int64_t next = place_r; r < params.batch; ++r, place_r = next) {
      next = place_r + division.length(batch.tiles(r));
      if (x < next) break;
    }
    write_range(params, division, p, r, place_r);
  }
}

// The smallest bound with which the batch fits on partitions of its own; 0 when it has more requests than partitions, or
// when the batch does not decide.
int64_t own_tiles_on_host(const ScheduleParams& params, const BatchShape& shape) {
  if (params.fixed_splits > 0 || params.batch > params.partitions) return 0;
  const LeastSplit least = shape.least_split();
  for (int64_t bound = shape.least_bound();; ++bound) {
    int64_t wanted = 0;
    for (int r = 0; r < params.batch; ++r) wanted += own_partitions(tiles_of(params.seq_lens[r]), bound, least);
    if (wanted <= params.partitions) return bound;
  }
}

}  // namespace

void build_schedule_on_device(const ScheduleParams& params, cudaStream_t stream) {
  schedule_kernel<<<1, kThreads, 0, stream>>>(params);
  ETAP_CUDA_CHECK(cudaGetLastError());
}

void build_schedule_on_host(const ScheduleParams& given) {
  ScheduleParams params = given;
  if (given.batch_count != nullptr) params.batch = std::min(*given.batch_count, given.batch);
  const int64_t tiles = std::accumulate(params.seq_lens, params.seq_lens + params.batch, int64_t(0),
                                        [](int64_t sum, int32_t seq_len) { return sum + tiles_of(seq_len); });
  const BatchShape shape = BatchShape::of(params, tiles);
  const int64_t own_tiles = own_tiles_on_host(params, shape);
  const bool whole = params.fixed_splits == 0 && heaviest_whole(params, 0, 1) <= shape.whole_bound(own_tiles);
  const Division division = params.fixed_splits > 0 ? Division::of_lengths(shape, params.fixed_splits)
                                                    : Division::of_batch(shape, own_tiles, whole);
  std::vector<int64_t> places(params.batch + 1, 0);
  for (int r = 0; r < params.batch; ++r) places[r + 1] = places[r] + division.length(tiles_of(params.seq_lens[r]));

  int slots = 0, entries = 0;
  for (int p = 0; p < params.partitions; ++p) params.work_ranges[p].split_request = -1;
  for (int r = 0; r < params.batch; ++r) {
    const int64_t of_request = slots_of(params, r, division.splits(places[r], places[r + 1] - places[r]));
    params.split_offsets[r] = slots;
    if (of_request > 0 && !is_merged(params, r)) {
      WorkRange& entry = params.work_ranges[entries++];
      entry.split_request = r;
      entry.split_slot = slots;
      entry.split_count = int(of_request);
    }
    slots += int(of_request);
  }
  params.split_offsets[params.batch] = slots;

  for (int p = 0; p < params.partitions; ++p) {
    const int r = int(std::upper_bound(places.begin() + 1, places.end(), division.begin(p)) - places.begin()) - 1;
    write_range(params, division, p, r, places[r]);
  }
}

}  // namespace etap

#include "schedule/schedule.h"

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <vector>

#include "common/cuda_check.h"

namespace etap {
namespace {

constexpr int kThreads = 512;
using Scan = cub::BlockScan<int64_t, kThreads>;

// One block: thread t holds the `chunk` requests from t * chunk on, and later partitions t, t + kThreads, ...
__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ ScheduleParams params) {
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int64_t s_place[kThreads];  // where each thread's first request lies on the cost line
  cudaGridDependencySynchronize();

  const int chunk = (params.batch + kThreads - 1) / kThreads;
  const int first = min(int(threadIdx.x) * chunk, params.batch);
  const int last = min(first + chunk, params.batch);

  int64_t cost = 0;
  for (int r = first; r < last; ++r) cost += CostLine::cost(params.seq_lens[r]);
  int64_t place, total;
  Scan(scan_storage).ExclusiveSum(cost, place, total);
  s_place[threadIdx.x] = place;
  for (int p = threadIdx.x; p < params.partitions; p += kThreads) params.work_ranges[p].split_request = -1;
  __syncthreads();
  const CostLine line(total, params.partitions);

  // Partial slots and split requests, packed so that one scan counts both.
  constexpr int kCountShift = 32;
  int64_t packed = 0;
  int64_t walk = place;
  for (int r = first; r < last; ++r) {
    const int64_t cost_r = CostLine::cost(params.seq_lens[r]);
    const int64_t pieces = line.pieces(walk, cost_r);
    if (pieces > 1) packed += pieces + (int64_t(1) << kCountShift);
    walk += cost_r;
  }
  int64_t before, all;
  Scan(scan_storage).ExclusiveSum(packed, before, all);
  walk = place;
  for (int r = first; r < last; ++r) {
    const int64_t cost_r = CostLine::cost(params.seq_lens[r]);
    const int64_t pieces = line.pieces(walk, cost_r);
    params.split_offsets[r] = int32_t(before);
    if (pieces > 1) {
      params.work_ranges[before >> kCountShift].split_request = r;
      before += pieces + (int64_t(1) << kCountShift);
    }
    walk += cost_r;
  }
  if (threadIdx.x == 0) params.split_offsets[params.batch] = int32_t(all);

  // Partition p begins in the last thread's chunk that lies at or before its position.
  for (int p = threadIdx.x; p < params.partitions; p += kThreads) {
    const int64_t x = line.begin(p);
    int holder = 0;
    for (int step = kThreads / 2; step > 0; step /= 2) {
      const int probe = holder + step;
      if (probe * chunk < params.batch && s_place[probe] <= x) holder = probe;
    }
    int r = holder * chunk;
    int64_t place_r = s_place[holder];
    for (int64_t next = place_r; r < params.batch; ++r, place_r = next) {
      next = place_r + CostLine::cost(params.seq_lens[r]);
      if (x < next) break;
    }
    const int64_t tile = r < params.batch ? CostLine::tile_at(place_r, x) : 0;
    WorkRange& range = params.work_ranges[p];
    range.begin_request = r;
    range.begin_tile = int32_t(tile);
    range.begin_split = tile > 0 ? int32_t(p - line.owner(place_r)) : 0;
    if (p > 0) {
      params.work_ranges[p - 1].end_request = r;
      params.work_ranges[p - 1].end_tile = int32_t(tile);
    }
    if (p == params.partitions - 1) {
      range.end_request = params.batch;
      range.end_tile = 0;
    }
  }
}

}  // namespace

void build_schedule_on_device(const ScheduleParams& params, cudaStream_t stream) {
  schedule_kernel<<<1, kThreads, 0, stream>>>(params);
  ETAP_CUDA_CHECK(cudaGetLastError());
}

void build_schedule_on_host(const ScheduleParams& params) {
  std::vector<int64_t> places(params.batch + 1, 0);
  for (int r = 0; r < params.batch; ++r) places[r + 1] = places[r] + CostLine::cost(params.seq_lens[r]);
  const CostLine line(places[params.batch], params.partitions);

  int slots = 0, splits = 0;
  for (int p = 0; p < params.partitions; ++p) params.work_ranges[p].split_request = -1;
  for (int r = 0; r < params.batch; ++r) {
    const int64_t pieces = line.pieces(places[r], places[r + 1] - places[r]);
    params.split_offsets[r] = slots;
    if (pieces > 1) {
      params.work_ranges[splits++].split_request = r;
      slots += int(pieces);
    }
  }
  params.split_offsets[params.batch] = slots;

  for (int p = 0; p < params.partitions; ++p) {
    const int64_t x = line.begin(p);
    const int r = int(std::upper_bound(places.begin() + 1, places.end(), x) - places.begin()) - 1;
    const int64_t tile = r < params.batch ? CostLine::tile_at(places[r], x) : 0;
    WorkRange& range = params.work_ranges[p];
    range.begin_request = r;
    range.begin_tile = int32_t(tile);
    range.begin_split = tile > 0 ? int32_t(p - line.owner(places[r])) : 0;
    if (p > 0) {
      params.work_ranges[p - 1].end_request = r;
      params.work_ranges[p - 1].end_tile = int32_t(tile);
    }
  }
  WorkRange& range = params.work_ranges[params.partitions - 1];
  range.end_request = params.batch;
  range.end_tile = 0;
}

}  // namespace etap

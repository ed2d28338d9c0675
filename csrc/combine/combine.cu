#include "combine/combine.h"

#include <cutlass/numeric_types.h>

#include <algorithm>

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"

namespace etap {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 3;                     // of one task that fit beside each other
constexpr int kWideBlocksPerSm = 2;                 // of a task a warp
constexpr int kSlices = kLatentDim / 64;            // of O^T, each 64 value dims by four warps
constexpr int kSliceWarps = 4;
constexpr int kBlockVectors = kSliceWarps * kWarpSize;  // float4s of one slice and column block

// Below every log2-sum-exp, and finite, so that a split that saw no token (-inf) weighs 0 and not NaN.
constexpr float kNoSplit = -1e30f;

// What a lane holds of a partial: two neighbouring rows of the output (columns of O^T), two value dims, 8 apart.
struct Sum {
  float4 value = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void scale(float2 weight) {
    value = {value.x * weight.x, value.y * weight.y, value.z * weight.x, value.w * weight.y};
  }
  __device__ __forceinline__ void add(float2 weight, float4 more) {
    value.x += weight.x * more.x;
    value.y += weight.y * more.y;
    value.z += weight.x * more.z;
    value.w += weight.y * more.w;
  }
};

// Of each of the lane's two rows: a reference at or above every log2-sum-exp seen, and the splits' sum against it.
struct Totals {
  float2 reference = {kNoSplit, kNoSplit};
  float2 sum = {0.0f, 0.0f};

  // Weigh what was summed so far for a reference that may be larger; returns the weight.
  __device__ __forceinline__ float2 raise(float2 maximum) {
    maximum = {fmaxf(reference.x, maximum.x), fmaxf(reference.y, maximum.y)};
    const float2 weight = {ptx::ex2(reference.x - maximum.x), ptx::ex2(reference.y - maximum.y)};
    reference = maximum;
    sum = {sum.x * weight.x, sum.y * weight.y};
    return weight;
  }
};

// Write a lane's part of the result, transposed between the lanes to rows of 8 value dims.
template <class Element>
__device__ __forceinline__ void write_rows(const DecodeParams& params, const Sum& sum, const Totals& totals, int request,
                                           int first_row, int dim) {
  const int lane = threadIdx.x % kWarpSize;
  const float2 scale = {totals.sum.x == 0.0f ? 0.0f : 1.0f / totals.sum.x,
                        totals.sum.y == 0.0f ? 0.0f : 1.0f / totals.sum.y};
  const uint32_t low = pack<Element>(sum.value.x * scale.x, sum.value.y * scale.y);
  const uint32_t high = pack<Element>(sum.value.z * scale.x, sum.value.w * scale.y);
  const uint32_t low_row = ptx::movmatrix_trans(low);
  const uint32_t high_row = ptx::movmatrix_trans(high);
  const int row = first_row + lane / 4;
  if (row >= params.rows) return;
  auto* out = static_cast<uint16_t*>(params.out) + (int64_t(request) * params.rows + row) * kLatentDim + dim;
  if (params.paired_dims) {
    store_dims<true>(out + lane % 4 * 4, low_row, high_row);
  } else {
    store_dims<false>(out + lane % 4 * 2, low_row, high_row);
  }
}

__device__ __forceinline__ void write_lse(const DecodeParams& params, const Totals& totals, int request, int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + lane * 2;
  float* lse = params.lse + int64_t(request) * params.rows + row;
  const auto natural = [](float reference, float sum) {
    return sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
  };
  if (lane < 4 && row < params.rows) lse[0] = natural(totals.reference.x, totals.sum.x);
  if (lane < 4 && row + 1 < params.rows) lse[1] = natural(totals.reference.y, totals.sum.y);
}

// Where a lane finds its part of a task's first partial, and how far the next split's lies.
struct Source {
  const float4* value;
  const float2* lse;
  int64_t value_stride;
  int64_t lse_stride;
  int splits;
};

// Sum splits first, first + step, ... of kTasks tasks, whose values lie at task_offset. kAhead splits are in flight, their
// log-sum-exps with them: nothing waits for anything but memory.
template <int kAhead, int kTasks>
__device__ __forceinline__ Totals sum_splits(const Source& from, const int (&task_offset)[kTasks], int first, int step,
                                             Sum (&sums)[kTasks]) {
  Totals totals;
#pragma unroll 1
  for (int split = first; split < from.splits; split += step * kAhead) {
    float2 lse[kAhead];
    float4 value[kAhead][kTasks];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = split + a * step;
      lse[a] = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
      if (at < from.splits) lse[a] = from.lse[at * from.lse_stride];
#pragma unroll
      for (int t = 0; t < kTasks; ++t) {
        value[a][t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < from.splits) value[a][t] = from.value[at * from.value_stride + task_offset[t]];
      }
    }
    float2 maximum = lse[0];
#pragma unroll
    for (int a = 1; a < kAhead; ++a) maximum = {fmaxf(maximum.x, lse[a].x), fmaxf(maximum.y, lse[a].y)};
    const float2 rescale = totals.raise(maximum);
#pragma unroll
    for (int t = 0; t < kTasks; ++t) sums[t].scale(rescale);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const float2 weight = {ptx::ex2(lse[a].x - totals.reference.x), ptx::ex2(lse[a].y - totals.reference.y)};
      totals.sum = {totals.sum.x + weight.x, totals.sum.y + weight.y};
#pragma unroll
      for (int t = 0; t < kTasks; ++t) sums[t].add(weight, value[a][t]);
    }
  }
  return totals;
}

constexpr int kFewSplits = 8;

// What the warps of a block hold of the splits they divided among them.
template <int kTasks>
struct Shares {
  Sum sums[kWarps][kTasks][kWarpSize];
  Totals totals[kWarps][kWarpSize];

  // One task's sum over all warps.
  __device__ __forceinline__ Totals merge(int task, Sum& sum) const {
    const int lane = threadIdx.x % kWarpSize;
    Totals all;
    float2 maximum = totals[0][lane].reference;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      maximum = {fmaxf(maximum.x, totals[w][lane].reference.x), fmaxf(maximum.y, totals[w][lane].reference.y)};
    }
    all.reference = maximum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Totals share = totals[w][lane];
      const float2 weight = {ptx::ex2(share.reference.x - maximum.x), ptx::ex2(share.reference.y - maximum.y)};
      all.sum = {all.sum.x + weight.x * share.sum.x, all.sum.y + weight.y * share.sum.y};
      sum.add(weight, sums[w][task][lane].value);
    }
    return all;
  }
};

// A task is 8 rows x 16 value dims of a split request. A block takes kTasks tasks of the same rows (8, or 1 where few
// requests can be split and blocks are what is wanted). With few splits each warp sums its own task; with many the warps
// divide the splits and sum all tasks. The grid is (steps of a request, requests).
template <class Element, int kTasks>
__global__ void __launch_bounds__(kWarps* kWarpSize, kTasks == 1 ? kBlocksPerSm : kWideBlocksPerSm)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kAhead = kTasks == 1 ? 4 : 1;
  __shared__ Shares<kTasks> shared;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int blocks_per_group = params.row_tile / 8;
  const int first_task = blockIdx.x * kTasks;
  const int row_block = first_task / (kSliceWarps * kSlices);
  const int group = row_block / blocks_per_group;
  const int block = row_block % blocks_per_group;
  const auto offset = [&](int task) {
    return task / kSliceWarps % kSlices * blocks_per_group * kBlockVectors + task % kSliceWarps * kWarpSize;
  };
  Source from;
  from.lse_stride = int64_t(params.row_groups) * params.row_tile / 2;
  from.value_stride = int64_t(params.row_groups) * params.row_tile * kLatentDim / 4;
  const auto* lse = reinterpret_cast<const float2*>(params.partial_lse) + (group * params.row_tile + block * 8) / 2 + lane % 4;
  const auto* value = reinterpret_cast<const float4*>(params.partial_out) +
                      (group * kSlices * blocks_per_group + block) * kBlockVectors + lane;
  const int entries = min(params.batch, params.partitions);
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();

  for (int i = blockIdx.y; i < entries; i += gridDim.y) {
    const WorkRange& entry = params.work_ranges[i];
    const int request = entry.split_request;
    if (request < 0) return;
    from.splits = entry.split_pieces;
    from.lse = lse + entry.split_slot * from.lse_stride;
    from.value = value + entry.split_slot * from.value_stride;
    Totals totals;
    Sum sum[1];
    if (kTasks > 1 && from.splits <= kFewSplits) {
      totals = sum_splits<kFewSplits>(from, {offset(first_task + warp)}, 0, 1, sum);
    } else {
      Sum sums[kTasks];
      int offsets[kTasks];
#pragma unroll
      for (int t = 0; t < kTasks; ++t) offsets[t] = offset(first_task + t);
      const Totals share = sum_splits<kAhead>(from, offsets, warp, kWarps, sums);
      __syncthreads();  // the last entry's shares are read
      shared.totals[warp][lane] = share;
#pragma unroll
      for (int t = 0; t < kTasks; ++t) shared.sums[warp][t][lane] = sums[t];
      __syncthreads();
      if (warp < kTasks) totals = shared.merge(warp, sum[0]);
    }
    if (warp >= kTasks) continue;
    const int task = first_task + warp;
    const int first_row = group * kMaxRowTile + block * 8;
    const int slice = task / kSliceWarps % kSlices;
    const int quarter = task % kSliceWarps;
    write_rows<Element>(params, sum[0], totals, request, first_row, slice * 64 + quarter * 16);
    if (slice == 0 && quarter == 0) write_lse(params, totals, request, first_row);
  }
}

}  // namespace

template <class Element>
void launch_combine(const DecodeParams& params, cudaStream_t stream) {
  const int requests = std::min(params.batch, params.partitions);  // at most so many are split
  const int tasks = params.row_groups * params.row_tile / 8 * kSlices * kSliceWarps;
  const int multiprocessors = params.partitions * params.row_groups;
  const bool wide = requests * tasks > kBlocksPerSm * multiprocessors;
  const int steps = wide ? tasks / kWarps : tasks;
  const int fitting = std::max((wide ? kWideBlocksPerSm : kBlocksPerSm) * multiprocessors / steps, 1);
  auto* kernel = wide ? combine_kernel<Element, kWarps> : combine_kernel<Element, 1>;
  launch_overlapping(kernel, dim3(steps, std::min(requests, fitting)), kWarps * kWarpSize, 0, stream, params);
}

template void launch_combine<cutlass::bfloat16_t>(const DecodeParams&, cudaStream_t);
template void launch_combine<cutlass::half_t>(const DecodeParams&, cudaStream_t);

}  // namespace etap

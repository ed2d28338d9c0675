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

// What a lane holds of a partial: two neighbouring rows of the output (columns of O^T), two value dims, 8 apart.
struct Sum {
  float4 value = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void add(float2 weight, float4 more) {
    value.x += weight.x * more.x;
    value.y += weight.y * more.y;
    value.z += weight.x * more.z;
    value.w += weight.y * more.w;
  }
};

// The largest log2-sum-exp of each of the lane's two rows (0 where no split saw a token), and the splits' sum against it.
struct Totals {
  float2 reference;
  float2 sum;
};

// Lanes of equal lane % 4 have the same rows and share their splits.
__device__ __forceinline__ Totals reduce_lse(const float2* lse, int64_t stride, int splits) {
  const int first = threadIdx.x % kWarpSize / 4;
  float2 maximum = {-INFINITY, -INFINITY};
  for (int i = first; i < splits; i += kWarpSize / 4) {
    maximum.x = fmaxf(maximum.x, lse[i * stride].x);
    maximum.y = fmaxf(maximum.y, lse[i * stride].y);
  }
  for (int lanes = kWarpSize / 2; lanes >= 4; lanes /= 2) {
    maximum.x = fmaxf(maximum.x, __shfl_xor_sync(0xffffffff, maximum.x, lanes));
    maximum.y = fmaxf(maximum.y, __shfl_xor_sync(0xffffffff, maximum.y, lanes));
  }
  Totals totals{{maximum.x == -INFINITY ? 0.0f : maximum.x, maximum.y == -INFINITY ? 0.0f : maximum.y}, {0.0f, 0.0f}};
  for (int i = first; i < splits; i += kWarpSize / 4) {
    totals.sum.x += ptx::ex2(lse[i * stride].x - totals.reference.x);
    totals.sum.y += ptx::ex2(lse[i * stride].y - totals.reference.y);
  }
  for (int lanes = kWarpSize / 2; lanes >= 4; lanes /= 2) {
    totals.sum.x += __shfl_xor_sync(0xffffffff, totals.sum.x, lanes);
    totals.sum.y += __shfl_xor_sync(0xffffffff, totals.sum.y, lanes);
  }
  return totals;
}

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
  auto* out = static_cast<Element*>(params.out) + (int64_t(request) * params.rows + row) * kLatentDim + dim + lane % 4 * 2;
  *reinterpret_cast<uint32_t*>(out) = low_row;
  *reinterpret_cast<uint32_t*>(out + 8) = high_row;
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

// Sum splits first, first + kStep, ... of kTasks tasks, whose values lie at task_offset; kAhead splits are in flight.
template <int kTasks, int kStep, int kAhead>
__device__ __forceinline__ void sum_splits(const Source& from, const int (&task_offset)[kTasks], int first,
                                           float2 reference, Sum (&sums)[kTasks]) {
  for (int split = first; split < from.splits; split += kStep * kAhead) {
    float2 lse[kAhead];
    float4 value[kAhead][kTasks];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = split + a * kStep;
      lse[a] = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
      if (at < from.splits) lse[a] = from.lse[at * from.lse_stride];
#pragma unroll
      for (int t = 0; t < kTasks; ++t) {
        value[a][t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < from.splits) value[a][t] = from.value[at * from.value_stride + task_offset[t]];
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const float2 weight = {ptx::ex2(lse[a].x - reference.x), ptx::ex2(lse[a].y - reference.y)};
#pragma unroll
      for (int t = 0; t < kTasks; ++t) sums[t].add(weight, value[a][t]);
    }
  }
}

constexpr int kFewSplits = 4;

// All of up to kFewSplits splits at once: each lane weighs its rows itself, nothing waits for anything but memory.
__device__ __forceinline__ Totals sum_few_splits(const Source& from, int offset, Sum& sum) {
  float2 lse[kFewSplits];
  float4 value[kFewSplits];
#pragma unroll
  for (int i = 0; i < kFewSplits; ++i) {
    lse[i] = make_float2(-INFINITY, -INFINITY);
    value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < from.splits) lse[i] = from.lse[i * from.lse_stride];
    if (i < from.splits) value[i] = from.value[i * from.value_stride + offset];
  }
  float2 maximum = lse[0];
#pragma unroll
  for (int i = 1; i < kFewSplits; ++i) maximum = {fmaxf(maximum.x, lse[i].x), fmaxf(maximum.y, lse[i].y)};
  Totals totals{{maximum.x == -INFINITY ? 0.0f : maximum.x, maximum.y == -INFINITY ? 0.0f : maximum.y}, {0.0f, 0.0f}};
#pragma unroll
  for (int i = 0; i < kFewSplits; ++i) {
    const float2 weight = {ptx::ex2(lse[i].x - totals.reference.x), ptx::ex2(lse[i].y - totals.reference.y)};
    totals.sum.x += weight.x;
    totals.sum.y += weight.y;
    sum.add(weight, value[i]);
  }
  return totals;
}

// A task is 8 rows x 16 value dims of a split request. A block takes kTasks tasks of the same rows (8, or 1 where few
// requests can be split and blocks are what is wanted). With few splits each warp sums its own task; with many the warps
// divide the splits and sum all tasks.
template <class Element, int kTasks>
__global__ void __launch_bounds__(kWarps* kWarpSize, kTasks == 1 ? kBlocksPerSm : kWideBlocksPerSm)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kAhead = kTasks == 1 ? 4 : 1;
  __shared__ Sum s_sum[kWarps][kTasks][kWarpSize];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int blocks_per_group = params.row_tile / 8;
  const int row_blocks = params.row_groups * blocks_per_group;
  const int request_steps = row_blocks * kSlices * kSliceWarps / kTasks;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();

  for (int step = blockIdx.x; step < params.partitions * request_steps; step += gridDim.x) {
    const WorkRange& entry = params.work_ranges[step / request_steps];
    const int request = entry.split_request;
    if (request < 0) return;
    const int first_task = step % request_steps * kTasks;
    const int row_block = first_task / (kSliceWarps * kSlices);
    const int group = row_block / blocks_per_group;
    const int block = row_block % blocks_per_group;
    Source from;
    from.splits = entry.split_pieces;
    from.lse_stride = int64_t(params.row_groups) * params.row_tile / 2;
    from.value_stride = int64_t(params.row_groups) * params.row_tile * kLatentDim / 4;
    from.lse = reinterpret_cast<const float2*>(params.partial_lse) + entry.split_slot * from.lse_stride +
               (group * params.row_tile + block * 8) / 2 + lane % 4;
    from.value = reinterpret_cast<const float4*>(params.partial_out) + entry.split_slot * from.value_stride +
                 (group * kSlices * blocks_per_group + block) * kBlockVectors + lane;
    const auto offset = [&](int task) {
      const int slice = task / kSliceWarps % kSlices;
      return slice * blocks_per_group * kBlockVectors + task % kSliceWarps * kWarpSize;
    };

    Totals totals;
    Sum sum;
    if (kTasks > 1 && from.splits <= kFewSplits) {
      totals = sum_few_splits(from, offset(first_task + warp), sum);
    } else {
      totals = reduce_lse(from.lse, from.lse_stride, from.splits);
      Sum sums[kTasks];
      int offsets[kTasks];
#pragma unroll
      for (int t = 0; t < kTasks; ++t) offsets[t] = offset(first_task + t);
      sum_splits<kTasks, kWarps, kAhead>(from, offsets, warp, totals.reference, sums);
      __syncthreads();  // the last step's sums are read
#pragma unroll
      for (int t = 0; t < kTasks; ++t) s_sum[warp][t][lane] = sums[t];
      __syncthreads();
      if (warp < kTasks) {
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum.add({1.0f, 1.0f}, s_sum[other][warp][lane].value);
      }
    }
    if (warp >= kTasks) continue;
    const int task = first_task + warp;
    const int first_row = group * kMaxRowTile + block * 8;
    const int slice = task / kSliceWarps % kSlices;
    const int quarter = task % kSliceWarps;
    write_rows<Element>(params, sum, totals, request, first_row, slice * 64 + quarter * 16);
    if (slice == 0 && quarter == 0) write_lse(params, totals, request, first_row);
  }
}

}  // namespace

template <class Element>
void launch_combine(const DecodeParams& params, cudaStream_t stream) {
  const int requests = std::min(params.batch, params.partitions);  // at most so many are split
  const int tasks = requests * params.row_groups * params.row_tile / 8 * kSlices * kSliceWarps;
  const int multiprocessors = params.partitions * params.row_groups;
  const bool wide = tasks > kBlocksPerSm * multiprocessors;
  const int blocks = wide ? std::min(tasks / kWarps, kWideBlocksPerSm * multiprocessors) : tasks;
  auto* kernel = wide ? combine_kernel<Element, kWarps> : combine_kernel<Element, 1>;
  launch_overlapping(kernel, blocks, kWarps * kWarpSize, 0, stream, params);
}

template void launch_combine<cutlass::bfloat16_t>(const DecodeParams&, cudaStream_t);
template void launch_combine<cutlass::half_t>(const DecodeParams&, cudaStream_t);

}  // namespace etap

#include "combine/combine.h"

#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <algorithm>

#include "common/cuda_check.h"
#include "common/ptx.cuh"

namespace etap {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 3;                     // that fit beside each other, unless a row has many splits
constexpr int kSlices = kLatentDim / 64;            // of O^T, each 64 value dims by four warps
constexpr int kSliceWarps = 4;
constexpr int kBlockVectors = kSliceWarps * kWarp;  // float4s of one slice and column block

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
  const int first = threadIdx.x % kWarp / 4;
  float2 maximum = {-INFINITY, -INFINITY};
  for (int i = first; i < splits; i += kWarp / 4) {
    maximum.x = fmaxf(maximum.x, lse[i * stride].x);
    maximum.y = fmaxf(maximum.y, lse[i * stride].y);
  }
  for (int lanes = kWarp / 2; lanes >= 4; lanes /= 2) {
    maximum.x = fmaxf(maximum.x, __shfl_xor_sync(0xffffffff, maximum.x, lanes));
    maximum.y = fmaxf(maximum.y, __shfl_xor_sync(0xffffffff, maximum.y, lanes));
  }
  Totals totals{{maximum.x == -INFINITY ? 0.0f : maximum.x, maximum.y == -INFINITY ? 0.0f : maximum.y}, {0.0f, 0.0f}};
  for (int i = first; i < splits; i += kWarp / 4) {
    totals.sum.x += ptx::ex2(lse[i * stride].x - totals.reference.x);
    totals.sum.y += ptx::ex2(lse[i * stride].y - totals.reference.y);
  }
  for (int lanes = kWarp / 2; lanes >= 4; lanes /= 2) {
    totals.sum.x += __shfl_xor_sync(0xffffffff, totals.sum.x, lanes);
    totals.sum.y += __shfl_xor_sync(0xffffffff, totals.sum.y, lanes);
  }
  return totals;
}

// Splits first, first + step, ... of one lane, kBatch in flight; those behind the last weigh nothing.
template <int kBatch>
struct Partials {
  float4 value[kBatch];
  float2 lse[kBatch];

  __device__ __forceinline__ void load(const float4* value_at, int64_t value_stride, const float2* lse_at,
                                       int64_t lse_stride, int first, int step, int splits) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int split = first + i * step;
      lse[i] = split < splits ? lse_at[split * lse_stride] : make_float2(-INFINITY, -INFINITY);
      value[i] = split < splits ? value_at[split * value_stride] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void add_to(Sum& sum, float2 reference) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sum.add({ptx::ex2(lse[i].x - reference.x), ptx::ex2(lse[i].y - reference.y)}, value[i]);
    }
  }
};

// Write a lane's part of the result, transposed between the lanes to rows of 8 value dims.
template <class Element>
__device__ __forceinline__ void write_rows(const DecodeParams& params, const Sum& sum, const Totals& totals, int request,
                                           int first_row, int dim) {
  const int lane = threadIdx.x % kWarp;
  const float2 scale = {totals.sum.x == 0.0f ? 0.0f : 1.0f / totals.sum.x,
                        totals.sum.y == 0.0f ? 0.0f : 1.0f / totals.sum.y};
  const cutlass::NumericArrayConverter<Element, float, 2> convert;
  const auto low = convert(cutlass::Array<float, 2>{sum.value.x * scale.x, sum.value.y * scale.y});
  const auto high = convert(cutlass::Array<float, 2>{sum.value.z * scale.x, sum.value.w * scale.y});
  const uint32_t low_row = ptx::movmatrix_trans(reinterpret_cast<const uint32_t&>(low));
  const uint32_t high_row = ptx::movmatrix_trans(reinterpret_cast<const uint32_t&>(high));
  const int row = first_row + lane / 4;
  if (row >= params.rows) return;
  auto* out = static_cast<Element*>(params.out) + (int64_t(request) * params.rows + row) * kLatentDim + dim + lane % 4 * 2;
  *reinterpret_cast<uint32_t*>(out) = low_row;
  *reinterpret_cast<uint32_t*>(out + 8) = high_row;
}

__device__ __forceinline__ void write_lse(const DecodeParams& params, const Totals& totals, int request, int first_row) {
  constexpr float kLn2 = 0.6931471805599453f;
  const int lane = threadIdx.x % kWarp;
  const int row = first_row + lane * 2;
  float* lse = params.lse + int64_t(request) * params.rows + row;
  const auto natural = [](float reference, float sum) {
    return sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
  };
  if (lane < 4 && row < params.rows) lse[0] = natural(totals.reference.x, totals.sum.x);
  if (lane < 4 && row + 1 < params.rows) lse[1] = natural(totals.reference.y, totals.sum.y);
}

// A task is 8 rows x 16 value dims of a split request; kTeams warps divide its splits. Blocks take kWarps / kTeams tasks
// at a time until the list of split requests ends.
template <class Element, int kTeams>
__global__ void __launch_bounds__(kWarps* kWarp, kTeams < kWarps ? kBlocksPerSm : 1)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kBlockTasks = kWarps / kTeams;
  __shared__ Sum s_sum[kTeams][kBlockTasks][kWarp];
  const int team = threadIdx.x / kWarp / kBlockTasks;
  const int block_task = threadIdx.x / kWarp % kBlockTasks;
  const int lane = threadIdx.x % kWarp;
  const int row_blocks = params.row_groups * params.row_tile / 8;
  const int request_tasks = row_blocks * kSlices * kSliceWarps;
  const int64_t lse_stride = int64_t(params.row_groups) * params.row_tile / 2;           // of a slot, in float2
  const int64_t value_stride = int64_t(params.row_groups) * params.row_tile * kLatentDim / 4;  // in float4
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();

  for (int task = blockIdx.x * kBlockTasks + block_task; task < params.partitions * request_tasks;
       task += gridDim.x * kBlockTasks) {
    const WorkRange& entry = params.work_ranges[task / request_tasks];
    const int request = entry.split_request;
    if (request < 0) return;
    const int splits = entry.split_pieces;
    const int quarter = task % kSliceWarps;
    const int slice = task / kSliceWarps % kSlices;
    const int row_block = task / (kSliceWarps * kSlices) % row_blocks;
    const int blocks_per_group = params.row_tile / 8;
    const int group = row_block / blocks_per_group;
    const int block = row_block % blocks_per_group;
    const auto* lse = reinterpret_cast<const float2*>(params.partial_lse) + entry.split_slot * lse_stride +
                      (group * params.row_tile + block * 8) / 2 + lane % 4;
    const auto* value = reinterpret_cast<const float4*>(params.partial_out) + entry.split_slot * value_stride +
                        ((group * kSlices + slice) * blocks_per_group + block) * kBlockVectors + quarter * kWarp + lane;

    constexpr int kBatch = kTeams < kWarps ? 4 : 16;
    Partials<kBatch> partials;
    partials.load(value, value_stride, lse, lse_stride, team, kTeams, splits);  // in flight while the weights are summed
    const Totals totals = reduce_lse(lse, lse_stride, splits);
    Sum sum;
    partials.add_to(sum, totals.reference);
    for (int first = team + kBatch * kTeams; first < splits; first += kBatch * kTeams) {
      partials.load(value, value_stride, lse, lse_stride, first, kTeams, splits);
      partials.add_to(sum, totals.reference);
    }
    if constexpr (kTeams > 1) {
      __syncthreads();  // the last task's sums are read
      s_sum[team][block_task][lane] = sum;
      __syncthreads();
#pragma unroll
      for (int other = 1; other < kTeams; ++other) sum.add({1.0f, 1.0f}, s_sum[other][block_task][lane].value);
    }
    const int first_row = group * kMaxRowTile + block * 8;
    if (team == 0) write_rows<Element>(params, sum, totals, request, first_row, slice * 64 + quarter * 16);
    if (team == 0 && slice == 0 && quarter == 0) write_lse(params, totals, request, first_row);
  }
}

}  // namespace

template <class Element>
void launch_combine(const DecodeParams& params, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const int requests = std::min(params.batch, params.partitions);  // at most so many are split
  const int splits = params.partitions / requests;
  const int teams = splits > 16 ? kWarps : splits > 4 ? 2 : 1;
  const int tasks = requests * params.row_groups * params.row_tile / 8 * kSlices * kSliceWarps;
  const int blocks = tasks * teams / kWarps;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(std::min(blocks, kBlocksPerSm * params.partitions * params.row_groups));
  config.blockDim = dim3(kWarps * kWarp);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  auto* kernel = teams == 1   ? combine_kernel<Element, 1>
                 : teams == 2 ? combine_kernel<Element, 2>
                              : combine_kernel<Element, kWarps>;
  ETAP_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

template void launch_combine<cutlass::bfloat16_t>(const DecodeParams&, cudaStream_t);
template void launch_combine<cutlass::half_t>(const DecodeParams&, cudaStream_t);

}  // namespace etap

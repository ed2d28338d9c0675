#include "combine/combine.h"

#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <algorithm>

#include "common/cuda_check.h"
#include "common/ptx.cuh"

namespace etap {
namespace {

constexpr int kThreads = 512;
constexpr int kRowThreads = kLatentDim / 4;  // a thread holds four value dims
constexpr int kTeams = kThreads / kRowThreads;  // each sums every kTeams-th split
constexpr int kMaxSplits = 1024;
constexpr int kWarp = 32;

// Weights of the row's splits into s_weight and the row's log2-sum-exp; every warp computes, the first one writes.
__device__ __forceinline__ float split_weights(const float* lse, int64_t stride, int splits, float* s_weight) {
  const int lane = threadIdx.x % kWarp;
  float maximum = -INFINITY;
  for (int i = lane; i < splits; i += kWarp) maximum = fmaxf(maximum, lse[i * stride]);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, lanes));
  }
  const float reference = maximum == -INFINITY ? 0.0f : maximum;  // a row that saw no token in any split
  float sum = 0.0f;
  for (int i = lane; i < splits; i += kWarp) sum += ptx::ex2(lse[i * stride] - reference);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  const bool empty = sum == 0.0f;
  if (threadIdx.x < kWarp) {
    for (int i = lane; i < splits; i += kWarp) s_weight[i] = empty ? 0.0f : ptx::ex2(lse[i * stride] - reference) / sum;
  }
  return empty ? -INFINITY : reference + log2f(sum);
}

// Tasks are (split request, row); blocks take them in turn until the list of split requests ends.
template <class Element>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ DecodeParams params) {
  __shared__ float s_weight[kMaxSplits];
  __shared__ float4 s_sum[kTeams][kRowThreads];
  constexpr float kLn2 = 0.6931471805599453f;
  const int team = threadIdx.x / kRowThreads;
  const int column = threadIdx.x % kRowThreads;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();

  for (int task = blockIdx.x; task < params.partitions * params.rows; task += gridDim.x) {
    const int request = params.work_ranges[task / params.rows].split_request;
    if (request < 0) return;
    const int row = task % params.rows;
    const int first = params.split_offsets[request];
    const int splits = params.split_offsets[request + 1] - first;
    const int64_t stride = int64_t(params.row_groups) * params.row_tile;  // rows of one slot
    const int64_t place = first * stride + int64_t(row / kMaxRowTile) * params.row_tile + row % kMaxRowTile;
    const float lse = split_weights(params.partial_lse + place, stride, splits, s_weight);
    __syncthreads();

    const auto* partial = reinterpret_cast<const float4*>(params.partial_out + place * kLatentDim) + column;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int split = team; split < splits; split += kTeams) {
      const float weight = s_weight[split];
      const float4 value = partial[split * stride * kRowThreads];
      sum.x += weight * value.x;
      sum.y += weight * value.y;
      sum.z += weight * value.z;
      sum.w += weight * value.w;
    }
    s_sum[team][column] = sum;
    __syncthreads();
    if (team == 0) {
#pragma unroll
      for (int other = 1; other < kTeams; ++other) {
        const float4 value = s_sum[other][column];
        sum.x += value.x;
        sum.y += value.y;
        sum.z += value.z;
        sum.w += value.w;
      }
      const cutlass::NumericArrayConverter<Element, float, 4> convert;
      const auto rounded = convert(reinterpret_cast<const cutlass::Array<float, 4>&>(sum));
      const int64_t out_row = int64_t(request) * params.rows + row;
      reinterpret_cast<uint2*>(static_cast<Element*>(params.out) + out_row * kLatentDim)[column] =
          reinterpret_cast<const uint2&>(rounded);
      if (column == 0) params.lse[out_row] = lse * kLn2;
    }
    __syncthreads();
  }
}

}  // namespace

template <class Element>
void launch_combine(const DecodeParams& params, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  // No more blocks than fit beside each other on the SMs that decode was given.
  config.gridDim = dim3(std::min(params.partitions * params.rows, 4 * params.partitions * params.row_groups));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  ETAP_CUDA_CHECK(cudaLaunchKernelEx(&config, combine_kernel<Element>, params));
}

template void launch_combine<cutlass::bfloat16_t>(const DecodeParams&, cudaStream_t);
template void launch_combine<cutlass::half_t>(const DecodeParams&, cudaStream_t);

}  // namespace etap

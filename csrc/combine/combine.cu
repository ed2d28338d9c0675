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
constexpr int kWarpDims = 4 * kWarp;  // value dims of a warp, four a lane
constexpr int kQuarters = kLatentDim / kWarpDims;
constexpr int kBatch = 4;           // partials a warp has in flight
constexpr int kBlocksPerSm = 4;     // that fit beside each other
struct SplitLse {
  float reference;  // the largest log2-sum-exp, or 0 when no split saw a token
  float sum;        // of the splits' weights against it
};

__device__ __forceinline__ SplitLse reduce_lse(const float* lse, int64_t stride, int splits) {
  const int lane = threadIdx.x % kWarp;
  float maximum = -INFINITY;
  for (int i = lane; i < splits; i += kWarp) maximum = fmaxf(maximum, lse[i * stride]);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, lanes));
  }
  const float reference = maximum == -INFINITY ? 0.0f : maximum;
  float sum = 0.0f;
  for (int i = lane; i < splits; i += kWarp) sum += ptx::ex2(lse[i * stride] - reference);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  return {reference, sum};
}

struct Partials {
  float4 value[kBatch];
  float lse[kBatch];

  // The lane's dims of splits first, first + step, ...; those behind the last weigh nothing.
  __device__ __forceinline__ void load(const float4* value_at, const float* lse_at, int64_t stride, int first, int step,
                                       int splits) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int split = first + i * step;
      lse[i] = split < splits ? lse_at[split * stride] : -INFINITY;
      value[i] = split < splits ? value_at[split * stride * (kLatentDim / 4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  __device__ __forceinline__ void add_to(float4& sum, float reference) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = ptx::ex2(lse[i] - reference);
      sum.x += weight * value[i].x;
      sum.y += weight * value[i].y;
      sum.z += weight * value[i].z;
      sum.w += weight * value[i].w;
    }
  }
};

// Tasks are (split request, row, quarter); kTeams warps divide the splits of one, each reading kBatch at once. Blocks take kWarps / kTeams at a time until the list of split requests ends.
template <class Element, int kTeams>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocksPerSm)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kBlockTasks = kWarps / kTeams;
  constexpr float kLn2 = 0.6931471805599453f;
  __shared__ float4 s_sum[kTeams][kBlockTasks][kWarp];
  const int team = threadIdx.x / kWarp / kBlockTasks;
  const int block_task = threadIdx.x / kWarp % kBlockTasks;
  const int lane = threadIdx.x % kWarp;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();

  const int tasks = params.partitions * params.rows * kQuarters;
  for (int task = blockIdx.x * kBlockTasks + block_task; task < tasks; task += gridDim.x * kBlockTasks) {
    const WorkRange& entry = params.work_ranges[task / (params.rows * kQuarters)];
    if (entry.split_request < 0) return;
    const int row = task / kQuarters % params.rows;
    const int quarter = task % kQuarters;
    const int splits = entry.split_pieces;
    const int64_t stride = int64_t(params.row_groups) * params.row_tile;  // rows of one slot
    const int64_t place = entry.split_slot * stride + int64_t(row / kMaxRowTile) * params.row_tile + row % kMaxRowTile;
    const float* lse = params.partial_lse + place;
    const auto* value = reinterpret_cast<const float4*>(params.partial_out + place * kLatentDim) + quarter * kWarp + lane;

    Partials partials;
    partials.load(value, lse, stride, team, kTeams, splits);  // in flight while the weights are summed
    const SplitLse total = reduce_lse(lse, stride, splits);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = team; first < splits; first += kBatch * kTeams) {
      if (first > team) partials.load(value, lse, stride, first, kTeams, splits);
      partials.add_to(sum, total.reference);
    }
    if constexpr (kTeams > 1) {
      __syncthreads();  // the last task's sums are read
      s_sum[team][block_task][lane] = sum;
      __syncthreads();
    }
    if (team == 0) {
      const bool empty = total.sum == 0.0f;
      const float scale = empty ? 0.0f : 1.0f / total.sum;
#pragma unroll
      for (int other = 1; other < kTeams; ++other) {
        const float4 more = s_sum[other][block_task][lane];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      const cutlass::NumericArrayConverter<Element, float, 4> convert;
      const auto rounded = convert(cutlass::Array<float, 4>{sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale});
      const int64_t out_row = int64_t(entry.split_request) * params.rows + row;
      auto* out = reinterpret_cast<uint2*>(static_cast<Element*>(params.out) + out_row * kLatentDim);
      out[quarter * kWarp + lane] = reinterpret_cast<const uint2&>(rounded);
      if (quarter == 0 && lane == 0) {
        params.lse[out_row] = empty ? -INFINITY : (total.reference + log2f(total.sum)) * kLn2;
      }
    }
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
  const int teams = splits > 4 * kBatch ? kWarps : splits > kBatch ? 2 : 1;
  const int block_tasks = kWarps / teams;
  const int blocks = (requests * params.rows * kQuarters + block_tasks - 1) / block_tasks;
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

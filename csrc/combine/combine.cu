#include "combine/combine.h"

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cfloat>

#include "common/ptx.cuh"
#include "common/warp.cuh"
#include "decode/even_split.h"
#include "decode/sinks.cuh"

namespace etap {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 3;                     // of one task that fit beside each other
constexpr int kWideBlocksPerSm = 2;                 // of a task a warp
constexpr int kSlices = kLatentDim / 64;            // of O^T, each 64 value dims by four warps
constexpr int kSliceWarps = 4;
constexpr int kBlockVectors = kSliceWarps * kWarpSize;  // float4s of one slice and column block

// Below every log2-sum-exp, and finite, so that a split that saw no token (-inf) weighs 0 and not NaN.
constexpr float kNoSplit = -FLT_MAX;

// What a lane holds of a partial: two neighbouring rows of the output (columns of O^T) and two value dims, 8 apart; or,
// where the rows were on WGMMA's M (kOneRow), one row, of which the weights have two copies, and twice two value dims.
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

// What attention sinks leave of a lane's two rows' scale. The rows are a token's heads.
template <bool kOneRow>
__device__ __forceinline__ float2 beside_sinks(const DecodeParams& params, const Totals& totals, int first_row, float2 scale) {
  const int lane = threadIdx.x % kWarpSize;
  const int low = first_row + (kOneRow ? lane / 4 : lane % 4 * 2), high = kOneRow ? low : low + 1;
  if (low < params.rows) scale.x *= beside_sink(params.sinks[low], totals.reference.x + log2f(totals.sum.x));
  if (high < params.rows) scale.y *= beside_sink(params.sinks[high], totals.reference.y + log2f(totals.sum.y));
  return scale;
}

// Write a lane's part of the result, two rows of it transposed between the lanes to rows of 8 value dims.
template <class Element, bool kOneRow, bool kEven>
__device__ __forceinline__ void write_rows(const DecodeParams& params, const Sum& sum, const Totals& totals, int request,
                                           int first_row, int dim) {
  const int lane = threadIdx.x % kWarpSize;
  float2 scale = {totals.sum.x == 0.0f ? 0.0f : 1.0f / totals.sum.x,
                        totals.sum.y == 0.0f ? 0.0f : 1.0f / totals.sum.y};
  if (kEven && params.sinks != nullptr) scale = beside_sinks<kOneRow>(params, totals, first_row, scale);
  uint32_t low = pack<Element>(sum.value.x * scale.x, sum.value.y * scale.y);
  uint32_t high = pack<Element>(sum.value.z * scale.x, sum.value.w * scale.y);
  if constexpr (!kOneRow) {
    low = ptx::movmatrix_trans(low);
    high = ptx::movmatrix_trans(high);
  }
  const int row = first_row + lane / 4;
  auto* out = static_cast<uint16_t*>(params.out) + (int64_t(request) * params.rows + row) * kLatentDim + dim;
  const bool paired = params.paired_dims;
  const uint2 dims = paired ? neighbouring_dims<true>(low, high) : neighbouring_dims<false>(low, high);
  if (row < params.rows) *reinterpret_cast<uint2*>(out + (paired ? lane_dim<true>(lane) : lane_dim<false>(lane))) = dims;
}

template <bool kOneRow>
__device__ __forceinline__ void write_lse(const DecodeParams& params, const Totals& totals, int request, int first_row) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = first_row + (kOneRow ? lane / 4 : lane * 2);
  float* lse = params.lse + int64_t(request) * params.rows + row;
  const auto natural = [](float reference, float sum) {
    return sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
  };
  if ((kOneRow ? lane % 4 == 0 : lane < 4) && row < params.rows) lse[0] = natural(totals.reference.x, totals.sum.x);
  if (!kOneRow && lane < 4 && row + 1 < params.rows) lse[1] = natural(totals.reference.y, totals.sum.y);
}

// Partials as a lane finds them, strides from split to split. There are at most two a partition, which int counts.
struct Partials {
  const float4* value;  // of the first split of the first task
  const float* lse;
  int value_stride;
  int lse_stride;
};

// Splits on their way, log-sum-exps and values, so that nothing waits for anything but memory.
template <int kAhead, bool kOneRow, int kTasks>
struct Flight {
  float2 lse[kAhead];
  float4 value[kAhead][kTasks];

  // Ask for the partials first, first + step, ... before `end`, of kTasks tasks, whose values lie at task_offset.
  __device__ __forceinline__ void load(const Partials& from, const int (&task_offset)[kTasks], int first, int step,
                                       int end) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int at = first + a * step;
      lse[a] = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
      if (at < end) {
        const float* found = from.lse + at * from.lse_stride;
        lse[a] = kOneRow ? make_float2(*found, *found) : *reinterpret_cast<const float2*>(found);
      }
#pragma unroll
      for (int t = 0; t < kTasks; ++t) {
        value[a][t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < end) value[a][t] = from.value[at * from.value_stride + task_offset[t]];
      }
    }
  }

  __device__ __forceinline__ void add_to(Totals& totals, Sum (&sums)[kTasks]) const {
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
};

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

// A split request.
struct Entry {
  int request = -1;
  int slot = 0;
  int splits = 0;

  // The schedule's i-th, request -1 behind the last.
  __device__ __forceinline__ static Entry listed(const DecodeParams& params, int i) {
    Entry entry;
    if (i < min(params.batch, params.partitions)) {
      const WorkRange& row = params.work_ranges[i];
      entry.request = row.split_request;
      entry.slot = row.split_slot;
      entry.splits = entry.request < 0 ? 0 : row.split_pieces;
    }
    return entry;
  }
  // The i-th token that may be split, request -1 where it is not.
  __device__ __forceinline__ static Entry even(const DecodeParams& params, int i) {
    const EvenSplit split(params);
    Entry entry;
    if (i < split.candidates(params.batch) && split.pieces(split.candidate(i)) > 1) {
      entry.request = split.candidate(i);
      entry.slot = split.first_slot(entry.request);
      entry.splits = split.pieces(entry.request);
    }
    return entry;
  }
};

// A task is 8 rows x 16 value dims of a split request. A block takes kTasks tasks of the same rows: 8, or 1 where few
// requests can be split and blocks are what is wanted. All that does not depend on the request is worked out here, before
// the kernel waits for the one that writes the partials.
template <class Element, int kTasks, bool kOneRow, bool kEven>
struct Block {
  const DecodeParams& params;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned lane = threadIdx.x % kWarpSize;
  int first_row;
  int first_dim;
  int slice_stride;  // of partial values, from a task to the one 64 value dims behind it
  Partials partials;

  __device__ __forceinline__ explicit Block(const DecodeParams& params) : params(params) {
    const unsigned blocks_per_group = params.row_tile / 8;
    const unsigned slice = blockIdx.x * kTasks / kSliceWarps % kSlices;
    const unsigned quarter = blockIdx.x * kTasks % kSliceWarps;
    const unsigned rows = blockIdx.x * kTasks / (kSliceWarps * kSlices);
    const unsigned group = rows / blocks_per_group;
    const unsigned row_block = rows % blocks_per_group;
    first_row = anew(group * (kEven ? params.group_rows : kMaxRowTile) + row_block * 8);
    first_dim = anew(slice * 64 + quarter * 16);
    slice_stride = anew(blocks_per_group * kBlockVectors);
    const unsigned vectors = ((group * kSlices + slice) * blocks_per_group + row_block) * kBlockVectors;
    const unsigned value = vectors + quarter * kWarpSize + lane;
    const unsigned lse = group * params.row_tile + row_block * 8 + (kOneRow ? lane / 4 : lane % 4 * 2);
    partials.lse_stride = anew(params.row_groups * params.row_tile);
    partials.value_stride = partials.lse_stride * (kLatentDim / 4);
    partials.value = reinterpret_cast<const float4*>(params.partial_out) + anew(value);
    partials.lse = params.partial_lse + anew(lse);
  }

  // Of the block's task t, beside the first one's.
  __device__ __forceinline__ int offset(unsigned t) const {
    return t / kSliceWarps * slice_stride + t % kSliceWarps * kWarpSize;
  }

  __device__ __forceinline__ void write(int request, const Sum& sum, const Totals& totals) const {
    const int dim = first_dim + warp * 16;
    write_rows<Element, kOneRow, kEven>(params, sum, totals, request, first_row, dim);
    if (dim == 0) write_lse<kOneRow>(params, totals, request, first_row);
  }

  // Those requests that have few splits: each warp sums its own task of all of them, the splits in flight together.
  template <int kEntries>
  __device__ __forceinline__ void sum_alone(const Entry (&all)[kEntries]) const {
    constexpr int kAhead = kFewSplits / kEntries;
    Entry entries[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) entries[e] = all[e].splits > kFewSplits ? Entry() : all[e];
    const int offsets[1] = {offset(warp)};
    Totals totals[kEntries];
    Sum sums[kEntries][1];
#pragma unroll 1
    for (int split = 0; split < most_splits(entries); split += kAhead) {
      Flight<kAhead, kOneRow, 1> flights[kEntries];
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        flights[e].load(partials, offsets, entries[e].slot + split, 1, entries[e].slot + entries[e].splits);
      }
#pragma unroll
      for (int e = 0; e < kEntries; ++e) flights[e].add_to(totals[e], sums[e]);
    }
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (entries[e].request >= 0) write(entries[e].request, sums[e][0], totals[e]);
    }
  }

  // A request of many: the warps divide them and sum all tasks, and add up in shared memory.
  __device__ __forceinline__ void sum_together(const Entry& entry, Shares<kTasks>& shared) const {
    constexpr int kAhead = kTasks == 1 ? 4 : 1;
    const int end = entry.slot + entry.splits;
    int offsets[kTasks];
#pragma unroll
    for (int t = 0; t < kTasks; ++t) offsets[t] = offset(t);
    Totals share;
    Sum sums[kTasks];
#pragma unroll 1
    for (int at = entry.slot + warp; at < end; at += kWarps * kAhead) {
      Flight<kAhead, kOneRow, kTasks> flight;
      flight.load(partials, offsets, at, kWarps, end);
      flight.add_to(share, sums);
    }
    __syncthreads();  // the last entry's shares are read
    shared.totals[warp][lane] = share;
#pragma unroll
    for (int t = 0; t < kTasks; ++t) shared.sums[warp][t][lane] = sums[t];
    __syncthreads();
    if (warp >= kTasks) return;
    Sum sum;
    const Totals totals = shared.merge(warp, sum);
    write(entry.request, sum, totals);
  }

  template <int kEntries>
  __device__ __forceinline__ static int most_splits(const Entry (&entries)[kEntries]) {
    int most = entries[0].splits;
#pragma unroll
    for (int e = 1; e < kEntries; ++e) most = max(most, entries[e].splits);
    return most;
  }
};

// The grid is (steps of a request, requests); a block takes kEntries requests of the list at a time, for memory has a long
// way, and a request after the other would go it each time.
template <class Element, int kTasks, int kEntries, bool kOneRow, bool kEven>
__global__ void __launch_bounds__(kWarps* kWarpSize, kTasks == 1 ? kBlocksPerSm : kWideBlocksPerSm)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kAlone = kTasks > 1 ? kFewSplits : 0;  // most splits of a request that warps sum alone
  __shared__ Shares<kTasks> shared;
  const Block<Element, kTasks, kOneRow, kEven> block(params);
  cudaTriggerProgrammaticLaunchCompletion();

  const auto entry = [&](int i) { return kEven ? Entry::even(params, i) : Entry::listed(params, i); };
  bool waited = false;
  for (int i = blockIdx.y;; i += kEntries * gridDim.y) {
    Entry entries[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) entries[e] = entry(i + e * gridDim.y);
    // The list is older than the decode kernel, which waits for it before it lets this one begin (kernel.cuh; a test holds
    // the order). Reading it behind the wait would be as right, and later.
    if (!waited) cudaGridDependencySynchronize();
    waited = true;
    if (kEven ? i >= EvenSplit(params).candidates(params.batch) : entries[0].request < 0) return;
    // In which way a request is summed follows from its own splits, as its bits do.
    if constexpr (kTasks > 1) block.sum_alone(entries);
    if (block.most_splits(entries) <= kAlone) continue;
#pragma unroll 1
    for (int e = 0; e < kEntries; ++e) {
      const Entry one = entry(i + e * gridDim.y);
      if (one.splits > kAlone) block.sum_together(one, shared);
    }
  }
}

template <class Element, int kTasks, int kEntries, bool kOneRow, bool kEven>
KernelLaunch kernel_launch(dim3 blocks) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(combine_kernel<Element, kTasks, kEntries, kOneRow, kEven>), __PRETTY_FUNCTION__, &handles,
          blocks, kWarps * kWarpSize, 0};
}

template <class Element, bool kOneRow, bool kEven = false>
KernelLaunch prepare(const DecodeParams& params) {
  const int requests = std::min(params.batch, params.partitions);  // at most so many are split
  const int tasks = params.row_groups * params.row_tile / 8 * kSlices * kSliceWarps;
  const int multiprocessors = params.partitions * params.row_groups;
  const bool wide = requests * tasks > kBlocksPerSm * multiprocessors;
  const int steps = wide ? tasks / kWarps : tasks;
  const int fitting = std::max((wide ? kWideBlocksPerSm : kBlocksPerSm) * multiprocessors / steps, 1);
  // As many at a time as a block has. Neither this nor `wide` depends on the batch where partitions are a multiple of it, as
  // in batch-invariant schedules: sums are rounded in another order with each.
  const int rounds = (requests * steps + kWideBlocksPerSm * multiprocessors - 1) / (kWideBlocksPerSm * multiprocessors);
  const dim3 blocks(steps, std::min(requests, fitting));
  if (!wide) return kernel_launch<Element, 1, 1, kOneRow, kEven>(blocks);
  if (rounds == 1) return kernel_launch<Element, kWarps, 1, kOneRow, kEven>(blocks);
  if (rounds == 2) return kernel_launch<Element, kWarps, 2, kOneRow, kEven>(blocks);
  return kernel_launch<Element, kWarps, 4, kOneRow, kEven>(blocks);
}

}  // namespace

KernelLaunch prepare_combine(const DecodeParams& params) {
  if (params.list_tiles > 0) {
    return params.rows_on_lanes ? prepare<cutlass::bfloat16_t, true, true>(params)
                                : prepare<cutlass::bfloat16_t, false, true>(params);
  }
  if (params.float16_out) {
    return params.rows_on_lanes ? prepare<cutlass::half_t, true>(params) : prepare<cutlass::half_t, false>(params);
  }
  return params.rows_on_lanes ? prepare<cutlass::bfloat16_t, true>(params) : prepare<cutlass::bfloat16_t, false>(params);
}

}  // namespace etap

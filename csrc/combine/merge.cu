#include <cutlass/numeric_types.h>

#include <algorithm>

#include "combine/combine.h"
#include "common/sums.cuh"

namespace etap {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 3;
constexpr int kTaskDims = 16;
constexpr int kLaneDims = 4;
constexpr int kAtOnce = 4;  // partial results on their way together

// Where a value of a row tile's partial result lies: see params.h.
CUTE_DEVICE int offset(PartialLayout layout, int row_tile, int row, int dim) {
  const bool rows = layout == PartialLayout::kRows, paired = layout != PartialLayout::kColumns;
  const int eight = paired ? dim % 16 / 2 : dim % 8, half = paired ? dim % 2 : dim % 16 / 8;
  const int lane = rows ? row % 8 * 4 + dim % 8 / 2 : eight * 4 + row % 8 / 2;
  const int value = rows ? dim % 16 / 8 * 2 + dim % 2 : half * 2 + row % 2;
  return ((dim / 64 * (row_tile / 8) + row / 8) * 4 + dim % 64 / kTaskDims) * kWarpSize * 4 + lane * 4 + value;
}

// A run of partial results, of a request or of its stack, as a lane reads it: one row, and four value dims of it.
struct Run {
  const PartialRuns& from;
  int begin;
  int end;
  int row;

  // index: of the stack or request. Of a plan that was built again since no slot is taken that the call does not have.
  CUTE_DEVICE Run(const PartialRuns& from, int index, int row) : from(from), row(row) {
    begin = min(max(from.offsets[index], 0), from.slots);
    end = min(from.offsets[index + 1], from.slots);
  }

  CUTE_DEVICE float lse(int slot) const { return from.lse[int64_t(slot) * from.slot_rows + row]; }

  // Returns how many there are. The lanes of a row divide its log-sum-exps.
  CUTE_DEVICE int raise(float& reference) const {
#pragma unroll 1
    for (int slot = begin + threadIdx.x % 4; slot < end; slot += 4) reference = fmaxf(reference, lse(slot));
    return max(end - begin, 0);
  }

  template <class Value>
  CUTE_DEVICE void add(int dim, float reference, float& total, float (&sum)[kLaneDims]) const {
    const int group = row / from.row_tile, of_group = row - group * from.row_tile;
    const Value* values = reinterpret_cast<const Value*>(from.out) + (int64_t(begin) * from.slot_rows + group * from.row_tile) * kLatentDim;
    int offsets[kLaneDims];
    CUTE_UNROLL
    for (int i = 0; i < kLaneDims; ++i) offsets[i] = offset(from.layout, from.row_tile, of_group, dim + i);
#pragma unroll kAtOnce
    for (int slot = begin; slot < end; ++slot, values += from.slot_rows * kLatentDim) {
      const float weight = ptx::ex2(lse(slot) - reference);
      total = __fadd_rn(total, weight);
      CUTE_UNROLL
      for (int i = 0; i < kLaneDims; ++i) sum[i] = __fmaf_rn(weight, float(values[offsets[i]]), sum[i]);
    }
  }
  CUTE_DEVICE void add_to(int dim, float reference, float& total, float (&sum)[kLaneDims]) const {
    if (from.layout == PartialLayout::kHalfPairedColumns) return add<cutlass::bfloat16_t>(dim, reference, total, sum);
    add<float>(dim, reference, total, sum);
  }
};

CUTE_DEVICE void write(const MergeParams& params, int request, int row, int dim, float reference, float total,
                       const float (&sum)[kLaneDims]) {
  const float scale = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
  const auto pack_out = [&](float a, float b) {
    return params.float16_out ? pack<cutlass::half_t>(a, b) : pack<cutlass::bfloat16_t>(a, b);
  };
  const int64_t at = int64_t(request) * params.rows + row;
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + at * kLatentDim + dim) =
      make_uint2(pack_out(sum[0] * scale, sum[1] * scale), pack_out(sum[2] * scale, sum[3] * scale));
  if (dim > 0) return;
  const float lse = (reference + __log2f(total)) * kLn2;
  params.lse[at] = lse == -INFINITY ? params.empty_lse : lse;
}

// A warp takes 8 rows x 16 value dims of a request in a stack: the stack's partial results, then its own. Other requests were written by
// the decode kernel, or by the combination behind it. Where there is no stack, the next kernel shall not wait for this one: all blocks but
// one end at once, and that one waits for what comes before it, as is_without_stacks does (decode/kernel.cuh). Places and count are
// older than the decode kernels.
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocksPerSm) merge_kernel(const __grid_constant__ MergeParams params) {
  const int task = blockIdx.x * kWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int row = task / (kLatentDim / kTaskDims) * 8 + lane / 4, dim = task % (kLatentDim / kTaskDims) * kTaskDims + lane % 4 * kLaneDims;
  cudaTriggerProgrammaticLaunchCompletion();
  const bool none = *params.stack_count == 0;
  if (none && (blockIdx.x > 0 || blockIdx.y > 0)) return;
  cudaGridDependencySynchronize();
#pragma unroll 1
  for (int request = blockIdx.y; request < params.batch && !none; request += gridDim.y) {
    const int place = params.places[request];
    if (place < 0) continue;
    // Lanes of rows that do not exist read the last one, and write nothing.
    const int read = min(row, params.rows - 1), stack = place / params.stack_places, member = place - stack * params.stack_places;
    const auto run = [&](int i) {
      return i == 0 ? Run(params.runs[0], stack, member * params.rows + read) : Run(params.runs[1], request, read);
    };
    float reference = kNoSplit, total = 0.0f, sum[kLaneDims] = {};
    int partials = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) partials += run(i).raise(reference);
    if (partials == 0) continue;
    CUTE_UNROLL
    for (int lanes = 1; lanes < 4; lanes *= 2) reference = fmaxf(reference, __shfl_xor_sync(0xffffffff, reference, lanes));
#pragma unroll 1
    for (int i = 0; i < 2; ++i) run(i).add_to(dim, reference, total, sum);
    if (row < params.rows) write(params, request, row, dim, reference, total, sum);
  }
}

}  // namespace

KernelLaunch prepare_merge(const MergeParams& params, int64_t num_sms) {
  static KernelHandles handles;
  const int steps = (params.rows + 7) / 8 * (kLatentDim / kTaskDims) / kWarps;
  const dim3 blocks(steps, std::min<int64_t>(params.batch, std::max<int64_t>(kBlocksPerSm * num_sms / steps, 1)));
  return {reinterpret_cast<const void*>(merge_kernel), __PRETTY_FUNCTION__, &handles, blocks, kWarps * kWarpSize, 0};
}

}  // namespace etap

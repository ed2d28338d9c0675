#include "combine/combine.h"

#include <cutlass/numeric_types.h>

#include <algorithm>

#include "combine/divided_flight.cuh"
#include "decode/roles.h"
#include "decode/shape.h"
#include "decode/sparse/pieces.h"

namespace etap {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 3;                     // that fit beside each other, with few registers
constexpr int kWideBlocksPerSm = 2;                 // of a task a warp, with many
constexpr int kSlices = kLatentDim / 64;            // of O^T, each 64 value dims by four warps
constexpr int kSliceWarps = 4;
constexpr int kBlockVectors = kSliceWarps * kWarpSize;  // float4s of one slice and column block
constexpr int kMostRowLanes = 8;                    // lanes of a warp that hold different rows

// Ask for the partials first, first + step, ... before `end`, of kTasks tasks, whose values lie at task_offset.
template <class Vector, int kAhead, int kTasks>
CUTE_DEVICE void load(Flight<Vector, kAhead, kTasks>& flight, const Partials<Vector>& from, bool one_row,
                      const int (&task_offset)[kTasks], int first, int step, int end) {
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int at = first + a * step;
    float2 pair = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
    if (at < end) pair = *reinterpret_cast<const float2*>(from.lse + at * from.lse_stride);
    const float own = row_of_lane(true) % 2 ? pair.y : pair.x;
    flight.lse[a] = one_row ? make_float2(own, own) : pair;
#pragma unroll
    for (int t = 0; t < kTasks; ++t) {
      flight.value[a][t] = {};
      if (at < end) flight.value[a][t] = from.value[at * from.value_stride + task_offset[t]];
    }
  }
}

constexpr int kMostEntries = 4;  // requests that a block takes at a time

// What the warps of a block hold of the splits that they divided among them, of kTasks tasks. Where room is short, as beside a
// decode kernel (kBesideCombination), kAtATime warps show theirs after each other.
template <int kTasks, int kAtATime, int kRowLanes>
struct Shares {
  Sum sums[kAtATime][kTasks][kWarpSize];
  Totals totals[kWarps][kRowLanes];  // of the lanes that hold different rows

  CUTE_DEVICE float2 maximum(int row_lane) const {
    float2 maximum = totals[0][row_lane].reference;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float2 reference = totals[w][row_lane].reference;
      maximum = {fmaxf(maximum.x, reference.x), fmaxf(maximum.y, reference.y)};
    }
    return maximum;
  }
  // Adds a task's shares of the warps from `first` on to a sum against all.reference.
  CUTE_DEVICE void add_to(Totals& all, Sum& sum, int row_lane, int first, int task) const {
#pragma unroll
    for (int w = 0; w < kAtATime; ++w) {
      const Totals share = totals[first + w][row_lane];
      const float2 weight = {ptx::ex2(share.reference.x - all.reference.x), ptx::ex2(share.reference.y - all.reference.y)};
      all.sum = {__fmaf_rn(weight.x, share.sum.x, all.sum.x), __fmaf_rn(weight.y, share.sum.y, all.sum.y)};
      sum.add(weight, sums[w][task][threadIdx.x % kWarpSize].value);
    }
  }
};

// Whether the work was divided by shapes alone, or else by a schedule.
CUTE_DEVICE bool is_even(const ResultParams& params) { return params.division.partitions > 0; }

// A split request.
struct Entry {
  int request = -1;
  int slot = 0;
  int splits = 0;

  // The schedule's i-th, request -1 behind the last. Of a schedule that was built again since, for another batch, nothing is taken
  // that this call does not have.
  CUTE_DEVICE static Entry listed(const ResultParams& params, int i) {
    Entry entry;
    if (i < min(params.batch, params.partitions)) {
      const WorkRange& row = params.work_ranges[i];
      entry.request = row.split_request < params.batch ? row.split_request : -1;
      entry.slot = row.split_slot;
      entry.splits = entry.request < 0 ? 0 : min(row.split_pieces, 2 * params.partitions - entry.slot);
    }
    return entry;
  }
  // The i-th token that may be split, request -1 where it is not.
  CUTE_DEVICE static Entry even(const ResultParams& params, int i) {
    const TokenDivision& division = params.division;
    Entry entry;
    if (i < sparse::split_candidates(division)) {
      const int token = sparse::split_candidate(division, i), pieces = sparse::pieces(division, token);
      if (pieces > 1) entry = {token, sparse::first_slot(division, token), pieces};
    }
    return entry;
  }
  CUTE_DEVICE static Entry of(const ResultParams& params, int i) {
    return is_even(params) ? even(params, i) : listed(params, i);
  }
};

// Those of the candidates first, first + step, ... One question for all, so that the loads of listed ones do not wait for each other.
template <int kEntries>
CUTE_DEVICE void find(const ResultParams& params, int first, int step, Entry (&entries)[kEntries]) {
  if (is_even(params)) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) entries[e] = Entry::even(params, first + e * step);
  } else {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) entries[e] = Entry::listed(params, first + e * step);
  }
}

// Whether there is nothing to sum from the i-th candidate on, `entry`.
CUTE_DEVICE bool is_behind(const ResultParams& params, int i, const Entry& entry) {
  return is_even(params) ? i >= sparse::split_candidates(params.division) : entry.request < 0;
}

// A task is 8 rows x 16 value dims of a split request. A block takes kWarps tasks of the same rows; or 1 or 2, where few requests
// can be split and blocks are what is wanted. All that does not depend on the request is worked out here, before the kernel waits
// for the one that writes the partials. Vector: four values of theirs.
template <class Vector = float4>
struct Block {
  const ResultParams& params;
  const bool one_row;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned lane = threadIdx.x % kWarpSize;
  int first_row;
  int first_dim;
  int slice_stride;  // of partial values, from a task to the one 64 value dims behind it
  Partials<Vector> partials;

  CUTE_DEVICE Block(const ResultParams& params, bool one_row, unsigned first_task) : params(params), one_row(one_row) {
    const unsigned blocks_per_group = params.row_tile / 8;
    const unsigned slice = first_task / kSliceWarps % kSlices;
    const unsigned quarter = first_task % kSliceWarps;
    const unsigned rows = first_task / (kSliceWarps * kSlices);
    const unsigned group = rows / blocks_per_group;
    const unsigned row_block = rows % blocks_per_group;
    first_row = anew(group * params.row_tile + row_block * 8);
    first_dim = anew(slice * 64 + quarter * 16);
    slice_stride = anew(blocks_per_group * kBlockVectors);
    const unsigned vectors = ((group * kSlices + slice) * blocks_per_group + row_block) * kBlockVectors;
    const unsigned value = vectors + quarter * kWarpSize + lane;
    const unsigned lse = group * params.row_tile + row_block * 8 + row_of_lane(one_row) / 2 * 2;
    partials.lse_stride = anew(params.row_groups * params.row_tile);
    partials.value_stride = partials.lse_stride * (kLatentDim / 4);
    partials.value = reinterpret_cast<const Vector*>(params.partial_out) + anew(value);
    partials.lse = params.partial_lse + anew(lse);
  }

  // Of the block's task t, beside the first one's.
  CUTE_DEVICE int offset(unsigned t) const {
    return t / kSliceWarps * slice_stride + t % kSliceWarps * kWarpSize;
  }

  // Of the task t.
  CUTE_DEVICE void write(int request, const Sum& sum, const Totals& totals, unsigned t) const {
    const int dim = first_dim + t * 16;
    write_rows(params, one_row, sum, totals, request, first_row, dim);
    if (dim == 0) write_lse(params, one_row, totals, request, first_row);
  }

  // Those requests that have few splits: each warp sums its own task of all of them, the splits in flight together.
  template <int kEntries>
  CUTE_DEVICE void sum_alone(const Entry (&all)[kEntries]) const {
    // Of two requests' half partials registers hold all.
    constexpr int kAhead = kEntries == 2 && sizeof(Vector) < sizeof(float4) ? kFewSplits : kFewSplits / kEntries;
    Entry entries[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) entries[e] = all[e].splits > kFewSplits ? Entry() : all[e];
    const int offsets[1] = {offset(warp)};
    Totals totals[kEntries];
    Sum sums[kEntries][1];
#pragma unroll 1
    for (int split = 0; split < most_splits(entries); split += kAhead) {
      Flight<Vector, kAhead, 1> flights[kEntries];
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        load(flights[e], partials, one_row, offsets, entries[e].slot + split, 1, entries[e].slot + entries[e].splits);
      }
#pragma unroll
      for (int e = 0; e < kEntries; ++e) flights[e].add_to(totals[e], sums[e]);
    }
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (entries[e].request >= 0) write(entries[e].request, sums[e][0], totals[e], warp);
    }
  }

  // The same with few registers. A warp's own task of one request, kFewSplits splits at a time:
  CUTE_DEVICE void sum_in_turn(const Entry& entry) const {
    const int task = offset(warp), end = entry.slot + entry.splits;
    Totals totals;
    Sum sum;
#pragma unroll 1
    for (int at = entry.slot; at < end; at += kFewSplits) DividedFlight<1>(partials, task, {at}, {end}).add_to(totals, sum);
    write(entry.request, sum, totals, warp);
  }

  // Of those requests whose splits can all be on their way together, with the same bits. Whether there are others.
  template <int kEntries>
  CUTE_DEVICE bool sum_at_once(const Entry (&entries)[kEntries]) const {
    constexpr int kAhead = DividedFlight<kEntries>::kAhead;
    int first[kEntries], end[kEntries];
    bool others = false;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const bool too_many = entries[e].splits > kAhead;
      others |= too_many;
      first[e] = entries[e].slot;
      end[e] = first[e] + (too_many ? 0 : entries[e].splits);
    }
    DividedFlight<kEntries> flight(partials, offset(warp), first, end);
    flight.weigh_all();
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (first[e] == end[e]) continue;
      Totals totals;
      Sum sum;
      flight.sum_entry(e, totals, sum);
      write(entries[e].request, sum, totals, warp);
    }
    return others;
  }

  // The warps divide a request's splits, sum all tasks of the block, and add up in shared memory.
  template <int kAhead, int kTasks, int kAtATime, int kRowLanes>
  CUTE_DEVICE void sum_together(const Entry& entry, Shares<kTasks, kAtATime, kRowLanes>& shared) const {
    const int end = entry.slot + entry.splits, row_lane = one_row ? lane / 4 : lane % 4;
    int offsets[kTasks];
#pragma unroll
    for (int t = 0; t < kTasks; ++t) offsets[t] = offset(t);
    Totals share;
    Sum sums[kTasks];
#pragma unroll 1
    for (int at = entry.slot + warp; at < end; at += kWarps * kAhead) {
      Flight<Vector, kAhead, kTasks> flight;
      load(flight, partials, one_row, offsets, at, kWarps, end);
      flight.add_to(share, sums);
    }
    Totals all;
    Sum sum;
#pragma unroll
    for (int first = 0; first < kWarps; first += kAtATime) {
      __syncthreads();  // the last shares are read, those of an earlier request, too
      if (first == 0) shared.totals[warp][row_lane] = share;
#pragma unroll
      for (int t = 0; t < kTasks; ++t) {
        if (warp / kAtATime == first / kAtATime) shared.sums[warp % kAtATime][t][lane] = sums[t];
      }
      __syncthreads();
      if (warp >= kTasks) continue;
      if (first == 0) all.reference = shared.maximum(row_lane);
      shared.add_to(all, sum, row_lane, first, warp);
    }
    if (warp < kTasks) write(entry.request, sum, all, warp);
  }

  template <int kEntries>
  CUTE_DEVICE static int most_splits(const Entry (&entries)[kEntries]) {
    int most = entries[0].splits;
#pragma unroll
    for (int e = 1; e < kEntries; ++e) most = max(most, entries[e].splits);
    return most;
  }
};

// Grids are (steps of a request, requests). The list is older than the decode kernel, which waits for it before it lets this one
// begin (kernel.cuh; a test holds the order). Reading it behind the wait would be as right, and later.

// Of a task a warp. A block takes kEntries requests of the list at a time, for memory has a long way, and a request after the other
// would go it each time.
template <int kEntries, class Vector>
__global__ void __launch_bounds__(kWarps* kWarpSize, kWideBlocksPerSm)
    wide_combine_kernel(const __grid_constant__ ResultParams params) {
  __shared__ Shares<kWarps, kWarps, kMostRowLanes> shared;
  const Block<Vector> block(params, params.rows_on_lanes, blockIdx.x * kWarps);
  cudaTriggerProgrammaticLaunchCompletion();

  bool waited = false;
  for (int i = blockIdx.y;; i += kEntries * gridDim.y) {
    Entry entries[kEntries];
    find(params, i, gridDim.y, entries);
    if (!waited) cudaGridDependencySynchronize();
    waited = true;
    if (is_behind(params, i, entries[0])) return;
    // In which way a request is summed follows from its own splits, as its bits do.
    block.sum_alone(entries);
    if (block.most_splits(entries) <= kFewSplits) continue;
#pragma unroll 1
    for (int e = 0; e < kEntries; ++e) {
      const Entry one = kEntries == 1 ? entries[0] : Entry::of(params, i + e * gridDim.y);
      if (one.splits > kFewSplits) block.template sum_together<1>(one, shared);
    }
  }
}

// Of one task or two a block, of one request: a grid has a block for each that may be split.
template <int kTasks, bool kOneRow, class Vector>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocksPerSm)
    narrow_combine_kernel(const __grid_constant__ ResultParams params) {
  __shared__ Shares<kTasks, kWarps / kTasks, kOneRow ? kMostRowLanes : kMostRowLanes / 2> shared;
  static_assert(kOneRow || sizeof(shared) <= kCombinationBytes);
  const Block<Vector> block(params, kOneRow, blockIdx.x * kTasks);
  cudaTriggerProgrammaticLaunchCompletion();

  const Entry one = Entry::of(params, blockIdx.y);
  cudaGridDependencySynchronize();
  if (one.splits > 0) block.template sum_together<4>(one, shared);
}

// Of a task a warp with few registers and no shared memory. So a block finds room beside a CTA of a decode kernel that leaves some
// (kBesideCombination): it waits there from that kernel's start on, and the next one's CTAs begin beside it.
template <int kEntries>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocksPerSm)
    lean_combine_kernel(const __grid_constant__ ResultParams params) {
  const Block<> block(params, false, blockIdx.x * kWarps);
  cudaTriggerProgrammaticLaunchCompletion();

  bool waited = false;
  for (int i = blockIdx.y;; i += kEntries * gridDim.y) {
    Entry entries[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) entries[e] = Entry::listed(params, i + e * gridDim.y);
    if (!waited) cudaGridDependencySynchronize();
    waited = true;
    if (entries[0].request < 0) return;
    if constexpr (kEntries == 1) {
      block.sum_in_turn(entries[0]);
    } else if (block.sum_at_once(entries)) {
#pragma unroll 1
      for (int e = 0; e < kEntries; ++e) {
        const Entry entry = Entry::listed(params, i + e * gridDim.y);
        if (entry.splits > DividedFlight<kEntries>::kAhead) block.sum_in_turn(entry);
      }
    }
  }
}

template <int kEntries>
KernelLaunch lean_launch(dim3 blocks) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(lean_combine_kernel<kEntries>), __PRETTY_FUNCTION__, &handles, blocks,
          kWarps * kWarpSize, 0};
}

template <int kEntries, class Vector = float4>
KernelLaunch wide_launch(dim3 blocks) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(wide_combine_kernel<kEntries, Vector>), __PRETTY_FUNCTION__, &handles, blocks,
          kWarps * kWarpSize, 0};
}

template <int kTasks, bool kOneRow, class Vector = float4>
KernelLaunch narrow_launch(dim3 blocks) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(narrow_combine_kernel<kTasks, kOneRow, Vector>), __PRETTY_FUNCTION__, &handles, blocks,
          kWarps * kWarpSize, 0};
}

}  // namespace

// The next decode kernel begins when all blocks of this one have (they trigger it then), and its CTAs only where those leave it
// room. So where it loads early, as a call with early loads takes for granted, there are no more than a block or so a
// multiprocessor, each with twice the tasks or requests, as long as all their partials can be in flight or hardly any request is
// split; but where tensor cores are few, for there they are what the next kernel waits for, not its loads. Without early loads there
// are no more of the lean form, either, of which one finds room on a multiprocessor. 64 rows have fewer forms: two tasks a block for one
// request, and of half partials two or four requests a block.
//
// In batch-invariant schedules, whose partitions are a multiple of the batch, no sum may be rounded in another order with another
// batch. There `sparing` alone depends on it, and only chooses between grids that give the same bits, or in which all splits of a
// request are in flight at once.
KernelLaunch prepare_combine(const ResultParams& params, bool lean) {
  lean = lean && !params.rows_on_lanes;
  const int requests = std::min(params.batch, params.partitions);  // at most so many are split
  const int tasks = params.row_groups * params.row_tile / 8 * kSlices * kSliceWarps;
  const int multiprocessors = params.partitions * params.row_groups;
  const bool few = few_tensor_cores(multiprocessors);
  if (requests * tasks <= kBlocksPerSm * multiprocessors) {
    const bool two = params.row_tile == kMaxRowTile || (params.early_loads && !few && requests * tasks > multiprocessors);
    const dim3 blocks(two ? tasks / 2 : tasks, requests);
    if (params.half_partials) return narrow_launch<2, false, uint2>(blocks);
    if (params.rows_on_lanes) return narrow_launch<2, true>(blocks);
    return two ? narrow_launch<2, false>(blocks) : narrow_launch<1, false>(blocks);
  }
  const int steps = tasks / kWarps;
  // Requests of a block with so many blocks a multiprocessor, and how many of them it takes at a time.
  const auto rounds = [&](int blocks_per_sm) {
    return (requests * steps + blocks_per_sm * multiprocessors - 1) / (blocks_per_sm * multiprocessors);
  };
  const auto at_a_time = [&](int blocks_per_sm) { return rounds(blocks_per_sm) <= 2 ? rounds(blocks_per_sm) : kMostEntries; };
  const int pieces = params.partitions / requests;  // of a request, if all are alike
  const bool in_flight = (rounds(1) <= kMostEntries || pieces == 1) && at_a_time(1) * pieces <= kFewSplits;
  const bool sparing = (params.early_loads || lean) && !few;
  const int blocks_per_sm = sparing && in_flight ? 1 : kWideBlocksPerSm;
  const dim3 blocks(steps, std::min(requests, std::max(blocks_per_sm * multiprocessors / steps, 1)));
  const int entries = at_a_time(blocks_per_sm);
  if (params.half_partials) return entries <= 2 ? wide_launch<2, uint2>(blocks) : wide_launch<kMostEntries, uint2>(blocks);
  if (lean) {
    return entries == 1 ? lean_launch<1>(blocks) : entries == 2 ? lean_launch<2>(blocks) : lean_launch<kMostEntries>(blocks);
  }
  return entries == 1 ? wide_launch<1>(blocks) : entries == 2 ? wide_launch<2>(blocks) : wide_launch<kMostEntries>(blocks);
}

}  // namespace etap

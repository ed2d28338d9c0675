#include "combine/combine.h"

#include <cutlass/numeric_types.h>

#include <algorithm>

#include "combine/flight.cuh"
#include "decode/cta/roles.h"
#include "decode/shape.h"
#include "decode/cta/token_splits.h"

namespace etap {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 3;                     // that fit beside each other
constexpr int kManyBlocksPerSm = 2;                 // of a grid of many requests
constexpr int kSlices = kLatentDim / 64;            // of O^T, each 64 value dims by four warps
constexpr int kSliceWarps = 4;
constexpr int kBlockVectors = kSliceWarps * kWarpSize;  // vectors of one slice and column block
constexpr int kMostEntries = 4;  // requests that a block takes at a time

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
      entry.splits = entry.request < 0 ? 0 : min(row.split_count, params.last_slot + 1 - entry.slot);
    }
    return entry;
  }
  // The i-th token that may be split, request -1 where it is not.
  CUTE_DEVICE static Entry even(const ResultParams& params, int i) {
    const TokenDivision& division = params.division;
    Entry entry;
    if (i < sparse::split_candidates(division)) {
      const int token = sparse::split_candidate(division, i), splits = sparse::splits(division, token);
      if (splits > 1) entry = {token, sparse::first_slot(division, token), splits};
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

// What the warps of a block hold of the splits that they divided among them, of kTasks tasks. Room is short beside a decode kernel
// (kBesideCombination): kAtATime warps show theirs after each other.
template <class Form, int kTasks>
struct Shares {
  static constexpr int kAtATime = kWarps / kTasks;

  Sum sums[kAtATime][kTasks][kWarpSize];
  Totals totals[kWarps][Form::kRowLanes];

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

// A task is 8 rows x 16 value dims of a split request. A block takes tasks of the same rows. All that does not depend on the request
// is worked out here, before the kernel waits for the one that writes the partials.
template <class Form>
struct Block {
  const ResultParams& params;
  const unsigned warp = threadIdx.x / kWarpSize;
  int first_row;
  int first_dim;
  int slice_stride;  // of partial values, from a task to the one 64 value dims behind it
  Partials<Form> partials;

  CUTE_DEVICE Block(const ResultParams& params, unsigned first_task) : params(params) {
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
    const unsigned value = vectors + quarter * kWarpSize + threadIdx.x % kWarpSize;
    const unsigned lse = group * params.row_tile + row_block * 8 + Form::row();
    partials.lse_stride = anew(params.row_groups * params.row_tile);
    partials.value_stride = partials.lse_stride * (kLatentDim / 4);
    partials.value = reinterpret_cast<const typename Form::Vector*>(params.partial_out) + anew(value);
    partials.lse = params.partial_lse + anew(lse);
  }

  // Of the block's task t, beside the first one's.
  CUTE_DEVICE int offset(unsigned t) const {
    return t / kSliceWarps * slice_stride + t % kSliceWarps * kWarpSize;
  }

  // Of the task t.
  CUTE_DEVICE void write(int request, const Sum& sum, const Totals& totals, unsigned t) const {
    const int dim = first_dim + t * 16;
    write_rows<Form>(params, sum, totals, request, first_row, dim, params.partials != PartialLayout::kColumns);
    if (dim == 0) write_lse<Form>(params, totals, request, first_row);
  }

  // A warp's own task of one request, kFewSplits splits at a time.
  CUTE_DEVICE void sum_in_turn(const Entry& entry) const {
    const int task = offset(warp), end = entry.slot + entry.splits;
    Totals totals;
    Sum sum;
#pragma unroll 1
    for (int at = entry.slot; at < end; at += kFewSplits) SharedFlight<Form, 1>(partials, task, {at}, {end}).add_to(totals, sum);
    write(entry.request, sum, totals, warp);
  }

  // The same of those requests whose splits can all be on their way together, with the same bits. Whether there are others.
  template <int kEntries>
  CUTE_DEVICE bool sum_at_once(const Entry (&entries)[kEntries]) const {
    int first[kEntries], end[kEntries];
    bool others = false;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const bool too_many = entries[e].splits > SharedFlight<Form, kEntries>::kAhead;
      others |= too_many;
      first[e] = entries[e].slot;
      end[e] = first[e] + (too_many ? 0 : entries[e].splits);
    }
    SharedFlight<Form, kEntries> flight(partials, offset(warp), first, end);
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

  // A warp's own task, of a request whose splits can all be on their way at once.
  CUTE_DEVICE void sum_alone(const Entry& entry) const {
    const int offsets[1] = {offset(warp)};
    Flight<Form, kFewSplits, 1> flight;
    load(flight, partials, offsets, entry.slot, 1, entry.slot + entry.splits);
    Totals totals;
    Sum sums[1];
    flight.add_to(totals, sums);
    write(entry.request, sums[0], totals, warp);
  }

  // The warps divide a request's splits, sum all tasks of the block, and add up in shared memory.
  template <int kAhead, int kTasks>
  CUTE_DEVICE void sum_together(const Entry& entry, Shares<Form, kTasks>& shared) const {
    constexpr int kAtATime = Shares<Form, kTasks>::kAtATime;
    const int end = entry.slot + entry.splits, row_lane = Form::row_lane();
    int offsets[kTasks];
#pragma unroll
    for (int t = 0; t < kTasks; ++t) offsets[t] = offset(t);
    Totals share;
    Sum sums[kTasks];
#pragma unroll 1
    for (int at = entry.slot + warp; at < end; at += kWarps * kAhead) {
      Flight<Form, kAhead, kTasks> flight;
      load(flight, partials, offsets, at, kWarps, end);
      flight.add_to(share, sums);
    }
    Totals all;
    Sum sum;
#pragma unroll
    for (int first = 0; first < kWarps; first += kAtATime) {
      if (first > 0) __syncthreads();  // the last shares are read
      if (first == 0) shared.totals[warp][row_lane] = share;
#pragma unroll
      for (int t = 0; t < kTasks; ++t) {
        if (warp / kAtATime == first / kAtATime) shared.sums[warp % kAtATime][t][threadIdx.x % kWarpSize] = sums[t];
      }
      __syncthreads();
      if (warp >= kTasks) continue;
      if (first == 0) all.reference = shared.maximum(row_lane);
      shared.add_to(all, sum, row_lane, first, warp);
    }
    if (warp < kTasks) write(entry.request, sum, all, warp);
  }
};

// Grids are (steps of a request, requests). The list is older than the decode kernel, which waits for it before it lets this one
// begin (kernel.cuh; a test holds the order). Reading it behind the wait would be as right, and later.

// For few requests: a grid has blocks for each that may be split, of one task or two, whose splits the warps divide. With a task a warp,
// and no room beside other kernels, they do it where there are many.
template <class Form, int kTasks>
__global__ void __launch_bounds__(kWarps* kWarpSize, kTasks < kWarps ? kBlocksPerSm : kManyBlocksPerSm)
    few_combine_kernel(const __grid_constant__ ResultParams params) {
  __shared__ Shares<Form, kTasks> shared;
  static_assert(Form::kOneRow || kTasks == kWarps || sizeof(shared) <= kCombinationBytes);
  const Block<Form> block(params, blockIdx.x * kTasks);
  cudaTriggerProgrammaticLaunchCompletion();

  const Entry one = Entry::of(params, blockIdx.y);
  cudaGridDependencySynchronize();
  if (kTasks == kWarps && one.splits <= kFewSplits) {
    if (one.splits > 0) block.sum_alone(one);
  } else if (one.splits > 0) {
    block.template sum_together<kTasks < kWarps ? 4 : 1>(one, shared);
  }
}

// For many: a task a warp, few registers and no shared memory. So a block finds room beside a CTA of a decode kernel that leaves some
// (kBesideCombination): it waits there from that kernel's start on, and the next one's CTAs begin beside it. A block takes kEntries
// requests of the list at a time, for memory has a long way, and a request after the other would go it each time.
template <class Form, int kEntries>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocksPerSm)
    many_combine_kernel(const __grid_constant__ ResultParams params) {
  const Block<Form> block(params, blockIdx.x * kWarps);
  cudaTriggerProgrammaticLaunchCompletion();

  bool waited = false;
  for (int i = blockIdx.y;; i += kEntries * gridDim.y) {
    Entry entries[kEntries];
    find(params, i, gridDim.y, entries);
    if (!waited) cudaGridDependencySynchronize();
    waited = true;
    if (is_behind(params, i, entries[0])) return;
    // In which way a request is summed changes no bit.
    if constexpr (kEntries == 1) {
      if (entries[0].splits > 0) block.sum_in_turn(entries[0]);
    } else if (block.sum_at_once(entries)) {
#pragma unroll 1
      for (int e = 0; e < kEntries; ++e) {
        const Entry one = Entry::of(params, i + e * gridDim.y);
        if (one.splits > SharedFlight<Form, kEntries>::kAhead) block.sum_in_turn(one);
      }
    }
  }
}

template <class Form, int kTasks>
KernelLaunch few_launch(dim3 blocks) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(few_combine_kernel<Form, kTasks>), __PRETTY_FUNCTION__, &handles, blocks,
          kWarps * kWarpSize, 0};
}

template <class Form, int kEntries>
KernelLaunch many_launch(dim3 blocks) {
  static KernelHandles handles;
  return {reinterpret_cast<const void*>(many_combine_kernel<Form, kEntries>), __PRETTY_FUNCTION__, &handles, blocks,
          kWarps * kWarpSize, 0};
}

template <class Form>
KernelLaunch many_launch(dim3 blocks, int entries) {
  return entries == 1 ? many_launch<Form, 1>(blocks) : entries == 2 ? many_launch<Form, 2>(blocks) : many_launch<Form, kMostEntries>(blocks);
}

}  // namespace

// The next decode kernel begins when all blocks of this one have (they trigger it then), and its CTAs only where those leave it
// room. So where it loads early, as a call with early loads takes for granted, there are no more than a block or so a
// multiprocessor, each with twice the tasks or requests, as long as all their partials can be in flight or hardly any request is
// split; but where tensor cores are few, for there they are what the next kernel waits for, not its loads. Without early loads there
// are no more beside a decode kernel that leaves room, either, where one block finds it on a multiprocessor.
//
// In batch-invariant schedules, whose partitions are a multiple of the batch, no sum may be rounded in another order with another
// batch. So what chooses the kernel is a ratio of both; `sparing` and `entries` only choose between grids that give the same bits.
KernelLaunch prepare_combine(const ResultParams& params, bool leaves_room, int64_t num_sms) {
  const int requests = std::min(params.batch, params.partitions);  // at most so many are split
  const int tasks = params.row_groups * params.row_tile / 8 * kSlices * kSliceWarps;
  const int ctas = params.partitions * params.row_groups;  // of the decode kernel
  const bool few_cores = few_tensor_cores(num_sms);
  const bool rows = params.partials == PartialLayout::kRows, half = params.partials == PartialLayout::kHalfPairedColumns;
  if (requests * tasks <= kBlocksPerSm * ctas) {
    const bool two = params.row_tile == kMaxRowTile || (params.early_loads && !few_cores && requests * tasks > ctas);
    const dim3 blocks(two ? tasks / 2 : tasks, requests);
    if (rows) return few_launch<Rows, 2>(blocks);
    if (half) return few_launch<HalfColumns, 2>(blocks);
    return two ? few_launch<Columns, 2>(blocks) : few_launch<Columns, 1>(blocks);
  }
  const int steps = tasks / kWarps;
  const int splits = params.partitions / requests;  // of a request, if all are alike
  if (!leaves_room && (splits > kFewSplits || requests * steps <= kManyBlocksPerSm * ctas)) {
    const dim3 blocks(steps, requests);
    return rows ? few_launch<Rows, kWarps>(blocks) : half ? few_launch<HalfColumns, kWarps>(blocks) : few_launch<Columns, kWarps>(blocks);
  }
  // Requests of a block with so many blocks a multiprocessor, and how many of them it takes at a time.
  const auto rounds = [&](int blocks_per_sm) { return (requests * steps + blocks_per_sm * ctas - 1) / (blocks_per_sm * ctas); };
  const auto at_a_time = [&](int blocks_per_sm) { return rounds(blocks_per_sm) <= 2 ? rounds(blocks_per_sm) : kMostEntries; };
  const bool in_flight = (rounds(1) <= kMostEntries || splits == 1) && at_a_time(1) * splits <= kFewSplits;
  const bool sparing = (params.early_loads || leaves_room) && !few_cores;
  const int blocks_per_sm = sparing && in_flight ? 1 : kManyBlocksPerSm;
  const dim3 blocks(steps, std::min(requests, std::max(blocks_per_sm * ctas / steps, 1)));
  int entries = at_a_time(blocks_per_sm);
  while (entries > 1 && entries * splits > kFewSplits) entries /= 2;
  return rows ? many_launch<Rows>(blocks, entries) : half ? many_launch<HalfColumns>(blocks, entries) : many_launch<Columns>(blocks, entries);
}

}  // namespace etap

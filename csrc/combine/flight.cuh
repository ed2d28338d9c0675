// Partial results on their way to a warp, log-sum-exps and values, so that nothing waits for anything but memory.
#pragma once

#include "common/sums.cuh"

namespace etap {

constexpr int kFewSplits = 8;  // that are on their way together

// Partials as a lane finds them, strides from split to split. There are at most two a partition, which int counts.
template <class Form>
struct Partials {
  const typename Form::Vector* value;  // of the first split of the first task
  const float* lse;                    // of the lane's row, or the first of its two
  int value_stride;
  int lse_stride;
};

// Asks for the splits first, first + step, ... before `end`, whose tasks' values lie at task_offset.
template <class Form, int kAhead, int kTasks>
CUTE_DEVICE void load(Flight<Form, kAhead, kTasks>& flight, const Partials<Form>& from, const int (&task_offset)[kTasks], int first,
                      int step, int end) {
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int at = first + a * step;
    const float* const lse = from.lse + at * from.lse_stride;
    flight.lse[a] = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
    if (at < end) flight.lse[a] = Form::kOneRow ? make_float2(*lse, *lse) : *reinterpret_cast<const float2*>(lse);
#pragma unroll
    for (int t = 0; t < kTasks; ++t) {
      flight.value[a][t] = {};
      if (at < end) flight.value[a][t] = from.value[at * from.value_stride + task_offset[t]];
    }
  }
}

// A task's kFewSplits splits, kAhead of each of kEntries requests, with few registers: the lanes that have the same rows divide the
// log-sum-exps, and hand round the weights that follow from them. Each holds one split's of its two rows, or two splits' of its one.
template <class Form, int kEntries>
class SharedFlight {
 public:
  static constexpr int kAhead = kFewSplits / kEntries;
  static_assert(kAhead >= 2);

  // The splits of entry e from first[e] on that come before end[e]. Values lie at task_offset.
  CUTE_DEVICE SharedFlight(const Partials<Form>& from, int task_offset, const int (&first)[kEntries], const int (&end)[kEntries]) {
    const int lane = threadIdx.x % kWarpSize;
    const int own = Form::kOneRow ? lane % 4 * 2 : lane / 4;  // slot
    int at = first[0] + own, limit = end[0];
#pragma unroll
    for (int e = 1; e < kEntries; ++e) {
      const int first_of = anew(first[e]), end_of = anew(end[e]);  // else the compiler makes local arrays of them
      at = own / kAhead == e ? first_of + own % kAhead : at;
      limit = own / kAhead == e ? end_of : limit;
    }
    weight_ = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
    const float* const lse = from.lse + at * from.lse_stride;
    if constexpr (Form::kOneRow) {
      if (at < limit) weight_.x = *lse;
      if (at + 1 < limit) weight_.y = lse[from.lse_stride];
    } else if (at < limit) {
      weight_ = *reinterpret_cast<const float2*>(lse);
    }
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const auto* value = from.value + first[e] * from.value_stride + task_offset;
#pragma unroll
      for (int a = 0; a < kAhead; ++a, value += from.value_stride) {
        ptx::load_if(first[e] + a < end[e], value, values_[e * kAhead + a]);
      }
    }
  }

  // Add them to what a single request's earlier ones came to.
  CUTE_DEVICE void add_to(Totals& totals, Sum& sum) {
    static_assert(kEntries == 1);
    sum.scale(totals.raise(maximum()));
    weigh(totals.reference);
    add(0, totals, sum);
  }

  // Where these are all splits of several requests: the weights of all, then one request's sum.
  CUTE_DEVICE void weigh_all() {
    Totals own;
    own.raise(maximum());
    reference_ = own.reference;
    weigh(reference_);
  }
  CUTE_DEVICE void sum_entry(int entry, Totals& totals, Sum& sum) const {
    totals.reference = handed_round(reference_, entry * kAhead);
    add(entry, totals, sum);
  }

 private:
  // Of this lane's rows, over the splits of its entry.
  CUTE_DEVICE float2 maximum() const {
    float2 maximum = weight_;
    if constexpr (Form::kOneRow) maximum.x = maximum.y = fmaxf(maximum.x, maximum.y);
    constexpr int kFirst = Form::kOneRow ? 1 : 4, kEnd = Form::kOneRow ? kAhead / 2 : kAhead * 4;
#pragma unroll
    for (int lanes = kFirst; lanes < kEnd; lanes *= 2) {
      maximum.x = fmaxf(maximum.x, __shfl_xor_sync(0xffffffff, maximum.x, lanes));
      maximum.y = Form::kOneRow ? maximum.x : fmaxf(maximum.y, __shfl_xor_sync(0xffffffff, maximum.y, lanes));
    }
    return maximum;
  }
  CUTE_DEVICE void weigh(float2 reference) {
    weight_ = {ptx::ex2(weight_.x - reference.x), ptx::ex2(weight_.y - reference.y)};
  }
  // From the lane of the same rows that has this slot.
  CUTE_DEVICE static float2 handed_round(float2 held, int slot) {
    const int lane = threadIdx.x % kWarpSize;
    if constexpr (Form::kOneRow) {
      const float value = __shfl_sync(0xffffffff, slot % 2 == 0 ? held.x : held.y, lane / 4 * 4 + slot / 2);
      return {value, value};
    } else {
      const int from = slot * 4 + lane % 4;
      return {__shfl_sync(0xffffffff, held.x, from), __shfl_sync(0xffffffff, held.y, from)};
    }
  }
  CUTE_DEVICE void add(int entry, Totals& totals, Sum& sum) const {
#pragma unroll
    for (int slot = entry * kAhead; slot < (entry + 1) * kAhead; ++slot) {
      const float2 weight = handed_round(weight_, slot);
      totals.sum = {__fadd_rn(totals.sum.x, weight.x), __fadd_rn(totals.sum.y, weight.y)};
      sum.add(weight, widened(values_[slot]));
    }
  }

  typename Form::Vector values_[kFewSplits];
  float2 weight_;  // of what this lane holds; its log-sum-exps first
  float2 reference_;
};

}  // namespace etap

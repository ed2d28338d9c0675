// Partial results on their way to a warp that has few registers, as beside a decode kernel.
#pragma once

#include "common/sums.cuh"

namespace etap {

constexpr int kFewSplits = 8;  // that are on their way together

// Partials as a lane finds them, strides from split to split. There are at most two a partition, which int counts.
template <class Vector = float4>
struct Partials {
  const Vector* value;  // of the first split of the first task
  const float* lse;     // of the lane's two rows, or of the two among which is its one
  int value_stride;
  int lse_stride;
};

// A task's kFewSplits splits, kAhead of each of kEntries requests. The eight lanes that have the same rows divide the
// log-sum-exps: each asks for one, and hands round the weight that follows from it.
template <int kEntries>
class DividedFlight {
 public:
  static constexpr int kAhead = kFewSplits / kEntries;

  // The splits of entry e from first[e] on that come before end[e]. Values lie at task_offset.
  CUTE_DEVICE DividedFlight(const Partials<>& from, int task_offset, const int (&first)[kEntries], const int (&end)[kEntries]) {
    const int own = threadIdx.x % kWarpSize / kRowLanes;
    int at = first[0] + own, limit = end[0];
#pragma unroll
    for (int e = 1; e < kEntries; ++e) {
      const int first_of = anew(first[e]), end_of = anew(end[e]);  // else the compiler makes local arrays of them
      at = own / kAhead == e ? first_of + own % kAhead : at;
      limit = own / kAhead == e ? end_of : limit;
    }
    weight_ = make_float2(-INFINITY, -INFINITY);  // behind the last split: weighs nothing
    if (at < limit) weight_ = *reinterpret_cast<const float2*>(from.lse + at * from.lse_stride);
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const float4* value = from.value + first[e] * from.value_stride + task_offset;
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
  static constexpr int kRowLanes = 4;  // neighbours, of other rows

  // Of this lane's rows, over the splits of its entry.
  CUTE_DEVICE float2 maximum() const {
    float2 maximum = weight_;
#pragma unroll
    for (int lanes = kRowLanes; lanes < kAhead * kRowLanes; lanes *= 2) {
      maximum.x = fmaxf(maximum.x, __shfl_xor_sync(0xffffffff, maximum.x, lanes));
      maximum.y = fmaxf(maximum.y, __shfl_xor_sync(0xffffffff, maximum.y, lanes));
    }
    return maximum;
  }
  CUTE_DEVICE void weigh(float2 reference) {
    weight_ = {ptx::ex2(weight_.x - reference.x), ptx::ex2(weight_.y - reference.y)};
  }
  // From the lane of the same rows that has this slot.
  CUTE_DEVICE static float2 handed_round(float2 held, int slot) {
    const int from = slot * kRowLanes + threadIdx.x % kRowLanes;
    return {__shfl_sync(0xffffffff, held.x, from), __shfl_sync(0xffffffff, held.y, from)};
  }
  CUTE_DEVICE void add(int entry, Totals& totals, Sum& sum) const {
#pragma unroll
    for (int slot = entry * kAhead; slot < (entry + 1) * kAhead; ++slot) {
      const float2 weight = handed_round(weight_, slot);
      totals.sum = {__fadd_rn(totals.sum.x, weight.x), __fadd_rn(totals.sum.y, weight.y)};
      sum.add(weight, values_[slot]);
    }
  }

  float4 values_[kFewSplits];
  float2 weight_;  // of this lane's slot; its log-sum-exps first
  float2 reference_;
};

}  // namespace etap

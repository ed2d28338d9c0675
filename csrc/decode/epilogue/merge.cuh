// At the end of a split the consumers' results become one. Where tiles alternate, each hands over half of its own O^T, and finishes
// and writes the other half; where they share tiles, each finishes its value dims.
#pragma once

#include "decode/epilogue/cluster.cuh"

namespace etap::transposed {

// A slice of the half that `target` keeps crosses here from the other warpgroup, 16 bytes a thread and `quad`: in stages of the key
// ring that the producer lent, [target][merge stage], or where the other one's P^T was.
template <class T>
CUTE_DEVICE float4* exchange_slot(Shared<T>& shared, KeyPosition<T> at, int target, int m, int quad) {
  using Slice = float4[T::kRowTile / 8][kGroupThreads];
  static_assert(sizeof(Slice) == T::kSliceBytes);
  if constexpr (T::kMergeStages == 0) {
    auto* slices = reinterpret_cast<Slice*>(shared.probabilities + (1 - target) * 2 * T::kProbabilityBytes);
    return &slices[m][quad][threadIdx.x % kGroupThreads];
  } else {
    constexpr int kOfStage = T::kStageBytes / T::kSliceBytes;
    const int stage = at.ahead(target * T::kMergeStages + m / kOfStage).stage;
    auto* slices = reinterpret_cast<Slice*>(shared.ring + stage * T::kStageBytes);
    return &slices[m % kOfStage][quad][threadIdx.x % kGroupThreads];
  }
}

// Hands over the half of this warpgroup's O^T that the other one keeps.
template <class T, int kGroup>
CUTE_DEVICE void give_half(Shared<T>& shared, KeyPosition<T> at, OutputFragment<T>& ot) {
  // Other warps' products may still read the last P^T.
  if (T::kMergeStages == 0) ETAP_MARKED(output_sync, event::output_done(kGroup).sync());
  CUTE_UNROLL
  for (int m = 0; m < T::kMergeSlices; ++m) {
    auto given = ot(cute::_, (1 - kGroup) * T::kMergeSlices + m, 0);
    CUTE_UNROLL
    for (int i = 0; i < T::kRowTile / 2; i += 4) {
      *exchange_slot<T>(shared, at, 1 - kGroup, m, i / 4) = make_float4(given(i), given(i + 1), given(i + 2), given(i + 3));
    }
  }
  if (T::kMergeStages > 0) cutlass::arch::fence_view_async_shared();  // these writes, before TMA fills the stages again
}

// Adds the other warpgroup's part to the half that stays here, both normalised, and gives the stages back.
template <class T, int kGroup>
CUTE_DEVICE void take_half(Shared<T>& shared, KeyPosition<T> at, const WarpFactors<T>& factors, OutputFragment<T>& ot) {
  CUTE_UNROLL
  for (int block = 0; block < T::kRowTile / 8; ++block) {
    const float low_own = factors.own(block, 0), low_other = factors.other(block, 0);
    const float high_own = factors.own(block, 1), high_other = factors.other(block, 1);
    CUTE_UNROLL
    for (int m = 0; m < T::kMergeSlices; ++m) {
      auto kept = ot(cute::make_coord(cute::_, cute::_, block), kGroup * T::kMergeSlices + m, 0);
      const float4 taken = *exchange_slot<T>(shared, at, kGroup, m, block);
      kept(0, 0) = kept(0, 0) * low_own + taken.x * low_other;
      kept(1, 0) = kept(1, 0) * high_own + taken.y * high_other;
      kept(0, 1) = kept(0, 1) * low_own + taken.z * low_other;
      kept(1, 1) = kept(1, 1) * high_own + taken.w * high_other;
    }
  }
  __syncwarp();
  if (releases()) {
    CUTE_UNROLL
    for (int stage = 0; stage < T::kMergeStages; ++stage) shared.keys.release(at.ahead(kGroup * T::kMergeStages + stage));
  }
}

// Says what a column of both warpgroups becomes, of which `own` is this one.
template <class T>
CUTE_DEVICE ColumnFactors merged_factors(const ColumnSums<T::kScoreColumns>& columns, int own, int column) {
  const int partner = 1 - own;
  const float reference = fmaxf(columns.references[own][column], columns.references[partner][column]);
  const float factor = ptx::ex2(columns.references[own][column] - reference);
  float sum = factor * total(columns.sums[own][column]);
  float rounded_sum = factor * total(columns.rounded_sums[own][column]);
  const float other = ptx::ex2(columns.references[partner][column] - reference);
  sum += other * total(columns.sums[partner][column]);
  rounded_sum += other * total(columns.rounded_sums[partner][column]);
  return normalised(factor, other, sum, rounded_sum, reference);
}

// Merges the half that stays here and writes it, or shows it to the cluster; the first warpgroup does so with the log-sum-exps,
// too.
template <class T, int kGroup>
CUTE_DEVICE void finish_half(Shared<T>& shared, KeyPosition<T> at, const Destination<T>& to, const WarpFactors<T>& factors,
                             OutputFragment<T>& ot) {
  take_half<T, kGroup>(shared, at, factors, ot);
  if constexpr (T::kSparse) {
    if (clustered<T>()) {
      if (T::kMergeStages > 0) ETAP_MARKED(halves_sync, event::halves_taken().sync());
      return show_half<T, kGroup>(shared, factors, ot);
    }
  }
  write_output<T, T::kMergeSlices>(to, kGroup * kLatentDim / 2, kGroup * T::kMergeSlices, ot);
  if (kGroup == 0) factors.write_lse(to);
}

// Finishes a split. From `at` on both consumers have stages of the ring lent to them; `splits` counts those finished before.
template <class T>
CUTE_DEVICE void merge_and_write(Shared<T>& shared, KeyPosition<T> at, int splits, const Destination<T>& to,
                                 const Softmax<T>& softmax, OutputFragment<T>& ot) {
  const int group = softmax.group;
  auto& columns = shared.columns[splits % 2];
  publish_columns<T>(columns, softmax);
  of_group(group, [&](auto own) { give_half<T, own>(shared, at, ot); });
  event::sums_written().sync();
  const WarpFactors<T> factors([&](int, int column) {
    ColumnFactors merged = merged_factors<T>(columns, group, column);
    if constexpr (T::kSparse) {
      const float left = to.beside_sink(column, merged.lse);
      merged.own *= left;
      merged.other *= left;
    }
    return merged;
  });
  of_group(group, [&](auto own) { finish_half<T, own>(shared, at, to, factors, ot); });
}

// Finishes a split where both consumers share the tiles: each holds half of the value dims of every row, and needs the other one's
// columns to finish them.
template <class T>
CUTE_DEVICE void write_shared(Shared<T>& shared, const Destination<T>& to, const Softmax<T>& softmax, OutputFragment<T>& ot) {
  const int group = softmax.group;
  auto& columns = shared.columns;
  publish_columns<T>(columns, softmax);
  event::sums_written().sync();
  const WarpFactors<T> factors([&](int owner, int column) {
    const float reference = columns.references[owner][column];
    const float own = ptx::ex2(columns.references[owner][column] - reference);
    const float sum = own * total(columns.sums[owner][column]);
    const float rounded_sum = own * total(columns.rounded_sums[owner][column]);
    ColumnFactors factors = normalised(own, 0.0f, sum, rounded_sum, reference);
    if constexpr (T::kSparse) factors.own *= to.beside_sink(T::first_column(owner) + column, factors.lse);
    return factors;
  });
  scale_columns<T>(ot, [&](int block, int bit) { return factors.own(block, bit); });
  if (group == 0) factors.write_lse(to);
  write_output<T, T::kOutputSlices>(to, group * (kLatentDim / 2), 0, ot);
  event::sums_read().sync();  // before the next split's maxima take their place
}

// Finishes a split without tokens.
template <class T>
CUTE_DEVICE void finish_empty(Shared<T>& shared, const Destination<T>& to) {
  if constexpr (kSumsInClusters<T>) {
    if (clustered<T>()) return show_nothing<T>(shared);
  }
  write_empty<T>(to);
}

}  // namespace etap::transposed

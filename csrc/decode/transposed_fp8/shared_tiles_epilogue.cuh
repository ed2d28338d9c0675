// The end of a piece with shared tiles: each warpgroup holds half of the value dims of every row, and needs the other one's
// columns to finish them.
#pragma once

#include "decode/transposed/epilogue.cuh"
#include "decode/transposed_fp8/shared_tiles_traits.h"

namespace etap::transposed_fp8 {

template <class T>
CUTE_DEVICE void write_shared(Shared<T>& shared, const Destination<T>& to, const transposed::Softmax<T>& softmax,
                              transposed::OutputFragment<T>& ot) {
  const int group = softmax.group;
  auto& columns = shared.columns;
  transposed::publish_columns<T>(columns, softmax);
  event::sums_written().meet();
  const transposed::WarpFactors<T> factors([&](int owner, int column) {
    const float reference = columns.references[owner][column];
    const float own = ptx::ex2(columns.references[owner][column] - reference);
    const float sum = own * transposed::total(columns.sums[owner][column]);
    const float rounded_sum = own * transposed::total(columns.rounded_sums[owner][column]);
    transposed::ColumnFactors factors = transposed::normalised(own, 0.0f, sum, rounded_sum, reference);
    if constexpr (T::kGathered) factors.own *= to.beside_sink(T::first_column(owner) + column, factors.lse);
    return factors;
  });
  transposed::scale_columns<T>(ot, [&](int block, int bit) { return factors.own(block, bit); });
  if (group == 0) factors.write_lse(to);
  transposed::write_output<T, T::kOutputSlices>(to, group * (kLatentDim / 2), 0, ot);
  event::sums_read().sync();  // before the next piece's maxima take their place
}

}  // namespace etap::transposed_fp8

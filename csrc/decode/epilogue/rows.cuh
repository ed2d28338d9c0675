// At the end of a split the two warpgroups add up their sums of a row, and each writes its half of O.
#pragma once

#include "decode/epilogue/columns.cuh"
#include "decode/mma/query_major.cuh"
#include "decode/softmax/rows.cuh"

namespace etap::query_major {

// Transposes words among the four lanes of a row: word w of lane l becomes word l of lane w.
CUTE_DEVICE void transpose_words(uint32_t (&words)[4]) {
  CUTE_UNROLL
  for (int apart = 1; apart < 4; apart *= 2) {
    const bool upper = threadIdx.x & apart;
    CUTE_UNROLL
    for (int w = 0; w < 4; ++w) {
      if (w & apart) continue;
      uint32_t& low = words[w];
      uint32_t& high = words[w + apart];
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? low : high, apart);
      low = upper ? taken : low;
      high = upper ? high : taken;
    }
  }
}

// Writes a final result row by row, and a partial one as it lies in the registers, in the order that params.h gives.
template <class T>
CUTE_DEVICE void write_output(const Destination<T>& to, int group, const typename T::Output& o) {
  const int thread = anew(threadIdx.x % kGroupThreads);
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  if (to.out == nullptr) {
    constexpr int kBlocks = T::kRowTile / 8;
    float4* partial = to.partial_out + (group * T::kHalfChunks * kBlocks + 2 * warp) * kGroupThreads + lane;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(o); i += 8) {  // 16 value dims of both rows
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int quarter = i / 8;
        partial[(quarter / 4 * kBlocks + h) * kGroupThreads + quarter % 4 * kWarpSize] =
            make_float4(o(i + 2 * h), o(i + 2 * h + 1), o(i + 4 + 2 * h), o(i + 5 + 2 * h));
      }
    }
    return;
  }
  const int row = warp * 16 + lane / 4;
  uint16_t* out = to.out + row * to.row_stride() + group * T::kOutputDims + lane % 4 * 8;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(o); i += 16) {  // 32 value dims
      uint32_t words[4];
      CUTE_UNROLL
      for (int w = 0; w < 4; ++w) words[w] = to.pack_out(o(i + 4 * w + 2 * h), o(i + 4 * w + 2 * h + 1));
      transpose_words(words);
      if (row + 8 * h < to.rows) {
        *reinterpret_cast<uint4*>(out + 8 * h * to.row_stride() + i * 2) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Writes this half of O, divided by the rows' sums, and the log-sum-exp. `splits` counts those that this CTA has finished before.
template <class T>
CUTE_DEVICE void finish_split(Shared<T>& shared, const Destination<T>& to, int splits, int group, const RowState& state,
                              typename T::Output& o) {
  const int thread = anew(threadIdx.x % kGroupThreads);
  const int row = fragment_row(thread);
  float sums[4] = {state.sums[0], state.sums[1], state.rounded_sums[0], state.rounded_sums[1]};
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 1);
    sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 2);
  }
  auto& exchange = shared.sums[splits % 2];
  if (thread % 4 == 0) exchange[group][thread / 4] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  event::sums_written().sync();
  // In the same order in both warpgroups, so that both have the same sums.
  const float4 a = exchange[0][thread / 4], b = exchange[1][thread / 4];
  const float all[4] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  float inverse[2];
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    inverse[h] = all[h] == 0.0f ? 0.0f : __fdividef(1.0f, all[2 + h]);  // 0: the row saw no token; NaN stays NaN
    const float lse = all[h] == 0.0f ? -INFINITY : state.reference[h] + __log2f(all[h]);
    if (group == 0 && thread % 4 == 0 && row + 8 * h < to.rows) to.write_lse(row + 8 * h, lse);
    if constexpr (T::kSparse) inverse[h] *= to.beside_sink(row + 8 * h, lse);
  }
  scale_rows<T>(o, inverse);
  write_output<T>(to, group, o);
}

}  // namespace etap::query_major

namespace etap::mixed_major {

// Writes this half of O^T, divided by the rows' sums, and the log-sum-exp. last: the split's last tile.
template <class T>
CUTE_DEVICE void finish_split(Shared<T>& shared, const Destination<T>& to, int group, int last, float value_scale,
                              const RowState& state, transposed::OutputFragment<T>& ot) {
  const float inverse_value_scale = 1.0f / value_scale;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    RowSums sums{state.sums[h], state.rounded_sums[h] * inverse_value_scale};
    CUTE_UNROLL
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      sums.sum += __shfl_xor_sync(0xffffffff, sums.sum, lanes);
      sums.rounded_sum += __shfl_xor_sync(0xffffffff, sums.rounded_sum, lanes);
    }
    if (threadIdx.x % 4 == 0) shared.sums[group][first_row() + 8 * h] = sums;
  }
  event::sums_written().sync();
  const transposed::WarpFactors<T> factors([&](int i, int column) {
    const int row = i * T::kScoreColumns + column;
    const RowSums a = shared.sums[0][row], b = shared.sums[1][row];
    const float reference = shared.rows[last % T::kTilesTold][row].reference;
    return transposed::normalised(1.0f, 0.0f, a.sum + b.sum, a.rounded_sum + b.rounded_sum, reference);
  });
  transposed::scale_columns<T>(ot, [&](int block, int bit) { return factors.own(block, bit); });
  if (group == 0) factors.write_lse(to);
  transposed::write_output<T, T::kOutputSlices>(to, group * (kLatentDim / 2), 0, ot);
}

}  // namespace etap::mixed_major

// At the end of a split all transposed kernels publish the columns' sums, take factors from them, and write O^T as O.
#pragma once

#include "decode/epilogue/destination.cuh"
#include "decode/mma/shared.cuh"
#include "decode/softmax/columns.cuh"

namespace etap::transposed {

// Sums each value over the eight lanes that hold other tokens of the same columns. The lanes share the work: each step halves
// the values a lane still holds, so that lane / 4 ends with the value (or kCount / 8 values) of its place.
template <int kHeld, int kLanes = kWarpSize / 2, int kCount>
CUTE_DEVICE void sum_over_tokens(float (&values)[kCount]) {
  constexpr int kHalf = kHeld / 2;
  const bool upper = threadIdx.x & kLanes;
  if constexpr (kHalf == 0) {
    values[0] += __shfl_xor_sync(0xffffffff, values[0], kLanes);
  }
  CUTE_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    const float given = upper ? values[i] : values[i + kHalf];
    const float kept = upper ? values[i + kHalf] : values[i];
    values[i] = kept + __shfl_xor_sync(0xffffffff, given, kLanes);
  }
  if constexpr (kLanes > 4) sum_over_tokens<kHalf, kLanes / 2>(values);
}

// Publishes the column sums of each warp and the references for both warpgroups.
template <class T>
CUTE_DEVICE void publish_columns(ColumnSums<T::kScoreColumns>& columns, const Softmax<T>& softmax) {
  constexpr int kColumns = Softmax<T>::kColumns;
  constexpr int kCount = 2 * kColumns;
  constexpr int kLeft = kCount > 8 ? kCount / 8 : 1;
  const int thread = anew(threadIdx.x);
  const int warp = thread / kWarpSize % kWarpsPerGroup;
  const int group = softmax.group;
  float values[kCount];
  CUTE_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    values[i] = softmax.sums[i];
    values[kColumns + i] = softmax.rounded_sums[i] * softmax.inverse_value_scale;
  }
  sum_over_tokens<kCount>(values);
  // Bits 4, 3 and 2 of the lane chose the half at each step; with four values the last step chose nothing.
  const int place =
      thread / 16 % 2 * (kCount / 2) + thread / 8 % 2 * (kCount / 4) + (kCount >= 8 ? thread / 4 % 2 * (kCount / 8) : 0);
  CUTE_UNROLL
  for (int i = 0; i < kLeft; ++i) {
    const int column_index = (place + i) % kColumns;
    const int column = fragment_column(column_index / 2, column_index % 2);
    auto& sums = place + i < kColumns ? columns.sums : columns.rounded_sums;
    reinterpret_cast<float*>(&sums[group][column])[warp] = values[i];
  }
  if (threadIdx.x % kGroupThreads < 4) {
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) columns.references[group][fragment_column(i / 2, i % 2)] = softmax.reference[i];
  }
}

// A column of O^T becomes the result so: this warpgroup's and the other one's values are multiplied with these. And it has this
// log2-sum-exp.
struct ColumnFactors {
  float own;
  float other;
  float lse;
};

CUTE_DEVICE float total(const float4& warps) { return (warps.x + warps.y) + (warps.z + warps.w); }

// `own` and `other` are relative to `reference`, as the sums are that they have been multiplied with.
CUTE_DEVICE ColumnFactors normalised(float own, float other, float sum, float rounded_sum, float reference) {
  const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, rounded_sum);  // 0: the row saw no token; NaN stays NaN
  return {own * inverse, other * inverse, sum == 0.0f ? -INFINITY : reference + __log2f(sum)};
}

// Holds the factors of all columns of a row tile, one or two a lane. They are worked out once a warp, and handed round.
template <class T>
class WarpFactors {
 public:
  // factors(i, column): of column `column` of the i-th kScoreColumns (8, 16 or 32) of the tile.
  template <class Factors>
  CUTE_DEVICE explicit WarpFactors(Factors&& factors) {
    const int lane = anew(threadIdx.x % kWarpSize);
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int column = (i * kWarpSize + lane) % T::kScoreColumns;
      held_[i] = factors(i, column);
    }
  }

  // As this thread's part of a fragment has them.
  CUTE_DEVICE float own(int block, int bit) const { return of(held_[block / 4].own, block, bit); }
  CUTE_DEVICE float other(int block, int bit) const { return of(held_[block / 4].other, block, bit); }

  // write(row, lse) of the first `rows`. Called by the warps of one warpgroup, of which the first writes.
  template <class Write>
  CUTE_DEVICE void write_lse(int rows, Write&& write) const {
    if (threadIdx.x % kGroupThreads >= kWarpSize) return;
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int row = i * kWarpSize + anew(threadIdx.x % kWarpSize);
      if (row < rows) write(row, held_[i].lse);
    }
  }
  CUTE_DEVICE void write_lse(const Destination<T>& to) const {
    write_lse(to.rows, [&](int row, float lse) { to.write_lse(row, lse); });
  }

 private:
  static constexpr int kHeld = (T::kRowTile + kWarpSize - 1) / kWarpSize;

  CUTE_DEVICE float of(float held, int block, int bit) const {
    return __shfl_sync(0xffffffff, held, block % 4 * 8 + first_column_ + bit);
  }

  const int first_column_ = anew(threadIdx.x % 4 * 2);  // of each block
  ColumnFactors held_[kHeld];
};

// Write slices [first_slice, first_slice + kSlices) of O^T as they lie in this thread's registers, to where its first four
// values go.
template <class T, int kSlices, class Vector>
CUTE_DEVICE void write_partial(Vector* partial, int first_slice, const OutputFragment<T>& ot) {
  constexpr int kBlocks = T::kRowTile / 8;
  CUTE_UNROLL
  for (int i = 0; i < kSlices * kBlocks; ++i) {
    auto block = ot(cute::make_coord(cute::_, cute::_, i % kBlocks), first_slice + i / kBlocks, 0);
    if constexpr (sizeof(Vector) == sizeof(float4)) {
      partial[i * kGroupThreads] = make_float4(block(0, 0), block(1, 0), block(0, 1), block(1, 1));
    } else {
      using Half = cutlass::bfloat16_t;
      partial[i * kGroupThreads] = make_uint2(pack<Half>(block(0, 0), block(1, 0)), pack<Half>(block(0, 1), block(1, 1)));
    }
  }
}

// Write this warpgroup's half of O^T, slices [first_slice, first_slice + kSlices) of its registers: a partial result as it
// lies in them; a final one with its 8 x 8 blocks transposed between the lanes, so that rows (value dims) become columns.
// Each thread has one base address and constant offsets from it, so that no address is kept over the main loop.
template <class T, int kSlices>
CUTE_DEVICE void write_output(const Destination<T>& to, int first_dim, int first_slice, const OutputFragment<T>& ot) {
  constexpr int kBlocks = T::kRowTile / 8;
  const int thread = anew(threadIdx.x % kGroupThreads);
  if (to.out == nullptr) {
    write_partial<T, kSlices>(to.partial_out + first_dim / 64 * kBlocks * kGroupThreads + thread, first_slice, ot);
    return;
  }
  const int lane = thread % kWarpSize;
  auto* out = to.out + lane / 4 * to.row_stride() + first_dim + thread / kWarpSize * 16 + lane_dim<T::kPairedDims>(lane);
  const int rows = to.rows - lane / 4;
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) {
    CUTE_UNROLL
    for (int m = 0; m < kSlices; ++m) {
      const auto transposed = [&](int half) {
        const auto at = cute::make_coord(cute::_, half, block);
        return ptx::movmatrix_trans(to.pack_out(ot(at, first_slice + m, 0)(0), ot(at, first_slice + m, 0)(1)));
      };
      const uint32_t first = transposed(0);
      const uint32_t second = transposed(1);
      const uint2 dims = neighbouring_dims<T::kPairedDims>(first, second);
      if (rows > block * 8) *reinterpret_cast<uint2*>(out + block * 8 * to.row_stride() + m * 64) = dims;
    }
  }
}

}  // namespace etap::transposed

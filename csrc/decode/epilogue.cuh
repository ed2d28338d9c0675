// The end of a request piece: merge what the warpgroups hold, then write O (transposed back) and the log-sum-exp.
#pragma once

#include "decode/softmax.cuh"

namespace etap {

// Where a piece's rows go: the result itself, or a float32 partial with a log2-sum-exp.
template <class T>
struct Destination {
  uint16_t* out;  // float16 or bfloat16 [rows of the group, 512], or null
  float* lse;
  float4* partial_out;  // [slices, column blocks, threads]
  float* partial_lse;
  int rows;
  bool float16_out;

  __device__ __forceinline__ Destination(const DecodeParams& params, const Piece& piece, int row_group) {
    const int64_t row = int64_t(piece.request) * params.rows + row_group * kMaxRowTile;
    const int64_t partial_row = (int64_t(piece.slot) * params.row_groups + row_group) * T::kRowTile;
    const bool whole = piece.slot < 0;
    out = whole ? static_cast<uint16_t*>(params.out) + row * kLatentDim : nullptr;
    lse = params.lse + row;
    partial_out = reinterpret_cast<float4*>(params.partial_out + partial_row * kLatentDim);
    partial_lse = params.partial_lse + partial_row;
    rows = min(params.rows - row_group * kMaxRowTile, T::kRowTile);
    float16_out = params.float16_out;
  }

  __device__ __forceinline__ uint32_t pack_out(float low, float high) const {
    if constexpr (!T::kFp8Cache) return pack<typename T::Element>(low, high);
    return float16_out ? pack<cutlass::half_t>(low, high) : pack<cutlass::bfloat16_t>(low, high);
  }
};

// A piece without tokens, of a request that has none or fewer than the schedule was built for: zeros and -inf, no page read.
// The combination adds nothing of such a partial result, but multiplies what lies there.
template <class T>
__device__ __forceinline__ void write_empty(const Destination<T>& to) {
  const bool whole = to.out != nullptr;
  auto* out = whole ? reinterpret_cast<uint4*>(to.out) : reinterpret_cast<uint4*>(to.partial_out);
  float* lse = whole ? to.lse : to.partial_lse;
  const int units = whole ? to.rows * kLatentDim / 8 : T::kRowTile * kLatentDim / 4;  // of 16 bytes
#pragma unroll 1
  for (int i = threadIdx.x; i < units; i += kConsumerThreads) out[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int row = threadIdx.x; row < to.rows; row += kConsumerThreads) lse[row] = -INFINITY;
}

// Write this warpgroup's half of O^T, slices [first_slice, first_slice + kSlices) of its registers: a partial result as it
// lies in them; a final one with its 8 x 8 blocks transposed between the lanes, so that rows (value dims) become columns.
// Each thread has one base address and constant offsets from it, so that no address is kept over the main loop.
template <class T, int kSlices>
__device__ __forceinline__ void write_output(const Destination<T>& to, int first_dim, int first_slice,
                                             const OutputFragment<T>& ot) {
  constexpr int kBlocks = T::kRowTile / 8;
  const int thread = anew(threadIdx.x % kGroupThreads);
  if (to.out == nullptr) {
    float4* partial = to.partial_out + first_dim / 64 * kBlocks * kGroupThreads + thread;
    CUTE_UNROLL
    for (int i = 0; i < kSlices * kBlocks; ++i) {
      auto block = ot(cute::make_coord(cute::_, cute::_, i % kBlocks), first_slice + i / kBlocks, 0);
      partial[i * kGroupThreads] = make_float4(block(0, 0), block(1, 0), block(0, 1), block(1, 1));
    }
    return;
  }
  const int lane = thread % kWarpSize;
  auto* out = to.out + lane / 4 * kLatentDim + first_dim + thread / kWarpSize * 16 + lane_dim<T::kFp8Cache>(lane);
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
      const uint2 dims = neighbouring_dims<T::kFp8Cache>(first, second);
      if (rows > block * 8) *reinterpret_cast<uint2*>(out + block * 8 * kLatentDim + m * 64) = dims;
    }
  }
}

// Sum each value over the eight lanes that hold other tokens of the same columns. The lanes share the work: each step
// halves the values a lane still holds, so that lane / 4 ends with the value (or kCount / 8 values) of its place.
template <int kHeld, int kLanes = kWarpSize / 2, int kCount>
__device__ __forceinline__ void sum_over_tokens(float (&values)[kCount]) {
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

// Publish the column sums of each warp and the references for both warpgroups.
template <class T>
__device__ __forceinline__ void publish_columns(typename T::Columns& columns, const Softmax<T>& softmax) {
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
    values[kColumns + i] = softmax.rounded_sums[i] * (T::kFp8Cache ? softmax.inverse_value_scale : 1.0f);
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

// How a column of both warpgroups' O^T becomes the result: what this one's and the other one's values are multiplied
// with, and the column's log2-sum-exp.
struct ColumnFactors {
  float own;
  float other;
  float lse;
};

template <class T>
__device__ __forceinline__ ColumnFactors column_factors(const typename T::Columns& columns, int group, int column) {
  const auto total = [](const float4& warps) { return (warps.x + warps.y) + (warps.z + warps.w); };
  const int partner = T::kSharedTiles ? group : 1 - group;
  const float reference = fmaxf(columns.references[group][column], columns.references[partner][column]);
  const float own = ptx::ex2(columns.references[group][column] - reference);
  float sum = own * total(columns.sums[group][column]);
  float rounded_sum = own * total(columns.rounded_sums[group][column]);
  float other = 0.0f;
  if constexpr (!T::kSharedTiles) {
    other = ptx::ex2(columns.references[partner][column] - reference);
    sum += other * total(columns.sums[partner][column]);
    rounded_sum += other * total(columns.rounded_sums[partner][column]);
  }
  const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, rounded_sum);  // 0: the row saw no token; NaN stays NaN
  return {own * inverse, other * inverse, sum == 0.0f ? -INFINITY : reference + __log2f(sum)};
}

// The factors of all columns of a row tile, one or two a lane: worked out once a warp, and handed round.
template <class T>
class WarpFactors {
 public:
  __device__ __forceinline__ WarpFactors(const typename T::Columns& columns, int group) {
    const int lane = anew(threadIdx.x % kWarpSize);
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int column = (i * kWarpSize + lane) % T::kScoreColumns;
      held_[i] = column_factors<T>(columns, T::kSharedTiles ? i : group, column);
    }
  }

  // As this thread's part of a fragment has them.
  __device__ __forceinline__ float own(int block, int bit) const { return of(held_[block / 4].own, block, bit); }
  __device__ __forceinline__ float other(int block, int bit) const { return of(held_[block / 4].other, block, bit); }

  // Called by the warps of one warpgroup, of which the first writes.
  __device__ __forceinline__ void write_lse(const Destination<T>& to) const {
    if (threadIdx.x % kGroupThreads >= kWarpSize) return;
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int row = i * kWarpSize + anew(threadIdx.x % kWarpSize);
      if (row >= to.rows) continue;
      if (to.out != nullptr) {
        to.lse[row] = held_[i].lse * kLn2;
      } else {
        to.partial_lse[row] = held_[i].lse;
      }
    }
  }

 private:
  static constexpr int kHeld = (T::kRowTile + kWarpSize - 1) / kWarpSize;

  __device__ __forceinline__ float of(float held, int block, int bit) const {
    return __shfl_sync(0xffffffff, held, block % 4 * 8 + first_column_ + bit);
  }

  const int first_column_ = anew(threadIdx.x % 4 * 2);  // of each block
  ColumnFactors held_[kHeld];
};

// Where a slice of the half that `target` keeps crosses from the other warpgroup: in stages of the key ring that the
// producer granted, [target][merge stage], 16 bytes a thread and `quad`.
template <class T>
__device__ __forceinline__ float4* exchange_slot(typename T::SharedStorage& shared, RingPosition<T::kStages> at,
                                                 int target, int m, int quad) {
  const int stage = at.ahead(target * T::kMergeStages + m / T::kSlicesPerMergeStage).stage;
  return reinterpret_cast<float4*>(shared.ring + stage * T::kStageBytes + m % T::kSlicesPerMergeStage * T::kSliceBytes) +
         quad * kGroupThreads + threadIdx.x % kGroupThreads;
}

// Hand over the half of this warpgroup's O^T that the other one keeps.
template <class T, int kGroup>
__device__ __forceinline__ void give_half(typename T::SharedStorage& shared, RingPosition<T::kStages> at,
                                          OutputFragment<T>& ot) {
  CUTE_UNROLL
  for (int m = 0; m < T::kMergeSlices; ++m) {
    auto given = ot(cute::_, (1 - kGroup) * T::kMergeSlices + m, 0);
    CUTE_UNROLL
    for (int i = 0; i < T::kRowTile / 2; i += 4) {
      *exchange_slot<T>(shared, at, 1 - kGroup, m, i / 4) = make_float4(given(i), given(i + 1), given(i + 2), given(i + 3));
    }
  }
  cutlass::arch::fence_view_async_shared();  // these writes, before TMA fills the stages again
}

// Add the other warpgroup's part to the half that stays here, both normalised, and give the stages back.
template <class T, int kGroup>
__device__ __forceinline__ void take_half(typename T::SharedStorage& shared, RingPosition<T::kStages> at,
                                          const WarpFactors<T>& factors, OutputFragment<T>& ot) {
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
  if (threadIdx.x % kWarpSize == 0) {
    CUTE_UNROLL
    for (int stage = 0; stage < T::kMergeStages; ++stage) shared.keys.release(at.ahead(kGroup * T::kMergeStages + stage));
  }
}

// Alternate tiles: each warpgroup hands over half of its O^T, and finishes and writes the other half.
template <class T>
__device__ __forceinline__ void finish_halves(typename T::SharedStorage& shared, RingPosition<T::kStages> at,
                                              const Destination<T>& to, const typename T::Columns& columns, int group,
                                              OutputFragment<T>& ot) {
  if (group == 0) {  // which registers stay and which go must be known when compiling
    give_half<T, 0>(shared, at, ot);
  } else {
    give_half<T, 1>(shared, at, ot);
  }
  meet(kConsumersBarrier, kConsumerThreads);
  const WarpFactors<T> factors(columns, group);
  if (group == 0) {
    take_half<T, 0>(shared, at, factors, ot);
    write_output<T, T::kMergeSlices>(to, 0, 0, ot);
    factors.write_lse(to);
  } else {
    take_half<T, 1>(shared, at, factors, ot);
    write_output<T, T::kMergeSlices>(to, kLatentDim / 2, T::kMergeSlices, ot);
  }
}

// Shared tiles: each warpgroup holds half of the value dims of every row, the other one's columns among them.
template <class T>
__device__ __forceinline__ void finish_rows(const Destination<T>& to, const typename T::Columns& columns, int group,
                                            OutputFragment<T>& ot) {
  meet(kConsumersBarrier, kConsumerThreads);
  const WarpFactors<T> factors(columns, group);
  scale_columns<T>(ot, [&](int block, int bit) { return factors.own(block, bit); });
  if (group == 0) factors.write_lse(to);
  write_output<T, T::kOutputSlices>(to, group * (kLatentDim / 2), 0, ot);
  ptx::barrier_sync(kConsumersBarrier, kConsumerThreads);  // the columns are read, before the next piece's maxima
}

// `pieces` counts the pieces that this CTA has finished before.
template <class T>
__device__ __forceinline__ void finish_piece(typename T::SharedStorage& shared, RingPosition<T::kStages> at, int pieces,
                                             const Destination<T>& to, Softmax<T>& softmax, OutputFragment<T>& ot) {
  auto& columns = shared.columns[pieces % T::kColumnBuffers];
  publish_columns<T>(columns, softmax);
  if constexpr (T::kSharedTiles) {
    finish_rows<T>(to, columns, softmax.group, ot);
  } else {
    finish_halves<T>(shared, at, to, columns, softmax.group, ot);
  }
}

}  // namespace etap

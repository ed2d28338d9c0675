// S^T = K·Q^T and O^T += V^T·P^T of one tile of FP8 rows: registers.cuh says how matrix loads bring K and V.
#pragma once

#include <type_traits>

#include "decode/layouts/sparse_fp8.h"
#include "decode/mma/registers.cuh"
#include "decode/mma/shared.cuh"

namespace etap::sparse_fp8 {

using transposed_fp8::Words;
using Operands = transposed_fp8::Operand<2>;

// Operand B in shared memory, and the same so many bytes behind it: one addition, where a descriptor made of the address takes
// five.
template <class T, class Mma>
CUTE_DEVICE auto operand_b(const Mma& mma, const char* from) {
  return wgmma::operand_b<typename T::template Operand<typename Mma::ValTypeB>>(mma, from);
}
template <class OperandB>
CUTE_DEVICE auto behind(const OperandB& b, int bytes) {
  auto from = b.data();
  from.desc_.reg32_[0] += bytes / 16;
  return cute::make_tensor(from, b.layout());
}

// Loads a unit of a warp's 16 tokens and the one behind it.
template <class T>
CUTE_DEVICE void load_key_units(const char* tile, int offset, Words& words) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = threadIdx.x % kGroupThreads / kWarpSize * 16 + lane % 16;
  const char* from = tile + row * T::kRowBytes + offset + lane / 16 * kUnitBytes;
  transposed_fp8::load_words<false>(from, words);
}

// Loads tokens [32 * half, 32 * half + 32) of the warp's 16 value dims in a slice of 64.
template <class T>
CUTE_DEVICE void load_value_units(const char* tile, int slice, int half, Words& words) {
  const int lane = threadIdx.x % kWarpSize;
  const int unit = slice * 4 + threadIdx.x % kGroupThreads / kWarpSize;
  const char* from = tile + (half * 32 + lane) * T::kRowBytes + unit * kUnitBytes;
  transposed_fp8::load_words<true>(from, words);
}

// 32 columns of K's rope part: 16 of bfloat16 are two units, and need no conversion.
template <class T>
CUTE_DEVICE void load_rope(const char* tile, int load, Operands& operands) {
  CUTE_UNROLL
  for (int step = 0; step < 2; ++step) {
    load_key_units<T>(tile, T::Row::kRopeOffset + load * 64 + step * 32, operands[step]);
  }
}

// The scales of a thread's two tokens, 8 apart.
template <class T, class Row = typename T::Row>
struct TokenScales;

template <class T>
struct TokenScales<T, V32Row> {
  float4 rows[2];

  CUTE_DEVICE void read(const char* tile, const sparse::TileMask&) {
    const char* row = tile + fragment_row() * T::kRowBytes + V32Row::kScaleOffset;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) rows[i] = *reinterpret_cast<const float4*>(row + i * 8 * T::kRowBytes);
  }
  CUTE_DEVICE float of(int token, int column) const {
    const float4& row = rows[token];
    return column == 0 ? row.x : column == 1 ? row.y : column == 2 ? row.z : row.w;
  }

  // Whether one of a row is beyond these powers of two; the four threads that hold the same two rows look at a column each. Those
  // of rows that do not exist are 0.
  CUTE_DEVICE bool beyond(int least, int largest) const {
    const int column = threadIdx.x % V32Row::kScales;
    bool beyond = false;
    CUTE_UNROLL
    for (const auto& row : rows) {
      const float scale = fabsf(column < 2 ? (column == 0 ? row.x : row.y) : (column == 2 ? row.z : row.w));
      beyond |= scale > transposed_fp8::power_of_two(largest) || (scale < transposed_fp8::power_of_two(least) && scale != 0.0f);
    }
    return beyond;
  }
};

// V4's are powers of two, a byte each: 2^(byte - 127).
template <class T>
struct TokenScales<T, V4Row> {
  uint2 rows[2];

  CUTE_DEVICE void read(const char* tile, const sparse::TileMask& valid) {
    const char* row = tile + fragment_row() * T::kRowBytes + V4Row::kScaleOffset;
    const uint32_t exist = sparse::valid_tokens(valid);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      rows[i] = *reinterpret_cast<const uint2*>(row + i * 8 * T::kRowBytes);
      if (!(exist >> (16 * i) & 1)) rows[i] = {kOnes, kOnes};  // zeros would ask for the wide type
    }
  }
  CUTE_DEVICE float of(int token, int column) const {
    const uint32_t byte = __byte_perm(rows[token].x, rows[token].y, 0x4440 + column) & 0xff;
    return __uint_as_float(max(byte << 23, 0x00400000u));
  }

  // Each of the four threads looks at one or two columns.
  CUTE_DEVICE bool beyond(int least, int largest) const {
    const int shift = threadIdx.x % 4 * 8;
    const auto within = [=](uint32_t word) { return (word >> shift & 255) - (127 + least) <= uint32_t(largest - least); };
    bool beyond = false;
    CUTE_UNROLL
    for (const auto& row : rows) beyond |= !within(row.x) || (shift < 24 && !within(row.y));
    return beyond;
  }

 private:
  static constexpr uint32_t kOnes = 0x7f7f7f7f;
};

// Computes S^T of one tile in the log2 domain, which is complete on return. The columns of each scale and the rope part have a sum
// of their own, one to three of which are under way at a time. What comes from shared memory is asked for a few loads ahead, as are
// the queries' scales.
template <class T>
CUTE_DEVICE void compute_scores(Shared<T>& shared, const char* tile, const TokenScales<T>& scales, float scale_log2,
                                transposed::ScoreFragment<T>& st) {
  using namespace cute;
  constexpr int kScales = T::Row::kScales;
  constexpr int kLoadsPerPart = T::Row::kScaledColumns / 32;
  constexpr int kLatentLoads = T::kScaledDims / 32;
  constexpr int kRopeLoads = kRopeDim / 32;
  constexpr int kLoads = kLatentLoads + kRopeLoads;
  constexpr int kRopeFetch = kLatentLoads - T::kFetches;
  typename T::ScoreMma mma;
  typename T::RopeMma rope_mma;
  const auto latent_queries = operand_b<T>(mma, shared.query);
  const auto rope_queries = operand_b<T>(rope_mma, shared.query);
  decltype(make_fragment_like(st(_, 0, 0))) parts[T::kParts];
  Operands operands[T::kOperands];
  Operands rope[kRopeLoads];
  Words words[T::kFetches];
  constexpr int kColumns = T::kScoreColumns / 4;  // of a thread
  float query_scales[kColumns];

  const auto fetch = [&](int load) {
    if (load < kLatentLoads) load_key_units<T>(tile, load * 32, words[load % T::kFetches]);
  };
  CUTE_UNROLL
  for (int load = 0; load < T::kFetches; ++load) fetch(load);
  const auto query_scale = [&](int column) {
    return shared.score_scales[transposed::fragment_column(column / 2, column % 2)];
  };
  CUTE_UNROLL
  for (int i = 0; i < kColumns; ++i) query_scales[i] = T::kFetchesAhead ? query_scale(i) : 0.0f;
  const auto add_part = [&](int part) {
    warpgroup_fence_operand(parts[part % T::kParts]);
    CUTE_UNROLL
    for (int i = 0; i < size(st); ++i) {
      const float value = parts[part % T::kParts](i);
      if (part == kScales) {
        const int column = i / 4 * 2 + i % 2;
        st(i) = st(i) * (T::kFetchesAhead ? query_scales[column] : query_scale(column)) + value * scale_log2;
      } else {
        st(i) = part == 0 ? value * scales.of(i / 2 % 2, 0) : fmaf(value, scales.of(i / 2 % 2, part), st(i));
      }
    }
  };

  CUTE_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    const int part = load / kLoadsPerPart;
    auto& operand = operands[load % T::kOperands];
    if (load >= T::kOperands) warpgroup_wait<T::kOperands - 1>();
    if (T::kFetchesAhead && load == kRopeFetch) {
      CUTE_UNROLL
      for (int r = 0; r < kRopeLoads; ++r) load_rope<T>(tile, r, rope[r]);
    }
    const int chunk = load / 2 * T::kQueryChunkBytes;
    if (load % kLoadsPerPart == 0) {
      if (T::kParts == 1) warpgroup_wait<0>();
      if (part >= T::kParts) add_part(part - T::kParts);
      warpgroup_fence_operand(parts[part % T::kParts]);
      mma.accumulate_ = rope_mma.accumulate_ = GMMA::ScaleOut::Zero;
    }
    const Words& from = words[load % T::kFetches];
    if (load < kLatentLoads) {
      transposed_fp8::convert_keys(from, operand);
      fetch(load + T::kFetches);
      transposed_fp8::multiply(mma, operand, behind(latent_queries, chunk), load % 2 * 2, parts[part % T::kParts]);
    } else {
      auto& rope_operand = T::kFetchesAhead ? rope[load - kLatentLoads] : operand;
      if (!T::kFetchesAhead) load_rope<T>(tile, load - kLatentLoads, rope_operand);
      transposed_fp8::multiply(rope_mma, rope_operand, behind(rope_queries, chunk), load % 2 * 2, parts[part % T::kParts]);
    }
  }
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (int part = kScales + 1 - T::kParts; part <= kScales; ++part) add_part(part);
}

// Holds V of one tile on its way to registers, a few loads ahead.
template <class T>
struct ValueFetches {
  static constexpr int kLoads = 2 * (T::kOutputSlices - T::Row::kRopeIsValue);

  const char* tile;
  Words words[T::kFetches];

  CUTE_DEVICE void begin() {
    CUTE_UNROLL
    for (int load = 0; load < T::kFetches; ++load) fetch(load);
  }
  CUTE_DEVICE void fetch(int load) {
    if (load < kLoads) load_value_units<T>(tile, load / 2, load % 2, words[load % T::kFetches]);
  }
};

// Loads tokens [16 * step, 16 * step + 16) of the warp's 16 value dims in the rope part.
template <class T>
CUTE_DEVICE void load_rope_values(const char* tile, int step, Words& words) {
  const int lane = threadIdx.x % kWarpSize;
  const int unit = threadIdx.x % kGroupThreads / kWarpSize * 2 + lane / 8 % 2;
  const char* from = tile + (step * 16 + lane / 16 * 8 + lane % 8) * T::kRowBytes + T::Row::kRopeOffset + unit * kUnitBytes;
  transposed_fp8::load_words<true>(from, words);
}

// Starts to add the products of the rope part, the last slice of O^T.
template <class T>
CUTE_DEVICE void add_rope_output(const char* tile, const char* probabilities, transposed::OutputFragment<T>& ot) {
  using namespace cute;
  typename T::RopeMma mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
  const auto s_pt = operand_b<T>(mma, probabilities + T::Row::kScales * T::kScaledBytes);
  Operands operands[2];
  CUTE_UNROLL
  for (int load = 0; load < 2; ++load) {
    warpgroup_wait<1>();
    CUTE_UNROLL
    for (int step = 0; step < 2; ++step) load_rope_values<T>(tile, 2 * load + step, operands[load][step]);
    transposed_fp8::multiply(mma, operands[load], s_pt, load * 2, ot(_, T::kOutputSlices - 1, 0));
  }
}

// Rows r and r + 8 of the rope part's slice of O^T are value dims r and r + 8; they become dims 2r and 2r + 1, as in other slices.
template <class T>
CUTE_DEVICE void pair_rope_dims(transposed::OutputFragment<T>& ot) {
  const int lane = threadIdx.x % kWarpSize, row = lane / 4;
  const int from = row * 2 % 8 * 4 + lane % 4;
  CUTE_UNROLL
  for (int block = 0; block < T::kRowTile / 8; ++block) {
    auto values = ot(cute::make_coord(cute::_, cute::_, block), T::kOutputSlices - 1, 0);  // (column, half)
    CUTE_UNROLL
    for (int column = 0; column < 2; ++column) {
      const float low = values(column, 0), high = values(column, 1);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float of_low = __shfl_sync(0xffffffff, low, from + 4 * i), of_high = __shfl_sync(0xffffffff, high, from + 4 * i);
        values(column, i) = row < 4 ? of_low : of_high;
      }
    }
  }
}

// Adds V^T·P^T of one tile to O^T, with P^T in E: see add_output.
template <class E, class T, class ValuesRead, class Meanwhile>
CUTE_DEVICE void add_output_as(ValueFetches<T>& values, const char* probabilities, uint32_t factor,
                               transposed::OutputFragment<T>& ot, ValuesRead&& values_read, Meanwhile&& meanwhile) {
  using namespace cute;
  // All types of P^T have the fragments of T::OutputMma.
  using Fragment = decltype(make_fragment_like(ot(_, 0, 0)));
  transposed_fp8::LoadedProducts<T, wgmma::OfRegisters<E, T::kRowTile>, ValueFetches<T>::kLoads, Fragment> products;
  products.mma.accumulate_ = GMMA::ScaleOut::One;
  const auto scaled = operand_b<T>(products.mma, probabilities);
  warpgroup_fence_operand(ot);
  if (!T::kFetchesAhead) meanwhile();
  if (!T::kFetchesAhead) values.begin();
  products.start(
      values.words, [&](int load, auto&) { values.fetch(load); },
      [=](const auto& words, auto& operand) { transposed_fp8::convert_values<E>(words, operand, factor); },
      [&](int load) { return behind(scaled, load / 2 * 64 / T::Row::kScaledColumns * T::kScaledBytes); },
      [&](int load) { return ot(_, load / 2, 0); });
  if constexpr (T::Row::kRopeIsValue) add_rope_output<T>(values.tile, probabilities, ot);
  __syncwarp();
  values_read();
  if (T::kFetchesAhead) meanwhile();
  warpgroup_wait<0>();
  warpgroup_fence_operand(ot);
}

// Adds V^T·P^T of one tile to O^T. factor: what V^T is multiplied with where P^T is in the wide type; 0 where it is not.
// values_read() is called when V^T is in registers; `meanwhile` runs beside the last products, or before the first where registers
// are short.
template <class T, class ValuesRead, class Meanwhile>
CUTE_DEVICE void add_output(ValueFetches<T>& values, const char* probabilities, uint32_t factor, transposed::OutputFragment<T>& ot,
                            ValuesRead&& values_read, Meanwhile&& meanwhile) {
  if (factor != 0) {
    add_output_as<typename T::WideProbability>(values, probabilities, factor, ot, values_read, meanwhile);
  } else {
    add_output_as<typename T::Probability>(values, probabilities, 0, ot, values_read, meanwhile);
  }
}

}  // namespace etap::sparse_fp8

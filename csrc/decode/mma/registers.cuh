// Products whose operand A, values of e4m3 in shared memory, comes through registers: matrix loads, conversions, and the loop over
// them.
//
// A matrix load of four 8 x 16-byte blocks gives a thread four words. Of K, rows r = lane / 4 and r + 8 of its warp's 16
// tokens, columns 4c to 4c + 3 (c = lane % 4) of two units of 16. Of V, transposed in pairs of bytes: value dims 2r and
// 2r + 1 of its warp's 16, tokens 2c and 2c + 1 of four times 8. Which columns WGMMA takes for which is free as long as Q
// and P^T have the same order, and which rows of O^T are which value dims as long as the epilogue knows.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "decode/cta/splits.cuh"
#include "decode/layouts/transposed_fp8.h"

namespace etap::transposed_fp8 {

// A matrix load gives a thread these words; as operand A of kSteps steps of WGMMA they are four a step.
using Words = uint32_t[4];
template <int kSteps>
using Operand = uint32_t[kSteps][4];

// Four e4m3 values as float16, exactly.
CUTE_DEVICE uint2 to_halves(uint32_t word) {
  const auto four = reinterpret_cast<const cutlass::Array<cutlass::float_e4m3_t, 4>&>(word);
  const auto halves = cutlass::NumericArrayConverter<cutlass::half_t, cutlass::float_e4m3_t, 4>{}(four);
  return reinterpret_cast<const uint2&>(halves);
}

// Bytes 0 and 2, and bytes 1 and 3, of four e4m3 values as bfloat16, exactly. The factor, a power of two twice, makes up for the
// difference of the exponents' biases: see widen_e4m3. (A NaN has made scores NaN before.)
constexpr uint32_t kFactorTimes128 = 0x7f007f00;  // 2^127, twice
CUTE_DEVICE uint2 to_bfloat16(uint32_t word, uint32_t factor) {
  return {ptx::mul_bf16x2(widen_e4m3(word << 8, word << 4), factor), ptx::mul_bf16x2(widen_e4m3(word, word >> 4), factor)};
}

// A matrix load's words, from where this lane's line of 16 bytes begins; kTransposed: in pairs of bytes.
template <bool kTransposed>
CUTE_DEVICE void load_words(const char* from, uint32_t (&words)[4]) {
  using Load = std::conditional_t<kTransposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
  Load::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2], words[3]);
}

// Loads columns [32 * load, 32 * load + 32) of K.
template <class T>
CUTE_DEVICE void load_keys_words(const char* tile, int load, Words& words) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = threadIdx.x % kGroupThreads / kWarpSize * 16 + lane % 16;
  constexpr int kLoadsPerWide = T::kWideColumns / 32;
  const int unit = load % kLoadsPerWide * 2 + lane / 16;
  const char* from =
      load < kLatentDim / 32
          ? tile + load / kLoadsPerWide * T::kWideBytes + row * 128 + (unit ^ swizzle<128>(row)) * kUnitBytes
          : tile + T::kWideChunks * T::kWideBytes + row * 64 + (unit ^ swizzle<64>(row)) * kUnitBytes;
  load_words<false>(from, words);
}

CUTE_DEVICE void convert_keys(const Words& words, Operand<2>& operand) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint2 halves = to_halves(words[i]);
    operand[i / 2][i % 2] = halves.x;
    operand[i / 2][i % 2 + 2] = halves.y;
  }
}

// Loads tokens [32 * half, 32 * half + 32) of the warp's 16 value dims in a slice of 64.
template <class T>
CUTE_DEVICE void load_values_words(const char* tile, int slice, int half, Words& words) {
  const int lane = threadIdx.x % kWarpSize;
  const int unit = slice % 2 * 4 + threadIdx.x % kGroupThreads / kWarpSize;
  const char* from = tile + slice / 2 * T::kWideBytes + (half * 32 + lane) * 128 + (unit ^ swizzle<128>(lane)) * kUnitBytes;
  load_words<true>(from, words);
}

// Makes values of E of V's words. factor: see to_bfloat16.
template <class E, int kSteps>
CUTE_DEVICE void convert_values(const Words& words, Operand<kSteps>& operand, uint32_t factor = kWidenedBias) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 1) {
      // Tokens t, t + 8, t + 1, t + 9 of one value dim, as P^T has them.
      operand[0][i] = __byte_perm(words[i / 2 * 2], words[i / 2 * 2 + 1], i % 2 == 0 ? 0x6240 : 0x7351);
    } else {
      const uint2 pairs =
          std::is_same_v<E, cutlass::half_t> ? to_halves(__byte_perm(words[i], 0, 0x3120)) : to_bfloat16(words[i], factor);
      operand[i / 2][i % 2 * 2] = pairs.x;
      operand[i / 2][i % 2 * 2 + 1] = pairs.y;
    }
  }
}

// Starts one load's share of a product, a group of WGMMAs. The operand's registers are theirs until the group is waited for.
template <int kSteps, class Mma, class OperandB, class Result>
CUTE_DEVICE void multiply(Mma& mma, const Operand<kSteps>& operand, const OperandB& b, int first_step, Result&& result) {
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    using Element = typename Mma::ValTypeA;
    const auto a = cute::make_tensor(cute::make_rmem_ptr(reinterpret_cast<const Element*>(operand[step])),
                                     cute::Layout<cute::Int<16 / sizeof(Element)>>{});
    cute::gemm(mma, a, b(cute::_, 0, first_step + step), result);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
}

// The products of kLoads matrix loads, added up in the fragments that `result(load)` names, the same for each kPartLoads of them.
// While the tensor cores have a few operands, the next is loaded and converted.
//
// Hopper adds float16 products in float32, but e4m3 ones with some 14 bits, and cuts off the rest: scores of 576 columns
// were off by up to 5e-3 of their size, and O^T adds up thousands of tokens. So the e4m3 products of kPartLoads loads get a sum of
// their own, which float32 additions take over.
template <class T, class Mma, int kLoads, class Fragment, int kPartLoads = 2>
struct LoadedProducts {
  static constexpr int kParts = T::kFp8Math ? T::kOperands / 2 : 1;

  Mma mma;
  Operand<T::kStepsPerLoad> operands[T::kOperands];
  Fragment parts[kParts];

  // fetch(load, words) asks for a load's words, convert(words, operand) makes operand A of them, operand_b(load) is what it is
  // multiplied with.
  template <class Fetch, class Convert, class OperandB, class Result>
  CUTE_DEVICE void start(Fetch&& fetch, Convert&& convert, OperandB&& operand_b, Result&& result) {
    Words words[T::kFetches];
    CUTE_UNROLL
    for (int load = 0; load < T::kFetches; ++load) fetch(load, words[load]);
    start(words, fetch, convert, operand_b, result);
  }

  // Starts the products when the first words have been asked for.
  template <class Fetch, class Convert, class OperandB, class Result>
  CUTE_DEVICE void start(Words (&words)[T::kFetches], Fetch&& fetch, Convert&& convert, OperandB&& operand_b, Result&& result) {
    CUTE_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      // e4m3 operands are waited for in pairs.
      if (load >= T::kOperands && (!T::kFp8Math || load % 2 == 0)) {
        cute::warpgroup_wait<T::kFp8Math ? T::kOperands - 2 : T::kOperands - 1>();
        const int done = load - T::kOperands + 2;
        if (T::kFp8Math && done % kPartLoads == 0) add_part(done / kPartLoads - 1, result);
      }
      auto& operand = operands[load % T::kOperands];
      convert(words[load % T::kFetches], operand);
      if (load + T::kFetches < kLoads) fetch(load + T::kFetches, words[load % T::kFetches]);
      if constexpr (T::kFp8Math) {
        auto& part = parts[load / kPartLoads % kParts];
        if (load % kPartLoads == 0) {
          mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
          cute::warpgroup_fence_operand(part);
        }
        multiply(mma, operand, operand_b(load), load % 2, part);
      } else {
        multiply(mma, operand, operand_b(load), load % 2 * T::kStepsPerLoad, result(load));
      }
    }
  }

  template <class Result>
  CUTE_DEVICE void finish(Result&& result) {
    cute::warpgroup_wait<0>();
    if constexpr (T::kFp8Math) {
      CUTE_UNROLL
      for (int part = (kLoads - T::kOperands) / kPartLoads; part < kLoads / kPartLoads; ++part) add_part(part, result);
    }
  }

  template <class Result>
  CUTE_DEVICE void add_part(int n, Result&& result) {
    auto& part = parts[n % kParts];
    cute::warpgroup_fence_operand(part);
    auto sum = result(kPartLoads * n);
    CUTE_UNROLL
    for (int i = 0; i < cute::size(part); ++i) sum(i) += part(i);
  }
};

}  // namespace etap::transposed_fp8

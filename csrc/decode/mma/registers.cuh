// S^T = K·Q^T and O^T += V^T·P^T of one tile of e4m3, with V^T in registers, and K where products are float16.
//
// A matrix load of four 8 x 16-byte blocks gives a thread four words. Of K, rows r = lane / 4 and r + 8 of its warp's 16
// tokens, columns 4c to 4c + 3 (c = lane % 4) of two units of 16. Of V, transposed in pairs of bytes: value dims 2r and
// 2r + 1 of its warp's 16, tokens 2c and 2c + 1 of four times 8. Which columns WGMMA takes for which is free as long as Q
// and P^T have the same order, and which rows of O^T are which value dims as long as the epilogue knows.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "decode/cta/splits.cuh"
#include "decode/mma/shared.cuh"
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

// Bytes 0 and 2, and bytes 1 and 3, of four e4m3 values as bfloat16, exactly: the exponent's and mantissa's bits are moved to
// where bfloat16 has them. The factor, a power of two twice, makes up for the difference of the exponents' biases. (A NaN becomes
// 480; it has made scores NaN before.)
constexpr uint32_t kFactor = 0x7b807b80, kFactorTimes128 = 0x7f007f00;  // 2^120 and 2^127
CUTE_DEVICE uint2 to_bfloat16(uint32_t word, uint32_t factor) {
  constexpr uint32_t kSigns = 0x80008000, kMagnitudes = 0x07f007f0;
  const uint32_t even = (word << 8 & kSigns) | (word << 4 & kMagnitudes);
  const uint32_t odd = (word & kSigns) | (word >> 4 & kMagnitudes);
  return {ptx::mul_bf16x2(even, factor), ptx::mul_bf16x2(odd, factor)};
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
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2], words[3]);
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
  cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2], words[3]);
}

// Makes values of E of V's words. factor: see to_bfloat16.
template <class E, int kSteps>
CUTE_DEVICE void convert_values(const Words& words, Operand<kSteps>& operand, uint32_t factor = kFactor) {
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

  // The same when the first words have been asked for.
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

// Computes S^T = K·Q^T of one tile in e4m3, K as it lies in shared memory. Sums are of two steps, as above.
template <class T>
CUTE_DEVICE void multiply_shared_keys(const char* tile, const char* query, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  typename T::ScoreMma mma;
  decltype(make_fragment_like(st(_, 0, 0))) sums[T::kScoreSums];
  const auto multiply_chunk = [&](int chunk, const auto& r_key, int first_step) {
    const auto r_query = wgmma::operand_b<typename T::QueryOperand>(mma, query + chunk * T::kQueryChunkBytes);
    auto& sum = sums[chunk % T::kScoreSums];
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    wgmma::multiply(mma, r_key, first_step, r_query, 0, size<2>(r_query), sum);
    warpgroup_commit_batch();
  };
  const auto add_part = [&](int chunk) {
    auto& sum = sums[chunk % T::kScoreSums];
    warpgroup_fence_operand(sum);
    CUTE_UNROLL
    for (int i = 0; i < size(sum); ++i) st(i) = chunk == 0 ? sum(i) : st(i) + sum(i);
  };

  constexpr int kMostWaiting = 7;  // that a wait can name
  CUTE_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= T::kScoreSums) {
      warpgroup_wait<cute::min(kMostWaiting, T::kScoreSums - 1)>();
      add_part(chunk - T::kScoreSums);
    }
    if (chunk < kValueChunks) {
      multiply_chunk(chunk, wgmma::operand_a<typename T::LatentOperand>(mma, tile + chunk / 2 * T::kWideBytes), chunk % 2 * 2);
    } else {
      multiply_chunk(chunk, wgmma::operand_a<typename T::RopeOperand>(mma, tile + T::kWideChunks * T::kWideBytes), 0);
    }
  }
  for_each(make_seq<T::kScoreSums>{}, [&](auto i) {
    warpgroup_wait<cute::min(kMostWaiting, T::kScoreSums - 1 - i)>();
    add_part(kChunks - T::kScoreSums + i);
  });
}

// Does the same with a consumer's share of the columns, where both halve a tile: see transposed/single_tile.cuh. Rope's share is one step.
template <class T>
CUTE_DEVICE void multiply_shared_key_share(const char* tile, const char* query, int group, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  using transposed::kShareChunks;
  typename T::ScoreMma mma;
  decltype(make_fragment_like(st(_, 0, 0))) sums[kShareChunks + 1];
  const auto query_chunk = [&](int chunk) {
    return wgmma::operand_b<typename T::QueryOperand>(mma, query + chunk * T::kQueryChunkBytes);
  };
  CUTE_UNROLL
  for (auto& sum : sums) warpgroup_fence_operand(sum);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int c = 0; c < kShareChunks; ++c) {
    const int chunk = group * kShareChunks + c;
    const auto r_query = query_chunk(chunk);
    const auto r_key = wgmma::operand_a<typename T::LatentOperand>(mma, tile + chunk / 2 * T::kWideBytes);
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    wgmma::multiply(mma, r_key, c % 2 * 2, r_query, 0, size<2>(r_query), sums[c]);
  }
  const auto rope_key = wgmma::operand_a<typename T::RopeOperand>(mma, tile + T::kWideChunks * T::kWideBytes);
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  wgmma::multiply(mma, rope_key, group, query_chunk(kValueChunks), group, 1, sums[kShareChunks]);
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (auto& sum : sums) warpgroup_fence_operand(sum);
  CUTE_UNROLL
  for (int i = 0; i < size(sums[0]); ++i) {
    st(i) = sums[0](i);
    CUTE_UNROLL
    for (int c = 1; c <= kShareChunks; ++c) st(i) += sums[c](i);
  }
}

// Computes S^T in float16, K through registers, of all columns or of a consumer's share of them (of two).
template <class T, int kShares>
CUTE_DEVICE void multiply_loaded_keys(const char* tile, const char* query, int share, transposed::ScoreFragment<T>& st) {
  using namespace cute;
  using Element = typename T::Element;
  constexpr int kLatentLoads = kLatentDim / 32 / kShares, kRopeLoads = kRopeDim / 32 / kShares;
  LoadedProducts<T, typename T::ScoreMma, kLatentLoads + kRopeLoads, decltype(make_fragment_like(st(_, 0, 0)))> products;
  const auto result = [&](int) { return st(_, 0, 0); };
  static_assert(kShares == 1 || kRopeLoads == 1);
  const auto of_tile = [&](int load) {  // the share's load, counted through the tile
    if (kShares == 1) return load;
    return load < kLatentLoads ? share * kLatentLoads + load : kShares * kLatentLoads + share;
  };
  products.mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(st);
  products.start([&](int load, auto& words) { load_keys_words<T>(tile, of_tile(load), words); },
                 [](const auto& words, auto& operand) { convert_keys(words, operand); },
                 [&](int load) {
                   const int column = kShares == 1 || load < kLatentLoads ? 0 : share * 32;  // of the chunk
                   const int chunk = load < kLatentLoads ? of_tile(load) / 2 : kValueChunks;
                   const auto* from = reinterpret_cast<const Element*>(query + chunk * T::kQueryChunkBytes) + column;
                   return wgmma::operand_b<typename T::QueryOperand>(products.mma, from);
                 },
                 result);
  products.finish(result);
  warpgroup_fence_operand(st);
}

// Computes S^T of one tile, or a consumer's share of it (of two), which is complete on return.
template <class T, int kShares = 1>
CUTE_DEVICE void compute_scores(Shared<T>& shared, const DecodeParams& params, KeyPosition<T> at, int group,
                                transposed::ScoreFragment<T>& st) {
  const char* query = shared.query + T::first_column(group) * kChunkColumns * sizeof(typename T::Element);  // where nothing is shared
  const char* tile = shared.ring + at.stage * T::kStageBytes;
  shared.keys.wait(at);
  if constexpr (T::kFp8Math) {
    // What cp.async wrote, for WGMMA.
    if (params.key_load == KeyLoad::kRows) ETAP_MARKED(rows_fence, cutlass::arch::fence_view_async_shared());
  }
  if constexpr (!T::kFp8Math) {
    multiply_loaded_keys<T, kShares>(tile, kShares == 1 ? query : shared.query, kShares == 1 ? 0 : group, st);
  } else if constexpr (kShares == 1) {
    multiply_shared_keys<T>(tile, query, st);
  } else {
    multiply_shared_key_share<T>(tile, shared.query, group, st);
  }
}

// Adds V^T·P^T of one tile to O^T, kSlices of it from first_slice on. Where those are a consumer's all, the tile is given back once
// it is in registers. `meanwhile` runs beside the last products, or before the first where its registers are wanted.
template <class T, int kSlices = T::kOutputSlices, class Meanwhile>
CUTE_DEVICE void add_output(Shared<T>& shared, KeyPosition<T> at, int first_slice, const char* probabilities,
                            transposed::OutputFragment<T>& ot, Meanwhile&& meanwhile) {
  using namespace cute;
  const char* tile = shared.ring + at.stage * T::kStageBytes + first_slice / 2 * T::kWideBytes;
  LoadedProducts<T, typename T::OutputMma, 2 * kSlices, decltype(make_fragment_like(ot(_, 0, 0)))> products;
  products.mma.accumulate_ = GMMA::ScaleOut::One;
  const auto r_pt = wgmma::operand_b<typename T::ProbabilityOperand>(products.mma, probabilities);
  const auto result = [&](int load) { return ot(_, load / 2, 0); };

  constexpr bool kFewRegisters = T::kFp8Math && T::kRowTile > 16;  // beside the parts
  if (kFewRegisters) meanwhile();
  warpgroup_fence_operand(ot);
  products.start([&](int load, auto& words) { load_values_words<T>(tile, load / 2, load % 2, words); },
                 [](const auto& words, auto& operand) { convert_values<typename T::Element>(words, operand); },
                 [&](int) { return r_pt; }, result);
  __syncwarp();
  if (kSlices == T::kOutputSlices && !T::kProbabilitiesInTile && releases()) shared.keys.release(at);
  if (!kFewRegisters) meanwhile();
  products.finish(result);
  warpgroup_fence_operand(ot);
}

}  // namespace etap::transposed_fp8

// Where the consumers share a tile of FP8 rows, each adds up the products of its own columns of K for all query rows, and gives the
// other one what belongs to its rows.
#pragma once

#include "decode/mma/fp8_rows.cuh"

namespace etap::sparse_fp8 {

// A warpgroup's share of S^T: [64 tokens x all query rows].
template <class T>
using ScoreShare = wgmma::Result<typename T::ShareMma, kTileTokens, T::kRowTile>;

// What a share is multiplied with behind its first 128 columns, and behind its second, for a thread's two tokens: one accumulator
// takes a * A + b * B as (a / b * A + B) * b.
struct ShareFactors {
  float first[2], second[2];

  template <class T>
  CUTE_DEVICE static ShareFactors read(const char* tile, int group) {
    const char* row = tile + fragment_row() * T::kRowBytes + T::Row::kScaleOffset;
    ShareFactors factors;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float2 scales = *reinterpret_cast<const float2*>(row + i * 8 * T::kRowBytes + group * sizeof(float2));
      // b is at least 2^-64 * a: what is too much then float32 has no room for beside A. And 2^-124, for its inverse.
      const float least = fmaxf(0x1p-64f * fabsf(scales.x), 0x1p-124f);
      const bool alone = scales.x == 0.0f;  // B
      const float b = fabsf(scales.y) < least && !alone ? least : scales.y;
      // Quarters, whose inverses __fdividef has for the largest numbers, too.
      const float divisor = 0.25f * b, dividend = 0.25f * scales.x;
      const float inverse = __fdividef(1.0f, divisor);
      const float ratio = dividend * inverse;
      // To the last bit but for rounding.
      factors.first[i] = alone ? 0.0f : fmaf(fmaf(-ratio, divisor, dividend), inverse, ratio);
      factors.second[i] = b;
    }
    return factors;
  }
};

// This warpgroup's share of S^T of one tile; complete on return. The queries' latent part has a power of two for each row, which
// is taken back before the rope part's products are added.
template <class T>
CUTE_DEVICE void compute_share(Shared<T>& shared, const char* tile, int group, ScoreShare<T>& share) {
  using namespace cute;
  constexpr int kLoadsPerScale = T::Row::kScaledColumns / 32;
  constexpr int kLatentLoads = kLatentDim / kConsumerGroups / 32;
  constexpr int kLoads = kLatentLoads + kRopeDim / kConsumerGroups / 32;
  static_assert(kLatentLoads == 2 * kLoadsPerScale && kLoads == kLatentLoads + 1);
  typename T::ShareMma mma;
  typename T::RopeMma rope_mma;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  rope_mma.accumulate_ = GMMA::ScaleOut::One;
  const char* query = shared.query + group * (kValueChunks / kConsumerGroups) * T::kQueryChunkBytes;
  Operands operands[T::kOperands];
  Words words[T::kFetches];

  const auto fetch = [&](int load) {
    if (load >= kLatentLoads) return;
    load_key_units<T>(tile, group * (kLatentDim / kConsumerGroups) + load * 32, words[load % T::kFetches]);
  };
  CUTE_UNROLL
  for (int load = 0; load < T::kFetches; ++load) fetch(load);
  const auto factors = ShareFactors::read<T>(tile, group);
  const auto multiply_sum = [&](auto&& factor) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(share);
    CUTE_UNROLL
    for (int i = 0; i < size(share); ++i) share(i) *= factor(i);
    warpgroup_fence_operand(share);
  };

  warpgroup_fence_operand(share);
  CUTE_UNROLL
  for (int load = 0; load < kLatentLoads; ++load) {
    auto& operand = operands[load % T::kOperands];
    if (load >= T::kOperands) warpgroup_wait<T::kOperands - 1>();
    transposed_fp8::convert_keys(words[load % T::kFetches], operand);
    fetch(load + T::kFetches);
    if (load == kLoadsPerScale) multiply_sum([&](int i) { return factors.first[i / 2 % 2]; });
    const auto queries = operand_b<T>(mma, query + load / 2 * T::kQueryChunkBytes);
    transposed_fp8::multiply(mma, operand, queries, load % 2 * 2, share(_, 0, 0));
  }
  auto& operand = operands[kLatentLoads % T::kOperands];
  warpgroup_wait<T::kOperands - 1>();
  load_rope<T>(tile, group, operand);
  multiply_sum([&](int i) {
    return factors.second[i / 2 % 2] * shared.score_scales[transposed::fragment_column(i / 4, i % 2)];
  });
  const auto rope_queries = operand_b<T>(rope_mma, shared.query + kValueChunks * T::kQueryChunkBytes);
  transposed_fp8::multiply(rope_mma, operand, rope_queries, group * 2, share(_, 0, 0));
  warpgroup_wait<0>();
  warpgroup_fence_operand(share);
}

// Gives the other warpgroup its rows' share.
template <class T, int kGroup>
CUTE_DEVICE void give_share(Shared<T>& shared, const ScoreShare<T>& share) {
  constexpr int kFirst = T::first_column(1 - kGroup) / 2;  // four values of a thread for eight columns
  CUTE_UNROLL
  for (int i = 0; i < T::kScoreColumns / 2; i += 4) {
    const int from = kFirst + i;
    shared.shares[1 - kGroup][i / 4][threadIdx.x % kGroupThreads] =
        make_float4(share(from), share(from + 1), share(from + 2), share(from + 3));
  }
}

// Adds what the other one gives for the rows of this one, in the log2 domain. (The product is rounded before a reference is taken
// from it: where tokens' scales are large, what one rounding less leaves over may be as well.)
template <class T, int kGroup>
CUTE_DEVICE void take_share(Shared<T>& shared, const ScoreShare<T>& share, float scale_log2, transposed::ScoreFragment<T>& st) {
  constexpr int kFirst = T::first_column(kGroup) / 2;
  CUTE_UNROLL
  for (int i = 0; i < T::kScoreColumns / 2; i += 4) {
    const float4 taken = shared.shares[kGroup][i / 4][threadIdx.x % kGroupThreads];
    const int at = kFirst + i;
    st(i) = __fmul_rn(share(at) + taken.x, scale_log2);
    st(i + 1) = __fmul_rn(share(at + 1) + taken.y, scale_log2);
    st(i + 2) = __fmul_rn(share(at + 2) + taken.z, scale_log2);
    st(i + 3) = __fmul_rn(share(at + 3) + taken.w, scale_log2);
  }
}

}  // namespace etap::sparse_fp8

// 64 query rows with a cache of their type: S = Q·K^T and O += P·V with the rows on WGMMA's M, which they fill.
//
// Glossary   s: S [64 rows x 64 tokens]   p: P as operand A, in registers   o: O [64 rows x 256 value dims]
//
// A warpgroup owns every other tile, whose scores and softmax it does, and half of the value dims of all tiles. Its
// threads hold the same rows of S, P and O, so a row's maximum needs four lanes only, and P goes from a thread to the
// same thread of the other warpgroup as it is. Time going down:
//   warpgroup 0: s(0)      softmax(0) o(0)          s(2) o(1) softmax(2) o(2)
//   warpgroup 1:      s(1)            o(0) softmax(1) o(1)               s(3) o(2) ...
#pragma once

#include "decode/epilogue.cuh"
#include "decode/load.cuh"

namespace etap {

template <class Element_>
struct RowsTraits {
  using Element = Element_;
  static constexpr int kRowTile = 64;
  static constexpr bool kFp8Cache = false;
  static constexpr bool kSharedTiles = true;
  static constexpr bool kRowsOnM = true;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  // The ring is two tiles, one of each warpgroup.
  static constexpr int kChunksPerStage = 1;
  static constexpr int kStagesPerTile = kChunks;
  static constexpr int kStageBytes = kChunkBytes;
  static constexpr int kStages = kConsumerGroups * kStagesPerTile;
  static constexpr int kStageReleases = kWarpsPerGroup;
  static constexpr int kHalfChunks = kValueChunks / kConsumerGroups;
  // The order in which a tile's chunks come: rope, which its owner's scores give back first, the value dims of one
  // warpgroup, the other's. The owner's come first, unless earlier pieces of the CTA had an odd number of tiles: scores are
  // added up in this order, which follows from the tile's place in its piece, so that no bit depends on other requests.
  __device__ __forceinline__ static int first_half(int i) { return i % kConsumerGroups; }
  __device__ __forceinline__ static int first_chunk(int stage, int i) {
    return stage == 0 ? kValueChunks : (first_half(i) * kHalfChunks + stage - 1) % kValueChunks;
  }

  // Where a warp hands P over to the same warp of the other warpgroup.
  __device__ __forceinline__ static int hand_over_barrier(int owner) {
    return kHandOverBarrier + owner * kWarpsPerGroup + threadIdx.x % kGroupThreads / kWarpSize;
  }

  static constexpr auto kMajorK = cute::GMMA::Major::K;
  static constexpr auto kMajorMN = cute::GMMA::Major::MN;
  static constexpr int kOutputDims = kLatentDim / kConsumerGroups;
  static constexpr int kFirstScores = 5;   // chunks of the first share of a tile's scores: rope and one half of the value dims
  static constexpr int kProductDims = 64;  // of one WGMMA
  static constexpr int kProducts = kOutputDims / kProductDims;
  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kTileTokens>, cute::_64>, kMajorK,
                                 kMajorK>()));
  using OutputMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kProductDims>, cute::_64>, kMajorK,
                                 kMajorMN>()));
  // Q chunk [64 rows x 64 columns] and K chunk [64 tokens x 64 columns].
  using RowChunk =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<cute::_64, cute::_64>{}));
  // Value chunks side by side, as [value dims x 64 tokens].
  using ValueChunks = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                   cute::Shape<cute::Int<kProductDims>, cute::_64>{},
                                                   cute::Step<cute::_2, cute::_1>{}));
  using Scores =
      decltype(cute::partition_fragment_C(ScoreMma{}, cute::Shape<cute::_64, cute::Int<kTileTokens>>{}));
  using Output = decltype(cute::partition_fragment_C(OutputMma{}, cute::Shape<cute::_64, cute::Int<kOutputDims>>{}));

  static constexpr int kQueryChunkBytes = kRowTile * kChunkColumns * 2;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;

  struct CacheMaps {
    CUtensorMap rows;
  };

  static constexpr int kWords = kTileTokens / 4;  // of a thread's P: pairs of neighbouring tokens
  static constexpr int kQuads = kGroupThreads / 4;

  struct SharedStorage {
    alignas(1024) char ring[kStages * kStageBytes];
    alignas(1024) char query[kQueryBytes];
    uint4 probabilities[kWords / 4][kGroupThreads];  // the owner's of the last tile, for the same thread of the other
    float2 references[kQuads];                       // of that tile's P: rows r and r + 8
    float4 sums[2][kConsumerGroups][kQuads];         // at the end of every other piece: of P and of rounded P
    Ring<kStages> keys;
    Ring<1> queries;
  };
};

// The n-th tile of a CTA.
template <class T>
__device__ __forceinline__ RingPosition<T::kStages> tile_position(int n) {
  return {n % kConsumerGroups * T::kStagesPerTile, uint32_t(n / kConsumerGroups % 2)};
}

// What a thread keeps of its two rows, r and r + 8, over a piece. Sums are of its own tokens of the tiles its warpgroup owns.
struct RowState {
  float reference[2];
  float sums[2];
  float rounded_sums[2];
  int visible[2];  // tokens that the row may see

  __device__ __forceinline__ RowState(const DecodeParams& params, const Piece& piece, int row_group) {
    const int row = row_group * kMaxRowTile + threadIdx.x % kGroupThreads / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      reference[h] = kNoMaximum;
      sums[h] = rounded_sums[h] = 0.0f;
      visible[h] = piece.seq_len - params.s_q + min((row + 8 * h) / params.heads, params.s_q - 1) + 1;
    }
  }

  // Take a reference that is at least the old one; what was summed so far is to be multiplied with the result.
  __device__ __forceinline__ float raise(int h, float to) {
    const float factor = ptx::ex2(reference[h] - to);
    reference[h] = to;
    sums[h] *= factor;
    rounded_sums[h] *= factor;
    return factor;
  }
};

template <class T>
__device__ __forceinline__ void scale_rows(typename T::Output& o, const float (&factor)[2]) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(o); ++i) o(i) *= factor[i / 2 % 2];
}

// Start the share of S of an own tile, its piece's i-th, that stages [kBegin, kEnd) have, one by one as they arrive: a group
// of WGMMAs.
template <class T, int kBegin, int kEnd>
__device__ __forceinline__ void start_row_scores(typename T::SharedStorage& shared, RingPosition<T::kStages> at, int i,
                                                 typename T::Scores& s) {
  using namespace cute;
  using Element = typename T::Element;
  typename T::ScoreMma mma;
  mma.accumulate_ = kBegin == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  const auto slice = mma.get_thread_slice(0);  // operands in shared memory do not depend on the thread
  const auto chunk_at = [](const char* bytes) {
    return make_tensor(make_smem_ptr(reinterpret_cast<const Element*>(bytes)), typename T::RowChunk{});
  };
  warpgroup_fence_operand(s);
  CUTE_UNROLL
  for (int stage = kBegin; stage < kEnd; ++stage) {
    shared.keys.wait({at.stage + stage, at.parity});
    warpgroup_arrive();
    auto r_query = slice.make_fragment_A(
        slice.partition_A(chunk_at(shared.query + T::first_chunk(stage, i) * T::kQueryChunkBytes)));
    auto r_key = slice.make_fragment_B(slice.partition_B(chunk_at(shared.ring + (at.stage + stage) * T::kStageBytes)));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_key); ++k) {
      gemm(mma, r_query(_, 0, k), r_key(_, 0, k), s(_, 0, 0));
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }
  warpgroup_commit_batch();
}

// Start this warpgroup's half of P·V, from stage `first` on: kProducts groups of WGMMAs. P's registers are theirs until then.
template <class T>
__device__ __forceinline__ void start_row_output(typename T::SharedStorage& shared, int first, const uint32_t (&p)[T::kWords],
                                                 typename T::Output& o) {
  using namespace cute;
  using Element = typename T::Element;
  typename T::OutputMma mma;
  mma.accumulate_ = GMMA::ScaleOut::One;
  const auto slice = mma.get_thread_slice(0);
  constexpr int kStages = T::kProductDims / kChunkColumns;
  warpgroup_fence_operand(o);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int n = 0; n < T::kProducts; ++n) {
    auto s_value = make_tensor(
        make_smem_ptr(reinterpret_cast<const Element*>(shared.ring + (first + n * kStages) * T::kStageBytes)),
        typename T::ValueChunks{});
    auto r_value = slice.make_fragment_B(slice.partition_B(s_value));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_value); ++k) {
      const auto a = make_tensor(make_rmem_ptr(reinterpret_cast<const Element*>(&p[4 * k])), Layout<_8>{});
      gemm(mma, a, r_value(_, 0, k), o(_, 0, n));
    }
    warpgroup_commit_batch();
  }
}

// Wait for the products and give their stages back as soon as those of a WGMMA are done.
template <class T, int kOutstanding = T::kProducts - 1>
__device__ __forceinline__ void finish_row_output(typename T::SharedStorage& shared, int first, typename T::Output& o) {
  constexpr int kStages = T::kHalfChunks / T::kProducts;
  cute::warpgroup_wait<kOutstanding>();
  if (threadIdx.x % kWarpSize == 0) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      shared.keys.release({first + (T::kProducts - 1 - kOutstanding) * kStages + stage, 0});
    }
  }
  if constexpr (kOutstanding > 0) {
    finish_row_output<T, kOutstanding - 1>(shared, first, o);
  } else {
    cute::warpgroup_fence_operand(o);
  }
}

// Zero this half of V's rows behind the request's end: they may hold NaN, and 0 * NaN is NaN. Scores may still read there,
// which are masked.
template <class T>
__device__ __forceinline__ void zero_half_tail(typename T::SharedStorage& shared, int first, int group, int valid) {
  const int units = (kTileTokens - valid) * 8;  // of 16 bytes, of a chunk
#pragma unroll 1
  for (int i = anew(threadIdx.x % kGroupThreads); i < units; i += kGroupThreads) {
    CUTE_UNROLL
    for (int stage = 0; stage < T::kHalfChunks; ++stage) {
      reinterpret_cast<uint4*>(shared.ring + (first + stage) * T::kStageBytes + valid * 128)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  cutlass::arch::fence_view_async_shared();  // these writes, for WGMMA once the warpgroup has met
  ptx::barrier_sync(kGroupBarrier + group, kGroupThreads);
}

// P = 2^(scale * S - reference), rounded, against a reference that is renewed when a score lies too far above it. True when
// O is to be multiplied with `factor`.
template <class T>
__device__ __forceinline__ bool exponentiate_rows(const typename T::Scores& s, float scale, RowState& state,
                                                  uint32_t (&p)[T::kWords], float (&factor)[2]) {
  float maximum[2] = {s(0), s(2)};
  CUTE_UNROLL
  for (int i = 0; i < cute::size(s); ++i) maximum[i / 2 % 2] = fmaxf(maximum[i / 2 % 2], s(i));
  bool exceeds = false;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) exceeds |= fmaf(maximum[h], scale, -state.reference[h]) > kLazyMaximum;
  const bool renew = __any_sync(0xffffffff, exceeds);
  if (renew) {
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffff, maximum[h], 1));
      maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(0xffffffff, maximum[h], 2));
      factor[h] = state.raise(h, fmaxf(state.reference[h], maximum[h] * scale));
    }
  }
  float sums[2] = {0.0f, 0.0f};
  float rounded_sums[2] = {0.0f, 0.0f};
  CUTE_UNROLL
  for (int word = 0; word < T::kWords; ++word) {
    const int h = word % 2;
    const float low = ptx::ex2(fmaf(s(2 * word), scale, -state.reference[h]));
    const float high = ptx::ex2(fmaf(s(2 * word + 1), scale, -state.reference[h]));
    p[word] = pack<typename T::Element>(low, high);
    const float2 rounded = unpack<typename T::Element>(p[word]);
    sums[h] += low + high;
    rounded_sums[h] += rounded.x + rounded.y;
  }
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    state.sums[h] += sums[h];
    state.rounded_sums[h] += rounded_sums[h];
  }
  return renew;
}

// Hand P to the same thread of the other warpgroup.
template <class T>
__device__ __forceinline__ void publish_rows(typename T::SharedStorage& shared, int group, const RowState& state,
                                             const uint32_t (&p)[T::kWords]) {
  const int thread = threadIdx.x % kGroupThreads;
  CUTE_UNROLL
  for (int i = 0; i < T::kWords / 4; ++i) {
    shared.probabilities[i][thread] = make_uint4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  }
  if (thread % 4 == 0) shared.references[thread / 4] = make_float2(state.reference[0], state.reference[1]);
#ifdef ETAP_SPIN_LIMIT
  meet(T::hand_over_barrier(group), 2 * kWarpSize);  // racecheck takes no arrival without a wait
#else
  ptx::barrier_arrive(T::hand_over_barrier(group), 2 * kWarpSize);
#endif
}

// P of the other warpgroup's tile, and its reference. True when O is to be multiplied with `factor`.
template <class T>
__device__ __forceinline__ bool take_rows(typename T::SharedStorage& shared, int owner, RowState& state,
                                          uint32_t (&p)[T::kWords], float (&factor)[2]) {
  const int thread = threadIdx.x % kGroupThreads;
  meet(T::hand_over_barrier(owner), 2 * kWarpSize);
  CUTE_UNROLL
  for (int i = 0; i < T::kWords / 4; ++i) {
    const uint4 four = shared.probabilities[i][thread];
    p[4 * i] = four.x;
    p[4 * i + 1] = four.y;
    p[4 * i + 2] = four.z;
    p[4 * i + 3] = four.w;
  }
  const float2 reference = shared.references[thread / 4];
  __syncwarp();  // all lanes have read, before a lane's next P takes the place of it
  const bool renewed = __any_sync(0xffffffff, reference.x != state.reference[0] || reference.y != state.reference[1]);
  factor[0] = state.raise(0, reference.x);
  factor[1] = state.raise(1, reference.y);
  return renewed;
}

// Hide the tokens that a row must not see: those behind the request's end, and for s_q > 1 those behind the row's own.
template <class T>
__device__ __forceinline__ void mask_rows(const RowState& state, int tile, typename T::Scores& s) {
  const int token = tile * kTileTokens + threadIdx.x % 4 * 2;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(s); ++i) {
    if (token + i / 4 * 8 + i % 2 >= state.visible[i / 2 % 2]) s(i) = -INFINITY;
  }
}

// What both consumers know of a CTA's tiles, and one of them holds.
template <class T>
struct RowConsumer {
  typename T::SharedStorage& shared;
  const DecodeParams& params;
  const int group;
  typename T::Output o;

  // This warpgroup's half of the CTA's n-th tile, its piece's i-th, begins at this stage.
  __device__ __forceinline__ int half_stage(int n, int i) const {
    return n % kConsumerGroups * T::kStagesPerTile + 1 + (T::first_half(i) == group ? 0 : T::kHalfChunks);
  }

  // The output of the other warpgroup's tile, the CTA's n-th.
  __device__ __forceinline__ void other_tile(const Piece& piece, int tile, int n, RowState& state) {
    uint32_t p[T::kWords];
    float factor[2];
    const bool renewed = take_rows<T>(shared, 1 - group, state, p, factor);
    if (renewed) scale_rows<T>(o, factor);
    add_output(piece, tile, n, p);
  }

  __device__ __forceinline__ void add_output(const Piece& piece, int tile, int n, const uint32_t (&p)[T::kWords]) {
    const int valid = piece.seq_len - tile * kTileTokens;
    const int first = half_stage(n, tile - piece.begin_tile);
    if (valid < kTileTokens) zero_half_tail<T>(shared, first, group, valid);
    start_row_output<T>(shared, first, p, o);
    finish_row_output<T>(shared, first, o);
  }

  // An own tile, the CTA's n-th, and the output of the one before it if it follows one in the piece: between two shares of
  // the scores, when P of that tile is there and the value dims of this one may still be on their way.
  __device__ __forceinline__ void own_tile(const Piece& piece, int tile, int n, bool last, RingPosition<1> query_at,
                                           RowState& state) {
    typename T::Scores s;
    const int i = tile - piece.begin_tile;
    const auto at = tile_position<T>(n);
    start_row_scores<T, 0, T::kFirstScores>(shared, at, i, s);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(s);
    if (tile > piece.begin_tile) other_tile(piece, tile - 1, n - 1, state);
    start_row_scores<T, T::kFirstScores, T::kStagesPerTile>(shared, at, i, s);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(s);
    if (threadIdx.x % kWarpSize == 0) {
      shared.keys.release(at);
      if (last) shared.queries.release(query_at);
    }
    if ((tile + 1) * kTileTokens > piece.seq_len - params.s_q + 1) mask_rows<T>(state, tile, s);
    uint32_t p[T::kWords];
    float factor[2];
    const bool renewed = exponentiate_rows<T>(s, params.scale_log2, state, p, factor);
    publish_rows<T>(shared, group, state, p);
    if (renewed && tile > piece.begin_tile) scale_rows<T>(o, factor);  // before a piece's first tile O is zero
    add_output(piece, tile, n, p);
  }

  // Write this half of O, divided by the rows' sums, and the log-sum-exp.
  __device__ __forceinline__ void finish_piece(const Destination<T>& to, int pieces, RowState& state);
  __device__ __forceinline__ void write(const Destination<T>& to);
};

template <class T>
__device__ __forceinline__ void RowConsumer<T>::finish_piece(const Destination<T>& to, int pieces, RowState& state) {
  const int thread = anew(threadIdx.x % kGroupThreads);
  const int row = thread / kWarpSize * 16 + thread % kWarpSize / 4;
  float sums[4] = {state.sums[0], state.sums[1], state.rounded_sums[0], state.rounded_sums[1]};
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 1);
    sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 2);
  }
  auto& exchange = shared.sums[pieces % 2];
  if (thread % 4 == 0) exchange[group][thread / 4] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  meet(kConsumersBarrier, kConsumerThreads);
  // In the same order in both warpgroups, so that both have the same sums.
  const float4 a = exchange[0][thread / 4], b = exchange[1][thread / 4];
  const float all[4] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  float inverse[2];
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    inverse[h] = all[h] == 0.0f ? 0.0f : __fdividef(1.0f, all[2 + h]);  // 0: the row saw no token; NaN stays NaN
    const float lse = all[h] == 0.0f ? -INFINITY : state.reference[h] + __log2f(all[h]);
    if (group != 0 || thread % 4 != 0 || row + 8 * h >= to.rows) continue;
    if (to.out != nullptr) {
      to.lse[row + 8 * h] = lse * kLn2;
    } else {
      to.partial_lse[row + 8 * h] = lse;
    }
  }
  scale_rows<T>(o, inverse);
  write(to);
}

// Among the four lanes of a row: word w of lane l becomes word l of lane w.
__device__ __forceinline__ void transpose_words(uint32_t (&words)[4]) {
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

// A final result row by row; a partial one as it lies in the registers, in the order that params.h gives.
template <class T>
__device__ __forceinline__ void RowConsumer<T>::write(const Destination<T>& to) {
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
  uint16_t* out = to.out + row * kLatentDim + group * T::kOutputDims + lane % 4 * 8;
  CUTE_UNROLL
  for (int h = 0; h < 2; ++h) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(o); i += 16) {  // 32 value dims
      uint32_t words[4];
      CUTE_UNROLL
      for (int w = 0; w < 4; ++w) words[w] = to.pack_out(o(i + 4 * w + 2 * h), o(i + 4 * w + 2 * h + 1));
      transpose_words(words);
      if (row + 8 * h < to.rows) {
        *reinterpret_cast<uint4*>(out + 8 * h * kLatentDim + i * 2) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void consume_rows(typename T::SharedStorage& shared, const DecodeParams& params, int partition,
                                             int row_group, int group) {
  RowConsumer<T> consumer{shared, params, group};
  RingPosition<1> queries;
  int n = 0;  // tiles of earlier pieces
  int pieces = 0;
  for (PieceWalk walk(params, partition); !walk.done(); queries.advance(1)) {
    const Piece piece = walk.next();
    const int tiles = piece.tiles();
    const int first = (n + group) % kConsumerGroups;  // own tile
    if (tiles == 0) write_empty<T>(Destination<T>(params, piece, row_group));
    shared.queries.wait(queries);
    if (tiles <= first) {  // no tile of this warpgroup's
      __syncwarp();        // all lanes have seen this round
      if (threadIdx.x % kWarpSize == 0) shared.queries.release(queries);
    }
    if (tiles == 0) continue;
    RowState state(params, piece, row_group);
    cute::clear(consumer.o);
    for (int i = first; i < tiles; i += kConsumerGroups) {
      consumer.own_tile(piece, piece.begin_tile + i, n + i, i + kConsumerGroups >= tiles, queries, state);
    }
    if ((n + tiles - 1 + group) % kConsumerGroups != 0) consumer.other_tile(piece, piece.end_tile - 1, n + tiles - 1, state);
    n += tiles;
    consumer.finish_piece(Destination<T>(params, piece, row_group), pieces++, state);
  }
}

}  // namespace etap

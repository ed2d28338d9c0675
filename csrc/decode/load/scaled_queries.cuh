// Query rows beside FP8 values: both consumers read them, scale each row into the range of the products' type, and lay them out as
// the columns of K come: in the order of matrix loads where products are float16.
#pragma once

#include <algorithm>

#include "decode/cta/splits.cuh"
#include "decode/layouts/sparse_fp8.h"
#include "decode/layouts/transposed_fp8.h"
#include "decode/load/queries.cuh"

namespace etap::transposed_fp8 {

// The values of the cache, or those of e4m3 queries, are multiplied with this. The former's is read before the predecessor has
// ended, which may still write the latter's beside it: so neither comes through L1, which would keep their line.
CUTE_DEVICE float scale_of(const float* scale) { return scale == nullptr ? 1.0f : __ldcg(scale); }

constexpr int kUnitColumns = 8;  // that a lane reads at once
constexpr int kRowUnits = kHeadDim / kUnitColumns;
constexpr int kLaneUnits = (kRowUnits + kWarpSize - 1) / kWarpSize;

struct QueryUnit {
  float values[kUnitColumns];
};

template <class Source, class Raw>
CUTE_DEVICE QueryUnit to_floats(const Raw& raw) {
  static_assert(sizeof(Raw) == kUnitColumns * sizeof(Source));
  QueryUnit unit;
  CUTE_UNROLL
  for (int i = 0; i < kUnitColumns; i += 4) {
    const auto four = reinterpret_cast<const cutlass::Array<Source, 4>*>(&raw)[i / 4];
    const auto floats = cutlass::NumericArrayConverter<float, Source, 4>{}(four);
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) unit.values[i + j] = floats[j];
  }
  return unit;
}

// The power of two that brings `largest` (the bits of a float without its sign) to 2^kWanted, or just above: by default the
// upper end of the products' type.
template <class T, int kWanted = T::kFp8Math ? 7 : 14>
CUTE_DEVICE int scale_exponent(uint32_t largest) {
  return max(-126, min(126, kWanted + 127 - int(largest >> 23)));
}

// Returns the byte of a 16-byte unit in the rows of a query chunk.
template <class T>
CUTE_DEVICE int operand_unit(int row, int unit) {
  return row * T::kOperandLine + (unit ^ swizzle<T::kOperandLine>(row)) * kUnitBytes;
}

// At 64 rows of e4m3 products a lane converts columns that do not exist, too, and does not write them: ptxas would keep words that
// lack a value otherwise through the main loop.
template <class T>
constexpr bool kConvertsAlways = T::kFp8Math && T::kRowTile == kMaxRowTile;

// Writes a lane's eight columns if they exist. With float16 products a thread's four bytes of K are columns 0, 1, 8 and 9 of
// WGMMA's sixteen for it, so pairs of columns change places: 0 2 4 6 first, then 1 3 5 7.
template <class T, class Element = typename T::Element>
CUTE_DEVICE void write_unit(char* query, int row, int index, const QueryUnit& unit, float factor, bool exists = true) {
  constexpr int kUnitsPerChunk = kChunkColumns / kUnitColumns;
  char* chunk = query + index / kUnitsPerChunk * T::kQueryChunkBytes;
  const int place = index % kUnitsPerChunk;
  uint32_t words[T::kFp8Math ? 2 : 4];
  CUTE_UNROLL
  for (int i = 0; i < kUnitColumns; i += 4) {
    const float(&v)[kUnitColumns] = unit.values;
    if constexpr (T::kFp8Math) {
      words[i / 4] = pack_four<Element>(v[i] * factor, v[i + 1] * factor, v[i + 2] * factor, v[i + 3] * factor);
    } else {
      words[i / 2] = pack<Element>(v[i] * factor, v[i + 1] * factor);
      words[i / 2 + 1] = pack<Element>(v[i + 2] * factor, v[i + 3] * factor);
    }
  }
  if constexpr (kConvertsAlways<T>) {
    for (uint32_t& word : words) word = anew(word);
    if (!exists) return;
  }
  if constexpr (T::kFp8Math) {
    *reinterpret_cast<uint2*>(chunk + operand_unit<T>(row, place / 2) + place % 2 * 8) = make_uint2(words[0], words[1]);
  } else {
    const int first = place / 2 * 2;
    *reinterpret_cast<uint2*>(chunk + operand_unit<T>(row, first) + place % 2 * 8) = make_uint2(words[0], words[2]);
    *reinterpret_cast<uint2*>(chunk + operand_unit<T>(row, first + 1) + place % 2 * 8) = make_uint2(words[1], words[3]);
  }
}

// A lane's eight columns as they lie in memory.
template <class Source>
using RawUnit = std::conditional_t<sizeof(Source) == 2, uint4, uint2>;

// Holds the units of the query rows that a warp reads at once, none of which waits for another. Rows of the tile behind the last
// one are zeros.
template <class T, class Source, int kRows>
struct RawRows {
  RawUnit<Source> units[kRows][kLaneUnits];

  // Rows first, first + kConsumerWarps, ... of the row tile; wait() before any is read.
  template <class Wait>
  CUTE_DEVICE RawRows(const DecodeParams& params, int request, int row_group, int first, Wait&& wait) {
    const int lane = threadIdx.x % kWarpSize;
    const int row = row_group * T::kRowTile + first;
    int token = row / params.heads;
    int head = row - token * params.heads;
    const Source *latents[kRows], *ropes[kRows];
    bool exist[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      QueryRow of(request, token, head, row + i * kConsumerWarps < params.rows);
      if (kStacks<T> && params.call_of == CallOf::kStacks) of = QueryRow(params, request, row + i * kConsumerWarps);
      latents[i] = static_cast<const Source*>(params.q) + of.latent(params);
      ropes[i] = static_cast<const Source*>(params.q_rope) + of.rope(params);
      exist[i] = of.exists;
      for (head += kConsumerWarps; head >= params.heads; head -= params.heads) ++token;
    }
    wait();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int u = 0; u < kLaneUnits; ++u) {
        const int column = (u * kWarpSize + lane) * kUnitColumns;
        const bool is_latent = (u + 1) * kWarpSize * kUnitColumns <= kLatentDim;
        ptx::load_if(exist[i] && (is_latent || column < kHeadDim), is_latent ? latents[i] + column : ropes[i] + (column - kLatentDim),
                     units[i][u]);
      }
    }
  }
};

template <class T, class Source>
CUTE_DEVICE void load_query_rows(Shared<T>& shared, const DecodeParams& params, int request, int row_group, float kv_scale) {
  constexpr bool kScaled = T::kFp8Math ? sizeof(Source) == 2 : std::is_same_v<Source, cutlass::bfloat16_t>;
  constexpr int kRowsAtOnce = T::kRowTile == 8 ? 1 : T::kRowTile == kMaxRowTile ? 4 : 2;
  static_assert(kLatentDim % (kWarpSize * kUnitColumns) == 0);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int first = threadIdx.x / kWarpSize; first < T::kRowTile; first += kRowsAtOnce * kConsumerWarps) {
    const RawRows<T, Source, kRowsAtOnce> raw(params, request, row_group, first, [&] {
      if (params.early_loads) pdl_wait_then_trigger();
    });
    const float score_scale = params.scale_log2 * kv_scale * scale_of(params.q_scale);
    CUTE_UNROLL
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int row = first + i * kConsumerWarps;
      QueryUnit units[kLaneUnits];
      CUTE_UNROLL
      for (int u = 0; u < kLaneUnits; ++u) units[u] = to_floats<Source>(raw.units[i][u]);
      int exponent = 0;
      if constexpr (kScaled) {
        uint32_t largest = 0;
        CUTE_UNROLL
        for (const auto& unit : units) {
          CUTE_UNROLL
          for (float value : unit.values) largest = max(largest, __float_as_uint(fabsf(value)));
        }
        exponent = scale_exponent<T>(__reduce_max_sync(0xffffffff, largest));
      }
      CUTE_UNROLL
      for (int u = 0; u < kLaneUnits; ++u) {
        const int index = u * kWarpSize + lane;
        const bool exists = index < kRowUnits;
        if (kConvertsAlways<T> || exists) write_unit<T>(shared.query, row, index, units[u], power_of_two(exponent), exists);
      }
      if (lane == 0) shared.score_scales[row] = score_scale * power_of_two(-exponent);
    }
  }
}

// Both consumers call it when they are done with the last split's scores; the rows are there for both on return.
template <class T>
CUTE_DEVICE void load_queries(Shared<T>& shared, const DecodeParams& params, int request, int row_group, float kv_scale) {
  if (params.query_type == QueryType::kBFloat16) {
    load_query_rows<T, cutlass::bfloat16_t>(shared, params, request, row_group, kv_scale);
  } else if (params.query_type == QueryType::kFloat16) {
    load_query_rows<T, cutlass::half_t>(shared, params, request, row_group, kv_scale);
  } else {
    load_query_rows<T, cutlass::float_e4m3_t>(shared, params, request, row_group, kv_scale);
  }
  cutlass::arch::fence_view_async_shared();  // these writes, for WGMMA
  event::queries_written().sync();
}

// The policy of a consumer (see queries.cuh) beside an FP8 cache. The rows come while the split's length is on its way.
template <class T>
struct ScaledQueries : QueryPolicy {
  static constexpr bool kAheadOfLength = true;

  float scale;

  CUTE_DEVICE float value_scale(const DecodeParams& params) {
    if (!T::kAlternatingTiles && params.early_loads) pdl_wait_then_trigger();
    return scale = scale_of(params.kv_scale);
  }
  // Where tiles alternate it is worked out where it is wanted: a register that kept it through the products would be spilled.
  CUTE_DEVICE static int row_group(const DecodeParams& params, int of_cta) {
    if constexpr (!T::kAlternatingTiles) return of_cta;
    return params.row_groups == 1 ? 0 : anew(blockIdx.x) % params.row_groups;
  }
  CUTE_DEVICE void begin_split(Shared<T>& shared, const DecodeParams& params, int request, int row_group) {
    load_queries<T>(shared, params, request, row_group, scale);
  }
};

}  // namespace etap::transposed_fp8

namespace etap::sparse_fp8 {

// Beside FP8 rows the latent part becomes float16, and the rope part stays as it is.

constexpr int kLatentUnits = kLatentDim / transposed_fp8::kUnitColumns / kWarpSize;  // of a lane
constexpr int kRopeLanes = kRopeDim / transposed_fp8::kUnitColumns;                  // the first ones have a unit each, or the last

// Where the rope part is value dims it lies behind those that have scales.
template <class T>
CUTE_DEVICE constexpr int first_rope_lane() {
  return T::Row::kRopeIsValue ? kWarpSize - kRopeLanes : 0;
}

// Scales a row and writes it where WGMMA reads it.
template <class T>
CUTE_DEVICE void write_query(Shared<T>& shared, const DecodeParams& params, int row,
                             const transposed_fp8::QueryUnit (&units)[kLatentUnits], uint4 rope) {
  using transposed_fp8::operand_unit;
  const int lane = threadIdx.x % kWarpSize;
  const int rope_unit = lane - first_rope_lane<T>();
  const auto scaled = [&](int u) { return u * kWarpSize + lane < T::kScaledDims / transposed_fp8::kUnitColumns; };
  uint32_t largest = 0;
  CUTE_UNROLL
  for (int u = 0; u < kLatentUnits; ++u) {
    CUTE_UNROLL
    for (float value : units[u].values) {
      if (scaled(u)) largest = max(largest, __float_as_uint(fabsf(value)));
    }
  }
  // Near 1: products are multiplied with the tokens' scales first, which may be large.
  const int exponent = transposed_fp8::scale_exponent<T, 0>(__reduce_max_sync(0xffffffff, largest));
  CUTE_UNROLL
  for (int u = 0; u < kLatentUnits; ++u) {
    if (!scaled(u)) continue;
    transposed_fp8::write_unit<T, typename T::ScoreElement>(shared.query, row, u * kWarpSize + lane, units[u],
                                                            transposed_fp8::power_of_two(exponent));
  }
  char* rope_chunk = shared.query + T::kScaledDims / kChunkColumns * T::kQueryChunkBytes;
  if (uint32_t(rope_unit) < kRopeLanes) *reinterpret_cast<uint4*>(rope_chunk + operand_unit<T>(row, rope_unit)) = rope;
  const float scale_log2 = T::kScoresScaledLast ? 1.0f : params.scale_log2;
  if (lane == 0) shared.score_scales[row] = scale_log2 * transposed_fp8::power_of_two(-exponent);
}

// The query rows of a token that a warp brings, on their way.
template <class T>
struct QueryRows {
  static constexpr int kAtOnce = std::min(4, T::kRowTile / kConsumerWarps);  // whose reads do not wait for each other's
  // Whether all of them are asked for while the split before is finished: at 32 rows registers are short.
  static constexpr bool kAhead = T::kRowTile <= 16;

  uint4 raw[kAtOnce][kLatentUnits], rope[kAtOnce];

  // Asks for the row tile's rows from `first` on. Rows of the tile behind the last one repeat it.
  CUTE_DEVICE void ask(const DecodeParams& params, int request, int row_group, int first = 0) {
    using transposed_fp8::kUnitColumns;
    const int lane = threadIdx.x % kWarpSize;
    const auto* q = static_cast<const cutlass::bfloat16_t*>(params.q) + request * params.q_stride_batch + lane * kUnitColumns;
    const auto* q_rope =
        static_cast<const cutlass::bfloat16_t*>(params.q_rope) + request * params.q_rope_stride_batch + lane * kUnitColumns;
    const int warp = anew(threadIdx.x) / kWarpSize;
    const bool reads_rope = !T::Row::kRopeIsValue && lane < kRopeLanes && params.q_rope != nullptr;
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = min(row_group * T::kRowTile + first + i * kConsumerWarps + warp, params.heads - 1);
      const auto* from = reinterpret_cast<const uint4*>(q + head * params.q_stride_head);
      CUTE_UNROLL
      for (int u = 0; u < kLatentUnits; ++u) raw[i][u] = from[u * kWarpSize];
      rope[i] = reads_rope ? *reinterpret_cast<const uint4*>(q_rope + head * params.q_rope_stride_head) : uint4{};
    }
  }

  CUTE_DEVICE void write(Shared<T>& shared, const DecodeParams& params, int first = 0) const {
    const int warp = anew(threadIdx.x) / kWarpSize;
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      transposed_fp8::QueryUnit units[kLatentUnits];
      CUTE_UNROLL
      for (int u = 0; u < kLatentUnits; ++u) {
        units[u] = transposed_fp8::to_floats<cutlass::bfloat16_t>(raw[i][u]);
      }
      write_query<T>(shared, params, first + i * kConsumerWarps + warp, units,
                     T::Row::kRopeIsValue ? raw[i][kLatentUnits - 1] : rope[i]);
    }
  }
};

// Both consumers call it when they are done with the last split's scores; the rows are there for both on return.
template <class T>
CUTE_DEVICE void load_queries(Shared<T>& shared, const DecodeParams& params, QueryRows<T>& rows, int request, int row_group) {
  if constexpr (QueryRows<T>::kAhead) {
    rows.write(shared, params);
  } else {
#pragma unroll 1
    for (int first = 0; first < T::kRowTile; first += QueryRows<T>::kAtOnce * kConsumerWarps) {
      rows.ask(params, request, row_group, first);
      rows.write(shared, params, first);
    }
  }
  ETAP_MARKED(queries_fence, cutlass::arch::fence_view_async_shared());  // these writes, for WGMMA
  ETAP_MARKED(queries_sync, event::queries_written().sync());
}

// The policy of a consumer (see queries.cuh) beside FP8 rows.
template <class T>
struct ScaledListedQueries : QueryPolicy {
  QueryRows<T> rows;

  CUTE_DEVICE void begin(const DecodeParams& params, typename T::Walk& walk, int row_group) {
    ETAP_MARKED(queries_wait, pdl_wait_then_trigger());
    ask(params, walk, row_group);
    walk.begin();
  }
  CUTE_DEVICE void await(Shared<T>& shared, const DecodeParams& params, int request, int row_group) {
    load_queries<T>(shared, params, rows, request, row_group);
  }
  CUTE_DEVICE void ask(const DecodeParams& params, typename T::Walk& walk, int row_group) {
    if constexpr (QueryRows<T>::kAhead) {
      if (!walk.done()) rows.ask(params, walk.request(), row_group);
    }
  }
};

}  // namespace etap::sparse_fp8

// From the parameters of a call to the launch of its decode kernel, in two steps: `prepare_decode` says all that the kernel
// is given and touches no GPU, `launch` hands it over.
#pragma once

#include <numeric>

#include "common/launch.h"
#include "params.h"

namespace etap {

// What the host needs to know of a compiled kernel: launch.cuh reads it off its traits.
struct DecodeKernel {
  KernelLaunch launch;  // but for its blocks
  CUtensorMapDataType map_type;
  int chunks;         // of the cache, each 128 bytes, as wide as its swizzle
  int copied_chunks;  // at a time
  bool rope_apart;    // rows are not a whole number of chunks: what is left has a map of its own
  bool lean_combination;  // what is summed behind it is, in the form that has room beside it: see combine.cu
};

// The kernels for a 16-bit cache (bfloat16_t or half_t), and for one of e4m3 (multiplied as half_t or float_e4m3_t).
// whole_tiles: copied so, not in parts or rows.
template <class Element>
DecodeKernel sixteen_bit_kernel(int row_tile, bool whole_tiles);
template <class Math>
DecodeKernel fp8_kernel(int row_tile, bool whole_tiles);

// The type of the cache, e4m3 or the queries', and how the former is multiplied.
struct CacheType {
  bool fp8;
  bool fp8_math;
};

// Tokens that no page's end separates, as many as are copied together. Parts of 8 would take TMA 72 copies a tile of 16 bits:
// below 16 rows are gathered.
constexpr int part_tokens(int64_t page_size) {
  const int part = int(std::gcd(page_size, int64_t(kTileTokens)));
  return part < 16 ? 1 : part;
}

// Strides in bytes. All zeros where 32 bits do not reach the last row.
RowSteps row_steps(int64_t pages, int64_t page_stride, int64_t page_size, int64_t row_stride);

// How the cache's tiles are copied: what params.cache says of where they lie decides.
void choose_key_load(DecodeParams& params, CacheType type);

// A tensor map before the driver encodes it, innermost dimension first. No padding: maps are compared byte by byte.
struct MapShape {
  const void* data;
  uint64_t extents[5];
  uint64_t strides[4];  // bytes; of the second dimension and on
  uint32_t box[5];
  int16_t rank;
  int16_t fills_nan;  // 1: what a box has beyond the extents comes as NaN, 0: as zeros
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
};

struct DecodeLaunch {
  KernelLaunch kernel;
  bool lean_combination;
  MapShape cache_maps[2];
  int cache_map_count;
  MapShape query_maps[2];
  bool query_maps_usable;
};

constexpr int64_t kTmaStrideEnd = int64_t(1) << 40;  // bytes: TMA takes strides below

DecodeLaunch prepare_decode(const DecodeParams& params, CacheType cache);
// device: the current one.
void launch(const DecodeLaunch& decode, const DecodeParams& params, int device, cudaStream_t stream);

}  // namespace etap

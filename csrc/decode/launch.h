// From the parameters of a call to the launch of its decode kernel, in two steps: `prepare_decode` says all that the kernel
// is given and touches no GPU, `launch` hands it over.
#pragma once

#include <numeric>

#include "decode/kernels.h"

namespace etap {

// Tokens that no page's end separates, as many as are copied together. Parts of 8 would take TMA 72 copies a tile of 16 bits:
// below 16 rows are gathered.
constexpr int part_tokens(int64_t page_size) {
  const int part = int(std::gcd(page_size, int64_t(kTileTokens)));
  return part < 16 ? 1 : part;
}

// Strides in bytes. All zeros where 32 bits do not reach the last row.
RowSteps row_steps(int64_t pages, int64_t page_stride, int64_t page_size, int64_t row_stride);

// How a cache's tiles are copied: where they lie decides.
KeyLoad key_load_of(const PagedCache& cache, bool fp8_cache);
// That, and what it needs to be known of params.cache.
void choose_key_load(DecodeParams& params, bool fp8_cache);

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
  MapShape cache_maps[2];
  int cache_map_count;
  MapShape query_maps[2];
  bool query_maps_usable;
};

constexpr int64_t kTmaStrideEnd = int64_t(1) << 40;  // bytes: TMA takes strides below

DecodeLaunch prepare_decode(const DecodeParams& params, const DecodeKernel& kernel, bool fp8_cache);
// device: the current one.
void launch(const DecodeLaunch& decode, const DecodeParams& params, int device, cudaStream_t stream);

}  // namespace etap

#include "decode/launch.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "decode/shape.h"

namespace etap {
namespace {

constexpr uint64_t kSwizzleBytes = 128;  // as wide as a chunk of columns
constexpr uint64_t kElementBytes = 2;    // of all maps: TMA knows NaN of 16 bits, not of 8

CUtensorMap encode(const MapShape& shape) {
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  static const auto encoder =
      reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(driver_function("cuTensorMapEncodeTiled", 12000));
  CUtensorMap map;
  // Promotion to 256 bytes costs 6% of the bandwidth: rows are 1152 bytes, so it fetches across their ends.
  const CUresult status = encoder(
      &map, shape.type, shape.rank, const_cast<void*>(shape.data), shape.extents, shape.strides, shape.box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      shape.fills_nan ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(int(status)));
  return map;
}

// The map of a shape, encoded when this thread did not do so lately. What is encoded says all that a map depends on, so an
// entry never grows stale; a shape takes the place of another with the same hash.
const CUtensorMap& encoded(const MapShape& shape) {
  static_assert(std::has_unique_object_representations_v<MapShape>);
  struct Entry {
    MapShape shape;
    CUtensorMap map;
  };
  constexpr int kBits = 9;  // a few maps for each of a model's layers
  thread_local const std::unique_ptr<Entry[]> entries(new Entry[1 << kBits]());
  uint64_t words[sizeof(MapShape) / sizeof(uint64_t)], hash = 0;
  std::memcpy(words, &shape, sizeof(shape));
  for (uint64_t word : words) hash = (hash ^ word ^ hash >> 29) * 0x9e3779b97f4a7c15;
  Entry& entry = entries[hash >> (64 - kBits)];
  if (std::memcmp(&entry.shape, &shape, sizeof(shape)) != 0) {
    entry.map = encode(shape);
    entry.shape = shape;
  }
  return entry.map;
}

MapShape map_shape(const void* data, CUtensorMapDataType type, std::initializer_list<uint64_t> extents,
                   std::initializer_list<uint64_t> strides, std::initializer_list<uint32_t> box, bool fills_nan) {
  MapShape shape{};
  shape.data = data;
  std::copy(extents.begin(), extents.end(), shape.extents);
  std::copy(strides.begin(), strides.end(), shape.strides);
  std::copy(box.begin(), box.end(), shape.box);
  shape.rank = int16_t(extents.size());
  shape.fills_nan = fills_nan;
  shape.type = type;
  shape.swizzle = shape.box[0] * kElementBytes == kSwizzleBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return shape;
}

// TMA wants a stride even where there is nothing to step to, and there any will do.
uint64_t stride_bytes(int64_t extent, int64_t bytes) { return extent == 1 ? 2 * kHeadDim : bytes; }

// A page that the cache lacks, inside of a request's length, is NaN: no number that could pass for a result.
void prepare_cache_maps(const DecodeKernel& kernel, const DecodeParams& params, bool fp8, DecodeLaunch& to) {
  constexpr uint64_t kColumns = kSwizzleBytes / kElementBytes;
  const PagedCache& cache = params.cache;
  const auto tokens = uint64_t(cache.page_size), pages = uint64_t(cache.pages);
  const auto box_tokens = uint32_t(params.part_tokens), rope_columns = uint32_t(fp8 ? kRopeDim / kElementBytes : kRopeDim);
  to.cache_map_count = kernel.rope_apart ? 2 : 1;
  to.cache_maps[0] = map_shape(
      cache.latent, kernel.map_type, {kColumns, tokens, uint64_t(kernel.chunks), pages},
      {stride_bytes(tokens, cache.latent_row_stride), kSwizzleBytes, stride_bytes(pages, cache.latent_page_stride)},
      {kColumns, box_tokens, uint32_t(kernel.copied_chunks), 1}, true);
  if (!kernel.rope_apart) return;
  to.cache_maps[1] = map_shape(
      cache.rope, kernel.map_type, {rope_columns, tokens, pages},
      {stride_bytes(tokens, cache.rope_row_stride), stride_bytes(pages, cache.rope_page_stride)},
      {rope_columns, box_tokens, 1}, true);
}

void prepare_query_maps(const DecodeKernel& kernel, const DecodeParams& params, DecodeLaunch& to) {
  constexpr uint64_t kColumns = kRopeDim, kValueChunks = kLatentDim / kColumns;
  const int box_heads = std::min(params.heads, params.row_tile);
  // A stride of 0 (an expanded tensor) is none that TMA knows; those of single heads, tokens or requests mean nothing.
  const auto known = [](int64_t extent, int64_t one, int64_t other) {
    return extent == 1 || (std::min(one, other) > 0 && std::max(one, other) < kTmaStrideEnd / int64_t(kElementBytes));
  };
  to.query_maps_usable = params.heads % box_heads == 0 && params.row_tile % box_heads == 0 &&
                         known(params.heads, params.q_stride_head, params.q_rope_stride_head) &&
                         known(params.s_q, params.q_stride_token, params.q_rope_stride_token) &&
                         known(params.batch, params.q_stride_batch, params.q_rope_stride_batch);
  if (!to.query_maps_usable) return;
  const auto map = [&](const void* data, int64_t head, int64_t token, int64_t request, uint64_t chunks) {
    return map_shape(
        data, kernel.map_type,
        {kColumns, uint64_t(params.heads), uint64_t(params.s_q), chunks, uint64_t(params.batch)},
        {stride_bytes(params.heads, head * kElementBytes), stride_bytes(params.s_q, token * kElementBytes),
         kColumns * kElementBytes, stride_bytes(params.batch, request * kElementBytes)},
        {kColumns, uint32_t(box_heads), uint32_t(params.row_tile / box_heads), uint32_t(chunks), 1}, false);
  };
  to.query_maps[0] =
      map(params.q, params.q_stride_head, params.q_stride_token, params.q_stride_batch, kValueChunks);
  to.query_maps[1] = map(params.q_rope, params.q_rope_stride_head, params.q_rope_stride_token, params.q_rope_stride_batch,
                         kRopeDim / kColumns);
}

}  // namespace

RowSteps row_steps(int64_t pages, int64_t page_stride, int64_t page_size, int64_t row_stride) {
  // Of a single page or row nothing is a step, whatever its stride says.
  const int64_t page = pages == 1 ? 0 : page_stride, row = page_size == 1 ? 0 : row_stride;
  const int64_t both = page | row | int64_t(1) << 31, unit = both & -both;
  const double last = double(pages - 1) * double(page / unit) + double(page_size - 1) * double(row / unit);
  if (last > double(UINT32_MAX)) return {};
  return {uint32_t(unit), uint32_t(page / unit), uint32_t(row / unit)};
}

KeyLoad key_load_of(const PagedCache& cache, bool fp8_cache) {
  // Of an FP8 cache the rope part has a copy of its own in any case.
  const bool rows_whole = fp8_cache || (cache.rope == cache.latent + kLatentDim * kElementBytes &&
                                        cache.rope_page_stride == cache.latent_page_stride &&
                                        cache.rope_row_stride == cache.latent_row_stride);
  const int part = part_tokens(cache.page_size);
  return part == 1 ? KeyLoad::kRows : part == kTileTokens && rows_whole ? KeyLoad::kTiles : KeyLoad::kParts;
}

void choose_key_load(DecodeParams& params, bool fp8_cache) {
  const PagedCache& cache = params.cache;
  params.key_load = key_load_of(cache, fp8_cache);
  params.part_tokens = part_tokens(cache.page_size);
  params.parts_per_page = cutlass::FastDivmod(cache.page_size / params.part_tokens);
  params.latent_steps = row_steps(cache.pages, cache.latent_page_stride, cache.page_size, cache.latent_row_stride);
  params.rope_steps = row_steps(cache.pages, cache.rope_page_stride, cache.page_size, cache.rope_row_stride);
}

DecodeLaunch prepare_decode(const DecodeParams& params, const DecodeKernel& kernel, bool fp8_cache) {
  DecodeLaunch decode{};
  decode.kernel = kernel.launch;
  decode.kernel.blocks = dim3(params.partitions * params.row_groups);
  if (params.key_load != KeyLoad::kRows) prepare_cache_maps(kernel, params, fp8_cache, decode);
  if (!fp8_cache && params.call_of != CallOf::kStacks) prepare_query_maps(kernel, params, decode);
  return decode;
}

void launch(const DecodeLaunch& decode, const DecodeParams& params, int device, cudaStream_t stream) {
  CUtensorMap cache_maps[2]{};
  for (int i = 0; i < decode.cache_map_count; ++i) cache_maps[i] = encoded(decode.cache_maps[i]);
  QueryMaps query_maps{};
  query_maps.usable = decode.query_maps_usable;
  if (query_maps.usable) {
    query_maps.latent = encoded(decode.query_maps[0]);
    query_maps.rope = encoded(decode.query_maps[1]);
  }
  const void* const arguments[] = {&params, cache_maps, &query_maps};
  launch_overlapping(decode.kernel, arguments, device, stream);
}

}  // namespace etap

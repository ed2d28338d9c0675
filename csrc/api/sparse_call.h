// One sparse call: what the library is given, what of it is refused, and the parameters that it becomes.
#pragma once

#include "api/decode_call.h"
#include "decode/listed_launch.h"
#include "decode/cta/token_splits.h"

namespace etap {

constexpr DLDataType kUInt8{kDLUInt, 8, 1};
constexpr int64_t kFp8LatentBytes = 528;                          // 512 values, 4 float32 scales
constexpr int64_t kFp8RowBytes = kFp8LatentBytes + kRopeDim * 2;  // and 64 bfloat16
constexpr int64_t kV4DataBytes = 448 + kRopeDim * 2;              // of a row of V4's; its scales lie behind the page's rows
constexpr int64_t kV4RowBytes = kV4DataBytes + 8;

// A list of each token, the cache whose rows it names, and what the caller calls them.
struct ListArguments {
  const Optional<TensorView>& kv_cache;  // [pages, page_size, 576 or 512, or 656, 528 or 584 bytes] or with a 1 before the last
  const Optional<TensorView>& indices;
  const Optional<TensorView>& block_table;
  const Optional<TensorView>& valid_counts;
  struct {
    const char *kv_cache, *indices, *block_table, *valid_counts;
  } names;

  bool given() const { return kv_cache.has_value(); }
  int64_t width() const { return given() ? indices.value().size(1) : 0; }
  int64_t tiles() const { return (width() + kTileTokens - 1) / kTileTokens; }
  int64_t row() const { return kv_cache.value().size(kv_cache.value().ndim() - 1); }
};

#define ETAP_SPARSE_ARGUMENTS(ARGUMENT)             \
  ARGUMENT(TensorView, q)                           \
  ARGUMENT(Optional<TensorView>, q_rope)            \
  ARGUMENT(TensorView, kv_cache)                    \
  ARGUMENT(TensorView, indices)                     \
  ARGUMENT(Optional<TensorView>, block_table)       \
  ARGUMENT(Optional<TensorView>, request_ids)       \
  ARGUMENT(Optional<TensorView>, valid_counts)      \
  ARGUMENT(Optional<TensorView>, extra_kv_cache)    \
  ARGUMENT(Optional<TensorView>, extra_indices)     \
  ARGUMENT(Optional<TensorView>, extra_block_table) \
  ARGUMENT(Optional<TensorView>, extra_valid_counts) \
  ARGUMENT(Optional<TensorView>, sinks)             \
  ARGUMENT(TensorView, workspace)                   \
  ARGUMENT(TensorView, out)                         \
  ARGUMENT(TensorView, lse)                         \
  ARGUMENT(double, softmax_scale)                   \
  ARGUMENT(int64_t, partitions)                     \
  ARGUMENT(int64_t, num_sms)                        \
  ARGUMENT(double, empty_lse)

struct SparseArguments {
  ETAP_SPARSE_ARGUMENTS(ETAP_MEMBER)
};

struct SparseCall : SparseArguments {
  const Optional<TensorView> first_kv_cache, first_indices;
  const ListArguments lists[2];

  SparseCall(const SparseArguments& given)
      : SparseArguments(given),
        first_kv_cache(given.kv_cache),
        first_indices(given.indices),
        lists{{first_kv_cache, first_indices, given.block_table, given.valid_counts,
               {"kv_cache", "indices", "block_table", "valid_counts"}},
              {given.extra_kv_cache, given.extra_indices, given.extra_block_table, given.extra_valid_counts,
               {"extra_kv_cache", "extra_indices", "extra_block_table", "extra_valid_counts"}}} {}
  SparseCall(const SparseCall&) = delete;  // its lists refer to it

  int64_t tokens() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t rows() const { return heads(); }
  bool is_empty() const { return tokens() == 0 || heads() == 0; }
  bool fp8_cache() const { return !same(kv_cache.dtype(), kBFloat16); }
  RowFormat format() const {
    if (!fp8_cache()) return RowFormat::kBFloat16;
    return lists[0].row() == kV4RowBytes ? RowFormat::kPageScaledFp8 : RowFormat::kScaledFp8;
  }
  // Whether rows have a rope part behind the latent one; queries have one then. V4's is of the latent one's columns.
  bool rope() const { return lists[0].row() == (fp8_cache() ? kFp8RowBytes : kHeadDim); }
  DecodeShape shape() const { return sparse_shape(heads()); }
  const DecodeKernel& kernel() const {
    const int row_tile = shape().row_tile;
    return kernel_of(sparse::operands(format(), rope(), row_tile), row_tile, true);
  }
  int64_t most_tiles() const { return lists[0].tiles() + lists[1].tiles(); }
  TokenDivision division() const { return sparse::divide(tokens(), most_tiles(), partitions, shape().row_tile < kMaxRowTile); }
};

// The sizes of rows of bytes, or of bfloat16.
inline bool known_row(bool fp8, int64_t row) {
  return fp8 ? row == kFp8RowBytes || row == kFp8LatentBytes || row == kV4RowBytes : row == kHeadDim || row == kLatentDim;
}

// V4's pages are no rows of 584 bytes: strides of any others mean nothing.
inline void check_page_layout(const char* name, const TensorView& cache) {
  check_last_stride(name, cache);
  if (cache.size(1) > 1 && cache.stride(1) != kV4RowBytes) {
    TVM_FFI_THROW(ValueError) << name << ": wanted rows 584 elements apart, as pages of 576-byte rows with their scales behind "
                              << "them have it, got strides " << text(cache.strides());
  }
  if (!aligned(cache) || (cache.size(0) > 1 && cache.stride(0) % kAlignmentBytes != 0)) {
    TVM_FFI_THROW(ValueError) << name << ": wanted every page aligned to " << kAlignmentBytes << " bytes, got address "
                              << cache.data_ptr() << " and strides " << text(cache.strides());
  }
}

inline void check_sparse_cache(const char* name, const TensorView& cache, DLDevice device) {
  const DLDataType type = cache.dtype();
  if (cache.ndim() < 3) {
    TVM_FFI_THROW(ValueError) << name << ": wanted shape [pages, page_size, row], got " << text(cache.shape());
  }
  const bool fp8 = same(type, kUInt8) || same(type, kE4M3);
  if (!fp8 && !same(type, kBFloat16)) {
    TVM_FFI_THROW(TypeError) << name << ": wanted bfloat16, or uint8 or float8_e4m3fn for FP8 rows, got " << text(type);
  }
  const Size pages{kAny, "pages"}, page_size{kAny, "page_size"}, row{kAny, fp8 ? "656, 528 or 584" : "576 or 512"};
  check_pages(name, cache, pages, page_size, row);
  const int64_t width = cache.size(cache.ndim() - 1);
  if (!known_row(fp8, width)) {
    TVM_FFI_THROW(ValueError) << name << ": wanted shape [pages, page_size, " << row.name << "], got " << text(cache.shape());
  }
  check_at_least((std::string(name) + "'s pages").c_str(), cache.size(0), 1);
  check_at_least((std::string(name) + "'s page_size").c_str(), cache.size(1), 1);
  for (int i = 0; i < 2; ++i) {
    if (cache.size(i) > INT32_MAX || (cache.size(i) > 1 && cache.stride(i) < 0)) {
      TVM_FFI_THROW(ValueError) << name << ": wanted fewer than 2^31 pages and rows of one, at strides from 0 on, got shape "
                                << text(cache.shape()) << " with strides " << text(cache.strides());
    }
  }
  if (fp8 && width == kV4RowBytes) {
    check_page_layout(name, cache);
  } else {
    check_rows(name, cache);
  }
  check_device(name, cache, device);
}

inline void check_int32(const char* name, const TensorView& tensor, DLDevice device, std::initializer_list<Size> shape) {
  check_tensor(name, tensor, kInt32, shape, Layout::kLastStride, device);
}

inline void check_list(const SparseCall& call, const ListArguments& list) {
  const DLDevice device = call.q.device();
  check_int32(list.names.indices, list.indices.value(), device, {{call.tokens()}, {kAny, "top_k"}});
  if (list.block_table.has_value()) {
    check_int32(list.names.block_table, list.block_table.value(), device, {{kAny, "requests"}, {kAny, "max_pages"}});
  }
  if (list.valid_counts.has_value()) {
    check_int32(list.names.valid_counts, list.valid_counts.value(), device, {{call.tokens()}});
  }
}

// The second cache is given with its list, and has rows like the first's.
inline void check_extra(const SparseCall& call) {
  const ListArguments &first = call.lists[0], &extra = call.lists[1];
  const Optional<TensorView>* const beside[] = {&extra.indices, &extra.block_table, &extra.valid_counts};
  const char* const names[] = {extra.names.indices, extra.names.block_table, extra.names.valid_counts};
  for (int i = 0; i < 3; ++i) {
    if (beside[i]->has_value() && !extra.given()) {
      TVM_FFI_THROW(ValueError) << extra.names.kv_cache << ": wanted a tensor beside " << names[i] << ", got None";
    }
  }
  if (!extra.given()) return;
  if (!extra.indices.has_value()) {
    TVM_FFI_THROW(ValueError) << extra.names.indices << ": wanted a tensor beside " << extra.names.kv_cache << ", got None";
  }
  const TensorView& cache = extra.kv_cache.value();
  check_sparse_cache(extra.names.kv_cache, cache, call.q.device());
  if (extra.row() != first.row() || element_bytes(cache.dtype()) != element_bytes(call.kv_cache.dtype())) {
    TVM_FFI_THROW(ValueError) << extra.names.kv_cache << ": wanted rows like kv_cache's, " << first.row() << " of "
                              << text(call.kv_cache.dtype()) << ", got " << extra.row() << " of " << text(cache.dtype());
  }
  check_list(call, extra);
}

inline void check_indices(const SparseCall& call) {
  const ListArguments &first = call.lists[0], &extra = call.lists[1];
  check_list(call, first);
  check_extra(call);
  constexpr int64_t kMost = int64_t(1) << 29;
  const int64_t tokens = call.tokens(), tiles = std::max<int64_t>(call.most_tiles(), 1);
  if (tokens * tiles > kMost || tokens * call.partitions > kMost || tiles * call.partitions > kMost) {
    TVM_FFI_THROW(ValueError) << "indices: wanted at most 2^29 tiles of 64 entries, and as many tokens or a token's tiles times "
                              << "partitions, got " << tokens << " tokens of " << first.width() << " and " << extra.width()
                              << " entries for " << call.partitions << " partitions";
  }
  const bool positions = first.block_table.has_value() || extra.block_table.has_value();
  if (positions != call.request_ids.has_value()) {
    TVM_FFI_THROW(ValueError) << (positions ? "request_ids" : "block_table") << ": wanted a tensor beside a "
                              << (positions ? "block_table" : "request_ids") << ", got None";
  }
  if (positions) check_int32("request_ids", call.request_ids.value(), call.q.device(), {{call.tokens()}});
}

inline void check_sinks(const SparseCall& call) {
  if (!call.sinks.has_value()) return;
  const TensorView& sinks = call.sinks.value();
  check_dtype("sinks", sinks, kFloat32);
  if (sinks.ndim() != 1 || sinks.size(0) < call.heads()) {
    TVM_FFI_THROW(ValueError) << "sinks: wanted shape [>=" << call.heads() << "], got " << text(sinks.shape());
  }
  check_last_stride("sinks", sinks);
  check_device("sinks", sinks, call.q.device());
}

// Queries have the rope part that rows have, in q or apart.
inline void check_queries(const SparseCall& call) {
  const bool rope_apart = call.q_rope.has_value();
  check_dtype("q", call.q, kBFloat16);
  check_shape("q", call.q, {{kAny, "tokens"}, {kAny, "heads"}, {call.rope() && !rope_apart ? kHeadDim : kLatentDim}});
  check_rows("q", call.q);
  if (!rope_apart) return;
  if (!call.rope()) {
    TVM_FFI_THROW(ValueError) << "q_rope: wanted None beside a kv_cache without rope columns, got a tensor";
  }
  const std::initializer_list<Size> shape{{call.tokens()}, {call.heads()}, {kRopeDim}};
  check_tensor("q_rope", call.q_rope.value(), kBFloat16, shape, Layout::kRows, call.q.device(), " like q");
}

// Every refusal of a call that can be made without reading what its tensors hold.
inline void check(const SparseCall& call) {
  const DLDevice device = call.q.device();
  check_sparse_cache("kv_cache", call.kv_cache, device);
  check_queries(call);
  const int64_t tokens = call.tokens(), heads = call.heads();
  check_numbers(call.softmax_scale, call.empty_lse);
  check_at_least("partitions", call.partitions, 1);
  check_at_least("num_sms", call.num_sms, 1);
  check_indices(call);
  check_sinks(call);
  check_tensor("out", call.out, kBFloat16, {{tokens}, {heads}, {kLatentDim}}, Layout::kRows, device, " like q");
  check_own_rows("out", call.out);
  check_tensor("lse", call.lse, kFloat32, {{tokens}, {heads}}, Layout::kContiguous, device);
  check_workspace(call.workspace, device, call.shape().workspace_floats(call.partitions));
  const ListArguments &first = call.lists[0], &extra = call.lists[1];
  check_apart({extent("out", call.out), extent("lse", call.lse), extent("workspace", call.workspace)},
              {extent("q", call.q), extent("q_rope", call.q_rope), extent("request_ids", call.request_ids),
               extent("sinks", call.sinks), extent(first.names.kv_cache, first.kv_cache),
               extent(first.names.indices, first.indices), extent(first.names.block_table, first.block_table),
               extent(first.names.valid_counts, first.valid_counts), extent(extra.names.kv_cache, extra.kv_cache),
               extent(extra.names.indices, extra.indices), extent(extra.names.block_table, extra.block_table),
               extent(extra.names.valid_counts, extra.valid_counts)});
}

inline const int32_t* integers(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? integers(tensor.value()) : nullptr;
}

inline RowList row_list(const ListArguments& list) {
  if (!list.given()) return {};
  const TensorView &cache = list.kv_cache.value(), &indices = list.indices.value();
  const int64_t bytes = element_bytes(cache.dtype());
  const bool positions = list.block_table.has_value();
  return {
      .rows = static_cast<const char*>(cache.data_ptr()),
      .page_stride = cache.stride(0) * bytes,
      .row_stride = bytes == 1 && list.row() == kV4RowBytes ? kV4DataBytes : cache.stride(1) * bytes,
      .page_size = int32_t(cache.size(1)),
      .pages = int32_t(cache.size(0)),
      .row_count = uint32_t(std::min<int64_t>(cache.size(0) * cache.size(1), int64_t(1) << 31)),
      .indices = static_cast<const int32_t*>(indices.data_ptr()),
      .index_stride = indices.stride(0),
      .counts = integers(list.valid_counts),
      .block_table = integers(list.block_table),
      .block_table_stride = positions ? list.block_table.value().stride(0) : 0,
      .requests = positions ? int32_t(list.block_table.value().size(0)) : 0,
      .max_pages = positions ? int32_t(std::min<int64_t>(list.block_table.value().size(1), INT32_MAX)) : 0,
      .width = int32_t(std::min<int64_t>(list.width(), INT32_MAX)),
  };
}

inline SparseParams sparse_params(const SparseCall& call, int64_t partitions) {
  return {
      .lists = {row_list(call.lists[0]), row_list(call.lists[1])},
      .format = call.format(),
      .row_bytes = int32_t(call.lists[0].row() * element_bytes(call.kv_cache.dtype())),
      .request_ids = integers(call.request_ids),
      .partition_tiles = int32_t(sparse::divide_up(call.tokens() * call.most_tiles(), partitions)),
  };
}

inline DecodeParams decode_params(const SparseCall& call) {
  const TokenDivision division = call.division();
  DecodeParams params = common_params(call, division.partitions);
  if (!call.rope()) params.q_rope = nullptr;
  params.parts_per_page = 1;
  params.partials = call.kernel().partials;
  params.sinks = call.sinks.has_value() ? static_cast<const float*>(call.sinks.value().data_ptr()) : nullptr;
  params.division = division;
  params.sparse = sparse_params(call, division.partitions);
  return params;
}

}  // namespace etap

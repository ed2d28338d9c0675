// One sparse call: what the library is given, what of it is refused, and the parameters that it becomes.
#pragma once

#include "api/decode_call.h"
#include "decode/even_split.h"
#include "decode/sparse/launch.h"

namespace etap {

constexpr DLDataType kUInt8{kDLUInt, 8, 1};
constexpr int64_t kFp8LatentBytes = 528;                          // 512 values, 4 float32 scales
constexpr int64_t kFp8RowBytes = kFp8LatentBytes + kRopeDim * 2;  // and 64 bfloat16

struct SparseCall {
  const TensorView& q;
  const Optional<TensorView>& q_rope;
  const TensorView& kv_cache;  // [pages, page_size, 576 or 512, or 656 or 528 bytes] or with a 1 before the last
  const TensorView& indices;
  const Optional<TensorView>& block_table;
  const Optional<TensorView>& request_ids;
  const Optional<TensorView>& valid_counts;
  const Optional<TensorView>& sinks;
  const TensorView& workspace;
  const TensorView& out;
  const TensorView& lse;
  double softmax_scale;
  int64_t partitions;
  double empty_lse;

  int64_t tokens() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  bool fp8_cache() const { return !same(kv_cache.dtype(), kBFloat16); }
  // Whether rows have a rope part; queries have one then.
  bool rope() const { return kv_cache.size(kv_cache.ndim() - 1) == (fp8_cache() ? kFp8RowBytes : kHeadDim); }
  DecodeShape shape() const { return sparse_shape(heads(), fp8_cache()); }
  int64_t list_tiles() const { return (indices.size(1) + kTileTokens - 1) / kTileTokens; }
  int64_t partition_tiles() const { return even_partition_tiles(tokens(), list_tiles(), partitions); }
};

inline void check_sparse_cache(const SparseCall& call) {
  const TensorView& cache = call.kv_cache;
  const DLDataType type = cache.dtype();
  if (cache.ndim() < 3) {
    TVM_FFI_THROW(ValueError) << "kv_cache: wanted shape [pages, page_size, row], got " << text(cache.shape());
  }
  const bool fp8 = same(type, kUInt8) || same(type, kE4M3);
  if (!fp8 && !same(type, kBFloat16)) {
    TVM_FFI_THROW(TypeError) << "kv_cache: wanted bfloat16, or uint8 or float8_e4m3fn for FP8 rows, got " << text(type);
  }
  const Size pages{kAny, "pages"}, page_size{kAny, "page_size"}, row{kAny, fp8 ? "656 or 528" : "576 or 512"};
  if (cache.ndim() == 4) {
    check_shape("kv_cache", cache, {pages, page_size, {1}, row});
  } else {
    check_shape("kv_cache", cache, {pages, page_size, row});
  }
  const int64_t width = cache.size(cache.ndim() - 1);
  if (!call.rope() && width != (fp8 ? kFp8LatentBytes : kLatentDim)) {
    TVM_FFI_THROW(ValueError) << "kv_cache: wanted shape [pages, page_size, " << row.name << "], got " << text(cache.shape());
  }
  check_at_least("kv_cache's pages", cache.size(0), 1);
  check_at_least("kv_cache's page_size", cache.size(1), 1);
  for (int i = 0; i < 2; ++i) {
    if (cache.size(i) > INT32_MAX || (cache.size(i) > 1 && cache.stride(i) < 0)) {
      TVM_FFI_THROW(ValueError) << "kv_cache: wanted fewer than 2^31 pages and rows of one, at strides from 0 on, got shape "
                                << text(cache.shape()) << " with strides " << text(cache.strides());
    }
  }
  check_rows("kv_cache", cache);
  check_device("kv_cache", cache, call.q.device());
}

inline void check_int32(const char* name, const TensorView& tensor, DLDevice device, std::initializer_list<Size> shape) {
  check_dtype(name, tensor, kInt32);
  check_shape(name, tensor, shape);
  check_last_stride(name, tensor);
  check_device(name, tensor, device);
}

inline void check_indices(const SparseCall& call) {
  const DLDevice device = call.q.device();
  const int64_t tokens = call.tokens();
  check_int32("indices", call.indices, device, {{tokens}, {kAny, "top_k"}});
  check_at_least("indices' top_k", call.indices.size(1), 1);
  if (tokens * call.list_tiles() > INT32_MAX / 4) {
    TVM_FFI_THROW(ValueError) << "indices: wanted at most 2^29 tiles of 64 entries, got shape " << text(call.indices.shape());
  }
  if (call.block_table.has_value() != call.request_ids.has_value()) {
    TVM_FFI_THROW(ValueError) << (call.block_table.has_value() ? "request_ids" : "block_table")
                              << ": wanted a tensor beside a " << (call.block_table.has_value() ? "block_table" : "request_ids")
                              << ", got None";
  }
  if (call.block_table.has_value()) {
    check_int32("block_table", call.block_table.value(), device, {{kAny, "requests"}, {kAny, "max_pages"}});
    check_int32("request_ids", call.request_ids.value(), device, {{tokens}});
  }
  if (call.valid_counts.has_value()) check_int32("valid_counts", call.valid_counts.value(), device, {{tokens}});
  if (call.sinks.has_value()) {
    check_dtype("sinks", call.sinks.value(), kFloat32);
    check_shape("sinks", call.sinks.value(), {{call.heads()}});
    check_last_stride("sinks", call.sinks.value());
    check_device("sinks", call.sinks.value(), device);
  }
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
  const TensorView& rope = call.q_rope.value();
  check_dtype("q_rope", rope, kBFloat16, " like q");
  check_shape("q_rope", rope, {{call.tokens()}, {call.heads()}, {kRopeDim}});
  check_rows("q_rope", rope);
  check_device("q_rope", rope, call.q.device());
}

// Every refusal of a call that can be made without reading what its tensors hold.
inline void check(const SparseCall& call) {
  const DLDevice device = call.q.device();
  check_sparse_cache(call);
  check_queries(call);
  const int64_t tokens = call.tokens(), heads = call.heads();
  check_softmax_scale(call.softmax_scale);
  check_empty_lse(call.empty_lse);
  check_at_least("partitions", call.partitions, 1);
  check_indices(call);
  check_dtype("out", call.out, kBFloat16, " like q");
  check_shape("out", call.out, {{tokens}, {heads}, {kLatentDim}});
  check_contiguous("out", call.out);
  check_aligned("out", call.out);
  check_device("out", call.out, device);
  check_dtype("lse", call.lse, kFloat32);
  check_shape("lse", call.lse, {{tokens}, {heads}});
  check_contiguous("lse", call.lse);
  check_device("lse", call.lse, device);
  check_workspace(call.workspace, device, call.shape(), call.partitions);
  check_apart({extent("out", call.out), extent("lse", call.lse), extent("workspace", call.workspace)},
              {extent("q", call.q), extent("q_rope", call.q_rope), extent("kv_cache", call.kv_cache),
               extent("indices", call.indices), extent("block_table", call.block_table),
               extent("request_ids", call.request_ids), extent("valid_counts", call.valid_counts),
               extent("sinks", call.sinks)});
}

inline const int32_t* integers(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? static_cast<const int32_t*>(tensor.value().data_ptr()) : nullptr;
}

inline DecodeParams decode_params(const SparseCall& call) {
  const TensorView& rope = call.q_rope.has_value() ? call.q_rope.value() : call.q;
  const int64_t rope_offset = call.q_rope.has_value() ? 0 : kLatentDim * element_bytes(call.q.dtype());
  const DecodeShape shape = call.shape();
  const int64_t tiles = call.tokens() * call.list_tiles();
  auto* partials = static_cast<float*>(call.workspace.data_ptr());
  return {
      .q = call.q.data_ptr(),
      .q_rope = call.rope() ? static_cast<const char*>(rope.data_ptr()) + rope_offset : nullptr,
      .q_stride_batch = call.q.stride(0),
      .q_stride_head = call.q.stride(1),
      .q_rope_stride_batch = rope.stride(0),
      .q_rope_stride_head = rope.stride(1),
      .seq_lens = integers(call.valid_counts),
      .out = call.out.data_ptr(),
      .lse = static_cast<float*>(call.lse.data_ptr()),
      .partial_out = partials,
      .partial_lse = partials + shape.partial_rows(call.partitions) * kLatentDim,
      .batch = int32_t(call.tokens()),
      .s_q = 1,
      .heads = int32_t(call.heads()),
      .rows = int32_t(call.heads()),
      .row_tile = shape.row_tile,
      .row_groups = shape.row_groups,
      // Those that have tiles.
      .partitions = int32_t((tiles + call.partition_tiles() - 1) / call.partition_tiles()),
      .parts_per_page = 1,
      .scale_log2 = float(call.softmax_scale * kLog2E),
      .empty_lse = float(call.empty_lse),
      .query_type = QueryType::kBFloat16,
      .float16_out = false,
      .rows_on_lanes = shape.kernel == DecodeKernelKind::kQueryMajor,
      .paired_dims = shape.kernel == DecodeKernelKind::kSparseFp8,
      .list_length = int32_t(std::min<int64_t>(call.indices.size(1), INT32_MAX)),
      .list_tiles = int32_t(call.list_tiles()),
      .partition_tiles = int32_t(call.partition_tiles()),
      .sinks = call.sinks.has_value() ? static_cast<const float*>(call.sinks.value().data_ptr()) : nullptr,
  };
}

inline sparse::GatheredCache gathered_cache(const SparseCall& call) {
  const TensorView& cache = call.kv_cache;
  const int64_t bytes = element_bytes(cache.dtype());
  const bool positions = call.block_table.has_value();
  return {
      .data = static_cast<const char*>(cache.data_ptr()),
      .row_bytes = int32_t(cache.size(cache.ndim() - 1) * bytes),
      .page_stride = cache.stride(0) * bytes,
      .row_stride = cache.stride(1) * bytes,
      .page_size = int32_t(cache.size(1)),
      .pages = int32_t(cache.size(0)),
      .rows = uint32_t(std::min<int64_t>(cache.size(0) * cache.size(1), int64_t(1) << 31)),
      .indices = static_cast<const int32_t*>(call.indices.data_ptr()),
      .index_stride = call.indices.stride(0),
      .block_table = integers(call.block_table),
      .block_table_stride = positions ? call.block_table.value().stride(0) : 0,
      .request_ids = integers(call.request_ids),
      .requests = positions ? int32_t(call.block_table.value().size(0)) : 0,
      .max_pages = positions ? int32_t(std::min<int64_t>(call.block_table.value().size(1), INT32_MAX)) : 0,
  };
}

}  // namespace etap

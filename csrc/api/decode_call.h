// One decode call: what the library is given, what of it is refused, and the parameters that it becomes.
#pragma once

#include <cmath>

#include "api/arguments.h"
#include "decode/launch.h"
#include "decode/shape.h"
#include "schedule/shared_prefixes.h"

namespace etap {

constexpr double kLog2E = 1.4426950408889634;
constexpr int kWorkRangeFields = sizeof(WorkRange) / sizeof(int32_t);

// kv_cache: [pages, page_size, 576] or [pages, page_size, 1, 576], or 512 beside a rope_cache of as many. shared: where requests share
// prefixes. From batch to num_sms: what the schedule was built for.
#define ETAP_DECODE_ARGUMENTS(ARGUMENT)      \
  ARGUMENT(TensorView, q)                    \
  ARGUMENT(Optional<TensorView>, q_rope)     \
  ARGUMENT(TensorView, kv_cache)             \
  ARGUMENT(Optional<TensorView>, rope_cache) \
  ARGUMENT(Optional<TensorView>, q_scale)    \
  ARGUMENT(Optional<TensorView>, kv_scale)   \
  ARGUMENT(TensorView, block_table)          \
  ARGUMENT(TensorView, seq_lens)             \
  ARGUMENT(TensorView, work_ranges)          \
  ARGUMENT(TensorView, split_offsets)        \
  ARGUMENT(Optional<TensorView>, shared)     \
  ARGUMENT(TensorView, workspace)            \
  ARGUMENT(TensorView, out)                  \
  ARGUMENT(TensorView, lse)                  \
  ARGUMENT(double, softmax_scale)            \
  ARGUMENT(int64_t, batch)                   \
  ARGUMENT(int64_t, s_q)                     \
  ARGUMENT(int64_t, heads)                   \
  ARGUMENT(int64_t, partitions)              \
  ARGUMENT(int64_t, row_tile)                \
  ARGUMENT(int64_t, num_sms)                 \
  ARGUMENT(bool, fp8_math)                   \
  ARGUMENT(double, empty_lse)                \
  ARGUMENT(bool, early_loads)

struct DecodeCall {
  ETAP_DECODE_ARGUMENTS(ETAP_MEMBER)

  int64_t rows() const { return s_q * heads; }
  bool is_empty() const { return batch == 0 || rows() == 0; }
  bool fp8_cache() const { return same(kv_cache.dtype(), kE4M3); }
  DecodeShape shape() const { return shape_of(rows(), int32_t(row_tile)); }
  // Where requests share prefixes.
  StackShape stack() const { return stack_shape(rows(), num_sms); }
  int64_t own_slots() const { return merged_slots(partitions, batch); }
  int64_t stack_slots() const { return merged_slots(num_sms, stack().most_stacks(batch)); }
  int64_t own_floats() const { return own_slots() * shape().row_groups * shape().split_floats; }

  int64_t workspace_floats() const {
    if (!shared.has_value()) return shape().workspace_floats(partitions);
    return own_floats() + stack_slots() * shape_of(stack().row_tile, stack().row_tile).split_floats;
  }
  Operands operands() const {
    if (fp8_cache()) return fp8_math ? Operands::kFp8Math : Operands::kFp8;
    return same(q.dtype(), kFloat16) ? Operands::kFp16 : Operands::kBf16;
  }
};

// What the types of queries, cache and result may be together.
inline void check_types(const DecodeCall& call) {
  const DLDataType q = call.q.dtype(), cache = call.kv_cache.dtype(), out = call.out.dtype();
  const bool fp8_query = same(q, kE4M3);
  if (!same(q, kBFloat16) && !same(q, kFloat16) && !(fp8_query && call.fp8_cache())) {
    TVM_FFI_THROW(TypeError) << "q: wanted bfloat16 or float16, or float8_e4m3fn with an FP8 cache, got " << text(q);
  }
  if (call.q_rope.has_value()) check_dtype("q_rope", call.q_rope.value(), q, " like q");  // before it is missed in the cache
  if (call.rope_cache.has_value()) check_dtype("rope_cache", call.rope_cache.value(), cache, " like kv_cache");
  if (!call.fp8_cache() && !same(cache, q)) {
    TVM_FFI_THROW(TypeError) << "kv_cache: wanted " << text(q) << " like q or float8_e4m3fn, got " << text(cache);
  }
  if (fp8_query ? !same(out, kBFloat16) && !same(out, kFloat16) : !same(out, q)) {
    TVM_FFI_THROW(TypeError) << "out: wanted " << (fp8_query ? "bfloat16 or float16" : text(q)) << " for a q of " << text(q)
                             << ", got " << text(out);
  }
  if (call.fp8_math && !call.fp8_cache()) {
    TVM_FFI_THROW(ValueError) << "fp8_math: wanted False beside a kv_cache of " << text(cache) << ", got True";
  }
}

inline void check_scale(const char* name, const Optional<TensorView>& scale, const char* scaled_name,
                        const TensorView& scaled) {
  if (!scale.has_value()) return;
  const TensorView& tensor = scale.value();
  if (!same(scaled.dtype(), kE4M3)) {
    TVM_FFI_THROW(ValueError) << name << ": wanted None beside a " << scaled_name << " of " << text(scaled.dtype())
                              << ", got a tensor";
  }
  check_dtype(name, tensor, kFloat32);
  if (tensor.ndim() > 1 || tensor.numel() != 1) {
    TVM_FFI_THROW(ValueError) << name << ": wanted one element, shape [] or [1], got " << text(tensor.shape());
  }
  check_device(name, tensor, scaled.device());
}

// One of the cache's tensors: [pages, page_size, columns], the first two sizes those of another one if given.
inline void check_cache(const char* name, const TensorView& cache, int64_t columns, Size pages, Size page_size,
                        DLDevice device) {
  check_pages(name, cache, pages, page_size, {columns});
  if (cache.size(0) < 1 || cache.size(1) < 1) {
    TVM_FFI_THROW(ValueError) << name << ": wanted at least one page of at least one token, got " << text(cache.shape());
  }
  if (std::max(cache.size(0), cache.size(1)) > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << name << ": wanted less than 2^31 pages and tokens in a page, got " << text(cache.shape());
  }
  check_rows(name, cache);
  for (int i = 0; i < 2; ++i) {
    const int64_t bytes = cache.stride(i) * element_bytes(cache.dtype());
    if (cache.size(i) > 1 && (bytes <= 0 || bytes >= kTmaStrideEnd)) {
      TVM_FFI_THROW(ValueError) << name << ": wanted pages and rows above 0 and less than 2^40 bytes apart, as TMA does, got "
                                << "strides " << text(cache.strides());
    }
  }
  if (part_tokens(cache.size(1)) == 1) {  // rows are gathered
    const int64_t bytes = element_bytes(cache.dtype());
    if (row_steps(cache.size(0), cache.stride(0) * bytes, cache.size(1), cache.stride(1) * bytes).unit_bytes == 0) {
      TVM_FFI_THROW(ValueError) << name << ": wanted pages of a multiple of 16 tokens, or strides with a larger power of two in "
                                << "them: 32 bits do not count the steps of a size " << text(cache.shape()) << " with strides "
                                << text(cache.strides());
    }
  }
  check_device(name, cache, device);
}

inline void check_caches(const DecodeCall& call, DLDevice device) {
  const bool rope_apart = call.rope_cache.has_value();
  check_cache("kv_cache", call.kv_cache, rope_apart ? kLatentDim : kHeadDim, {kAny, "pages"}, {kAny, "page_size"}, device);
  if (!rope_apart) return;
  check_cache("rope_cache", call.rope_cache.value(), kRopeDim, {call.kv_cache.size(0)}, {call.kv_cache.size(1)}, device);
}

// Any holds any rows, in as many groups as it takes.
inline void check_row_tile(int64_t row_tile) {
  for (int64_t known = kMinRowTile; known <= kMaxRowTile; known *= 2) {
    if (row_tile == known) return;
  }
  TVM_FFI_THROW(ValueError) << "row_tile: wanted 8, 16, 32 or 64, got " << row_tile;
}

inline void check_schedule(const DecodeCall& call) {
  const TensorView& q = call.q;
  if (call.batch != q.size(0) || call.s_q != q.size(1) || call.heads != q.size(2)) {
    TVM_FFI_THROW(ValueError) << "schedule: wanted one for q's batch " << q.size(0) << ", s_q " << q.size(1) << ", " << q.size(2)
                              << " heads, got batch " << call.batch << ", s_q " << call.s_q << ", " << call.heads << " heads";
  }
  const DLDevice device = call.q.device();
  for (const TensorView* tensor : {&call.work_ranges, &call.split_offsets}) {
    if (!same(tensor->device(), device)) {
      TVM_FFI_THROW(ValueError) << "schedule: wanted one on " << text(device) << " like q, got one on "
                                << text(tensor->device());
    }
  }
  check_tensor("work_ranges", call.work_ranges, kInt32, {{kAny, "partitions"}, {kWorkRangeFields}}, Layout::kContiguous, device);
  check_tensor("split_offsets", call.split_offsets, kInt32, {{kAny, "batch + 1"}}, Layout::kContiguous, device);
  check_at_least("split_offsets' size", call.split_offsets.size(0), call.batch + 1);
  check_at_least("partitions", call.partitions, 1);
  check_at_least("num_sms", call.num_sms, 1);
  check_row_tile(call.row_tile);
  check_at_least("work_ranges' size", call.work_ranges.size(0), call.partitions);
  check_aligned("work_ranges", call.work_ranges);
}

// The buffer [kFields, max_batch] of a plan with shared prefixes, of calls of so many rows, and what its schedules need.
inline void check_shared(const TensorView& shared, const TensorView& work_ranges, DLDevice device, const StackShape& stack, int64_t batch,
                         int64_t partitions, int64_t num_sms) {
  check_tensor("shared", shared, kInt32, {{SharedPlan::kFields}, {kAny, "max_batch"}}, Layout::kContiguous, device);
  check_at_least("shared's requests", shared.size(1), std::max<int64_t>(batch, 1));
  if (!stack.exists()) {
    TVM_FFI_THROW(ValueError) << "shared: wanted None, since requests of so many query rows are not stacked on " << num_sms
                              << " CTAs, got a tensor";
  }
  check_at_least("work_ranges' size", work_ranges.size(0), partitions + num_sms);
}

inline SharedPlan shared_plan(const TensorView& shared) { return {static_cast<int32_t*>(shared.data_ptr()), shared.size(1)}; }

inline void check_workspace(const TensorView& workspace, DLDevice device, int64_t floats) {
  check_device("workspace", workspace, device);
  check_dtype("workspace", workspace, kFloat32);
  if (workspace.ndim() != 1 || workspace.size(0) < floats || !workspace.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "workspace: wanted a contiguous [>=" << floats << "], got " << text(workspace.shape())
                              << " with strides " << text(workspace.strides());
  }
  check_aligned("workspace", workspace);
}

inline void check_numbers(double softmax_scale, double empty_lse) {
  const float scale_log2 = float(softmax_scale * kLog2E);
  if (!(scale_log2 > 0.0f && std::isfinite(scale_log2))) {
    TVM_FFI_THROW(ValueError) << "softmax_scale: wanted a positive finite number of float32, got " << softmax_scale;
  }
  if (!std::isinf(empty_lse)) TVM_FFI_THROW(ValueError) << "empty_lse: wanted -inf or inf, got " << empty_lse;
}

inline const int32_t* integers(const TensorView& tensor) { return static_cast<const int32_t*>(tensor.data_ptr()); }

inline PagedCache paged_cache(const DecodeCall& call) {
  const bool rope_apart = call.rope_cache.has_value();
  const TensorView& latent = call.kv_cache;
  const TensorView& rope = rope_apart ? call.rope_cache.value() : latent;
  const int64_t bytes = element_bytes(latent.dtype());
  return {
      .latent = static_cast<const char*>(latent.data_ptr()),
      .rope = static_cast<const char*>(rope.data_ptr()) + (rope_apart ? 0 : kLatentDim * bytes),
      .latent_page_stride = latent.stride(0) * bytes,
      .latent_row_stride = latent.stride(1) * bytes,
      .rope_page_stride = rope.stride(0) * bytes,
      .rope_row_stride = rope.stride(1) * bytes,
      .pages = int32_t(latent.size(0)),
      .page_size = int32_t(latent.size(1)),
  };
}

inline const DecodeKernel& kernel_of(Operands operands, int64_t row_tile, bool whole_tiles) {
  const DecodeKernel* const kernel = find_kernel(operands, int(row_tile), whole_tiles);
  if (kernel != nullptr) return *kernel;
  TVM_FFI_THROW(ValueError) << "kv_cache: " << no_kernel(operands, int(row_tile), whole_tiles)
                            << "; tiles are whole in pages of a multiple of 64 tokens whose rope columns follow the latent ones";
  TVM_FFI_UNREACHABLE();
}

inline const DecodeKernel& kernel_of(const DecodeCall& call, int64_t row_tile) {
  const KeyLoad load = key_load_of(paged_cache(call), call.fp8_cache());
  return kernel_of(call.operands(), row_tile, load == KeyLoad::kTiles);
}
inline const DecodeKernel& kernel_of(const DecodeCall& call) { return kernel_of(call, call.row_tile); }

// Every refusal of a call that can be made without reading what its tensors hold.
inline void check(const DecodeCall& call) {
  const bool rope_apart = call.q_rope.has_value();
  check_shape("q", call.q, {{kAny, "batch"}, {kAny, "s_q"}, {kAny, "heads"}, {rope_apart ? kLatentDim : kHeadDim}});
  const int64_t batch = call.q.size(0), s_q = call.q.size(1), heads = call.q.size(2);
  const DLDevice device = call.q.device();
  check_types(call);
  check_rows("q", call.q);
  if (rope_apart) {
    const std::initializer_list<Size> shape{{batch}, {s_q}, {heads}, {kRopeDim}};
    check_tensor("q_rope", call.q_rope.value(), call.q.dtype(), shape, Layout::kRows, device, " like q");
  }
  check_schedule(call);
  check_numbers(call.softmax_scale, call.empty_lse);
  check_scale("q_scale", call.q_scale, "q", call.q);
  check_scale("kv_scale", call.kv_scale, "kv_cache", call.kv_cache);
  check_caches(call, device);
  kernel_of(call);  // there is one
  check_tensor("block_table", call.block_table, kInt32, {{batch}, {kAny, "max_pages"}}, Layout::kLastStride, device);
  check_tensor("seq_lens", call.seq_lens, kInt32, {{batch}}, Layout::kContiguous, device);
  const DLDataType out_type = call.out.dtype();  // see check_types
  check_tensor("out", call.out, out_type, {{batch}, {s_q}, {heads}, {kLatentDim}}, Layout::kContiguous, device);
  check_aligned("out", call.out);
  check_tensor("lse", call.lse, kFloat32, {{batch}, {s_q}, {heads}}, Layout::kContiguous, device);
  if (call.shared.has_value()) {
    check_shared(call.shared.value(), call.work_ranges, device, call.stack(), batch, call.partitions, call.num_sms);
  }
  check_workspace(call.workspace, device, call.workspace_floats());
  check_apart({extent("out", call.out), extent("lse", call.lse), extent("workspace", call.workspace)},
              {extent("q", call.q), extent("q_rope", call.q_rope), extent("kv_cache", call.kv_cache),
               extent("rope_cache", call.rope_cache), extent("block_table", call.block_table),
               extent("seq_lens", call.seq_lens), extent("work_ranges", call.work_ranges),
               extent("split_offsets", call.split_offsets), extent("shared", call.shared)});
}

// What dense and sparse calls say in the same words. A sparse call's tokens are the requests, q has no dimension for them.
template <class Call>
DecodeParams common_params(const Call& call, int64_t partitions) {
  const TensorView& rope = call.q_rope.has_value() ? call.q_rope.value() : call.q;
  const int64_t rope_offset = call.q_rope.has_value() ? 0 : kLatentDim * element_bytes(call.q.dtype());
  const int head = call.q.ndim() - 2;  // the dimension
  const DecodeShape shape = call.shape();
  auto* partials = static_cast<float*>(call.workspace.data_ptr());
  DecodeParams params{};
  params.partial_out = partials;
  params.partial_lse = partials + shape.partial_rows(call.partitions) * kLatentDim;
  params.batch = int32_t(call.q.size(0));
  params.partitions = int32_t(partitions);
  params.rows = int32_t(call.rows());
  params.row_tile = shape.row_tile;
  params.row_groups = shape.row_groups;
  params.empty_lse = float(call.empty_lse);
  params.float16_out = same(call.out.dtype(), kFloat16);
  params.out = call.out.data_ptr();
  params.out_stride_batch = call.out.stride(0);
  params.out_stride_row = call.out.stride(head);
  params.lse = static_cast<float*>(call.lse.data_ptr());
  params.q = call.q.data_ptr();
  params.q_rope = static_cast<const char*>(rope.data_ptr()) + rope_offset;
  params.q_stride_batch = call.q.stride(0);
  params.q_stride_token = head > 1 ? call.q.stride(1) : 0;
  params.q_stride_head = call.q.stride(head);
  params.q_rope_stride_batch = rope.stride(0);
  params.q_rope_stride_token = head > 1 ? rope.stride(1) : 0;
  params.q_rope_stride_head = rope.stride(head);
  params.s_q = int32_t(head > 1 ? call.q.size(1) : 1);
  params.heads = int32_t(call.q.size(head));
  params.scale_log2 = float(call.softmax_scale * kLog2E);
  params.query_type = same(call.q.dtype(), kBFloat16)  ? QueryType::kBFloat16
                      : same(call.q.dtype(), kFloat16) ? QueryType::kFloat16
                                                       : QueryType::kE4M3;
  return params;
}

inline DecodeParams decode_params(const DecodeCall& call) {
  const auto scale = [](const Optional<TensorView>& one) {
    return one.has_value() ? static_cast<const float*>(one.value().data_ptr()) : nullptr;
  };
  DecodeParams params = common_params(call, call.partitions);
  params.block_table = integers(call.block_table);
  params.block_table_stride = call.block_table.stride(0);
  params.max_pages = int32_t(std::min<int64_t>(call.block_table.size(1), INT32_MAX));
  params.seq_lens = integers(call.seq_lens);
  params.work_ranges = static_cast<const WorkRange*>(call.work_ranges.data_ptr());
  params.split_offsets = integers(call.split_offsets);
  params.out_stride_batch = call.rows() * kLatentDim;  // contiguous, whatever strides say where a size is 1
  params.out_stride_row = kLatentDim;
  params.kv_scale = scale(call.kv_scale);
  params.q_scale = scale(call.q_scale);
  params.cache = paged_cache(call);
  choose_key_load(params, call.fp8_cache());
  params.partials = kernel_of(call).partials;
  params.last_slot = 2 * params.partitions - 1;
  params.early_loads = call.early_loads && params.key_load == KeyLoad::kTiles;
  return params;
}

// The calls of stacks and of what requests have of their own, and the merge of those that have both, behind the combination of the
// others. In the workspace the requests' partial results come first.
struct SharedDecode {
  DecodeParams stacks;
  DecodeParams own;
  MergeParams merge;
};

inline SharedDecode shared_decode(const DecodeCall& call) {
  const SharedPlan plan = shared_plan(call.shared.value());
  const StackShape stack = call.stack();
  const DecodeShape shape = call.shape();
  DecodeParams own = decode_params(call);
  const int64_t own_rows = call.own_slots() * shape.row_groups * shape.row_tile, stack_rows = call.stack_slots() * stack.row_tile;
  own.partial_lse = own.partial_out + own_rows * kLatentDim;
  own.last_slot = int32_t(call.own_slots() - 1);
  own.call_of = CallOf::kOwnTiles;

  DecodeParams stacks = own;
  stacks.call_of = CallOf::kStacks;
  stacks.partials = kernel_of(call, stack.row_tile).partials;
  stacks.partial_out = own.partial_out + call.own_floats();
  stacks.partial_lse = stacks.partial_out + stack_rows * kLatentDim;
  stacks.last_slot = int32_t(call.stack_slots() - 1);
  stacks.work_ranges = own.work_ranges + own.partitions;
  stacks.batch = int32_t(stack.most_stacks(call.batch));
  stacks.partitions = int32_t(call.num_sms);
  stacks.rows = stacks.row_tile = stacks.heads = stack.row_tile;
  stacks.row_groups = stacks.s_q = 1;
  stacks.seq_lens = plan.stack_lens();
  stacks.split_offsets = plan.stack_offsets();
  stacks.stack_places = stack.places;
  stacks.members = plan.members();
  stacks.stack_count = plan.stack_count();
  stacks.requests = own.batch;
  while (1 << stacks.member_row_bits < own.rows) ++stacks.member_row_bits;
  while (1 << stacks.member_head_bits < own.heads) ++stacks.member_head_bits;
  own.first_tiles = plan.first_tiles();

  const auto runs = [](const DecodeParams& of) {
    return PartialRuns{of.partial_out, of.partial_lse, of.split_offsets, of.last_slot + 1, of.row_groups * of.row_tile, of.row_tile,
                       of.partials};
  };
  const MergeParams merge{{runs(stacks), runs(own)}, plan.places(),  plan.stack_count(), stack.places, own.batch,
                          own.rows,                  own.empty_lse, own.float16_out,    own.out,      own.lse};
  return {stacks, own, merge};
}

}  // namespace etap

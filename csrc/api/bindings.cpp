// The only file that knows the FFI: checks the arguments, fills the plain structs, launches.
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>

#include "api/checks.h"
#include "combine/combine.h"
#include "common/cuda_check.h"
#include "decode/launch.h"
#include "schedule/schedule.h"

namespace etap {
namespace {

using tvm::ffi::Optional;

constexpr int64_t kAbiVersion = 3;
constexpr double kLog2E = 1.4426950408889634;
constexpr int kWorkRangeFields = sizeof(WorkRange) / sizeof(int32_t);

// Makes the tensors' device current for the launches of one call.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    ETAP_CUDA_CHECK(cudaGetDevice(&previous_));
    if (device != previous_) ETAP_CUDA_CHECK(cudaSetDevice(device));
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

cudaStream_t current_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

void check_hopper(const char* name, DLDevice device) {
  if (device.device_type != kDLCUDA) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a tensor on a CUDA device, got one on " << text(device);
  }
  int major = 0, minor = 0;
  ETAP_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id));
  ETAP_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.device_id));
  if (major != 9 || minor != 0) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a tensor on a Hopper GPU (compute capability 9.0), got one on "
                              << text(device) << " with compute capability " << major << "." << minor;
  }
}

template <class Call>
void reporting_cuda_errors(Call&& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

void schedule(TensorView seq_lens, TensorView work_ranges, TensorView split_offsets, int64_t partitions,
              int64_t fixed_pieces, int64_t row_tile) {
  const int64_t batch = seq_lens.ndim() == 1 ? seq_lens.size(0) : 0;
  check_dtype("seq_lens", seq_lens, {kInt32});
  check_shape("seq_lens", seq_lens, {{kAny, "batch"}});
  check_contiguous("seq_lens", seq_lens);
  check_dtype("work_ranges", work_ranges, {kInt32});
  check_shape("work_ranges", work_ranges, {{kAny, "num_sms"}, {kWorkRangeFields}});
  check_contiguous("work_ranges", work_ranges);
  check_device("work_ranges", work_ranges, seq_lens.device());
  check_dtype("split_offsets", split_offsets, {kInt32});
  check_shape("split_offsets", split_offsets, {{kAny, "max_batch + 1"}});
  check_contiguous("split_offsets", split_offsets);
  check_device("split_offsets", split_offsets, seq_lens.device());
  check_at_least("split_offsets' size", split_offsets.size(0), batch + 1);
  check_at_least("partitions", partitions, 1);
  check_at_least("work_ranges' size", work_ranges.size(0), partitions);
  if (fixed_pieces > 1) check_at_least("partitions", partitions, batch * fixed_pieces);
  const ScheduleParams params{
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .work_ranges = static_cast<WorkRange*>(work_ranges.data_ptr()),
      .split_offsets = static_cast<int32_t*>(split_offsets.data_ptr()),
      .batch = int32_t(batch),
      .partitions = int32_t(partitions),
      .fixed_pieces = int32_t(fixed_pieces),
      .row_tile = int32_t(row_tile),
  };
  if (seq_lens.device().device_type == kDLCPU) return build_schedule_on_host(params);
  reporting_cuda_errors([&] {
    check_hopper("seq_lens", seq_lens.device());
    const DeviceGuard guard(seq_lens.device().device_id);
    build_schedule_on_device(params, current_stream(seq_lens.device()));
  });
}

void build_schedule(TensorView seq_lens, TensorView work_ranges, TensorView split_offsets, int64_t partitions,
                    int64_t row_tile) {
  check_at_least("row_tile", row_tile, 0);
  schedule(seq_lens, work_ranges, split_offsets, partitions, 0, row_tile);
}

void build_fixed_schedule(TensorView seq_lens, TensorView work_ranges, TensorView split_offsets, int64_t partitions,
                          int64_t fixed_pieces) {
  check_at_least("fixed_pieces", fixed_pieces, 1);
  schedule(seq_lens, work_ranges, split_offsets, partitions, fixed_pieces, 0);
}

void check_scale(const char* name, const Optional<TensorView>& scale, DLDevice device) {
  if (!scale.has_value()) return;
  const TensorView& tensor = scale.value();
  check_dtype(name, tensor, {kFloat32});
  if (tensor.numel() != 1) {
    TVM_FFI_THROW(ValueError) << name << ": wanted one element, got shape " << text(tensor.shape());
  }
  check_device(name, tensor, device);
}

// What the types of queries, cache and result may be together; e4m3 comes as bytes.
void check_decode_types(const TensorView& q, const Optional<TensorView>& q_scale, const TensorView& kv_cache,
                        const Optional<TensorView>& kv_scale, const TensorView& out, bool fp8_math) {
  if (same(kv_cache.dtype(), kE4M3Bytes)) {
    check_dtype("q", q, {kBFloat16, kFloat16, kE4M3Bytes});
    check_dtype("out", out, {same(q.dtype(), kE4M3Bytes) ? kBFloat16 : q.dtype(),
                             same(q.dtype(), kE4M3Bytes) ? kFloat16 : q.dtype()});
  } else {
    check_dtype("q", q, {kBFloat16, kFloat16});
    check_dtype("kv_cache", kv_cache, {q.dtype()});
    check_dtype("out", out, {q.dtype()});
    if (kv_scale.has_value()) TVM_FFI_THROW(ValueError) << "kv_scale: wanted none for a cache of " << text(q.dtype());
    if (fp8_math) TVM_FFI_THROW(ValueError) << "fp8_math: wanted an FP8 cache, got one of " << text(q.dtype());
  }
  if (q_scale.has_value() && !same(q.dtype(), kE4M3Bytes)) {
    TVM_FFI_THROW(ValueError) << "q_scale: wanted none for queries of " << text(q.dtype());
  }
}

void check_decode_tensors(const TensorView& q, const Optional<TensorView>& q_rope, const TensorView& kv_cache,
                          const TensorView& block_table, const TensorView& seq_lens, const TensorView& out,
                          const TensorView& lse) {
  check_shape("q", q,
              {{kAny, "batch"}, {kAny, "s_q"}, {kAny, "heads"}, {q_rope.has_value() ? kLatentDim : kHeadDim}});
  check_rows("q", q);
  check_hopper("q", q.device());
  const int64_t batch = q.size(0), s_q = q.size(1), heads = q.size(2);
  if (q_rope.has_value()) {
    check_dtype("q_rope", q_rope.value(), {q.dtype()});
    check_shape("q_rope", q_rope.value(), {{batch}, {s_q}, {heads}, {kRopeDim}});
    check_rows("q_rope", q_rope.value());
    check_device("q_rope", q_rope.value(), q.device());
  }
  check_shape("kv_cache", kv_cache, {{kAny, "pages"}, {kAny, "page_size"}, {kHeadDim}});
  if (kv_cache.size(1) < kTileTokens || kv_cache.size(1) % kTileTokens != 0) {
    TVM_FFI_THROW(ValueError) << "kv_cache: wanted page_size a multiple of " << kTileTokens << ", got "
                              << kv_cache.size(1);
  }
  check_rows("kv_cache", kv_cache);
  check_device("kv_cache", kv_cache, q.device());
  check_dtype("block_table", block_table, {kInt32});
  check_shape("block_table", block_table, {{batch}, {kAny, "max_pages"}});
  check_last_stride("block_table", block_table);
  check_device("block_table", block_table, q.device());
  check_dtype("seq_lens", seq_lens, {kInt32});
  check_shape("seq_lens", seq_lens, {{batch}});
  check_contiguous("seq_lens", seq_lens);
  check_device("seq_lens", seq_lens, q.device());
  check_shape("out", out, {{batch}, {s_q}, {heads}, {kLatentDim}});
  check_contiguous("out", out);
  check_device("out", out, q.device());
  check_dtype("lse", lse, {kFloat32});
  check_shape("lse", lse, {{batch}, {s_q}, {heads}});
  check_contiguous("lse", lse);
  check_device("lse", lse, q.device());
}

int32_t row_tile(int64_t rows) {
  int32_t tile = 8;
  while (tile < std::min<int64_t>(rows, kMaxRowTile)) tile *= 2;
  return tile;
}

const float* scale_of(const Optional<TensorView>& scale) {
  return scale.has_value() ? static_cast<const float*>(scale.value().data_ptr()) : nullptr;
}

QueryType query_type(const TensorView& q) {
  return same(q.dtype(), kBFloat16)  ? QueryType::kBFloat16
         : same(q.dtype(), kFloat16) ? QueryType::kFloat16
                                     : QueryType::kE4M3;
}

DecodeParams decode_params(const TensorView& q, const Optional<TensorView>& q_rope, const TensorView& kv_cache,
                           const Optional<TensorView>& q_scale, const Optional<TensorView>& kv_scale,
                           const TensorView& block_table, const TensorView& seq_lens, const TensorView& work_ranges,
                           const TensorView& split_offsets, const TensorView& workspace, const TensorView& out,
                           const TensorView& lse, double softmax_scale, int64_t partitions) {
  const TensorView& rope = q_rope.has_value() ? q_rope.value() : q;
  const int64_t rope_offset = q_rope.has_value() ? 0 : kLatentDim * element_bytes(q.dtype());
  const int64_t rows = q.size(1) * q.size(2);
  DecodeParams params{
      .q = q.data_ptr(),
      .q_rope = static_cast<const char*>(rope.data_ptr()) + rope_offset,
      .q_stride_batch = q.stride(0),
      .q_stride_token = q.stride(1),
      .q_stride_head = q.stride(2),
      .q_rope_stride_batch = rope.stride(0),
      .q_rope_stride_token = rope.stride(1),
      .q_rope_stride_head = rope.stride(2),
      .block_table = static_cast<const int32_t*>(block_table.data_ptr()),
      .block_table_stride = block_table.stride(0),
      .max_pages = int32_t(block_table.size(1)),
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .work_ranges = static_cast<const WorkRange*>(work_ranges.data_ptr()),
      .split_offsets = static_cast<const int32_t*>(split_offsets.data_ptr()),
      .out = out.data_ptr(),
      .lse = static_cast<float*>(lse.data_ptr()),
      .partial_out = static_cast<float*>(workspace.data_ptr()),
      .partial_lse = nullptr,
      .batch = int32_t(q.size(0)),
      .s_q = int32_t(q.size(1)),
      .heads = int32_t(q.size(2)),
      .rows = int32_t(rows),
      .row_tile = row_tile(rows),
      .row_groups = int32_t((rows + kMaxRowTile - 1) / kMaxRowTile),
      .partitions = int32_t(partitions),
      .tiles_per_page = int32_t(kv_cache.size(1) / kTileTokens),
      .scale_log2 = float(softmax_scale * kLog2E),
      .kv_scale = scale_of(kv_scale),
      .q_scale = scale_of(q_scale),
      .query_type = query_type(q),
      .float16_out = same(out.dtype(), kFloat16),
      .rows_on_lanes = row_tile(rows) == 64 && !same(kv_cache.dtype(), kE4M3Bytes),
      .paired_dims = same(kv_cache.dtype(), kE4M3Bytes),
  };
  const int64_t partial_rows = 2 * partitions * params.row_groups * params.row_tile;
  params.partial_lse = params.partial_out + partial_rows * kLatentDim;
  if (partitions > 1) check_at_least("workspace's size", workspace.size(0), partial_rows * (kLatentDim + 1));
  return params;
}

// Out: the result's type.
template <class Out>
void launch(const DecodeParams& params, const CacheParams& cache, bool fp8_cache, bool fp8_math, cudaStream_t stream) {
  if (!fp8_cache) {
    launch_decode<Out>(params, cache, stream);
  } else if (fp8_math) {
    launch_fp8_decode<cutlass::float_e4m3_t>(params, cache, stream);
  } else {
    launch_fp8_decode<cutlass::half_t>(params, cache, stream);
  }
  if (params.partitions > 1) launch_combine<Out>(params, stream);
}

void decode(TensorView q, Optional<TensorView> q_rope, TensorView kv_cache, Optional<TensorView> q_scale,
            Optional<TensorView> kv_scale, TensorView block_table, TensorView seq_lens, TensorView work_ranges,
            TensorView split_offsets, TensorView workspace, TensorView out, TensorView lse, double softmax_scale,
            int64_t partitions, bool fp8_math) {
  reporting_cuda_errors([&] {
    check_decode_types(q, q_scale, kv_cache, kv_scale, out, fp8_math);
    check_decode_tensors(q, q_rope, kv_cache, block_table, seq_lens, out, lse);
    check_scale("q_scale", q_scale, q.device());
    check_scale("kv_scale", kv_scale, q.device());
    check_device("schedule", work_ranges, q.device());
    const DecodeParams params = decode_params(q, q_rope, kv_cache, q_scale, kv_scale, block_table, seq_lens, work_ranges,
                                              split_offsets, workspace, out, lse, softmax_scale, partitions);
    if (params.batch == 0 || params.rows == 0) return;
    const CacheParams cache{
        .data = kv_cache.data_ptr(),
        .pages = kv_cache.size(0),
        .page_size = kv_cache.size(1),
        .page_stride = kv_cache.stride(0),
        .row_stride = kv_cache.stride(1),
    };
    const DeviceGuard guard(q.device().device_id);
    const cudaStream_t stream = current_stream(q.device());
    const bool fp8_cache = same(kv_cache.dtype(), kE4M3Bytes);
    if (params.float16_out) {
      launch<cutlass::half_t>(params, cache, fp8_cache, fp8_math, stream);
    } else {
      launch<cutlass::bfloat16_t>(params, cache, fp8_cache, fp8_math, stream);
    }
  });
}

int64_t abi_version() { return kAbiVersion; }

}  // namespace
}  // namespace etap

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_version, etap::abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_fixed_schedule, etap::build_fixed_schedule);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_schedule, etap::build_schedule);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, etap::decode);

// The binding of top-k: checks the arguments, fills the plain struct, launches.
#include "top_k/top_k.h"

#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>

#include "api/on_device.h"

namespace etap {
namespace {

using tvm::ffi::Bytes;
using tvm::ffi::String;
using tvm::ffi::Tuple;

struct TopKCall {
  TensorView logits, lengths;
  Optional<TensorView> block_table;
  TensorView out;
  int64_t page_size, num_sms;
  bool early_lengths;

  int64_t rows() const { return logits.size(0); }
  int64_t width() const { return logits.size(1); }
};

// How many rows have one entry or row of `tensor`; both have rows where there are none.
int64_t rows_each(const char* name, const TensorView& tensor, int64_t rows) {
  const int64_t count = tensor.size(0);
  if (count == 0 ? rows > 0 : rows % count != 0) {
    TVM_FFI_THROW(ValueError) << name << ": wanted one for each row of logits, or for each of equally many of its " << rows
                              << " rows, got " << count;
  }
  return count == 0 ? 1 : std::max<int64_t>(rows / count, 1);
}

void check(const TopKCall& call) {
  const DLDevice device = call.logits.device();
  constexpr int64_t kMost = INT32_MAX;
  check_tensor("logits", call.logits, kFloat32, {{kAny, "rows"}, {kAny, "width"}}, Layout::kLastStride, device);
  check_tensor("lengths", call.lengths, kInt32, {{kAny, "rows or requests"}}, Layout::kContiguous, device);
  check_tensor("out", call.out, kInt32, {{call.rows()}, {kAny, "k"}}, Layout::kLastStride, device);
  rows_each("lengths", call.lengths, call.rows());
  check_at_least("k", call.out.size(1), 1);
  check_at_least("num_sms", call.num_sms, 1);
  if (call.rows() > 1 && call.out.stride(0) < call.out.size(1)) {
    TVM_FFI_THROW(ValueError) << "out: wanted rows that do not overlap, got strides " << text(call.out.strides());
  }
  // A position, and a CTA's number, is an int32; eight CTAs are the most that a row has.
  if (call.width() > kMost - 1024 || call.rows() > kMost / 8) {
    TVM_FFI_THROW(ValueError) << "logits: wanted at most " << kMost / 8 << " rows of " << kMost - 1024 << ", got shape "
                              << text(call.logits.shape());
  }
  if (call.block_table.has_value()) {
    const TensorView table = call.block_table.value();
    check_tensor("block_table", table, kInt32, {{kAny, "rows or requests"}, {kAny, "pages"}}, Layout::kLastStride, device);
    rows_each("block_table", table, call.rows());
    check_at_least("page_size", call.page_size, 1);
  }
  check_apart({extent("out", call.out)}, {extent("logits", call.logits), extent("lengths", call.lengths),
                                          extent("block_table", call.block_table)});
}

TopKParams params_of(const TopKCall& call) {
  TopKParams params{};
  params.logits = static_cast<const float*>(call.logits.data_ptr());
  params.lengths = static_cast<const int32_t*>(call.lengths.data_ptr());
  params.out = static_cast<int32_t*>(call.out.data_ptr());
  params.logits_stride = call.logits.stride(0);
  params.out_stride = call.out.stride(0);
  params.rows = int32_t(call.rows());
  params.width = int32_t(call.width());
  params.k = int32_t(call.out.size(1));
  params.rows_per_length = int32_t(rows_each("lengths", call.lengths, call.rows()));
  params.aligned = aligned(call.logits) && (call.rows() == 1 || params.logits_stride * sizeof(float) % kAlignmentBytes == 0);
  params.early_lengths = call.early_lengths;
  params.page_size = params.rows_per_table = 1;
  if (call.block_table.has_value()) {
    const TensorView table = call.block_table.value();
    params.block_table = static_cast<const int32_t*>(table.data_ptr());
    params.table_stride = table.stride(0);
    params.table_width = int32_t(table.size(1));
    params.page_size = int32_t(call.page_size);
    params.rows_per_table = int32_t(rows_each("block_table", table, call.rows()));
  }
  return params;
}

void run_top_k(const TopKCall& call) {
  check(call);
  const DLDevice device = call.logits.device();
  on_device("logits", device, [&](cudaStream_t stream) {
    if (call.rows() == 0) return;
    const TopKParams params = params_of(call);
    const void* const arguments[] = {&params};
    launch_overlapping(prepare_top_k(params, int(call.num_sms)), arguments, device.device_id, stream);
  });
}

void check_only(const TopKCall& call) { check(call); }

// CTAs, CTAs of a cluster, threads, parameters.
using TopKLaunch = Tuple<int64_t, int64_t, int64_t, Bytes>;

// What `top_k` launches for at least one row, for those who run it elsewhere: on tensors of the CPU too.
TopKLaunch launch_of(const TopKCall& call) {
  check(call);
  check_at_least("logits' rows", call.rows(), 1);
  const TopKParams params = params_of(call);
  const KernelLaunch kernel = prepare_top_k(params, int(call.num_sms));
  return TopKLaunch(int64_t(kernel.blocks.x), int64_t(kernel.cluster), int64_t(kernel.threads),
                    Bytes(reinterpret_cast<const char*>(&params), sizeof(params)));
}

template <auto kAction>
auto with_top_k_call(TensorView logits, TensorView lengths, Optional<TensorView> block_table, TensorView out, int64_t page_size,
                     int64_t num_sms, bool early_lengths) {
  return kAction({logits, lengths, block_table, out, page_size, num_sms, early_lengths});
}

}  // namespace
}  // namespace etap

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_top_k, etap::with_top_k_call<etap::check_only>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(top_k, etap::with_top_k_call<etap::run_top_k>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(top_k_launch, etap::with_top_k_call<etap::launch_of>);

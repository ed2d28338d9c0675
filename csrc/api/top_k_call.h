// One call of top-k: what the library is given, what of it is refused, and the parameters that it becomes.
#pragma once

#include <algorithm>

#include "api/arguments.h"
#include "top_k/top_k.h"

namespace etap {

#define ETAP_TOP_K_ARGUMENTS(ARGUMENT)        \
  ARGUMENT(TensorView, logits)                \
  ARGUMENT(TensorView, lengths)               \
  ARGUMENT(Optional<TensorView>, block_table) \
  ARGUMENT(TensorView, out)                   \
  ARGUMENT(int64_t, page_size)                \
  ARGUMENT(int64_t, num_sms)                  \
  ARGUMENT(bool, early_lengths)

struct TopKCall {
  ETAP_TOP_K_ARGUMENTS(ETAP_MEMBER)

  int64_t rows() const { return logits.size(0); }
  int64_t width() const { return logits.size(1); }
};

// How many rows have one entry or row of `tensor`; both have rows where there are none.
inline int64_t rows_each(const char* name, const TensorView& tensor, int64_t rows) {
  const int64_t count = tensor.size(0);
  if (count == 0 ? rows > 0 : rows % count != 0) {
    TVM_FFI_THROW(ValueError) << name << ": wanted one for each row of logits, or for each of equally many of its " << rows
                              << " rows, got " << count;
  }
  return count == 0 ? 1 : std::max<int64_t>(rows / count, 1);
}

inline void check(const TopKCall& call) {
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
  if (call.width() > kMost - 4096 || call.rows() > kMost / 8) {
    TVM_FFI_THROW(ValueError) << "logits: wanted at most " << kMost / 8 << " rows of " << kMost - 4096 << ", got shape "
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

inline TopKParams top_k_params(const TopKCall& call) {
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

}  // namespace etap

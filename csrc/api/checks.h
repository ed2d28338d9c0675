// What the kernels rely on, checked once at the boundary. Every refusal names the argument, what was wanted, what came.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>

namespace etap {

using tvm::ffi::TensorView;

constexpr int64_t kAny = -1;  // a size that the argument is free to choose
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kE4M3Bytes{kDLUInt, 8, 1};  // not every DLPack consumer knows 8-bit floats
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr int64_t kRowAlignmentBytes = 16;  // of TMA and of 16-byte loads

inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }
inline int64_t element_bytes(DLDataType type) { return type.bits * type.lanes / 8; }

inline std::string text(tvm::ffi::ShapeView sizes) {
  std::ostringstream out;
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "[") << sizes[i];
  return sizes.size() == 0 ? "[]" : out.str() + "]";
}

inline std::string text(DLDataType type) {
  const char* kind = type.code == kDLInt      ? "int"
                     : type.code == kDLUInt   ? "uint"
                     : type.code == kDLBfloat ? "bfloat"
                     : type.code == kDLFloat  ? "float"
                                              : "other type of bits ";
  return kind + std::to_string(int(type.bits));
}

inline std::string text(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  return (device.device_type == kDLCUDA ? "cuda:" : "other device ") + std::to_string(device.device_id);
}

inline void check_dtype(const char* name, const TensorView& tensor, std::initializer_list<DLDataType> wanted) {
  std::string names;
  for (DLDataType type : wanted) {
    if (same(tensor.dtype(), type)) return;
    names += (names.empty() ? "" : " or ") + text(type);
  }
  TVM_FFI_THROW(TypeError) << name << ": wanted " << names << ", got " << text(tensor.dtype());
}

inline void check_device(const char* name, const TensorView& tensor, DLDevice wanted) {
  const DLDevice got = tensor.device();
  if (got.device_type != wanted.device_type || got.device_id != wanted.device_id) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a tensor on " << text(wanted) << ", got one on " << text(got);
  }
}

struct Size {
  int64_t value;            // kAny: free
  const char* name = "";    // shown where the size is free
};

inline void check_shape(const char* name, const TensorView& tensor, std::initializer_list<Size> wanted) {
  bool fits = size_t(tensor.ndim()) == wanted.size();
  std::string sizes;
  int i = 0;
  for (const Size& size : wanted) {
    fits = fits && (size.value == kAny || tensor.size(i) == size.value);
    sizes += (i++ ? ", " : "[") + (size.value == kAny ? std::string(size.name) : std::to_string(size.value));
  }
  if (!fits) {
    TVM_FFI_THROW(ValueError) << name << ": wanted shape " << sizes << "], got " << text(tensor.shape());
  }
}

inline void check_contiguous(const char* name, const TensorView& tensor) {
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a contiguous tensor, got strides " << text(tensor.strides());
  }
}

inline void check_last_stride(const char* name, const TensorView& tensor) {
  const int last = tensor.ndim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    TVM_FFI_THROW(ValueError) << name << ": wanted stride 1 in the last dimension, got strides "
                              << text(tensor.strides());
  }
}

// The last dimension contiguous and every row at a multiple of 16 bytes.
inline void check_rows(const char* name, const TensorView& tensor) {
  check_last_stride(name, tensor);
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kRowAlignmentBytes == 0;
  for (int i = 0; i + 1 < tensor.ndim(); ++i) {
    const int64_t step = tensor.stride(i) * element_bytes(tensor.dtype());
    aligned = aligned && (tensor.size(i) <= 1 || step % kRowAlignmentBytes == 0);
  }
  if (!aligned) {
    TVM_FFI_THROW(ValueError) << name << ": wanted every row aligned to " << kRowAlignmentBytes << " bytes, got address "
                              << tensor.data_ptr() << " and strides " << text(tensor.strides());
  }
}

inline void check_at_least(const char* name, int64_t value, int64_t wanted) {
  if (value < wanted) TVM_FFI_THROW(ValueError) << name << ": wanted at least " << wanted << ", got " << value;
}

}  // namespace etap

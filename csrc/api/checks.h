// What the kernels rely on, checked once at the boundary. Every refusal names the argument, what was wanted, what came.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>

namespace etap {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int64_t kAny = -1;  // a size that the argument is free to choose
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kE4M3{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr int64_t kAlignmentBytes = 16;  // of TMA, and of 16-byte loads and stores

inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }
inline int64_t element_bytes(DLDataType type) { return type.bits * type.lanes / 8; }

inline std::string text(tvm::ffi::ShapeView sizes) {
  std::ostringstream out;
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "[") << sizes[i];
  return sizes.size() == 0 ? "[]" : out.str() + "]";
}

// As torch names it.
inline std::string text(DLDataType type) {
  switch (type.code) {
    case kDLFloat8_e4m3fn: return "float8_e4m3fn";
    case kDLFloat8_e4m3fnuz: return "float8_e4m3fnuz";
    case kDLFloat8_e5m2: return "float8_e5m2";
    case kDLFloat8_e5m2fnuz: return "float8_e5m2fnuz";
    case kDLFloat8_e8m0fnu: return "float8_e8m0fnu";
    case kDLBool: return "bool";
    case kDLInt: return "int" + std::to_string(int(type.bits));
    case kDLUInt: return "uint" + std::to_string(int(type.bits));
    case kDLFloat: return "float" + std::to_string(int(type.bits));
    case kDLBfloat: return "bfloat" + std::to_string(int(type.bits));
    case kDLComplex: return "complex" + std::to_string(int(type.bits));
    default: return "a type of " + std::to_string(int(type.bits)) + " bits";
  }
}

inline std::string text(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  return (device.device_type == kDLCUDA ? "cuda:" : "other device ") + std::to_string(device.device_id);
}

// like: what else has this type, for the text.
inline void check_dtype(const char* name, const TensorView& tensor, DLDataType wanted, const char* like = "") {
  if (same(tensor.dtype(), wanted)) return;
  TVM_FFI_THROW(TypeError) << name << ": wanted " << text(wanted) << like << ", got " << text(tensor.dtype());
}

inline bool same(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }

inline void check_device(const char* name, const TensorView& tensor, DLDevice wanted) {
  if (same(tensor.device(), wanted)) return;
  TVM_FFI_THROW(ValueError) << name << ": wanted a tensor on " << text(wanted) << ", got one on " << text(tensor.device());
}

struct Size {
  int64_t value;            // kAny: free
  const char* name = "";    // shown where the size is free
};

// Texts are put together only for a refusal: a call makes a dozen of these checks.
inline void check_shape(const char* name, const TensorView& tensor, std::initializer_list<Size> wanted) {
  bool fits = size_t(tensor.ndim()) == wanted.size();
  int i = 0;
  for (const Size& size : wanted) {
    fits = fits && (size.value == kAny || tensor.size(i) == size.value);
    ++i;
  }
  if (fits) return;
  std::string sizes;
  for (const Size& size : wanted) {
    sizes += (sizes.empty() ? "[" : ", ") + (size.value == kAny ? std::string(size.name) : std::to_string(size.value));
  }
  TVM_FFI_THROW(ValueError) << name << ": wanted shape " << sizes << "], got " << text(tensor.shape());
}

// A cache's tensor, [pages, page_size, row] or with a 1 before the last.
inline void check_pages(const char* name, const TensorView& cache, Size pages, Size page_size, Size row) {
  if (cache.ndim() == 4) {
    check_shape(name, cache, {pages, page_size, {1}, row});
  } else {
    check_shape(name, cache, {pages, page_size, row});
  }
}

inline void check_contiguous(const char* name, const TensorView& tensor) {
  if (tensor.numel() > 0 && !tensor.IsContiguous()) {  // nothing is contiguous, whatever its strides
    TVM_FFI_THROW(ValueError) << name << ": wanted a contiguous tensor, got shape " << text(tensor.shape())
                              << " with strides " << text(tensor.strides());
  }
}

inline void check_last_stride(const char* name, const TensorView& tensor) {
  const int last = tensor.ndim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    TVM_FFI_THROW(ValueError) << name << ": wanted stride 1 in the last dimension, got strides "
                              << text(tensor.strides());
  }
}

inline bool aligned(const TensorView& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignmentBytes == 0;
}

inline void check_aligned(const char* name, const TensorView& tensor) {
  if (aligned(tensor)) return;
  TVM_FFI_THROW(ValueError) << name << ": wanted a tensor aligned to " << kAlignmentBytes << " bytes, got address "
                            << tensor.data_ptr();
}

// The last dimension contiguous and every row at a multiple of 16 bytes.
inline void check_rows(const char* name, const TensorView& tensor) {
  check_last_stride(name, tensor);
  bool fits = aligned(tensor);
  for (int i = 0; i + 1 < tensor.ndim(); ++i) {
    const int64_t step = tensor.stride(i) * element_bytes(tensor.dtype());
    fits = fits && (tensor.size(i) <= 1 || step % kAlignmentBytes == 0);
  }
  if (!fits) {
    TVM_FFI_THROW(ValueError) << name << ": wanted every row aligned to " << kAlignmentBytes << " bytes, got address "
                              << tensor.data_ptr() << " and strides " << text(tensor.strides());
  }
}

enum class Layout {
  kLastStride,  // the last dimension's elements are neighbours
  kRows,        // and every row lies at a multiple of 16 bytes
  kContiguous,
};

// All that is wanted of a tensor. like: what else has its type, for the text.
inline void check_tensor(const char* name, const TensorView& tensor, DLDataType type, std::initializer_list<Size> shape,
                         Layout layout, DLDevice device, const char* like = "") {
  check_dtype(name, tensor, type, like);
  check_shape(name, tensor, shape);
  switch (layout) {
    case Layout::kLastStride: check_last_stride(name, tensor); break;
    case Layout::kRows: check_rows(name, tensor); break;
    case Layout::kContiguous: check_contiguous(name, tensor); break;
  }
  check_device(name, tensor, device);
}

// Rows [..., columns] of a tensor with three dimensions that is written: none lies in another.
inline void check_own_rows(const char* name, const TensorView& tensor) {
  const int near = tensor.stride(0) < tensor.stride(1) ? 0 : 1, far = 1 - near;
  const int64_t columns = tensor.size(2), last = (tensor.size(near) - 1) * tensor.stride(near) + columns;
  const bool near_apart = tensor.size(near) <= 1 || tensor.stride(near) >= columns;
  const bool far_apart = tensor.size(far) <= 1 || tensor.stride(far) >= last;
  if (tensor.numel() == 0 || (near_apart && far_apart)) return;
  TVM_FFI_THROW(ValueError) << name << ": wanted rows of " << columns << " elements that do not overlap, got shape "
                            << text(tensor.shape()) << " with strides " << text(tensor.strides());
}

inline void check_at_least(const char* name, int64_t value, int64_t wanted) {
  if (value < wanted) TVM_FFI_THROW(ValueError) << name << ": wanted at least " << wanted << ", got " << value;
}

// Memory from a tensor's first element to its last; dense: no gaps where another's elements could lie.
struct Extent {
  const char* name;
  uintptr_t begin = 0, end = 0;
  bool dense = false;
};

inline Extent extent(const char* name, const TensorView& tensor) {
  const int64_t *sizes = tensor.shape().data(), *strides = tensor.strides().data();
  int64_t count = 1, last = 0;
  for (int i = 0; i < tensor.ndim(); ++i) {
    count *= sizes[i];
    last += (sizes[i] - 1) * strides[i];
  }
  if (count == 0) return {name};
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {name, begin, begin + (last + 1) * element_bytes(tensor.dtype()), last < count};
}

inline Extent extent(const char* name, const Optional<TensorView>& tensor) {
  return tensor.has_value() ? extent(name, tensor.value()) : Extent{name};
}

// Whether an end of one extent, where it surely has an element, lies where the other surely has one.
inline bool ends_in(const Extent& one, const Extent& other) {
  const auto within = [&](uintptr_t byte) { return other.begin <= byte && byte < other.end; };
  return other.dense && (within(one.begin) || within(one.end - 1));
}

// What is written lies in no other's memory: kernels write some of it while they read. Of tensors with gaps, in which others may
// lie, only the first and the last element are looked at.
inline void check_apart(std::initializer_list<Extent> written, std::initializer_list<Extent> read) {
  const auto check = [](const Extent& one, const Extent& other) {
    if (one.begin == one.end || other.begin == other.end) return;
    if (one.begin != other.begin && !ends_in(one, other) && !ends_in(other, one)) return;
    TVM_FFI_THROW(ValueError) << one.name << ": wanted memory of its own, got some of " << other.name << "'s";
  };
  for (const Extent* one = written.begin(); one != written.end(); ++one) {
    for (const Extent& other : read) check(*one, other);
    for (const Extent* other = written.begin(); other != one; ++other) check(*one, *other);
  }
}

}  // namespace etap

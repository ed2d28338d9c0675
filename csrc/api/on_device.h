// Runs a call's launches on its tensors' device and on the caller's stream.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <stdexcept>

#include "api/checks.h"
#include "common/cuda_check.h"

namespace etap {

// Makes the tensors' device current for the launches of one call.
class CallDevice {
 public:
  explicit CallDevice(int device) {
    // The driver's functions need the device's context in this thread, where a first cudaSetDevice puts it.
    thread_local bool has_context = false;
    ETAP_CUDA_CHECK(cudaGetDevice(&previous_));
    changed_ = device != previous_;
    if (changed_ || !has_context) ETAP_CUDA_CHECK(cudaSetDevice(device));
    has_context = true;
  }
  ~CallDevice() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Asks the driver once for each device.
inline void must_be_hopper(const char* name, DLDevice device) {
  static std::atomic<uint64_t> known{0};
  if (device.device_type != kDLCUDA) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a tensor on a CUDA device, got one on " << text(device);
  }
  const uint64_t bit = uint64_t(1) << (device.device_id % 64);
  if (known.load(std::memory_order_relaxed) & bit) return;
  int major = 0, minor = 0;
  ETAP_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id));
  ETAP_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.device_id));
  if (major != 9 || minor != 0) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a tensor on a Hopper GPU (compute capability 9.0), got one on "
                              << text(device) << " with compute capability " << major << "." << minor;
  }
  known.fetch_or(bit, std::memory_order_relaxed);
}

// launch(stream). CUDA's errors become exceptions of Python.
template <class Launch>
void on_device(const char* name, DLDevice device, Launch&& launch) {
  try {
    must_be_hopper(name, device);
    const CallDevice current(device.device_id);
    launch(static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id)));
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

}  // namespace etap

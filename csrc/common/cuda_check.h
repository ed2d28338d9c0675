// CUDA errors as exceptions that name the call.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace etap {

inline void check_cuda(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // the error is reported here, so it must not surface again in the host's next call
    throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
  }
}

}  // namespace etap

#define ETAP_CUDA_CHECK(call) ::etap::check_cuda((call), #call)

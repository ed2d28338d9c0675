// One way to launch a kernel that overlaps with its predecessor, and the driver's functions, found through the runtime so that
// the library needs no libcuda to load.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "common/cuda_check.h"

namespace etap {

// Raises where the driver lacks it. `version`: the one in which the function got this signature.
void* driver_function(const char* name, unsigned version);

struct KernelLaunch;

// What the driver calls a kernel, one handle a device. The runtime would look it up, by the function's address, in every
// launch: 0.4 us, of which a decode call has two. A green context shares its device's.
class KernelHandles {
 public:
  // Grants the shared memory the first time. device: the current one.
  CUfunction of(const KernelLaunch& kernel, int device);
  // Whether there is room for all of a launch's clusters at once, which the SMs of the GPU, or of the stream's green context, may be
  // too few or too scattered for. The driver is asked again where the context is another than the last call's of that size.
  bool clusters_fit(const KernelLaunch& kernel, int device, cudaStream_t stream);

 private:
  static constexpr int kDevices = 64, kClusterSizes = 4;  // powers of two
  std::atomic<CUfunction> of_device_[kDevices] = {};
  std::atomic<uint64_t> clusters_[kDevices][kClusterSizes] = {};  // at once, below the context; 0: not yet known
};

struct KernelLaunch {
  const void* function;
  const char* name;  // holds the template arguments, as the compiler writes them
  KernelHandles* handles;
  dim3 blocks;
  int threads;
  int shared_bytes;
  int cluster = 1;  // CTAs, neighbours in x, that read each other's shared memory
  int most_shared_bytes = 0;  // of all launches of the kernel; 0: they do not differ
};

// Programmatic dependent launch: the kernel may start before its predecessor on the stream has ended, and waits for it
// itself (cudaGridDependencySynchronize) before it reads or writes anything. device: the current one, in whose context this
// thread is.
void launch_overlapping(const KernelLaunch& kernel, const void* const* arguments, int device, cudaStream_t stream);

}  // namespace etap

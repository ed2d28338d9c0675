// From request lengths to balanced WorkRanges.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace etap {

// Build the schedule on the device (asynchronously on `stream`) or on host memory.
void build_schedule_on_device(const ScheduleParams& params, cudaStream_t stream);
void build_schedule_on_host(const ScheduleParams& params);

}  // namespace etap

// Merge the partial results of split requests by their log-sum-exps.
#pragma once

#include "common/launch.h"
#include "params.h"

namespace etap {

// The launch of the kernel that merges the partial results behind a decode kernel of the same parameters. leaves_room: that kernel
// leaves a block of this one room. num_sms: those that the calls are planned for, which tell how many tensor cores the GPU has.
KernelLaunch prepare_combine(const ResultParams& params, bool leaves_room, int64_t num_sms);
// Of the one that does so where requests share prefixes, behind the calls of the stacks and of what requests have of their own.
KernelLaunch prepare_merge(const MergeParams& params, int64_t num_sms);

}  // namespace etap

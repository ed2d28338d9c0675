// Merge the partial results of split requests by their log-sum-exps.
#pragma once

#include "common/launch.h"
#include "params.h"

namespace etap {

// The launch of the kernel that merges the partial results behind a decode kernel of the same parameters. lean: in the form that
// needs few registers, whose bits may be others.
KernelLaunch prepare_combine(const ResultParams& params, bool lean);

}  // namespace etap

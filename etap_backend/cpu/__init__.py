"""The kernels' algorithms in plain torch, over the same schedules, for CPU tensors."""

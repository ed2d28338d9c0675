"""The kernels' algorithms in plain torch, with the same schedules, for CPU tensors."""

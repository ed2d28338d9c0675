"""Occupies SMs, so that other kernels run on fewer, as on a smaller GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

DEVICE = "cuda"
THREADS = 1024
# A block takes all shared memory of its SM until it is told to stop, for at most some 20 seconds. It polls rarely, by
# one thread: frequent polling slows calls beside it by up to a tenth.
HOLDING_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(volatile int* stop) {
  const long long begin = clock64();
  while (!__syncthreads_or(threadIdx.x == 0 && (*stop != 0 || clock64() - begin > 40000000000LL))) __nanosleep(20000);
}
"""


@cache
def _holding_kernel() -> tuple[Callable, int]:
    """The kernel, and the bytes of shared memory that a block of it takes."""
    shared_bytes = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin
    kernel = torch.cuda._compile_kernel(HOLDING_KERNEL, "hold")
    kernel.set_shared_memory_config(shared_bytes)
    return kernel, shared_bytes


@contextmanager
def sms_held(count: int) -> Iterator[torch.cuda.Stream | None]:
    """Keep `count` SMs from the kernels in the block. Synchronise streams there, never the device: it does not end.

    Yields the stream of the kernel that holds them, None for a count of 0.

    Without this, a call with fewer CTAs than SMs that begins before the previous call ends takes the SMs that are
    still free, other ones each time; on a GPU with fewer SMs it cannot.
    """
    if count == 0:
        yield None
        return
    kernel, shared_bytes = _holding_kernel()
    stop, stream = torch.zeros((), dtype=torch.int32, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel(grid=(count, 1, 1), block=(THREADS, 1, 1), args=[stop], shared_mem=shared_bytes, stream=stream)
    try:
        yield stream
    finally:
        stop.fill_(1)
        torch.cuda.synchronize()

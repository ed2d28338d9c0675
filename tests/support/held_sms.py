"""Keeping SMs from what runs, as a communication kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# All shared memory of an SM, until it is told to stop or some 20 seconds are over. It asks seldom, one thread a block:
# many threads that ask often slow the calls beside them.
HOLDING_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(volatile int* stop) {
  const long long begin = clock64();
  while (!__syncthreads_or(threadIdx.x == 0 && (*stop != 0 || clock64() - begin > 40000000000LL))) {
    __nanosleep(20000);
  }
}
"""


@contextmanager
def sms_held(count: int) -> Iterator[torch.cuda.Stream]:
    """Keep `count` SMs from what runs inside, which may wait for its own stream only: the whole GPU is never done.

    Yields the stream whose kernel holds them: it has work as long as they are held.
    """
    bytes_held = torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin
    kernel = torch.cuda._compile_kernel(HOLDING_KERNEL, "hold")
    kernel.set_shared_memory_config(bytes_held)
    stop = torch.zeros((), dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel(grid=(count, 1, 1), block=(1024, 1, 1), args=[stop], shared_mem=bytes_held, stream=stream)
    try:
        yield stream
    finally:
        stop.fill_(1)
        torch.cuda.synchronize()

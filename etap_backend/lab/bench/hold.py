"""Keeping SMs from what runs, as on a GPU that has fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

DEVICE = "cuda"
# Every register and all shared memory of an SM, until it is told to stop or some 20 seconds are over.
HOLDING_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(volatile int* stop) {
  int held[56];
  for (int i = 0; i < 56; ++i) held[i] = *stop;
  const long long begin = clock64();
  while (*stop == 0 && clock64() - begin < 40000000000LL) {
    for (int i = 0; i < 56; ++i) asm volatile("" : "+r"(held[i]));
    __nanosleep(1000);
  }
}
"""


@cache
def holding_kernel() -> tuple[Callable, int]:
    """The kernel that holds an SM a block, and its bytes of shared memory."""
    bytes_held = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin
    kernel = torch.cuda._compile_kernel(HOLDING_KERNEL, "hold")
    kernel.set_shared_memory_config(bytes_held)
    return kernel, bytes_held


@contextmanager
def sms_held(count: int) -> Iterator[None]:
    """Keep `count` SMs from what runs inside, which may wait for its own stream only: the whole GPU is never done.

    Calls on fewer CTAs than there are SMs, each of which may begin while the last one ends, come to lie where the last
    one does not, in another arrangement each time. On a GPU that has no more SMs they cannot.
    """
    if count == 0:
        yield
        return
    kernel, bytes_held = holding_kernel()
    stop = torch.zeros((), dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel(grid=(count, 1, 1), block=(1024, 1, 1), args=[stop], shared_mem=bytes_held, stream=stream)
    try:
        yield
    finally:
        stop.fill_(1)
        torch.cuda.synchronize()

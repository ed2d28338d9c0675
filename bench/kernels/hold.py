"""Keeping SMs from what runs, as on a GPU that has fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

DEVICE = "cuda"
THREADS = 1024
TRAFFIC_BYTES = 512 << 20  # that are read again and again, more than L2 holds
# All shared memory of an SM, until it is told to stop or some 20 seconds are over. Asks seldom, a thread a block: many
# that ask often slow the calls beside them by up to a tenth. Each `period` nanoseconds, if that is not 0, a block reads
# 16 bytes a thread.
HOLDING_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(1024) hold(volatile int* stop, const uint4* source, int rows, int period) {
  const long long begin = clock64();
  unsigned long long now, due;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(due));
  int row = blockIdx.x;
  while (!__syncthreads_or(threadIdx.x == 0 && (*stop != 0 || clock64() - begin > 40000000000LL))) {
    if (period == 0) { __nanosleep(20000); continue; }
    for (int i = 0; i < 8; ++i, row = (row + gridDim.x) % rows) {
      uint4 read;
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(read.x), "=r"(read.y), "=r"(read.z), "=r"(read.w)
                   : "l"(source + (long long)row * blockDim.x + threadIdx.x));
      asm volatile("" ::"r"(read.x), "r"(read.y), "r"(read.z), "r"(read.w));
      due += period;
      do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      } while (now < due);
    }
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
def sms_held(count: int, traffic: float = 0.0) -> Iterator[torch.cuda.Stream | None]:
    """Keep `count` SMs from what runs inside, which may wait for its own stream only: the whole GPU is never done.

    Yields the stream whose kernel holds them, None if it is to hold none: it has work as long as they are held.

    `traffic`: bytes a second that they read from memory meanwhile, together.

    Calls on fewer CTAs than there are SMs, each of which may begin while the last one ends, come to lie where the last
    one does not, in another arrangement each time. On a GPU that has no more SMs they cannot.
    """
    if count == 0:
        yield None
        return
    kernel, bytes_held = holding_kernel()
    stop = torch.zeros((), dtype=torch.int32, device=DEVICE)
    row_bytes = THREADS * 16
    source = torch.empty(TRAFFIC_BYTES if traffic else row_bytes, dtype=torch.uint8, device=DEVICE)
    period = round(1e9 * count * row_bytes / traffic) if traffic else 0
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    arguments = [stop, source, source.numel() // row_bytes, period]
    kernel(grid=(count, 1, 1), block=(THREADS, 1, 1), args=arguments, shared_mem=bytes_held, stream=stream)
    try:
        yield stream
    finally:
        stop.fill_(1)
        torch.cuda.synchronize()

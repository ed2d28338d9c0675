"""The CUDA graph capture that a call belongs to: memory that a capture fills is filled in that graph's replays only."""

import ctypes
import functools
from collections.abc import Callable

import torch

ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE"""


def capture_id(device: torch.device) -> object | None:
    """A value that is equal in all calls of one capture on the current stream and in no other; None outside captures.

    Where the driver does not number captures, no two calls have the same value: each then makes its own plan.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    stream, status, number = torch.cuda.current_stream().cuda_stream, ctypes.c_int(), ctypes.c_uint64()
    ask = _driver()
    if ask is None or ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None):
        return object()
    return number.value if status.value == ACTIVE else object()


@functools.cache
def _driver() -> Callable[..., int] | None:
    """cuStreamGetCaptureInfo_v2, which numbers the captures of a process; torch does not offer it."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):  # no driver, or one without this function
        return None
    # Stream; status, number; graph, its nodes, how many: outputs that are not wanted may be null.
    ask.argtypes, ask.restype = [ctypes.c_void_p] * 6, ctypes.c_int
    return ask

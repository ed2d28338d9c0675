"""FlashMLA's functions in DeepSeek-V4's backend, with ETAP's calls in their place while an ETAP backend attends."""

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from types import ModuleType

FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")

_this_thread = threading.local()


def module() -> ModuleType:
    """The module from which DeepSeek-V4's backend imports FlashMLA's functions.

    Reason: FlashMLA became a package of its own.
    Versions: 0.5.22 has the second module. Goes when 0.5.23 is the oldest supported one.
    """
    try:
        return importlib.import_module("sglang.kernels.ops.attention.flash_mla_interface")
    except ModuleNotFoundError:
        return importlib.import_module("sgl_kernel.flash_mla")


@functools.cache  # once in a process
def install() -> None:
    """Put a dispatcher in the place of each function.

    Reason: SGLang's backend imports the functions inside its methods, where a subclass cannot name others.
    Versions: 0.5.22 imports both; 0.5.23 `flash_mla_sparse_fwd`, and the other is an attribute of the backend.
    Goes when both are attributes.
    """
    functions = module()
    for name in FUNCTIONS:
        setattr(functions, name, _dispatcher(name, getattr(functions, name)))


def _dispatcher(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def dispatch(*args, **kwargs):
        calls = getattr(_this_thread, "calls", None)
        return (function if calls is None else calls[name])(*args, **kwargs)

    return dispatch


def replaced(calls: Mapping[str, Callable], attend: Callable, *args, **kwargs):
    """Return `attend(*args, **kwargs)`, in which this thread's calls of the functions go to these.

    Args:
        calls: for each of FUNCTIONS what takes its arguments.
        attend: a method of SGLang's backend.
    """
    before, _this_thread.calls = getattr(_this_thread, "calls", None), calls
    try:
        return attend(*args, **kwargs)
    finally:
        _this_thread.calls = before

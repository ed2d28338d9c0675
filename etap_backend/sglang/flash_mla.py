"""FlashMLA's functions and the top-k of DeepSeek-V4's backend, with ETAP's calls in their place in an ETAP backend."""

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from types import ModuleType

FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
TOP_K = "topk_transform_paged_v2"

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


def targets() -> list[tuple[ModuleType, str]]:
    """The functions: of each its module and name."""
    indexer = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
    return [*((module(), name) for name in FUNCTIONS), (indexer, TOP_K)]


@functools.cache  # once in a process
def install() -> None:
    """Put a dispatcher in the place of each function.

    Reason: SGLang's backend imports the functions inside its methods, where a subclass cannot name others, or calls
    them, as the top-k, in a method that does more.
    Versions: all; in 0.5.23 `flash_mla_with_kvcache` is an attribute of the backend. Goes when all are attributes.
    """
    for owner, name in targets():
        setattr(owner, name, _dispatcher(name, getattr(owner, name)))


def _dispatcher(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def dispatch(*args, **kwargs):
        return getattr(_this_thread, "calls", {}).get(name, function)(*args, **kwargs)

    return dispatch


def replaced(calls: Mapping[str, Callable], attend: Callable, *args, **kwargs):
    """Return `attend(*args, **kwargs)`, in which this thread's calls of the functions go to these.

    Args:
        calls: by name of a function what takes its arguments.
        attend: a method of SGLang's backend.
    """
    before, _this_thread.calls = getattr(_this_thread, "calls", {}), calls
    try:
        return attend(*args, **kwargs)
    finally:
        _this_thread.calls = before

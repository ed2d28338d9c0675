"""Finds, loads and checks the version of the compiled library; no other module loads it."""

import functools
import os
from pathlib import Path

import tvm_ffi

ABI_VERSION = 14
"""The library's `abi_version()` must return this; it rises whenever a compiled function changes its arguments."""

PATH_VARIABLE = "ETAP_LIBRARY"


def library_path() -> Path:
    """Path of the shared library: the environment variable ETAP_LIBRARY, else the one beside this package."""
    given = os.environ.get(PATH_VARIABLE)
    return Path(given) if given else Path(__file__).parent / "lib" / "libetap_backend.so"


@functools.cache
def library() -> tvm_ffi.Module:
    """The loaded library; csrc/api/bindings.cpp lists its functions.

    Raises ImportError when the library is missing, does not load, or has another ABI version than this package.
    """
    path = library_path()
    if not path.is_file():
        raise ImportError(
            f"no compiled library at {path}: install the etap-backend wheel (Linux x86_64), "
            f"or point {PATH_VARIABLE} at a libetap_backend.so"
        )
    try:
        module = tvm_ffi.load_module(path)
        found = module.abi_version()
    except Exception as error:
        raise ImportError(f"{path} does not load as the library of etap-backend: {error}") from error
    if found != ABI_VERSION:
        raise ImportError(
            f"{path} has ABI version {found}, this package wants {ABI_VERSION}: "
            "library and Python package must come from the same build"
        )
    return module

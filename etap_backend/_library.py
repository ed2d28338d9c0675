"""Finds, loads and version-checks the compiled library; nothing else loads it."""

import functools
import os
from pathlib import Path

import tvm_ffi

ABI_VERSION = 13
"""What `abi_version()` of the library must return: raised whenever a compiled function changes its arguments."""

PATH_VARIABLE = "ETAP_LIBRARY"


def library_path() -> Path:
    """Path of the shared library: the environment variable ETAP_LIBRARY, else the one beside this package."""
    given = os.environ.get(PATH_VARIABLE)
    return Path(given) if given else Path(__file__).parent / "lib" / "libetap_backend.so"


@functools.cache
def library() -> tvm_ffi.Module:
    """The loaded library, with the functions that the end of csrc/api/bindings.cpp lists.

    Raises ImportError when there is no library, when it does not load, or when its version is not this package's.
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

"""Finds, loads and checks the version of the compiled library; no other module loads it."""

import functools
import importlib.metadata
import itertools
import os
from pathlib import Path

import tvm_ffi

import etap_backend

ABI_VERSION = 15
"""The library's `abi_version()` must return this; it rises whenever a compiled function changes its arguments."""

PATH_VARIABLE = "ETAP_LIBRARY"
FILE = "lib/libetap_backend.so"


def library_path() -> Path:
    """Path of the shared library: the environment variable ETAP_LIBRARY; else the one in the package's folders.

    Else the one in the installed distribution's: `python -m` puts the working directory first on the path, and a source
    tree there hides the installed package. Where there is none, the path where it should be.
    """
    if given := os.environ.get(PATH_VARIABLE):
        return Path(given)
    beside = [Path(folder) / FILE for folder in etap_backend.__path__]
    distributions = importlib.metadata.distributions(name="etap-backend")  # sought only where they are asked for
    installed = (Path(str(one.locate_file(f"etap_backend/{FILE}"))) for one in distributions)
    return next((path for path in itertools.chain(beside, installed) if path.is_file()), beside[0])


def remedy() -> str:
    """What to do about a library that is missing, does not load or is of another version."""
    if os.environ.get(PATH_VARIABLE):
        return f"correct or unset {PATH_VARIABLE}, which names it"
    return f"install the etap-backend wheel (Linux x86_64), or point {PATH_VARIABLE} at a libetap_backend.so"


@functools.cache
def library() -> tvm_ffi.Module:
    """The loaded library; csrc/api/bindings.cpp lists its functions.

    Raises ImportError when the library is missing, does not load, or has another ABI version than this package.
    """
    path = library_path()
    if not path.is_file():
        raise ImportError(f"no compiled library at {path}: {remedy()}")
    try:
        module = tvm_ffi.load_module(path)
        found = module.abi_version()
    except Exception as error:
        raise ImportError(f"{path} does not load as the library of etap-backend: {error}; {remedy()}") from error
    if found != ABI_VERSION:
        raise ImportError(
            f"{path} has ABI version {found}, this package wants {ABI_VERSION}: "
            f"both must come from the same build; {remedy()}"
        )
    return module

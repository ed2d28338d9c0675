"""Print where the build requirements installed from PyPI keep their files, as CMake list items KEY=PATH.

CMake runs this before it enables CUDA: the compiler is itself one of those packages. Nothing is imported, because
importing tvm_ffi would import torch, which a build does not need.
"""

import importlib.util
from pathlib import Path


def package_folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def first_existing(package: str, relative: str, marker: str) -> str:
    """The first folder `relative` inside `package` that holds `marker`; empty when there is none."""
    found = [folder / relative for folder in package_folders(package) if (folder / relative / marker).exists()]
    return str(found[0].resolve()) if found else ""


print(
    ";".join(
        (
            "ETAP_CUDA_ROOT=" + first_existing("nvidia", "cu13", "bin/nvcc"),
            "ETAP_CUTLASS_INCLUDE=" + first_existing("cutlass_library", "source/include", "cute/tensor.hpp"),
            "ETAP_TVM_FFI_INCLUDE=" + first_existing("tvm_ffi", "include", "tvm/ffi/c_api.h"),
        )
    ),
    end="",
)

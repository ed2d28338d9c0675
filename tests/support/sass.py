"""The instructions of a built library, as NVIDIA's disassembler prints them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path


def disassembler(name: str) -> Path:
    """A tool of the CUDA packages that the tests are installed with."""
    package = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
    file = next(file for file in importlib.metadata.files(package) if file.name == name)
    return Path(file.locate())


def cuobjdump(library: Path, *options: str) -> str:
    tools = f"{disassembler('nvdisasm').parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(disassembler("cuobjdump")), *options, str(library)]
    return subprocess.run(command, env={**os.environ, "PATH": tools}, capture_output=True, text=True, check=True).stdout


def kernels(dump: str) -> dict[str, str]:
    """SASS of each kernel by its mangled name, from what `cuobjdump -sass` prints."""
    parts = re.split(r"^\s*Function : (\S+)$", dump, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))

"""The provenance of a result: date, GPU, driver, clocks, versions, commit, library and command."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from bench.common import gpus
from etap_backend import _library

UNKNOWN = "unknown"
PACKAGES = ("etap-backend", "torch", "apache-tvm-ffi", "triton", "vllm", "sglang", "sglang-kernel", "flashinfer-python")


def provenance(program: str, note: str = "") -> dict:
    """The top-level fields that every results file begins with, for a run that begins now.

    Args:
        program: the command without its arguments, such as "python -m bench soak".
        note: anything else that a reader must know.
    """
    first = next(iter(gpus.gpus()), gpus.Gpu(UNKNOWN, None, UNKNOWN, []))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": first.name,  # the first visible one
        "gpu_memory_mib": first.memory_mib,
        "driver": first.driver,
        "clocks": first.clocks,
        "python": platform.python_version(),
        "versions": installed(PACKAGES),
        "commit": os.environ.get("ETAP_COMMIT") or commit_of(Path(__file__).parent),
        "library_sha256": sha256(_library.library_path()),
        "command": as_from_here(shlex.join([*program.split(), *sys.argv[1:]])),
        "note": note,
    }


def as_from_here(text: str) -> str:
    """The text with paths relative to the working directory: a results file names no path of its machine."""
    return text.replace(f"{Path.cwd()}/", "")


def commit_of(folder: Path) -> str:
    """What `git describe` says in a folder; it ends in -dirty when files are changed."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return UNKNOWN


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def sha256(path: Path) -> str | None:
    """SHA-256 of a file's content, None when there is no such file."""
    with suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return None

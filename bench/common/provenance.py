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
from bench.common.configs import Strict

UNKNOWN = "unknown"


class Provenance(Strict):
    """Top-level fields of every results file."""

    date: str  # UTC, ISO 8601
    gpu: str = UNKNOWN  # the first visible one
    gpu_memory_mib: int | None = None
    driver: str = UNKNOWN
    clocks: list[str] = []
    python: str | None = None
    versions: dict[str, str] = {}
    commit: str = UNKNOWN
    library_sha256: str | None = None
    command: str
    note: str = ""


def provenance(
    program: str, *, packages: Iterable[str] = (), library: Path | None = None, note: str = ""
) -> Provenance:
    """The provenance of a run that begins now.

    Args:
        program: the command without its arguments, such as "python -m bench soak".
        packages: names of packages; versions of the installed ones are noted.
        library: the compiled library; its SHA-256 is noted when the file exists.
        note: anything else that a reader must know.
    """
    about = {}
    if found := gpus.gpus():
        first = found[0]
        about = {"gpu": first.name, "gpu_memory_mib": first.memory_mib, "driver": first.driver, "clocks": first.clocks}
    return Provenance(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **about,
        python=platform.python_version(),
        versions=installed(packages),
        commit=os.environ.get("ETAP_COMMIT") or commit_of(Path(__file__).parent),
        library_sha256=sha256(library) if library else None,
        command=as_from_here(shlex.join([*program.split(), *sys.argv[1:]])),
        note=note,
    )


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

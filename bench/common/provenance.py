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


def as_from_here(text: str) -> str:
    """The text with paths relative to the working directory: a results file names no path of its machine."""
    return text.replace(f"{Path.cwd()}/", "")


class Provenance(Strict):
    """Top-level fields of every results file."""

    date: str  # UTC, ISO 8601
    gpu: str = UNKNOWN  # the first visible one
    gpu_memory_mib: int | None = None
    gpus_of_the_machine: int | None = None
    driver: str = UNKNOWN
    clocks: list[str] = []
    python: str | None = None
    versions: dict[str, str] = {}
    commit: str = UNKNOWN
    library_sha256: str | None = None
    command: str
    note: str = ""


def provenance(
    program: str,
    *,
    packages: Iterable[str] = (),
    versions: dict[str, str] | None = None,
    python: str | None = None,
    library: Path | None = None,
    note: str = "",
) -> Provenance:
    """The provenance of a run that begins now.

    Args:
        program: the command without its arguments, such as "python -m bench.checks.soak".
        packages: names of packages; versions of the installed ones are noted.
        versions, python: where another interpreter does the work, its versions of packages and of Python.
        library: the compiled library; its SHA-256 is noted when the file exists.
        note: anything else that a reader must know.
    """
    found = gpus.gpus()
    about = {}
    if found:
        first = found[0]
        about = {"gpu": first.name, "gpu_memory_mib": first.memory_mib, "driver": first.driver, "clocks": first.clocks}
    return Provenance(
        date=now(),
        **about,
        gpus_of_the_machine=gpus.count(),
        python=python or platform.python_version(),
        versions=installed(packages) if versions is None else versions,
        commit=commit(),
        library_sha256=sha256(library) if library else None,
        command=command_line(program),
        note=note,
    )


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit() -> str:
    """The sources' commit: ETAP_COMMIT, or what `git describe` says; it ends in -dirty when files are changed."""
    return os.environ.get("ETAP_COMMIT") or commit_of(Path(__file__).parent)


def commit_of(folder: Path) -> str:
    """What `git describe` says in a folder."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return UNKNOWN


def command_line(program: str) -> str:
    """This process's command, with paths relative to the working directory: "python -m bench NAME ..." where it was
    started so, else `program` with the same arguments."""
    by_name = Path(sys.argv[0]) == Path(__file__).parents[1] / "__main__.py"
    return as_from_here(shlex.join([*("python -m bench" if by_name else program).split(), *sys.argv[1:]]))


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

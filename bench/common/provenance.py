"""What a figure is worth nothing without: when, on what, with which sources, versions and command it was made."""

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

from pydantic import BaseModel, ConfigDict

from bench.common import gpus

UNKNOWN = "unknown"


def as_from_here(text: str) -> str:
    """The text with its paths as from the folder that the program runs in: a results file names none of its machine."""
    return text.replace(f"{Path.cwd()}/", "")


class Provenance(BaseModel):
    """The part that every results file has; fields lie at its top level, beside what was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


def without_note(command: str) -> str:
    """A command without its `--note`, for where the note stands beside it."""
    kept, words = [], iter(shlex.split(command))
    for word in words:
        if word == "--note":
            next(words, None)
        elif not word.startswith("--note="):
            kept.append(word)
    return shlex.join(kept)


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
        program: how this program is called where it is not through `etap`, such as
            "python -m bench.checks.soak".
        packages: whose installed versions are noted, as far as they are installed.
        versions, python: versions of packages and of Python where another interpreter than this one does the work.
        library: the compiled library; its SHA-256 is noted when the file is there.
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
    """The commit that a result is made with: ETAP_COMMIT, or what git says of these sources; -dirty when changed."""
    return os.environ.get("ETAP_COMMIT") or commit_of(Path(__file__).parent)


def commit_of(folder: Path) -> str:
    """What git says of the sources in a folder."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return UNKNOWN


def command_line(program: str) -> str:
    """The command that started this process: as a subcommand of `etap`, or `program` with the same arguments."""
    words = ["etap"] if Path(sys.argv[0]).name == "etap" else program.split()
    return shlex.join([*words, *sys.argv[1:]])


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

"""What the runs of other projects' own tests on ETAP share: the head of results files, and parts of the cases."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from etap_backend import _library
from etap_backend.lab.provenance import commit_of, provenance, sha256
from etap_backend.lab.results import must_be_writable

KEPT_FAILURES = 20
KEPT_TEXT = 600  # characters of what a wrong case printed


def begin(
    program: str,
    what: str,
    checkout: Path,
    script: Path,
    output: Path,
    *,
    whose: str = "FlashMLA",
    packages: tuple = (),
) -> dict:
    """The head of a results file; refuses a folder without the script, and a file that cannot be written."""
    if not (checkout / script).is_file():
        raise typer.BadParameter(f"checkout: wanted {whose}'s repository with {script}, got {checkout}")
    try:
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    packages = ("etap-backend", "torch", "apache-tvm-ffi", *packages)
    about = provenance(program, packages=packages, library=_library.library_path())
    return {
        "what": what,
        **about.model_dump(mode="json"),
        f"{whose.lower()}_commit": commit_of(checkout) if (checkout / ".git").exists() else None,
        "script_sha256": sha256(checkout / script),
    }


def part_of(cases: list, part: str) -> list:
    """Those of part "2/4": the second of every four."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    first, every = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= every:
        raise typer.BadParameter(f"--part: wanted I/N with I from 1 to N, got {part}")
    return cases[first - 1 :: every]

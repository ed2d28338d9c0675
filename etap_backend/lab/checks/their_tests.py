"""What the runs of other projects' own tests on ETAP share: the head of results files, and parts of the cases.

    python -m etap_backend.lab.checks.their_tests PART.json... --output FILE

makes one results file of those that runs with `--part` wrote, in one or several types of elements. It refuses parts of
different runs: all have to have the same commit, library, script, versions and GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from etap_backend.lab.provenance import commit_of, provenance, sha256
from etap_backend.lab.results import must_be_writable, read_json, write

KEPT_FAILURES = 20
KEPT_TEXT = 600  # characters of what a wrong case printed
OF_PARTS = {"date", "command", "note", "dtype", "part", "cases", "calls", "complete", "failed", "failures"}
"""Fields in which the parts of a run differ; in all others they have to agree."""


def begin(
    program: str,
    what: str,
    checkout: Path,
    script: Path,
    output: Path,
    library: Path,
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
    about = provenance(program, packages=packages, library=library)
    return {
        "what": what,
        **about.model_dump(mode="json"),
        f"{whose.lower()}_commit": commit_of(checkout) if (checkout / ".git").exists() else None,
        "script_sha256": sha256(checkout / script),
    }


def part_of(cases: list, part: str) -> list:
    """Those of part "2/4": the second of every four."""
    first, every = _numbers(part)
    if not 1 <= first <= every:
        raise typer.BadParameter(f"--part: wanted I/N with I from 1 to N, got {part}")
    return cases[first - 1 :: every]


def _numbers(part: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def merged(documents: list[dict]) -> dict:
    """One document of those of parts.

    It is complete where no part is missing, all cases ran and none was wrong. Raises ValueError, naming the field,
    when the parts are not of one run, or one is there twice.
    """
    if any("part" not in one or "relative_rmse" in one for one in documents) or not documents:
        raise ValueError("parts: wanted results of runs with --part and without --beside")
    documents = sorted(documents, key=lambda one: (one.get("dtype", ""), _numbers(one["part"])))
    first = documents[0]
    for name in sorted({name for one in documents for name in one} - OF_PARTS):
        if others := [one.get(name) for one in documents if one.get(name) != first.get(name)]:
            raise ValueError(f"{name}: wanted the same in all parts, got {first.get(name)} and {others[0]}")
    by_dtype: dict[str, list[dict]] = {}
    for one in documents:
        by_dtype.setdefault(one.get("dtype", ""), []).append(one)
    whole = all(_is_whole([one["part"] for one in parts]) for parts in by_dtype.values())
    cases: dict[str, Counter] = {}
    for one in documents:
        for kind, counts in one["cases"].items():
            cases.setdefault(f"{one['dtype']}, {kind}" if "dtype" in one else kind, Counter()).update(counts)
    failures = [failure for one in documents for failure in one["failures"]]
    return {
        **{name: value for name, value in first.items() if name not in OF_PARTS},
        "date": min(one["date"] for one in documents),
        "commands": [one["command"] for one in documents],
        "parts": [" ".join(filter(None, (one.get("dtype"), one["part"]))) for one in documents],
        "cases": {kind: dict(counts) for kind, counts in cases.items()},
        "complete": whole and all(one["complete"] for one in documents),
        "failed": sum(one["failed"] for one in documents),
        "failures": failures[:KEPT_FAILURES],
    }


def _is_whole(parts: list[str]) -> bool:
    """Whether nothing is missing. Raises ValueError for a part that is there twice, and for parts of other numbers."""
    found, (_, every) = [_numbers(part) for part in parts], _numbers(parts[0])
    if len(set(found)) < len(found) or any(number != every for _, number in found):
        raise ValueError(f"part: wanted different parts of one number, got {', '.join(parts)}")
    return len(found) == every


def sentence(document: dict) -> str:
    """What a page says of a results file, of a run or of merged parts."""
    totals = Counter()
    for counts in document["cases"].values():
        totals.update(counts)
    parts = document.get("parts", [document.get("part", "1/1")])
    skipped = f", {totals['skipped']:,} skip themselves" if totals["skipped"] else ""
    wrong = f"{document['failed']} are wrong" if document["failed"] else "none is wrong"
    by_dtype: dict[str, list[str]] = {}
    for part in parts:
        *dtype, numbers = part.split()
        by_dtype.setdefault(" ".join(dtype) or document.get("dtype", ""), []).append(numbers)
    types = " and ".join(filter(None, by_dtype))
    missing = [
        f"{dtype} {_numbers(found[0])[1] - len(found)} of {_numbers(found[0])[1]}".strip()
        for dtype, found in by_dtype.items()
        if not _is_whole(found)
    ]
    said = f"{totals['passed']:,} of {totals['wanted']:,} cases{f' in {types}' if types else ''} pass{skipped}, {wrong}"
    not_run = f"; not run: {', '.join(missing)} parts" if missing else ""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{said}{not_run} ({document['gpu']}, driver {document['driver']}; {versions}; commit {document['commit']})."


def main(
    parts: Annotated[list[Path], typer.Argument(help="Results files of runs with --part.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
) -> None:
    """Make one results file of those of parts; exit with 1 unless all parts are there and no case is wrong."""
    try:
        must_be_writable(output)
        document = merged([read_json(path) for path in parts])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    write(document, output)
    typer.echo(sentence(document))
    raise typer.Exit(not document["complete"])


if __name__ == "__main__":
    typer.run(main)

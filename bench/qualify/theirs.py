"""What the runs of other projects' own tests on ETAP share; nothing of their repositories is copied.

    PYTHONPATH=tests python -m bench.qualify.theirs PART.json... --output FILE

makes one results file of those that runs with `--part` wrote, in one or several types of elements. It refuses parts of
different runs: all have to have the same commit, library, script, versions and GPU.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import torch
import typer

from bench.common.results import must_be_writable, read_json, write
from etap_backend.reference import relative_rmse

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KEPT_FAILURES = 20
KEPT_TEXT = 600  # characters of what a wrong case printed
ALLOWED_RATIO = 1.05
OF_PARTS = {
    "date", "command", "note", "dtype", "part", "cases", "complete", "outcome", "failed", "failures", "relative_rmse",
}  # fmt: skip
"""Fields in which the parts of a run differ; in all others they have to agree."""


class Case(NamedTuple):
    """One of their cases: the kind that it is counted as, and what runs it."""

    kind: str
    name: str
    run: Callable[[], None]


class Errors:
    """Relative RMSE of our call and of another one on the same tensors, by kind of call."""

    def __init__(self) -> None:
        self.squares: dict[str, list[tuple[float, float]]] = {}

    def add(self, kind: str, ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
        """The errors of one call; what is all zeros has none."""
        if truth.any():
            pair = tuple(float(relative_rmse(out, truth)) ** 2 for out in (ours, theirs))
            self.squares.setdefault(kind, []).append(pair)

    def summary(self) -> dict[str, dict]:
        """By kind the relative RMSE of both over all its calls."""
        found = {}
        for kind, squares in sorted(self.squares.items()):
            ours, theirs = (math.sqrt(sum(one) / len(squares)) for one in zip(*squares, strict=True))
            found[kind] = {"calls": len(squares), "ours": ours, "theirs": theirs, "ratio": ours / theirs}
        return found


@dataclass
class Suite:
    """A file of another project's repository whose tests run on ETAP."""

    whose: str
    script: Path
    what: str
    packages: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    errors: Errors = field(default_factory=Errors)

    def must_be_no_worse(self) -> None:
        """Fail where our relative RMSE is more than 1.05 times the other's, over all calls of a kind."""
        found = self.errors.summary()
        if not found:
            pytest.skip("without --beside nothing is compared")
        assert all(each["ratio"] <= ALLOWED_RATIO for each in found.values()), found


def run_script(checkout: Path, script: Path, stand_ins: dict[str, object]) -> None:
    """Let a script of theirs find these modules, and the files beside it."""
    sys.modules.update(stand_ins)
    sys.path.insert(0, str(checkout / script.parent))


def part_numbers(part: str) -> tuple[int, int]:
    """(2, 4) of "2/4": the second of every four cases; (0, 0) of anything else."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def is_whole(parts: list[str]) -> bool:
    """Whether nothing is missing. Raises ValueError for a part that is there twice, and for parts of other numbers."""
    found, (_, every) = [part_numbers(part) for part in parts], part_numbers(parts[0])
    if len(set(found)) < len(found) or any(number != every for _, number in found):
        raise ValueError(f"part: wanted different parts of one number, got {', '.join(parts)}")
    return len(found) == every


def sentence(document: dict) -> str:
    """What a results file says, of a run or of merged parts."""
    totals = Counter()
    for counts in document["cases"].values():
        totals.update(counts)
    skipped = f", {totals['skipped']:,} skip themselves" if totals["skipped"] else ""
    wrong = f"{document['failed']} are wrong" if document["failed"] else "none is wrong"
    by_dtype: dict[str, list[str]] = {}
    for part in document.get("parts", [document.get("part", "1/1")]):
        *dtype, numbers = part.split()
        by_dtype.setdefault(" ".join(dtype) or document.get("dtype", ""), []).append(numbers)
    types = " and ".join(filter(None, by_dtype))
    missing = [
        f"{dtype} {part_numbers(found[0])[1] - len(found)} of {part_numbers(found[0])[1]}".strip()
        for dtype, found in by_dtype.items()
        if not is_whole(found)
    ]
    said = f"{totals['passed']:,} of {totals['wanted']:,} cases{f' in {types}' if types else ''} pass{skipped}, {wrong}"
    not_run = f"; not run: {', '.join(missing)} parts" if missing else ""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{said}{not_run} ({document['gpu']}, driver {document['driver']}; {versions}; commit {document['commit']})."


def part_of(cases: list, part: str) -> list:
    """Those of part "2/4": the second of every four. Raises UsageError where it is no such part."""
    first, every = part_numbers(part)
    if not 1 <= first <= every:
        raise pytest.UsageError(f"--part: wanted I/N with I from 1 to N, got {part}")
    return cases[first - 1 :: every]


def told(document: dict) -> dict:
    """The document with its outcome, which a page shows beside where it was seen."""
    return document | {"outcome": sentence(document).partition(" (")[0]}


def merged(documents: list[dict]) -> dict:
    """One document of those of parts.

    It is complete where no part is missing, all cases ran and none was wrong. Raises ValueError, naming the field,
    when the parts are not of one run, or one is there twice.
    """
    if any("part" not in one for one in documents) or not documents:
        raise ValueError("parts: wanted results of runs with --part")
    documents = sorted(documents, key=lambda one: (one.get("dtype", ""), part_numbers(one["part"])))
    first = documents[0]
    for name in sorted({name for one in documents for name in one} - OF_PARTS):
        if others := [one.get(name) for one in documents if one.get(name) != first.get(name)]:
            raise ValueError(f"{name}: wanted the same in all parts, got {first.get(name)} and {others[0]}")
    by_dtype: dict[str, list[dict]] = {}
    for one in documents:
        by_dtype.setdefault(one.get("dtype", ""), []).append(one)
    whole = all(is_whole([one["part"] for one in parts]) for parts in by_dtype.values())
    cases: dict[str, Counter] = {}
    for one in documents:
        for kind, counts in one["cases"].items():
            cases.setdefault(f"{one['dtype']}, {kind}" if "dtype" in one else kind, Counter()).update(counts)
    made = {
        **{name: value for name, value in first.items() if name not in OF_PARTS},
        "date": min(one["date"] for one in documents),
        "commands": [one["command"] for one in documents],
        "parts": [" ".join(filter(None, (one.get("dtype"), one["part"]))) for one in documents],
        "cases": {kind: dict(counts) for kind, counts in cases.items()},
        "complete": whole and all(one["complete"] for one in documents),
        "failed": sum(one["failed"] for one in documents),
        "failures": [failure for one in documents for failure in one["failures"]][:KEPT_FAILURES],
    }
    if any("relative_rmse" in one for one in documents):
        made["relative_rmse"] = pooled([one.get("relative_rmse", {}) for one in documents])
    return told(made)


def pooled(summaries: list[dict]) -> dict[str, dict]:
    """What Errors.summary() had said of all calls at once."""
    found = {}
    for kind in sorted({kind for summary in summaries for kind in summary}):
        parts = [summary[kind] for summary in summaries if kind in summary]
        calls = sum(one["calls"] for one in parts)
        both = {
            whose: math.sqrt(sum(x["calls"] * x[whose] ** 2 for x in parts) / calls) for whose in ("ours", "theirs")
        }
        found[kind] = {"calls": calls, **both, "ratio": both["ours"] / both["theirs"]}
    return found


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

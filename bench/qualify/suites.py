"""Runs other projects' own test suites on ETAP, with their data, references and limits.

    python -m bench suites flashmla-dense --checkout FLASHMLA [--output FILE] [--part 1/4]
    python -m bench suites vllm --checkout VLLM
    python -m bench suites sglang-v4

All need a Hopper GPU. FlashMLA's also need triton; vLLM's and SGLang's need the engine with etap-backend installed
beside it, but no model and no network; vLLM's tests import tblib. Nothing of the other projects is copied into this
one. A run passes if no case fails, every passed case called ETAP, and each kind of case has one that passed; skipped
cases are counted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import typer

from bench.common.provenance import commit_of, provenance
from bench.common.results import check_output, write

MAX_FAILURES, MAX_TEXT = 20, 600  # kept in a results file; characters of each failure


class Suite(NamedTuple):
    """`run(options, report)` of a module in this folder; `script` is a file of the other project's repository."""

    what: str
    module: str
    run: str
    script: str | None = None


FLASHMLA = "tests/test_flash_mla_{}_decoding.py"
VLLM = "tests/v1/attention/test_{}mla_backends.py"
SUITES = {
    "flashmla-dense": Suite("FlashMLA's tests of dense decoding", "flashmla", "dense", FLASHMLA.format("dense")),
    "flashmla-sparse": Suite("FlashMLA's tests of V3.2's sparse cache", "flashmla", "v32", FLASHMLA.format("sparse")),
    "flashmla-v4": Suite("FlashMLA's tests of V4's sparse cache", "flashmla", "v4", FLASHMLA.format("sparse")),
    "vllm": Suite("vLLM's tests of MLA backends", "vllm_upstream", "dense", VLLM.format("")),
    "vllm-sparse": Suite("vLLM's tests of sparse MLA backends", "vllm_upstream", "sparse", VLLM.format("sparse_")),
    "sglang-sparse": Suite("SGLang's test kit of sparse attention", "sglang_kits", "sparse"),
    "sglang-layer": Suite("A layer of sparse attention on SGLang's pools against float64", "sglang_kits", "layer"),
    "sglang-v4": Suite("SGLang's test kit of DeepSeek-V4's attention", "sglang_kits", "v4"),
}


class Options(NamedTuple):
    """Which part of a suite runs, and where it is."""

    checkout: Path | None = None
    script: Path | None = None  # in the checkout
    part: tuple[int, int] = (1, 1)  # (2, 4): the second of every four cases

    def chosen(self, cases: Iterable) -> list:
        first, every = self.part
        return list(cases)[first - 1 :: every]


class Case(NamedTuple):
    """One test of another project: its kind in the results, its name, and the function that raises if it fails."""

    kind: str
    name: str
    run: Callable[[], object]


class Report:
    """Counts a suite's cases by kind, and its calls of ETAP; says why a run is no pass."""

    def __init__(self) -> None:
        self.kinds: dict[str, Counter] = {}
        self.failures: list[dict[str, str]] = []
        self.faults: list[str] = []  # of the run as a whole
        self.calls = 0  # of ETAP since the current case began

    def expect(self, kind: str) -> None:
        self.kinds.setdefault(kind, Counter(cases=0, passed=0, skipped=0, failed=0))["cases"] += 1

    def add(self, kind: str, name: str, outcome: str, text: str = "") -> None:
        """Record a case's outcome ("passed", "skipped" or "failed"); it fails where it passed without ETAP."""
        if outcome == "passed" and not self.calls:
            outcome, text = "failed", "it passed without a call of ETAP"
        self.kinds[kind][outcome] += 1
        if outcome == "failed":
            self.failures.append({"case": name, "error": text[-MAX_TEXT:]})

    def counted(self, function: Callable) -> Callable:
        """The function, its calls counted as calls of ETAP."""

        def call(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return call

    def counting(self, owner: Any, name: str) -> contextlib.AbstractContextManager:
        """Count the calls of owner.name while it is open."""
        return mock.patch.object(owner, name, self.counted(getattr(owner, name)))

    def run(self, cases: Iterable[Case], options: Options) -> None:
        """Run the chosen cases; what they print is kept for those that fail."""
        cases = options.chosen(cases)
        for case in cases:
            self.expect(case.kind)
        for index, case in enumerate(cases):
            self.calls, printed = 0, io.StringIO()
            outcome, text = "passed", ""
            try:
                with contextlib.redirect_stdout(printed):
                    case.run()
            except unittest.SkipTest as reason:
                outcome, text = "skipped", str(reason)
            except Exception:
                outcome, text = "failed", printed.getvalue()[-MAX_TEXT // 2 :] + traceback.format_exc(limit=-2)
            self.add(case.kind, case.name, outcome, text)
            if index % 100 == 0 or outcome == "failed":
                typer.echo(f"{index + 1} of {len(cases)}: {case.name}: {outcome} {text}".rstrip())

    def total(self, outcome: str) -> int:
        return sum(counts[outcome] for counts in self.kinds.values())

    def problems(self) -> list[str]:
        """Why the run is no pass; empty if it is one."""
        found = [*self.faults]
        if not self.total("passed"):
            found.append("no case passed")
        if failed := self.total("failed"):
            found.append(f"{failed} cases failed, {self.failures[0]['case']} first")
        if lost := self.total("cases") - sum(map(self.total, ("passed", "skipped", "failed"))):
            found.append(f"{lost} cases did not run")
        without = [kind for kind, counts in self.kinds.items() if not counts["passed"]]
        return found + [f"no case of this kind passed: {kind}" for kind in without]

    def document(self) -> dict:
        passed, cases, problems = self.total("passed"), self.total("cases"), self.problems()
        outcome = f"{passed:,} of {cases:,} cases pass" + (f"; {'; '.join(problems)}" if problems else "")
        kinds = {kind: dict(counts) for kind, counts in self.kinds.items()}
        return {"outcome": outcome, "complete": not problems, "cases": kinds, "failures": self.failures[:MAX_FAILURES]}


def load_script(options: Options, stand_ins: dict[str, types.ModuleType]) -> types.ModuleType:
    """Import the checkout's script, with these modules in place of those that it imports."""
    assert options.checkout and options.script
    sys.modules.update(stand_ins)
    sys.path.insert(0, str((options.checkout / options.script).parent))
    return importlib.import_module(options.script.stem)


def main(
    suite: Annotated[str, typer.Argument(help=f"One of {', '.join(SUITES)}.")],
    checkout: Annotated[Path | None, typer.Option(help="The other project's repository.")] = None,
    part: Annotated[str, typer.Option(help="Such as 2/4: the second of every four cases.")] = "1/1",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Run another project's test suite on ETAP; exit with 1 unless it passes."""
    if suite not in SUITES:
        raise typer.BadParameter(f"suite: wanted one of {', '.join(SUITES)}, got {suite}")
    wanted, checkout, output = SUITES[suite], checkout and checkout.absolute(), output and output.absolute()
    if wanted.script and not (checkout and (checkout / wanted.script).is_file()):
        raise typer.BadParameter(f"--checkout: wanted a repository with {wanted.script}, got {checkout}")
    numbers = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not numbers or int(numbers[1]) > int(numbers[2]):
        raise typer.BadParameter(f"--part: wanted I/N with I from 1 to N, got {part}")
    check_output(output)
    script = Path(wanted.script) if wanted.script else None
    options, report = Options(checkout, script, (int(numbers[1]), int(numbers[2]))), Report()
    about = provenance("python -m bench suites")
    commit = commit_of(checkout) if checkout and (checkout / ".git").exists() else None
    getattr(importlib.import_module(f"bench.qualify.{wanted.module}"), wanted.run)(options, report)
    document = {"what": f"{wanted.what} on ETAP", **about, "suite_commit": commit, "part": part, **report.document()}
    if output:
        write(document, output)
    typer.echo(f"{document['what']}: {document['outcome']}")
    raise typer.Exit(not document["complete"])

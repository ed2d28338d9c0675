"""Runs FlashInfer's own tests of its paged MLA wrapper on ETAP, in the place of its backend fa3.

    python -m etap_backend.lab.checks.flashinfer_mla CHECKOUT [--output FILE] [--part 1/4]

CHECKOUT is FlashInfer's repository. Run are the cases for fa3, and those that name no backend, of the tests of batches
and of FP8 caches, with their data, references and limits; what is left out, and why, is in the results. A wrong case
does not end the run.

The exit status is 0 when all cases ran or skipped themselves and none was wrong. The tests need pytest, FlashInfer
0.6 or 0.7, whose kernels are not called, and a Hopper GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import typer
from rich.console import Console

from etap_backend._library import library_path
from etap_backend.compat import flashinfer
from etap_backend.lab.checks.their_tests import KEPT_FAILURES, KEPT_TEXT, begin, part_of
from etap_backend.lab.results import write

PROGRAM = "python -m etap_backend.lab.checks.flashinfer_mla"
PACKAGES = ("flashinfer-python",)
SCRIPT = Path("tests/attention/test_deepseek_mla.py")
BACKEND = "fa3"
PREFIXES = ("test_batch_mla_", "test_fp8_kv_")
LEFT_OUT = {
    "test_batch_mla_without_kpe": "models without rope are refused",
    "test_batch_mla_fp8_nope_group_scales_matches_bf16_reference": "scales of groups are refused",
    "test_fp8_kv_plan_rejects_fp16_q": "float16 queries with an FP8 cache are served",
    "test_fp8_kv_requires_scales": "it is about the words of a refusal",
    "test_fp8_kv_scales_are_keyword_only": "it is about the signature of FlashInfer's class",
}
WANTED = (
    "test_batch_mla_page_attention",
    "test_batch_mla_varlen_page_attention",
    "test_batch_mla_oob_kv_nan",
    "test_batch_mla_fp8_kv_matches_bf16_reference",
)
"""Without these the file is another one."""

console = Console(width=160)


class Case(NamedTuple):
    """A test with arguments."""

    test: Callable
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.test.__name__

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.arguments.items())})"


def load(checkout: Path) -> types.ModuleType:
    """Their tests as a module, with ETAP as FlashInfer's fa3."""
    flashinfer.install(backends=(BACKEND,))
    # The file imports helpers from `tests`; the repository itself must not come onto the path, before the installation.
    package = types.ModuleType("tests")
    package.__path__ = [str(checkout / "tests")]
    sys.modules["tests"] = package
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, checkout / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases_of(tests: types.ModuleType) -> list[Case]:
    """What pytest would run of these tests, for one backend."""
    named = {name: one for name, one in vars(tests).items() if name.startswith(PREFIXES) and name not in LEFT_OUT}
    if missing := [name for name in WANTED if name not in named]:
        raise typer.BadParameter(f"checkout: wanted {SCRIPT} with {', '.join(WANTED)}, got one without {missing[0]}")
    cases = [Case(test, arguments) for test in named.values() for arguments in _arguments(test)]
    return [case for case in cases if case.arguments.get("backend", BACKEND) == BACKEND]


def _arguments(test: Callable) -> list[dict[str, Any]]:
    """All combinations of a test's parameters."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            axes.append([dict(zip(names, one if len(names) > 1 else [one], strict=True)) for one in values])
    return [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*axes)]


def run(cases: list[Case]) -> dict:
    """What came of the cases: of each test how many are right or skipped themselves, and the first failures."""
    counts: dict[str, dict[str, int]] = {}
    failures: list[dict[str, str]] = []
    for case in cases:
        count = counts.setdefault(case.name, {"wanted": 0, "passed": 0, "skipped": 0})
        count["wanted"] += 1
        try:
            case.test(**case.arguments)
        except pytest.skip.Exception:
            count["skipped"] += 1
        except Exception as error:
            failures.append({"case": str(case), "error": f"{type(error).__name__}: {error}"[:KEPT_TEXT]})
        else:
            count["passed"] += 1
    complete = any(count["passed"] for count in counts.values()) and not failures
    return {"cases": counts, "complete": complete, "failed": len(failures), "failures": failures[:KEPT_FAILURES]}


def main(
    checkout: Annotated[Path, typer.Argument(help="FlashInfer's repository.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("flashinfer-mla.json"),
    part: Annotated[str, typer.Option(help="Such as 2/4: the second of every four cases.")] = "1/1",
) -> None:
    """Run FlashInfer's own tests of paged MLA attention on ETAP; exit with 1 unless all ran and none is wrong."""
    part_of([], part)
    what = "FlashInfer's tests of paged MLA attention on ETAP"
    document = begin(PROGRAM, what, checkout, SCRIPT, output, library_path(), whose="FlashInfer", packages=PACKAGES)
    document |= {"left_out": LEFT_OUT, "part": part}
    document |= run(part_of(cases_of(load(checkout)), part))
    write(document, output)
    console.print(document["cases"], *document["failures"][:3])
    raise typer.Exit(not document["complete"])


if __name__ == "__main__":
    typer.run(main)

"""Runs FlashMLA's own tests of its dense decode kernel on ETAP.

    python -m etap_backend.lab.checks.flashmla_dense CHECKOUT [--output FILE] [--dtype fp16] [--part 1/4]

CHECKOUT is FlashMLA's repository. All cases of its script run, with its data, reference and limits; those that time a
kernel are checked like the others, and not timed. A wrong case does not end the run.

The exit status is 0 when all cases ran and none was wrong. The tests need triton, which they import, and a Hopper GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from etap_backend._library import library_path
from etap_backend.compat import flash_mla
from etap_backend.lab.checks import flashmla
from etap_backend.lab.checks.their_tests import KEPT_FAILURES, KEPT_TEXT, begin, part_of
from etap_backend.lab.results import write

PROGRAM = "python -m etap_backend.lab.checks.flashmla_dense"
SCRIPT = Path("tests/test_flash_mla_dense_decoding.py")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

console = Console(width=160)


def cases_of(tests: Any, dtype: torch.dtype) -> list:
    """The cases that their script would run, none of them timed; torch's default type and device become theirs."""
    cases: list = []
    judge, tests.test_flash_mla = tests.test_flash_mla, cases.append
    try:
        tests.main(dtype)
    finally:
        tests.test_flash_mla = judge
    return [dataclasses.replace(case, test_performance=False) for case in cases]


def run(judge: Callable, cases: list) -> dict:
    """What came of the cases: by number of KV heads and mask how many are right, and the first failures."""
    counts: dict[str, dict[str, int]] = {}
    failures: list[dict[str, str]] = []
    for case in cases:
        mask = "causal" if case.is_causal else "not causal"
        count = counts.setdefault(f"h_kv {case.h_kv}, {mask}", {"wanted": 0, "passed": 0})
        count["wanted"] += 1
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                judge(case)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}", "printed": printed.getvalue()[-KEPT_TEXT:]}
            failures.append({"case": repr(case), **said})
        else:
            count["passed"] += 1
    complete = bool(cases) and not failures
    return {"cases": counts, "complete": complete, "failed": len(failures), "failures": failures[:KEPT_FAILURES]}


def main(
    checkout: Annotated[Path, typer.Argument(help="FlashMLA's repository.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("flashmla-dense.json"),
    dtype: Annotated[Literal["bf16", "fp16"], typer.Option(help="Type of queries and cache.")] = "bf16",
    part: Annotated[str, typer.Option(help="Such as 2/4: the second of every four cases.")] = "1/1",
) -> None:
    """Run FlashMLA's own tests of dense decoding on ETAP; exit with 1 unless all ran and none is wrong."""
    part_of([], part)
    what = "FlashMLA's tests of dense decoding on ETAP"
    document = begin(PROGRAM, what, checkout, SCRIPT, output, library_path()) | {"dtype": dtype, "part": part}
    tests = flashmla.load(checkout, SCRIPT, flash_mla.flash_mla_with_kvcache)
    document |= run(tests.test_flash_mla, part_of(cases_of(tests, DTYPES[dtype]), part))
    write(document, output)
    console.print(document["cases"], *document["failures"][:3])
    raise typer.Exit(not document["complete"])


if __name__ == "__main__":
    typer.run(main)

"""Runs FlashMLA's own tests of its sparse decode kernel on the sparse call.

    python -m etap_backend.lab.checks.flashmla_sparse CHECKOUT [--output FILE] [--heads 16 ...] [--beside MODULE]

CHECKOUT is FlashMLA's repository. Run are the cases of the format with rows of 656 bytes (576 columns): those with 64
and 128 heads as they are, and those of 64 once more with each further number of heads. Cases that time a kernel are
checked like the others, and not timed. As in FlashMLA's script, the first wrong case ends the run.

With `--beside flash_mla.flash_mla_interface` (or `vllm.third_party.flashmla.flash_mla_interface`), FlashMLA's own
kernel runs on the same tensors where it takes them, and both are held against float64: the relative RMSE of ours may be
1.05 times as large, over all cases of a number of heads.

The exit status is 0 when all cases ran and none was wrong. The tests need triton, which they import, and a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from etap_backend._library import library_path
from etap_backend.compat import flash_mla
from etap_backend.lab.checks import flashmla
from etap_backend.lab.checks.their_tests import begin
from etap_backend.lab.results import write
from etap_backend.reference import relative_rmse, sparse_mla_decode_reference

PROGRAM = "python -m etap_backend.lab.checks.flashmla_sparse"
SCRIPT = Path("tests/test_flash_mla_sparse_decoding.py")
COLUMNS = 576  # of a query in the format that the sparse call has
THEIR_HEADS = (64, 128)
ALL_HEADS = (8, 16, 32, *THEIR_HEADS)
MOST_BESIDE_TOKENS = 300  # of a call that is held against float64
ALLOWED_RATIO = 1.05

console = Console(width=160)


@dataclasses.dataclass
class Beside:
    """Another `flash_mla_with_kvcache` on the same tensors; of both the squares of errors, by number of heads."""

    module: types.ModuleType
    squares: dict[int, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    def __call__(self, q, k_cache, block_table, seq_lens, width, metadata, splits, softmax_scale, *rest, **named):
        call = (q, k_cache, None, None, width, metadata, None, softmax_scale)
        ours = flash_mla.flash_mla_with_kvcache(*call, *rest, **named)
        if q.shape[2] not in THEIR_HEADS or q.shape[0] * q.shape[1] > MOST_BESIDE_TOKENS:
            return ours
        call = (q, k_cache, None, None, width, self.module.get_mla_metadata()[0], None, softmax_scale)
        theirs = self.module.flash_mla_with_kvcache(*call, *rest, **named)
        _, _, indices, sinks, *_ = rest
        truth, _ = sparse_mla_decode_reference(
            q.flatten(0, 1), k_cache, indices.flatten(0, 1), softmax_scale, sinks=sinks
        )
        if truth.any():
            errors = (relative_rmse(out[0].flatten(0, 1), truth) ** 2 for out in (ours, theirs))
            self.squares.setdefault(q.shape[2], []).append(tuple(errors))
        return ours

    def summary(self) -> dict[str, dict]:
        """By number of heads the relative RMSE of both over all cases."""
        found = {}
        for heads, squares in sorted(self.squares.items()):
            ours, theirs = (math.sqrt(sum(one) / len(squares)) for one in zip(*squares, strict=True))
            found[str(heads)] = {"calls": len(squares), "ours": ours, "theirs": theirs, "ratio": ours / theirs}
        return found


def cases_of(their_cases: list, heads: tuple[int, ...]) -> list:
    """Their cases of our format, none of them timed, with these numbers of heads."""
    ours = [
        dataclasses.replace(case, num_runs=0, check_correctness=True) for case in their_cases if case.d_qk == COLUMNS
    ]
    more = [n for n in heads if n not in THEIR_HEADS]
    copies = [dataclasses.replace(case, h_q=n) for n in more for case in ours if case.h_q == min(THEIR_HEADS)]
    return [case for case in ours if case.h_q in heads] + copies


def run(tests: Any, heads: tuple[int, ...]) -> dict:
    """Run their script's `main` on our cases; what came of them."""
    cases = cases_of(tests.gen_testcase(), heads)
    found: dict[str, Any] = {"cases": {str(n): {"wanted": 0, "passed": 0} for n in heads}, "failure": None}
    for case in cases:
        found["cases"][str(case.h_q)]["wanted"] += 1
    judge = tests.test_flash_mla

    def counted(case):
        result = judge(case)
        if result.is_correct:
            found["cases"][str(case.h_q)]["passed"] += 1
        else:
            found["failure"] = repr(case)
        return result

    tests.gen_testcase, tests.test_flash_mla = lambda: cases, counted
    try:
        tests.main()
    except SystemExit:
        found["failure"] = found["failure"] or "the script ended itself"
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    found["complete"] = all(about["wanted"] == about["passed"] > 0 for about in found["cases"].values())
    return found


def main(
    checkout: Annotated[Path, typer.Argument(help="FlashMLA's repository.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("flashmla-sparse.json"),
    heads: Annotated[list[int] | None, typer.Option(help="Numbers of heads; all when none is given.")] = None,
    beside: Annotated[str | None, typer.Option(help="Module with FlashMLA's own call, to compare errors with.")] = None,
) -> None:
    """Run FlashMLA's own tests of sparse decoding on our call; exit with 1 unless all ran and none is wrong."""
    what = "FlashMLA's tests of sparse decoding, rows of 656 bytes, on the sparse call"
    document = begin(PROGRAM, what, checkout, SCRIPT, output, library_path())
    other = Beside(importlib.import_module(beside)) if beside else None
    tests = flashmla.load(checkout, SCRIPT, other or flash_mla.flash_mla_with_kvcache)
    document |= run(tests, tuple(heads or ALL_HEADS))
    passed = document["complete"]
    if other:
        document |= {"beside": beside, "relative_rmse": other.summary()}
        passed = passed and all(each["ratio"] <= ALLOWED_RATIO for each in document["relative_rmse"].values())
    write(document, output)
    console.print(document["cases"], document.get("relative_rmse", ""), document["failure"] or "")
    raise typer.Exit(not passed)


if __name__ == "__main__":
    typer.run(main)

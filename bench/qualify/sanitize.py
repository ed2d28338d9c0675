"""Runs small decode problems under compute-sanitizer; only ETAP's kernels are instrumented.

    python -m bench sanitize [memcheck racecheck synccheck initcheck ...]    # default: memcheck racecheck

The grids are small, so that each tool ends within about a minute. Together the cases take every row tile, both types,
split and whole requests, partial tiles, several splits on one CTA and shared prefixes, in dense and sparse calls. Run
memcheck with the release build and with a debug build, whose barriers give up: CMake's -DETAP_SPIN_LIMIT=2000000.
racecheck needs the debug build: in a release build one lane arrives at a barrier for its warp, which racecheck takes
for a race.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from bench.common.provenance import provenance
from bench.common.results import check_output, write
from support import cases, compare, sparse_cases, sparse_compare
from support.cases import Case, Problem, Runner
from support.sparse_cases import SparseCase, SparseProblem, SparseRunner

CASES = (
    Case((0, 1, 65, 200, 500), heads=16, num_sms=5),
    Case((130, 700), heads=8, s_q=1, num_sms=3, seed=1),
    Case((3, 260), heads=32, dtype="float16", num_sms=3, q_layout="split", seed=2),
    Case((64, 190), heads=16, s_q=3, num_sms=3, cache_layout="gapped", seed=3),
    Case((129, 320), heads=64, num_sms=3, page_size=128, seed=4),
    Case((70, 256), heads=64, s_q=2, num_sms=6, q_layout="strided", seed=5),
    Case((129, 450), heads=64, law="rising", num_sms=2, seed=10),
    Case((0, 1, 65, 200, 500), heads=16, num_sms=5, kv_dtype="fp8", kv_scale=0.0137, seed=6),
    Case((130, 700), heads=8, num_sms=3, dtype="float16", q_layout="split", kv_dtype="fp8", seed=7),
    Case((3, 260), heads=32, dtype="float8_e4m3fn", num_sms=3, kv_dtype="fp8", fp8_math=True, seed=8),
    Case((129, 1300), heads=64, s_q=2, num_sms=4, cache_layout="gapped", kv_dtype="fp8", fp8_math=True, seed=9),
    Case((0, 1, 65, 200, 500), heads=16, num_sms=5, page_size=1, seed=11),
    Case((129, 320), heads=64, num_sms=3, page_size=1, cache_layout="apart", seed=12),
    Case((130, 500), heads=24, num_sms=3, page_size=16, q_layout="strided", seed=13),
    Case((130, 500), heads=24, num_sms=3, page_size=5, q_layout="strided", seed=14),
    Case((129, 450), heads=64, num_sms=2, page_size=32, seed=15),
    Case((0, 1, 65, 200, 500), heads=16, num_sms=5, page_size=1, kv_dtype="fp8", seed=16),
    Case((129, 320), heads=64, num_sms=3, page_size=16, cache_layout="apart", kv_dtype="fp8", fp8_math=True, seed=17),
    Case((600, 640, 700, 900, 70), heads=16, num_sms=100, prefixes=((4, 576),), seed=18),
    Case((600, 640, 700, 900, 70), heads=16, num_sms=100, kv_dtype="fp8", fp8_math=True, prefixes=((4, 576),), seed=19),
    Case((600, 700, 70), heads=8, num_sms=5, kv_dtype="fp8", page_size=16, prefixes=((2, 576),), seed=20),
    Case((600, 700, 70), heads=32, num_sms=100, prefixes=((1, 0),), seed=21),
)
SPARSE_CASES = (
    SparseCase(3, 16, 200, holes="anywhere", num_sms=5, seed=20),
    SparseCase(2, 8, 130, counts="drawn", sinks="infinite", num_sms=1, q_layout="split", seed=21),
    SparseCase(3, 32, 300, requests=2, holes="wild", num_sms=4, page_size=16, seed=22),
    SparseCase(2, 100, 130, holes="all", num_sms=6, cache_layout="gapped", seed=23),
    SparseCase(3, 16, 200, "fp8", holes="anywhere", num_sms=5, seed=24),
    SparseCase(2, 8, 130, "fp8", counts="drawn", sinks="infinite", num_sms=1, q_layout="split", seed=25),
    SparseCase(3, 32, 300, "fp8", requests=2, holes="wild", num_sms=4, page_size=16, scales="mixed", seed=26),
    SparseCase(2, 64, 130, "fp8", holes="all", num_sms=6, cache_layout="rows apart", law="rising", seed=27),
    SparseCase(2, 16, 250, holes="anywhere", sinks="infinite", num_sms=8, seed=28),  # clusters of 4 ...
    SparseCase(2, 32, 250, "fp8", counts="drawn", holes="anywhere", num_sms=4, scales="mixed", seed=29),  # ... and of 2
    SparseCase(3, 100, 200, "fp8", counts="drawn", num_sms=4, scales="mixed", sinks="infinite", seed=30),
    # V4's pages and two lists: combined splits, whole lists, clusters of 2, 64 rows.
    SparseCase(3, 16, 100, "v4", holes="wild", counts="drawn", extra=130, extra_page_size=2, num_sms=5, seed=31),
    SparseCase(2, 8, 64, "v4", page_size=256, extra=70, extra_requests=2, num_sms=1, out_layout="sliced", seed=32),
    SparseCase(
        2, 32, 128, "v4", scales="mixed", sinks="infinite", extra=128, num_sms=4, cache_layout="gapped", seed=33
    ),
    SparseCase(3, 64, 128, "v4", holes="all", extra=100, extra_page_size=61, num_sms=4, out_layout="sliced", seed=34),
    SparseCase(3, 16, 100, "bf16", counts="drawn", extra=100, num_sms=2, requests=2, rope=False, seed=35),
)


def on_host(problem: Problem | SparseProblem) -> Problem | SparseProblem:
    tensors = {f.name: getattr(problem, f.name) for f in fields(problem) if f.name != "case"}
    return type(problem)(problem.case, **{name: x if x is None else x.cpu() for name, x in tensors.items()})


def run_case(case: Case | SparseCase) -> None:
    """Run the case once on the GPU and check it against float64 and for writes beside its buffers."""
    sparse = isinstance(case, SparseCase)
    problem = (sparse_cases if sparse else cases).build(case, "cuda")
    runner = (SparseRunner if sparse else Runner)(problem)
    out, lse = runner.run()
    # On the CPU: racecheck ends cuBLAS's kernels with an illegal access, even where it instruments nothing.
    problem, compared = on_host(problem), sparse_compare if sparse else compare
    compared.check(out.cpu(), lse.cpu(), problem, compared.truth(problem))
    runner.check_guards()


def sanitize(tool: str) -> int:
    """Run all cases under a tool; its exit code, 9 where it found a fault."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=etap", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "bench", "sanitize", "--run-cases"]
    # Without torch's pool every tensor is an allocation of its own, and memcheck sees where each one ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = subprocess.run(command, env=environment).returncode
    print(f"{tool}: {'clean' if code == 0 else f'exit code {code}'}", flush=True)
    return code


def main(
    tools: Annotated[list[str] | None, typer.Argument(help="memcheck, racecheck, synccheck or initcheck.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    run_cases_only: Annotated[bool, typer.Option("--run-cases", help="Run the cases here, without a tool.")] = False,
) -> None:
    """Run the cases under each tool, memcheck and racecheck by default; exit with 1 unless all are clean."""
    if run_cases_only:
        for case in (*CASES, *SPARSE_CASES):
            run_case(case)
            print(f"right: {case!r}", flush=True)
        return
    if not shutil.which("compute-sanitizer"):
        raise typer.BadParameter("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    check_output(output)
    about = provenance("python -m bench sanitize")
    found = {tool: sanitize(tool) for tool in tools or ("memcheck", "racecheck")}
    if output:
        texts = [f"{tool}: {'clean' if code == 0 else f'exit code {code}'}" for tool, code in found.items()]
        failures = [text for text in texts if not text.endswith("clean")]
        about |= {"what": "compute-sanitizer", "cases": len(CASES) + len(SPARSE_CASES), "outcome": ", ".join(texts)}
        write(about | {"failures": failures}, output)
    raise typer.Exit(any(found.values()))

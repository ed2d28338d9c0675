"""A few decode problems under compute-sanitizer.

    python -m etap_backend.lab.checks.sanitize [memcheck racecheck synccheck ...]

Small grids, so that each tool ends within about a minute; together they take every row tile, both types, split and
whole requests, partial tiles and several pieces on one CTA. Only our kernels are instrumented.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from typing import Annotated

import typer

from etap_backend.lab.checks.cases import Case, Problem, Runner, build
from etap_backend.lab.checks.compare import check, truth

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
    Case((129, 320), heads=64, s_q=2, num_sms=3, cache_layout="gapped", kv_dtype="fp8", fp8_math=True, seed=9),
)


def on_host(problem: Problem) -> Problem:
    tensors = {f.name: getattr(problem, f.name) for f in fields(problem) if f.name != "case"}
    return Problem(problem.case, **{name: x if x is None else x.cpu() for name, x in tensors.items()})


def run_cases() -> None:
    for case in CASES:
        begin = time.monotonic()
        problem = build(case, "cuda")
        runner = Runner(problem)
        out, lse = runner.run()
        # On the CPU: racecheck ends cuBLAS's kernels with an illegal access, also where it instruments nothing.
        problem = on_host(problem)
        check(out.cpu(), lse.cpu(), problem, truth(problem))
        runner.check_guards()
        print(f"right after {time.monotonic() - begin:.1f} s: {case!r}", flush=True)


def sanitize(tool: str) -> int:
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=etap", "--error-exitcode", "9"]
    command += [sys.executable, "-m", __spec__.name, "--run-cases"]
    # Without torch's pool every tensor is an allocation of its own, and memcheck sees where each one ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    code = subprocess.run(command, env=environment).returncode
    print(f"{tool}: {'clean' if code == 0 else f'exit code {code}'} after {time.monotonic() - begin:.0f} s", flush=True)
    return code


def main(
    tools: Annotated[list[str] | None, typer.Argument(help="memcheck, racecheck, synccheck or initcheck.")] = None,
    run_cases_only: Annotated[
        bool, typer.Option("--run-cases", help="Run the cases in this process, without a sanitizer.")
    ] = False,
) -> None:
    """Run the cases under each tool, memcheck and racecheck when none is named; exit with the largest exit code."""
    if run_cases_only:
        run_cases()
        return
    if not shutil.which("compute-sanitizer"):
        raise typer.BadParameter("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    raise typer.Exit(max(sanitize(tool) for tool in tools or ("memcheck", "racecheck")))


if __name__ == "__main__":
    typer.run(main)

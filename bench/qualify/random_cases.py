"""Runs random cases of the public calls against float64, each at least twice with equal bits; no case may be wrong.

    python -m bench.qualify.random_cases --count 3000 --seed 1 [--output random.json] [--sparse]

Dense cases have lengths from 0 to 70,000 tokens, 1 to 128 heads, 1 to 4 query tokens, caches in bfloat16, float16 and
FP8, FP8 math, separate and aliased pages, separate q_rope and any number of CTAs; `random_sparse_cases` lists the
sparse ones. Everything that a call must not read is NaN, infinite or a wild page id. Outputs and workspace lie between
guards; they hold NaN before the first run and infinities before the second. `support.compare` judges the errors. FP8
math rounds wider queries: a result that is too far from float64 must be close to float64 of the rounded queries.

A case follows from seed and index alone and is printed as a constructor when it is wrong. Without a GPU the CPU
executor runs small cases. The exit status is 0 if all `count` cases ran and none was wrong.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from bench.common.provenance import provenance
from bench.common.results import must_be_writable, write
from bench.qualify import random_sparse_cases
from etap_backend import _library
from support.cases import LAWS, Case, Runner, build
from support.compare import Measure, measures, problems_with, rounds_queries, truth

PROGRAM = "python -m bench.qualify.random_cases"
DEVICES = {"cuda": "the compiled kernels", "cpu": "the CPU executor, small cases"}
LONGEST = {"cuda": 70_000, "cpu": 300}
EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129)
MAX_HEADS, MAX_QUERY_TOKENS = 128, 4
MAX_FAILURES = 20  # that a results file holds: a broken kernel fails everywhere
PROGRESS_SECONDS = 20


def random_lengths(draw: random.Random, device: str) -> tuple[int, ...]:
    """Mostly few and short requests; sometimes many ragged ones, or one up to the longest."""
    longest = LONGEST[device]
    if device == "cpu":
        return _lengths(draw, draw.randint(1, 4), longest)
    shape = draw.random()
    if shape < 0.1:
        last = draw.choice([longest, round(longest ** draw.uniform(0.7, 1.0))])
        return (*_lengths(draw, draw.randint(0, 2), 4096), last)
    if shape < 0.15:
        return _lengths(draw, draw.randint(65, 200), 200)
    return _lengths(draw, draw.randint(1, 24), 4096 if shape < 0.45 else 600)


def _lengths(draw: random.Random, count: int, most: int) -> tuple[int, ...]:
    return tuple(
        draw.choice(EDGES) if draw.random() < 0.2 else round((most + 1) ** draw.random()) - 1 for _ in range(count)
    )


def random_types(draw: random.Random) -> dict:
    """Dtypes, scales and FP8 math."""
    if draw.random() < 0.5:
        return {"dtype": draw.choice(["bfloat16", "float16"])}
    types = {"kv_dtype": "fp8", "dtype": draw.choice(["bfloat16", "float16", "float8_e4m3fn"])}
    types["fp8_math"] = draw.random() < 0.4
    types["kv_scale"] = draw.choice([None, 0.0137, round(10 ** draw.uniform(-2.5, 0.5), 5)])
    if types["dtype"] == "float8_e4m3fn":
        types["q_scale"] = draw.choice([None, 0.021, round(10 ** draw.uniform(-2.5, 0.5), 5)])
        types["output"] = draw.choice(["bfloat16", "float16"])
    elif types["dtype"] == "bfloat16" and draw.random() < 0.1:
        types["q_power"] = draw.randint(-30, 30)
        types["kv_scale"] = 0.0137 * 2.0 ** -types["q_power"]
    return types


def random_case(seed: int, index: int, device: str) -> Case:
    draw = random.Random(f"{seed} {index}")
    return Case(
        lengths=random_lengths(draw, device),
        heads=draw.choice([8, 16, 32, 64, 128, *[draw.randint(1, MAX_HEADS)] * 5]),
        s_q=draw.choice([1, 1, 1, *range(1, MAX_QUERY_TOKENS + 1)]),
        page_size=draw.choice([64, 64, 128, 256, 1, 5, 16, 32, 80]),
        law=draw.choice(["normal", *LAWS]),
        q_layout=draw.choice(["packed", "strided", "split"]),
        cache_layout=draw.choice(["dense", "gapped", "rows apart", "headed", "apart"]),
        pool_pages=draw.choice([0, 0, draw.randint(1, 1000 if device == "cuda" else 20)]),
        aliased=draw.random() < 0.25,
        num_sms=draw.choice([None, None, None, 132, 78, draw.randint(1, 132)]),
        seed=1_000_000 * seed + index,
        **random_types(draw),
        groups=draw.random() < 0.5,
    )


def kind_of(case: Case) -> str:
    cache = "fp8" if case.kv_dtype == "fp8" else case.dtype
    return f"{case.dtype} q, {cache} cache" + (", fp8 math" if case.fp8_math else "")


def run_case(case: Case, device: str) -> tuple[list[str], list[Measure]]:
    """The call's faults on this case, and its errors."""
    problem = build(case, device)
    wanted = truth(problem)
    runner = Runner(problem)
    first = [result.clone() for result in runner.run()]
    found = problems_with(*first, problem, wanted)
    if found and rounds_queries(problem):
        wanted = truth(problem, of_rounded_queries=True)
        found = problems_with(*first, problem, wanted)
    return found + runner.differences(first, (torch.inf,)), measures(*first, problem, wanted)


class Subject(NamedTuple):
    """A call: how its cases are drawn, run and named."""

    what: str
    random_case: Callable[[int, int, str], Any]
    run_case: Callable[[Any, str], tuple[list[str], list[Measure]]]
    kind_of: Callable[[Any], str]


DENSE = Subject("random cases of mla_decode against float64, each twice", random_case, run_case, kind_of)
SPARSE = Subject(
    "random cases of sparse_mla_decode against float64, each three times, and in replayed CUDA graphs",
    random_sparse_cases.random_case,
    random_sparse_cases.run_case,
    random_sparse_cases.kind_of,
)


def add_kind(kinds: dict[str, dict], kind: str, found: list[Measure]) -> None:
    """Count a case of this kind and keep, by measure, the error that is closest to its limit."""
    entry = kinds.setdefault(kind, {"cases": 0, "worst": {}})
    entry["cases"] += 1
    for measure in found:
        share, value = measure.worst()
        if share >= entry["worst"].get(measure.name, {"of_limit": 0})["of_limit"]:
            entry["worst"][measure.name] = {"of_limit": share, "value": value}


def run(subject: Subject, count: int, seed: int, device: str) -> dict:
    """Run all cases; failures, and by kind the number of cases and their worst errors."""
    kinds, failures, wrong = {}, [], 0
    torch.set_num_threads(1)  # small cases wait longer for a second thread than they compute
    begin = printed = time.monotonic()
    for index in range(count):
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            typer.echo(f"{index} of {count} cases, {wrong} wrong")
        case = subject.random_case(seed, index, device)
        problems, measured = subject.run_case(case, device)
        add_kind(kinds, subject.kind_of(case), measured)
        if problems:
            wrong += 1
            typer.echo("\n  ".join([f"WRONG {index}: {case!r}", *problems]))
            failures.append({"index": index, "case": repr(case), "problems": problems})
    return {
        "cases": count,
        "wrong": wrong,
        "seconds": round(time.monotonic() - begin, 1),
        "failures": failures[:MAX_FAILURES],
        "kinds": dict(sorted(kinds.items())),
    }


def print_kinds(kinds: dict[str, dict]) -> None:
    for kind, entry in kinds.items():
        errors = (f"{name} {each['value']:.1e} ({each['of_limit']:.0%})" for name, each in entry["worst"].items())
        typer.echo(f"{kind}: {entry['cases']} cases; worst errors (of their limits): {', '.join(errors)}")


def main(
    count: Annotated[int, typer.Option(min=1, help="Cases.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, max=10**12, help="Seed of the cases and of their tensors.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write; default: none.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Run cases of the sparse call.")] = False,
) -> None:
    """Compare random cases of the call with float64; exit with 1 if any is wrong."""
    device, subject = "cuda" if torch.cuda.is_available() else "cpu", SPARSE if sparse else DENSE
    try:
        if output:
            must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{count} cases of seed {seed} on {DEVICES[device]}")
    about = provenance(PROGRAM, packages=("etap-backend", "torch", "apache-tvm-ffi"), library=_library.library_path())
    found = run(subject, count, seed, device)
    print_kinds(found["kinds"])
    outcome = f"{found['cases']:,} cases, {found['wrong']} wrong, seed {seed}"
    if output:
        head = {"what": subject.what, **about.model_dump(mode="json"), "device": DEVICES[device], "seed": seed}
        write(head | {"outcome": outcome, "complete": True} | found, output)
    typer.echo(f"{outcome}, on {DEVICES[device]} ({found['seconds']} s)")
    raise typer.Exit(bool(found["wrong"]))


if __name__ == "__main__":
    typer.run(main)

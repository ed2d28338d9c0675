"""Runs random cases of the public calls against float64, each at least twice with equal bits; no case may be wrong.

    python -m bench random-cases --count 3000 --seed 1 [--output random.json] [--sparse]

Dense cases have lengths from 0 to 70,000 tokens, 1 to 128 heads, 1 to 4 query tokens, caches in bfloat16, float16 and
FP8, FP8 math, separate, aliased and shared pages, separate q_rope and any number of CTAs; `random_sparse_cases` lists
the sparse ones. Everything that a call must not read is NaN, infinite or a wild page id. Outputs and workspace lie
between guards; they hold NaN before the first run and infinities before the second. `support.compare` judges the
errors. FP8 math rounds wider queries: a result that is too far from float64 must be close to float64 of the rounded
queries.

A case follows from seed and index alone and is printed as a constructor when it is wrong. Without a GPU the CPU
executor runs small cases. The exit status is 0 if all `count` cases ran and none was wrong.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.common.provenance import provenance
from bench.common.results import check_output, write
from bench.qualify import random_sparse_cases
from support.cases import LAWS, Case, Runner, build
from support.compare import problems_with, rounds_queries, truth

DEVICES = {"cuda": "the compiled kernels", "cpu": "the CPU executor, small cases"}
LONGEST = {"cuda": 70_000, "cpu": 300}
EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129)
MAX_HEADS, MAX_QUERY_TOKENS = 128, 4
MAX_FAILURES = 20  # that a results file holds: a broken kernel fails everywhere
PROGRESS = 200  # cases from one line to the next


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
    case = Case(
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
    if case.kv_torch_dtype == torch.float16:  # the tiles of such a cache are copied whole
        layout = "dense" if case.cache_layout == "apart" else case.cache_layout
        case = replace(case, page_size=-(-case.page_size // 64) * 64, cache_layout=layout)
    fills_a_tile = 64 % (case.heads * case.s_q) == 0  # with other requests that begin with the same pages
    if fills_a_tile and not case.aliased and draw.random() < 0.5:
        common = draw.randint(512, 600 if device == "cpu" else 3000)
        lengths = tuple(common + 1 + length for length in case.lengths)
        case = replace(case, lengths=lengths, prefixes=((len(lengths), common),))
    return case


def run_case(case: Case, device: str) -> list[str]:
    """The call's faults on this case."""
    problem = build(case, device)
    runner = Runner(problem)
    first = [result.clone() for result in runner.run()]
    found = problems_with(*first, problem, truth(problem))
    if found and rounds_queries(problem):
        found = problems_with(*first, problem, truth(problem, of_rounded_queries=True))
    return found + runner.differences(first, (torch.inf,))


def run(count: int, seed: int, device: str, sparse: bool) -> dict:
    """Run all cases of the dense or the sparse call: how many were wrong, and the first of them."""
    draw, judge = (random_sparse_cases.random_case, random_sparse_cases.run_case) if sparse else (random_case, run_case)
    failures, begin = [], time.monotonic()
    torch.set_num_threads(1)  # small cases wait longer for a second thread than they compute
    for index in range(count):
        if index and index % PROGRESS == 0:
            typer.echo(f"{index} of {count} cases, {len(failures)} wrong")
        case = draw(seed, index, device)
        if problems := judge(case, device):
            typer.echo("\n  ".join([f"WRONG {index}: {case!r}", *problems]))
            failures.append({"index": index, "case": repr(case), "problems": problems})
    seconds = round(time.monotonic() - begin, 1)
    return {"cases": count, "wrong": len(failures), "seconds": seconds, "failures": failures[:MAX_FAILURES]}


def main(
    count: Annotated[int, typer.Option(min=1, help="Cases.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, max=10**12, help="Seed of the cases and of their tensors.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write; default: none.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Run cases of the sparse call.")] = False,
) -> None:
    """Compare random cases of the call with float64; exit with 1 if any is wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_output(output)
    about = provenance("python -m bench random-cases")
    found = run(count, seed, device, sparse)
    outcome = f"{count:,} cases, {found['wrong']} wrong, seed {seed}, on {DEVICES[device]}"
    if output:
        what = f"random cases of {'sparse_' if sparse else ''}mla_decode against float64, each at least twice"
        write({"what": what, **about, "seed": seed, "outcome": outcome, "complete": True} | found, output)
    typer.echo(f"{outcome} ({found['seconds']} s)")
    raise typer.Exit(bool(found["wrong"]))

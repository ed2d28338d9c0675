"""Random cases of the public call against float64, each twice with the same bits; none may be wrong.

    PYTHONPATH=tests python -m bench.qualify.random_cases --count 3000 --seed 1 [--output random.json] [--sparse]

Lengths from 0 to 70,000 tokens, 1 to 128 heads, 1 to 4 query tokens, caches in bfloat16, float16 and FP8, FP8 math,
pages apart and aliased, q_rope apart, other numbers of CTAs. All that a call must not read is NaN or infinite, or a
wild page id; outputs and workspace lie between guards and hold NaN before the first run, infinities before the second.
Errors are judged as in `compare`. Where FP8 math rounds queries, a result that is too far from float64 on them as they
came must be near float64 on them as they were rounded. A case follows from seed and index alone and is printed as a
constructor when it is wrong. On a GPU everything stays on it; without one the CPU's executor takes small cases. The
exit status is 0 when `count` cases ran and none was wrong.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from etap_backend import _library
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, write
from bench.common.stopping import Stopped, stopping
from bench.qualify import random_sparse_cases
from support.cases import LAWS, Case, Runner, build
from support.compare import Measure, measures, problems_with, rounds_queries, truth

PROGRAM = "PYTHONPATH=tests python -m bench.qualify.random_cases"

BEAT_SECONDS = 20  # between two lines that say how far a run is
DEVICES = {"cuda": "the compiled kernels", "cpu": "the executor on the CPU, small cases"}
LONGEST = {"cuda": 70_000, "cpu": 300}
EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129)
MOST_HEADS, MOST_QUERY_TOKENS = 128, 4
MOST_FAILURES = 20  # a broken kernel fails everywhere; these many are written out

console = Console(width=160)


def random_lengths(draw: random.Random, device: str) -> tuple[int, ...]:
    """Mostly few and short requests; now and then many, ragged ones, or up to the longest there is."""
    longest = LONGEST[device]
    if device == "cpu":
        count, most = draw.randint(1, 4), longest
    else:
        shape = draw.random()
        if shape < 0.1:
            last = draw.choice([longest, round(longest ** draw.uniform(0.7, 1.0))])
            return (*_lengths(draw, draw.randint(0, 2), 4096), last)
        elif shape < 0.15:
            count, most = draw.randint(65, 200), 200
        else:
            count, most = draw.randint(1, 24), 4096 if shape < 0.45 else 600
    return _lengths(draw, count, most)


def _lengths(draw: random.Random, count: int, most: int) -> tuple[int, ...]:
    return tuple(
        draw.choice(EDGES) if draw.random() < 0.2 else round((most + 1) ** draw.random()) - 1 for _ in range(count)
    )


def random_types(draw: random.Random) -> dict:
    """Types, scales and the kind of multiplication."""
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
        heads=draw.choice([8, 16, 32, 64, 128, *[draw.randint(1, MOST_HEADS)] * 5]),
        s_q=draw.choice([1, 1, 1, *range(1, MOST_QUERY_TOKENS + 1)]),
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


class Worst:
    """Of each kind of call the number of cases, and of each measure the value that comes nearest to its limit."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict] = {}

    def add(self, kind: str, found: list[Measure]) -> None:
        worst = {measure.name: measure.worst() for measure in found}
        self._join(kind, 1, {name: {"of_limit": share, "value": value} for name, (share, value) in worst.items()})

    def join(self, kinds: dict[str, dict]) -> None:
        for kind, about in kinds.items():
            self._join(kind, about["cases"], about["worst"])

    def _join(self, kind: str, cases: int, worst: dict[str, dict]) -> None:
        about = self.kinds.setdefault(kind, {"cases": 0, "worst": {}})
        about["cases"] += cases
        for name, each in worst.items():
            about["worst"][name] = max(each, about["worst"].get(name, each), key=lambda one: one["of_limit"])


def run_case(case: Case, device: str) -> tuple[list[str], list[Measure]]:
    """What is wrong with the call on this case, and how far its results are from the truth."""
    problem = build(case, device)
    wanted = truth(problem)
    runner = Runner(problem)
    first = [result.clone() for result in runner.run()]
    found = problems_with(*first, problem, wanted)
    if found and rounds_queries(problem):
        wanted = truth(problem, of_rounded_queries=True)
        found = problems_with(*first, problem, wanted)
    return found + runner.differences(first, (torch.inf,)), measures(*first, problem, wanted)


@dataclass(frozen=True)
class Subject:
    """A call: how its cases are drawn, run and named."""

    what: str
    random_case: Callable[[int, int, str], Any]
    run_case: Callable[[Any, str], tuple[list[str], list[Measure]]]
    kind_of: Callable[[Any], str]
    longest: Callable[[Any], int]


SUBJECTS = {
    "dense": Subject(
        "random cases of the public call against float64, each twice",
        random_case,
        run_case,
        kind_of,
        lambda case: max(case.lengths),
    ),
    "sparse": Subject(
        "random cases of the sparse call against float64, each three times, and in replayed CUDA graphs",
        random_sparse_cases.random_case,
        random_sparse_cases.run_case,
        random_sparse_cases.kind_of,
        lambda case: case.top_k,
    ),
}


def run_cases(name: str, seed: int, indices: range, device: str, check: Callable[[], None]) -> dict:
    """What came of these cases of a subject; `check` raises Stopped when no further one is to be begun."""
    subject = SUBJECTS[name]
    worst = Worst()
    found = {"cases": 0, "wrong": 0, "longest": 0, "stopped": None, "failures": [], "kinds": worst.kinds}
    torch.set_num_threads(1)  # a second thread is waited for longer than it computes, and all processes' are too many
    beat = time.monotonic()
    try:
        for index in indices:
            check()
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                console.print(f"{found['cases']} of {len(indices)} cases, {found['wrong']} wrong", highlight=False)
            case = subject.random_case(seed, index, device)
            problems, measured = subject.run_case(case, device)
            worst.add(subject.kind_of(case), measured)
            found["cases"] += 1
            found["longest"] = max(found["longest"], subject.longest(case))
            if problems:
                found["wrong"] += 1
                console.print(f"WRONG {index}: {case!r}", *problems, sep="\n  ", style="red", markup=False)
                found["failures"].append({"index": index, "case": repr(case), "problems": problems})
                del found["failures"][MOST_FAILURES:]
    except Stopped as reason:
        found["stopped"] = str(reason)
    return found


def run_cases_in_process(name: str, seed: int, indices: range, device: str, stop) -> dict:
    """`run_cases` in a process of its own, which `stop`, an event, ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to answer
        signal.signal(number, signal.SIG_IGN)

    def check() -> None:
        if stop.is_set():
            raise Stopped("by its parent")

    return run_cases(name, seed, indices, device, check)


def run(name: str, count: int, seed: int, device: str, time_limit: float | None, jobs: int) -> dict:
    """All cases, in this process or in several, each with its share of them; what came of them together."""
    begin = time.monotonic()
    with stopping(time_limit) as check:
        if jobs == 1:
            shares = [run_cases(name, seed, range(count), device, check)]
        else:
            shares = _run_in_processes(name, count, seed, device, check, jobs)
    worst = Worst()
    for share in shares:
        worst.join(share["kinds"])
    found = {key: sum(share[key] for share in shares) for key in ("cases", "wrong")}
    return found | {
        "longest": max(share["longest"] for share in shares),
        "complete": found["cases"] == count,
        "stopped": next(filter(None, (share["stopped"] for share in shares)), None),
        "seconds": round(time.monotonic() - begin, 1),
        "failures": sorted((one for share in shares for one in share["failures"]), key=lambda one: one["index"]),
        "kinds": dict(sorted(worst.kinds.items())),
    }


def _run_in_processes(name: str, count: int, seed: int, device: str, check: Callable, jobs: int) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        stop, reason = manager.Event(), None
        asked = [
            pool.submit(run_cases_in_process, name, seed, range(job, count, jobs), device, stop) for job in range(jobs)
        ]
        try:
            while wait(asked, timeout=0.5).not_done:
                check()
        except Stopped as ended:
            reason = str(ended)
            stop.set()
        return [one.result() | ({"stopped": reason} if reason else {}) for one in asked]


def print_kinds(document: dict) -> None:
    table = Table("call", "cases", "worst errors, share of what is allowed")
    for kind, about in document["kinds"].items():
        errors = (f"{name} {each['value']:.1e} ({each['of_limit']:.0%})" for name, each in about["worst"].items())
        table.add_row(kind, str(about["cases"]), ", ".join(errors))
    console.print(table)


def main(
    count: Annotated[int, typer.Option(min=1, help="Cases.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, max=10**12, help="Of the cases and of their tensors.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write; default: none.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Of the sparse call.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; most of a short case is their work.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which the run ends, unfinished.")
    ] = None,
) -> None:
    """Compare random cases of the call with float64; exit with 1 unless all ran and none is wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if output:
            must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console.print(f"{count} cases of seed {seed} on {DEVICES[device]}", highlight=False)
    about = provenance(PROGRAM, packages=("etap-backend", "torch", "apache-tvm-ffi"), library=_library.library_path())
    name = "sparse" if sparse else "dense"
    document = {
        "what": SUBJECTS[name].what,
        **about.model_dump(mode="json"),
        "device": DEVICES[device],
        **{"seed": seed, "wanted": count},
    }
    document |= run(name, count, seed, device, time_limit, jobs)
    counted = f"{document['cases']:,} of {count:,} cases, {document['wrong']} wrong"
    document["outcome"] = f"{counted}, seed {seed}"
    if output:
        write(document, output)
    print_kinds(document)
    passed = document["complete"] and not document["wrong"]
    ending = f", stopped {document['stopped']}" if document["stopped"] else ""
    said = f"{document['cases']} of {count} cases on {DEVICES[device]}: {document['wrong']} wrong{ending}"
    console.print(f"{said} ({document['seconds']} s)", highlight=False)
    raise typer.Exit(not passed)


if __name__ == "__main__":
    typer.run(main)

"""Runs vLLM's own `bench latency` and `bench throughput` with ETAP and with other attention backends.

    python -m etap_backend.lab.e2e.offline --output offline-vllm.json

Needs a Hopper GPU and vLLM with etap-backend beside it. The model is DeepSeek-R1 in dummy weights, as wide as one of
eight tensor-parallel ranks, as many layers as are asked for. Each backend's engine is started once, in a process of its
own, and vLLM's two programs get it for every point: a start and 8 million tokens of prompts a point would take hours.

There is no server, so no front end is in a figure, and all requests are there before the first step. `bench latency`
runs twice a point, with few and with many output tokens, over prompts that the first iteration left in the prefix
cache; the difference, divided by the steps between them, is the time of a decode step of the whole batch. `bench
throughput` has new prompts, prefill and decode mixed. With few layers the host is what small batches wait for.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend import _library
from etap_backend.lab.e2e.model import MARGIN_TOKENS, prepare_model
from etap_backend.lab.e2e.scenario import parse_point
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, write
from etap_backend.lab.serving.lifecycle import memory_given_back
from etap_backend.lab.stopping import Stopped, stopping
from etap_backend.lab.units import in_k

PROGRAM = "python -m etap_backend.lab.e2e.offline"
PACKAGES = ("etap-backend", "vllm", "torch", "apache-tvm-ffi", "flashinfer-python", "triton")
MODEL = "deepseek-r1"
BACKENDS = "ETAP,FLASHMLA,FLASH_ATTN_MLA"
# Most requests first: the prompts of a point with fewer, of the same length, are in the cache then.
POINTS = "128x2K,64x2K,16x2K,1x2K,128x16K,64x16K,16x16K,1x16K,128x64K,64x64K,16x64K,1x64K"
THROUGHPUT = "256x2K,64x16K"
SHORT, LONG = 2, 258  # output tokens
THROUGHPUT_OUTPUT = 256

console = Console(width=120)


@dataclass(frozen=True)
class Asked:
    """What every backend's engine is given: a model's folder, points as (requests, input tokens), readings of each."""

    model: str
    points: list[tuple[int, int]]
    throughput: list[tuple[int, int]]
    iterations: int
    flags: list[str]

    def engine(self, backend: str) -> list[str]:
        batches = sorted({batch for batch, _ in self.points})
        longest = max(length for _, length in [*self.points, *self.throughput])
        longest += max(LONG, THROUGHPUT_OUTPUT) + MARGIN_TOKENS
        return [
            *("--model", self.model, "--load-format", "dummy", "--attention-backend", backend),
            *("--max-model-len", str(longest), "--max-num-seqs", str(max(batches)), "--enable-prefix-caching"),
            *("--cudagraph-capture-sizes", *map(str, batches), *self.flags),
        ]

    def latency(self, point: tuple[int, int], output: int, result: Path) -> list[str]:
        batch, length = point
        warm_up = 1 if output == SHORT else 0
        return [
            *("--batch-size", str(batch), "--input-len", str(length), "--output-len", str(output)),
            *("--num-iters-warmup", str(warm_up), "--num-iters", str(self.iterations)),
            *("--disable-detokenize", "--output-json", str(result)),
        ]

    def requests(self, point: tuple[int, int], seed: int, result: Path) -> list[str]:
        prompts, length = point
        return [
            *("--dataset-name", "random", "--num-prompts", str(prompts), "--random-input-len", str(length)),
            *("--random-output-len", str(THROUGHPUT_OUTPUT), "--seed", str(seed)),
            *("--disable-detokenize", "--output-json", str(result)),
        ]


def parsed(program, words: list[str]):
    """Arguments of one of vLLM's programs, by its own parser."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    program.add_cli_args(parser)
    return parser.parse_args(words)


def rows_of(backend: str, asked: Asked, folder: Path) -> Iterator[dict]:
    """One engine, and what vLLM's programs say of each point."""
    import numpy
    import vllm
    from vllm.benchmarks import latency, throughput
    from vllm.engine.arg_utils import EngineArgs

    engine, result = asked.engine(backend), folder / "result.json"
    begin = time.monotonic()
    started = vllm.LLM.from_engine_args(EngineArgs.from_cli_args(parsed(latency, engine)))
    vllm.LLM.from_engine_args = lambda *_: started
    yield {"backend": backend, "seconds_to_ready": round(time.monotonic() - begin, 1), "flags": engine}

    def said(program, words: list[str]) -> dict:
        numpy.random.seed(0)  # bench latency takes its prompts from there
        program.main(parsed(program, [*engine, *words]))
        return json.loads(result.read_text())

    for point in asked.points:
        row = {"backend": backend, "program": "latency", "requests": point[0], "input": point[1]}
        for name, output in (("short", SHORT), ("long", LONG)):
            row[f"{name}_s"] = said(latency, asked.latency(point, output, result))["latencies"]
        yield row
    for point in asked.throughput:
        readings = [said(throughput, asked.requests(point, seed, result)) for seed in range(1, 2 + asked.iterations)]
        row = {"backend": backend, "program": "throughput", "requests": point[0], "input": point[1]}
        # The first compiles what prompts of that length need.
        yield row | {"tokens_per_second": [reading["tokens_per_second"] for reading in readings[1:]]}


def engine_process(backend: str, asked: Asked, sink) -> None:
    """Send each row, then None; what goes wrong as {"error"}."""
    # One process, so that requests are queued before the first step.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of(backend, asked, Path(folder)):
                sink.send(row)
        sink.send(None)
    except Exception as error:
        sink.send({"backend": backend, "error": f"{type(error).__name__}: {error}"[:2000]})
        raise


def measured(backend: str, asked: Asked, deadline: float, keep: Callable[[dict], None]) -> str | None:
    """All rows of one backend; why it ended early."""
    context = multiprocessing.get_context("spawn")
    source, sink = context.Pipe(duplex=False)
    process = context.Process(target=engine_process, args=(backend, asked, sink))
    process.start()
    sink.close()
    try:
        while source.poll(max(0.0, deadline - time.monotonic())):
            if (row := source.recv()) is None:
                return None
            keep(row)
            if "error" in row:
                return f"{backend}: {row['error']}"
        return "by the time limit"
    except EOFError:
        process.join()
        return f"{backend}: its process ended with {process.exitcode}"
    finally:
        process.terminate()
        process.join()


def step_ms(row: dict) -> float:
    """A decode step, in milliseconds, from the fastest readings: what disturbs one only adds to it."""
    return 1000 * (min(row["long_s"]) - min(row["short_s"])) / (LONG - SHORT)


def tokens_per_second(row: dict) -> float:
    return max(row["tokens_per_second"])


def print_rows(rows: list[dict], backends: list[str]) -> None:
    """A table of each program."""
    for program, value, title in (
        ("latency", step_ms, "decode step, ms"),
        ("throughput", tokens_per_second, "tokens/s, prompts included"),
    ):
        of_program = [row for row in rows if row["program"] == program]
        table = Table("requests x input", *backends, title=title)
        for point in dict.fromkeys((row["requests"], row["input"]) for row in of_program):
            found = {row["backend"]: row for row in of_program if (row["requests"], row["input"]) == point}
            cells = [f"{value(found[backend]):,.2f}" if backend in found else "-" for backend in backends]
            table.add_row(f"{point[0]} x {in_k(point[1])}", *cells)
        console.print(table)


def points_of(text: str, option: str) -> list[tuple[int, int]]:
    """Pairs of an option's text such as 16x2K,1x64K; empty for an empty one."""
    try:
        return [parse_point(point) for point in text.split(",") if point]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def main(
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("offline-vllm.json"),
    backends: Annotated[str, typer.Option(help="Attention backends, in this order.")] = BACKENDS,
    layers: Annotated[int, typer.Option(min=2, help="Of DeepSeek-R1; the first is dense.")] = 6,
    rank_of: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, of whose width the GPU gets one.")] = 8,
    points: Annotated[str, typer.Option(help="Requests x input tokens of bench latency.")] = POINTS,
    throughput: Annotated[str, typer.Option(help="Requests x input tokens of bench throughput.")] = THROUGHPUT,
    iterations: Annotated[int, typer.Option(min=1, help="Readings of each.")] = 2,
    limit: Annotated[float, typer.Option(help="Seconds; what there is then is kept.")] = 3600,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
    flags: Annotated[list[str] | None, typer.Argument(help="More flags for the engine, after --.")] = None,
) -> None:
    """Measure every backend; exit with 1 when a row is missing."""
    deadline = time.monotonic() + limit
    wanted, served = points_of(points, "--points"), points_of(throughput, "--throughput")
    changes = {"num_hidden_layers": layers, "first_k_dense_replace": 1}
    names = backends.split(",")
    about = provenance(PROGRAM, packages=PACKAGES, library=_library.library_path(), note=note)
    document = {"what": "vLLM's bench latency and throughput, one process"} | about.model_dump()
    with tempfile.TemporaryDirectory() as folder:
        try:
            must_be_writable(output)
            prepared = prepare_model(MODEL, changes, rank_of, 1, Path(folder))
            prepared.write()
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        asked = Asked(prepared.model, wanted, served, iterations, flags or [])
        document |= {"model": MODEL, "weights": prepared.what, "output_tokens": [SHORT, LONG]}
        document |= {"throughput_output_tokens": THROUGHPUT_OUTPUT, "engines": [], "rows": [], "stopped": []}

        def keep(row: dict) -> None:
            document["rows" if "program" in row else "engines"].append(row)
            write(document, output)

        try:
            with stopping(None):  # else the engine's process would outlive this one
                for backend in names:
                    with memory_given_back():
                        if reason := measured(backend, asked, deadline, keep):
                            document["stopped"].append(reason)
                            console.print(reason, style="red", markup=False)
        except Stopped as reason:
            document["stopped"].append(str(reason))
        write(document, output)
    print_rows(document["rows"], names)
    raise typer.Exit(bool(document["stopped"]))


if __name__ == "__main__":
    typer.run(main)

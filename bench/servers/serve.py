"""Servers of ETAP and of an engine's own attention backends in turns (A B A B), under the engine's load generator.

    python -m bench serve decode-short --engine vllm --turns 2
    python -m bench serve results/serve-decode-short-vllm.json --markdown
    python -m bench serve decode-sparse --together --backend ETAP --backend FLASHMLA_SPARSE --flag=...

Each turn of a backend is a server of its own, or with --together another pass over servers that are all there at once.
Every reading has the host's speed beside it: a fixed loop of plain Python, the slower of before and after. Of a point's
readings those within 10% of each other's host speed are compared, the others are void. The output is written after
every reading, so a run that is cut short (SIGTERM, Ctrl-C) keeps its readings. The exit status is 1 when a server or a
point failed, and 2 when there is nothing to measure.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.common import gpus as driver
from bench.common import results
from bench.common.provenance import provenance
from bench.common.screen import print_table
from bench.common.stopping import Stopped, stopping
from bench.common.units import parse_tokens
from bench.models import dummy
from bench.models.plugins import plugins
from bench.servers.client import Failed
from bench.servers.engines import ENGINES, PACKAGES, SEED, Load, Serving, Sglang, Variant, Vllm, read_result
from bench.servers.generator import Generator, tail
from bench.servers.processes import Server, end_all, free_port, served
from bench.servers.scenario import Case, Scenario, cases_of, read_scenario
from etap_backend import _library

HOST_LOOPS, HOST_STEPS, HOST_TOLERANCE = 5, 400_000, 0.10


def host_ms() -> float:
    """Milliseconds of a fixed loop of plain Python, the fastest of HOST_LOOPS: the speed of this machine's CPU."""

    def loop() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(HOST_STEPS):
            total += number
        return 1e3 * (time.perf_counter() - begin)

    return round(min(loop() for _ in range(HOST_LOOPS)), 2)


def at_equal_host_speed(rows: list[dict]) -> list[dict]:
    """The readings of one point within HOST_TOLERANCE of each other's host speed: of most backends, then most
    readings, then the fastest host."""

    def within(low: float) -> list[dict]:
        return [row for row in rows if low <= row["host_ms"] <= low * (1 + HOST_TOLERANCE)]

    lows = sorted({row["host_ms"] for row in rows})
    return max(map(within, lows), key=lambda span: (len({row["backend"] for row in span}), len(span)), default=[])


@dataclass
class Run:
    """One command's measurements; `document` is the results file, whose `rows` are readings."""

    engine: Vllm | Sglang
    scenario: Scenario
    backends: list[str]
    cases: list[Case]
    serving: Serving
    flags: list[str]
    document: dict
    output: Path
    console: Console
    readings: int
    environment: dict[str, str] = field(default_factory=dict, init=False)
    fresh_seeds: int = field(default=0, init=False)
    sent: dict[str, list[Case]] = field(default_factory=dict, init=False)  # by server

    def variant(self, backend: str) -> Variant:
        return Variant.parse(backend, self.scenario.gpus)

    def tell(self, text: str, **options) -> None:
        self.console.print(text, markup=False, highlight=False, **options)

    def fail(self, text: str) -> None:
        self.document["failures"].append(text)
        self.tell(text, style="red")
        results.write(self.document, self.output)

    def all(self, turns: int, together: bool) -> None:
        """Every turn of every backend; a server that fails does not end the run, a signal does."""
        seeded = ["seeded"] if self.serving.weights == "seeded" else []
        log = self.output.with_suffix("") / "load.log"
        with plugins([*self.scenario.plugins, *seeded]) as more, Generator(self.engine.load_module, log) as generator:
            self.environment = self.document["environment"] | more
            rounds = [self.backends] if together else [[name] for name in self.backends] * turns
            for number, names in enumerate(rounds):
                passes = range(1, turns + 1) if together else [1 + number // len(self.backends)]
                self.group(names, passes, generator)

    def group(self, names: list[str], passes: list[int] | range, generator: Generator) -> None:
        """Start these servers at the same time, then measure on one after the other in each pass."""
        try:
            with ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
                starting = {name: pool.submit(stack.enter_context, self.start(name, passes[0])) for name in names}
                running = self.ready(starting)
                for turn in passes:
                    for name, server in running.items():
                        if server.process.ended() is None:
                            self.pass_over(server, generator, name, turn)
        except Failed as failure:
            self.fail(str(failure))

    def ready(self, starting: dict[str, Future[Server]]) -> dict[str, Server]:
        """The servers that come up."""
        running = {}
        for name, server in starting.items():
            try:
                running[name] = server.result()
            except Failed as failure:
                self.fail(f"{name}: {failure}")
            except Stopped:
                end_all()  # those that are still starting, for which the pool waits
                raise
        return running

    def start(self, name: str, turn: int):
        log = self.output.with_suffix("") / f"{name}-{turn}.log"
        self.tell(f"{name}, turn {turn}: starting, log in {log}")
        options = {"log": log, "environment": self.environment}
        return served(self.engine, self.serving, self.variant(name), self.flags, **options)

    def pass_over(self, server: Server, generator: Generator, backend: str, turn: int) -> None:
        """All points on one server."""
        room = self.engine.cache_tokens(server.log())
        server.about.update(cache_tokens=room, cuda_graphs=self.engine.in_graphs(server.log()))
        self.document["servers"][f"{backend}, turn {turn}"] = server.about
        for case in self.cases:
            if room is not None and case.tokens > room:
                text = f"{backend}, {case.text}: needs a cache of {case.tokens:,} tokens, the server has {room:,}"
                self.document["skipped"] += [text] * (text not in self.document["skipped"])
                continue
            try:
                for reading in self.of_case(server, generator, case):
                    row = {"backend": backend, "turn": turn, "point": case.text, **reading}
                    self.document["rows"].append(row)
                    results.write(self.document, self.output)
                    self.tell(f"{backend}, {case.text}: TPOT {row['tpot_ms']:.2f} ms, host {row['host_ms']:.1f} ms")
            except Failed as failure:
                self.fail(f"{backend}, turn {turn}, {case.text}: {failure}")
                if server.process.ended() is not None:
                    return

    def of_case(self, server: Server, generator: Generator, case: Case) -> Iterator[dict]:
        """Readings of a case, after a warm-up unless its prompts are in the prefix cache already."""
        cached, sent = case.prefill == "cached", self.sent.setdefault(server.process.mark, [])
        if not any(case == one or case.in_cache_after(one) for one in sent):
            self.reading(server, generator, replace(case.load, output=2, seed=self.seed(cached)))
            sent.append(case)
        for _ in range(self.readings):
            for last in (False, True):  # prompts that were evicted are cached again after one more run
                reading = self.reading(server, generator, replace(case.load, seed=self.seed(cached)))
                share = reading["cached_share"]
                if share is None or case.cached_as_wanted(share):
                    yield reading
                    break
                if last:
                    raise Failed(f"{share:.0%} of the prompts' tokens were in the prefix cache")

    def seed(self, cached: bool) -> int:
        """A new one for prompts that must be new to the server."""
        self.fresh_seeds += not cached
        return SEED if cached else SEED + self.fresh_seeds

    def reading(self, server: Server, generator: Generator, load: Load) -> dict:
        """One run of the load generator."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            host, before = host_ms(), self.engine.cached_and_asked(server.metrics())
            generator.run(self.engine.load(self.serving, load, server.port, result), self.scenario.point_seconds)
            after = self.engine.cached_and_asked(server.metrics())
            try:
                found = read_result(result, load.prompts)
            except (OSError, ValueError, KeyError) as error:
                raise Failed(f"the load generator's result: {error!r}\n{tail(generator.log, 15)}") from error
            asked = after[1] - before[1]
            share = round((after[0] - before[0]) / asked, 4) if asked > 0 else None
            return found | {"cached_share": share, "host_ms": max(host, host_ms())}


def table_of(document: dict, markdown: bool = False) -> Table:
    """Medians and ranges of comparable readings by point and backend, and ratios to ETAP with the same cache."""
    rows, etap = document["rows"], ENGINES[document["engine"]].etap
    key = "itl_ms" if all(row.get("itl_ms") for row in rows) else "tpot_ms"
    key = key if any("cached" in row["point"] for row in rows) else "ttft_ms"
    titles = ("requests x input/output, prefill", "backend", key[:4].rstrip("_").upper() + " ms", "/ ETAP")
    table = Table(*titles, "tokens/s per GPU", "host ms", "readings", box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for point in dict.fromkeys(row["point"] for row in rows):
        of_point = [row for row in rows if row["point"] == point]
        valid: dict[str, list[dict]] = {}
        for row in at_equal_host_speed(of_point):
            valid.setdefault(row["backend"], []).append(row)
        times = {name: [row[key] for row in readings] for name, readings in valid.items()}
        for name in dict.fromkeys(row["backend"] for row in of_point):
            own, reference = times.get(name), times.get(etap + name.removeprefix(Variant.parse(name).backend))
            hosts = [row["host_ms"] for row in of_point if row["backend"] == name]
            cells = ["void", "-", "-"]
            if own:
                cells[0] = f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})"
                rate = statistics.median(row["tokens_per_second"] for row in valid[name]) / document["gpus"]
                cells[2] = f"{rate:,.1f}"
            if own and reference:
                cells[1] = f"{statistics.median(own) / statistics.median(reference):.3f}"
            void = len(hosts) - len(own or [])
            used = f"{len(own or [])}, {void} void" if void else str(len(hosts))
            table.add_row(point, name, *cells, f"{min(hosts):.1f} to {max(hosts):.1f}", used)
    return table


def show(document: dict, console: Console, markdown: bool = False) -> None:
    """The table, what is missing, and how it was made."""
    if document["rows"]:
        print_table(console, table_of(document, markdown))
    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    made = "{model}, {weights}; {gpus} x {gpu}, driver {driver}; {versions}; commit {commit}; {date}."
    lines = [made.format(**document | {"versions": versions}), document["note"], *document["skipped"]]
    for line in [*filter(None, lines), *(f"failed: {text}" for text in document["failures"])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def prepared(scenario: Scenario, folder: Path) -> tuple[str, dict, str]:
    """The model's folder or name, its configuration ({} if unknown), and what its weights are.

    Raises ValueError when the configuration cannot be changed so, or heads do not divide.
    """
    if scenario.weights == "auto":
        return scenario.model, {}, "its own weights"
    changes = scenario.changes | ({"num_hidden_layers": scenario.layers} if scenario.layers else {})
    config = dummy.changed(scenario.model, changes, scenario.rank_of, scenario.gpus)
    if config["num_attention_heads"] % scenario.gpus:
        raise ValueError(f"--gpus: wanted a divisor of {config['num_attention_heads']} heads, got {scenario.gpus}")
    rank = f", each GPU as one of {scenario.rank_of} ranks" if scenario.rank_of else ""
    return str(folder), config, f"{scenario.weights} weights, {config['num_hidden_layers']} layers{rank}"


def parse_changes(pairs: list[str]) -> dict:
    """{key: value} of KEY=VALUE texts with values in JSON. Raises ValueError for other texts."""
    try:
        return {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    except json.JSONDecodeError as error:
        raise ValueError(f"--set: wanted KEY=VALUE with a JSON value, got {pairs}") from error


def main(
    scenario: Annotated[str, typer.Argument(help="A name in configs/scenarios.toml, a TOML file, or JSON to show.")],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose server and load generator.")] = "vllm",
    model: Annotated[str | None, typer.Option(help="Another of configs/models; with --weights auto a folder.")] = None,
    weights: Annotated[Literal["auto", "dummy", "seeded"] | None, typer.Option(help="Of the model.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="BACKEND[+fp8][+math][@dcpN]; repeatable.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs, instead of the scenario's.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model.")] = None,
    rank_of: Annotated[int | None, typer.Option(min=0, help="Each GPU as one of so many ranks; 0: as it is.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of config.json; repeatable.")] = None,
    context: Annotated[list[str] | None, typer.Option(help="Only this input length, such as 16K; repeatable.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Only this concurrency; repeatable.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each backend.")] = 2,
    readings: Annotated[int, typer.Option(min=1, help="Readings of each point in each turn.")] = 1,
    together: Annotated[bool, typer.Option("--together", help="All servers at once; flags divide the memory.")] = False,
    flag: Annotated[list[str] | None, typer.Option(help="A server's flag more, as --flag=--x=y; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON; results/serve-<scenario>-<engine>.json if absent.")] = None,
    note: Annotated[str, typer.Option(help="Put into the output.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown.")] = False,
    commands: Annotated[bool, typer.Option("--show", help="Print the commands; run and write nothing.")] = False,
) -> None:
    """Serve one model with ETAP and with the engine's own attention backends, and compare their steps."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    if scenario.endswith(".json"):
        return show(json.loads(Path(scenario).read_text()), console, markdown)
    path = output or Path("results") / f"serve-{Path(scenario).stem}-{engine}.json"
    given = {"model": model, "weights": weights, "gpus": gpus, "layers": layers, "rank_of": rank_of}
    try:
        wanted = read_scenario(scenario)
        given["changes"] = wanted.changes | parse_changes(changes or [])
        wanted = wanted.model_copy(update={key: value for key, value in given.items() if value is not None})
        cases = cases_of(wanted.points, [parse_tokens(text) for text in context or []], concurrency or [])
        folder, config, made = prepared(wanted, path.with_suffix("") / "model")
        about = {"scenario": scenario, "weights": made, "model_shape": config, "note": note}
        document, specific = document_of(engine, wanted, about), wanted.of(engine)
        serving, flags = wanted.serving(folder, cases), [*specific.flags, *(flag or [])]
        names, of = backend or specific.backends, ENGINES[engine]
        run = Run(of, wanted, names, cases, serving, flags, document, path, console, readings)
        if commands:
            return print_commands(run)
        make_ready(run, new=output is None)
    except (ValueError, OSError) as error:
        console.print(f"serve: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    try:
        with stopping(None):
            run.all(turns, together)
    except Stopped as reason:
        document["stopped"] = str(reason)
    results.write(document, path)
    show(document, console, markdown)
    raise typer.Exit(2 if not document["rows"] else bool(document["failures"]))


def make_ready(run: Run, new: bool) -> None:
    """Write the model's folder. Raises ValueError without enough GPUs, or when the output cannot be written."""
    found, least = len(driver.gpus()), max(run.variant(name).tp for name in run.backends)
    if found < least:
        raise ValueError(f"--gpus: wanted {least} GPUs, this machine shows {found}; --show needs none")
    if new:
        results.must_be_new(run.output)
    results.must_be_writable(run.output)
    if config := run.document["model_shape"]:
        dummy.write(Path(run.serving.model), config)


def document_of(engine: str, scenario: Scenario, about: dict) -> dict:
    """A results file without readings."""
    made = provenance("python -m bench serve", packages=(engine, *PACKAGES), library=_library.library_path())
    environment = {**scenario.environment, **scenario.of(engine).environment}
    document = {"kind": "serve", "engine": engine, **made.model_dump(), **about, "environment": environment}
    document |= scenario.model_dump(include={"model", "gpus", "draft_tokens", "acceptance", "plugins"})
    return document | {"stopped": None, "servers": {}, "skipped": [], "failures": [], "rows": []}


def print_commands(run: Run) -> None:
    """Commands of all servers, and of the load generator at every point."""
    port, result = free_port(), Path("result.json")
    made = [run.engine.server("python", run.serving, run.variant(name), port, run.flags) for name in run.backends]
    loads = [run.engine.load(run.serving, case.load, port, result) for case in run.cases]
    for command in [*made, *(["python", "-m", run.engine.load_module, *load] for load in loads)]:
        run.tell(shlex.join(command), soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

"""Servers of ETAP and of an engine's own attention backends in turns (A B A B), under the engine's load generator.

    python -m bench serve decode-short --engine vllm --turns 2

Each turn of a backend is a server of its own, and every reading has the host's speed beside it: a fixed loop of plain
Python, the slower of before and after. Of a point's readings those within 10% of each other's host speed are compared,
the others are void. The output is written after every reading, so a run that is cut short (SIGTERM, Ctrl-C) keeps its
readings. The exit status is 1 when a server or a point failed, and 2 when there is nothing to measure.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from bench.common import gpus as driver
from bench.common import results
from bench.common.configs import Strict
from bench.common.provenance import Provenance, provenance
from bench.common.screen import print_table
from bench.common.stopping import Stopped, stopping
from bench.common.units import parse_tokens
from bench.models import dummy
from bench.models.plugins import plugins
from bench.servers.client import Failed
from bench.servers.engines import ENGINES, SEED, Serving, Sglang, Variant, Vllm, read_result
from bench.servers.processes import Generator, Server, free_port, served, tail
from bench.servers.scenario import Case, EngineScenario, Scenario, cases_of, read_scenario

HOST_LOOPS, HOST_STEPS, HOST_TOLERANCE = 5, 400_000, 0.10
PACKAGES = ("etap-backend", "torch", "apache-tvm-ffi", "triton", "flashinfer-python", "sglang-kernel")


class Reading(Strict):
    """One run of the load generator: medians over requests, of ITL over all steps."""

    backend: str
    turn: int
    point: str
    tpot_ms: float
    itl_ms: float | None = None
    ttft_ms: float
    tokens_per_second: float
    duration: float | None = None
    acceptance_length: float | None = None
    cached_share: float | None = None  # of the prompts' tokens, found in the prefix cache
    host_ms: float


class Document(Provenance):
    """A results file of `serve`; it grows during the run."""

    model_config = ConfigDict(extra="forbid", frozen=False)

    kind: Literal["serve"] = "serve"
    scenario: str
    engine: str
    model: str
    weights: str
    model_shape: dict
    gpus: int
    draft_tokens: int
    acceptance: float | None
    environment: dict[str, str]
    plugins: list[str]
    stopped: str | None = None
    servers: dict[str, dict] = {}
    skipped: list[str] = []
    failures: list[str] = []
    rows: list[Reading] = []


def host_ms() -> float:
    """Milliseconds of a fixed loop of plain Python, the fastest of HOST_LOOPS: the speed of this machine's CPU."""

    def loop() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(HOST_STEPS):
            total += number
        return 1e3 * (time.perf_counter() - begin)

    return round(min(loop() for _ in range(HOST_LOOPS)), 2)


def at_equal_host_speed(rows: list[Reading]) -> list[Reading]:
    """The readings of one point within HOST_TOLERANCE of each other's host speed: of most backends, then most
    readings, then the fastest host."""

    def within(low: float) -> list[Reading]:
        return [row for row in rows if low <= row.host_ms <= low * (1 + HOST_TOLERANCE)]

    spans = [within(row.host_ms) for row in rows]
    return max(spans, key=lambda span: (len({row.backend for row in span}), len(span), -span[0].host_ms), default=[])


@dataclass
class Run:
    """Everything that one command measures."""

    engine: Vllm | Sglang
    scenario: Scenario
    specific: EngineScenario
    backends: list[str]
    cases: list[Case]
    serving: Serving
    flags: list[str]
    document: Document
    output: Path
    console: Console
    readings: int = 1
    fresh_seeds: int = field(default=0, init=False)

    def variant(self, backend: str) -> Variant:
        return Variant.parse(backend, self.scenario.gpus)

    def environment(self) -> dict[str, str]:
        return {**self.scenario.environment, **self.specific.environment}

    def write(self) -> None:
        results.write(self.document, self.output)

    def fail(self, text: str) -> None:
        self.document.failures.append(text)
        self.console.print(text, style="red", markup=False, highlight=False)
        self.write()

    def all(self, turns: int) -> None:
        """Every turn of every backend; a server that fails does not end the run."""
        folder, environment = self.output.with_suffix(""), self.environment()
        with (
            plugins([*self.scenario.plugins, *(["seeded"] if self.serving.weights == "seeded" else [])]) as more,
            Generator(self.engine.load_module, folder / "load.log") as generator,
        ):
            for turn in range(1, turns + 1):
                for backend in self.backends:
                    log = folder / f"{backend}-{turn}.log"
                    options = {"log": log, "environment": environment | more}
                    self.console.print(f"{backend}, turn {turn}: starting, log in {log}", highlight=False)
                    try:
                        with served(self.engine, self.serving, self.variant(backend), self.flags, **options) as server:
                            self.document.servers[f"{backend}, turn {turn}"] = server.about
                            self.one(server, generator, backend, turn)
                    except Failed as failure:
                        self.fail(f"{backend}, turn {turn}: {failure}")

    def one(self, server: Server, generator: Generator, backend: str, turn: int) -> None:
        """All points on one server."""
        room = self.engine.cache_tokens(server.log())
        server.about |= {"cache_tokens": room, "cuda_graphs": self.engine.in_graphs(server.log())}
        sent: list[Case] = []
        for case in self.cases:
            if room is not None and case.tokens > room:
                text = f"{backend}, {case.text}: needs a cache of {case.tokens:,} tokens, the server has {room:,}"
                self.document.skipped = list(dict.fromkeys([*self.document.skipped, text]))
                continue
            try:
                for reading in self.of_case(server, generator, case, any(map(case.in_cache_after, sent))):
                    row = Reading(backend=backend, turn=turn, point=case.text, **reading)
                    self.document.rows.append(row)
                    self.write()
                    said = f"{backend}, {row.point}: TPOT {row.tpot_ms:.2f} ms, host {row.host_ms:.1f} ms"
                    self.console.print(said, markup=False, highlight=False)
                sent.append(case)
            except Failed as failure:
                self.fail(f"{backend}, turn {turn}, {case.text}: {failure}")
                if server.process.ended() is not None:
                    return

    def of_case(self, server: Server, generator: Generator, case: Case, known: bool) -> Iterator[dict]:
        """Readings of a case; `known` when its prompts are in the prefix cache already."""
        cached = case.prefill == "cached"
        if not known:  # fills the prefix cache, and lets the server compile what it has not met
            self.reading(server, generator, replace(case.load, output=2, seed=self.seed(cached)))
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

    def reading(self, server: Server, generator: Generator, load) -> dict:
        """One run of the load generator."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            host, before = host_ms(), self.engine.cached_and_asked(server.metrics())
            arguments = self.engine.load(self.serving, load, server.port, result)
            generator.run(arguments, self.scenario.point_seconds)
            after = self.engine.cached_and_asked(server.metrics())
            try:
                found = read_result(result, load.prompts)
            except (OSError, ValueError, KeyError) as error:
                raise Failed(f"the load generator's result: {error!r}\n{tail(generator.log, 15)}") from error
            asked = after[1] - before[1]
            share = round((after[0] - before[0]) / asked, 4) if asked > 0 else None
            return found | {"cached_share": share, "host_ms": max(host, host_ms())}


def table_of(document: Document, markdown: bool = False) -> Table:
    """Medians and ranges of comparable readings by point and backend, and ratios to ETAP with the same cache."""
    table = Table(box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    served_only = all("cached" not in row.point for row in document.rows)
    time_of = "ttft_ms" if served_only else "itl_ms" if all(row.itl_ms for row in document.rows) else "tpot_ms"
    titles = ("requests x input/output, prefill", "backend", f"{time_of[:4].rstrip('_').upper()} ms", "/ ETAP")
    for title in (*titles, "tokens/s per GPU", "host ms", "readings"):
        table.add_column(title)

    for point in dict.fromkeys(row.point for row in document.rows):
        rows = [row for row in document.rows if row.point == point]
        valid = at_equal_host_speed(rows)
        for backend in dict.fromkeys(row.backend for row in rows):
            own = [row for row in valid if row.backend == backend]
            times = [getattr(row, time_of) for row in own]
            beside = ENGINES[document.engine].etap + backend.removeprefix(Variant.parse(backend).backend)
            etap = [getattr(row, time_of) for row in valid if row.backend == beside]
            hosts = [row.host_ms for row in rows if row.backend == backend]
            ratio = f"{statistics.median(times) / statistics.median(etap):.3f}" if times and etap else "-"
            rates = [row.tokens_per_second / document.gpus for row in own]
            table.add_row(
                *(point, backend, f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
                if times else "void", ratio),
                *(f"{statistics.median(rates):,.1f}" if rates else "-", f"{min(hosts):.1f} to {max(hosts):.1f}"),
                f"{len(own)}" + (f", {len(hosts) - len(own)} void" if len(hosts) > len(own) else ""),
            )  # fmt: skip
    return table


def show(document: Document, console: Console, markdown: bool = False) -> None:
    """The table, what is missing, and how it was made."""
    if document.rows:
        print_table(console, table_of(document, markdown))
    versions = ", ".join(f"{package} {version}" for package, version in document.versions.items())
    drafts = f", {document.draft_tokens} draft tokens" if document.draft_tokens else ""
    made = f"{document.gpus} x {document.gpu}, driver {document.driver}{drafts}; {versions}; commit {document.commit}"
    lines = [f"{document.model}, {document.weights}; {made}; {document.date}.", document.note, *document.skipped]
    lines += [f"failed: {text}" for text in document.failures]
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def report(
    files: Annotated[list[Path], typer.Argument(help="Results files of serve.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown.")] = False,
) -> None:
    """Print the tables of results files again."""
    for path in files:
        show(results.read(path, Document), Console(), markdown)


def prepared(scenario: Scenario, folder: Path) -> tuple[str, dict, str]:
    """The model's folder or name, its configuration ({} if unknown), and what its weights are.

    Raises ValueError when the configuration cannot be changed so, or does not divide.
    """
    if scenario.weights == "auto":
        return scenario.model, {}, "its own weights"
    changes = scenario.changes | ({"num_hidden_layers": scenario.layers} if scenario.layers else {})
    config = dummy.changed(scenario.model, changes, scenario.rank_of, scenario.gpus)
    if config["num_attention_heads"] % scenario.gpus:
        raise ValueError(f"--gpus: wanted a divisor of {config['num_attention_heads']} heads, got {scenario.gpus}")
    rank = f", each GPU as one of {scenario.rank_of} ranks" if scenario.rank_of else ""
    return str(folder), config, f"{scenario.weights} weights, {config['num_hidden_layers']} layers{rank}"


def parse_pairs(argument: str, pairs: list[str]) -> dict[str, str]:
    """{key: value} of KEY=VALUE texts. Raises ValueError for other texts."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (key, equals, _) in zip(pairs, split, strict=True):
        if not (key and equals):
            raise ValueError(f"{argument}: wanted KEY=VALUE, got {pair!r}")
    return {key: value for key, _, value in split}


def parse_changes(pairs: list[str]) -> dict:
    """As parse_pairs, with values in JSON."""
    try:
        return {key: json.loads(value) for key, value in parse_pairs("--set", pairs).items()}
    except json.JSONDecodeError as error:
        raise ValueError(f"--set: wanted a JSON value, got {error.doc!r}") from error


def main(
    scenario: Annotated[str, typer.Argument(help="A name in bench/configs/scenarios.toml, or a TOML file.")],
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
    turns: Annotated[int, typer.Option(min=1, help="Servers of each backend, in turn.")] = 2,
    readings: Annotated[int, typer.Option(min=1, help="Readings of each point on each server.")] = 1,
    flag: Annotated[list[str] | None, typer.Option(help="A server's flag more, as --flag=--x=y; repeatable.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for servers; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON; results/serve-<scenario>-<engine>.json if absent.")] = None,
    note: Annotated[str, typer.Option(help="Put into the output.")] = "",
    show_commands: Annotated[bool, typer.Option("--show", help="Print the commands; run and write nothing.")] = False,
) -> None:
    """Serve one model with ETAP and with the engine's own attention backends, and compare their steps."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    path = output or Path("results") / f"serve-{Path(scenario).stem}-{engine}.json"
    given = {"model": model, "weights": weights, "gpus": gpus, "layers": layers, "rank_of": rank_of}
    try:
        wanted = read_scenario(scenario)
        given["changes"] = wanted.changes | parse_changes(changes or [])
        wanted = wanted.model_copy(update={key: value for key, value in given.items() if value is not None})
        if (specific := getattr(wanted, engine)) is None:
            raise ValueError(f"--engine: wanted a table [{engine}] in {scenario}, got none")
        variables = specific.environment | parse_pairs("--env", env or [])
        specific = specific.model_copy(update={"environment": variables})
        cases = cases_of(wanted.points, [parse_tokens(text) for text in context or []], concurrency or [])
        folder, config, said = prepared(wanted, path.with_suffix("") / "model")
        backends, serving = backend or specific.backends, wanted.serving(folder, cases)
        for name in backends:
            Variant.parse(name)
        document = document_of(scenario, engine, wanted, specific, config, said, note)
        flags = [*specific.flags, *(flag or [])]
        run = Run(ENGINES[engine], wanted, specific, backends, cases, serving, flags, document, path, console, readings)
        if show_commands:
            return print_commands(run)
        must_have_gpus(max(run.variant(name).tp for name in backends))
        if output is None:
            results.must_be_new(path)
        results.must_be_writable(path)
        if config:
            dummy.write(Path(folder), config)
    except (ValueError, OSError) as error:
        console.print(f"serve: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    try:
        with stopping(None):
            run.all(turns)
    except Stopped as reason:
        document.stopped = str(reason)
    run.write()
    show(document, console)
    raise typer.Exit(2 if not document.rows else bool(document.failures))


def document_of(
    name: str, engine: str, scenario: Scenario, specific: EngineScenario, config: dict, weights: str, note: str
) -> Document:
    from etap_backend import _library

    about = provenance(
        "python -m bench serve", packages=(engine, *PACKAGES), library=_library.library_path(), note=note
    )
    return Document(
        **about.model_dump(),
        scenario=name,
        engine=engine,
        model=scenario.model,
        weights=weights,
        model_shape=config,
        gpus=scenario.gpus,
        draft_tokens=scenario.draft_tokens,
        acceptance=scenario.acceptance,
        environment={**scenario.environment, **specific.environment},
        plugins=scenario.plugins,
    )


def must_have_gpus(wanted: int) -> None:
    """Raises ValueError where there are fewer."""
    if (found := len(driver.gpus())) < wanted:
        raise ValueError(f"--gpus: wanted {wanted} GPUs, this machine shows {found}; --show needs none")


def print_commands(run: Run) -> None:
    """Commands of all servers, and of the load generator at every point."""
    port, result = free_port(), Path("result.json")
    made = [run.engine.server("python", run.serving, run.variant(name), port, run.flags) for name in run.backends]
    loads = [run.engine.load(run.serving, case.load, port, result) for case in run.cases]
    for command in [*made, *(["python", "-m", run.engine.load_module, *load] for load in loads)]:
        run.console.print(shlex.join(command), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

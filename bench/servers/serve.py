"""Servers of ETAP and of an engine's own attention backends in turns (A B A B), under the engine's load generator.

    python -m bench serve decode-short --engine vllm --turns 2
    python -m bench serve MY.toml --engine sglang --only 16K --backend etap --backend fa3

Each turn of a backend is a server of its own; with --together all backends' servers start at once, and each point goes
to one after the other: fewer starts, where flags divide the GPU's memory. Every reading has the host's speed beside
it: a fixed loop of plain Python, the slower of before and after. Of a point's readings those within 10% of each
other's host speed are compared, the others are void. The output is written after every reading, so a run that is cut
short (SIGTERM, Ctrl-C) keeps its readings; the same command goes on with what is missing in an output of the same
commit and kind of GPU. The exit status is 1 when a server or a point failed, and 2 when there is nothing to measure.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.common import gpus as driver
from bench.common import results
from bench.common.provenance import provenance
from bench.common.stopping import Stopped, stopping
from bench.models import dummy
from bench.models.plugins import plugins
from bench.servers import table
from bench.servers.client import Failed
from bench.servers.engines import ENGINES, SEED, Load, Serving, Sglang, Variant, Vllm, read_result
from bench.servers.generator import Generator, tail
from bench.servers.processes import Server, end_all, free_port, served
from bench.servers.scenario import Case, Scenario, cases_of, read_scenario

HOST_LOOPS, HOST_STEPS = 5, 400_000


def host_ms() -> float:
    """Milliseconds of a fixed loop of plain Python, the fastest of HOST_LOOPS: the speed of this machine's CPU."""

    def loop() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(HOST_STEPS):
            total += number
        return 1e3 * (time.perf_counter() - begin)

    return round(min(loop() for _ in range(HOST_LOOPS)), 2)


@dataclass(frozen=True)
class Running:
    """A backend's server, and the points that were sent to it."""

    backend: str
    server: Server
    room: int | None  # tokens of its cache
    sent: list[Case] = field(default_factory=list)


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
    fresh_seeds: int = field(default=0, init=False)

    def missing(self, backend: str, turn: int) -> list[Case]:
        """The points without a reading of this turn, in the file of an earlier call either."""
        there = {row["point"] for row in self.document["rows"] if (row["backend"], row["turn"]) == (backend, turn)}
        return [case for case in self.cases if case.text not in there]

    def variant(self, backend: str) -> Variant:
        return Variant.parse(backend, self.scenario.gpus)

    def fail(self, text: str) -> None:
        self.document["failures"].append(text)
        typer.secho(text, fg="red")
        results.write(self.document, self.output)

    def all(self, turns: int, together: bool) -> None:
        """Every turn of every backend; a server that fails does not end the run, a signal does."""
        rounds = range(1, turns + 1)
        alone = [([name], range(turn, turn + 1)) for turn in rounds for name in self.backends]
        with Generator(self.engine.load_module, self.output.with_suffix("") / "load.log") as generator:
            for names, those in [(self.backends, rounds)] if together else alone:
                self.on_servers(names, those, generator)

    def on_servers(self, names: list[str], turns: range, generator: Generator) -> None:
        """These turns of these backends, each point on one server after the other."""
        names = [name for name in names if any(self.missing(name, turn) for turn in turns)]
        try:
            with self.servers(names, turns[0]) as running:
                for turn in turns:
                    for case in self.cases:
                        for one in running:
                            self.point(one, generator, turn, case)
        except Failed as failure:
            self.fail(str(failure))

    @contextmanager
    def servers(self, names: list[str], turn: int) -> Iterator[list[Running]]:
        """Those of these backends' servers that start, which they do at the same time."""
        found = []
        with ExitStack() as stack:
            with ThreadPoolExecutor() as pool:
                starts = {name: pool.submit(stack.enter_context, self.started(name, turn)) for name in names}
                try:
                    wait(starts.values())
                except Stopped:
                    end_all()
                    raise
            for name, start in starts.items():
                try:
                    found.append(start.result())
                except Failed as failure:
                    self.fail(f"{name}: {failure}")
            yield found

    @contextmanager
    def started(self, name: str, turn: int) -> Iterator[Running]:
        """A backend's server. Raises Failed."""
        log = self.output.with_suffix("") / f"{name}-{turn}.log"
        typer.echo(f"{name}, turn {turn}: starting, log in {log}")
        seeded = ["seeded"] if self.serving.weights == "seeded" else []
        with plugins([*self.scenario.plugins, *seeded]) as more:
            options = {"log": log, "environment": self.document["environment"] | more}
            with served(self.engine, self.serving, self.variant(name), self.flags, **options) as server:
                room = self.engine.cache_tokens(server.log())
                server.about.update(cache_tokens=room, cuda_graphs=self.engine.in_graphs(server.log()))
                self.document["servers"][f"{name}, turn {turn}"] = server.about
                yield Running(name, server, room)

    def point(self, running: Running, generator: Generator, turn: int, case: Case) -> None:
        """One reading, unless it is there, the cache has no room for it, or the server has ended."""
        backend, room = running.backend, running.room
        if case not in self.missing(backend, turn) or running.server.process.ended() is not None:
            return
        if room is not None and case.tokens > room:
            text = f"{backend}, {case.text}: needs a cache of {case.tokens:,} tokens, the server has {room:,}"
            self.document["skipped"] += [text] * (text not in self.document["skipped"])
            return
        try:
            reading = self.of_case(running, generator, case)
        except Failed as failure:
            self.fail(f"{backend}, turn {turn}, {case.text}: {failure}")
            return
        row = {"backend": backend, "turn": turn, "point": case.text, **reading}
        self.document["rows"].append(row)
        results.write(self.document, self.output)
        typer.echo(f"{backend}, {case.text}: TPOT {row['tpot_ms']:.2f} ms, host {row['host_ms']:.1f} ms")

    def of_case(self, running: Running, generator: Generator, case: Case) -> dict:
        """A reading of a case, after a warm-up unless its prompts are in the prefix cache already."""
        cached, server = case.prefill == "cached", running.server
        if not any(case == one or case.in_cache_after(one) for one in running.sent):
            self.reading(server, generator, replace(case.load, output=2, seed=self.seed(cached)))
            running.sent.append(case)
        for _ in range(2):  # prompts that were evicted are cached again after one run
            reading = self.reading(server, generator, replace(case.load, seed=self.seed(cached)))
            share = reading["cached_share"]
            if share is None or case.cached_as_wanted(share):
                return reading
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


def prepared(scenario: Scenario, folder: Path) -> tuple[str, dict, str]:
    """The model's folder or name, its configuration ({} if unknown), and what its weights are.

    Raises ValueError when the configuration cannot be changed so, or heads do not divide.
    """
    if scenario.weights == "auto":
        return scenario.model, {}, "its own weights"
    changes = scenario.changes | ({"num_hidden_layers": scenario.layers} if scenario.layers else {})
    config = dummy.changed(scenario.model, changes, scenario.rank_of, scenario.gpus)
    if config["num_attention_heads"] % scenario.gpus:
        raise ValueError(f"gpus: wanted a divisor of {config['num_attention_heads']} heads, got {scenario.gpus}")
    rank = f", each GPU as one of {scenario.rank_of} ranks" if scenario.rank_of else ""
    return str(folder), config, f"{scenario.weights} weights, {config['num_hidden_layers']} layers{rank}"


def main(
    scenario: Annotated[str, typer.Argument(help="A name in configs/scenarios.toml, or a TOML file `like` one.")],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose server and load generator.")] = "vllm",
    backend: Annotated[list[str] | None, typer.Option(help="BACKEND[+fp8][+math][@dcpN]; repeatable.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Points with this text, as in '16 x 16K'; repeatable.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each backend.")] = 2,
    flag: Annotated[list[str] | None, typer.Option(help="A server's flag more, as --flag=--x=y; repeatable.")] = None,
    together: Annotated[bool, typer.Option("--together", help="All servers at once; flags divide the memory.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON; results/serve-<scenario>-<engine>.json if absent.")] = None,
    note: Annotated[str, typer.Option(help="Put into the output.")] = "",
    commands: Annotated[bool, typer.Option("--show", help="Print the commands; run and write nothing.")] = False,
) -> None:
    """Serve one model with ETAP and with the engine's own attention backends, and compare their steps."""
    path = output or Path("results") / f"serve-{Path(scenario).stem}-{engine}.json"
    try:
        wanted = read_scenario(scenario)
        cases = cases_of(wanted.points, only or [])
        folder, config, made = prepared(wanted, path.with_suffix("") / "model")
        about = {"scenario": scenario, "weights": made, "model_shape": config, "note": note}
        document, specific = document_of(engine, wanted, about), wanted.of(engine)
        serving, flags = wanted.serving(folder, cases), [*specific.flags, *(flag or [])]
        run = Run(ENGINES[engine], wanted, backend or specific.backends, cases, serving, flags, document, path)
        if commands:
            return print_commands(run)
        earlier = goes_on_from(path, document)
        make_ready(run, new=output is None and not earlier)
        document |= {key: earlier[key] for key in ("date", "rows") if earlier}
    except (ValueError, OSError) as error:
        typer.secho(f"serve: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    try:
        with stopping():
            run.all(turns, together)
            document["complete"] = True
    except Stopped as reason:
        document["stopped"] = str(reason)
    results.write(document, path)
    typer.echo(table.text(path.stem, document))
    raise typer.Exit(2 if not document["rows"] else bool(document["failures"]))


def goes_on_from(path: Path, document: dict) -> dict:
    """The results file of an earlier call of this run that did not end; {} where there is none."""
    found = results.read_json(path) if path.exists() else None
    same = ("kind", "commit", "gpu", "command", "complete")
    return found if isinstance(found, dict) and all(found.get(key) == document[key] for key in same) else {}


def make_ready(run: Run, new: bool) -> None:
    """Write the model's folder. Raises ValueError without enough GPUs, or when the output cannot be written."""
    found, least = len(driver.gpus()), max(run.variant(name).tp for name in run.backends)
    if found < least:
        raise ValueError(f"gpus: wanted {least}, this machine shows {found}; --show needs none")
    if new:
        results.must_be_new(run.output)
    results.must_be_writable(run.output)
    if config := run.document["model_shape"]:
        dummy.write(Path(run.serving.model), config)


def document_of(engine: str, scenario: Scenario, about: dict) -> dict:
    """A results file without readings."""
    environment = {**scenario.environment, **scenario.of(engine).environment}
    document = {
        "kind": "serve",
        "engine": engine,
        **provenance("python -m bench serve"),
        **about,
        "environment": environment,
    }
    document |= scenario.model_dump(include={"model", "gpus", "draft_tokens", "acceptance", "plugins"})
    return document | {"stopped": None, "servers": {}, "skipped": [], "failures": [], "complete": False, "rows": []}


def print_commands(run: Run) -> None:
    """Commands of all servers, and of the load generator at every point."""
    port, result = free_port(), Path("result.json")
    made = [run.engine.server("python", run.serving, run.variant(name), port, run.flags) for name in run.backends]
    loads = [run.engine.load(run.serving, case.load, port, result) for case in run.cases]
    for command in [*made, *(["python", "-m", run.engine.load_module, *load] for load in loads)]:
        typer.echo(shlex.join(command))


if __name__ == "__main__":
    typer.run(main)

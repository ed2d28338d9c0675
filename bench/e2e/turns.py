"""A run of `etap e2e`: a server for each turn of a backend, and every point of the scenario driven on it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Generator as Steps
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from rich.console import Console

from bench.common import results
from bench.e2e import profiling
from bench.e2e.model import MARGIN_TOKENS
from bench.e2e.report import line
from bench.e2e.results_file import Document, Failed, Measured, Profile, Reading, Server, Skipped
from bench.e2e.scenario import Case, EngineScenario, Scenario, Turn
from bench.serving import client
from bench.serving.engines import PAGE_TOKENS, SEED, Engine, Load, Serving, read_result
from bench.serving.lifecycle import Generator, end_all, tail
from bench.serving.servers import Served, served
from bench.common.stopping import Stopped

MOST_CACHED = 0.05  # of prompts that should be new: a common first page at most
FIRST_READINGS = 2
HOST_LOOPS, HOST_LOOP_STEPS = 5, 400_000

Row = Measured | Skipped | Failed


def host_ms() -> float:
    """Milliseconds of a fixed loop of plain Python, the fastest of a few: how fast this machine's CPU is just now."""

    def loop() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(HOST_LOOP_STEPS):
            total += number
        return 1e3 * (time.perf_counter() - begin)

    return round(min(loop() for _ in range(HOST_LOOPS)), 2)


def cached_share(engine: Engine, before: dict[str, float], after: dict[str, float]) -> float | None:
    """Share of the prompt tokens between two looks at /metrics that the prefix cache had; None if they do not say."""
    counts = [engine.cached_and_asked(samples) for samples in (before, after)]
    if None in counts or counts[1][1] <= counts[0][1]:
        return None
    return (counts[1][0] - counts[0][0]) / (counts[1][1] - counts[0][1])


def least_cached(case: Case) -> float:
    """The last page of a prompt is computed again, and the tokenizer may have moved one more."""
    return max(0.0, 0.95 * (1 - 2 * PAGE_TOKENS / case.input))


def cached_as_wanted(case: Case, share: float) -> bool:
    """Whether the prefix cache had of a reading's prompts what it should: all, a common prefix, or nothing."""
    if case.prefix:
        return share >= 0.9 * (1 - 1 / case.load.prompts) * case.prefix / case.input
    return least_cached(case) <= share if case.prefill == "cached" else share <= MOST_CACHED


def of_cache(backend: str, serving: Serving) -> tuple[str, Serving]:
    """What a server is asked for by a backend's name: `NAME+fp8` has an FP8 cache, whatever the scenario has.

    Raises ValueError for another cache.
    """
    name, plus, cache = backend.partition("+")
    if plus and cache != "fp8":
        raise ValueError(f"--backend: wanted NAME or NAME+fp8, got {backend}")
    return name, replace(serving, fp8_cache=True) if plus else serving


@dataclass
class Run:
    """One run; `document` is what is written, also when it ends half way."""

    engine: Engine
    scenario: Scenario
    specific: EngineScenario
    serving: Serving
    cases: list[Case]
    turns: list[Turn]
    python: str
    flags: list[str]
    output: Path
    document: Document
    deadline: float | None
    console: Console
    profile: tuple[int, int] | None = None  # concurrency and input length of the point that is profiled
    together: bool = False  # all servers are there at once
    stopped: bool = False  # servers were ended early, wherever they were
    fresh_seeds: int = 0
    replaces_older: bool = field(init=False)  # whether the output is a file of before this run
    writing: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self):
        self.replaces_older = self.output.exists()

    @property
    def logs(self) -> Path:
        return self.output.with_suffix("")

    @property
    def number(self) -> int:
        """This run's place among those that the document has rows of."""
        return len(self.document.all_runs) - 1

    def environment(self) -> dict[str, str]:
        return {**self.scenario.environment, **self.specific.environment, **self.engine.environment(self.serving)}

    def server_flags(self, backend: str) -> list[str]:
        profiled = profiling.flags(self.engine.name, self.traces(backend)) if self.profile else []
        return [*self.specific.flags, *self.flags, *profiled]

    def traces(self, backend: str) -> Path:
        return self.logs.absolute() / f"{self.engine.name}-{backend.lower()}-traces"

    def seconds(self, most: float) -> float:
        """What `most` seconds are before the end of the run. Raises Stopped when nothing is left of it."""
        left = math.inf if self.deadline is None else self.deadline - time.monotonic()
        if left <= 0:
            raise Stopped("by the time limit")
        return min(most, left)

    def write(self) -> None:
        """Write the document; over an older file only when there is a reading."""
        with self.writing:
            if self.document.measured() or not self.replaces_older:
                results.write(self.document, self.output)

    def tell(self, backend: str, about: dict) -> None:
        """Put what is known of a server into the document, which other threads may be writing."""
        with self.writing:
            self.document.servers[backend] = Server(**about)

    def row(self, backend: str, case: Case) -> Row:
        """The case's row as it stands in the document, or a new one."""
        fresh = Measured(backend=backend, run=self.number, **case.describe())
        return next((row for row in self.document.rows if row.backend == backend and case.same_as(row)), fresh)

    def put(self, row: Row) -> Row:
        """Replace the row of this backend and case, or append it."""
        rows = self.document.rows
        place = next((n for n, one in enumerate(rows) if one.load_of == row.load_of), None)
        if place is None:
            rows.append(row)
        else:
            rows[place] = row
        self.write()
        return row

    def missing(self, turn: Turn) -> list[Case]:
        """Cases without the readings that they have after this turn; one that failed is tried again."""

        def done(case: Case) -> bool:
            match self.row(turn.backend, case):
                case Skipped():
                    return True
                case Measured(readings=readings):
                    return len(readings) >= turn.readings(case)
            return False

        return [case for case in self.cases if not done(case)]

    def all(self) -> None:
        """Every turn. Raises Stopped when the run's time is up."""
        waiting = [turn for turn in self.turns if self.missing(turn)]
        log = self.logs / f"{self.engine.name}.load.log"
        with Generator(self.python, self.engine.load_module, log, self.environment()) as generator:
            for some in [waiting] if self.together else [[turn] for turn in waiting]:
                self.in_steps([self.turn(turn, generator) for turn in some])

    def in_steps(self, turns: list[Steps[bool]]) -> None:
        """Start the servers of these turns at once, read from one after the other, and end all at once."""

        def step(turn: Steps[bool]) -> bool:
            return next(turn, False)

        try:
            with ThreadPoolExecutor(len(turns) or None) as pool:
                try:
                    measuring = [turn for turn, ready in zip(turns, pool.map(step, turns), strict=True) if ready]
                    while measuring:
                        measuring = [turn for turn in measuring if step(turn)]
                    list(pool.map(step, turns))
                except Stopped:
                    self.stopped = True
                    end_all()  # servers may still be starting in the pool's threads
                    raise
        finally:
            for turn in turns:
                turn.close()

    def turn(self, turn: Turn, generator: Generator) -> Steps[bool]:
        """One backend's turn: True with its server ready and after each reading, False when all are made, and the
        server's end. A server that fails does not end the run."""
        backend, cases = turn.backend, self.missing(turn)

        def stays(row: Row) -> bool:
            """What an earlier turn of this run measured goes on; of an earlier run, or failed, it begins anew."""
            goes_on = turn.number > 1 and not isinstance(row, Failed) and row.run == self.number
            return row.backend != backend or goes_on or not any(case.same_as(row) for case in cases)

        with self.writing:
            self.document.rows = list(filter(stays, self.document.rows))
        about = self.document.servers.get(backend, Server()).model_dump(exclude={"error"})
        try:
            yield from self.serve(turn, cases, about, generator)
        except client.Failed as failure:
            self.seconds(1)  # a time limit that ends a wait is not the server's fault
            if self.stopped:
                return
            about["error"] = str(failure)
            self.console.print(f"{backend}: {failure}", style="red", markup=False, highlight=False)
        finally:
            self.tell(backend, about)
            self.write()

    def serve(self, turn: Turn, cases: list[Case], about: dict, generator: Generator) -> Steps[bool]:
        """One server and all that is measured on it."""
        backend, again = turn.backend, f"-{turn.number}" if turn.number > 1 else ""
        log = self.logs / f"{self.engine.name}-{backend.lower()}{again}.log"
        self.console.print(f"[bold]{backend}[/]: starting, log in {log}")
        name, serving = of_cache(backend, self.serving)
        with served(
            self.engine,
            serving,
            name,
            self.server_flags(backend),
            log=log,
            seconds=self.seconds(self.scenario.ready_seconds),
            about=about,
            environment=self.environment(),
            python=self.python,
        ) as server:
            about["full_cuda_graphs"] = self.engine.in_full_graphs(server.text())
            about["cache_tokens"] = room = self.engine.cache_tokens(server.text())
            self.tell(backend, about)
            self.console.print(f"{backend}: ready after {about['seconds_to_ready']:.0f} s, cache of {room} tokens")
            yield True
            loaded = Loaded(self, turn, server, generator, room)
            yield from loaded.all(cases)
            if server.process.ended() is None:
                loaded.profiled()
            yield False

    def seed(self, cached: bool) -> int:
        """The one seed for prompts that are to be known already, a new one for prompts that are not."""
        self.fresh_seeds += not cached
        return SEED if cached else SEED + self.fresh_seeds


@dataclass
class Loaded:
    """One turn's server with the load generator on it."""

    run: Run
    turn: Turn
    server: Served
    generator: Generator
    room: int | None  # tokens that the server's cache holds

    def all(self, cases: list[Case]) -> Steps[bool]:
        """All cases: two readings of each, then the rest, so that a cut costs readings before points."""
        sent: list[Case] = []
        for first in (FIRST_READINGS, math.inf):
            for case in cases:
                most, row = min(first, self.turn.readings(case)), self.run.row(self.turn.backend, case)
                if not isinstance(row, Measured) or len(row.readings) >= most:
                    continue
                self.run.seconds(1)
                if self.room is not None and case.tokens > self.room:
                    reason = f"needs a cache of {case.tokens:,} tokens, the server has {self.room:,}"
                    row = self.run.put(Skipped(reason=reason, run=row.run, **row.load_of))
                else:
                    row = yield from self.case(case, row, most, case in sent or any(map(case.in_cache_after, sent)))
                    sent.append(case)
                if not isinstance(row, Measured) or row.readings:
                    self.run.console.print(line(row, self.run.scenario.gpus), markup=False, highlight=False)
                if self.server.process.ended() is not None:
                    return  # the server's end reports it; the other cases stay to be measured

    def case(self, case: Case, row: Measured, most: int, known: bool) -> Steps[bool, None, Row]:
        """Readings of one case, `most` in all; `known` when its prompts are in the prefix cache already. A load
        generator that fails costs the case, not the server."""
        load, cached = case.load, case.prefill == "cached"

        def put(**changes) -> Measured:
            return self.run.put(row.model_copy(update=changes))

        row = put()
        try:
            if not known:
                # Fills the prefix cache where that is wanted, and lets the server compile what it has not met yet. One
                # token would have no time per token.
                row = put(warm_up=self.reading(replace(load, output=2, seed=self.run.seed(cached))))
            evicted = False
            while len(row.readings) < most:
                reading = self.reading(replace(load, seed=self.run.seed(cached)))
                share = reading.cached_share
                if share is not None and not cached_as_wanted(case, share):
                    if cached and not evicted:  # it is in the cache again now
                        row, evicted = put(discarded=reading), True
                        continue
                    said = f"{row.load_text}, but {share:.0%} of the prompts' tokens were in the prefix cache"
                    raise client.Failed(said)
                row = put(readings=[*row.readings, reading])
                yield True
            return put(complete=len(row.readings) == case.repeats)
        except client.Failed as failure:
            self.run.seconds(1)
            return self.run.put(Failed(error=str(failure), readings=row.readings, run=row.run, **row.load_of))

    def reading(self, load: Load) -> Reading:
        run, url = self.run, self.server.url
        port = int(url.rpartition(":")[2])
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            host, before, begin = host_ms(), client.metrics(url), time.monotonic()
            arguments = run.engine.load(run.serving, load, port, result)
            self.generator.run(arguments, run.seconds(run.scenario.point_seconds))
            seconds = round(time.monotonic() - begin, 3)
            try:
                found = read_result(result, load.prompts)
            except (OSError, ValueError, KeyError) as error:
                said = f"the load generator's result: {error!r}\n{tail(self.generator.log, 15)}"
                raise client.Failed(said) from error
            share = cached_share(run.engine, before, client.metrics(url))
            return Reading(**found, seconds=seconds, cached_share=share, host_ms=(host, host_ms()))

    def profiled(self) -> None:
        """Attention's share of GPU time in decode steps of the wanted point. After all readings of this server: torch's
        profiler may leave its hooks in the driver."""
        run, backend = self.run, self.turn.backend
        wanted = [case for case in run.cases if (case.concurrency, case.input) == run.profile]
        found = [(case, row) for case in wanted if isinstance(row := run.row(backend, case), Measured) and row.readings]
        if not found or (found[0][1].profile and found[0][1].profile.attention_share is not None):
            return
        case, row = found[0]
        last = row.readings[-1]
        # Long enough that the profiler, which takes a while to start, meets full decode steps.
        output = max(case.output, math.ceil(1e3 * profiling.LOAD_SECONDS / last.median_tpot_ms))
        output = min(output, profiling.OUTPUT_TOKENS, run.serving.max_context - MARGIN_TOKENS - case.input)
        load = replace(case.load, output=output, seed=run.seed(case.prefill == "cached"))
        until = last.seconds - last.duration + max(2e-3 * last.median_ttft_ms, last.duration / 2)
        folder = run.traces(backend)
        try:
            with profiling.started_later(run.engine.name, self.server.url, folder, until):
                self.reading(load)
            profile = profiling.read(folder, run.seconds(profiling.EXPORT_SECONDS))
        except (client.Failed, OSError, ValueError, KeyError) as failure:
            run.seconds(1)
            profile = Profile(error=f"{type(failure).__name__}: {failure}")
        run.put(row.model_copy(update={"profile": profile}))
        run.console.print(f"  {backend}: {profiling.line(profile)}", markup=False, highlight=False)

"""`etap e2e`: ETAP and an engine's own attention backends behind the same server flags and the same load, in turn.

For each backend a server is started, every point of the scenario is driven with the engine's own load generator, and
the server is ended again. The file is whole after every reading, whatever ends the run; docs/e2e.md has the method.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field
from rich.console import Console

import etap_backend
from etap_backend import configs, dummy_model, e2e_profile, e2e_report, plan, report
from etap_backend.bench import Stopped, stopping
from etap_backend.configs import Strict
from etap_backend.engines import ENGINES, SEED, Engine, Load, Serving, read_result
from etap_backend.lifecycle import Failed, Generator, Process, free_port, server, tail

MARGIN_TOKENS = 64  # beyond input and output, for a request that the tokenizer made a little longer
MEMORY_SECONDS = 30
MOST_CACHED = 0.05  # of prompts that should be new: a common first page at most
PAGE_TOKENS = 64
FIRST_READINGS = 2
FIRST_TURN = 0.3
HOST_LOOPS, HOST_LOOP_STEPS = 5, 400_000
SMALL_MOE_LAYERS = 2


class TurnOver(Exception):
    """A backend's share of the time limit is used up."""


class Point(Strict):
    """Requests of one length, at one or several concurrencies.

    `prefill = "served"` is serving as it is: prompts are new, and prefill of some requests runs between the decode
    steps of others. With "cached" the same prompts are sent once before, so that their cache is there already and a
    reading is decode alone: what is long about a long context is then paid once for all readings.
    """

    input: int = Field(gt=0)
    output: int = Field(gt=1)
    concurrency: list[int] = Field(min_length=1)
    prefill: Literal["served", "cached"] = "served"
    waves: int = Field(default=1, ge=1)  # prompts = waves x concurrency
    repeats: int = Field(default=1, ge=1)


class EngineScenario(Strict):
    """What only one engine understands."""

    backends: list[str] = Field(min_length=1)
    flags: list[str] = []
    environment: dict[str, str] = {}


class Scenario(Strict):
    """A file of configs/e2e."""

    title: str
    model: str  # a name of configs/models is served with dummy weights, anything else with its own
    gpus: int = Field(gt=0)
    pipeline_parallel: int = Field(default=1, ge=1)
    data_parallel: int = Field(default=1, ge=1)
    draft_tokens: int = Field(default=0, ge=0)
    acceptance: float | None = Field(default=None, ge=1)
    kv_dtype: Literal["same", "fp8"] = "same"  # of the KV cache: the model's type or e4m3
    environment: dict[str, str] = {}
    ready_seconds: float = Field(default=600, gt=0)
    point_seconds: float = Field(default=300, gt=0)
    points: list[Point] = Field(min_length=1)
    vllm: EngineScenario | None = None
    sglang: EngineScenario | None = None

    @property
    def tensor_parallel(self) -> int:
        """Raises ValueError when the GPUs do not divide."""
        over = self.pipeline_parallel * self.data_parallel
        if self.gpus % over:
            raise ValueError(f"gpus: wanted a multiple of pipeline x data parallel = {over}, got {self.gpus}")
        return self.gpus // over


def read_scenario(name: str) -> Scenario:
    """A shipped scenario by name, or a file. `like = "other"` takes over what that scenario has and this has not;
    of tables key by key. Raises ValueError, naming file and key, when it is not one."""
    path = configs.find("e2e", name)
    content = _with_inherited(configs.read_toml_table(path))
    try:
        return configs.parse(Scenario, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _with_inherited(content: dict) -> dict:
    if (base := content.pop("like", None)) is None:
        return content
    inherited = _with_inherited(configs.read_toml_table(configs.find("e2e", base)))
    tables = {
        key: value | content[key] for key, value in inherited.items() if isinstance(value, dict) and key in content
    }
    return inherited | content | tables


@dataclass(frozen=True)
class Case:
    """One row of the result for one backend."""

    input: int
    output: int
    concurrency: int
    prefill: str
    waves: int
    repeats: int

    @property
    def load(self) -> Load:
        return Load(self.input, self.output, self.concurrency, self.waves * self.concurrency)

    @property
    def tokens(self) -> int:
        """Cache that its requests need at the same time."""
        prompts = self.load.prompts if self.prefill == "cached" else self.concurrency
        return prompts * -(-(self.input + self.output) // PAGE_TOKENS) * PAGE_TOKENS

    def in_cache_after(self, other: Case) -> bool:
        """Whether `other` left this case's prompts in the prefix cache: the load generators give fewer and shorter
        prompts of one seed the same beginnings."""
        both_cached = self.prefill == other.prefill == "cached"
        return both_cached and self.input <= other.input and self.load.prompts <= other.load.prompts

    def describe(self) -> dict:
        return {key: getattr(self, key) for key in ("input", "output", "concurrency", "prefill", "waves")}

    def same_as(self, row: dict) -> bool:
        return self.describe() == {key: row[key] for key in self.describe()}


def cases_of(points: list[Point]) -> list[Case]:
    return [
        Case(point.input, point.output, concurrency, point.prefill, point.waves, point.repeats)
        for point in points
        for concurrency in point.concurrency
    ]


@dataclass(frozen=True)
class Turn:
    """One server of a backend: the `number`-th of at most `of`, which share the readings."""

    backend: str
    number: int = 1
    of: int = 1

    def readings(self, case: Case) -> int:
        """How many a case has after it."""
        return -(-case.repeats * self.number // self.of)


def turns_of(backends: list[str], times: int) -> list[Turn]:
    """The backends in this order, `times` over. One that is named twice has two turns in each, and one that is named
    less often than another has fewer readings: every server takes as many."""
    order = backends * times
    most = max(map(order.count, order))
    return [Turn(backend, order[: place + 1].count(backend), most) for place, backend in enumerate(order)]


def host_ms() -> float:
    """Milliseconds of a fixed loop of plain Python, the fastest of a few: how fast this machine's CPU is just now."""

    def loop() -> float:
        begin, total = time.perf_counter(), 0
        for number in range(HOST_LOOP_STEPS):
            total += number
        return 1e3 * (time.perf_counter() - begin)

    return round(min(loop() for _ in range(HOST_LOOPS)), 2)


def metrics_of(url: str) -> str:
    with suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return answer.read().decode()
    return ""


def cached_share(engine: Engine, before: str, after: str) -> float | None:
    """Share of the prompt tokens between two texts of /metrics that the prefix cache had; None if they do not say."""
    counts = [engine.cached_and_asked(text) for text in (before, after)]
    if None in counts or counts[1][1] <= counts[0][1]:
        return None
    return (counts[1][0] - counts[0][0]) / (counts[1][1] - counts[0][1])


def least_cached(case: Case) -> float:
    """The last page of a prompt is computed again, and the tokenizer may have moved one more."""
    return max(0.0, 0.95 * (1 - 2 * PAGE_TOKENS / case.input))


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
    document: dict
    deadline: float | None
    console: Console
    profile: tuple[int, int] | None = None  # concurrency and input length of the point that is profiled
    throw_away: Serving | None = None  # of the small model whose server fills the caches
    turn_end: float | None = None
    fresh_seeds: int = 0

    @property
    def logs(self) -> Path:
        return self.output.with_suffix("")

    def environment(self) -> dict[str, str]:
        return {**self.scenario.environment, **self.specific.environment, **self.engine.environment(self.serving)}

    def command(self, backend: str, port: int) -> list[str]:
        flags = [*self.specific.flags, *self.flags]
        if self.profile:
            flags += e2e_profile.flags(self.engine.name, self.traces(backend))
        return self.engine.server(self.python, self.serving, backend, port, flags)

    def traces(self, backend: str) -> Path:
        return self.logs.absolute() / f"{self.engine.name}-{backend.lower()}-traces"

    def seconds(self, most: float) -> float:
        """What `most` seconds are before the end of this turn. Raises Stopped when nothing is left of the run, TurnOver
        when nothing is left for this backend."""
        if self.deadline is None:
            return most
        now = time.monotonic()
        if now >= self.deadline:
            raise Stopped("by the time limit")
        if now >= (end := self.turn_end or self.deadline):
            raise TurnOver
        return min(most, end - now)

    def short_of_time(self) -> bool:
        """Whether what is left of this turn is needed for the profile."""
        left = math.inf if self.turn_end is None else self.turn_end - time.monotonic()
        return self.profile is not None and left < e2e_profile.SECONDS

    def write(self) -> None:
        report.write(self.document, self.output)

    @property
    def number(self) -> int:
        """This run's place among those that the document has rows of."""
        return len(e2e_report.runs_of(self.document)) - 1

    def missing(self, turn: Turn) -> list[Case]:
        """Cases without the readings that they have after this turn; one that failed is tried again."""
        rows = [row for row in self.document["rows"] if row["backend"] == turn.backend]

        def done(case: Case, row: dict) -> bool:
            measured = "skipped" in row or ("error" not in row and len(row["readings"]) >= turn.readings(case))
            return measured and case.same_as(row)

        return [case for case in self.cases if not any(done(case, row) for row in rows)]

    def all(self) -> None:
        """Every turn, each with its share of the time that is left, so that a run that is cut short has something of
        all. Raises Stopped when it is."""
        waiting = [turn for turn in self.turns if self.missing(turn)]
        log = self.logs / f"{self.engine.name}.load.log"
        cut = []
        with Generator(self.python, self.engine.load_module, log, self.environment()) as generator:
            if self.throw_away and waiting:
                self.thrown_away(waiting[0].backend, generator)
            for number, turn in enumerate(waiting):
                if self.deadline is not None:
                    now = time.monotonic()
                    turns = len(waiting) - number
                    # The first server compiles what the others find in the caches, and gets a longer turn for it.
                    turns -= FIRST_TURN if number == 0 < turns - 1 else 0
                    self.turn_end = now + (self.deadline - now) / turns
                if not self.turn(turn, generator):
                    cut.append(turn.backend)
        if cut:
            raise Stopped(f"by the time limit, in the turn of {', '.join(dict.fromkeys(cut))}")

    def thrown_away(self, backend: str, generator: Generator) -> None:
        """A server of a small model, driven once: what it compiles, the servers that are measured find in the caches.
        Nothing of it is reported."""
        scratch = {**self.document, "rows": [], "servers": {}}
        first = replace(self.cases[0], repeats=1)
        small = replace(
            self, serving=self.throw_away, cases=[first], document=scratch, output=self.logs / "thrown-away.json",
            profile=None, console=Console(quiet=True),
        )  # fmt: skip
        self.console.print(f"{backend}, a small model, thrown away: logs in {small.logs}")
        small.turn(Turn(backend), generator)

    def turn(self, turn: Turn, generator: Generator) -> bool:
        """One backend's turn; False when its time was up before it was through."""
        backend, cases = turn.backend, self.missing(turn)

        def stays(row: dict) -> bool:
            """What an earlier turn of this run measured goes on; of an earlier run, or failed, it begins anew."""
            goes_on = turn.number > 1 and "error" not in row and row.get("run", 0) == self.number
            return row["backend"] != backend or goes_on or not any(case.same_as(row) for case in cases)

        self.document["rows"] = list(filter(stays, self.document["rows"]))
        record = self.document["servers"].setdefault(backend, {})
        record.pop("error", None)
        try:
            try:
                self.backend(turn, cases, record, generator)
            except Failed as failure:
                # A time limit that ends a wait is not the server's fault.
                self.seconds(1)
                record["error"] = str(failure)
                self.console.print(f"{backend}: {failure}", style="red", markup=False, highlight=False)
        except TurnOver:
            self.console.print(f"{backend}: its share of the time limit is over", style="yellow")
            return False
        finally:
            self.write()
        return True

    def backend(self, turn: Turn, cases: list[Case], record: dict, generator: Generator) -> None:
        """One server and all that is measured on it."""
        backend, port = turn.backend, free_port()
        url, command = f"http://127.0.0.1:{port}", self.command(backend, port)
        again = f"-{turn.number}" if turn.number > 1 else ""
        log = self.logs / f"{self.engine.name}-{backend.lower()}{again}.log"
        log.unlink(missing_ok=True)
        record |= {"command": shlex.join(["python", *command[1:]]), "log": str(log)}
        self.console.print(f"[bold]{backend}[/]: starting, log in {log}")
        begin, environment = time.monotonic(), self.environment()
        with (
            memory_given_back(),
            server(command, url, log, environment, self.seconds(self.scenario.ready_seconds)) as process,
        ):
            record["seconds_to_ready"] = round(time.monotonic() - begin, 1)
            text = log.read_text(errors="replace")
            if not self.engine.in_use(backend, text):
                raise Failed(f"the server's log does not say that {backend} is in use:\n{tail(log)}")
            record["full_cuda_graphs"] = self.engine.in_full_graphs(text)
            record["cache_tokens"] = room = self.engine.cache_tokens(text)
            self.console.print(f"{backend}: ready after {record['seconds_to_ready']:.0f} s, cache of {room} tokens")
            cut = self.measure(turn, cases, room, generator, port, process)
            if process.ended() is None:
                self.profiled(backend, generator, port)
            if cut:
                raise TurnOver

    def measure(
        self, turn: Turn, cases: list[Case], room: int | None, generator: Generator, port: int, process: Process
    ) -> bool:
        """All cases of one server: two readings of each, then the rest, so that a cut costs readings before points.
        True when it was cut, to leave time for the profile."""
        rows = {case: self.row(turn.backend, case) for case in cases}
        sent: list[Case] = []
        for first in (FIRST_READINGS, math.inf):
            for case, row in rows.items():
                most = min(first, turn.readings(case))
                if "skipped" in row or "error" in row or len(row["readings"]) >= most:
                    continue
                if self.short_of_time():
                    return True
                self.seconds(1)
                if row not in self.document["rows"]:
                    self.document["rows"].append(row)
                if room is not None and case.tokens > room:
                    row["skipped"] = f"needs a cache of {case.tokens:,} tokens, the server has {room:,}"
                else:
                    known = case in sent or any(map(case.in_cache_after, sent))
                    self.case(case, row, generator, port, most, known)
                    sent.append(case)
                self.write()
                if {"tpot_ms", "skipped", "error"} & row.keys():
                    self.console.print(e2e_report.line(row), markup=False, highlight=False)
                if process.ended() is not None:
                    return False  # the server's end reports it; the other cases stay to be measured
        return False

    def row(self, backend: str, case: Case) -> dict:
        """The case's row as an earlier turn left it, or a new one."""
        fresh = {"backend": backend, **case.describe(), "run": self.number, "readings": []}
        rows = (row for row in self.document["rows"] if row["backend"] == backend and case.same_as(row))
        return next(rows, fresh)

    def case(self, case: Case, row: dict, generator: Generator, port: int, most: int, known: bool) -> None:
        """Readings of one case, `most` in all; `known` when its prompts are in the prefix cache already. A load
        generator that fails costs the case, not the server."""
        load, cached = case.load, case.prefill == "cached"
        try:
            if not known:
                # Fills the prefix cache where that is wanted, and lets the server compile what it has not met yet. One
                # token would have no time per token.
                row["warm_up"] = self.reading(replace(load, output=2, seed=self.seed(cached)), generator, port)
            evicted = False
            while len(row["readings"]) < most:
                if self.short_of_time():
                    return
                reading = self.reading(replace(load, seed=self.seed(cached)), generator, port)
                share = reading["cached_share"]
                if share is not None and not (least_cached(case) <= share if cached else share <= MOST_CACHED):
                    if cached and not evicted:  # it is in the cache again now
                        row["discarded"], evicted = reading, True
                        continue
                    raise Failed(
                        f"prefill {case.prefill}, but {share:.0%} of the prompts' tokens were in the prefix cache"
                    )
                row["readings"].append(reading)
                row |= e2e_report.summary(row["readings"], self.scenario.gpus)
                self.write()
            row["complete"] = len(row["readings"]) == case.repeats
        except Failed as failure:
            self.seconds(1)
            row["error"] = str(failure)

    def profiled(self, backend: str, generator: Generator, port: int) -> None:
        """Attention's share of GPU time in decode steps of the wanted point. After all readings of this server: torch's
        profiler may leave its hooks in the driver."""
        rows = [row for row in self.document["rows"] if row["backend"] == backend and row["readings"]]
        row = next((row for row in rows if (row["concurrency"], row["input"]) == self.profile), None)
        case = next((case for case in self.cases if row and case.same_as(row)), None)
        if case is None or "attention_share" in row.get("profile", {}):
            return
        last = row["readings"][-1]
        # Long enough that the profiler, which takes a while to start, meets full decode steps.
        output = max(case.output, math.ceil(1e3 * e2e_profile.LOAD_SECONDS / last["median_tpot_ms"]))
        output = min(output, e2e_profile.OUTPUT_TOKENS, self.serving.max_context - MARGIN_TOKENS - case.input)
        load = replace(case.load, output=output, seed=self.seed(case.prefill == "cached"))
        until = last["seconds"] - last["duration"] + max(2e-3 * last["median_ttft_ms"], last["duration"] / 2)
        folder = self.traces(backend)
        try:
            with e2e_profile.started_later(self.engine.name, f"http://127.0.0.1:{port}", folder, until):
                self.reading(load, generator, port)
            row["profile"] = e2e_profile.read(folder, self.seconds(e2e_profile.EXPORT_SECONDS))
        except (Failed, OSError, ValueError, KeyError) as failure:
            self.seconds(1)
            row["profile"] = {"error": f"{type(failure).__name__}: {failure}"}
        self.console.print(f"  {backend}: {e2e_profile.line(row['profile'])}", markup=False, highlight=False)

    def seed(self, cached: bool) -> int:
        """The one seed for prompts that are to be known already, a new one for prompts that are not."""
        self.fresh_seeds += not cached
        return SEED if cached else SEED + self.fresh_seeds

    def reading(self, load: Load, generator: Generator, port: int) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            result, url = Path(folder) / "result.json", f"http://127.0.0.1:{port}"
            host, before, begin = host_ms(), metrics_of(url), time.monotonic()
            generator.run(self.engine.load(self.serving, load, port, result), self.seconds(self.scenario.point_seconds))
            seconds = time.monotonic() - begin
            try:
                return read_result(result, load.prompts) | {
                    "seconds": round(seconds, 3),  # of the whole run, the load generator's own preparations included
                    "cached_share": cached_share(self.engine, before, metrics_of(url)),
                    "host_ms": [host, host_ms()],
                }
            except (OSError, ValueError, KeyError) as error:
                raise Failed(f"the load generator's result: {error!r}\n{tail(generator.log, 15)}") from error


def nvidia_smi(query: str, *options: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *options]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return [line.strip() for line in output.splitlines()]
    return []


@contextmanager
def memory_given_back() -> Iterator[None]:
    """After the block, wait until the GPUs have the memory back; the driver takes a moment after a process."""

    # Of a machine that is shared, what others do on other GPUs is not waited for.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ours = ["-i", visible] if visible else []

    def used() -> int:
        return sum(int(line) for line in nvidia_smi("memory.used", *ours) if line.isdigit())

    before = used()
    yield
    end = time.monotonic() + MEMORY_SECONDS
    while used() > before + 2048 and time.monotonic() < end:
        time.sleep(0.5)


def provenance(engine: Engine, python: str) -> dict:
    """What a figure is worth nothing without."""
    packages = (engine.package, "torch", "apache-tvm-ffi", "flashinfer-python", "triton", "etap-backend")
    program = (
        "import importlib.metadata as m, json, sys\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return None\n"
        f"print(json.dumps([sys.version.split()[0], {{name: version(name) for name in {packages!r}}}]))"
    )
    asked = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    if asked.returncode:
        raise ValueError(f"--python: wanted the engine's interpreter, got {python}: {asked.stderr.strip()[-300:]}")
    version, versions = json.loads(asked.stdout)
    if not versions[engine.package]:
        raise ValueError(f"--engine: wanted {engine.package} installed for {python}, found none")
    gpus, library = nvidia_smi("name,memory.total,driver_version"), os.environ.get("ETAP_LIBRARY")
    name, memory, driver = gpus[0].split(", ") if gpus else ("unknown", "unknown", "unknown")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": name,
        "gpu_memory_mib": memory,
        "gpus_of_the_machine": len(gpus),
        "driver": driver,
        "python": version,
        "versions": {package: found for package, found in versions.items() if found}
        | {"etap-backend": etap_backend.__version__},
        "commit": report.commit(),
        "library_sha256": hashlib.sha256(Path(library).read_bytes()).hexdigest() if library else None,
        "command": shlex.join(["etap", *sys.argv[1:]]),
    }


@dataclass(frozen=True)
class Prepared:
    """A model folder, its configuration where it can be read, and whether its weights are made up."""

    model: str
    config: dict | None
    dummy: bool
    what: str


def prepare_model(name: str, changes: dict[str, Any], rank_of: int | None, tp: int, folder: Path) -> Prepared:
    """A shipped configuration becomes a folder for dummy weights; anything else is served as it is.

    Raises ValueError when changes are wanted of a model that has its own weights, or of keys that it has not.
    """
    if name.lower() not in configs.shipped("models", ".json"):
        if changes or rank_of:
            raise ValueError(f"--set, --layers, --rank-of: wanted a model of configs/models, got {name}")
        path, config = Path(name) / "config.json", None
        with suppress(OSError):
            config = json.loads(path.read_text())
        return Prepared(name, config, False, "its own weights")
    whole = json.loads(configs.find("models", name, ".json").read_text())
    if unknown := set(changes) - set(whole):
        raise ValueError(f"--set: wanted keys of {name}'s config.json, got {', '.join(sorted(unknown))}")
    config = whole | changes
    if config.get("quantization_config", whole) is None:
        del config["quantization_config"]  # the engines take its presence for a wish
    if rank_of:
        config = dummy_model.of_one_rank(config, rank_of, tp)
    kind = "FP8 in blocks" if config.get("quantization_config") else "bfloat16"
    what = f"dummy weights, {kind}, {config['num_hidden_layers']} of {whole['num_hidden_layers']} layers"
    if rank_of:
        what += f", each GPU with the heads and widths of one of {rank_of} tensor-parallel ranks"
    said = ("num_hidden_layers", "quantization_config")
    if others := [f"{key} {value} (of {whole[key]})" for key, value in changes.items() if key not in said]:
        what += "; " + ", ".join(others)
    return Prepared(str(dummy_model.write(folder, config)), config, True, what)


def small_model(name: str, changes: dict[str, Any], rank_of: int | None, tp: int, folder: Path) -> str:
    """Folder of the model with a few layers of each kind. Raises ValueError when it has its own weights."""
    if name.lower() not in configs.shipped("models", ".json"):
        raise ValueError(f"--throw-away: wanted a model of configs/models, got {name}")
    whole = json.loads(configs.find("models", name, ".json").read_text()) | changes
    layers = min(whole["num_hidden_layers"], whole.get("first_k_dense_replace", 0) + SMALL_MOE_LAYERS)
    return prepare_model(name, changes | {"num_hidden_layers": layers}, rank_of, tp, folder).model


def serving_of(scenario: Scenario, prepared: Prepared, cases: list[Case]) -> Serving:
    longest = max(case.input + case.output for case in cases) + MARGIN_TOKENS + scenario.draft_tokens
    return Serving(
        prepared.model,
        prepared.dummy,
        scenario.tensor_parallel,
        scenario.pipeline_parallel,
        scenario.data_parallel,
        longest,
        tuple(sorted({case.concurrency for case in cases})),
        scenario.draft_tokens,
        scenario.acceptance if prepared.dummy else None,
        scenario.kv_dtype == "fp8",
    )


def header(
    scenario: Scenario,
    specific: EngineScenario,
    engine: Engine,
    prepared: Prepared,
    serving: Serving,
    python: str,
    note: str,
) -> dict:
    shape = plan.Model.model_validate(prepared.config).model_dump() if prepared.config else None
    return {
        "kind": "e2e",
        "title": scenario.title,
        "engine": engine.name,
        **provenance(engine, python),
        "model": scenario.model,
        "weights": prepared.what,
        "dummy": prepared.dummy,
        "model_shape": shape,
        "gpus": scenario.gpus,
        "layout": {"tp": serving.tp, "pp": serving.pp, "dp": serving.dp},
        "draft_tokens": scenario.draft_tokens,
        "acceptance": serving.acceptance,
        "kv_dtype": scenario.kv_dtype,
        "environment": {**scenario.environment, **specific.environment},
        "note": note,
        "method": e2e_report.METHOD,
        "complete": False,
        "stopped": None,
        "servers": {},
        "rows": [],
    }


def resumed(path: Path, fresh: dict) -> dict:
    """The document in `path` to go on with, as another run. Raises ValueError when it is of another comparison."""
    before = json.loads(path.read_text())
    try:
        e2e_report.must_be_comparable(before, fresh)
    except ValueError as error:
        raise ValueError(f"--resume: {path} {error}") from error
    [about] = e2e_report.runs_of(fresh)
    return before | about | {"runs": [*e2e_report.runs_of(before), about], "complete": False, "stopped": None}


def chosen(points: list[Point], context: list[int] | None, concurrency: list[int] | None) -> list[Point]:
    """The points of the wanted input lengths and concurrencies. Raises ValueError when none is left."""
    kept = []
    for point in points:
        wanted = [number for number in point.concurrency if not concurrency or number in concurrency]
        if wanted and (not context or point.input in context):
            kept.append(point.model_copy(update={"concurrency": wanted}))
    if not kept:
        raise ValueError("--context, --concurrency: no point of the scenario has these")
    return kept


def parse_changes(pairs: list[str], layers: int | None) -> dict[str, Any]:
    """{key: value} of KEY=VALUE texts. Raises ValueError when one is not such a text with a value in JSON."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            changes[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"--set: wanted KEY=VALUE with a JSON value, got {pair!r}") from error
        if not equals:
            raise ValueError(f"--set: wanted KEY=VALUE, got {pair!r}")
    return changes | ({"num_hidden_layers": layers} if layers else {})


def parse_variables(pairs: list[str]) -> dict[str, str]:
    """{name: value} of NAME=VALUE texts. Raises ValueError when one is no such text."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (name, equals, _) in zip(pairs, split, strict=True):
        if not (name and equals):
            raise ValueError(f"--env: wanted NAME=VALUE, got {pair!r}")
    return {name: value for name, _, value in split}


def parse_point(text: str) -> tuple[int, int]:
    """(requests, input tokens) of a text such as 16x16K. Raises ValueError when it is no such text."""
    requests, _, length = text.partition("x")
    if not requests.isdigit() or int(requests) < 1:
        raise ValueError(f"wanted requests x tokens such as 16x16K, got {text!r}")
    return int(requests), plan.tokens(length)


def parse_profile(text: str | None, cases: list[Case]) -> tuple[int, int] | None:
    """(concurrency, input) of a text such as 16x16K. Raises ValueError when the cases have no such point."""
    if text is None:
        return None
    try:
        wanted = parse_point(text)
    except ValueError as error:
        raise ValueError(f"--profile: {error}") from error
    if wanted not in {(case.concurrency, case.input) for case in cases}:
        raise ValueError(f"--profile: wanted a point of this run, such as 16x16K, got {text}")
    return wanted


class EngineName(str, Enum):
    vllm = "vllm"
    sglang = "sglang"


def _refuse(text: str) -> typer.Exit:
    Console(stderr=True).print(f"etap e2e: {text}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


def _backends(engine: Engine, specific: EngineScenario, wanted: list[str] | None) -> list[str]:
    if not wanted:
        return specific.backends
    known = {name.lower(): name for name in specific.backends}
    return [known.get(name.lower(), name) for name in wanted]


def e2e(
    scenario: Annotated[str, typer.Argument(help="A file, or the name of one of configs/e2e.")],
    engine: Annotated[EngineName, typer.Option(help="Whose server and load generator.")] = EngineName.vllm,
    model: Annotated[
        str | None, typer.Option(help="Folder or name of real weights, or a name of configs/models.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this attention backend; may be repeated.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs, instead of the scenario's.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of a dummy model.")] = None,
    rank_of: Annotated[
        int | None, typer.Option(min=1, help="Give each GPU the work of one of so many tensor-parallel ranks.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a dummy model's config.json; may be repeated.")
    ] = None,
    context: Annotated[list[str] | None, typer.Option(help="Only points of this input length, such as 16K.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Only this concurrency; may be repeated.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Readings of each point, instead of the scenario's.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Also profile some decode steps of this point, as 16x16K, for attention's share.")
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Servers of each backend, in turn: A B A B; they share the readings.")
    ] = 1,
    throw_away: Annotated[
        bool, typer.Option("--throw-away", help="First a server of few layers that fills the caches, not reported.")
    ] = False,
    flag: Annotated[list[str] | None, typer.Option(help="One more flag for the server, as --flag=--x=y.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, one more variable for the server; kept in the output.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file; results/e2e-<scenario>-<engine>.json if absent.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop after this many seconds, keep what there is.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the output file; measure what it lacks.")
    ] = False,
    python: Annotated[str, typer.Option(help="Interpreter that has the engine.")] = sys.executable,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this machine.")] = "",
    plots: Annotated[bool, typer.Option(help="Draw a plot beside the JSON file.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Print the commands and the points, run nothing.")] = False,
) -> None:
    """Serve one model with ETAP and with the engine's own attention backends, and compare what users see."""
    begin = time.monotonic()
    driven = ENGINES[engine.value]
    output = output or Path("results") / f"e2e-{Path(scenario).stem}-{engine.value}.json"
    try:
        wanted = read_scenario(scenario)
        lengths = [plan.tokens(text) for text in context or []]
        points = chosen(wanted.points, lengths, concurrency)
        updates = {"model": model, "gpus": gpus}
        wanted = wanted.model_copy(update={key: value for key, value in updates.items() if value is not None})
        if (specific := getattr(wanted, engine.value)) is None:
            raise ValueError(f"{scenario}: wanted a table [{engine.value}], found none")
        variables = {**specific.environment, **parse_variables(env or [])}
        specific = specific.model_copy(update={"environment": variables})
        order = turns_of(_backends(driven, specific, backend), turns)
        least = max(turn.of for turn in order)  # each server is to have a reading of every point
        points = [point.model_copy(update={"repeats": max(repeats or point.repeats, least)}) for point in points]
        cases, folder = cases_of(points), output.with_suffix("") / "model"
        profiled = parse_profile(profile, cases)
        asked = parse_changes(changes or [], layers)
        prepared = prepare_model(wanted.model, asked, rank_of, wanted.tensor_parallel, folder)
        serving = serving_of(wanted, prepared, cases)
        small = None
        if throw_away:
            aside = folder.with_name("model-thrown-away")
            small = replace(serving, model=small_model(wanted.model, asked, rank_of, wanted.tensor_parallel, aside))
        fresh = header(wanted, specific, driven, prepared, serving, python, note)
        document = resumed(output, fresh) if resume and output.exists() else fresh
    except ValueError as error:
        raise _refuse(str(error)) from error
    console = Console() if sys.stdout.isatty() else Console(width=180)
    deadline = None if time_limit is None else begin + time_limit
    run = Run(
        driven,
        wanted,
        specific,
        serving,
        cases,
        order,
        python,
        flag or [],
        output,
        document,
        deadline,
        console,
        profiled,
        throw_away=small,
    )
    console.print(f"{wanted.title}: {prepared.what}, {wanted.gpus} GPUs", markup=False)
    if show:
        for name in dict.fromkeys(turn.backend for turn in order):
            console.print(shlex.join(run.command(name, 8000)), markup=False, highlight=False, soft_wrap=True)
        for case in cases:
            console.print(
                shlex.join(driven.load(serving, case.load, 8000, Path("r.json"))), markup=False, soft_wrap=True
            )
        return
    try:
        with stopping(time_limit):
            run.all()
        document["complete"] = True
    except Stopped as reason:
        document["stopped"] = str(reason)
    finally:
        run.write()
    e2e_report.print_document(document, console)
    if plots and any("tpot_ms" in row for row in document["rows"]):
        try:
            e2e_report.plot(document, output.with_suffix(".png"))
        except ImportError:
            console.print("no plot: it needs matplotlib, of the extra 'bench'", style="yellow")
    if problems := e2e_report.problems(document):
        raise _refuse("failed: " + "; ".join(problems))

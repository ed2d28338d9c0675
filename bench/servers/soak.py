"""Soaks one server with ETAP: minutes of mixed traffic, with aborts, preemption, prefix hits and drafts.

    python -m bench soak MODEL --engine vllm --output soak.json [--seconds 600] [--mode mtp] [-- flags for the server]

Needs a Hopper GPU, the engine with etap-backend beside it, and the folder of any MODEL, with --seeded without weights.
Traffic (traffic.py) goes to a KV cache so small that some requests are preempted. A run fails for

- an HTTP error, an incomplete answer, a request that does not end in time;
- a log-probability that is not finite (engines send NaN as null), an error or `nan` in the server's log;
- a wrong answer to a probe: the idle server answers these random prompts first, then again and again among the traffic
  and once after it. Rounding depends on the batch; the limits are below;
- memory that grows: of host and GPU, the last quarter of the samples against the second;
- a run that proves nothing: nothing preempted (vLLM), found in the prefix cache, aborted, or accepted as a draft;
- an early end, by SIGTERM or Ctrl-C.

The exit status is 0 or 1.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench import report
from bench.common import gpus
from bench.common.provenance import provenance
from bench.common.results import must_be_writable
from bench.common.stopping import Stopped, stopping
from bench.models.plugins import plugins
from bench.servers import client
from bench.servers.agreement import NOISE_FACTOR, PROMPT_TOKENS, Agreement, agreement, answer_in
from bench.servers.answers import finish
from bench.servers.client import Failed, FailedRequest
from bench.servers.engines import ENGINES, Answer, Serving, Variant, configuration, is_sparse
from bench.servers.processes import Server, served
from bench.servers.traffic import Settings, Tally, Traffic

# The gap of the best two tokens where answers part, the difference of a step, the median of a request and of all steps:
# at least so many nats, and so many medians of the idle server against itself. With DeepSeek-V4's seeded layers (0.094
# nats) two correct servers differed by up to 4.7, 7.9 and 3.9 of these, another context by 20.
MOST_GAP, MOST_STEP, MOST_REQUEST, MOST_MEDIAN = 0.5, 1.0, 0.3, 0.05
NOISES = (10, 16, 8)
PROMPTS, ANSWER = (40, 200, 700, 1500, 2300, 3000, 3600, 4000), 32  # tokens of prompts and their answers
FEW = 4
LEAST_SAMPLES = 16
INDEXER_MIB = 512  # vLLM's sparse indexer allocates so much for scores once prefills want them
MOST_FAILURES = 500
BAD_LINE = re.compile(
    r"\bERROR\b|\bCRITICAL\b|Traceback \(most recent call last\)|CUDA error|illegal memory access|\b(?i:nan)\b"
)
HARMLESS = re.compile(r"disconnected from the client side|SpecDecoding metrics")  # aborts in SGLang; no drafts in vLLM


def prompts_of(model: Path) -> list[list[int]]:
    """Random prompts that the model has room for."""
    rng, longest = random.Random(0), configuration(model)["max_position_embeddings"] - ANSWER
    return [rng.choices(PROMPT_TOKENS, k=length) for length in PROMPTS if length <= longest]


class Probes:
    """Prompts that the idle server answers first, so that later answers can be compared."""

    def __init__(self, server: Server, prompts: list[list[int]], timeout: float):
        self.server, self.timeout, self.http = server, timeout, client.new_client()
        self.prompts = prompts
        self.reference: list[Answer] = []
        self.noise = 0.0
        self.rounds: list[dict] = []

    def ask(self, concurrency: int, salt: str | None) -> list[Answer]:
        """Answers to all probes; another salt finds nothing in the prefix cache."""
        engine, url = self.server.engine, self.server.url + self.server.engine.path

        def one(prompt: list[int]) -> Answer:
            body = engine.body(prompt, ANSWER, logprobs=2, salt=salt)
            return answer_in(engine, client.ask(self.http, url, body, self.timeout), ANSWER)

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, self.prompts))

    def learn(self) -> dict:
        """The idle server's answers, and its noise a few at a time. Raises Failed if they cannot serve as reference."""
        self.reference = self.ask(len(self.prompts), "idle")
        again = agreement(self.ask(FEW, None), self.reference)
        self.noise = again.median() if any(again.differences) else math.nan
        if wrong := self.objections(again):
            raise Failed(f"the idle server does not agree with itself: {'; '.join(wrong)}")
        return {"noise": again.summary()}

    def limits(self) -> list[float]:
        """What rounding explains: the gap of the best two, the difference of a step, the median of a request."""
        least = MOST_GAP, MOST_STEP, MOST_REQUEST
        return [max(one, n * self.noise) for one, n in zip(least, NOISES, strict=True)]

    def objections(self, found: Agreement) -> list[str]:
        """What exceeds rounding in an agreement."""
        most_gap, most_step, most_request = self.limits()
        wrong = []
        for index, differences in enumerate(found.differences):
            median, most = (statistics.median(differences), max(differences)) if differences else (0.0, 0.0)
            if not (median <= most_request and most <= most_step):
                wrong.append(f"probe {index}: median {median:.3f}, largest {most:.3f} nats")
        wrong += [f"another token, the best two {gap:.3f} nats apart" for gap in found.parted if not gap <= most_gap]
        if any(found.differences) and not found.median() <= max(NOISE_FACTOR * self.noise, MOST_MEDIAN):
            wrong.append(f"median of all {found.median():.4f} nats, the idle server's own {self.noise:.4f}")
        return wrong

    def round(self, when: float, tally: Tally) -> None:
        """Ask once more; every second round finds nothing in the prefix cache."""
        try:
            salt = f"round {when}" if len(self.rounds) % 2 else None
            found = agreement(self.ask(len(self.prompts), salt), self.reference)
        except FailedRequest as fault:
            tally.fail(fault.kind, f"probes: {fault}")
            return
        wrong = self.objections(found)
        for text in wrong:
            tally.fail("wrong answer", f"after {when:.0f} s: {text}")
        self.rounds.append({"seconds": round(when, 1)} | found.summary() | {"objections": wrong})


def growth(samples: Sequence[float | None]) -> float | None:
    """Median of the last quarter of the samples less that of the second; None where too little is known."""
    known = [value for value in samples if value is not None]
    if len(known) < LEAST_SAMPLES:
        return None
    quarter = len(known) // 4
    return statistics.median(known[-quarter:]) - statistics.median(known[quarter : 2 * quarter])


@dataclass
class Log:
    """A server's log from `offset` on."""

    path: Path
    offset: int = 0

    def bad_lines(self) -> list[str]:
        """New ones, as far as lines are complete."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.offset += len(text)
        lines = text.decode(errors="replace").splitlines()
        return [line for line in lines if BAD_LINE.search(line) and not HARMLESS.search(line)]


@dataclass
class Soak:
    """One server under traffic; `document` gets what is measured, also when the run ends early."""

    server: Server
    drafts: bool
    probes: Probes
    traffic: Traffic
    document: dict
    begin: float = 0.0
    samples: list[tuple[float, float | None]] = field(default_factory=list)
    before: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings, self.tally = self.traffic.settings, self.traffic.tally
        self.log = Log(self.server.process.log, self.server.process.log.stat().st_size)

    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def run(self) -> None:
        """Learn, soak, drain, probe once more. Raises Stopped when ended early, Failed when it cannot begin."""
        self.document["probes"] = self.probes.learn()
        self.before = self.server.counters()
        self.begin = time.monotonic()
        for thread in self.traffic.threads:
            thread.start()
        pool = ThreadPoolExecutor(1)
        try:
            self.loop(pool)
            if self.server.process.ended() is None:
                self.calm(pool)
        finally:
            self.look()
            self.tally.close()
            self.traffic.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self.note()
        if self.server.process.ended() is None:
            self.document["failures"] += self.proves_nothing()

    def loop(self, pool: ThreadPoolExecutor) -> None:
        """The time of the traffic, longer where a slow machine has too few samples of memory."""
        asked: Future | None = None
        settings = self.settings
        next_sample, next_wave, next_probe = 0.0, settings.wave_every, settings.probe_every / 2
        while (now := self.elapsed()) < settings.seconds or len(self.samples) < LEAST_SAMPLES:
            if self.server.process.ended() is not None or sum(self.tally.failures.values()) > MOST_FAILURES:
                return
            if now >= next_sample:
                next_sample = now + settings.sample_every
                process = self.server.process
                self.samples.append((process.host_mib(), gpus.process_mib(process.running())))
            if now >= next_wave:
                next_wave = now + settings.wave_every
                self.look()
                self.traffic.new_wave()
            if now >= next_probe and (asked is None or asked.done()):
                next_probe = now + settings.probe_every
                asked = pool.submit(self.probes.round, now, self.tally)
            time.sleep(min(0.5, settings.sample_every))
        self.document["complete"] = True

    def calm(self, pool: ThreadPoolExecutor) -> None:
        """The end of the traffic; the server is idle again and must answer as before."""
        self.document["rounds_in_traffic"] = len(self.probes.rounds)
        for thread in self.traffic.drained():
            self.tally.fail("hung", f"{thread.name} still waits for its request")
        pool.submit(self.probes.round, self.elapsed(), self.tally).result()
        running = self.server.metrics().get(self.server.engine.running, 0.0)
        if running and self.server.engine.name == "vllm":
            self.tally.fail("left over", f"the idle server says that {running:.0f} requests are running")

    def look(self) -> None:
        """Count bad lines of the log, and the server's end."""
        for line in self.log.bad_lines():
            self.tally.fail("log", line)
        if (code := self.server.process.ended()) is not None and "server" not in self.tally.failures:
            self.tally.fail("server", f"ended with {code} after {self.elapsed():.0f} s")

    def note(self) -> None:
        """Put everything into the document."""
        after, failures = self.server.counters(), self.tally.failures.items()
        counters = {name: value and value - (self.before.get(name) or 0) for name, value in after.items()}
        memory = {
            kind: {"growth_mib": growth([sample[column] for sample in self.samples]), "allowed_mib": allowed}
            for column, (kind, allowed) in enumerate(self.settings.allowed_growth.items())
        }
        self.document |= {"seconds": round(self.elapsed(), 1), "requests": dict(self.tally.counts)}
        self.document |= {"counters": counters, "memory": memory}
        self.document["faults"] = {kind: {"times": n, "examples": self.tally.examples[kind]} for kind, n in failures}
        self.document["probes"]["rounds"] = self.probes.rounds

    def proves_nothing(self) -> list[str]:
        """What a run must have had to prove anything; memory that grew."""
        counters, requests = self.document["counters"], self.tally.counts
        # SGLang reserves room for outputs, so that it may preempt nothing.
        wanted = ["prefix tokens found", *(["preempted"] if self.server.engine.name == "vllm" else [])]
        wanted += ["drafts accepted"] if self.drafts and "drafts accepted" in counters else []
        found = [f"{what}: wanted some, got {counters[what]}" for what in wanted if not counters[what]]
        found += [f"requests {what}: wanted some, got none" for what in ("served", "aborted") if not requests[what]]
        if not self.document.get("rounds_in_traffic"):
            found.append("no round of probes ended among the traffic")
        for kind, memory in self.document["memory"].items():
            grown = memory["growth_mib"]
            if grown is None and kind == "host":
                found.append("host memory: too few samples")
            elif grown is not None and grown > memory["allowed_mib"]:
                found.append(f"{kind} memory grew by {grown:.0f} MiB, allowed {memory['allowed_mib']:.0f}")
        return found


def soak(engine: str, serving: Serving, variant: Variant, settings: Settings, flags: list[str], output: Path) -> dict:
    """Run one server; what was measured, with `failures`."""
    document, tally = {"server": {}, "complete": False, "stopped": None, "failures": []}, Tally()
    try:
        with (
            stopping(),
            plugins(["seeded"] if serving.weights == "seeded" else []) as environment,
            served(ENGINES[engine], serving, variant, flags, log=output.with_suffix(".log"), environment=environment) as
            server,
        ):  # fmt: skip
            document["server"] = server.about
            probes = Probes(server, prompts_of(Path(serving.model)), settings.timeout)
            traffic = Traffic(server.engine, server.url + server.engine.path, settings, tally)
            Soak(server, serving.draft_tokens > 0, probes, traffic, document).run()
    except Stopped as reason:
        document |= {"stopped": str(reason), "complete": False}
    except Failed as error:
        document["failures"].append(str(error))
    document["failures"] += tally.sentences()
    return document


def main(
    model: Annotated[Path, typer.Argument(help="Folder of any MLA model.")],
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for the server, after --.")] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose server.")] = "vllm",
    output: Annotated[Path, typer.Option(help="JSON file to write; the log goes beside it.")] = Path("soak.json"),
    backend: Annotated[str, typer.Option(help="BACKEND[+CACHE][+math]; default: ETAP.")] = "",
    mode: Annotated[Literal["plain", "mtp"], typer.Option(help="plain or mtp.")] = "plain",
    cache_tokens: Annotated[int, typer.Option(help="Size of the KV cache in tokens.")] = 1280 * 64,
    memory_share: Annotated[float, typer.Option(help="Of the GPU, that the server may take.")] = 0.25,
    seconds: Annotated[float, typer.Option(min=1, help="How long the traffic lasts.")] = 600,
    seeded: Annotated[bool, typer.Option("--seeded", help="With weights of bench.models.seeded.")] = False,
    note: Annotated[str, typer.Option(help="Put into the output.")] = "",
) -> None:
    """Soak one server with ETAP; exit with 1 when anything was wrong or the run was cut short."""
    of, config = ENGINES[engine], configuration(model)
    try:
        variant = Variant.parse(backend or of.etap)
        must_be_writable(output)
        if "max_position_embeddings" not in config:
            raise ValueError(f"model: wanted a folder with config.json, got {model}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = Settings(config["max_position_embeddings"], seconds)
    if engine == "vllm" and is_sparse(config):
        settings = replace(settings, gpu_growth=settings.gpu_growth + INDEXER_MIB)
    serving = Serving(str(model), "seeded" if seeded else "auto", settings.concurrency)
    serving = serving.drafting(mode)
    # SGLang loses a log-probability of a drafting request that it preempts, so it gets room for all.
    room = 8 * cache_tokens if engine == "sglang" and serving.draft_tokens else cache_tokens
    flags = [*of.small_cache(room), of.memory_flag, str(memory_share), *(serve_flags or [])]
    document = {
        "what": f"soak, {engine}",
        **provenance("python -m bench soak", note),
        "mode": mode,
        "backend": variant.backend,
    }
    document |= {"settings": asdict(settings)} | soak(engine, serving, variant, settings, flags, output)
    if not document["complete"]:
        document["failures"].append(f"not complete, stopped {document['stopped']}")
    finish(document, output, report.soaks([(output.stem, document)]))


if __name__ == "__main__":
    typer.run(main)

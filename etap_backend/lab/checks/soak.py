"""Soaks one server of vLLM or SGLang with ETAP: minutes of mixed traffic, and what must not happen meanwhile.

    python -m etap_backend.lab.checks.soak MODEL --engine vllm --output soak.json [--seconds 600] [--mode mtp]
        [-- flags for the server]

Needs a Hopper GPU, the engine with etap-backend beside it, and a MODEL of train_model.py. Other jobs may use the same
GPU.

Traffic: up to --concurrency requests at once, in waves. The first wave is of short requests: all of them run at once;
the second of many new tokens behind one prefix of half the context, with so few to add that every step is full of
prefills over it. So the server has the memory of its largest batch and of its largest prefill before growth is looked
for. Then log-normal lengths from 1 token to the model's context, half over shared prefixes. Greedy and sampled; some
are streamed, and of some the client closes the stream. The KV cache is so small that requests are preempted. A run
fails for

- an HTTP error, an answer that is too short, a request that does not end in --timeout seconds;
- a log-probability that is not finite (engines send NaN as null), an error or `nan` in the server's log;
- a wrong answer to a probe. These prompts of the model are answered by the idle server first, then again and again
  among the traffic and once after it: greedily, and in vLLM without drafts every second one forced along the first
  answer. Rounding depends on the batch; what is allowed for it is below, with its reasons;
- memory that grows: of host and GPU, what the server's processes have in the last quarter of the samples against the
  second. Where the driver does not say what these processes have, the GPU's is reported as not known. In vLLM a model
  of sparse attention may take 512 MiB more: as many there are for the scores of its indexer, once prefills want them;
- a run that proves nothing: nothing preempted (vLLM), nothing found in the prefix cache, nothing aborted, no drafts
  accepted, a model that does not know its prompts.

The file is replaced every minute. --stop-file, once there, and SIGTERM end the run early; it is then not complete,
which is no pass either. The exit status is 0 or 1.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from etap_backend import _library
from etap_backend.lab import gpus
from etap_backend.lab.checks.agreement import NOISE_FACTOR, PROMPT_TOKENS, agreement, answer_in, must_be_finite
from etap_backend.lab.checks.answers import ASKED, PACKAGES, RIGHT_SHARE, Asked, Variant, is_sparse, right_share
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, read_json, write
from etap_backend.lab.serving import client
from etap_backend.lab.serving.client import Failed, FailedRequest, Wire, described
from etap_backend.lab.serving.engines import Answer, Engine
from etap_backend.lab.serving.servers import Served, served
from etap_backend.lab.stopping import Stopped, stopping

PROGRAM = "python -m etap_backend.lab.checks.soak"
# Of correct kernels, answers of the trained model parted where the best two tokens were at most 0.125 nats apart, and
# wrong ones at 1.2 and more (results/answers-vllm-triton.json). In results/vllm-serve.json the largest difference of a
# step was 0.23 nats and the largest median of a request 0.064, where another context gave medians of 3.4.
MOST_GAP, MOST_STEP, MOST_REQUEST, MOST_MEDIAN = 0.5, 1.0, 0.3, 0.05
PROBES = 8  # of each kind
FEW = 4
PREFIXES = 16
EDGE_LENGTHS = (1, 2, 63, 64, 65, 128, 129)
SHORT_PROMPTS = EDGE_LENGTHS[:5]
SHORT_REQUEST = 256  # tokens of a request of the first wave; the cache has room for 320 in each of 256
# A request of the second wave: tokens behind its prefix, so many that others wait for the engine and not for its front
# end, and that a step of 8192 tokens prefills 16 requests, with 4096 tokens before each; and tokens to add.
BEHIND_PREFIX, FEW_TOKENS = 512, 4
MARGIN = 16  # tokens below the model's context, for drafts
LEAST_SAMPLES = 16
INDEXER_MIB = 512  # vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
KEPT_EXAMPLES, MOST_FAILURES = 5, 500
BAD_LINE = re.compile(
    r"\bERROR\b|\bCRITICAL\b|Traceback \(most recent call last\)|CUDA error|illegal memory access|\b(?i:nan)\b"
)
# SGLang's word for an abort; vLLM's mean of no drafts.
HARMLESS = re.compile(r"disconnected from the client side|SpecDecoding metrics")

console = Console(width=120)


@dataclass(frozen=True)
class Settings:
    """What a run is made of: seconds, MiB, shares."""

    seconds: float
    concurrency: int
    timeout: float
    context: int
    abort_share: float
    stream_share: float
    probe_every: float
    sample_every: float
    wave_every: float
    write_every: float
    host_growth: float
    gpu_growth: float
    seed: int


class Tally:
    """What happened, counted by many threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self._closed, self._lock = False, threading.Lock()

    def count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)

    def close(self) -> None:
        """Count no more failures: what is still under way is cut off by the end of the run."""
        with self._lock:
            self._closed = True

    def fail(self, kind: str, text: str) -> None:
        with self._lock:
            if self._closed:
                return
            self.failures[kind] += 1
            examples = self.examples.setdefault(kind, [])
            if len(examples) < KEPT_EXAMPLES:
                examples.append(text[:1000])

    def sentences(self) -> list[str]:
        with self._lock:
            return [f"{kind} ({count} times): {self.examples[kind][0]}" for kind, count in self.failures.items()]


class Traffic:
    """Threads that send one request after another, as many at once as the wave wants."""

    def __init__(self, engine: Engine, wire: Wire, settings: Settings, tally: Tally):
        self.engine, self.wire, self.settings, self.tally = engine, wire, settings, tally
        self.stop, self.wanted = threading.Event(), settings.concurrency
        self.wave = 0
        self._rng = random.Random(settings.seed)
        self._prefixes = [self._rng.choices(PROMPT_TOKENS, k=self._length(500, 2)) for _ in range(PREFIXES)]
        self._long_prefix = self._rng.choices(PROMPT_TOKENS, k=settings.context // 2)
        self.threads = [
            threading.Thread(target=self._work, args=(index, random.Random(f"{settings.seed} {index}")), daemon=True)
            for index in range(settings.concurrency)
        ]

    def _length(self, median: float, share: int, rng: random.Random | None = None) -> int:
        """Log-normal, up to that share of the context; sometimes just around a page or two."""
        rng = rng or self._rng
        if rng.random() < 0.05:
            return rng.choice(EDGE_LENGTHS)
        return max(1, min(round(median * math.exp(rng.gauss(0, 1.4))), (self.settings.context - MARGIN) // share))

    def new_wave(self) -> None:
        """Mostly everything at once, so that the cache overflows; sometimes few, whose graphs and splits are others."""
        self.wave, most = self.wave + 1, self.settings.concurrency
        if self.wave == 1:
            return
        self.wanted = self._rng.choice([most, most, most, max(1, most // 4), max(1, most // 32), 1])

    def request(self, rng: random.Random) -> tuple[list[int], int]:
        """A prompt, and how many tokens to add."""
        if self.wave == 0:
            prompt = rng.choices(PROMPT_TOKENS, k=rng.choice(SHORT_PROMPTS))
            return prompt, min(SHORT_REQUEST, self.settings.context) - MARGIN - len(prompt)
        if self.wave == 1:
            behind = rng.choices(PROMPT_TOKENS, k=min(BEHIND_PREFIX, self.settings.context // 4))
            return self._long_prefix + behind, FEW_TOKENS
        prompt = list(rng.choice(self._prefixes)) if rng.random() < 0.5 else []
        prompt += rng.choices(PROMPT_TOKENS, k=self._length(60 if prompt else 300, 2, rng))
        prompt = prompt[: self.settings.context - MARGIN - 1]
        room = self.settings.context - MARGIN - len(prompt)
        return prompt, min(self._length(150, 4, rng), room)

    def _work(self, index: int, rng: random.Random) -> None:
        while not self.stop.is_set():
            if index >= self.wanted:
                self.stop.wait(0.05)
                continue
            try:
                self._one(rng)
            except FailedRequest as fault:
                self.tally.fail(fault.kind, str(fault))
                self.stop.wait(1)

    def _one(self, rng: random.Random) -> None:
        prompt, tokens = self.request(rng)
        closes, ended = rng.random() < self.settings.abort_share, True
        streams = closes or rng.random() < self.settings.stream_share
        # SGLang repeats all log-probabilities in every part of a stream.
        logprobs = 0 if streams and not self.engine.parts_are_new else 2
        body = self.engine.body(prompt, tokens, temperature=rng.choice([0, 0.7, 1.0]), logprobs=logprobs)
        self.tally.count(sent=1)
        if streams:
            got, ended = self.streamed(body, rng.randrange(tokens) if closes else sys.maxsize)
        else:
            reply = self.wire.whole(body)
            must_be_finite(self.engine, reply)
            got = self.engine.tokens_in(reply)
        if not ended:
            self.tally.count(aborted=1, prompt_tokens=len(prompt), output_tokens=got)
        elif got != tokens:
            raise FailedRequest("incomplete", f"wanted {tokens} tokens, got {got}: {described(body)}")
        else:
            self.tally.count(served=1, prompt_tokens=len(prompt), output_tokens=got)

    def streamed(self, body: dict, most_parts: int) -> tuple[int, bool]:
        """Tokens that came, and whether the stream ended before the client closed it, after so many parts."""
        count, tokens, end = 0, 0, time.monotonic() + self.settings.timeout
        with closing(self.wire.parts(body)) as parts:
            for count, part in enumerate(itertools.islice(parts, most_parts), 1):  # noqa: B007
                if time.monotonic() > end:
                    said = f"the stream did not end in {self.settings.timeout:g} s: {described(body)}"
                    raise FailedRequest("hung", said)
                must_be_finite(self.engine, part)
                tokens = self.engine.tokens_in(part, tokens)
        return tokens, count < most_parts

    def drained(self) -> list[threading.Thread]:
        """Send nothing more; the threads whose request did not end in time."""
        self.stop.set()
        end = time.monotonic() + self.settings.timeout + 5
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread for thread in self.threads if thread.is_alive()]


class Probes:
    """Prompts of which the idle server's answers are known."""

    def __init__(self, engine: Engine, wire: Wire, model: Path, forces: bool):
        self.engine, self.wire, self.forces = engine, wire, forces
        entries = read_json(model / "prompts.json")
        self.kinds = [(kind, entry) for kind in ("recite", "recall") for entry in entries[kind][:PROBES]]
        self.reference: list[Answer] = []
        self.noise = 0.0
        self.rounds: list[dict] = []

    def ask(self, concurrency: int, forced: bool, salt: str | None) -> list[Answer]:
        """Answers to all probes; every second one along its reference where that is wanted and can be."""

        def one(index: int) -> Answer:
            entry, along = self.kinds[index][1], None
            if forced and self.forces and index % 2:
                along = self.reference[index].tokens
            tokens = len(entry["answer"])
            # Another salt finds nothing in the prefix cache.
            body = self.engine.body(entry["prompt"], tokens, logprobs=2, forced=along, salt=salt)
            return answer_in(self.engine, self.wire.whole(body), tokens, along)

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, range(len(self.kinds))))

    def learn(self) -> dict:
        """The idle server's answers, and how far it is from itself a few at a time. Raises Failed if it is lost."""
        self.reference = self.ask(len(self.kinds), False, "idle")
        again = agreement(self.ask(FEW, False, None), self.reference)
        self.noise = again.median() if any(again.differences) else math.nan
        known = [index for index, (kind, _) in enumerate(self.kinds) if kind == "recite"]
        right = right_share([self.reference[i] for i in known], [self.kinds[i][1]["answer"] for i in known])
        if right < RIGHT_SHARE:
            raise Failed(f"wanted {RIGHT_SHARE:.0%} of the prompts known by heart answered rightly, got {right:.0%}")
        if wrong := self.objections(again):
            raise Failed(f"the idle server does not agree with itself: {'; '.join(wrong)}")
        return {"recite_right": right, "noise": again.summary()}

    def objections(self, found) -> list[str]:
        """What of an agreement is more than rounding, by request."""
        wrong = []
        for index, differences in enumerate(found.differences):
            median, most = (statistics.median(differences), max(differences)) if differences else (0.0, 0.0)
            if not (median <= MOST_REQUEST and most <= MOST_STEP):
                wrong.append(f"probe {index} ({self.kinds[index][0]}): median {median:.3f}, largest {most:.3f} nats")
        wrong += [f"another token, the best two {gap:.3f} nats apart" for gap in found.parted if not gap <= MOST_GAP]
        if any(found.differences) and not found.median() <= max(NOISE_FACTOR * self.noise, MOST_MEDIAN):
            wrong.append(f"median of all {found.median():.4f} nats, of the idle server's own {self.noise:.4f}")
        return wrong

    def round(self, when: float, tally: Tally) -> None:
        """Ask once more; every second round finds nothing in the prefix cache."""
        try:
            answers = self.ask(len(self.kinds), True, f"round {when}" if len(self.rounds) % 2 else None)
        except FailedRequest as fault:
            tally.fail(fault.kind, f"probes: {fault}")
            return
        found = agreement(answers, self.reference)
        wrong = self.objections(found)
        for text in wrong:
            tally.fail("wrong answer", f"after {when:.0f} s: {text}")
        about = found.summary() if any(found.differences) else {"steps": 0, "parted": len(found.parted)}
        self.rounds.append({"seconds": round(when, 1)} | about | {"objections": wrong})


def growth(samples: Sequence[float | None]) -> float | None:
    """Median of the last quarter of the samples less that of the second; None where too little is known."""
    known = [value for value in samples if value is not None]
    if len(known) < LEAST_SAMPLES:
        return None
    quarter = len(known) // 4
    return statistics.median(known[-quarter:]) - statistics.median(known[quarter : 2 * quarter])


@dataclass
class Log:
    """The server's log from when it was ready."""

    path: Path
    offset: int = 0

    def read(self) -> list[str]:
        """New bad lines."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # the rest of a line comes later
        self.offset += len(text)
        lines = text.decode(errors="replace").splitlines()
        return [line for line in lines if BAD_LINE.search(line) and not HARMLESS.search(line)]


@dataclass
class Soak:
    """One server under traffic; `document` is what is written, also when it ends half way."""

    server: Served
    mode: str
    probes: Probes
    traffic: Traffic
    log: Log
    settings: Settings
    tally: Tally
    document: dict
    output: Path
    stop_file: Path | None
    begin: float = 0.0
    samples: list[tuple[float, float, float | None]] = field(default_factory=list)
    counters_before: dict = field(default_factory=dict)
    most_running: float = 0

    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def run(self) -> None:
        """Learn, soak, drain, look once more. Raises Stopped when ended early, Failed when it cannot begin."""
        self.document["probes"] = self.probes.learn()
        self.counters_before = self.counters()
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
        """The time of the traffic: longer than asked where a slow machine has not yet sampled memory often enough."""
        asked: Future | None = None
        due = {
            "sample": (self.settings.sample_every, self.sample),
            "wave": (self.settings.wave_every, self.traffic.new_wave),
            "write": (self.settings.write_every, self.note),
        }
        next_at = {"sample": 0.0, "wave": self.settings.wave_every, "write": 0.0}
        next_probe = self.settings.probe_every / 2
        while (now := self.elapsed()) < self.settings.seconds or len(self.samples) < LEAST_SAMPLES:
            if self.stop_file and self.stop_file.exists():
                raise Stopped(f"by {self.stop_file.name}")
            if self.server.process.ended() is not None or sum(self.tally.failures.values()) > MOST_FAILURES:
                return
            for name, (every, action) in due.items():
                if now >= next_at[name]:
                    next_at[name] = now + every
                    action()
            if now >= next_probe and (asked is None or asked.done()):
                next_probe = now + self.settings.probe_every
                asked = pool.submit(self.probes.round, now, self.tally)
            time.sleep(min(0.5, self.settings.sample_every))
        self.document["soaked"] = True

    def calm(self, pool: ThreadPoolExecutor) -> None:
        """The end of the traffic; then the server is idle again and must answer as before."""
        self.document["rounds_in_traffic"] = len(self.probes.rounds)
        for thread in self.traffic.drained():
            self.tally.fail("hung", f"{thread.name} still waits for its request")
        pool.submit(self.probes.round, self.elapsed(), self.tally).result()
        running = self.running(self.server.metrics())
        if running and self.server.engine.name == "vllm":
            self.tally.fail("left over", f"the idle server says that {running:.0f} requests are running")

    def sample(self) -> None:
        process, metrics = self.server.process, self.server.metrics()
        self.most_running = max(self.most_running, self.running(metrics))
        self.samples.append((self.elapsed(), process.host_mib(), gpus.process_mib(process.running())))

    def running(self, metrics: dict[str, float]) -> float:
        """Requests in the running batch."""
        return metrics.get(self.server.engine.running, 0.0)

    def counters(self) -> dict[str, float | None]:
        return client.counted(self.server.metrics(), self.server.engine.counters)

    def memory(self) -> dict:
        """Growth in MiB by kind, with the samples; what is over its limit becomes a failure at the end."""
        kinds = {"host": (1, self.settings.host_growth), "gpu": (2, self.settings.gpu_growth)}
        return {
            kind: {
                "growth_mib": growth([sample[column] for sample in self.samples]),
                "allowed_mib": allowed,
                "samples": [(round(s[0], 1), None if s[column] is None else round(s[column], 1)) for s in self.samples],
            }
            for kind, (column, allowed) in kinds.items()
        }

    def look(self) -> None:
        """Count what the server says and does wrong by itself."""
        for line in self.log.read():
            self.tally.fail("log", line)
        if (code := self.server.process.ended()) is not None and "server" not in self.tally.failures:
            self.tally.fail("server", f"ended with {code} after {self.elapsed():.0f} s")

    def note(self) -> None:
        """Bring the document up to date and write it."""
        self.look()
        after = self.counters()
        self.document |= {
            "seconds": round(self.elapsed(), 1),
            "requests": dict(self.tally.counts) | {"most_running_at_once": self.most_running},
            "counters": {
                name: None if value is None else value - (self.counters_before.get(name) or 0)
                for name, value in after.items()
            },
            "faults": {kind: {"times": n, "examples": self.tally.examples[kind]} for kind, n in self.faults()},
            "memory": self.memory(),
        }
        self.document["probes"]["rounds"] = self.probes.rounds
        write(self.document, self.output)
        requests, counters = self.document["requests"], self.document["counters"]
        grown = {kind: memory["growth_mib"] for kind, memory in self.document["memory"].items()}
        memory = ", ".join(f"{kind} {'not known' if mib is None else f'{mib:.0f} MiB'}" for kind, mib in grown.items())
        console.print(
            f"{self.elapsed():.0f} s: {requests}, {counters}, {len(self.probes.rounds)} rounds of probes, "
            f"growth of memory: {memory}, faults {dict(self.faults())}",
            highlight=False,
            markup=False,
        )

    def faults(self) -> list[tuple[str, int]]:
        return list(self.tally.failures.items())

    def proves_nothing(self) -> list[str]:
        """What a run must have had to say anything, and did not; memory that grew."""
        counters, requests, found = self.document["counters"], self.tally.counts, []
        # SGLang reserves room for outputs, and so may get by without.
        wanted = ["prefix tokens found", *(["preempted"] if self.server.engine.name == "vllm" else [])]
        wanted += ["drafts accepted"] if self.mode != "plain" and "drafts accepted" in counters else []
        found += [f"{what}: wanted some, got {counters[what]}" for what in wanted if not counters[what]]
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


def soaked(
    asked: Asked,
    mode: str,
    model: Path,
    flags: list[str],
    variant: Variant,
    settings: Settings,
    document: dict,
    output: Path,
    ready: float,
    stop_file: Path | None,
) -> None:
    """Serve and soak; fills in the document, whatever happens."""
    engine, tally, log = asked.engine, Tally(), output.with_suffix(".log")
    name, variant_flags = variant.asked_of(engine)
    document["server"] = {}
    console.print(f"{engine.name} with {variant.backend}: starting, log in {log}", highlight=False)
    try:
        with served(
            engine,
            asked.serving(model, mode, variant),
            name,
            [*variant_flags, *flags],
            log=log,
            seconds=ready,
            about=document["server"],
        ) as server:
            server.must_say(variant.proof(is_sparse(model)))
            with closing(Wire(server.url + engine.path, settings.timeout)) as wire:
                probes = Probes(engine, wire, model, asked.forces and mode == "plain")
                traffic = Traffic(engine, wire, settings, tally)
                watched = Log(log, log.stat().st_size)
                Soak(server, mode, probes, traffic, watched, settings, tally, document, output, stop_file).run()
    except Stopped as reason:
        document["stopped"] = str(reason)
    except Failed as error:
        document["failures"].append(str(error))
    finally:
        document["failures"] += tally.sentences()
        document["complete"] = bool(document.pop("soaked", False)) and document["stopped"] is None
        write(document, output)


def main(
    model: Annotated[Path, typer.Argument(help="Folder that train_model.py wrote.")],
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for the server, after --.")] = None,
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    output: Annotated[Path, typer.Option(help="JSON file to write; the server's log goes beside it.")] = Path(
        "soak.json"
    ),
    backend: Annotated[str, typer.Option(help="Attention backend; default: ETAP's name there.")] = "",
    mode: Annotated[str, typer.Option(help="plain, mtp, or for vLLM ngram.")] = "plain",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache, such as fp8_e4m3 or fp8_e4m3+math.")
    ] = "auto",
    cache_tokens: Annotated[int, typer.Option(help="Size of the KV cache in tokens.")] = 1280 * 64,
    memory_share: Annotated[float, typer.Option(help="Of the GPU, that the server may take.")] = 0.25,
    seconds: Annotated[float, typer.Option(min=1, help="How long the traffic lasts, at least.")] = 600,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at once.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 240,
    abort_share: Annotated[float, typer.Option(help="Of the requests, whose stream the client closes.")] = 0.15,
    stream_share: Annotated[float, typer.Option(help="Of the other requests, that are streamed.")] = 0.25,
    probe_every: Annotated[float, typer.Option(help="Seconds between rounds of probes.")] = 20,
    sample_every: Annotated[float, typer.Option(help="Seconds between samples of memory.")] = 5,
    wave_every: Annotated[float, typer.Option(help="Seconds of one concurrency.")] = 10,
    write_every: Annotated[float, typer.Option(help="Seconds between two states of the file.")] = 60,
    host_growth: Annotated[float, typer.Option(help="MiB that the processes' memory may grow by.")] = 512,
    gpu_growth: Annotated[float, typer.Option(help="MiB that their GPU memory may grow by.")] = 256,
    stop_file: Annotated[Path | None, typer.Option(help="Ends the run early once it exists.")] = None,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    ready: Annotated[float, typer.Option(help="Seconds until the server must be ready.")] = 600,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
) -> None:
    """Soak one server with ETAP; exit with 1 when anything was wrong or the run was cut short."""
    if engine not in ASKED or mode not in ASKED[engine].modes:
        said = "; ".join(f"{name} with {', '.join(each.modes)}" for name, each in ASKED.items())
        raise typer.BadParameter(f"--engine, --mode: wanted {said}, got {engine} with {mode}")
    asked = ASKED[engine]
    variant = Variant.parse(f"{backend or asked.engine.ours}+{kv_cache_dtype}")
    try:
        must_be_writable(output)
        training, config = (read_json(model / f"{name}.json") for name in ("training", "config"))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    context = config["max_position_embeddings"]
    gpu_growth += INDEXER_MIB * (engine == "vllm" and is_sparse(model))
    settings = Settings(
        *(seconds, concurrency, timeout, context, abort_share, stream_share, probe_every, sample_every),
        *(wave_every, write_every, host_growth, gpu_growth, seed),
    )
    flags = [*asked.flags(mode, cache_tokens, variant), asked.engine.memory_share, str(memory_share)]
    about = provenance(PROGRAM, packages=(engine, *PACKAGES), library=_library.library_path(), note=note)
    document = {"what": f"soak, {engine}"} | about.model_dump() | {"model": training, "mode": mode}
    document |= {"backend": variant.backend, "settings": asdict(settings)}
    document |= {"complete": False, "stopped": None, "failures": []}
    with stopping(None):
        flags += serve_flags or []
        soaked(asked, mode, model, flags, variant, settings, document, output, ready, stop_file)
    for failure in document["failures"]:
        console.print(f"FAILED {failure}", style="red", markup=False)
    passed = document["complete"] and not document["failures"]
    console.print("passed" if passed else f"not passed (stopped: {document['stopped']})", highlight=False)
    raise typer.Exit(not passed)


if __name__ == "__main__":
    typer.run(main)

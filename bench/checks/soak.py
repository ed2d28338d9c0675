"""Soaks one server of vLLM or SGLang with ETAP: minutes of mixed traffic, and what must not happen meanwhile.

    etap check soak MODEL --engine vllm --output soak.json [--seconds 600] [--mode mtp] [-- flags for the server]

Needs a Hopper GPU, the engine with etap-backend beside it, and the folder of any MODEL. That of
tests/qualify/train_model.py has prompts that it knows by heart; another is probed with random ones, and what is allowed
for rounding is then multiples of what the idle server differs by from itself. Other jobs may use the GPU. Requests come
in waves, up to --concurrency at once (see traffic.py), to a KV cache so small that some are preempted. A run fails for

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

import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from etap_backend import _library
from bench.common import gpus
from bench.checks.agreement import NOISE_FACTOR, PROMPT_TOKENS, agreement, answer_in
from bench.checks.asked import ASKED, PACKAGES, Variant, checked, configuration, is_sparse, is_v4
from bench.checks.traffic import Settings, Tally, Traffic
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, read_json, write
from bench.serving import client
from bench.serving.client import Failed, FailedRequest, Wire
from bench.serving.engines import Answer, Engine
from bench.serving.servers import Served, served
from bench.common.stopping import Stopped, stopping

PROGRAM = "python -m bench.checks.soak"
# Of correct kernels, answers of the trained model parted where the best two tokens were at most 0.125 nats apart, and
# wrong ones at 1.2 and more. Between two servers the largest difference of a step was 0.23 nats and the largest median
# of a request 0.064, where another context gave medians of 3.4.
MOST_GAP, MOST_STEP, MOST_REQUEST, MOST_MEDIAN = 0.5, 1.0, 0.3, 0.05
# Of a model that knows nothing by heart, in medians of the idle server against itself. DeepSeek-V4's layers with seeded
# weights: 0.094 nats; two right servers differed by up to 4.7, 7.9 and 3.9 of these, another context by 20 (median).
GAP_NOISES, STEP_NOISES, REQUEST_NOISES = 10, 16, 8
PROBES = 8  # of each kind
DRAWN, DRAWN_ANSWER = (40, 200, 700, 1500, 2300, 3000, 3600, 4000), 32  # tokens of random prompts, and of their answers
RIGHT_SHARE = 0.9  # of those known by heart
FEW = 4
LEAST_SAMPLES = 16
INDEXER_MIB = 512  # vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
MOST_FAILURES = 500
BAD_LINE = re.compile(
    r"\bERROR\b|\bCRITICAL\b|Traceback \(most recent call last\)|CUDA error|illegal memory access|\b(?i:nan)\b"
)
# SGLang's word for an abort; vLLM's mean of no drafts.
HARMLESS = re.compile(r"disconnected from the client side|SpecDecoding metrics")

console = Console(width=120)


def prompts_of(model: Path) -> dict[str, list[dict]]:
    """The prompts that lie beside the weights, or random ones, of which none is known by heart."""
    if (beside := model / "prompts.json").exists():
        return read_json(beside)
    draw, longest = random.Random(0), configuration(model)["max_position_embeddings"] - DRAWN_ANSWER
    lengths = [length for length in DRAWN if length <= longest]
    answer = [0] * DRAWN_ANSWER
    return {"recite": [], "recall": [{"prompt": draw.choices(PROMPT_TOKENS, k=n), "answer": answer} for n in lengths]}


class Probes:
    """Prompts of which the idle server's answers are known."""

    def __init__(self, engine: Engine, wire: Wire, model: Path, forces: bool):
        self.engine, self.wire, self.forces = engine, wire, forces
        entries = prompts_of(model)
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
        asked = zip(self.kinds, self.reference, strict=True)
        rights = [answer.tokens == entry["answer"] for (kind, entry), answer in asked if kind == "recite"]
        right = statistics.fmean(rights) if rights else None
        if right is not None and right < RIGHT_SHARE:
            raise Failed(f"wanted {RIGHT_SHARE:.0%} of the prompts known by heart answered rightly, got {right:.0%}")
        if wrong := self.objections(again):
            raise Failed(f"the idle server does not agree with itself: {'; '.join(wrong)}")
        return {"recite_right": right, "noise": again.summary()}

    def limits(self) -> list[float]:
        """The largest gap of the best two, difference of a step and median of a request that rounding explains."""
        least = [MOST_GAP, MOST_STEP, MOST_REQUEST]
        if any(kind == "recite" for kind, _ in self.kinds):
            return least
        multiples = (GAP_NOISES, STEP_NOISES, REQUEST_NOISES)
        return [max(one, times * self.noise) for one, times in zip(least, multiples, strict=True)]

    def objections(self, found) -> list[str]:
        """What of an agreement is more than rounding, by request."""
        most_gap, most_step, most_request = self.limits()
        wrong = []
        for index, differences in enumerate(found.differences):
            median, most = (statistics.median(differences), max(differences)) if differences else (0.0, 0.0)
            if not (median <= most_request and most <= most_step):
                wrong.append(f"probe {index} ({self.kinds[index][0]}): median {median:.3f}, largest {most:.3f} nats")
        wrong += [f"another token, the best two {gap:.3f} nats apart" for gap in found.parted if not gap <= most_gap]
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
    document: dict
    output: Path
    stop_file: Path | None
    begin: float = 0.0
    samples: list[tuple[float, float, float | None]] = field(default_factory=list)
    counters_before: dict = field(default_factory=dict)
    most_running: float = 0

    def __post_init__(self) -> None:
        self.settings, self.tally = self.traffic.settings, self.traffic.tally
        self.log = Log(self.server.log, self.server.log.stat().st_size)

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
        every = self.settings.every
        due = {"sample": self.sample, "wave": self.traffic.new_wave, "write": self.note}
        next_at = {"sample": 0.0, "wave": every["wave"], "write": 0.0, "probe": every["probe"] / 2}
        while (now := self.elapsed()) < self.settings.seconds or len(self.samples) < LEAST_SAMPLES:
            if self.stop_file and self.stop_file.exists():
                raise Stopped(f"by {self.stop_file.name}")
            if self.server.process.ended() is not None or sum(self.tally.failures.values()) > MOST_FAILURES:
                return
            for name, action in due.items():
                if now >= next_at[name]:
                    next_at[name] = now + every[name]
                    action()
            if now >= next_at["probe"] and (asked is None or asked.done()):
                next_at["probe"] = now + every["probe"]
                asked = pool.submit(self.probes.round, now, self.tally)
            time.sleep(min(0.5, every["sample"]))
        self.document["soaked"] = True

    def calm(self, pool: ThreadPoolExecutor) -> None:
        """The end of the traffic; then the server is idle again and must answer as before."""
        self.document["rounds_in_traffic"] = len(self.probes.rounds)
        for thread in self.traffic.drained():
            self.tally.fail("hung", f"{thread.name} still waits for its request")
        pool.submit(self.probes.round, self.elapsed(), self.tally).result()
        running = self.server.metrics().get(self.server.engine.running, 0.0)
        if running and self.server.engine.name == "vllm":
            self.tally.fail("left over", f"the idle server says that {running:.0f} requests are running")

    def sample(self) -> None:
        process, metrics = self.server.process, self.server.metrics()
        self.most_running = max(self.most_running, metrics.get(self.server.engine.running, 0.0))
        self.samples.append((self.elapsed(), process.host_mib(), gpus.process_mib(process.running())))

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
        faults, before = dict(self.tally.failures), self.counters_before
        self.document |= {
            "seconds": round(self.elapsed(), 1),
            "requests": dict(self.tally.counts) | {"most_running_at_once": self.most_running},
            "counters": {
                name: None if value is None else value - (before.get(name) or 0)
                for name, value in self.counters().items()
            },
            "faults": {kind: {"times": n, "examples": self.tally.examples[kind]} for kind, n in faults.items()},
            "memory": self.memory(),
        }
        self.document["probes"]["rounds"] = self.probes.rounds
        write(self.document, self.output)
        grown = {kind: memory["growth_mib"] for kind, memory in self.document["memory"].items()}
        memory = ", ".join(f"{kind} {'not known' if mib is None else f'{mib:.0f} MiB'}" for kind, mib in grown.items())
        said = f"{self.document['requests']}, {self.document['counters']}, {len(self.probes.rounds)} rounds of probes"
        console.print(
            f"{self.elapsed():.0f} s: {said}, growth of memory: {memory}, faults {faults}",
            highlight=False,
            markup=False,
        )

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


def outcome(document: dict) -> str:
    """What a page says of a run that began: seconds, and what was counted."""
    counted = {**document.get("requests", {}), **document.get("counters", {})}
    counts = [f"{number:,.0f} {kind}" for kind, number in counted.items() if number]
    return f"{document.get('seconds', 0):.0f} s: {', '.join(counts)}".replace("_", " ")


def main(
    model: Annotated[Path, typer.Argument(help="Folder of any model; train_model.py's has prompts beside it.")],
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
    try:
        variant = Variant.parse(f"{backend or asked.engine.ours}+{kv_cache_dtype}")
        must_be_writable(output)
        training = read_json(beside) if (beside := model / "training.json").exists() else {}
        config = configuration(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sparse, v4 = is_sparse(config), is_v4(config)
    sizes = {"seconds": seconds, "concurrency": concurrency, "context": config["max_position_embeddings"], "seed": seed}
    growth = {"host_growth": host_growth, "gpu_growth": gpu_growth + INDEXER_MIB * (engine == "vllm" and sparse)}
    every = {"probe": probe_every, "sample": sample_every, "wave": wave_every, "write": write_every}
    shares = {"abort_share": abort_share, "stream_share": stream_share}
    settings = Settings(timeout=timeout, every=every, **sizes, **shares, **growth)
    name, flags = variant.asked_of(asked.engine)
    flags += [*asked.flags(mode, cache_tokens, variant), asked.engine.memory_share, str(memory_share)]
    flags += serve_flags or []
    about = provenance(PROGRAM, packages=(engine, *PACKAGES), library=_library.library_path(), note=note)
    document = {"what": checked("soak", engine, v4)} | about.model_dump() | {"model": training, "mode": mode}
    document |= {"backend": variant.backend, "settings": asdict(settings), "server": {}}
    document |= {"complete": False, "stopped": None, "failures": []}
    tally, log = Tally(), output.with_suffix(".log")
    console.print(f"{engine} with {variant.backend}: starting, log in {log}", highlight=False)
    serving, record = asked.serving(model, mode, variant), document["server"]
    try:
        with stopping(None), served(asked.engine, serving, name, flags, log=log, seconds=ready, about=record) as server:
            server.must_say(variant.proof(sparse and not v4))  # V4's line proves it by itself
            wire = Wire(server.url + asked.engine.path, timeout)
            probes = Probes(asked.engine, wire, model, asked.forces and mode == "plain")
            traffic = Traffic(asked.engine, wire, settings, tally)
            Soak(server, mode, probes, traffic, document, output, stop_file).run()
            wire.close()  # not after a failure, when requests wait for an answer that would then never come
    except Stopped as reason:
        document["stopped"] = str(reason)
    except Failed as error:
        document["failures"].append(str(error))
    finally:
        document["failures"] += tally.sentences()
        document["complete"] = bool(document.pop("soaked", False)) and document["stopped"] is None
        document["outcome"] = outcome(document)
        write(document, output)
    for failure in document["failures"]:
        console.print(f"FAILED {failure}", style="red", markup=False)
    passed = document["complete"] and not document["failures"]
    console.print("passed" if passed else f"not passed (stopped: {document['stopped']})", highlight=False)
    raise typer.Exit(not passed)


if __name__ == "__main__":
    typer.run(main)

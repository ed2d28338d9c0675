"""Compares what a trained model answers with ETAP and with an engine's other attention backends.

    python -m etap_backend.lab.checks.train_model MODEL
    python -m etap_backend.lab.checks.answers MODEL --engine vllm --output results/answers-vllm.json
    python -m etap_backend.lab.checks.answers MODEL --engine vllm --output answers-fp8.json --kv-cache-dtype fp8
    python -m etap_backend.lab.checks.answers MODEL --engine vllm --output answers-two-gpus.json --layouts tp2,dcp2
    python -m etap_backend.lab.checks.answers MODEL --engine vllm --parallel 4 -- --kv-cache-memory-bytes 1000000000

Needs a Hopper GPU and the engine with etap-backend beside it. For each backend and mode (plain; mtp: the model's own
MTP layer proposes tokens; ngram: the prompt does, vLLM only) one server runs, with a KV cache so small that requests
are preempted. It answers the prompts of MODEL/prompts.json greedily:

- together: 256 at a time;
- again: the same, 32 at a time, over what the prefix cache holds;
- forced (vLLM, plain): token by token what the reference answered, for the perplexity of the same text.

Two kinds of prompts, recite and recall, have right answers. A kind that the reference answers rightly in nine of ten
cases is judged; if it is none, the model did not learn, and equal answers say little: that is a failure. So are answers
of ETAP that are not equal to another backend's for 99% of the prompts of a judged kind, perplexities that differ by
more than 0.1%, and a run in which nothing was preempted, found in the prefix cache or accepted as a draft. What is not
judged is reported: where many tokens would do, two correct kernels part at near ties, the reference from itself too.

With --kv-cache-dtype the reference keeps the model's own type of cache, and the others are ETAP with the type given,
ETAP with it and FP8 math, and the reference's backend with it. ETAP's answers must then equal the reference's as above,
and its perplexity may differ by 0.5%; how the last one does is reported beside it.

A model of sparse attention is asked the same with --backends FLASH_ATTN_MLA_SPARSE,FLASHMLA_SPARSE,ETAP in vLLM, and
dsa,etap in SGLang. With an FP8 cache they are named too: FLASH_ATTN_MLA_SPARSE,ETAP+fp8,FLASHMLA_SPARSE+fp8.

With --layouts there are servers of ETAP on several GPUs besides: tp2 is tensor parallelism of two ranks, dcp2 the same
with decode context parallelism of two. Their answers must equal the reference's and ETAP's on one GPU as above. They
get the flags and variables of --scenario, which keep NVLink multicast and compilers out of a start. Under context
parallelism nothing is drafted here: SGLang refuses that with ETAP.

Servers that a --work folder has answers of are not started again, so a run may be continued. With --parallel several
run at once on the GPU; vLLM then needs --kv-cache-memory-bytes, because it takes what others allocate for its own.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend import _library
from etap_backend.lab import gpus
from etap_backend.lab.checks.agreement import answer_in
from etap_backend.lab.e2e.scenario import EngineScenario, read_scenario
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, read_json, write
from etap_backend.lab.serving import client
from etap_backend.lab.serving.client import Deadline, Failed
from etap_backend.lab.serving.engines import ENGINES, Answer, Engine, Serving
from etap_backend.lab.serving.lifecycle import end_all
from etap_backend.lab.serving.servers import Served, served
from etap_backend.lab.stopping import Stopped, stopping
from etap_backend.limits import SPARSE_FP8

PROGRAM = "python -m etap_backend.lab.checks.answers"
PACKAGES = ("etap-backend", "torch", "apache-tvm-ffi", "triton", "flashinfer-python", "sglang-kernel")
ETAP = "ETAP"
MANY, FEW = 256, 32  # requests in flight
MEMORY_SHARE = 0.5
EQUAL_SHARE = 0.99  # of the recall prompts
PERPLEXITY_SHARE = 0.001
FP8_PERPLEXITY_SHARE = 0.005  # of an FP8 cache against the model's own type
RIGHT_SHARE = 0.9
MODES = ("plain", "mtp", "ngram")
DRAFT_TOKENS = 3

console = Console(width=120)


@dataclass(frozen=True)
class Variant:
    """An attention backend, its KV cache and its GPUs: `ETAP`, `ETAP+fp8`, `ETAP+fp8+math` with FP8 math, `ETAP@tp2`,
    `ETAP@dcp2`."""

    backend: str
    cache: str = "auto"
    fp8_math: bool = False
    tp: int = 1
    dcp: int = 1

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Raises ValueError when behind an @ there is no layout."""
        first, at, layout = name.partition("@")
        backend, cache, math = (*first.split("+"), "", "")[:3]
        tp, dcp = parse_layout(layout) if at else (1, 1)
        return cls(backend, cache or "auto", math == "math", tp, dcp)

    @property
    def is_etap(self) -> bool:
        return self.backend.upper() == ETAP

    @property
    def own_cache(self) -> bool:
        """Whether the cache has the model's own type."""
        return self.cache == "auto"

    @property
    def one_gpu(self) -> bool:
        return self.tp == 1

    def asked_of(self, engine: Engine) -> tuple[str, list[str]]:
        """Name and flags by which a server is asked for it."""
        name, flags = engine.fp8_math if self.fp8_math else (self.backend, [])
        return name, ["--kv-cache-dtype", self.cache, *flags]

    def proof(self, sparse: bool = False) -> str:
        """What the log says besides when ETAP has this cache and math, in a model of dense or of sparse attention."""
        if not self.is_etap:
            return ""
        if sparse:
            return f"sparse attention, KV cache {'bfloat16' if self.own_cache else SPARSE_FP8}"
        return "" if self.own_cache else f"KV cache FP8 (e4m3), math {'FP8 (e4m3)' if self.fp8_math else 'float16'}"


def is_sparse(model: Path) -> bool:
    """Whether the model's attention is sparse. Raises ValueError where it has no configuration."""
    return "index_topk" in read_json(model / "config.json")


def parse_layout(text: str) -> tuple[int, int]:
    """Ranks of tensor and of decode context parallelism, from tp2, dcp2 or the like. Raises ValueError otherwise."""
    if not (found := re.fullmatch(r"(tp|dcp)([1-9]\d*)", text)):
        raise ValueError(f"--layouts: wanted some of tp2, dcp2 and the like, got {text!r}")
    ranks = int(found[2])
    return ranks, ranks if found[1] == "dcp" else 1


def must_have_gpus(wanted: int) -> None:
    """Raises ValueError where several are wanted and there are not so many."""
    if wanted > 1 and (found := len(gpus.gpus())) < wanted:
        raise ValueError(f"--layouts: wanted {wanted} GPUs, this machine shows {found}")


def on_gpus(backends: list[str], layouts: list[str]) -> list[str]:
    """These, and ETAP in each layout besides."""
    etap = [name for name in backends if Variant.parse(name).is_etap]
    return [*backends, *(f"{name}@{layout}" for layout in layouts for name in etap)]


def with_cache(backends: list[str], cache: str) -> list[str]:
    """The reference with its own cache, then ETAP's two ways to read the other one, then the reference with that."""
    reference, etap = backends[0], next((name for name in backends if Variant.parse(name).is_etap), ETAP)
    return [reference, f"{etap}+{cache}", f"{etap}+{cache}+math", f"{reference}+{cache}"]


@dataclass(frozen=True)
class Asked:
    """What an engine is asked for here.

    Attributes:
        backends: attention backends, the reference first.
        modes: who proposes tokens.
        forces: whether it can be made to answer given tokens.
        roomy: modes with room for all requests, in which none is preempted.
    """

    engine: Engine
    backends: tuple[str, ...]
    modes: tuple[str, ...]
    forces: bool
    roomy: tuple[str, ...] = ()

    def serving(self, model: Path, mode: str, variant: Variant) -> Serving:
        drafts = {"draft_tokens": DRAFT_TOKENS, "drafter": mode} if mode != "plain" else {}
        return Serving(str(model), tp=variant.tp, dcp=variant.dcp, max_requests=MANY, **drafts)

    def flags(self, mode: str, cache_tokens: int, variant: Variant) -> list[str]:
        """Besides those of every server: a small cache, and in plain mode what forces answers."""
        room = (8 * cache_tokens if mode in self.roomy else cache_tokens) // variant.dcp
        forcing = ["--logits-processors", "etap_backend.lab.checks.forced_tokens:ForcedTokens"]
        flags = [*self.engine.small_cache(room), self.engine.memory_share, str(MEMORY_SHARE)]
        return [*flags, *(forcing if self.forces and mode == "plain" else [])]


ASKED = {
    "vllm": Asked(ENGINES["vllm"], ("FLASHMLA", ETAP, "TRITON_MLA"), MODES, forces=True),
    # SGLang 0.5.17 loses a log-probability of a drafting request that it retracts.
    "sglang": Asked(ENGINES["sglang"], ("flashmla", "etap", "triton"), ("plain", "mtp"), forces=False, roomy=("mtp",)),
}


def perplexity(answers: Sequence[Answer]) -> float:
    """Of all tokens of all answers."""
    return math.exp(-statistics.fmean(logprob for answer in answers for logprob in answer.logprobs))


def compared(ours: Sequence[Answer], theirs: Sequence[Answer]) -> dict:
    """How many answers are equal, how far the others agree, and how near a tie they part."""
    equal, agreed, gaps = 0, 0, []
    for a, b in zip(ours, theirs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), len(b.tokens))
        equal += same == len(b.tokens)
        agreed += same
        if same < len(b.tokens):
            gaps.append(b.gaps[same])
    tokens = sum(len(b.tokens) for b in theirs)
    return {
        "prompts": len(theirs),
        "equal": equal,
        "equal_share": equal / len(theirs),
        "tokens_before_parting": agreed / tokens,
        "gaps_where_parted": sorted(round(gap, 4) for gap in gaps),
    }


@dataclass
class Run:
    """All servers of one comparison; `answers[backend][mode][stage][kind]`."""

    asked: Asked
    model: Path
    work: Path
    backends: list[str]
    modes: list[str]
    cache_tokens: int
    extra: list[str]
    parallel: int
    ready: float
    deadline: Deadline
    on_several: EngineScenario
    variables: dict[str, str]
    records: dict[tuple[str, str], Future] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompts = read_json(self.model / "prompts.json")
        self.prompts = {kind: [entry["prompt"] for entry in entries] for kind, entries in prompts.items()}
        self.right = {
            kind: [entry["answer"] for entry in entries] for kind, entries in prompts.items() if "answer" in entries[0]
        }
        self.new_tokens = len(self.right["recite"][0])

    def ask(
        self, server: Served, concurrency: int, forced: dict[str, list[Answer]] | None = None
    ) -> dict[str, list[Answer]]:
        """Answers to the prompts of every kind, all in one stream."""
        flat = [(kind, index) for kind, prompts in self.prompts.items() for index in range(len(prompts))]
        wanted = {(kind, i): forced[kind][i].tokens if forced else None for kind, i in flat}
        engine, tokens = self.asked.engine, self.new_tokens
        bodies = [engine.body(self.prompts[kind][i], tokens, logprobs=2, forced=wanted[kind, i]) for kind, i in flat]
        replies = server.ask(bodies, concurrency, self.deadline.left(300, "answers"))
        answers = {kind: [] for kind in self.prompts}
        for (kind, index), reply in zip(flat, replies, strict=True):
            answers[kind].append(answer_in(engine, reply, tokens, wanted[kind, index]))
        return answers

    def serve(self, backend: str, mode: str) -> dict:
        """Start a server, ask everything, and keep it in the work folder."""
        variant, engine, record = Variant.parse(backend), self.asked.engine, {}
        own = [] if variant.one_gpu else self.on_several.flags
        name, flags = variant.asked_of(engine)
        flags = [*own, *self.asked.flags(mode, self.cache_tokens, variant), *flags, *self.extra]
        variables = {} if variant.one_gpu else {**self.variables, **self.on_several.environment}
        log, begin = self.work / f"{backend}-{mode}.log", time.monotonic()
        console.print(f"[bold]{backend} {mode}[/]: starting, log in {log}")
        with served(
            engine,
            self.asked.serving(self.model, mode, variant),
            name,
            flags,
            log=log,
            seconds=self.deadline.left(self.ready, "the start of a server"),
            about=record,
            environment=variables,
        ) as server:
            server.must_say(variant.proof(is_sparse(self.model)))
            stages = {"together": self.ask(server, MANY), "again": self.ask(server, FEW)}
            if self.asked.forces and mode == "plain":
                of_reference = self.records[self.backends[0], "plain"]
                own = of_reference is self.records[backend, mode]
                source = stages if own else of_reference.result()["stages"]
                stages["forced"] = self.ask(server, MANY, source["together"])
            told = {
                name: sample
                for name, sample in engine.counters.items()
                if name != "preempted" or mode not in self.asked.roomy
            }
            record["counters"] = client.counted(server.metrics(), told)
        record["seconds"] = round(time.monotonic() - begin, 1)
        raw = {s: {k: [asdict(a) for a in answers] for k, answers in kinds.items()} for s, kinds in stages.items()}
        write(record | {"stages": raw}, self.file(backend, mode))
        return record | {"stages": stages}

    def file(self, backend: str, mode: str) -> Path:
        return self.work / f"{backend}-{mode}.json"

    def load(self, backend: str, mode: str) -> dict | None:
        """What an earlier server answered."""
        if not self.file(backend, mode).exists():
            return None
        record = read_json(self.file(backend, mode))
        for kinds in record["stages"].values():
            for kind, answers in kinds.items():
                kinds[kind] = [Answer(**answer) for answer in answers]
        return record

    def servers(self) -> list[tuple[str, str]]:
        """Backends and modes: all, but drafts under context parallelism."""
        every = ((backend, mode) for mode in self.modes for backend in self.backends)
        return [(backend, mode) for backend, mode in every if mode == "plain" or Variant.parse(backend).dcp == 1]

    def all(self) -> tuple[dict[tuple[str, str], dict], list[str]]:
        """Every server's record, and what failed; those that are not there yet are run, the reference first."""
        found, failures = {}, []
        with ThreadPoolExecutor(self.parallel) as pool:
            for key in self.servers():
                self.records[key] = pool.submit(lambda key: self.load(*key) or self.serve(*key), key)
            try:
                for key, record in self.records.items():
                    try:
                        found[key] = record.result()
                    except Failed as error:
                        failures.append(f"{' '.join(key)}: {error}")
            except Stopped:
                pool.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise
        return found, failures


def right_share(answers: Sequence[Answer], right: list[list[int]]) -> float:
    return statistics.fmean(answer.tokens == tokens for answer, tokens in zip(answers, right, strict=True))


def server_summary(record: dict, right: dict[str, list[list[int]]]) -> dict:
    """One server's record without its answers."""
    stages = record["stages"]
    return {key: value for key, value in record.items() if key != "stages"} | {
        "right": {kind: right_share(stages["together"][kind], tokens) for kind, tokens in right.items()},
        "perplexity": {stage: {kind: perplexity(a) for kind, a in kinds.items()} for stage, kinds in stages.items()},
        "again_equals_together": {kind: compared(stages["again"][kind], stages["together"][kind]) for kind in right},
    }


def pair_summaries(records: dict[tuple[str, str], dict], backends: list[str]) -> list[dict]:
    """Every two backends in the same mode and stage; and every backend with its own plain answers."""
    pairs = []
    for backend, mode in records:
        others = [(other, mode) for other in backends[backends.index(backend) + 1 :]]
        others += [(backend, "plain")] if mode != "plain" and (backend, "plain") in records else []
        for other in (key for key in others if key in records):
            for stage in ("together", "again"):
                for kind in records[other]["stages"][stage]:
                    ours, theirs = (records[key]["stages"][stage][kind] for key in ((backend, mode), other))
                    about = {"backend": backend, "mode": mode, "other": other[0], "other_mode": other[1]}
                    pairs.append(about | {"stage": stage, "kind": kind} | compared(ours, theirs))
    return pairs


def judge(servers: dict[str, dict], pairs: list[dict]) -> list[str]:
    """What speaks against ETAP, or against the run."""
    found = []
    reference = next(iter(servers.values()))
    judged = [kind for kind, share in reference["right"].items() if share >= RIGHT_SHARE]
    if not judged:
        shares = ", ".join(f"{share:.1%} of {kind}" for kind, share in reference["right"].items())
        found.append(f"the reference answers {shares} rightly, wanted {RIGHT_SHARE:.0%} of one: train longer")
    for name, server in servers.items():
        for what, value in server["counters"].items():
            if not value and (what in ("preempted", "prefix tokens found") or not name.endswith(" plain")):
                found.append(f"{name}: {what}: wanted some, got {value}")
    for pair in pairs:
        two = pair["backend"], pair["other"]
        must_agree = pair["mode"] == pair["other_mode"] and (judged_by(*two) or judged_by(*reversed(two)))
        if must_agree and pair["kind"] in judged and pair["equal_share"] < EQUAL_SHARE:
            names = f"{pair['backend']} and {pair['other']}, {pair['mode']}, {pair['stage']}, {pair['kind']}"
            found.append(f"{names}: {pair['equal']} of {pair['prompts']} answers equal, wanted {EQUAL_SHARE:.0%}")
    return found + judge_perplexity(servers, judged)


def judged_by(one: str, other: str) -> bool:
    """Whether the first, ETAP, must agree with the second: another backend on one GPU with the model's own cache, or
    ETAP with the same cache on one GPU where the first has several."""
    ours, theirs = Variant.parse(one), Variant.parse(other)
    if not ours.is_etap or not theirs.one_gpu:
        return False
    if not theirs.is_etap:
        return theirs.own_cache
    return replace(ours, tp=1, dcp=1) == theirs and not ours.one_gpu


def judge_perplexity(servers: dict[str, dict], judged: list[str]) -> list[str]:
    """Forced along the same tokens, or where the engine cannot force, of each one's own answers of a judged kind."""
    found = []
    for name, server in servers.items():
        variant, mode = name.split()
        for other, theirs in servers.items():
            if other.split()[1] != mode or not judged_by(variant, other.split()[0]):
                continue
            share = PERPLEXITY_SHARE if Variant.parse(variant).own_cache else FP8_PERPLEXITY_SHARE
            stage = "forced" if "forced" in server["perplexity"] else "together"
            kinds = server["perplexity"][stage] if stage == "forced" else judged
            for kind in kinds:
                a, b = server["perplexity"][stage][kind], theirs["perplexity"][stage][kind]
                if not abs(a / b - 1) <= share:
                    found.append(f"{name} and {other}: {stage} {kind} perplexity {a:.5f} and {b:.5f}")
    return found


def print_tables(document: dict) -> None:
    for name, server in document["servers"].items():
        console.print(f"{name}: {'; '.join(server['cache'])}", highlight=False)
    servers = Table("server", "right", "preempted", "prefix tokens", "drafts accepted", "forced perplexity")
    for name, server in document["servers"].items():
        counters, forced = server["counters"], server["perplexity"].get("forced", {})
        accepted = counters.get("drafts accepted")
        servers.add_row(
            name,
            ", ".join(f"{kind} {share:.1%}" for kind, share in server["right"].items()),
            str(counters.get("preempted", "room for all")),
            str(counters["prefix tokens found"]),
            f"{accepted / counters['drafts']:.0%}" if accepted else "",
            ", ".join(f"{kind} {value:.5f}" for kind, value in forced.items()),
        )
    console.print(servers)
    table = Table("backend", "and", "stage", "kind", "equal", "of", "parted at gaps up to")
    for pair in document["pairs"]:
        gaps = pair["gaps_where_parted"]
        table.add_row(
            f"{pair['backend']} {pair['mode']}",
            f"{pair['other']} {pair['other_mode']}",
            pair["stage"],
            pair["kind"],
            str(pair["equal"]),
            str(pair["prompts"]),
            f"{gaps[-1]:.3f}" if gaps else "",
        )
    console.print(table)


def main(
    model: Annotated[Path, typer.Argument(help="Folder that train_model.py wrote.")],
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for every server, after --.")] = None,
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("answers.json"),
    work: Annotated[Path | None, typer.Option(help="Folder for answers and logs; default: beside the output.")] = None,
    backends: Annotated[str, typer.Option(help="The reference first; default: the engine's.")] = "",
    modes: Annotated[str, typer.Option(help="Of plain, mtp, ngram.")] = "plain,mtp",
    cache_tokens: Annotated[int, typer.Option(help="Size of the KV cache in tokens.")] = 640 * 64,
    kv_cache_dtype: Annotated[str, typer.Option(help="Compare this cache with the model's own type: fp8_e4m3.")] = "",
    layouts: Annotated[str, typer.Option(help="ETAP on several GPUs besides, such as tp2,dcp2.")] = "",
    scenario: Annotated[
        str, typer.Option(help="Whose flags and environment variables servers on several GPUs get.")
    ] = "decode-plain",
    parallel: Annotated[int, typer.Option(min=1, help="Servers at a time.")] = 1,
    ready: Annotated[float, typer.Option(help="Seconds until a server must be ready.")] = 300,
    limit: Annotated[float, typer.Option(help="Seconds for everything.")] = 1800,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
) -> None:
    """Compare the answers of attention backends; exit with 1 when they differ by more than allowed."""
    if engine not in ASKED:
        raise typer.BadParameter(f"--engine: wanted one of {', '.join(ASKED)}, got {engine}")
    asked, wanted = ASKED[engine], modes.split(",")
    if wrong := [mode for mode in wanted if mode not in asked.modes]:
        raise typer.BadParameter(f"--modes: wanted some of {', '.join(asked.modes)}, got {', '.join(wrong)}")
    work = work or output.with_suffix("")
    try:
        chosen = backends.split(",") if backends else list(asked.backends)
        chosen = with_cache(chosen, kv_cache_dtype) if kv_cache_dtype else chosen
        chosen = on_gpus(chosen, layouts.split(",")) if layouts else chosen
        must_have_gpus(max(Variant.parse(name).tp for name in chosen))
        several = read_scenario(scenario)
        if (specific := getattr(several, engine)) is None:
            raise ValueError(f"--scenario: wanted one with a table [{engine}], got {scenario}")
        deadline = Deadline(time.monotonic() + limit)
        run = Run(
            *(asked, model, work, chosen, wanted, cache_tokens, serve_flags or [], parallel, ready, deadline),
            *(specific, several.environment),
        )
        training = read_json(model / "training.json")
        must_be_writable(output)
        work.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    about = provenance(PROGRAM, packages=(engine, *PACKAGES), library=_library.library_path(), note=note)
    with stopping(None):
        records, failures = run.all()
    document = {"what": f"answers of a trained model, {engine}"} | about.model_dump() | {"model": training}
    document["servers"] = {f"{b} {m}": server_summary(record, run.right) for (b, m), record in records.items()}
    document["pairs"] = pair_summaries(records, chosen)
    document["failures"] = failures + (judge(document["servers"], document["pairs"]) if records else [])
    write(document, output)
    print_tables(document)
    for failure in document["failures"]:
        console.print(f"FAILED {failure}", style="red", markup=False)
    console.print("failed" if document["failures"] else "the answers agree")
    raise typer.Exit(bool(document["failures"]))


if __name__ == "__main__":
    typer.run(main)

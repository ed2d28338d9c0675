"""Compares what a trained model answers with ETAP and with an engine's other attention backends.

    python tests/answers/train_model.py MODEL
    python tests/answers/compare_answers.py MODEL --engine vllm --output results/answers-vllm.json
    python tests/answers/compare_answers.py MODEL --engine vllm --output answers-fp8.json --kv-cache-dtype fp8
    python tests/answers/compare_answers.py MODEL --engine vllm --parallel 4 -- --kv-cache-memory-bytes 1000000000

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

Servers that a --work folder has answers of are not started again, so a run may be continued. With --parallel several
run at once on the GPU; vLLM then needs --kv-cache-memory-bytes, because it takes what others allocate for its own.
"""

import asyncio
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
from etap_backend.lab.checks.vllm_serve import CheckError, Deadline, cache_lines, provenance, serving  # noqa: E402

ETAP = "ETAP"
MANY, FEW = 256, 32  # requests in flight
EQUAL_SHARE = 0.99  # of the recall prompts
PERPLEXITY_SHARE = 0.001
FP8_PERPLEXITY_SHARE = 0.005  # of an FP8 cache against the model's own type
RIGHT_SHARE = 0.9
MODES = ("plain", "mtp", "ngram")
DRAFT_TOKENS = 3
PAGE = 64

console = Console(width=120)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one prompt, each one's log-probability, and how far the best token is from the second."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@dataclass(frozen=True)
class Variant:
    """An attention backend and its KV cache, as `ETAP`, `ETAP+fp8` or `ETAP+fp8+math`, the last with FP8 math."""

    backend: str
    cache: str = "auto"
    fp8_math: bool = False

    @classmethod
    def parse(cls, name: str) -> "Variant":
        backend, cache, math = (*name.split("+"), "", "")[:3]
        return cls(backend, cache or "auto", math == "math")

    @property
    def is_etap(self) -> bool:
        return self.backend.upper() == ETAP

    @property
    def own_cache(self) -> bool:
        """Whether the cache has the model's own type."""
        return self.cache == "auto"

    @property
    def flags(self) -> list[str]:
        return ["--kv-cache-dtype", self.cache]

    @property
    def environment(self) -> dict[str, str]:
        return {"ETAP_FP8_MATH": str(int(self.fp8_math))}

    def proof(self) -> str:
        """What the log says besides when ETAP has this cache and math."""
        if not self.is_etap or self.own_cache:
            return ""
        return f"KV cache FP8 (e4m3), math {'FP8 (e4m3)' if self.fp8_math else 'float16'}"


def with_cache(backends: list[str], cache: str) -> list[str]:
    """The reference with its own cache, then ETAP's two ways to read the other one, then the reference with that."""
    reference, etap = backends[0], next((name for name in backends if Variant.parse(name).is_etap), ETAP)
    return [reference, f"{etap}+{cache}", f"{etap}+{cache}+math", f"{reference}+{cache}"]


class Vllm:
    """How vLLM is started and asked, and what its counters are called."""

    backends = ("FLASHMLA", ETAP, "TRITON_MLA")
    modes = MODES
    path = "/v1/completions"
    counters = {
        "preempted": "vllm:num_preemptions_total",
        "prefix tokens found": "vllm:prefix_cache_hits_total",
        "drafts": "vllm:spec_decode_num_draft_tokens_total",
        "drafts accepted": "vllm:spec_decode_num_accepted_tokens_total",
    }
    forces = True
    roomy: tuple[str, ...] = ()
    """Modes with room for all requests, in which none is preempted."""

    def proof(self, backend: str) -> str:
        """What the log says when this backend is in use."""
        return f"Using AttentionBackendEnum.{backend} backend."

    def command(self, model: Path, backend: str, mode: str, cache_tokens: int) -> list[str]:
        flags = {
            "plain": ["--logits-processors", "forced_tokens:ForcedTokens"],
            "mtp": ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS})],
            "ngram": [
                "--speculative-config",
                json.dumps({"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 4}),
            ],
        }
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "answers"),
            *("--attention-backend", backend, "--max-num-seqs", str(MANY), "--block-size", str(PAGE)),
            *("--num-gpu-blocks-override", str(cache_tokens // PAGE), "--gpu-memory-utilization", "0.5"),
            *("--seed", "0", "--enable-prefix-caching"),
            *("--disable-uvicorn-access-log", *flags[mode]),
        ]

    def body(self, prompt: list[int], tokens: int, forced: list[int] | None) -> dict:
        body = {
            "model": "answers",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
        }
        return body | ({} if forced is None else {"vllm_xargs": {"forced_tokens": forced}})

    def parse(self, reply: dict) -> Answer:
        logprobs = reply["choices"][0]["logprobs"]
        tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        best = [sorted(step.values(), reverse=True)[:2] for step in logprobs["top_logprobs"]]
        return Answer(tokens, logprobs["token_logprobs"], [first - second for first, second in best])


class Sglang:
    """The same of SGLang."""

    backends = ("flashmla", "etap", "triton")
    modes = ("plain", "mtp")
    path = "/generate"
    counters = {
        "preempted": "sglang:num_retracted_requests_total",
        "prefix tokens found": "sglang:cached_tokens_total",
    }
    forces = False
    roomy = ("mtp",)  # SGLang 0.5.17 loses a log-probability of a drafting request that it retracts

    def proof(self, backend: str) -> str:
        return f"attention_backend='{backend}'"

    def command(self, model: Path, backend: str, mode: str, cache_tokens: int) -> list[str]:
        room = 8 * cache_tokens if mode in self.roomy else cache_tokens
        flags = {
            "plain": [],
            "mtp": [
                *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(DRAFT_TOKENS)),
                *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(DRAFT_TOKENS + 1)),
            ],
        }
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--page-size", str(PAGE)),
            *("--attention-backend", backend, "--max-total-tokens", str(room)),
            *("--max-running-requests", str(MANY)),
            *("--mem-fraction-static", "0.5", "--random-seed", "0", "--enable-metrics", "--skip-server-warmup"),
            *flags[mode],
        ]

    def body(self, prompt: list[int], tokens: int, forced: list[int] | None) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}

    def parse(self, reply: dict) -> Answer:
        about = reply["meta_info"]
        tokens = [token for _, token, *_ in about["output_token_logprobs"]]
        best = [sorted((step[0] for step in steps), reverse=True)[:2] for steps in about["output_top_logprobs"]]
        gaps = [first - second for first, second in best]
        return Answer(tokens, [logprob for logprob, *_ in about["output_token_logprobs"]], gaps)


ENGINES = {"vllm": Vllm(), "sglang": Sglang()}


def checked(answer: Answer, tokens: int, forced: list[int] | None) -> Answer:
    """The answer, if it is complete, finite and as forced."""
    if not len(answer.tokens) == len(answer.logprobs) == len(answer.gaps) == tokens:
        raise CheckError(f"wanted {tokens} tokens, got {len(answer.tokens)}")
    for value in (*answer.logprobs, *answer.gaps):
        if not -9000 < value < 9000:  # vLLM reports minus infinity as -9999
            raise CheckError(f"wanted finite log-probabilities, got {value}")
    if forced is not None and answer.tokens != forced:
        raise CheckError(f"wanted the tokens {forced}, got {answer.tokens}")
    return answer


async def _post_all(url: str, bodies: Sequence[dict], concurrency: int, seconds: float) -> list[dict]:
    import aiohttp  # comes with both engines

    gate = asyncio.Semaphore(concurrency)

    async def post(session, body: dict) -> dict:
        async with gate, session.post(url, json=body) as response:
            if response.status != 200:
                raise CheckError(f"wanted status 200, got {response.status}: {(await response.text())[:500]}")
            return await response.json()

    timeout = aiohttp.ClientTimeout(total=seconds)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(post(session, body) for body in bodies))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise CheckError(f"wanted {len(bodies)} answers within {seconds:.0f} s, got {error!r}") from error


def read_counters(metrics: str, names: dict[str, str]) -> dict[str, float | None]:
    """Each counter's sum over its labels in the text of /metrics; None where it is absent."""
    found = {}
    for what, name in names.items():
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
        found[what] = sum(map(float, values)) if values else None
    return found


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

    engine: Vllm | Sglang
    model: Path
    work: Path
    backends: list[str]
    modes: list[str]
    cache_tokens: int
    flags: list[str]
    parallel: int
    ready: float
    deadline: Deadline
    records: dict[tuple[str, str], Future] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompts = json.loads((self.model / "prompts.json").read_text())
        self.prompts = {kind: [entry["prompt"] for entry in entries] for kind, entries in prompts.items()}
        self.right = {
            kind: [entry["answer"] for entry in entries] for kind, entries in prompts.items() if "answer" in entries[0]
        }
        self.new_tokens = len(self.right["recite"][0])

    def ask(self, url: str, concurrency: int, forced: dict[str, list[Answer]] | None = None) -> dict[str, list[Answer]]:
        """Answers to the prompts of every kind, all in one stream."""
        flat = [(kind, index) for kind, prompts in self.prompts.items() for index in range(len(prompts))]
        wanted = {(kind, i): forced[kind][i].tokens if forced else None for kind, i in flat}
        bodies = [self.engine.body(self.prompts[kind][i], self.new_tokens, wanted[kind, i]) for kind, i in flat]
        seconds = self.deadline.left(300, "answers")
        replies = asyncio.run(_post_all(url + self.engine.path, bodies, concurrency, seconds))
        answers = {kind: [] for kind in self.prompts}
        for (kind, index), reply in zip(flat, replies, strict=True):
            answers[kind].append(checked(self.engine.parse(reply), self.new_tokens, wanted[kind, index]))
        return answers

    def serve(self, backend: str, mode: str) -> dict:
        """Start a server, ask everything, and keep it in the work folder."""
        variant = Variant.parse(backend)
        command = self.engine.command(self.model, variant.backend, mode, self.cache_tokens)
        command += variant.flags + self.flags
        console.print(f"[bold]{backend} {mode}[/]: {shlex.join(['python', *command[1:]])}")
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path} | variant.environment
        start = time.monotonic()
        log = self.work / f"{backend}-{mode}.log"
        with serving(command, log, environment, self.ready, self.deadline) as server:
            ready = time.monotonic() - start
            stages = {"together": self.ask(server.url, MANY), "again": self.ask(server.url, FEW)}
            if self.engine.forces and mode == "plain":
                of_reference = self.records[self.backends[0], "plain"]
                own = of_reference is self.records[backend, mode]
                source = stages if own else of_reference.result()["stages"]
                stages["forced"] = self.ask(server.url, MANY, source["together"])
            with urllib.request.urlopen(f"{server.url}/metrics", None, 20) as response:
                metrics = response.read().decode()
        text = log.read_text(errors="replace")
        told = {
            name: n for name, n in self.engine.counters.items() if name != "preempted" or mode not in self.engine.roomy
        }
        record = {
            "command": shlex.join(["python", *command[1:]]),
            "cache": cache_lines(text),
            "seconds_to_ready": ready,
            "seconds": time.monotonic() - start,
            "counters": read_counters(metrics, told),
            "backend_in_use": self.engine.proof(variant.backend) in text and variant.proof() in text,
        }
        raw = {s: {k: [asdict(a) for a in answers] for k, answers in kinds.items()} for s, kinds in stages.items()}
        self.file(backend, mode).write_text(json.dumps(record | {"stages": raw}))
        return record | {"stages": stages}

    def file(self, backend: str, mode: str) -> Path:
        return self.work / f"{backend}-{mode}.json"

    def load(self, backend: str, mode: str) -> dict | None:
        """What an earlier server answered."""
        if not self.file(backend, mode).exists():
            return None
        record = json.loads(self.file(backend, mode).read_text())
        for kinds in record["stages"].values():
            for kind, answers in kinds.items():
                kinds[kind] = [Answer(**answer) for answer in answers]
        return record

    def all(self) -> dict[tuple[str, str], dict]:
        """Every server's record; those that are not there yet are run. The reference, the first backend, goes first."""
        with ThreadPoolExecutor(self.parallel) as pool:
            for key in [(backend, mode) for mode in self.modes for backend in self.backends]:
                self.records[key] = pool.submit(lambda key: self.load(*key) or self.serve(*key), key)
        return {key: record.result() for key, record in self.records.items()}


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
        if not server["backend_in_use"]:
            found.append(f"{name}: the log does not say that the backend is in use")
        for what, value in server["counters"].items():
            if not value and (what in ("preempted", "prefix tokens found") or not name.endswith(" plain")):
                found.append(f"{name}: {what}: wanted some, got {value}")
    for pair in pairs:
        must_agree = pair["mode"] == pair["other_mode"] and judged_together(pair["backend"], pair["other"])
        if must_agree and pair["kind"] in judged and pair["equal_share"] < EQUAL_SHARE:
            names = f"{pair['backend']} and {pair['other']}, {pair['mode']}, {pair['stage']}, {pair['kind']}"
            found.append(f"{names}: {pair['equal']} of {pair['prompts']} answers equal, wanted {EQUAL_SHARE:.0%}")
    return found + judge_perplexity(servers, judged)


def judged_together(one: str, other: str) -> bool:
    """Whether these two must agree: ETAP and another backend with the same cache, ETAP and one with the model's own."""
    a, b = Variant.parse(one), Variant.parse(other)
    return a.is_etap != b.is_etap and (a if b.is_etap else b).own_cache


def judge_perplexity(servers: dict[str, dict], judged: list[str]) -> list[str]:
    """Forced along the same tokens, or where the engine cannot force, of each one's own answers of a judged kind."""
    found = []
    for name, server in servers.items():
        variant, mode = name.split()
        for other, theirs in servers.items() if Variant.parse(variant).is_etap else ():
            if other.split()[1] != mode or not judged_together(variant, other.split()[0]):
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
    parallel: Annotated[int, typer.Option(min=1, help="Servers at a time.")] = 1,
    ready: Annotated[float, typer.Option(help="Seconds until a server must be ready.")] = 300,
    limit: Annotated[float, typer.Option(help="Seconds for everything.")] = 1800,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
) -> None:
    """Compare the answers of attention backends; exit with 1 when they differ by more than allowed."""
    asked = ENGINES[engine]
    if wrong := [mode for mode in modes.split(",") if mode not in asked.modes]:
        raise typer.BadParameter(f"modes: wanted some of {', '.join(asked.modes)}, got {', '.join(wrong)}")
    work = work or output.with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    chosen = backends.split(",") if backends else list(asked.backends)
    chosen = with_cache(chosen, kv_cache_dtype) if kv_cache_dtype else chosen
    deadline = Deadline(time.monotonic() + limit)
    run = Run(asked, model, work, chosen, modes.split(","), cache_tokens, serve_flags or [], parallel, ready, deadline)
    records = run.all()
    about = provenance(note)
    document = {"what": f"answers of a trained model, {engine}"} | about
    document["model"] = json.loads((model / "training.json").read_text())
    document["servers"] = {f"{b} {m}": server_summary(record, run.right) for (b, m), record in records.items()}
    document["pairs"] = pair_summaries(records, chosen)
    document["failures"] = judge(document["servers"], document["pairs"])
    output.write_text(json.dumps(document, indent=1) + "\n")
    print_tables(document)
    for failure in document["failures"]:
        console.print(f"FAILED {failure}", style="red", markup=False)
    console.print("failed" if document["failures"] else "the answers agree")
    raise typer.Exit(bool(document["failures"]))


if __name__ == "__main__":
    typer.run(main)

"""Compares what a trained model answers with ETAP and with an engine's other backends, where the answers are known.

    PYTHONPATH=tests python -m bench.qualify.known_answers MODEL --engine vllm --output answers.json [-- flags for servers]
    PYTHONPATH=tests python -m bench.qualify.known_answers MODEL --engine vllm --output fp8.json --kv-cache-dtype fp8

MODEL is a folder that train_model.py wrote: prompts.json beside its weights has the prompts. Servers are started and
asked as by `etap check answers`, whose options it takes; in place of --requests there is --cache-tokens, for a KV cache
so small that requests are preempted. With --kv-cache-dtype the reference keeps the model's own type of cache, and the
others are ETAP with the type given, with FP8 math besides, and the reference's backend with it.

A kind of prompts, recite or recall, that the reference answers rightly in nine of ten cases is judged; if it is none,
the model did not learn, and equal answers say little: that is a failure. So are answers of ETAP that are not equal to
another backend's for 99% of the prompts of a judged kind, perplexities that differ by more than 0.1% (0.5% with an FP8
cache), and a run in which nothing was preempted, found in the prefix cache or accepted as a draft. What is not judged
is reported: where many tokens would do, two correct kernels part at near ties, the reference from itself too.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import typer

from bench.checks.agreement import agreement, answer_in
from bench.checks.answers import command
from bench.checks.asked import ETAP, MANY, Asked, Variant
from bench.checks.soak import RIGHT_SHARE
from bench.common.results import read_json
from bench.serving.client import Deadline
from bench.serving.engines import Answer, Serving
from bench.serving.servers import Served

FEW = 32  # requests in flight in the second stage
EQUAL_SHARE = 0.99  # of a judged kind's prompts
PERPLEXITY_SHARE = 0.001
FP8_PERPLEXITY_SHARE = 0.005  # of an FP8 cache against the model's own type


@dataclass
class KnownAnswers:
    """The prompts of a trained model, asked of servers whose cache is so small that requests are preempted."""

    model: Path
    cache_tokens: int
    what: ClassVar[str] = "answers of a trained model"
    modes: ClassVar[str] = "plain,mtp"

    def __post_init__(self) -> None:
        self.model = Path(self.model)
        entries = read_json(self.model / "prompts.json")
        self.about = {"model": read_json(self.model / "training.json")}
        self.prompts = {kind: [entry["prompt"] for entry in of_kind] for kind, of_kind in entries.items()}
        self.right = {
            kind: [entry["answer"] for entry in of_kind] for kind, of_kind in entries.items() if "answer" in of_kind[0]
        }
        self.new_tokens = len(self.right["recite"][0])

    @staticmethod
    def backends(asked: Asked, names: list[str], cache: str, *, named: bool) -> list[str]:
        """These, or with another cache the reference, ETAP's two ways to read that one, and the reference with it."""
        if not cache:
            return names
        reference, etap = names[0], next((name for name in names if Variant.parse(name).is_etap), ETAP)
        return [reference, f"{etap}+{cache}", f"{etap}+{cache}+math", f"{reference}+{cache}"]

    def serving(self, asked: Asked, variant: Variant, mode: str) -> Serving:
        return asked.serving(self.model, mode, variant)

    def flags(self, asked: Asked, variant: Variant, mode: str) -> list[str]:
        return asked.flags(mode, self.cache_tokens, variant)

    def ask(self, server: Served, asked: Asked, mode: str, reference: Callable | None, deadline: Deadline) -> dict:
        """Answers by stage and kind; `reference` gives those of the reference's server, None when this is that one."""
        stages = {name: self._answers(server, many, deadline) for name, many in (("together", MANY), ("again", FEW))}
        if asked.forces and mode == "plain":
            along = (stages if reference is None else reference())["together"]
            stages["forced"] = self._answers(server, MANY, deadline, along)
        return stages

    def _answers(self, server: Served, concurrency: int, deadline: Deadline, forced: dict | None = None) -> dict:
        """Answers to the prompts of every kind, all in one stream, where it is given along these answers' tokens."""
        flat = [(kind, index) for kind, prompts in self.prompts.items() for index in range(len(prompts))]
        wanted = {(kind, i): forced[kind][i].tokens if forced else None for kind, i in flat}
        engine, tokens = server.engine, self.new_tokens
        bodies = [engine.body(self.prompts[kind][i], tokens, logprobs=2, forced=wanted[kind, i]) for kind, i in flat]
        answers = {kind: [] for kind in self.prompts}
        for place, reply in zip(flat, server.ask(bodies, concurrency, deadline.left(300, "answers")), strict=True):
            answers[place[0]].append(answer_in(engine, reply, tokens, wanted[place]))
        return answers

    def judged(self, records: dict, backends: list[str], asked: Asked) -> tuple[dict, list[str]]:
        """What a results file says of all servers, and what speaks against ETAP or against the run."""
        servers = {" ".join(key): server_summary(record, self.right) for key, record in records.items()}
        pairs = pair_summaries(records, backends)
        found = {"outcome": outcome(pairs), "servers": servers, "pairs": pairs}
        return found, judge(servers, pairs) if records else []

    @staticmethod
    def rows(document: dict) -> list[list[dict]]:
        """What is shown: every server's right answers, counters and perplexity, then every pair."""
        servers = []
        for name, server in document["servers"].items():
            forced = {f"{kind} perplexity": value for kind, value in server["perplexity"].get("forced", {}).items()}
            servers.append({"server": name} | server["right"] | server["counters"] | forced)
        return [servers, document["pairs"]]


def perplexity(answers: Sequence[Answer]) -> float:
    """Of all tokens of all answers."""
    return math.exp(-statistics.fmean(logprob for answer in answers for logprob in answer.logprobs))


def compared(ours: Sequence[Answer], theirs: Sequence[Answer]) -> dict:
    """How many answers are equal, how far the others agree, and how near a tie they part."""
    found = agreement(ours, theirs)
    equal = len(theirs) - len(found.parted)
    return {
        "prompts": len(theirs),
        "equal": equal,
        "equal_share": equal / len(theirs),
        "tokens_before_parting": sum(map(len, found.differences)) / sum(len(b.tokens) for b in theirs),
        "gaps_where_parted": sorted(round(gap, 4) for gap in found.parted),
    }


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


def outcome(pairs: list[dict]) -> str:
    """How many answers of every two backends, over all stages, are equal."""
    equal, every = Counter(), Counter()
    for pair in pairs:
        key = f"{pair['backend']} {pair['mode']} and {pair['other']} {pair['other_mode']}"
        equal[key] += pair["equal"]
        every[key] += pair["prompts"]
    return "equal answers: " + "; ".join(f"{key} {equal[key]} of {every[key]}" for key in every)


def judged_by(ours: Variant, other: Variant) -> bool:
    """Whether ours, ETAP, must agree with the other: another backend on one GPU with the model's own cache, or ETAP
    with the same cache on one GPU where ours has several."""
    if not ours.is_etap or not other.one_gpu:
        return False
    if not other.is_etap:
        return other.own_cache
    return replace(ours, tp=1, dcp=1) == other and not ours.one_gpu


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
        two = (Variant.parse(pair["backend"]), Variant.parse(pair["other"]))
        must_agree = pair["mode"] == pair["other_mode"] and (judged_by(*two) or judged_by(*two[::-1]))
        if must_agree and pair["kind"] in judged and pair["equal_share"] < EQUAL_SHARE:
            names = f"{pair['backend']} and {pair['other']}, {pair['mode']}, {pair['stage']}, {pair['kind']}"
            found.append(f"{names}: {pair['equal']} of {pair['prompts']} answers equal, wanted {EQUAL_SHARE:.0%}")
    return found + _judge_perplexity(servers, judged)


def _judge_perplexity(servers: dict[str, dict], judged: list[str]) -> list[str]:
    """Forced along the same tokens, or where the engine cannot force, of each one's own answers of a judged kind."""
    found = []
    for name, server in servers.items():
        variant, mode = name.split()
        ours = Variant.parse(variant)
        for other, theirs in servers.items():
            if other.split()[1] != mode or not judged_by(ours, Variant.parse(other.split()[0])):
                continue
            share = PERPLEXITY_SHARE if ours.own_cache else FP8_PERPLEXITY_SHARE
            stage = "forced" if "forced" in server["perplexity"] else "together"
            for kind in server["perplexity"][stage] if stage == "forced" else judged:
                a, b = server["perplexity"][stage][kind], theirs["perplexity"][stage][kind]
                if not abs(a / b - 1) <= share:
                    found.append(f"{name} and {other}: {stage} {kind} perplexity {a:.5f} and {b:.5f}")
    return found


CACHE_TOKENS = typer.Option("--cache-tokens", help="Of the KV cache.")
main = command("python -m bench.qualify.known_answers", KnownAnswers, 640 * 64, CACHE_TOKENS)

if __name__ == "__main__":
    typer.run(main)

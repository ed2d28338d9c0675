"""Requests to any model, how far two servers' log-probabilities agree, and what speaks against ours.

Concurrent requests of mixed length go to every server. What is forced (every second request, where the engine can be
made to answer given tokens) compares at all its steps; what decodes greedily compares up to the first step at which the
two choose differently. Each server answers all of them together, again over what its prefix cache holds, a few at a
time, and at last next turns: prompts of 2 to 300 tokens over a cached prefix, one at a time, so that each is a step of
its own, of which up to 128 tokens go through the backends' decode kernels. Three yardsticks come from the reference:

- noise: the same requests a few at a time. Batches of other sizes take other GEMM and split-KV kernels, and each
  rounding to bfloat16 that turns out differently spreads through the layers. That is no fault, and no attention kernel
  can be told apart below it.
- control: requests again with the first three quarters of their prompts replaced. If that moved nothing, attention
  would not matter here and agreement would prove nothing.
- prefix cache: the same requests again. An engine may answer otherwise from its prefix cache whoever attends, so ETAP's
  answers again are compared with the reference's again; this tells how far the reference moves.

Over an FP8 cache most backends round queries and probabilities to e4m3, as ETAP does with FP8 math alone, so noise is
no bound to differences between the two ways; it is none to eager mode either, which rounds elsewhere.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from bench.checks.asked import Asked, Variant
from bench.serving import client
from bench.serving.client import Deadline, Failed, FailedRequest
from bench.serving.engines import Answer, Engine, Serving
from bench.serving.servers import Served

PROMPT_TOKENS = range(1000, 4000)  # in the vocabulary of every model, and no special token of any
EDGE_LENGTHS = (10, 63, 64, 65, 127, 128, 129, 4000)  # around one and two pages of the KV cache
IMPOSSIBLE = -9000.0  # vLLM reports minus infinity as -9999

NOISE_FACTOR = 3  # rounding of two kernels against rounding of one kernel at two batch sizes
CONTROL_MEDIAN = 1 / 50  # of the control's median, where batching changes next to nothing
CONTROL_REQUEST = 1 / 8  # of the control's median, for the median of a single request, which scatters more
MOST_REQUEST = 1 / 2  # of the control's median, for a single request where the noise's own scatter allows more
REQUEST_STEPS = 8  # fewer steps have no median to speak of
FEW = 8  # requests at a time in the second reading
LONG_PROMPT = 128  # tokens of a prompt whose beginning matters
CONTEXT = 4096 + 1024
CHUNK_TOKENS = 2048  # of a step's prefill in SGLang, so that longer prompts take several
CACHED_SHARE = 0.9  # of the whole pages of prompts that were just asked, which the prefix cache must have
TURN_TOKENS = (0, 2, 3, 4, 17, 37, 63, 64, 100, 127, 128, 129, 300)  # new tokens of turns; the first fill the cache
TURN_PREFIX = 2048  # tokens before them: whole pages, so that all are cached and no more
KEEPS_QUERIES = "TRITON_MLA"  # over an FP8 cache, where others round them to e4m3
TIE_NOISE, TIE_CONTROL = 15, 1 / 10  # two tokens this close may change places: in noise medians, of the control's


@dataclass(frozen=True)
class Request:
    """One completion: token ids, how many tokens to add, and the token forced at each step (None: greedy)."""

    prompt: list[int]
    new_tokens: int
    forced: int | None = None

    @property
    def path(self) -> list[int] | None:
        """The tokens that it is to answer, where they are given."""
        return None if self.forced is None else [self.forced] * self.new_tokens


@dataclass
class Agreement:
    """Absolute differences of the chosen tokens' log-probabilities, by request, and the gaps of the steps that part."""

    differences: list[list[float]]
    parted: list[float] = field(default_factory=list)

    def request_medians(self) -> dict[int, float]:
        """By index, of the requests with steps enough."""
        return {i: statistics.median(steps) for i, steps in enumerate(self.differences) if len(steps) >= REQUEST_STEPS}

    def median(self) -> float:
        """Infinite where all requests part at their first step."""
        values = [value for request in self.differences for value in request]
        return statistics.median(values) if values else math.inf

    def summary(self) -> dict:
        values = sorted(value for request in self.differences for value in request)
        medians = (statistics.median(request) for request in self.differences if request)
        return {
            "steps": len(values),
            "median": statistics.median(values) if values else None,
            "p99": values[math.ceil(0.99 * len(values)) - 1] if values else None,
            "max": values[-1] if values else None,
            "largest_median_of_a_request": max(medians, default=None),
            "largest_median_of_a_judged_request": max(self.request_medians().values(), default=None),
            "parted": len(self.parted),
            "largest_gap_parted": max(self.parted, default=None),
        }


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 10 to 4000 tokens, as many short as long ones, with 16 to 64 new tokens; every second one forced."""
    rng = random.Random(seed)
    lengths = [round(10 * 400 ** rng.random()) for _ in range(count)]
    lengths[: len(EDGE_LENGTHS)] = EDGE_LENGTHS[:count]
    return [
        Request(
            prompt=rng.choices(PROMPT_TOKENS, k=length),
            new_tokens=rng.randint(16, 64),
            forced=rng.choice(PROMPT_TOKENS) if index % 2 else None,
        )
        for index, length in enumerate(lengths)
    ]


def with_another_beginning(request: Request, seed: int = 1) -> Request:
    """The request with the first three quarters of its prompt replaced."""
    rng = random.Random(seed)
    replaced = len(request.prompt) * 3 // 4
    return Request(
        rng.choices(PROMPT_TOKENS, k=replaced) + request.prompt[replaced:], request.new_tokens, request.forced
    )


def make_turns(seed: int = 2) -> list[Request]:
    """What two users go on with by turns after prefixes of their own: one's answers are forced, the other's greedy."""
    rng = random.Random(seed)
    prefixes = [rng.choices(PROMPT_TOKENS, k=TURN_PREFIX) for _ in range(2)]
    return [
        Request(prefix + rng.choices(PROMPT_TOKENS, k=tokens), 16, rng.choice(PROMPT_TOKENS) if index else None)
        for tokens in TURN_TOKENS
        for index, prefix in enumerate(prefixes)
    ]


def must_be_finite(engine: Engine, reply: dict) -> None:
    """Raises FailedRequest when a log-probability of a reply, or of a part of one, is none."""
    for value in engine.logprobs_in(reply):
        if value is None or not IMPOSSIBLE < value < 1e-3:
            raise FailedRequest("not finite", f"wanted finite log-probabilities, got {value}")


def answer_in(engine: Engine, reply: dict, tokens: int, forced: Sequence[int] | None = None) -> Answer:
    """The answer in a reply. Raises FailedRequest unless it is complete, finite and as forced."""
    must_be_finite(engine, reply)
    answer = engine.answer(reply)
    if not len(answer.tokens) == len(answer.logprobs) == len(answer.gaps) == tokens:
        raise FailedRequest("wrong answer", f"wanted {tokens} tokens, got {len(answer.tokens)}")
    if forced is not None and answer.tokens != list(forced):
        raise FailedRequest("wrong answer", f"wanted the tokens {list(forced)}, got {answer.tokens}")
    return answer


def agreement(answers: Sequence[Answer], reference: Sequence[Answer]) -> Agreement:
    """Compare the steps before which both answers are the same."""
    result = Agreement([])
    for ours, theirs in zip(answers, reference, strict=True):
        pairs = zip(ours.tokens, theirs.tokens, strict=True)
        same = next((step for step, (a, b) in enumerate(pairs) if a != b), len(theirs.tokens))
        logprobs = zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True)
        result.differences.append([abs(a - b) for a, b in logprobs])
        if same < len(theirs.tokens):
            result.parted.append(theirs.gaps[same])
    return result


def objections(ours: Agreement, noise: Agreement, control: Agreement, *, eager: bool = False) -> list[str]:
    """What speaks against our answers. Eager mode rounds elsewhere than compiled code, so noise is no bound to it.

    Nothing is held against a request that the reference does with itself: another token where its best two are as
    close; a median up to NOISE_FACTOR times as large, unless that is half of what another context does.
    """
    scale = control.median()
    allowed_median = scale * CONTROL_REQUEST if eager else max(NOISE_FACTOR * noise.median(), CONTROL_MEDIAN * scale)
    # A model that hardly needs its context has a small control, and an eighth of it may lie within the scatter of
    # single requests: 0.0091 and 0.0079 where the reference's noisiest, short ones counted, were at 0.0085 and 0.0080.
    noisiest = max(noise.request_medians().values(), default=0.0)
    allowed_request = max(CONTROL_REQUEST * scale, min(NOISE_FACTOR * noisiest, MOST_REQUEST * scale))
    allowed_gap = max(TIE_NOISE * noise.median(), TIE_CONTROL * scale, *noise.parted)
    found = []
    if not noise.median() < scale * CONTROL_REQUEST:
        found.append(f"the check is blind: noise has median {noise.median():.4f}, another context only {scale:.4f}")
    if not ours.median() <= allowed_median:
        found.append(f"median difference {ours.median():.4f}, allowed {allowed_median:.4f}")
    medians = ours.request_medians().items()
    if wrong := [f"{index}: {median:.4f}" for index, median in medians if not median <= allowed_request]:
        found.append(f"{len(wrong)} requests with a median over {allowed_request:.4f}: {', '.join(wrong[:8])}")
    if wrong := [f"{gap:.4f}" for gap in ours.parted if not gap <= allowed_gap]:
        found.append(
            f"{len(wrong)} requests with another token, the reference's best two over {allowed_gap:.4f} apart: "
            f"{', '.join(wrong[:8])}"
        )
    return found


def rounds_otherwise(ours: Variant, reference: Variant) -> bool:
    """Whether the two round queries and probabilities elsewhere, which differs more than noise."""
    caches = {ours.cache, reference.cache}
    same = caches == {"auto"} or (len(caches) == 1 and not ours.fp8_math and reference.backend == KEEPS_QUERIES)
    return ours.eager or not same


def ran_in_graphs(engine: Engine, log: str) -> bool | None:
    """Whether decode ran in CUDA graphs, from the log's beginning or from its steps; None where it had no step."""
    if (said := engine.in_full_graphs(log)) is not None:
        return said
    steps = [line for line in log.splitlines() if "Decode batch" in line and "cuda graph: " in line]
    return any("cuda graph: True" in line for line in steps) if steps else None


def first_token_moved(result: dict, answer: Answer) -> Answer:
    """An answer's first token with the log-probability that another context gives it in SGLang."""
    ((logprob, token, *_),) = result["meta_info"]["output_token_ids_logprobs"][0]
    if token != answer.tokens[0]:
        raise Failed(f"wanted the log-probability of token {answer.tokens[0]}, got that of {token}")
    return Answer([token], [float(logprob)], [0.0])


@dataclass
class MixedRequests:
    """Requests of mixed length to any MLA model, with room for all of them."""

    model: str
    count: int
    about: dict = field(default_factory=dict)
    what: ClassVar[str] = "log-probabilities of mixed requests"
    modes: ClassVar[str] = "plain"

    @staticmethod
    def backends(asked: Asked, names: list[str], cache: str, *, named: bool) -> list[str]:
        """These, or besides those of the engine ETAP without CUDA graphs, all with the cache that is given."""
        ours = next(name for name in asked.backends if Variant.parse(name).is_etap)
        every = names if named else [*names, f"{ours}+eager"]
        return [f"{name}+{cache}" for name in every] if cache else every

    def serving(self, asked: Asked, variant: Variant, mode: str) -> Serving:
        return asked.serving(self.model, mode, variant, self.count, CONTEXT)

    def flags(self, asked: Asked, variant: Variant, mode: str) -> list[str]:
        sglang = ("--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK_TOKENS), "--decode-log-interval", "1")
        return [*(sglang if asked.engine.name == "sglang" else ()), *asked.forcing(mode)]

    def ask(self, server: Served, asked: Asked, mode: str, reference: Callable | None, deadline: Deadline) -> dict:
        """Answers by stage. Raises Failed where a stage did not run as it should."""
        engine, forces = server.engine, asked.forces and mode == "plain"
        requests, turns = make_requests(self.count), make_turns()
        if not forces:
            requests, turns = ([replace(request, forced=None) for request in made] for made in (requests, turns))

        def ask(requests: list[Request], concurrency: int, salt: str, **more: list) -> list[dict]:
            """Replies; another salt finds nothing in the prefix cache, where the engine has salts."""
            bodies = [engine.body(r.prompt, r.new_tokens, logprobs=2, forced=r.path, salt=salt) for r in requests]
            for name, values in more.items():
                bodies = [body | {name: value} for body, value in zip(bodies, values, strict=True)]
            return server.ask(bodies, concurrency, deadline.left(300, "requests"))

        replies = ask(requests, self.count, "together")
        if mode != "plain" and engine.name == "sglang":
            verified = sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies)
            made = sum(request.new_tokens for request in requests)
            server.about["tokens_a_verification"] = made / verified if verified else 0.0
            if made <= verified or not verified:
                raise Failed(f"drafts: wanted more than 1 token a verification, got {made} in {verified}")
        stages, before = {"together": _answers(engine, requests, replies)}, _found(server)
        stages["again"] = _answers(engine, requests, ask(requests, self.count, "together"))
        _must_have_found(server, requests, _found(server) - before)
        if engine.name == "sglang":
            client.post(f"{server.url}/flush_cache")
        stages["few"] = _answers(engine, requests, ask(requests, FEW, "few"))
        stages |= _control(engine, ask, list(zip(requests, stages["together"], strict=True)), forces)
        stages["turns"] = _answers(engine, turns, ask(turns, 1, "turns"))
        graphs, eager = ran_in_graphs(engine, server.text()), engine.eager in server.about["command"].split()
        if mode == "plain" and graphs is not (not eager):
            raise Failed(f"CUDA graphs: wanted {not eager}, the log says {graphs}")
        return {stage: {"requests": made} for stage, made in stages.items()}

    def judged(self, records: dict, backends: list[str], asked: Asked) -> tuple[dict, list[str]]:
        """What a results file says of all servers, and what speaks against ETAP."""
        servers = {" ".join(key): {k: v for k, v in one.items() if k != "stages"} for key, one in records.items()}
        document, failures, reference = {"servers": servers, "yardsticks": {}, "agreement": {}}, [], backends[0]
        for mode in dict.fromkeys(mode for _, mode in records):
            known = records.get((reference, mode))
            yardstick = next(
                (r for r in (known, records.get((reference, "plain"))) if r and "control" in r["stages"]), None
            )
            if not known or not yardstick:
                failures.append(f"{mode}: {reference} did not answer, so there is nothing to compare with")
                continue
            control = moved(*(yardstick["stages"][stage]["requests"] for stage in ("control", "before control")))
            noise = agreement(known["stages"]["few"]["requests"], known["stages"]["together"]["requests"])
            again = agreement(*(known["stages"][stage]["requests"] for stage in ("again", "together")))
            yardsticks = {"noise": noise, "control": control, "prefix cache": again}
            document["yardsticks"][mode] = {name: one.summary() for name, one in yardsticks.items()}
            for backend in (name for name, its_mode in records if its_mode == mode and name != reference):
                ours = Variant.parse(backend)
                loose = rounds_otherwise(ours, Variant.parse(reference))
                for stage, result in _agreements(records[backend, mode], known).items():
                    against, case = objections(result, noise, control, eager=loose), f"{backend} {mode}, {stage}"
                    document["agreement"][case] = result.summary() | {
                        "objections": against,
                        "equal_answers": len(result.differences) - len(result.parted),
                        "requests": len(result.differences),
                    }
                    failures += [f"{case}: {reason}" for reason in against] if ours.is_etap else []
        found = [f"{case}: {one['equal_answers']} of {one['requests']}" for case, one in document["agreement"].items()]
        said = f"log-probabilities {'differ' if failures else 'agree'}; equal answers: {'; '.join(found)}"
        return {"outcome": said if found else "no answers to compare"} | document, failures

    @staticmethod
    def rows(document: dict) -> list[list[dict]]:
        """What is shown: the yardsticks and every agreement, in nats."""
        yardsticks = [{"yardstick": f"{m}, {k}"} | v for m, of in document["yardsticks"].items() for k, v in of.items()]
        return [yardsticks, [{"agreement": case} | row for case, row in document["agreement"].items()]]


def moved(answers: list[Answer], before: list[Answer]) -> Agreement:
    """How far another context moves the log-probabilities of the same tokens, as many as there are."""
    pairs = zip(answers, before, strict=True)
    return Agreement([[abs(a - b) for a, b in zip(new.logprobs, old.logprobs, strict=False)] for new, old in pairs])


def _answers(engine: Engine, requests: list[Request], replies: list[dict]) -> list[Answer]:
    pairs = zip(requests, replies, strict=True)
    return [answer_in(engine, reply, request.new_tokens, request.path) for request, reply in pairs]


def _control(engine: Engine, ask: Callable, pairs: list[tuple[Request, Answer]], forces: bool) -> dict:
    """Answers of long requests behind another beginning, and those before: of forced ones, or of the first token."""
    long = [pair for pair in pairs if len(pair[0].prompt) >= LONG_PROMPT and (pair[0].forced is not None or not forces)]
    changed, before = [with_another_beginning(request) for request, _ in long], [answer for _, answer in long]
    if forces:
        after = _answers(engine, changed, ask(changed, len(changed), "control"))
    elif engine.name == "sglang":
        changed = [replace(request, new_tokens=1) for request in changed]
        replies = ask(changed, len(changed), "control", token_ids_logprob=[answer.tokens[:1] for answer in before])
        after = [first_token_moved(*pair) for pair in zip(replies, before, strict=True)]
    else:
        return {}
    return {"control": after, "before control": before}


def _found(server: Served) -> float:
    return server.metrics().get(server.engine.counters["prefix tokens found"], 0.0)


def _must_have_found(server: Served, requests: list[Request], had: float) -> None:
    """Raise Failed unless the prefix cache, if any, had nearly all whole pages of prompts that were just asked."""
    # The last page of a prompt is computed again, and so is one that only just fills a page.
    page = server.engine.page_tokens(server.text())
    wanted = sum((len(request.prompt) - 1) // page * page for request in requests)
    server.about.update(tokens_cached=had, tokens_cached_wanted=wanted)
    if had < CACHED_SHARE * wanted and server.engine.uncached not in server.about["command"].split():
        raise Failed(f"prefix cache: wanted {wanted} tokens of the prompts, got {had:.0f}")


def _agreements(record: dict, reference: dict) -> dict[str, Agreement]:
    """By stage, beside the reference's, whose prefix cache may change answers, too; few at a time beside together."""
    others = {stage: "together" if stage == "few" else stage for stage in ("together", "again", "few", "turns")}
    return {
        stage: agreement(record["stages"][stage]["requests"], reference["stages"][other]["requests"])
        for stage, other in others.items()
    }

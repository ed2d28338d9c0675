"""Requests that two servers get, how far their answers agree, and what speaks against ours.

Concurrent requests of mixed length go to both. What is forced compares at all its steps; what decodes greedily compares
up to the first step at which the two choose differently. Two yardsticks come from the reference's server:

- noise: the same requests again, few at a time. Batches of other sizes take other GEMM and split-KV kernels, and each
  rounding to bfloat16 that turns out differently spreads through the layers. That is no fault, and no attention kernel
  can be told apart below it.
- control: requests again with the first three quarters of their prompts replaced. If that moved nothing, attention
  would not matter here and agreement would prove nothing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from etap_backend.lab.serving.client import FailedRequest
from etap_backend.lab.serving.engines import Answer, Engine

PROMPT_TOKENS = range(1000, 4000)  # in the vocabulary of every model, and no special token of any
EDGE_LENGTHS = (10, 63, 64, 65, 127, 128, 129, 4000)  # around one and two pages of the KV cache
IMPOSSIBLE = -9000.0  # vLLM reports minus infinity as -9999

NOISE_FACTOR = 3  # rounding of two kernels against rounding of one kernel at two batch sizes
CONTROL_MEDIAN = 1 / 50  # of the control's median, where batching changes next to nothing
CONTROL_REQUEST = 1 / 8  # of the control's median, for the median of a single request, which scatters more
MOST_REQUEST = 1 / 2  # of the control's median, for a single request where the noise's own scatter allows more
REQUEST_STEPS = 8  # fewer steps have no median to speak of
TIE_NOISE, TIE_CONTROL = 15, 1 / 10  # two tokens this close may change places: in noise medians, of the control's


@dataclass(frozen=True)
class Request:
    """One completion: token ids, how many tokens to add, and the token forced at each step (None: greedy)."""

    prompt: list[int]
    new_tokens: int
    forced: int | None = None


@dataclass
class Agreement:
    """Absolute differences of the chosen tokens' log-probabilities, by request, and the gaps of the steps that part."""

    differences: list[list[float]]
    parted: list[float] = field(default_factory=list)

    def request_medians(self) -> dict[int, float]:
        """By index, of the requests with steps enough."""
        return {i: statistics.median(steps) for i, steps in enumerate(self.differences) if len(steps) >= REQUEST_STEPS}

    def median(self) -> float:
        return statistics.median([value for request in self.differences for value in request])

    def summary(self) -> dict:
        values = sorted(value for request in self.differences for value in request)
        return {
            "steps": len(values),
            "median": statistics.median(values),
            "p99": values[math.ceil(0.99 * len(values)) - 1],
            "max": values[-1],
            "largest_median_of_a_request": max(statistics.median(request) for request in self.differences if request),
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

"""How far the answers of two servers agree, and the limits within which they must.

Requests with forced tokens compare at all steps; greedy ones up to the first step at which the two choose differently.
The yardsticks come from the reference:

- noise: the same requests a few at a time. Other batch sizes take other GEMM and split kernels, and rounding to
  bfloat16 spreads through the layers; below that no attention kernel can be distinguished.
- control: requests with the first three quarters of their prompts replaced. If that moved nothing, attention would not
  matter and agreement would prove nothing.

Over an FP8 cache most backends round queries and probabilities to e4m3, as ETAP does only with FP8 math, so noise does
not bound differences between the two ways, nor from eager mode, which rounds elsewhere.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.servers.client import FailedRequest
from bench.servers.engines import Answer, Sglang, Variant, Vllm

PROMPT_TOKENS = range(1000, 4000)  # in every vocabulary, and special nowhere
EDGE_LENGTHS = (10, 63, 64, 65, 127, 128, 129, 4000)  # around one and two pages
IMPOSSIBLE = -9000.0  # vLLM reports minus infinity as -9999

NOISE_FACTOR = 3  # rounding of two kernels against rounding of one kernel at two batch sizes
CONTROL_MEDIAN = 1 / 50  # of the control's median, where batching changes next to nothing
CONTROL_REQUEST = 1 / 8  # of the control's median, for the median of a request, which scatters more
MOST_REQUEST = 1 / 2  # of the control's median, for a request where the noise's own scatter allows more
REQUEST_STEPS = 8  # fewer steps have no meaningful median
TIE_NOISE, TIE_CONTROL = 15, 1 / 10  # two tokens this close may change places: in noise medians, of the control's
TURN_TOKENS = (0, 2, 3, 4, 17, 37, 63, 64, 100, 127, 128, 129, 300)  # new tokens of turns; the first fill the cache
TURN_PREFIX = 2048  # tokens before them: whole pages, so that all are cached and no more
COMMON_PREFIX, COMMON_REQUESTS = 3840, 96  # enough for ETAP to read shared prefixes once
KEEPS_QUERIES = "TRITON_MLA"  # over an FP8 cache, where others round them to e4m3


@dataclass(frozen=True)
class Request:
    """One completion: token ids, how many tokens to add, and the token forced at each step (None: greedy)."""

    prompt: list[int]
    new_tokens: int
    forced: int | None = None


def make_requests(count: int, forces: bool, seed: int = 0) -> list[Request]:
    """Prompts of 10 to 4000 tokens, as many short as long ones, with 16 to 64 new tokens; every second one forced."""
    rng = random.Random(seed)
    lengths = [round(10 * 400 ** rng.random()) for _ in range(count)]
    lengths[: len(EDGE_LENGTHS)] = EDGE_LENGTHS[:count]
    made = []
    for index, length in enumerate(lengths):
        prompt, tokens, forced = rng.choices(PROMPT_TOKENS, k=length), rng.randint(16, 64), rng.choice(PROMPT_TOKENS)
        made.append(Request(prompt, tokens, forced if forces and index % 2 else None))
    return made


def make_turns(forces: bool, seed: int = 2) -> list[Request]:
    """Turns of two users, each behind a prefix of its own: one's answers are forced, the other's greedy."""
    rng = random.Random(seed)
    prefixes = [rng.choices(PROMPT_TOKENS, k=TURN_PREFIX) for _ in range(2)]
    made = []
    for tokens in TURN_TOKENS:
        for index, prefix in enumerate(prefixes):
            new, forced = rng.choices(PROMPT_TOKENS, k=tokens), rng.choice(PROMPT_TOKENS)
            made.append(Request(prefix + new, 16, forced if forces and index else None))
    return made


def make_common(forces: bool, seed: int = 3) -> list[Request]:
    """Requests that begin with the same whole pages, with 1 to 1000 tokens of their own; every second one forced."""
    rng = random.Random(seed)
    prefix = rng.choices(PROMPT_TOKENS, k=COMMON_PREFIX)
    made = []
    for index in range(COMMON_REQUESTS):
        own, forced = rng.choices(PROMPT_TOKENS, k=rng.randint(1, 1000)), rng.choice(PROMPT_TOKENS)
        made.append(Request(prefix + own, 32, forced if forces and index % 2 else None))
    return made


def with_another_beginning(request: Request, seed: int = 1) -> list[int]:
    """The prompt with its first three quarters replaced."""
    replaced = len(request.prompt) * 3 // 4
    return random.Random(seed).choices(PROMPT_TOKENS, k=replaced) + request.prompt[replaced:]


def must_be_finite(engine: Vllm | Sglang, reply: dict) -> None:
    """Raises FailedRequest when a log-probability in a reply, or in a part of one, is not finite."""
    for value in engine.logprobs_in(reply):
        if value is None or not IMPOSSIBLE < value < 1e-3:
            raise FailedRequest("not finite", f"wanted finite log-probabilities, got {value}")


def answer_in(engine: Vllm | Sglang, reply: dict, tokens: int, forced: int | None = None) -> Answer:
    """The answer in a reply. Raises FailedRequest unless it is complete, finite and as forced."""
    must_be_finite(engine, reply)
    answer = engine.answer(reply)
    if not len(answer.tokens) == len(answer.logprobs) == len(answer.gaps) == tokens:
        raise FailedRequest("wrong answer", f"wanted {tokens} tokens, got {len(answer.tokens)}")
    if forced is not None and set(answer.tokens) != {forced}:
        raise FailedRequest("wrong answer", f"wanted the token {forced} at every step, got {answer.tokens}")
    return answer


@dataclass
class Agreement:
    """Absolute differences of the chosen tokens' log-probabilities by request, and the reference's gaps between the
    best two tokens at the steps where requests part."""

    differences: list[list[float]]
    parted: list[float] = field(default_factory=list)

    def request_medians(self) -> dict[int, float]:
        """By index, of requests with enough steps."""
        return {i: statistics.median(steps) for i, steps in enumerate(self.differences) if len(steps) >= REQUEST_STEPS}

    def median(self) -> float:
        """Infinite where all requests part at their first step."""
        values = [value for request in self.differences for value in request]
        return statistics.median(values) if values else math.inf

    def summary(self) -> dict:
        values = [value for request in self.differences for value in request]
        return {
            "requests": len(self.differences),
            "equal_answers": len(self.differences) - len(self.parted),
            "steps": len(values),
            "median": statistics.median(values) if values else None,
            "max": max(values, default=None),
            "largest_median_of_a_request": max(self.request_medians().values(), default=None),
            "largest_gap_parted": max(self.parted, default=None),
        }


def agreement(answers: Sequence[Answer], reference: Sequence[Answer]) -> Agreement:
    """Compare the steps before which both answers are equal."""
    result = Agreement([])
    for one, other in zip(answers, reference, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        same = next((step for step, (a, b) in enumerate(pairs) if a != b), len(other.tokens))
        logprobs = zip(one.logprobs[:same], other.logprobs[:same], strict=True)
        result.differences.append([abs(a - b) for a, b in logprobs])
        if same < len(other.tokens):
            result.parted.append(other.gaps[same])
    return result


def moved(answers: Sequence[Answer], before: Sequence[Answer]) -> Agreement:
    """How far another context moves the log-probabilities of the same tokens."""
    pairs = zip(answers, before, strict=True)
    return Agreement([[abs(a - b) for a, b in zip(new.logprobs, old.logprobs, strict=False)] for new, old in pairs])


def rounds_elsewhere(variant: Variant, reference: Variant) -> bool:
    """Whether the two round queries and probabilities in different places, which differs more than noise."""
    caches = {variant.cache, reference.cache}
    unrounded = not variant.fp8_math and reference.backend == KEEPS_QUERIES
    return variant.eager or not (caches == {"auto"} or (len(caches) == 1 and unrounded))


def objections(found: Agreement, noise: Agreement, control: Agreement, *, loose: bool = False) -> list[str]:
    """What exceeds rounding in an agreement with the reference; `loose` where noise is no bound.

    A request may do what the reference does with itself: choose another token where its best two are as close, and have
    a median NOISE_FACTOR times as large, up to half of what another context does.
    """
    scale = control.median()
    allowed_median = scale * CONTROL_REQUEST if loose else max(NOISE_FACTOR * noise.median(), CONTROL_MEDIAN * scale)
    # A model that hardly needs its context has a small control; single requests may scatter over an eighth of it.
    noisiest = max(noise.request_medians().values(), default=0.0)
    allowed_request = max(CONTROL_REQUEST * scale, min(NOISE_FACTOR * noisiest, MOST_REQUEST * scale))
    allowed_gap = max(TIE_NOISE * noise.median(), TIE_CONTROL * scale, *noise.parted)
    texts = []
    if not noise.median() < scale * CONTROL_REQUEST:
        texts.append(f"the check is blind: noise has median {noise.median():.4f}, another context only {scale:.4f}")
    if not found.median() <= allowed_median:
        texts.append(f"median difference {found.median():.4f}, allowed {allowed_median:.4f}")
    medians = found.request_medians().items()
    if wrong := [f"{index}: {median:.4f}" for index, median in medians if not median <= allowed_request]:
        texts.append(f"{len(wrong)} requests with a median over {allowed_request:.4f}: {', '.join(wrong[:8])}")
    if wrong := [f"{gap:.4f}" for gap in found.parted if not gap <= allowed_gap]:
        more = f"the reference's best two over {allowed_gap:.4f} apart: {', '.join(wrong[:8])}"
        texts.append(f"{len(wrong)} requests with another token, {more}")
    return texts

"""`etap plan --drafts`: a step and its tokens per second for each number of draft tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etap_backend.plan.alternatives import make_plan
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Gpu
from etap_backend.plan.model import Model
from etap_backend.plan.step import Attention, Plan

MOST_DRAFTS = 7
ACCEPTANCE = 0.71
ACCEPTANCE_SOURCE = (
    "3.20 tokens per step with 7 drafts of DeepSeek-V3-0324's own predictor at temperature 0, mean of MT-bench, "
    "HumanEval and GSM8K (model card of nebius/MTP-DeepSeek-V3-0324), as one rate for all positions; "
    "DeepSeek-V3's report has 0.85 to 0.90 for the first draft"
)


@dataclass(frozen=True)
class Rate:
    """A step with one kernel, and what it gives."""

    kernel: str
    step_ms: float
    tokens_per_s_per_request: float
    tokens_per_s: float  # of all requests together


@dataclass(frozen=True)
class Drafted:
    """One number of drafts; a rate is None where no call was timed."""

    drafts: int
    tokens_per_step: float  # of a request, the token behind the accepted drafts included
    fits: bool
    etap: Rate | None
    peer: Rate | None  # the fastest other kernel
    plan: Plan


def tokens_per_step(drafts: int, acceptance: float) -> float:
    """Expected tokens of a step: a draft counts if it and all before it are accepted, and one token follows them."""
    return sum(acceptance**number for number in range(drafts + 1))


@dataclass(frozen=True)
class Drafting:
    """0 to 7 drafts, and the acceptance that they are planned with."""

    acceptance: float
    source: str
    predictor: bool  # whether the model says how many layers predict; without, drafting takes no time here
    rows: tuple[Drafted, ...]

    def best(self, side: str) -> Drafted | None:
        """The row with most tokens per second with `side`, "etap" or "peer", where the requests fit."""
        rated = [one for one in self.rows if one.fits and getattr(one, side)]
        return max(rated, key=lambda one: getattr(one, side).tokens_per_s, default=None)


def with_drafts(
    model: Model, gpu: Gpu, on: Deployment, acceptance: float | None = None, attention_share: float | None = None
) -> Drafting:
    """The plans of 0 to 7 drafts, without an acceptance with the published one.

    Raises ValueError, naming the argument, as `make_plan` does, for an acceptance outside 0 to 1, and for an
    `attention_share`, which belongs to one number of drafts.
    """
    source = ACCEPTANCE_SOURCE if acceptance is None else "given"
    acceptance = ACCEPTANCE if acceptance is None else acceptance
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance: wanted 0 to 1, got {acceptance}")
    if attention_share is not None:
        raise ValueError(f"attention_share: wanted none beside --drafts, got {attention_share}")
    found = []
    for drafts in range(MOST_DRAFTS + 1):
        made = make_plan(model, gpu, replace(on, s_q=1 + drafts))
        tokens = tokens_per_step(drafts, acceptance)
        etap, peer = (_rate(made, kernel, tokens, on.batch) for kernel in (made.best, made.fastest_peer))
        found.append(Drafted(drafts, tokens, made.memory.fits, etap, peer, made))
    return Drafting(acceptance, source, bool(model.num_nextn_predict_layers), tuple(found))


def _rate(made: Plan, kernel: Attention | None, tokens: float, batch: int) -> Rate | None:
    if kernel is None or kernel.call is None:
        return None
    step = made.step_with(kernel)
    return Rate(kernel.kernel, step, 1e3 * tokens / step, 1e3 * tokens * batch / step)

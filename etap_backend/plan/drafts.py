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
class Drafted:
    """The plan of one number of drafts."""

    drafts: int
    tokens_per_step: float  # of a request, the token behind the accepted drafts included
    plan: Plan
    requests: int

    def kernel(self, side: str) -> Attention | None:
        """ETAP with its faster math, or the fastest other kernel ("peer"); None where its call was not timed."""
        kernel = self.plan.best if side == "etap" else self.plan.fastest_peer
        return kernel if kernel and kernel.call else None

    def tokens_per_s(self, side: str) -> float:
        """Tokens per second of all requests; 0 where no call was timed."""
        kernel = self.kernel(side)
        return 1e3 * self.tokens_per_step * self.requests / self.plan.step_with(kernel) if kernel else 0.0


@dataclass(frozen=True)
class Drafting:
    """0 to 7 drafts, and the acceptance that they are planned with."""

    acceptance: float
    source: str
    predictor: bool  # whether the model says how many layers predict; without, drafting takes no time here
    rows: tuple[Drafted, ...]

    def best(self, side: str) -> Drafted | None:
        """The row with most tokens per second of those where the requests fit."""
        rated = [row for row in self.rows if row.plan.memory.fits and row.kernel(side)]
        return max(rated, key=lambda row: row.tokens_per_s(side), default=None)


def with_drafts(
    model: Model, gpu: Gpu, on: Deployment, acceptance: float | None = None, attention_share: float | None = None
) -> Drafting:
    """The plans of 0 to 7 drafts, without an acceptance with the published one.

    A draft counts if it and all before it are accepted. Raises ValueError, naming the argument, as `make_plan` does,
    for an acceptance outside 0 to 1, and for an `attention_share`, which belongs to one number of drafts.
    """
    source = ACCEPTANCE_SOURCE if acceptance is None else "given"
    acceptance = ACCEPTANCE if acceptance is None else acceptance
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance: wanted 0 to 1, got {acceptance}")
    if attention_share is not None:
        raise ValueError(f"attention_share: wanted none beside --drafts, got {attention_share}")
    rows = []
    for drafts in range(MOST_DRAFTS + 1):
        tokens = sum(acceptance**number for number in range(drafts + 1))
        rows.append(Drafted(drafts, tokens, make_plan(model, gpu, replace(on, s_q=1 + drafts)), on.batch))
    return Drafting(acceptance, source, bool(model.num_nextn_predict_layers), tuple(rows))

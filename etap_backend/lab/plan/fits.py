"""What a deployment holds, as it is and changed, and what ETAP gains there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etap_backend.lab import configs
from etap_backend.lab.plan.inputs import Deployment, Gpu, Model, read_gpu
from etap_backend.lab.plan.memory import PAGE_TOKENS
from etap_backend.lab.plan.step import Gain, make_plan


@dataclass(frozen=True)
class Alternative:
    """A change of the deployment, whether batch and context fit after it, and what ETAP gains then."""

    change: str
    tokens: int
    tokens_wanted: int
    most_requests: int  # of this context, on all GPUs
    most_context: int  # of this batch
    gain: Gain

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted


def _alternative(change: str, model: Model, gpu: Gpu, on: Deployment, share: float | None) -> Alternative:
    made = make_plan(model, gpu, on, share)
    memory = made.memory
    pages = memory.tokens // PAGE_TOKENS
    most = pages // -(-on.context // (PAGE_TOKENS * on.dcp)) * on.dp
    context = pages // on.local_batch * PAGE_TOKENS * on.dcp
    gain = made.gain_over(made.padded)
    return Alternative(change, memory.tokens, memory.tokens_wanted, most, context, gain)


def what_fits(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> list[Alternative]:
    """The deployment as it is, and with another cache, more context parallelism, other or more GPUs.

    A measured `attention_share` is that of the deployment as it is; what changes is told by the planner's own.
    """
    asked = f"{on.gpus} x {gpu.name}"
    changes = {asked: (gpu, on)}
    for dcp in (2, 4, 8):
        if dcp > on.dcp and on.tp % dcp == 0:
            changes[f"{asked}, dcp {dcp}"] = gpu, replace(on, dcp=dcp)
    for name in configs.shipped("hardware"):
        other = read_gpu(name)
        if other.memory_bytes.value > 1.05 * gpu.memory_bytes.value:
            changes[f"{on.gpus} x {other.name}"] = other, on
    more = replace(on, gpus=2 * on.gpus, pp=2 * on.pp)
    if more.pp <= model.num_hidden_layers:
        changes[f"{more.gpus} x {gpu.name}, pp {more.pp}"] = gpu, more
    if on.cache != "fp8":
        changes |= {
            f"{change}, FP8 cache": (where, replace(how, cache="fp8")) for change, (where, how) in changes.items()
        }
    first, *others = changes.items()
    return [
        _alternative(first[0], model, *first[1], attention_share),
        *(_alternative(change, model, where, how, None) for change, (where, how) in others),
    ]

"""A deployment as it is and changed: what it holds, and what ETAP gains there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.common import configs
from etap_backend.plan.inputs import Deployment, Gpu, Model, Status, read_gpu
from etap_backend.plan.sparse import make_sparse_plan
from etap_backend.plan.step import Gain, Plan, make_plan, why_not


@dataclass(frozen=True)
class Alternative:
    """A change of the deployment, whether batch and context fit after it, and what ETAP gains then."""

    layout: str  # GPUs and parallelism
    cache: str
    tokens: int
    tokens_wanted: int
    most_requests: int  # of this context, on all GPUs
    most_context: int  # of this batch
    gain: Gain | None  # None where no kernel was timed
    rest_status: Status  # of the rest of a step in it: of a share that was given, or the planner's own

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted


def plan_of(model: Model, gpu: Gpu, on: Deployment, share: float | None, kernels: list[Path] | None) -> Plan:
    """The plan of either kind of attention. Raises ValueError, naming the argument, when there can be none."""
    if not model.sparse:
        if kernels:
            raise ValueError(f"kernels: wanted none for dense attention, got {', '.join(map(str, kernels))}")
        return make_plan(model, gpu, on, share)
    if share is not None:
        raise ValueError(f"attention_share: wanted none for sparse attention, got {share}")
    return make_sparse_plan(model, gpu, on, kernels)


def what_fits(
    model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None, kernels: list[Path] | None = None
) -> list[Alternative]:
    """The deployment as it is, and with another cache, more context parallelism, other or more GPUs.

    A measured `attention_share` and `kernels`, which tell a sparse call's time, are of the deployment and the GPU as
    they are; what changes is told by the planner's own.
    """
    asked = f"{on.gpus} x {gpu.name}"
    layouts = {asked: (gpu, on)}
    for dcp in (2, 4, 8):
        if dcp > on.dcp and on.tp % dcp == 0 and not model.v4:
            layouts[f"{asked}, dcp {dcp}"] = gpu, replace(on, dcp=dcp)
    for name in configs.shipped("hardware"):
        other = read_gpu(name)
        if other.memory_bytes.value > 1.05 * gpu.memory_bytes.value:
            layouts[f"{on.gpus} x {other.name}"] = other, on
    more = replace(on, gpus=2 * on.gpus, pp=2 * on.pp)
    if model.divides_into(more.pp):
        layouts[f"{more.gpus} x {gpu.name}, pp {more.pp}"] = gpu, more
    found = []
    for cache in dict.fromkeys((on.cache, "fp8")):
        if why_not(model, replace(on, cache=cache)) is None:
            for layout, (where, how) in layouts.items():
                share, files = None if found else attention_share, kernels if where is gpu else None
                made = plan_of(model, where, replace(how, cache=cache), share, files)
                memory, page = made.memory, made.memory.page_tokens
                most = memory.requests_of(memory.tokens_wanted // how.local_batch) * how.dp
                context = memory.tokens // page // how.local_batch * page * how.dcp
                known = memory.tokens, memory.tokens_wanted, most, context, made.gain, made.rest_status
                found.append(Alternative(layout, cache, *known))
    return found

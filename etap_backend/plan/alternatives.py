"""A deployment as asked and changed: what it holds, and what ETAP gains there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etap_backend.plan import files
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Gpu, read_gpu
from etap_backend.plan.model import Model
from etap_backend.plan.sparse import make_sparse_plan
from etap_backend.plan.step import Gain, Plan, make_dense_plan, why_not


@dataclass(frozen=True)
class Alternative:
    """One layout with one cache."""

    layout: str
    cache: str
    tokens: int
    tokens_wanted: int
    most_requests: int  # requests of the asked context that fit on all GPUs
    most_context: int  # tokens that each request of the asked batch may have
    gain: Gain | None  # None where no kernel was timed

    @property
    def fits(self) -> bool:
        return self.tokens >= self.tokens_wanted


def make_plan(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> Plan:
    """The plan for either kind of attention. Raises ValueError, naming the argument, when there is none."""
    if not model.sparse:
        return make_dense_plan(model, gpu, on, attention_share)
    if attention_share is not None:
        raise ValueError(f"attention_share: wanted none for sparse attention, got {attention_share}")
    return make_sparse_plan(model, gpu, on)


def _layouts(model: Model, gpu: Gpu, on: Deployment) -> dict[str, tuple[Gpu, Deployment]]:
    """The asked layout, more context parallelism, larger GPUs, and twice as many GPUs."""
    asked = f"{on.gpus} x {gpu.name}"
    layouts = {asked: (gpu, on)}
    for dcp in (2, 4, 8):
        if dcp > on.dcp and on.tp % dcp == 0 and not model.v4:
            layouts[f"{asked}, dcp {dcp}"] = gpu, replace(on, dcp=dcp)
    for name in files.shipped("hardware"):
        other = read_gpu(name)
        if other.memory_bytes.value > 1.05 * gpu.memory_bytes.value:
            layouts[f"{on.gpus} x {other.name}"] = other, on
    more = replace(on, gpus=2 * on.gpus, pp=2 * on.pp)
    if model.divides_into(more.pp):
        layouts[f"{more.gpus} x {gpu.name}, pp {more.pp}"] = gpu, more
    return layouts


def what_fits(model: Model, gpu: Gpu, on: Deployment, attention_share: float | None = None) -> list[Alternative]:
    """The asked deployment first, then others; a measured `attention_share` belongs to the asked one only."""
    found = []
    for cache in dict.fromkeys((on.cache, "fp8")):
        if why_not(model, replace(on, cache=cache)) is not None:
            continue
        for layout, (where, how) in _layouts(model, gpu, on).items():
            made = make_plan(model, where, replace(how, cache=cache), None if found else attention_share)
            memory, page = made.memory, made.memory.page_tokens
            most = memory.requests_of(memory.tokens_wanted // how.local_batch) * how.dp
            context = memory.tokens // page // how.local_batch * page * how.dcp
            sizes = memory.tokens, memory.tokens_wanted, most, context
            found.append(Alternative(layout, cache, *sizes, made.gain))
    return found

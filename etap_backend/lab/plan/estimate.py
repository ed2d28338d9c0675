"""What a server with H20 GPUs would do, estimated from end-to-end readings on another Hopper GPU.

Of every reading the attention is taken out at the measured time of its kernel on that GPU, and put back at the time
measured on the H20 proxy; what is left is scaled by the ratio of the planner's estimates for both, which rest on the
GPUs' nominal rates. Where the reading's tokens chose fewer experts than an even choice has, what reading the others
takes is added. It is an estimate, each step of it an assumption: docs/measuring.md names them.
"""

from __future__ import annotations

from dataclasses import replace

from etap_backend.lab.bench.rows import Document
from etap_backend.lab.e2e.rows import Document as Served
from etap_backend.lab.e2e.rows import Measured
from etap_backend.lab.plan.estimates import Estimate, Kernel
from etap_backend.lab.plan.inputs import Deployment, Gpu, Model
from etap_backend.lab.plan.served import (
    Servers,
    accepted,
    chooses_unevenly,
    expected_us,
    experts_read,
    kernel_of,
    measured_call,
    servers_of,
    step_ms,
)
from etap_backend.lab.plan.step import rest_of_step_ms

PROXY = "H20 proxy"


def call_on(model: Model, gpu: Gpu, on: Deployment, kernel: str, benchmarks: list[Document]) -> Kernel | None:
    """Measured where possible; FlashMLA where it was not measured as the planner's padded kernel, which is fitted to
    it with a bfloat16 cache. None for what else was not measured."""
    if found := measured_call(model, gpu, on, kernel, benchmarks):
        return found
    if kernel == "FlashMLA" and on.cache == "bfloat16":
        return Kernel(us=expected_us(model, gpu, on, kernel), source=f"{gpu.name}: {gpu.padded.source}")
    return None


def estimate_row(
    served: Served, row: Measured, servers: Servers, here: list[Document], there: list[Document]
) -> Estimate | str:
    """The estimate for one row, or why there is none."""
    on, on_there = servers.deployments(served, row)
    model, gpu = servers.model_here, servers.gpu_here
    kernel = kernel_of(row)
    before = kernel and call_on(model, gpu, on, kernel, here)
    after = kernel and call_on(servers.model_there, servers.gpu_there, on_there, kernel, there)
    if not before or not after:
        return f"{row.backend} was not measured on {'the H20 proxy' if before else gpu.name}"
    uneven = chooses_unevenly(served, row, model)
    experts = experts_read(served, row, servers) if uneven else None
    if uneven and experts is None:
        return "how many experts its steps read is not known: nothing with as many requests was profiled"
    step = step_ms(served, row)
    attention = before.us * len(model.attention_layers) / 1e3
    if attention >= step:
        return f"attention's {attention:.1f} ms is more than the step's {step:.1f} ms"
    as_here = rest_of_step_ms(servers.model_there, servers.gpu_there, replace(on_there, experts=experts))
    factor = as_here / rest_of_step_ms(model, gpu, replace(on, experts=experts))
    other_experts = rest_of_step_ms(servers.model_there, servers.gpu_there, on_there) - as_here
    attention_there = after.us * len(servers.model_there.attention_layers) / 1e3
    step_there = (step - attention) * factor + other_experts + attention_there
    tpot = step_there / accepted(row)
    return Estimate(
        backend=row.backend,
        shape=row.load_text,
        step_here_ms=step,
        attention_here=before,
        attention_here_ms=attention,
        rest_here_ms=step - attention,
        rest_factor=factor,
        experts_here=experts,
        experts_there_ms=other_experts,
        attention_there=after,
        attention_there_ms=attention_there,
        step_ms=step_there,
        tpot_ms=tpot,
        tokens_per_second_per_gpu=row.concurrency / tpot * 1e3 / servers.tp_there,
    )


def estimate(served: Served, benchmarks: list[Document], target: str = "H20-96G") -> tuple[list[Estimate], list[str]]:
    """Estimates for all timed rows of a server's readings, and why there is none for the others.

    Benchmarks of the H20 proxy stand for the H20. Raises ValueError when the GPU or the model is not known.
    """
    servers = servers_of(served, target)
    there = [benchmark for benchmark in benchmarks if PROXY in benchmark.gpu]
    here = [benchmark for benchmark in benchmarks if PROXY not in benchmark.gpu]
    timed = served.measured()
    found = [estimate_row(served, row, servers, here, there) for row in timed]
    reasons = [f"{row.load_text}: {why}" for row, why in zip(timed, found, strict=True) if isinstance(why, str)]
    return [one for one in found if isinstance(one, Estimate)], reasons

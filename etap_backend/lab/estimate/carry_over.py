"""What a server with H20 GPUs would do, estimated from end-to-end readings on another Hopper GPU.

Of every reading the attention is taken out at the measured time of its kernel on that GPU, and put back at the time
measured on the H20 proxy; what is left is scaled by the ratio of the planner's estimates for both, which rest on the
GPUs' nominal rates. Where the reading's tokens chose fewer experts than an even choice has, what reading the others
takes is added. It is an estimate, each step of it an assumption: docs/measuring.md names them.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from etap_backend.lab import configs
from etap_backend.lab.bench.rows import OURS, Document, Row
from etap_backend.lab.e2e.results_file import Document as Served
from etap_backend.lab.e2e.results_file import Measured
from etap_backend.lab.estimate.results_file import Estimate, Kernel
from etap_backend.lab.plan.inputs import Deployment, Gpu, Model, read_gpu, read_model
from etap_backend.lab.plan.memory import weights_of
from etap_backend.lab.plan.step import GEMM_BANDWIDTH, etap_attention, padded_attention, rest_of_step_ms

# Kernels in the files of `etap bench`, by the engines' names of the backends that call them.
KERNELS = {"etap": OURS, "flashmla": "FlashMLA", "flash_attn_mla": "FA3", "fa3": "FA3"}
TARGET_RANKS = 8
MOST_IN_A_CHUNK = 1.05
MOE_KERNEL = "fused_moe_kernel"
PROXY = "H20 proxy"


def kernel_of(row: Measured) -> str | None:
    """Column of `etap bench` of the kernel that a row's backend calls."""
    return KERNELS.get(row.backend.lower())


def accepted(row: Measured) -> float:
    """Tokens a step."""
    return row.acceptance_length.median if row.acceptance_length else 1.0


def step_ms(served: Served, row: Measured) -> float:
    """A decode step as served. Where all prompts are in the prefix cache and each step gives one token, it is the time
    between two chunks of one token; TPOT has in it what requests wait for the others' admission, and smaller batches at
    the end."""
    alone = not row.tokens_per_chunk or row.tokens_per_chunk.median < MOST_IN_A_CHUNK
    if row.prefill == "cached" and not served.draft_tokens and row.itl_ms and alone:
        return row.itl_ms.median
    return row.tpot_ms.median * accepted(row)


def expected_us(model: Model, gpu: Gpu, on: Deployment, kernel: str) -> float:
    """Microseconds that the planner expects of a call of this kernel."""
    attention = etap_attention if kernel == OURS else padded_attention
    return attention(model, gpu, on).call_us


def measured_call(model: Model, gpu: Gpu, on: Deployment, kernel: str, benchmarks: list[Document]) -> Kernel | None:
    """The call's time in the nearest measured row of as many rows a request, moved to this shape by the planner's form.

    None when no row of these benchmarks has this kernel with as many heads and query tokens and such a cache.
    """
    heads = model.num_attention_heads // on.tp
    rows = [
        (document, row)
        for document in benchmarks
        for row in document.rows
        if row.length and row.dtype == "bfloat16" and (row.heads, row.s_q) == (heads, on.s_q)
        if row.us(kernel) and row.fp8 == (on.cache == "fp8")
    ]
    if not rows:
        return None

    def distance(row: Row) -> float:
        return abs(math.log(row.batch / on.local_batch)) + abs(math.log(row.length / on.context))

    document, row = min(rows, key=lambda pair: distance(pair[1]))
    like = Deployment(on.gpus, on.tp, 1, on.pp, 1, on.cache, row.length, row.batch, row.s_q)
    ratio = expected_us(model, gpu, on, kernel) / expected_us(model, gpu, like, kernel)
    return Kernel(us=row.us(kernel) * ratio, source=f"{document.gpu}, {row.label}, x {ratio:.2f}")


@dataclass(frozen=True)
class Servers:
    """The server that was measured and the one that is asked for, each with its model, GPU and deployment."""

    model_here: Model
    gpu_here: Gpu
    model_there: Model
    gpu_there: Gpu
    tp_there: int = TARGET_RANKS

    def deployments(self, served: Served, row: Measured) -> tuple[Deployment, Deployment]:
        common = {
            "context": row.input + row.output // 2,
            "batch": row.concurrency,
            "s_q": 1 + served.draft_tokens,
            "cache": "fp8" if served.kv_dtype == "fp8" else "bfloat16",
        }
        layout = served.layout
        here = Deployment(served.gpus, layout.tp, layout.dp, layout.pp, **common)
        return here, Deployment(self.tp_there, self.tp_there, **common)


def servers_of(served: Served, target: str) -> Servers:
    """Raises ValueError when the measured GPU or model has no file of configs."""
    known = configs.shipped("hardware")
    name = next((name for name in known if name in served.gpu.lower()), None)
    if name is None:
        raise ValueError(f"gpu: wanted one of {', '.join(known)}, got {served.gpu}")
    if served.model_shape is None:
        raise ValueError(f"model: wanted a result with the model's shape, got none for {served.model}")
    if served.layout.dcp > 1:  # `etap bench` has no such calls, of several ranks' heads on a share of the tokens
        raise ValueError(f"layout: wanted a result without context parallelism, got dcp {served.layout.dcp}")
    here = configs.parse(Model, served.model_shape)
    if here.sparse:
        raise ValueError(f"model: wanted a result of dense attention, got index_topk {here.index_topk}")
    shipped = served.model.lower() in configs.shipped("models", ".json")
    there = read_model(served.model) if shipped else here
    return Servers(here, read_gpu(name), there, read_gpu(target))


def experts_read(served: Served, row: Measured, servers: Servers) -> float | None:
    """Routed experts of a layer that a step of this row read: by the time of their kernel in profiles of as many
    requests, at the bandwidth that the planner gives to products. None where nothing of the kind was profiled."""
    model, gpu, on = servers.model_here, servers.gpu_here, servers.deployments(served, row)[0]
    (experts,) = (part for part in weights_of(model, on) if part.experts)
    profiles = [one.profile for one in served.measured() if one.concurrency == row.concurrency and one.profile]
    times = [
        kernel["ms"] / profile.steps
        for profile in profiles
        for kernel in profile.kernels or []
        if profile.steps and kernel["name"] == MOE_KERNEL
    ]
    if not times:
        return None
    read = statistics.median(times) / 1e3 * gpu.sustained_bandwidth.value * GEMM_BANDWIDTH.value
    return read / experts.bytes_per_gpu * model.n_routed_experts


def chooses_unevenly(served: Served, row: Measured, model: Model) -> bool:
    """Whether the experts that a step reads are fewer than an even choice's: with made-up weights the tokens of a batch
    are much alike, and so are the experts that they choose."""
    several = row.concurrency * (1 + served.draft_tokens) > 1
    return bool(model.n_routed_experts and served.dummy and several and not served.draws_experts)


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

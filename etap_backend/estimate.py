"""What a server with H20 GPUs would do, estimated from end-to-end readings on another Hopper GPU.

    python -m etap_backend.estimate results/e2e-decode-short-vllm.json --kernels results/targets.json \\
        --kernels results/targets-h20-proxy.json

Of every reading the attention is taken out at the measured time of its kernel on that GPU, and put back at the time
measured on the H20 proxy; what is left is scaled by the ratio of the planner's estimates for both, which rest on the
GPUs' nominal rates. Where the reading's tokens chose fewer experts than an even choice has, what reading the others
takes is added. It is an estimate, each step of it an assumption: docs/e2e.md names them.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend import configs, plan, report
from etap_backend.e2e_report import at_equal_host_speed, shape_of, shape_text
from etap_backend.plan import Deployment, Gpu, Model

# Kernels in the files of `etap bench`, by the engines' names of the backends that call them.
KERNELS = {"etap": "etap", "flashmla": "FlashMLA", "flash_attn_mla": "FA3", "fa3": "FA3"}
TARGET_RANKS = 8
PROXY = "H20 proxy"
MOST_IN_A_CHUNK = 1.05
MOE_KERNEL = "fused_moe_kernel"
EVEN_ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # set where experts were drawn instead of chosen
MEASURED_WITH = ("gpu", "driver", "versions", "commit", "command", "date")  # of every file that an estimate rests on


@dataclass(frozen=True)
class Kernel:
    """Microseconds of one attention call, and where they come from."""

    us: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """One reading carried over to another GPU; times in milliseconds a step, of all layers.

    `experts_here` are a layer's that a step read, where they were fewer than an even choice's, and `experts_there_ms`
    is what reading the others adds.
    """

    backend: str
    shape: str
    step_here_ms: float
    attention_here: Kernel
    attention_here_ms: float
    rest_here_ms: float
    rest_factor: float
    experts_here: float | None
    experts_there_ms: float
    attention_there: Kernel
    attention_there_ms: float
    step_ms: float
    tpot_ms: float
    tokens_per_second_per_gpu: float

    @property
    def share(self) -> float:
        """Of the estimated step, what attention takes."""
        return self.attention_there_ms / self.step_ms


def _calls(model: Model, gpu: Gpu, on: Deployment, kernel: str) -> float:
    """Microseconds that the planner expects of a call of this kernel."""
    attention = plan.etap_attention if kernel == "etap" else plan.padded_attention
    return attention(model, gpu, on).call_us


def _like(on: Deployment, row: dict) -> Deployment:
    """The deployment with the batch of a row of `etap bench`."""
    return Deployment(on.gpus, on.tp, 1, on.pp, 1, on.cache, row["length"], row["batch"], row["s_q"])


def measured_call(model: Model, gpu: Gpu, on: Deployment, kernel: str, benchmarks: list[dict]) -> Kernel | None:
    """The call's time in the nearest measured row of as many rows a request, moved to this shape by the planner's form.

    None when no row of these benchmarks has this kernel with as many heads and query tokens and such a cache.
    """
    heads = model.num_attention_heads // on.tp
    rows = [
        (document, row)
        for document in benchmarks
        for row in document["rows"]
        if row["length"] and row["dtype"] == "bfloat16" and (row["heads"], row["s_q"]) == (heads, on.s_q)
        if "us" in row["results"].get(kernel, {}) and (row.get("kv_dtype") == "fp8") == (on.cache == "fp8")
    ]
    if not rows:
        return None

    def distance(row: dict) -> float:
        return abs(math.log(row["batch"] / on.local_batch)) + abs(math.log(row["length"] / on.context))

    document, row = min(rows, key=lambda pair: distance(pair[1]))
    ratio = _calls(model, gpu, on, kernel) / _calls(model, gpu, _like(on, row), kernel)
    return Kernel(row["results"][kernel]["us"] * ratio, f"{document['gpu']}, {row['label']}, x {ratio:.2f}")


def call_on(model: Model, gpu: Gpu, on: Deployment, kernel: str, benchmarks: list[dict]) -> Kernel | None:
    """Measured where possible; FlashMLA where it was not measured as the planner's padded kernel, which is fitted to
    it with a bfloat16 cache. None for what else was not measured."""
    if found := measured_call(model, gpu, on, kernel, benchmarks):
        return found
    if kernel == "FlashMLA" and on.cache == "bfloat16":
        return Kernel(_calls(model, gpu, on, kernel), f"{gpu.name}: {gpu.padded.source}")
    return None


@dataclass(frozen=True)
class Servers:
    """The server that was measured and the one that is asked for, each with its model, GPU and deployment."""

    model_here: Model
    gpu_here: Gpu
    model_there: Model
    gpu_there: Gpu
    tp_there: int = TARGET_RANKS

    def deployments(self, document: dict, row: dict) -> tuple[Deployment, Deployment]:
        layout = document["layout"]
        context = row["input"] + row["output"] // 2
        common = {"context": context, "batch": row["concurrency"], "s_q": 1 + document["draft_tokens"]}
        common["cache"] = "fp8" if document.get("kv_dtype") == "fp8" else "bfloat16"
        here = Deployment(document["gpus"], layout["tp"], layout["dp"], layout["pp"], **common)
        return here, Deployment(self.tp_there, self.tp_there, **common)


def servers_of(document: dict, target: str) -> Servers:
    """Raises ValueError when the measured GPU or model has no file of configs."""
    name = next((name for name in configs.shipped("hardware") if name in document["gpu"].lower()), None)
    if name is None:
        raise ValueError(f"gpu: wanted one of {', '.join(configs.shipped('hardware'))}, got {document['gpu']}")
    if document["model_shape"] is None:
        raise ValueError(f"model: wanted a result with the model's shape, got none for {document['model']}")
    here = Model.model_validate(document["model_shape"])
    known = document["model"].lower() in configs.shipped("models", ".json")
    there = plan.read_model(document["model"]) if known else here
    return Servers(here, plan.read_gpu(name), there, plan.read_gpu(target))


def step_ms(document: dict, row: dict) -> float:
    """A decode step as served. Where all prompts are in the prefix cache and each step gives one token, it is the time
    between two chunks of one token; TPOT has in it what requests wait for the others' admission, and smaller batches at
    the end."""
    alone = row.get("tokens_per_chunk", {}).get("median", 1.0) < MOST_IN_A_CHUNK
    if row["prefill"] == "cached" and not document["draft_tokens"] and "itl_ms" in row and alone:
        return row["itl_ms"]["median"]
    return row["tpot_ms"]["median"] * row.get("acceptance_length", {}).get("median", 1.0)


def experts_read(document: dict, row: dict, servers: Servers) -> float | None:
    """Routed experts of a layer that a step of this row read: by the time of their kernel in profiles of as many
    requests, at the bandwidth that the planner gives to products. None where nothing of the kind was profiled."""
    model, gpu, on = servers.model_here, servers.gpu_here, servers.deployments(document, row)[0]
    [experts] = [part for part in plan.weights_of(model, on) if part.experts]
    times = [
        kernel["ms"] / alike["profile"]["steps"]
        for alike in document["rows"]
        if alike["concurrency"] == row["concurrency"] and alike.get("profile", {}).get("steps")
        for kernel in alike["profile"]["kernels"]
        if kernel["name"] == MOE_KERNEL
    ]
    if not times:
        return None
    read = statistics.median(times) / 1e3 * gpu.sustained_bandwidth.value * plan.GEMM_BANDWIDTH.value
    return read / experts.bytes_a_gpu * model.n_routed_experts


def chooses_unevenly(document: dict, row: dict) -> bool:
    """Whether the experts that a step reads are fewer than an even choice's: with made-up weights the tokens of a batch
    are much alike, and so are the experts that they choose."""
    tokens = row["concurrency"] * (1 + document["draft_tokens"])
    return bool(document.get("dummy")) and tokens > 1 and not document.get("environment", {}).get(EVEN_ROUTING)


def with_shares(document: dict, benchmarks: list[dict]) -> dict:
    """The document with the share of attention in a decode step in every row whose kernel these benchmarks have.

    The share is layers x the kernel's own time over the step that was served; where prefill was served too, the step
    has a part of that in it. A document of a GPU or a model that is not known comes back as it was.
    """
    try:
        servers = servers_of(document, "h20-96g")
    except ValueError:
        return document
    here = [benchmark for benchmark in benchmarks if benchmark["gpu"] == document["gpu"]]
    rows = []
    for row in document["rows"]:
        kernel, on = KERNELS.get(row["backend"].lower()), servers.deployments(document, row)[0]
        if (
            "tpot_ms" in row
            and kernel
            and (call := measured_call(servers.model_here, servers.gpu_here, on, kernel, here))
        ):
            attention = call.us * servers.model_here.num_hidden_layers / 1e3
            row = row | {"attention_share": attention / step_ms(document, row)}
        rows.append(row)
    return document | {"rows": rows}


def estimate_row(document: dict, row: dict, servers: Servers, here: list[dict], there: list[dict]) -> Estimate | str:
    """The estimate for one row, or why there is none."""
    kernel = KERNELS.get(row["backend"].lower())
    on, on_there = servers.deployments(document, row)
    model, gpu = servers.model_here, servers.gpu_here
    before = kernel and call_on(model, gpu, on, kernel, here)
    after = kernel and call_on(servers.model_there, servers.gpu_there, on_there, kernel, there)
    if not before or not after:
        return f"{row['backend']} was not measured on {'the H20 proxy' if before else gpu.name}"
    experts = experts_read(document, row, servers) if chooses_unevenly(document, row) else None
    if experts is None and chooses_unevenly(document, row):
        return "how many experts its steps read is not known: nothing with as many requests was profiled"
    accepted = row.get("acceptance_length", {}).get("median", 1.0)
    step = step_ms(document, row)
    attention = before.us * model.num_hidden_layers / 1e3
    if attention >= step:
        return f"attention's {attention:.1f} ms is more than the step's {step:.1f} ms"
    as_here = plan.rest_of_step_ms(servers.model_there, servers.gpu_there, replace(on_there, experts=experts))
    factor = as_here / plan.rest_of_step_ms(model, gpu, replace(on, experts=experts))
    other_experts = plan.rest_of_step_ms(servers.model_there, servers.gpu_there, on_there) - as_here
    attention_there = after.us * servers.model_there.num_hidden_layers / 1e3
    step_there = (step - attention) * factor + other_experts + attention_there
    tpot = step_there / accepted
    return Estimate(
        backend=row["backend"],
        shape=shape_text(shape_of(row)),
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
        tokens_per_second_per_gpu=row["concurrency"] / tpot * 1e3 / servers.tp_there,
    )


def estimate(document: dict, benchmarks: list[dict], target: str = "H20-96G") -> tuple[list[Estimate], list[str]]:
    """Estimates for all timed rows of a document of `etap e2e`, and why there is none for the others.

    `benchmarks` are documents of `etap bench`; those of the H20 proxy stand for the H20. Raises ValueError when the GPU
    or the model is not known.
    """
    servers = servers_of(document, target)
    there = [benchmark for benchmark in benchmarks if PROXY in benchmark["gpu"]]
    here = [benchmark for benchmark in benchmarks if PROXY not in benchmark["gpu"]]
    timed = [row for row in document["rows"] if "tpot_ms" in row]
    found = [estimate_row(document, row, servers, here, there) for row in timed]
    reasons = [
        f"{shape_text(shape_of(row))}: {why}" for row, why in zip(timed, found, strict=True) if isinstance(why, str)
    ]
    return [one for one in found if isinstance(one, Estimate)], reasons


def table_of(document: dict, found: list[Estimate], target: str) -> Table:
    table = Table(title_justify="left")
    table.title = (
        f"ESTIMATE for {TARGET_RANKS} x {target}, tensor parallel, from {document['gpus']} x {document['gpu']}"
    )
    for number, title in enumerate(
        (
            "requests",
            "backend",
            "step here",
            "of it attention",
            "rest x",
            "other experts",
            "attention there",
            "step there ms",
            "tokens/s a GPU",
        )
    ):
        table.add_column(title, justify="left" if number < 2 else "right")
    for one in found:
        here = (one.step_here_ms, one.attention_here_ms, one.rest_factor)
        cells = [f"{number:.2f}" for number in (*here, one.experts_there_ms, one.attention_there_ms, one.step_ms)]
        table.add_row(one.shape, one.backend, *cells, f"{one.tokens_per_second_per_gpu:.1f}")
    return table


def main(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `etap e2e`.", exists=True)],
    kernels: Annotated[list[Path], typer.Option(help="JSON files of `etap bench`, of that GPU and of the H20 proxy.")],
    target: Annotated[str, typer.Option(help="A GPU of configs/hardware.")] = "H20-96G",
    output: Annotated[Path | None, typer.Option(help="JSON file for the estimates.")] = None,
) -> None:
    """Estimate from end-to-end readings what eight H20 would do."""
    documents = {path: json.loads(path.read_text()) for path in (*results, *kernels)}
    console, benchmarks = Console(), [documents[path] for path in kernels]
    written = {}
    for path in results:
        document = at_equal_host_speed(documents[path])
        try:
            found, reasons = estimate(document, benchmarks, target)
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {error}") from error
        console.print(table_of(document, found, target))
        for reason in reasons:
            console.print(reason, markup=False, highlight=False)
        written[path.stem] = [asdict(one) for one in found]
    if output:
        made_with = {
            "commit": report.commit(),
            "command": shlex.join(["python", "-m", "etap_backend.estimate", *sys.argv[1:]]),
            "sources": {
                path.name: {key: document[key] for key in MEASURED_WITH if key in document}
                for path, document in documents.items()
            },
        }
        report.write({"kind": "estimate", "target": target, **made_with, "estimates": written}, output)


if __name__ == "__main__":
    typer.run(main)

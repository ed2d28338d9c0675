"""The planner's answer on a screen, and all that it knows as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etap_backend.lab.plan.fits import Alternative
from etap_backend.lab.plan.inputs import Deployment, Gpu, Model, Status
from etap_backend.lab.plan.memory import RESERVE_BYTES, Memory, parameters_of, weights_of
from etap_backend.lab.plan.step import GEMM_BANDWIDTH, LAYER_US, PADDED_ROWS, Attention, BesideBf16, Gain, Plan
from etap_backend.lab.units import in_k

ASSUMPTIONS = {"layer_us": LAYER_US, "gemm_bandwidth_share": GEMM_BANDWIDTH, "reserve_bytes": RESERVE_BYTES}


def document(name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, found: list[Alternative]) -> dict:
    """Everything that the planner knows of one deployment, for --json."""
    return {
        "model": {"name": name, "parameters": parameters_of(model), **model.model_dump()},
        "gpu": gpu.model_dump(),
        "deployment": asdict(on),
        "assumptions": {key: figure.model_dump() for key, figure in ASSUMPTIONS.items()},
        "weights": [{**asdict(part), "bytes_a_gpu": part.bytes_a_gpu} for part in weights_of(model, on)],
        "memory": {**asdict(plan.memory), "cache_wanted": plan.memory.cache_wanted, "fits": plan.memory.fits},
        "attention": {
            "etap": asdict(plan.etap),
            "padded": asdict(plan.padded),
            "padded_in_vllm": plan.padded_in_vllm and asdict(plan.padded_in_vllm),
        },
        "beside_bf16": plan.beside_bf16 and asdict(plan.beside_bf16),
        "step": {
            "rest_ms": plan.rest_ms,
            "rest_status": plan.rest_status,
            "etap_ms": plan.step_ms,
            "padded_ms": plan.padded_step_ms,
            "attention_share_padded": plan.share,
            "gain": plan.gain,
            "gain_over_padded_in_vllm": plan.padded_in_vllm and plan.gain_over(plan.padded_in_vllm).tokens,
            "tokens_per_second_per_gpu": on.batch / plan.step_ms * 1e3 / on.gpus,
        },
        "what_fits": [{**asdict(one), "fits": one.fits} for one in found],
    }


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def _table(title: str, *columns: str, words: int = 1) -> Table:
    """`words` columns of words, then columns of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", overflow="fold")
    return table


def _gain_text(gain: Gain) -> str:
    return f"{gain.tokens:+.0%} tokens/s, {gain.call:.2f}x a call" + ("*" if gain.fp8_math else "")


def _shape(on: Deployment) -> str:
    return f"{on.batch} x {in_k(on.context)}"


def memory_lines(gpu: Gpu, on: Deployment, memory: Memory, beside: BesideBf16 | None) -> list[str]:
    """Where the bytes of a GPU go, and whether batch and context fit."""
    room = f"{memory.tokens:,} tokens of {memory.cache_a_token:,} B"
    if beside:
        more = f"{beside.capacity_gain:.2f}x" if beside.capacity_gain else "all"
        room += f" (FP8 holds {more} of the {beside.tokens:,} in bfloat16)"
    lines = [
        f"A GPU has {_gb(memory.total)} ({gpu.memory_bytes.status}), {on.utilization:.0%} of it for the engine; "
        f"derived: weights {_gb(memory.weights)}, activations, graphs and NCCL {_gb(memory.reserve)}, KV cache {room}."
    ]
    wanted = f"{memory.tokens_wanted:,} tokens = {_gb(memory.cache_wanted)} a GPU"
    if memory.tokens == 0:
        lines.append(f"[red]The weights do not leave room for a KV cache on {on.gpus} x {gpu.name}.[/]")
    elif memory.fits:
        lines.append(f"[green]{_shape(on)} fits:[/] its KV cache is {wanted}.")
    else:
        left = _gb(memory.tokens * memory.cache_a_token)
        lines.append(
            f"[red]{_shape(on)} does not fit beside the weights:[/] its KV cache is {wanted}, and {left} are left. The "
            "times below are those of the shape all the same."
        )
    return lines


def alternatives_table(found: list[Alternative], on: Deployment) -> Table:
    columns = (_shape(on), f"requests of {in_k(on.context)}", f"context of {on.batch}", "ETAP gains")
    table = _table("What fits, the first line being what was asked", "", *columns, words=2)
    for row in found:
        verdict = "[green]fits[/]" if row.fits else "[red]does not[/]"
        table.add_row(row.change, verdict, f"{row.most_requests:,}", f"{row.most_context:,}", _gain_text(row.gain))
    return table


def attention_table(gpu: Gpu, plan: Plan) -> Table:
    title = f"Decode attention and step on one {gpu.name} (rest of a step {plan.rest_ms:.1f} ms, {plan.rest_status})"
    table = _table(title, "", "call us", "roofline us", "rows", "all layers ms", "step ms", "ETAP gains")
    fitted = plan.beside_bf16 is None  # calls were fitted to bfloat16 caches
    kernels: list[tuple[str, Attention, Status]] = [("ETAP", plan.etap, gpu.etap.status if fitted else "derived")]
    if beside := plan.beside_bf16:
        kernels.append(("ETAP, FP8 math", beside.fp8_math, "derived"))
        kernels.append(("ETAP, bfloat16 cache", beside.bf16, gpu.etap.status))
    own = len(kernels)
    kernels.append(("FlashMLA alone", plan.padded, gpu.padded.status if fitted else "derived"))
    if plan.padded_in_vllm and gpu.padded_in_vllm:
        kernels.append(("FlashMLA in vLLM", plan.padded_in_vllm, gpu.padded_in_vllm.status))
    for number, (name, kernel, status) in enumerate(kernels):
        gain = _gain_text(plan.gain_over(kernel)) if number >= own else ""
        calls = (f"{kernel.call_us:.1f} {status}", f"{kernel.roofline_us:.1f} {kernel.bound}", str(kernel.rows))
        table.add_row(name, *calls, f"{kernel.step_ms:.2f}", f"{plan.step_with(kernel):.1f}", gain)
    return table


def sources_table(gpu: Gpu) -> Table:
    table = _table("What the numbers are", "", "value", "", "source", words=4)
    for name, figure in {**gpu.figures, **ASSUMPTIONS}.items():
        table.add_row(name.replace("_", " "), f"{figure.value:,.4g}", figure.status, figure.source)
    for name, call in gpu.calls.items():
        files = "; ".join(f"results/{file}.json" for file in call.results)
        source = "; ".join(filter(None, (call.source, files and f"{call.kernel} of {files}")))
        form = f"{call.fixed_us:g} us + {call.factor:g} x roofline"
        table.add_row(f"call, {name.replace('_', ' ')}", form, call.status, source)
    return table


def remarks(on: Deployment, plan: Plan) -> list[str]:
    """What the tables do not say."""
    rate = on.batch / plan.step_ms * 1e3 / on.gpus
    lines = [
        f"Attention is {plan.share:.0%} of a step with FlashMLA alone; with ETAP {rate:.0f} tokens/s a GPU, prefill of "
        "other requests not in it."
    ]
    if plan.padded_in_vllm:
        lines.append("FlashMLA alone: its kernels, built from its sources; in vLLM: as vLLM 0.26 ships and calls it.")
    if plan.etap.rows >= PADDED_ROWS:
        lines.append(f"With {PADDED_ROWS} query rows or more there is no padding that ETAP could save.")
    if beside := plan.beside_bf16:
        one, other = (beside.bf16.call_us / kernel.call_us for kernel in (plan.etap, beside.fp8_math))
        lines.append(
            f"Against its own bfloat16 cache {one:.2f}x a call, {other:.2f}x with FP8 math. Calls "
            "are fitted to bfloat16 caches; those with FP8 ones from 65 us on were within 15% of it."
        )
    if plan.rest_status == "derived":
        lines.append(
            "The rest of a step is fitted to 8 x H200 and carried over by rates, which makes a gain elsewhere an upper "
            "estimate: give the share of attention that you measured as --attention-share."
        )
    return lines


def print_plan(
    name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, found: list[Alternative], console: Console
) -> None:
    layout = f"tp {on.tp}, dp {on.dp}, pp {on.pp}, dcp {on.dcp}, {on.cache} cache"
    size = f"{parameters_of(model) / 1e9:.0f} G parameters"
    console.print(f"[bold]{name}[/] ({size}) on {on.gpus} x {gpu.name}: {layout}, {_shape(on)}, s_q {on.s_q}")
    for line in memory_lines(gpu, on, plan.memory, plan.beside_bf16):
        console.print(line, highlight=False)
    console.print(attention_table(gpu, plan))
    for line in remarks(on, plan):
        console.print(line, markup=False, highlight=False)
    console.print(alternatives_table(found, on))
    math = "* with FP8 math, as FlashMLA multiplies an FP8 cache. " if any(one.gain.fp8_math for one in found) else ""
    console.print(f"{math}Where each number is from: --sources.", markup=False, highlight=False)

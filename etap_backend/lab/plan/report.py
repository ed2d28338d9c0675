"""The planner's answer on a screen, and all that it knows as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etap_backend.lab.plan.fits import Alternative
from etap_backend.lab.plan.inputs import Call, Deployment, Figure, Gpu, Model, Status
from etap_backend.lab.plan.memory import INDEXER_RESERVE_BYTES, RESERVE_BYTES, Memory, parameters_of, weights_of
from etap_backend.lab.plan.sparse import SparsePlan
from etap_backend.lab.plan.step import GEMM_BANDWIDTH, LAYER_US, Attention, Gain, Plan
from etap_backend.lab.units import in_k

SHORT = {"bfloat16": "bf16", "fp8": "FP8"}
COUNTED = ("left", "state", "tokens", "cache_wanted", "fits")  # of the memory, beside its fields
ASSUMPTIONS = {"layer_us": LAYER_US, "gemm_bandwidth_share": GEMM_BANDWIDTH, "reserve_bytes": RESERVE_BYTES}


def assumptions_of(model: Model) -> dict[str, Figure]:
    return ASSUMPTIONS | ({"indexer_reserve_bytes": INDEXER_RESERVE_BYTES} if model.sparse else {})


def document(
    name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan | SparsePlan, found: list[Alternative]
) -> dict:
    """Everything that the planner knows of one deployment, for --json."""
    return {
        "model": {"name": name, "parameters": parameters_of(model), **model.model_dump()},
        "gpu": gpu.model_dump(),
        "deployment": asdict(on),
        "assumptions": {key: figure.model_dump() for key, figure in assumptions_of(model).items()},
        "weights": [{**asdict(part), "bytes_a_gpu": part.bytes_a_gpu} for part in weights_of(model, on)],
        "memory": {**asdict(plan.memory), **{key: getattr(plan.memory, key) for key in COUNTED}},
        **(_sparse_part(on, plan) if isinstance(plan, SparsePlan) else _dense_part(on, plan)),
        "what_fits": [{**asdict(one), "fits": one.fits} for one in found],
    }


def _dense_part(on: Deployment, plan: Plan) -> dict:
    return {
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
    }


def _sparse_part(on: Deployment, plan: SparsePlan) -> dict:
    """Names say `least` and `most` where the indexer's time, of which the roofline is known, is in a figure."""
    steps = {kernel.name: plan.least_step_ms(kernel) for kernel in plan.kernels}
    gains = {peer.name: plan.gain_over(peer).tokens for peer in plan.peers} if plan.ours else {}
    return {
        "attention": {
            "query_tokens": plan.tokens,
            "entries": plan.entries,
            "layers": plan.layers,
            "least": asdict(plan.roofline),
            "measured": {
                kernel.name: {**asdict(kernel.attention), "fit": kernel.call.model_dump()} for kernel in plan.kernels
            },
        },
        "indexer": {**asdict(plan.indexer), "least_ms": plan.indexer.least_ms},
        "bf16_tokens": plan.bf16_tokens,
        "step": {"rest_ms": plan.rest_ms, "rest_status": "derived", "least_ms": steps, "most_gain_over": gains},
    }


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def _columns(*columns: str, words: int = 1) -> Table:
    """A table without lines: `words` columns of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", no_wrap=number < words)
    return table


def _gain_cells(gain: Gain) -> tuple[str, str]:
    return f"{gain.tokens:+.0%}" + ("*" if gain.fp8_math else ""), f"{gain.call:.2f}x"


def _shape(on: Deployment) -> str:
    return f"{on.batch} x {in_k(on.context)}"


def memory_lines(gpu: Gpu, on: Deployment, memory: Memory, bf16_tokens: int | None) -> list[str]:
    """Whether batch and context fit, and where the bytes of a GPU go; `bf16_tokens` fit beside an FP8 cache's."""
    wanted = f"its KV cache is {memory.tokens_wanted:,} tokens = {_gb(memory.cache_wanted)} a GPU"
    if memory.tokens == 0:
        verdict = f"[red]The weights leave no room for a KV cache on {on.gpus} x {gpu.name}.[/]"
    elif memory.fits:
        verdict = f"[green]{_shape(on)} fits:[/] {wanted}."
    else:
        left = _gb(memory.tokens * memory.cache_a_token)
        verdict = f"[red]{_shape(on)} does not fit:[/] {wanted}, {left} are left."
    room = f"{memory.tokens:,} tokens of {memory.cache_a_token:,} B"
    if memory.indexer_a_token:
        room += f" ({memory.indexer_a_token:,} of them the indexer's)"
    if on.dcp > 1:
        room += f" on each of {on.dcp} ranks, {memory.tokens * on.dcp:,} in all"
    if bf16_tokens:
        room += f", {memory.tokens / bf16_tokens:.2f}x the {bf16_tokens:,} of bf16"
    state = f"state of linear attention {_gb(memory.state)}, " if memory.state else ""
    bytes_of_a_gpu = (
        f"Of a GPU's {_gb(memory.total)} the engine has {on.utilization:.0%}: weights {_gb(memory.weights)}, "
        f"activations and NCCL {_gb(memory.reserve)}, {state}KV cache for {room}."
    )
    return [verdict, bytes_of_a_gpu]


def alternatives_table(found: list[Alternative]) -> Table:
    """A line for what was asked and each other layout that holds anything, with what it holds and gains by cache."""
    caches = list(dict.fromkeys(row.cache for row in found))
    numbers = [column for cache in caches for column in (f"{SHORT[cache]} requests", "tokens", "gain")]
    table = _columns("", *numbers)
    rows: dict[str, list[str]] = {}
    holding = {row.layout for row in found if row.tokens} | {found[0].layout}
    for row in (row for row in found if row.layout in holding):
        gain = _gain_cells(row.gain)[0] if row.fits and row.gain else "-"
        rows.setdefault(row.layout, []).extend((f"{row.most_requests:,}", f"{row.most_context:,}", gain))
    for layout, cells in rows.items():
        table.add_row(layout, *cells)
    return table


def _attention_columns(gpu: Gpu) -> Table:
    numbers = ("call us", "rows", "layers ms", "step ms", "gain", "a call")
    return _columns(f"On one {gpu.name}", "", "bound", *numbers, words=3)


def attention_table(gpu: Gpu, plan: Plan) -> Table:
    table = _attention_columns(gpu)
    fitted = plan.beside_bf16 is None  # calls were fitted to bfloat16 caches
    kernels: list[tuple[str, Attention, Status]] = [("ETAP", plan.etap, gpu.etap.status if fitted else "derived")]
    if beside := plan.beside_bf16:
        kernels.append(("ETAP, FP8 math", beside.fp8_math, "derived"))
        kernels.append(("ETAP, bf16 cache", beside.bf16, gpu.etap.status))
    own = len(kernels)
    kernels.append(("FlashMLA alone", plan.padded, gpu.padded.status if fitted else "derived"))
    if plan.padded_in_vllm and gpu.padded_in_vllm:
        kernels.append(("FlashMLA in vLLM", plan.padded_in_vllm, gpu.padded_in_vllm.status))
    for number, (name, kernel, status) in enumerate(kernels):
        gain = _gain_cells(plan.gain_over(kernel)) if number >= own else ("", "")
        call = (status, _bound(kernel.bound), f"{kernel.call_us:.1f}", str(kernel.rows))
        table.add_row(name, *call, f"{kernel.step_ms:.2f}", f"{plan.step_with(kernel):.1f}", *gain)
    return table


def _bound(bound: str) -> str:
    return bound.removesuffix(" cores")


def sparse_attention_table(gpu: Gpu, plan: SparsePlan) -> Table:
    """As that of dense attention; >= is before what is known to be a lower bound only."""
    table = _attention_columns(gpu)
    least, ms = plan.roofline, plan.layers * plan.roofline.us / 1e3
    if plan.ours is None:
        cells = (f">={least.us:.1f}", str(least.rows), f">={ms:.2f}")
        table.add_row("ETAP", "not measured", _bound(least.bound), *cells)
    for kernel in plan.kernels:
        attention, gain = kernel.attention, plan.gain_over(kernel) if kernel is not plan.ours else None
        name = "ETAP" if kernel is plan.ours else kernel.name
        call = (kernel.call.status, _bound(attention.bound), f"{attention.call_us:.1f}", str(attention.rows))
        step = (f"{attention.step_ms:.2f}", f">={plan.least_step_ms(kernel):.1f}")
        table.add_row(name, *call, *step, *(_gain_cells(gain) if gain else ("", "")))
    indexer, least = plan.indexer, plan.indexer.roofline
    cells = (f">={least.us:.1f}", str(least.rows), f">={indexer.least_ms:.2f}")
    table.add_row("indexer", "not measured", _bound(least.bound), *cells)
    return table


def sources_table(gpu: Gpu, model: Model, plan: Plan | SparsePlan) -> Table:
    table = Table(
        title="What the numbers are", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for column in ("", "value", "", "source"):
        table.add_column(column, overflow="fold")
    for name, figure in {**gpu.figures, **assumptions_of(model)}.items():
        table.add_row(name.replace("_", " "), f"{figure.value:,.4g}", figure.status, figure.source)
    sparse = isinstance(plan, SparsePlan)
    for name, call in ({one.name: one.call for one in plan.kernels} if sparse else gpu.calls).items():
        table.add_row(f"call, {name.replace('_', ' ')}", *_call_cells(call))
    if not sparse:
        fp8 = "the same, with an FP8 cache's roofline; from 65 us on within 15% of results/targets-fp8*.json"
        table.add_row("call, FP8 cache", "", "derived", fp8)
    return table


def _call_cells(call: Call) -> tuple[str, str, str]:
    files = "; ".join(f"results/{file}.json" for file in call.results)
    source = "; ".join(filter(None, (call.source, files and f"{call.kernel} of {files}")))
    return f"{call.fixed_us:.3g} us + {call.factor:.3g} x roofline", call.status, source


def remarks(model: Model, on: Deployment, plan: Plan) -> list[str]:
    """What the tables do not say."""
    rate = on.batch / plan.step_ms * 1e3 / on.gpus
    lines = [
        f"Attention is {plan.share:.0%} of a step with FlashMLA alone; with ETAP {rate:.0f} tokens/s a GPU, prefill of "
        f"others not in it. The rest of a step, {plan.rest_ms:.1f} ms, is {plan.rest_status}."
    ]
    if plan.etap.rows >= plan.padded.rows:
        lines.append(f"Both compute {plan.etap.rows} query rows: there is no padding that ETAP could save.")
    if beside := plan.beside_bf16:
        one, other = (beside.bf16.call_us / kernel.call_us for kernel in (plan.etap, beside.fp8_math))
        lines.append(f"Against its bf16 cache {one:.2f}x a call, {other:.2f}x with FP8 math (*).")
    if model.linear_layers:
        lines.append(
            f"{len(model.attention_layers)} of {model.num_hidden_layers} layers have latent attention, nobody timed "
            "the others here."
        )
    return lines


def sparse_remarks(gpu: Gpu, model: Model, on: Deployment, plan: SparsePlan) -> list[str]:
    """What the tables do not say of sparse attention."""
    rows = f"{plan.entries:,} rows of {model.cache_row_bytes(on.cache):,} B"
    lines = [f"A call gathers {rows} for each of {plan.tokens} tokens, in {plan.layers} layers."]
    if plan.ours:
        rate = on.batch / plan.least_step_ms(plan.ours) * 1e3 / on.gpus
        lines.append(f"With ETAP at most {rate:.0f} tokens/s a GPU. Gains are at most, over the fastest below.")
    else:
        lines.append(f"No `etap bench sparse` of an {gpu.name} (--kernels): no step. >= is a roofline.")
    lines.append(f"Choosing the indexer's best scores comes on top. The rest, {plan.rest_ms:.1f} ms, is derived.")
    return lines


def print_plan(
    name: str,
    model: Model,
    gpu: Gpu,
    on: Deployment,
    plan: Plan | SparsePlan,
    found: list[Alternative],
    console: Console,
) -> None:
    several = (f"{key} {getattr(on, key)}" for key in ("dp", "pp", "dcp", "s_q") if getattr(on, key) > 1)
    layout = ", ".join((f"tp {on.tp}", *several))
    size = f"{parameters_of(model) / 1e9:.0f} G"
    console.print(f"[bold]{name}[/] ({size}), {on.gpus} x {gpu.name}: {layout}, {on.cache} cache, {_shape(on)}")
    if isinstance(plan, SparsePlan):
        bf16_tokens, table = plan.bf16_tokens, sparse_attention_table(gpu, plan)
        lines, closing = sparse_remarks(gpu, model, on, plan), ""
    else:
        bf16_tokens, table = plan.beside_bf16 and plan.beside_bf16.tokens, attention_table(gpu, plan)
        lines, closing = remarks(model, on, plan), _closing(plan, found)
    for line in memory_lines(gpu, on, plan.memory, bf16_tokens):
        console.print(line, highlight=False)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    title = (
        f"What fits: requests of {in_k(on.context)}; tokens of each of {on.batch}; the gain, where {_shape(on)} fits"
    )
    console.print(title, style="bold", highlight=False)
    console.print(alternatives_table(found))
    console.print(f"{closing}Where each number is from: --sources.", markup=False, highlight=False)


def _closing(plan: Plan, found: list[Alternative]) -> str:
    """What the gains in the last table are."""
    starred = plan.beside_bf16 is None and any(one.gain.fp8_math for one in found if one.fits)
    math = "* with FP8 math, as FlashMLA has it. " if starred else ""
    upper = ""
    if plan.rest_status == "derived":
        upper = "A step's gain is an estimate, off an H200 an upper one: better give --attention-share. "
    elif any(one.fits and one.rest_status == "derived" for one in found):
        upper = "The share is of what was asked; other gains are estimates, off an H200 upper ones. "
    return math + upper

"""The planner's answer on a screen, and all that it knows as JSON."""

from __future__ import annotations

from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etap_backend.plan.alternatives import Alternative
from etap_backend.plan.inputs import Call, Deployment, Figure, Gpu, Model
from etap_backend.plan.memory import INDEXER_RESERVE_BYTES, RESERVE_BYTES, parameters_of, v4_caches, weights_of
from etap_backend.plan.sparse import call_size, v4_lists
from etap_backend.plan.step import GEMM_BANDWIDTH, LAYER_US, Attention, Gain, Plan
from etap_backend.plan.v4_caches import BATCHES
from bench.common.screen import print_table
from bench.common.units import in_k

SHORT = {"bfloat16": "bf16", "fp8": "FP8"}
COUNTED = ("left", "state", "tokens", "cache_wanted", "fits")  # of the memory, beside its fields
V4_COUNTED = ("pages", "block_bytes", "blocks_of_prompts", "sglang_token_bytes", "sglang_request_bytes")
ASSUMPTIONS = {"layer_us": LAYER_US, "gemm_bandwidth_share": GEMM_BANDWIDTH, "reserve_bytes": RESERVE_BYTES}


def assumptions_of(model: Model) -> dict[str, Figure]:
    return ASSUMPTIONS | ({"indexer_reserve_bytes": INDEXER_RESERVE_BYTES} if model.sparse else {})


def document(name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, found: list[Alternative]) -> dict:
    """Everything that the planner knows of one deployment, for --json. With sparse attention a `step_with_ms` is a
    lower bound, as the indexer's time is."""
    caches = v4_caches(model, on) if model.v4 else None
    kernels = [kernel for kernel in (plan.etap, plan.fp8_math, plan.in_bf16, *plan.peers) if kernel]
    return {
        "model": {"name": name, "parameters": parameters_of(model), **model.model_dump()},
        "gpu": gpu.model_dump(),
        "deployment": asdict(on),
        "assumptions": {key: figure.model_dump() for key, figure in assumptions_of(model).items()},
        "weights": [{**asdict(part), "bytes_per_gpu": part.bytes_per_gpu} for part in weights_of(model, on)],
        "memory": _known(plan.memory, COUNTED),
        "bf16_tokens": plan.bf16_tokens,
        "caches": caches and _known(caches, V4_COUNTED) | {"blocks_of_a_request": caches.blocks(BATCHES * on.s_q)},
        "attention": {kernel.kernel: _all_of(kernel, plan) for kernel in kernels},
        "indexer": plan.indexer and _all_of(plan.indexer, plan),
        "step": {
            "rest_ms": plan.rest_ms,
            "rest_status": plan.rest_status,
            "longest_rest_ms": plan.longest_rest * plan.rest_ms,
            "attention_share_padded": plan.share,
            "gain": plan.gain and asdict(plan.gain),
            "gain_over": {peer.kernel: gain and asdict(gain) for peer, gain in _gains(plan)},
        },
        "what_fits": [{**asdict(one), "fits": one.fits} for one in found],
    }


def _known(thing, counted: tuple[str, ...]) -> dict:
    """Its fields, and what it counts from them."""
    return {**asdict(thing), **{key: getattr(thing, key) for key in counted}}


def _gains(plan: Plan) -> list[tuple[Attention, Gain | None]]:
    return [(peer, plan.gain_over(peer)) for peer in plan.peers]


def _all_of(kernel: Attention, plan: Plan) -> dict:
    times = {"call_us": kernel.call_us, "attention_ms": kernel.step_ms, "step_with_ms": plan.step_with(kernel)}
    known = {key: value for key, value in asdict(kernel).items() if key not in ("kernel", "call")}
    return known | times | {"call": kernel.call and kernel.call.model_dump()}


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def _columns(*columns: str, words: int = 1) -> Table:
    """A table without lines: `words` columns of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", no_wrap=True)
    return table


def percent(gain: Gain) -> str:
    """Lower and upper estimate: "27 to 44", or one number where they are the same."""
    lower, upper = round(100 * gain.lower), round(100 * gain.upper)
    return f"{lower} to {upper}" if lower != upper else str(lower)


def _starred(gain: Gain) -> str:
    return percent(gain) + ("*" if gain.fp8_math else "")


def _shape(on: Deployment) -> str:
    return f"{on.batch} x {in_k(on.context)}"


def memory_lines(gpu: Gpu, model: Model, on: Deployment, plan: Plan) -> list[str]:
    """Whether batch and context fit, and where the bytes of a GPU go."""
    memory, bf16_tokens = plan.memory, plan.bf16_tokens
    wanted = f"its KV cache is {memory.tokens_wanted:,} tokens = {_gb(memory.cache_wanted)} per GPU"
    if memory.tokens == 0:
        verdict = f"[red]The weights leave no room for a KV cache on {on.gpus} x {gpu.name}.[/]"
    elif memory.fits:
        verdict = f"[green]{_shape(on)} fits:[/] {wanted}."
    else:
        left = _gb(memory.tokens * memory.cache_per_token)
        verdict = f"[red]{_shape(on)} does not fit:[/] {wanted}, {left} are left."
    room = f"{memory.tokens:,} tokens of {memory.cache_per_token:,.10g} B"
    if memory.indexer_per_token:
        room += f" ({memory.indexer_per_token:,.10g} of them the indexer's)"
    if on.dcp > 1:
        room += f" on each of {on.dcp} ranks, {memory.tokens * on.dcp:,} in all"
    if bf16_tokens:
        room += f", {memory.tokens / bf16_tokens:.2f}x the {bf16_tokens:,} of bf16"
    of, prompts = ("requests' windows", ", prompts'") if model.v4 else ("state of linear attention", "")
    state = f"{of} {_gb(memory.state)}, " if memory.state else ""
    bytes_of_a_gpu = (
        f"Of a GPU's {_gb(memory.total)} the engine has {on.utilization:.0%}: weights {_gb(memory.weights)}, "
        f"activations and NCCL{prompts} {_gb(memory.reserve)}, {state}KV cache for {room}."
    )
    return [verdict, bytes_of_a_gpu, *([_v4_line(model, on)] if model.v4 else [])]


def _v4_line(model: Model, on: Deployment) -> str:
    """What an engine's caches hold, and a step reads of them."""
    caches = v4_caches(model, on)
    request = caches.blocks(BATCHES * on.s_q)
    (tokens, entries), kinds = call_size(model, on), v4_lists(model, on).items()
    rows = ", ".join(f"{rows:,} ({layers} {kind})" for kind, (layers, rows) in kinds if layers)
    read = tokens * entries * model.num_hidden_layers * model.cache_row_bytes(on.cache)
    tables = sum(part.bytes_per_gpu * part.shards for part in weights_of(model, on) if part.in_host_memory)
    engram = f"Engram's tables, {_gb(tables)}: in vLLM of host memory, in SGLang of the GPUs'. " if tables else ""
    return (
        f"vLLM 0.33: {caches.block_tokens} tokens are a block of {caches.block_bytes:,} B, a request {request} more. "
        f"SGLang 0.5.23: {caches.sglang_token_bytes:,.10g} B a token, {caches.sglang_request_bytes:,} a request. "
        f"{engram}Lists have {rows} rows, calls their mean; a step reads {_gb(read)}."
    )


def alternatives_table(found: list[Alternative]) -> Table:
    """A line for what was asked and each other layout that holds anything, with what it holds and gains by cache."""
    caches = list(dict.fromkeys(row.cache for row in found))
    table = _columns("", *(column for cache in caches for column in (f"{SHORT[cache]}:", "tokens", "gain %")))
    rows: dict[str, list[str]] = {}
    holding = {row.layout for row in found if row.tokens} | {found[0].layout}
    for row in (row for row in found if row.layout in holding):
        gain = _starred(row.gain) if row.fits and row.gain else "-"
        rows.setdefault(row.layout, []).extend((f"{row.most_requests:,}", f"{row.most_context:,}", gain))
    for layout, cells in rows.items():
        table.add_row(layout, *cells)
    return table


def attention_table(gpu: Gpu, plan: Plan) -> Table:
    """A line for each kernel; >= is before what is known to be a lower bound only."""
    numbers = ("call us", "rows", "all ms", "step ms", "gain %", "per call")
    table = _columns(f"On one {gpu.name}", "", "bound", *numbers, words=3)
    gains = dict(_gains(plan))
    for kernel in filter(None, (plan.etap, plan.fp8_math, plan.in_bf16, *plan.peers, plan.indexer)):
        gain, at_least = gains.get(kernel), "" if kernel.call else ">="
        status = kernel.call.status if kernel.call else "not timed"
        call = (status, kernel.bound.removesuffix(" cores"), f"{at_least}{kernel.call_us:.1f}", str(kernel.rows))
        step = "" if kernel.call is None else f"{'>=' if plan.indexer else ''}{plan.step_with(kernel):.1f}"
        cells = (_starred(gain), f"{gain.call:.2f}x") if gain else ("", "")
        table.add_row(kernel.kernel, *call, f"{at_least}{kernel.step_ms:.2f}", step, *cells)
    return table


def sources_table(gpu: Gpu, model: Model, plan: Plan) -> Table:
    table = Table(
        title="What the numbers are", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for column in ("", "value", "", "source"):
        table.add_column(column, overflow="fold")
    for name, figure in {**gpu.figures, **assumptions_of(model)}.items():
        table.add_row(name.replace("_", " "), f"{figure.value:,.4g}", figure.status, figure.source)
    kernels = {kernel.kernel: kernel.call for kernel in (plan.etap, *plan.peers) if kernel.call}
    for name, call in (kernels if model.sparse else gpu.calls).items():
        table.add_row(f"call, {name.replace('_', ' ')}", *_call_cells(call))
    if not model.sparse:
        fp8 = "the same, with an FP8 cache's roofline; from 65 us on within 15% of results/targets-fp8*.json"
        table.add_row("call, FP8 cache", "", "derived", fp8)
    return table


def _call_cells(call: Call) -> tuple[str, str, str]:
    files = "; ".join(f"results/{file}.json" for file in call.results)
    source = "; ".join(filter(None, (call.source, files and f"{call.kernel} of {files}")))
    return f"{call.fixed_us:.3g} us + {call.factor:.3g} x roofline", call.status, source


def verdict(plan: Plan, gpu: Gpu) -> str:
    """What ETAP gains in a step, or that it is better left off."""
    if plan.etap.call is None:
        return f"Nobody timed such a call on {gpu.name} (--kernels): no step and no gain. >= is a roofline."
    if (gain := plan.gain) is None:
        return f"No other kernel was timed on {gpu.name}: no gain."
    if round(100 * gain.upper) <= 0:
        return f"Leave ETAP off here: it changes a step's tokens/s by {percent(gain)}%."
    gives = "With ETAP a step gives" if plan.memory.fits else "If it fitted, with ETAP a step would give"
    return f"{gives} {percent(gain)}% more tokens/s than with {plan.fastest_peer.kernel}."


def remarks(gpu: Gpu, model: Model, on: Deployment, plan: Plan) -> str:
    """What the tables do not say."""
    longer = f" or {plan.longest_rest:g} times that" if plan.longest_rest > 1 else ""
    lines = [f"{verdict(plan, gpu)} The rest of a step, {plan.rest_ms:.1f} ms{longer}, is {plan.rest_status}."]
    if plan.fastest_peer and plan.etap.rows >= plan.fastest_peer.rows:
        lines.append(f"Both compute {plan.etap.rows} query rows: there is no padding that ETAP could save.")
    if plan.in_bf16:
        one, other = (plan.in_bf16.call_us / kernel.call_us for kernel in (plan.etap, plan.fp8_math))
        lines.append(f"Against its bf16 cache {one:.2f}x per call, {other:.2f}x with FP8 math (*).")
    if plan.indexer:
        tokens, entries = call_size(model, on)
        chosen = f"{tokens} lists of {entries:,} rows"
        if model.v4:
            chosen = "entries" if model.shares_caches else "CSA layers' rows"
        lines.append(f"Choosing the {chosen} comes on top.")
    if model.linear_layers:
        lines.append(f"{model.linear_layers} of {model.num_hidden_layers} layers have linear attention, untimed here.")
    return " ".join(lines)


def print_plan(
    name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, found: list[Alternative], console: Console
) -> None:
    several = (f"{key} {getattr(on, key)}" for key in ("dp", "pp", "dcp", "s_q") if getattr(on, key) > 1)
    layout, size = ", ".join((f"tp {on.tp}", *several)), f"{parameters_of(model) / 1e9:.0f} G"
    console.print(f"[bold]{name}[/] ({size}), {on.gpus} x {gpu.name}: {layout}, {on.cache} cache, {_shape(on)}")
    for line in memory_lines(gpu, model, on, plan):
        console.print(line, highlight=False)
    print_table(console, attention_table(gpu, plan))
    console.print(remarks(gpu, model, on, plan), markup=False, highlight=False)
    title = f"What fits: requests of {in_k(on.context)}; tokens of each of {on.batch}; gain where {_shape(on)} fits"
    console.print(title, style="bold", highlight=False)
    print_table(console, alternatives_table(found))
    starred = plan.in_bf16 is None and any(one.fits and one.gain and one.gain.fp8_math for one in found)
    closing = "* with FP8 math, as FlashMLA has it. " if starred else ""
    if plan.rest_status == "given":
        closing += "The share is of what was asked; other gains are estimates. "
    console.print(f"{closing}Where each number is from: --sources.", markup=False, highlight=False)

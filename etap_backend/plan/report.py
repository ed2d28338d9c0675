"""The planner's answer as text, and everything it knows as JSON."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict

from etap_backend.plan.alternatives import Alternative
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.drafts import Drafting
from etap_backend.plan.gpu import Gpu
from etap_backend.plan.memory import parameters_of, pool_of, weights_of
from etap_backend.plan.model import Model
from etap_backend.plan.sparse import call_size, v4_lists
from etap_backend.plan.step import Attention, Gain, Plan, Shared

SIDES = ("etap", "peer")
SHORT = {"bfloat16": "bf16", "fp8": "FP8"}


def _kernels(plan: Plan) -> list[Attention]:
    chosen = (plan.indexer, *dict.fromkeys(plan.selections or ()))
    return [kernel for kernel in (plan.etap, plan.fp8_math, plan.in_bf16, *plan.peers, *chosen) if kernel]


def document(
    name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, found: list[Alternative], drafting: Drafting | None
) -> dict:
    """Everything that the planner knows of one deployment, for --json."""
    kernels = {
        kernel.kernel: asdict(kernel)
        | {"call_us": kernel.call_us, "attention_ms": kernel.step_ms, "step_with_ms": plan.step_with(kernel)}
        for kernel in _kernels(plan)
    }
    selections = [kernels.pop(one.kernel) for one in dict.fromkeys(plan.selections or ())]
    counted = {key: getattr(plan.memory, key) for key in ("left", "state", "tokens", "cache_wanted", "fits")}
    return {
        "model": {"name": name, "parameters": parameters_of(model)},
        "gpu": gpu.name,
        "deployment": asdict(on),
        "memory": asdict(plan.memory) | counted,
        "bf16_tokens": plan.bf16_tokens,
        "indexer": kernels.pop("indexer", None),
        "selections": selections,
        "attention": kernels,
        "step": {
            "rest_ms": plan.rest_ms,
            "longest_rest_ms": plan.longest_rest * plan.rest_ms,
            "attention_share_padded": plan.share,
            "gain": plan.gain and asdict(plan.gain),
            "gain_over": {peer.kernel: (gain := plan.gain_over(peer)) and asdict(gain) for peer in plan.peers},
        },
        "what_fits": [asdict(one) | {"fits": one.fits} for one in found],
        "drafting": drafting and _drafting_document(drafting),
        "shared_prefix": plan.shared and asdict(plan.shared),
    }


def _drafting_document(drafting: Drafting) -> dict:
    rows = []
    for row in drafting.rows:
        cells: dict = {"drafts": row.drafts, "tokens_per_step": row.tokens_per_step, "fits": row.plan.memory.fits}
        for side in SIDES:
            kernel, rate = row.kernel(side), row.tokens_per_s(side)
            step = kernel and {"kernel": kernel.kernel, "step_ms": row.plan.step_with(kernel)}
            each = {"tokens_per_s": rate, "tokens_per_s_per_request": rate / row.requests}
            cells[side] = step and step | each
        rows.append(cells | {"gain": row.plan.gain and asdict(row.plan.gain)})
    best = {side: (row := drafting.best(side)) and row.drafts for side in SIDES}
    given = {"acceptance": drafting.acceptance, "source": drafting.source, "predictor_known": drafting.predictor}
    return given | {"best": best, "rows": rows}


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def _in_k(tokens: int) -> str:
    """16K for 16384; a number that is no multiple of 1024 as it is."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def percent(gain: Gain) -> str:
    """Lower and upper estimate: "27 to 44", or one number where they are the same."""
    lower, upper = round(100 * gain.lower), round(100 * gain.upper)
    return f"{lower} to {upper}" if lower != upper else str(lower)


def _starred(gain: Gain) -> str:
    return percent(gain) + ("*" if gain.fp8_math else "")


def _load(on: Deployment) -> str:
    return f"{on.batch} x {_in_k(on.context)}"


def _table(rows: list[list[str]], words: int) -> str:
    """Rows with a header: `words` columns of words, then columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        " ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _memory_lines(model: Model, gpu: Gpu, on: Deployment, plan: Plan) -> list[str]:
    """Whether batch and context fit, and where a GPU's bytes go."""
    memory = plan.memory
    wanted = f"its KV cache is {memory.tokens_wanted:,} tokens = {_gb(memory.cache_wanted)} per GPU"
    if memory.tokens == 0:
        verdict = f"The weights leave no room for a KV cache on {on.gpus} x {gpu.name}."
    elif memory.fits:
        verdict = f"{_load(on)} fits: {wanted}."
    else:
        left = _gb(memory.tokens * memory.cache_per_token)
        verdict = f"{_load(on)} does not fit: {wanted}, {left} are left."
    room = f"{memory.tokens:,} tokens of {memory.cache_per_token:,.10g} B"
    if memory.indexer_per_token:
        room += f" ({memory.indexer_per_token:,.10g} of them the indexer's)"
    if on.dcp > 1:
        room += f" on each of {on.dcp} ranks, {memory.tokens * on.dcp:,} in all"
    if plan.bf16_tokens:
        room += f", {memory.tokens / plan.bf16_tokens:.2f}x the {plan.bf16_tokens:,} of bf16"
    kind, prompts = ("requests' windows", ", prompts'") if model.v4 else ("state of linear attention", "")
    state = f"{kind} {_gb(memory.state)}, " if memory.state else ""
    where = (
        f"Of a GPU's {_gb(memory.total)} the engine has {on.utilization:.0%}: weights {_gb(memory.weights)}, "
        f"activations and NCCL{prompts} {_gb(memory.reserve)}, {state}KV cache for {room}."
    )
    return [verdict, where, *([_v4_line(model, on)] if model.v4 else [])]


def _v4_line(model: Model, on: Deployment) -> str:
    """vLLM's blocks, and what a step reads of them."""
    pool, (tokens, entries) = pool_of(model, on), call_size(model, on)
    rows = ", ".join(f"{rows:,} ({layers} {kind})" for kind, (layers, rows) in v4_lists(model, on).items() if layers)
    read = tokens * entries * model.num_hidden_layers * model.cache_row_bytes(on.cache)
    tables = sum(part.bytes_per_gpu * part.shards for part in weights_of(model, on) if part.in_host_memory)
    engram = f"Engram's tables, {_gb(tables)}: in vLLM of host memory, in SGLang of the GPUs'. " if tables else ""
    return (
        f"vLLM 0.33: {pool.block_tokens} tokens are a block of {pool.block_bytes:,} B, "
        f"a request {pool.blocks_of_request} more. SGLang and other versions: see the tokens in their log. "
        f"{engram}Lists have {rows} rows, calls their mean; a step reads {_gb(read)}."
    )


def _alternatives_table(found: list[Alternative]) -> str:
    """A row for the asked layout and for each other one that holds anything; columns for each cache."""
    caches = dict.fromkeys(one.cache for one in found)
    rows = {"": [text for cache in caches for text in (f"{SHORT[cache]}:", "tokens", "gain %")]}
    holding = {one.layout for one in found if one.tokens} | {found[0].layout}
    for one in (one for one in found if one.layout in holding):
        gain = _starred(one.gain) if one.fits and one.gain else "-"
        rows.setdefault(one.layout, []).extend((f"{one.most_requests:,}", f"{one.most_context:,}", gain))
    return _table([[layout, *cells] for layout, cells in rows.items()], words=1)


def _attention_table(gpu: Gpu, plan: Plan) -> str:
    """A row per kernel; >= marks a lower bound."""
    rows = [[f"On one {gpu.name}", "", "bound", "call us", "rows", "all ms", "step ms", "gain %", "per call"]]
    others = (plan.indexer, *(plan.selections or ()))
    for kernel in _kernels(plan):
        gain, at_least = plan.gain_over(kernel) if kernel in plan.peers else None, "" if kernel.call else ">="
        step = "" if kernel.call is None or kernel in others else f"{'>=' * plan.at_least}{plan.step_with(kernel):.1f}"
        status = kernel.call.status if kernel.call else "not timed"
        times = f"{at_least}{kernel.call_us:.1f}", str(kernel.rows), f"{at_least}{kernel.step_ms:.2f}", step
        gains = (_starred(gain), f"{gain.call:.2f}x") if gain else ("", "")
        rows.append([kernel.kernel, status, kernel.bound.removesuffix(" cores"), *times, *gains])
    return _table(rows, words=3)


def _drafts_table(drafting: Drafting) -> str:
    """A row per number of drafts; * marks the most tokens per second of each side."""
    head = ["drafts", "tokens", "ETAP: ms", "tokens/s each", "all"]
    peer = next((kernel.kernel for row in drafting.rows if (kernel := row.kernel("peer"))), "no other kernel")
    rows, best = [[*head, f"{peer}: ms", *head[3:], "gain %"]], {side: drafting.best(side) for side in SIDES}
    for row in drafting.rows:
        cells = [str(row.drafts), f"{row.tokens_per_step:.2f}"]
        for side in SIDES:
            kernel, rate = row.kernel(side), row.tokens_per_s(side)
            star = "*" if row is best[side] else " "
            times = kernel and (f"{row.plan.step_with(kernel):.1f}", f"{rate / row.requests:.1f}", f"{rate:,.0f}{star}")
            cells += times or ("-", "-", "-")
        gain = _starred(row.plan.gain) if row.plan.gain else "-"
        rows.append([*cells, gain if row.plan.memory.fits else "does not fit"])
    return _table(rows, words=0)


def _drafts_remark(drafting: Drafting) -> str:
    """Where the acceptance comes from, and what the best numbers of drafts gain over each other."""
    words = f"A draft is accepted with {drafting.acceptance:g} where those before it are ({drafting.source})."
    etap, peer = (drafting.best(side) for side in SIDES)
    if etap and peer:
        gain = 100 * (etap.tokens_per_s("etap") / peer.tokens_per_s("peer") - 1)
        words += f" Best of each: {etap.drafts} drafts with ETAP, {peer.drafts} without, {gain:+.0f}% tokens/s with "
        words += "the shorter estimate of the rest of a step."
    return words if drafting.predictor else words + " The model names no predictor: drafts cost nothing to make here."


def _shared_remark(plan: Plan, shared: Shared, gpu: Gpu) -> str:
    """What a call and a step take where requests begin with the same pages."""
    if shared.once_us is None:
        why = f"requests of so many query rows are not decoded together on {gpu.name}, or too little is common"
        return f"ETAP_SHARED_PREFIX=1 has no effect here: {why}."

    def takes(us: float) -> str:
        return f"{us:.0f} us (a step {plan.fixed_ms + plan.best.layers * us / 1e3:.1f} ms)"

    words = f"If all begin with the same {_in_k(shared.tokens)}, a call with ETAP_SHARED_PREFIX=1 takes "
    words += f"{takes(shared.once_us)}; without, {takes(shared.apart_us)} where pages lie apart"
    if shared.from_l2_us:
        words += f" and {' to '.join(map(takes, shared.from_l2_us))} where L2 finds common ones"
    return f"{words}. Predicted from two calls and a merge; measured calls took 0.8 to 1.3 of it."


def verdict(plan: Plan, gpu: Gpu) -> str:
    """What ETAP gains in a step, or that it is better left off."""
    if plan.etap.call is None:
        return f"Nobody timed such a call on {gpu.name}: no step and no gain. >= is a roofline."
    peer, gain = plan.fastest_peer, plan.gain
    if peer is None or gain is None:
        return f"No other kernel was timed on {gpu.name}: no gain."
    if round(100 * gain.upper) <= 0:
        return f"Leave ETAP off here: it changes a step's tokens/s by {percent(gain)}%."
    gives = "With ETAP a step gives" if plan.memory.fits else "If it fitted, with ETAP a step would give"
    return f"{gives} {percent(gain)}% more tokens/s than with {peer.kernel}."


def _remarks(model: Model, gpu: Gpu, on: Deployment, plan: Plan) -> str:
    """What the tables do not say."""
    longer = f" or {plan.longest_rest:g} times that" if plan.longest_rest > 1 else ""
    lines = [f"{verdict(plan, gpu)} The rest of a step, {plan.rest_ms:.1f} ms{longer}, is {plan.rest_status}."]
    if plan.fastest_peer and plan.etap.rows >= plan.fastest_peer.rows:
        lines.append(f"Both compute {plan.etap.rows} query rows: there is no padding that ETAP could save.")
    if plan.in_bf16 and plan.fp8_math:
        one, other = (plan.in_bf16.call_us / kernel.call_us for kernel in (plan.etap, plan.fp8_math))
        lines.append(f"Against its bf16 cache {one:.2f}x per call, {other:.2f}x with FP8 math (*).")
    if plan.indexer:
        tokens, entries = call_size(model, on)
        chosen = f"{tokens} lists of {entries:,} rows"
        if model.v4:
            chosen = "entries" if model.shares_caches else "CSA layers' rows"
        lines.append(f"Choosing the {chosen} comes on top." if plan.at_least else f"Steps count choosing the {chosen}.")
    if model.linear_layers:
        lines.append(f"{model.linear_layers} of {model.num_hidden_layers} layers have linear attention, untimed here.")
    return " ".join(lines)


def screen(
    name: str, model: Model, gpu: Gpu, on: Deployment, plan: Plan, found: list[Alternative], drafting: Drafting | None
) -> str:
    """The answer for a terminal; lines of words are wrapped to its width, tables are not."""
    several = (f"{key} {getattr(on, key)}" for key in ("dp", "pp", "dcp", "s_q") if getattr(on, key) > 1)
    layout, size = ", ".join((f"tp {on.tp}", *several)), f"{parameters_of(model) / 1e9:.0f} G"
    starred = plan.in_bf16 is None and any(one.fits and one.gain and one.gain.fp8_math for one in found)
    closing = "* with FP8 math, as FlashMLA has it. " if starred else ""
    if plan.rest_status == "given":
        closing += "The share is of what was asked; other gains are estimates. "
    words = [
        f"{name} ({size}), {on.gpus} x {gpu.name}: {layout}, {on.cache} cache, {_load(on)}",
        *_memory_lines(model, gpu, on, plan),
        _attention_table(gpu, plan),
        _remarks(model, gpu, on, plan),
        *([_drafts_table(drafting), _drafts_remark(drafting)] if drafting else []),
        *([_shared_remark(plan, plan.shared, gpu)] if plan.shared else []),
        f"What fits: requests of {_in_k(on.context)}; tokens of each of {on.batch}; gain where {_load(on)} fits",
        _alternatives_table(found),
        f"{closing}The GPU's file in configs/hardware has the sources of its numbers.",
    ]
    width = max(20, shutil.get_terminal_size().columns)
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(text if "\n" in text else wrap.fill(text) for text in words)

"""Decode with sparse attention on one GPU. A call's time follows from its roofline by a line fitted to files of
`etap bench sparse`, and for DeepSeek-V4 `v4`, those of configs/hardware or of files that are given. What the indexer
takes at least is its roofline: quantising, and choosing the best scores, come on top, and nobody timed them here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy

from bench.common import results
from bench.kernels import rows as bench
from etap_backend.plan.inputs import CSA, HCA, RATIOS, Call, Deployment, Gpu, Model, read_gpu
from etap_backend.plan.memory import memory_of
from etap_backend.plan.step import PADDED_ROWS, Attention, Plan, attention_on, check, rest_of_step_ms
from etap_backend.limits import LATENT_DIM
from etap_backend.sparse import sparse_decode_shape

LEAST_POINTS = 3  # of a line, where two would always lie on one
# What a call of FlashMLA takes longer in vLLM's steps of DeepSeek-V4: metadata, copies, and vLLM's own build of it.
V4_IN_VLLM_US, V4_IN_VLLM = 8.0, "8 us more, fitted to six steps in results/e2e-decode-v4-vllm.json"


def computed_rows(kernel: str, heads: int) -> int:
    """Heads with padding: ours are rounded as the library says, the others' to multiples of 64."""
    if kernel == bench.OURS:
        shape = sparse_decode_shape(heads)
        return shape.row_groups * shape.row_tile
    return -(-heads // PADDED_ROWS) * PADDED_ROWS


def sparse_attention(
    kernel: str, gpu: Gpu, call: Call | None, heads: int, entries: float, row: int, row_bytes: int, layers: int
) -> Attention:
    """Of calls whose lists have so many entries, each a row of so many elements and bytes, read once. All kernels
    widen FP8 rows to 16 bits before they multiply."""
    rows, name = computed_rows(kernel, heads), "ETAP" if kernel == bench.OURS else kernel
    flops = 2 * rows * entries * (row + LATENT_DIM)
    return attention_on(gpu, name, call, layers=layers, rows=rows, data=entries * row_bytes, flops=flops)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """fixed >= 0 and factor >= 1 of us = fixed + factor x roofline, for (roofline, us): least squares of the relative
    distances."""
    roofline, us = numpy.array(points).T
    alike = numpy.ptp(roofline) <= 1e-6 * roofline.max()
    factor = 1.0 if alike else max(1.0, numpy.polyfit(roofline, us, 1, w=1 / us)[0])
    fixed = numpy.average(us - factor * roofline, weights=us**-2)
    through_zero = numpy.average(us / roofline, weights=(roofline / us) ** 2)
    return (fixed, factor) if fixed >= 0 else (0.0, max(1.0, through_zero))


def _chip(name: str) -> str | None:
    found = re.search(r"H\d+", name)
    return found and found[0]


def fitted_calls(gpu: Gpu, files: list[Path], heads: int, fp8: bool, v4: bool = False) -> dict[str, Call]:
    """What a call of each kernel takes that these files timed, on a GPU with this one's rates.

    A line is fitted to the decode rows with as many heads, or where there are too few to those of up to 64; of
    DeepSeek-V4 to times behind another kernel, which differ less, where there are such. Raises ValueError, naming the
    file, for one that is of something else, of another GPU or of a part of one.
    """
    rows: list[tuple[str, bench.SparseRow]] = []
    for path in files:
        document = results.read(path, bench.SparseDocument)
        if document.libraries or not (document.options.num_sms is None or document.options.h20_proxy):
            raise ValueError(f"kernels: wanted files of installed kernels on a whole GPU, got {path}")
        if (chip := _chip(gpu.name)) and _chip(document.gpu) != chip:
            raise ValueError(f"kernels: wanted files of an {gpu.name}, got {path} of an {document.gpu}")
        of_it = (row for row in document.rows if (row.fp8, row.window > 0) == (fp8, v4) and row.tokens <= row.context)
        rows += [(path.name, row) for row in of_it if row.heads <= max(PADDED_ROWS, heads)]
    same = [one for one in rows if one[1].heads == heads]
    calls: dict[str, Call] = {}
    for kernel in dict.fromkeys(name for _, row in rows for name in row.results if row.us(name)):
        timed = [one for one in same if one[1].us(kernel)]
        if len(timed) < LEAST_POINTS and not v4:
            timed = [one for one in rows if one[1].us(kernel)]
        if len(timed) >= LEAST_POINTS:
            calls[kernel] = _fitted(kernel, gpu, timed)
    return calls


def _fitted(kernel: str, gpu: Gpu, timed: list[tuple[str, bench.SparseRow]]) -> Call:
    """One kernel's line through its rows; its source says how far the farthest lies from it."""
    points = []
    for _, row in timed:  # lists name different rows of the cache, all with rope
        elements = row.flops // (2 * row.heads * row.tokens) - LATENT_DIM
        shape = (row.heads, row.tokens, elements, row.bytes // row.tokens, 1)
        us = row.window and row.behind(kernel) or row.us(kernel)
        points.append((sparse_attention(kernel, gpu, None, *shape).roofline_us, us))
    fixed, factor = _line(points)
    farthest = max(abs((fixed + factor * roofline) / us - 1) for roofline, us in points)
    names = ", ".join(dict.fromkeys(name for name, _ in timed))
    source = f"{len(points)} rows of {kernel} in {names}, within {farthest:.0%}"
    return Call(fixed_us=fixed, factor=factor, status="measured", source=source)


def shipped_calls(gpu: Gpu, heads: int, fp8: bool, v4: bool = False) -> dict[str, Call]:
    """Those of the GPU's file, or of the file that it names; of heads that were not timed, the next larger's."""
    like = read_gpu(gpu.sparse_like) if gpu.sparse_like else gpu
    calls: dict[str, Call] = {}
    for call in sorted(like.sparse, key=lambda call: call.heads):
        if (call.fp8, call.v4) == (fp8, v4) and call.heads >= heads and call.kernel not in calls:
            others = f"as of {call.heads} heads" if call.heads != heads else ""
            gpus = f"as on an {like.name}" if like is not gpu else ""
            source = "; ".join(filter(None, (call.source, others, gpus)))
            status = "derived" if others or gpus else call.status
            calls[call.kernel] = call.model_copy(update={"source": source, "status": status})
    return calls


def _indexer(model: Model, gpu: Gpu, on: Deployment) -> Attention:
    """Scores of every key of the context in each layer that has an indexer, DeepSeek-V4.1's of the mean layer. Each
    rank has all heads of the indexer, and scores the keys of its share of a context."""
    layers, heads = model.indexer_layers, model.index_n_heads
    pools = [model.compress_ratios[layer - 1] if model.shares_caches else model.index_kpool for layer in layers]
    keys = on.local_batch * sum(-(-on.context // (on.dcp * pool)) for pool in pools) / max(1, len(layers))
    flops = 2 * keys * on.s_q * heads * model.index_head_dim
    data = keys * model.index_row_bytes * model.index_kpool
    return attention_on(gpu, "indexer", None, layers=len(layers), rows=heads, data=data, flops=flops, fp8=True)


def v4_lists(model: Model, on: Deployment) -> dict[str, tuple[int, int]]:
    """DeepSeek-V4's kinds of layers: how many there are, and the rows that a query token's lists have in each. V4.1's
    have entries of pairs, or of single tokens."""
    window, chosen = min(on.context, model.sliding_window), {"CSA": CSA, "pairs": 2, "tokens": 1}
    rows = {kind: (ratio, min(model.index_topk, on.context // ratio)) for kind, ratio in chosen.items()}
    rows = {"window": (0, 0), **rows, "HCA": (HCA, on.context // HCA)}
    known = RATIOS[model.model_type]
    return {kind: (len(model.layers_of(of)), window + more) for kind, (of, more) in rows.items() if of in known}


def call_size(model: Model, on: Deployment) -> tuple[int, float]:
    """Query tokens of a call, and the entries of each one's list on this rank: each has a list of its own, and a pooled
    indexer always adds the pool that is not full. Of DeepSeek-V4 the mean of its layers, whose times it gives exactly:
    a call's time is linear in them."""
    entries = -(-min(on.context, model.index_topk + model.index_kpool - 1) // on.dcp)
    if model.v4:
        entries = sum(layers * rows for layers, rows in v4_lists(model, on).values()) / model.num_hidden_layers
    return on.local_batch * on.s_q, entries


def make_sparse_plan(model: Model, gpu: Gpu, on: Deployment, files: list[Path] | None = None) -> Plan:
    """Memory, attention and step of a model with sparse attention, a call's time by these files or by the GPU's own.

    Raises ValueError, naming the argument, when the deployment cannot be or ETAP cannot run the model.
    """
    check(model, on)
    heads, fp8 = model.num_attention_heads // on.tp * on.dcp, on.cache == "fp8"
    tokens, entries = call_size(model, on)
    kind = heads, fp8, model.v4
    calls = fitted_calls(gpu, files, *kind) if files else shipped_calls(gpu, *kind)
    if not model.qk_rope_head_dim:
        for name, call in calls.items():
            derived = {"status": "derived", "source": f"{call.source}; of rows with rope"}
            calls[name] = call.model_copy(update=derived)
    if model.v4 and (alone := calls.get("FlashMLA")) and alone.status == "measured":
        slower = {"fixed_us": alone.fixed_us + V4_IN_VLLM_US, "source": f"{alone.source}; {V4_IN_VLLM}"}
        calls["FlashMLA in vLLM"] = alone.model_copy(update={"status": "derived"} | slower)
    layers, row_bytes = len(model.attention_layers), model.read_row_bytes(on.cache)
    size = (heads, tokens * entries, model.cache_row, row_bytes, layers)
    etap = sparse_attention(bench.OURS, gpu, calls.pop(bench.OURS, None), *size)
    return Plan(
        memory=memory_of(model, gpu, on),
        etap=etap,
        peers=tuple(sparse_attention(kernel, gpu, call, *size) for kernel, call in calls.items()),
        rest_ms=rest_of_step_ms(model, gpu, on),
        rest_status="derived",
        longest_rest=gpu.longest_rest.value,
        bf16_tokens=memory_of(model, gpu, replace(on, cache="bfloat16")).tokens if fp8 and not model.v4 else None,
        indexer=_indexer(model, gpu, on),
    )

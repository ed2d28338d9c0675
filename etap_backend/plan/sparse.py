"""Decode with sparse attention on one GPU; the time of a call follows from its roofline by the lines in the GPU's file.

So do the indexer's logits and the selection behind them; quantising its queries was not timed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from etap_backend.limits import SELECTED
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Call, Gpu, Load
from etap_backend.plan.memory import memory_of
from etap_backend.plan.model import CSA, HCA, RATIOS, Model
from etap_backend.plan.step import ETAP, NAMES, Attention, Plan, attention, check, rest_of_step_ms, roofline_us

# A FlashMLA call takes longer in vLLM's steps of DeepSeek-V4: metadata, copies, and vLLM's own build.
V4_IN_VLLM_US, V4_IN_VLLM = 5.0, "5.0 us more, fitted to six steps in vLLM 0.26.0 at commit 48c0393"
LOGITS, ENGINES = "DeepGEMM", "vLLM"
"""Who computes an indexer's logits, and whose selection ETAP's is compared with."""


def logits(
    gpu: Gpu,
    heads: int,
    dim: int,
    row_bytes: float,
    requests: int,
    keys: float,
    s_q: int,
    layers: int,
    call: Call | None,
) -> Attention:
    """Of every key of the contexts, for s_q tokens of each request, by all heads of the indexer."""
    flops = 2 * requests * keys * s_q * heads * dim
    roofline, bound = roofline_us(gpu, requests * keys * row_bytes, flops, fp8=True)
    return Attention("indexer", heads, roofline, bound, layers, Load(requests, keys, 1), call)


def selection(gpu: Gpu, kernel: str, rows: int, keys: float, layers: int, call: Call | None) -> Attention:
    """Of the largest of so many float32 logits of each row."""
    roofline, bound = roofline_us(gpu, rows * keys * 4, 0, fp8=True)
    return Attention(f"top-k, {NAMES.get(kernel, kernel)}", rows, roofline, bound, layers, Load(rows, keys, 1), call)


def selects(model: Model, on: Deployment) -> bool:
    """Whether ETAP selects a model's tokens, and not the engine."""
    pooled = model.shares_caches if model.v4 else model.index_kpool > 1
    return model.index_topk in SELECTED and on.dcp == 1 and not pooled


def _indexer(model: Model, gpu: Gpu, on: Deployment) -> tuple[Attention, tuple[Attention, Attention]]:
    """Logits and selections of each layer with an indexer (DeepSeek-V4.1: of the mean layer).

    Each rank scores the keys of its share of a context.
    """
    layers, heads = len(model.indexer_layers), model.index_n_heads
    pools = [
        model.compress_ratios[layer - 1] if model.shares_caches else model.index_kpool for layer in model.indexer_layers
    ]
    keys = sum(-(-on.context // (on.dcp * pool)) for pool in pools) / max(1, layers)
    size = heads, model.index_head_dim, model.index_row_bytes * model.index_kpool
    call = gpu.calls_of("indexer", heads).get(LOGITS)
    scored = logits(gpu, *size, on.local_batch, keys, on.s_q, layers, call)
    calls, rows = gpu.calls_of("top_k", math.ceil(keys)), on.local_batch * on.s_q
    own, other = (
        selection(gpu, kernel, rows, keys, layers, calls.get(kernel))
        for kernel in (ETAP if selects(model, on) else ENGINES, ENGINES)
    )
    return scored, (own, other)


def v4_lists(model: Model, on: Deployment) -> dict[str, tuple[int, int]]:
    """DeepSeek-V4's kinds of layers: how many there are, and the rows in a query token's lists."""
    window, chosen = min(on.context, model.sliding_window), {"CSA": CSA, "pairs": 2, "tokens": 1}
    rows = {kind: (ratio, min(model.index_topk, on.context // ratio)) for kind, ratio in chosen.items()}
    rows = {"window": (0, 0), **rows, "HCA": (HCA, on.context // HCA)}
    known = RATIOS[model.model_type]
    return {
        kind: (len(model.layers_of(ratio)), window + more) for kind, (ratio, more) in rows.items() if ratio in known
    }


def call_size(model: Model, on: Deployment) -> tuple[int, float]:
    """Query tokens per call, and entries of each token's list on this rank.

    A pooled indexer always adds the pool that is not full. DeepSeek-V4's entries are the mean of its layers: a call's
    time is linear in them.
    """
    entries = -(-min(on.context, model.index_topk + model.index_kpool - 1) // on.dcp)
    if model.v4:
        entries = sum(layers * rows for layers, rows in v4_lists(model, on).values()) / model.num_hidden_layers
    return on.local_batch * on.s_q, entries


def make_sparse_plan(model: Model, gpu: Gpu, on: Deployment) -> Plan:
    """The plan of a model with sparse attention.

    Raises ValueError, naming the argument, when the model cannot be served so or ETAP cannot run it.
    """
    check(model, on)
    heads, fp8 = model.num_attention_heads // on.tp * on.dcp, on.cache == "fp8"
    tokens, entries = call_size(model, on)
    kind = "v4" if model.v4 else "sparse_fp8" if fp8 else "sparse"
    calls = gpu.calls_of(kind, heads)
    if not model.qk_rope_head_dim:
        for name, call in calls.items():
            calls[name] = replace(call, status="derived", source=f"{call.source}; of rows with rope")
    if model.v4 and (plain := calls.get("FlashMLA")) and plain.status == "measured":
        slower = {"fixed_us": plain.fixed_us + V4_IN_VLLM_US, "source": f"{plain.source}; {V4_IN_VLLM}"}
        calls["FlashMLA in vLLM"] = replace(plain, status="derived", **slower)
    size = {"row": model.cache_row, "row_bytes": model.read_row_bytes(on.cache), "layers": len(model.attention_layers)}
    etap, *peers = (
        attention(gpu, kernel, kind, heads, tokens, entries, call=calls.get(kernel), **size)
        for kernel in dict.fromkeys((ETAP, *calls))
    )
    indexer, selections = _indexer(model, gpu, on)
    return Plan(
        memory=memory_of(model, gpu, on),
        etap=etap,
        peers=tuple(peers),
        rest_ms=rest_of_step_ms(model, gpu, on),
        rest_status="derived",
        longest_rest=gpu.longest_rest.value,
        bf16_tokens=memory_of(model, gpu, replace(on, cache="bfloat16")).tokens if fp8 and not model.v4 else None,
        indexer=indexer,
        selections=selections,
    )

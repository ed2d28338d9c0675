"""Decode with sparse attention on one GPU; the time of a call follows from its roofline by the lines in the GPU's file.

The indexer's time is its roofline, a lower bound: quantising and choosing the best scores were not timed.
"""

from __future__ import annotations

from dataclasses import replace

from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Gpu, Load
from etap_backend.plan.memory import memory_of
from etap_backend.plan.model import CSA, HCA, RATIOS, Model
from etap_backend.plan.step import ETAP, Attention, Plan, attention, check, rest_of_step_ms, roofline_us

# A FlashMLA call takes longer in vLLM's steps of DeepSeek-V4: metadata, copies, and vLLM's own build.
V4_IN_VLLM_US, V4_IN_VLLM = 6.5, "6.5 us more, fitted to six steps in results/e2e-decode-v4-vllm.json"


def _indexer(model: Model, gpu: Gpu, on: Deployment) -> Attention:
    """Scores of every key of the context, in each layer with an indexer (DeepSeek-V4.1: in the mean layer).

    Each rank has all heads of the indexer and scores the keys of its share of a context.
    """
    layers, heads = model.indexer_layers, model.index_n_heads
    pools = [model.compress_ratios[layer - 1] if model.shares_caches else model.index_kpool for layer in layers]
    keys = on.local_batch * sum(-(-on.context // (on.dcp * pool)) for pool in pools) / max(1, len(layers))
    flops = 2 * keys * on.s_q * heads * model.index_head_dim
    data = keys * model.index_row_bytes * model.index_kpool
    roofline, bound = roofline_us(gpu, data, flops, fp8=True)
    return Attention("indexer", heads, roofline, bound, len(layers), Load(on.local_batch, on.context, 1), None)


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
    return Plan(
        memory=memory_of(model, gpu, on),
        etap=etap,
        peers=tuple(peers),
        rest_ms=rest_of_step_ms(model, gpu, on),
        rest_status="derived",
        longest_rest=gpu.longest_rest.value,
        bf16_tokens=memory_of(model, gpu, replace(on, cache="bfloat16")).tokens if fp8 and not model.v4 else None,
        indexer=_indexer(model, gpu, on),
    )

"""Decode with sparse attention on one GPU; the time of a call follows from its roofline by the lines in the GPU's file.

The indexer's time is its roofline, a lower bound: quantising and choosing the best scores were not timed.
"""

from __future__ import annotations

from dataclasses import replace

from etap_backend.limits import LATENT_DIM
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import Call, Gpu, SparseCall, read_gpu
from etap_backend.plan.memory import memory_of
from etap_backend.plan.model import CSA, HCA, RATIOS, Model
from etap_backend.plan.step import PADDED_ROWS, Attention, Plan, attention_on, check, rest_of_step_ms
from etap_backend.sparse import sparse_decode_shape

ETAP = "etap"
# A FlashMLA call takes longer in vLLM's steps of DeepSeek-V4: metadata, copies, and vLLM's own build.
V4_IN_VLLM_US, V4_IN_VLLM = 8.0, "8 us more, fitted to six steps in results/e2e-decode-v4-vllm.json"


def computed_rows(kernel: str, heads: int) -> int:
    """Heads with padding: to the library's row tiles for ETAP, to multiples of 64 for other kernels."""
    if kernel == ETAP:
        shape = sparse_decode_shape(heads)
        return shape.row_groups * shape.row_tile
    return -(-heads // PADDED_ROWS) * PADDED_ROWS


def sparse_attention(
    kernel: str, gpu: Gpu, call: Call | None, heads: int, entries: float, row: int, row_bytes: int, layers: int
) -> Attention:
    """Calls whose lists have so many entries, each a row of `row` elements that is read once.

    All kernels widen FP8 rows to 16 bits before they multiply.
    """
    rows, name = computed_rows(kernel, heads), "ETAP" if kernel == ETAP else kernel
    flops = 2 * rows * entries * (row + LATENT_DIM)
    return attention_on(gpu, name, call, layers=layers, rows=rows, data=entries * row_bytes, flops=flops)


def shipped_calls(gpu: Gpu, heads: int, fp8: bool, v4: bool = False) -> dict[str, SparseCall]:
    """Each kernel's call, from the GPU's file or the file that it names; for the next larger number of heads timed."""
    like = read_gpu(gpu.sparse_like) if gpu.sparse_like else gpu
    calls: dict[str, SparseCall] = {}
    for call in sorted(like.sparse, key=lambda call: call.heads):
        if (call.fp8, call.v4) == (fp8, v4) and call.heads >= heads and call.kernel not in calls:
            more_heads = f"as of {call.heads} heads" if call.heads != heads else ""
            other_gpu = f"as on an {like.name}" if like is not gpu else ""
            source = "; ".join(filter(None, (call.source, more_heads, other_gpu)))
            calls[call.kernel] = replace(call, source=source)
            if more_heads or other_gpu:
                calls[call.kernel] = replace(call, source=source, status="derived")
    return calls


def _indexer(model: Model, gpu: Gpu, on: Deployment) -> Attention:
    """Scores of every key of the context, in each layer with an indexer (DeepSeek-V4.1: in the mean layer).

    Each rank has all heads of the indexer and scores the keys of its share of a context.
    """
    layers, heads = model.indexer_layers, model.index_n_heads
    pools = [model.compress_ratios[layer - 1] if model.shares_caches else model.index_kpool for layer in layers]
    keys = on.local_batch * sum(-(-on.context // (on.dcp * pool)) for pool in pools) / max(1, len(layers))
    flops = 2 * keys * on.s_q * heads * model.index_head_dim
    data = keys * model.index_row_bytes * model.index_kpool
    return attention_on(gpu, "indexer", None, layers=len(layers), rows=heads, data=data, flops=flops, fp8=True)


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
    calls: dict[str, Call] = dict(shipped_calls(gpu, heads, fp8, model.v4))
    if not model.qk_rope_head_dim:
        for name, call in calls.items():
            calls[name] = replace(call, status="derived", source=f"{call.source}; of rows with rope")
    if model.v4 and (plain := calls.get("FlashMLA")) and plain.status == "measured":
        slower = {"fixed_us": plain.fixed_us + V4_IN_VLLM_US, "source": f"{plain.source}; {V4_IN_VLLM}"}
        calls["FlashMLA in vLLM"] = replace(plain, status="derived", **slower)
    size = heads, tokens * entries, model.cache_row, model.read_row_bytes(on.cache), len(model.attention_layers)
    etap = sparse_attention(ETAP, gpu, calls.pop(ETAP, None), *size)
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

"""The kernels that ours are compared with, called as the engines call them, all metadata built before the clock runs.

As in vLLM 0.26 (FlashMLA, FA3, Triton) and SGLang 0.5 (FlashInfer), each imported when it is asked for. Each takes a
row's inputs and gives its call; NotImplementedError says why a kernel does not take a row. Other functions of the same
calls, as ETAP's drop-ins have them, may be named in place of a library's.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from bench.kernels.kernels import Call, Inputs, Planned, SparseInputs, V4Inputs, to_fp8
from etap_backend.limits import LATENT_DIM, ROPE_DIM

FLASHMLA_PAGE_SIZE = 64
FLASHMLA = "vllm.third_party.flashmla.flash_mla_interface"
FA3 = "vllm.vllm_flash_attn"


def _refuse_other_pages(inputs: Inputs) -> None:
    if inputs.page_size != FLASHMLA_PAGE_SIZE:
        raise NotImplementedError(f"takes pages of {FLASHMLA_PAGE_SIZE} tokens")


def _dense(inputs: Inputs) -> dict:
    """What both of FlashMLA's dense calls are given."""
    lists = {"block_table": inputs.block_table, "cache_seqlens": inputs.seq_lens}
    return {**lists, "head_dim_v": LATENT_DIM, "softmax_scale": inputs.softmax_scale, "causal": True}


def _by_lists(softmax_scale: float) -> dict:
    """What both of FlashMLA's calls on lists of FP8 rows are given."""
    none = {"block_table": None, "cache_seqlens": None}
    return {**none, "head_dim_v": LATENT_DIM, "softmax_scale": softmax_scale, "is_fp8_kvcache": True}


def _unfilled(theirs: ModuleType) -> object:
    """FlashMLA's metadata of a step, which the first call fills: it comes before the timed ones."""
    return theirs.get_mla_metadata()[0]


def flashmla(
    inputs: Inputs, *, module: str = FLASHMLA, new_metadata: Callable[[Inputs], object] | None = None
) -> Planned:
    """`new_metadata` makes the metadata of a step in place of the module's `get_mla_metadata`."""
    theirs = importlib.import_module(module)
    _refuse_other_pages(inputs)

    def call(metadata: object, kv_cache: Tensor) -> Tensor:
        asked = {"q": inputs.q, "k_cache": kv_cache.unsqueeze(-2), "tile_scheduler_metadata": metadata}
        return theirs.flash_mla_with_kvcache(**asked, **_dense(inputs), is_fp8_kvcache=False)[0]

    return Planned(call, lambda: new_metadata(inputs) if new_metadata else _unfilled(theirs))


def flashmla_fp8(
    inputs: Inputs, *, decode: Callable | None = None, new_metadata: Callable[..., tuple] | None = None
) -> Planned:
    """`decode` and `new_metadata` are vLLM's functions of the dense FP8 kernel, or both others."""
    if decode is None:
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache_fp8 as decode
        from vllm.v1.attention.ops.flashmla import get_mla_metadata_dense_fp8 as new_metadata

    s_q, heads = inputs.q.shape[1:3]
    _refuse_other_pages(inputs)
    q = to_fp8(inputs.q, inputs.kv_scale)  # as vLLM hands them over; the rounding is not timed
    scale = inputs.kv_scale_tensor

    def call(plan: tuple, kv_cache: Tensor) -> Tensor:
        metadata, splits = plan
        asked = {"q": q, "k_cache": kv_cache.unsqueeze(-2), "tile_scheduler_metadata": metadata, "num_splits": splits}
        return decode(**asked, **_dense(inputs), descale_q=scale, descale_k=scale)[0]

    return Planned(call, lambda: new_metadata(inputs.seq_lens, s_q * heads, 1))


def fa3(inputs: Inputs, *, module: str = FA3) -> Planned:
    theirs = importlib.import_module(module)
    batch, s_q, heads, _ = inputs.q.shape
    lengths = {"max_seqlen_q": s_q, "max_seqlen_k": max(inputs.lengths), "cu_seqlens_q": inputs.query_starts}
    both = {"causal": True, "num_splits": 32}  # vLLM's flash_attn_max_num_splits_for_cuda_graph
    q_latent, q_rope = inputs.q.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], dim=-1)

    def new_metadata() -> object:
        sizes = {"num_heads_q": heads, "num_heads_kv": 1, "headdim": ROPE_DIM, "headdim_v": LATENT_DIM}
        of_cache = {"cache_seqlens": inputs.seq_lens, "qkv_dtype": inputs.q.dtype, "page_size": inputs.page_size}
        return theirs.get_scheduler_metadata(batch_size=batch, **lengths, **sizes, **of_cache, **both)

    def call(metadata: object, kv_cache: Tensor) -> Tensor:
        k, v = kv_cache[..., LATENT_DIM:].unsqueeze(-2), kv_cache[..., :LATENT_DIM].unsqueeze(-2)
        lists = {"seqused_k": inputs.seq_lens, "block_table": inputs.block_table, "scheduler_metadata": metadata}
        scale = {"softmax_scale": inputs.softmax_scale, "fa_version": 3}
        return theirs.flash_attn_varlen_func(q=q_rope, k=k, v=v, q_v=q_latent, **lengths, **lists, **scale, **both)

    return Planned(call, new_metadata)


def flashmla_sparse_fp8(inputs: SparseInputs, *, pad: bool = True, module: str = FLASHMLA) -> Planned:
    """As vLLM calls it where a rank has few heads: all tokens one batch, queries copied among zeros for each call.

    Without `pad` the kernels alone, on queries that have as many heads before. Another module's take any number.
    """
    theirs = importlib.import_module(module)
    if module == FLASHMLA:
        q, heads, padded = _padded(inputs, 64 if inputs.q.shape[1] <= 64 else 128, pad)
    else:
        q, heads, padded = _padded(inputs, inputs.q.shape[1], True)

    def call(metadata: object, kv_cache: Tensor, indices: Tensor) -> Tensor:
        queries = q.unsqueeze(0)
        if q.shape[1] < padded:
            queries = q.new_zeros((1, q.shape[0], padded, q.shape[2]))
            queries[:, :, :heads, :] = q
        asked = {"q": queries, "k_cache": kv_cache.unsqueeze(-2), "indices": indices.unsqueeze(0)}
        plan = {"tile_scheduler_metadata": metadata}
        return theirs.flash_mla_with_kvcache(**asked, **plan, **_by_lists(inputs.softmax_scale))[0][0, :, :heads]

    return Planned(call, lambda: _unfilled(theirs))


def flashmla_v4(inputs: V4Inputs, *, module: str = FLASHMLA) -> Planned:
    """As vLLM 0.33 calls it: queries that lie padded to 64 heads already, in the memory that the engine's operator
    before the call wrote them to; sinks of -inf behind the rank's heads; counts beside both lists."""
    theirs = importlib.import_module(module)
    tokens, heads, _ = inputs.q.shape
    padded = 64 if heads <= 64 else 128
    q = torch.nn.functional.pad(inputs.q, (0, 0, 0, padded - heads)).unsqueeze(1)
    sinks = torch.nn.functional.pad(inputs.sinks, (0, padded - heads), value=-math.inf)
    counts = inputs.counts(inputs.window)
    extra_counts = inputs.counts(inputs.extra) if inputs.extra else None
    decode = theirs.flash_mla_with_kvcache
    # vLLM before 0.33 allocates the output in the call.
    takes_out = "out" in inspect.signature(decode).parameters
    given = {"out": q.new_empty(tokens, 1, padded, LATENT_DIM)} if takes_out else {}

    def call(metadata: object, cache: Tensor, indices: Tensor, *extra_list: Tensor | None) -> Tensor:
        extra_cache, extra_indices = extra_list
        asked = {"q": q, "k_cache": cache.unsqueeze(-2), "indices": indices.unsqueeze(1), "topk_length": counts}
        extra = {"extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": extra_counts}
        if extra_cache is not None:
            extra |= {
                "extra_k_cache": extra_cache.unsqueeze(-2),
                "extra_indices_in_kvcache": extra_indices.unsqueeze(1),
            }
        more = {"tile_scheduler_metadata": metadata, "attn_sink": sinks}
        return decode(**asked, **extra, **more, **_by_lists(inputs.softmax_scale), **given)[0][:, 0, :heads]

    return Planned(call, lambda: _unfilled(theirs))


def flashmla_sparse(inputs: SparseInputs, *, pad: bool = True) -> Call:
    """The kernel for bfloat16 rows, of prefills above all, as vLLM calls it; `pad` as above."""
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    counts = _full_counts(inputs)
    q, heads, padded = _padded(inputs, -(-inputs.q.shape[1] // 64) * 64, pad)

    def call(kv_cache: Tensor, indices: Tensor) -> Tensor:
        queries = q
        if q.shape[1] < padded:
            queries = q.new_empty((q.shape[0], padded, q.shape[2]))
            queries[:, :heads, :] = q
        rows = kv_cache.view(-1, 1, kv_cache.shape[-1])
        lists = indices.unsqueeze(1)
        return flash_mla_sparse_fwd(queries, rows, lists, inputs.softmax_scale, topk_length=counts)[0][:, :heads]

    return call


def _full_counts(inputs: SparseInputs) -> Tensor:
    return torch.full(inputs.q.shape[:1], inputs.top_k, dtype=torch.int32, device=inputs.q.device)


def _padded(inputs: SparseInputs, padded: int, pad: bool) -> tuple[Tensor, int, int]:
    """Queries, how many of their heads count, and how many FlashMLA takes; without `pad` they have so many already."""
    heads = inputs.q.shape[1]
    if pad:
        return inputs.q, heads, padded
    if heads == padded:
        raise NotImplementedError(f"{heads} heads are not padded, so this is the call as vLLM makes it")
    return torch.nn.functional.pad(inputs.q, (0, 0, 0, padded - heads)), heads, padded


def fa3_sparse(inputs: SparseInputs) -> Call:
    """As vLLM's FLASH_ATTN_MLA_SPARSE: pages of one token, a list is a page table, a token a request."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tokens = inputs.q.shape[0]
    counts = _full_counts(inputs)
    q_latent, q_rope = inputs.q.split([LATENT_DIM, ROPE_DIM], dim=-1)

    def call(kv_cache: Tensor, indices: Tensor) -> Tensor:
        rope, latent = kv_cache[:, :, LATENT_DIM:], kv_cache[:, :, :LATENT_DIM]
        operands = {"q": q_rope, "k": rope.view(-1, 1, 1, ROPE_DIM), "v": latent.view(-1, 1, 1, LATENT_DIM)}
        starts = torch.arange(0, tokens + 1, dtype=torch.int32, device=q_rope.device)
        lengths = {"max_seqlen_q": 1, "max_seqlen_k": indices.shape[1], "cu_seqlens_q": starts, "seqused_k": counts}
        more = {"block_table": indices, "softmax_scale": inputs.softmax_scale, "causal": True, "fa_version": 3}
        return flash_attn_varlen_func(**operands, q_v=q_latent, **lengths, **more)

    return call


def flashinfer(inputs: Inputs, *, wrapper_type: type | None = None) -> Planned:
    """`wrapper_type` is FlashInfer's, or another of the same calls."""
    if wrapper_type is None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper as wrapper_type

    s_q, heads = inputs.q.shape[1:3]
    pages = [-(-length // inputs.page_size) for length in inputs.lengths]
    page_starts = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    page_ids = torch.cat([row[:used] for row, used in zip(inputs.block_table, pages, strict=True)])
    lists = (inputs.query_starts, page_starts.to(inputs.q.device), page_ids, inputs.seq_lens)
    sizes = (heads, LATENT_DIM, ROPE_DIM, inputs.page_size)
    wrapper = wrapper_type(torch.empty(128 << 20, dtype=torch.int8, device=inputs.q.device), backend="fa3")

    def plan() -> None:
        wrapper.plan(*lists, *sizes, s_q > 1, inputs.softmax_scale, inputs.q.dtype, inputs.kv_dtype)

    q_latent, q_rope = inputs.q.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], dim=-1)
    scales = {} if inputs.kv_scale is None else {"ckv_scale": inputs.kv_scale, "kpe_scale": inputs.kv_scale}

    def call(_: None, kv_cache: Tensor) -> Tensor:
        return wrapper.run(q_latent, q_rope, kv_cache[..., :LATENT_DIM], kv_cache[..., LATENT_DIM:], **scales)

    return Planned(call, plan)


def triton(inputs: Inputs) -> Call:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    batch, s_q, heads, _ = inputs.q.shape
    if s_q > 1:
        raise NotImplementedError("takes one query token a request")
    multiprocessors = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    # vLLM's choice: a power of two of at least 512 tokens a split, at most two splits a multiprocessor.
    wanted = max(1, max(inputs.lengths) // 512)
    splits = min(1 << math.ceil(math.log2(wanted)), 2 * multiprocessors)
    q = inputs.q.flatten(0, 1)
    out = q.new_empty(batch, heads, LATENT_DIM)
    lse = q.new_empty(batch, heads)
    partial = q.new_empty(batch, heads, splits, LATENT_DIM + 1, dtype=torch.float32)
    scale = torch.tensor(inputs.kv_scale or 1.0, device=q.device)

    def call(kv_cache: Tensor) -> Tensor:
        k = kv_cache.unsqueeze(2)
        lists = (inputs.block_table, inputs.seq_lens, partial, splits, inputs.softmax_scale, inputs.page_size)
        decode_attention_fwd(q, k, k[..., :LATENT_DIM], out, lse, *lists, k_scale=scale, v_scale=scale, is_mla=True)
        return out

    return call

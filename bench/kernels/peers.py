"""The kernels that ETAP is compared with, called as engines call them; metadata is built before the clock runs.

FlashMLA, FA3 and Triton are called as in vLLM 0.33, FlashInfer as in SGLang 0.5; each is imported on use. A function
takes a row's inputs and returns the call; NotImplementedError says why the kernel cannot run the row.
"""

from __future__ import annotations

import importlib
import inspect
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.kernels.grids import V4_WINDOW
from bench.kernels.inputs import Call, Inputs, to_fp8
from etap_backend.limits import LATENT_DIM, ROPE_DIM

FLASHMLA = "vllm.third_party.flashmla.flash_mla_interface"
FLASHMLA_PAGE_SIZE = 64


def flashmla_dense(inputs: Inputs) -> dict:
    """Arguments of FlashMLA's dense calls, in bfloat16 and FP8."""
    if inputs.workload.page_size != FLASHMLA_PAGE_SIZE:
        raise NotImplementedError(f"takes pages of {FLASHMLA_PAGE_SIZE} tokens")
    lists = {"block_table": inputs.block_table, "cache_seqlens": inputs.seq_lens}
    return {**lists, "head_dim_v": LATENT_DIM, "softmax_scale": inputs.softmax_scale, "causal": True}


def _flashmla_lists(inputs: Inputs) -> dict:
    """Arguments of FlashMLA's calls on lists of FP8 rows."""
    unused = {"block_table": None, "cache_seqlens": None}
    return {**unused, "head_dim_v": LATENT_DIM, "softmax_scale": inputs.softmax_scale, "is_fp8_kvcache": True}


def flashmla(inputs: Inputs, *, module: str = FLASHMLA) -> Call:
    """The first call fills the metadata. module: FlashMLA's interface, here and below."""
    interface, given = importlib.import_module(module), flashmla_dense(inputs)
    metadata = interface.get_mla_metadata()[0]

    def call(kv_cache: Tensor) -> Tensor:
        cache = {"k_cache": kv_cache.unsqueeze(-2), "tile_scheduler_metadata": metadata, "is_fp8_kvcache": False}
        return interface.flash_mla_with_kvcache(q=inputs.q, **cache, **given)[0]

    return call


def flashmla_fp8(inputs: Inputs) -> Call:
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8

    s_q, heads = inputs.q.shape[1:3]
    given = flashmla_dense(inputs)
    metadata, splits = get_mla_metadata_dense_fp8(inputs.seq_lens, s_q * heads, 1)
    q, scale = to_fp8(inputs.q, inputs.kv_scale), inputs.kv_scale_tensor  # vLLM rounds queries before the call

    def call(kv_cache: Tensor) -> Tensor:
        plan = {"tile_scheduler_metadata": metadata, "num_splits": splits, "descale_q": scale, "descale_k": scale}
        return flash_mla_with_kvcache_fp8(q=q, k_cache=kv_cache.unsqueeze(-2), **plan, **given)[0]

    return call


def fa3(inputs: Inputs) -> Call:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    batch, s_q, heads, _ = inputs.q.shape
    lengths = {"max_seqlen_q": s_q, "max_seqlen_k": inputs.workload.longest, "cu_seqlens_q": inputs.query_starts}
    both = {**lengths, "causal": True, "num_splits": 32}  # vLLM's flash_attn_max_num_splits_for_cuda_graph
    sizes = {"num_heads_q": heads, "num_heads_kv": 1, "headdim": ROPE_DIM, "headdim_v": LATENT_DIM}
    cache = {"cache_seqlens": inputs.seq_lens, "qkv_dtype": inputs.q.dtype, "page_size": inputs.workload.page_size}
    given = {"scheduler_metadata": get_scheduler_metadata(batch_size=batch, **sizes, **cache, **both)}
    given |= {"seqused_k": inputs.seq_lens, "block_table": inputs.block_table}
    given |= {"softmax_scale": inputs.softmax_scale, "fa_version": 3, **both}
    q_latent, q_rope = inputs.q.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], dim=-1)

    def call(kv_cache: Tensor) -> Tensor:
        k, v = kv_cache[..., LATENT_DIM:].unsqueeze(-2), kv_cache[..., :LATENT_DIM].unsqueeze(-2)
        return flash_attn_varlen_func(q=q_rope, k=k, v=v, q_v=q_latent, **given)

    return call


def flashinfer(inputs: Inputs) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    s_q, heads = inputs.q.shape[1:3]
    pages = -(-inputs.seq_lens // inputs.workload.page_size)
    page_starts = pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    places = torch.arange(inputs.block_table.shape[1], device=pages.device)
    page_ids = inputs.block_table[places < pages[:, None]]
    buffer = torch.empty(128 << 20, dtype=torch.int8, device=inputs.q.device)
    wrapper = BatchMLAPagedAttentionWrapper(buffer, backend="fa3")
    lists, sizes = (inputs.query_starts, page_starts, page_ids, inputs.seq_lens), (heads, LATENT_DIM, ROPE_DIM)
    types = (inputs.softmax_scale, inputs.q.dtype, inputs.kv_dtype)
    wrapper.plan(*lists, *sizes, inputs.workload.page_size, s_q > 1, *types)
    q_latent, q_rope = inputs.q.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], dim=-1)
    scales = {} if inputs.kv_scale is None else {"ckv_scale": inputs.kv_scale, "kpe_scale": inputs.kv_scale}

    def call(kv_cache: Tensor) -> Tensor:
        return wrapper.run(q_latent, q_rope, kv_cache[..., :LATENT_DIM], kv_cache[..., LATENT_DIM:], **scales)

    return call


def triton(inputs: Inputs) -> Call:
    """vLLM's TRITON_MLA: a query token is a request of its own, so several repeat the request's list in a call."""
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    s_q, heads = inputs.q.shape[1:3]
    device, q = inputs.q.device, inputs.q.flatten(0, 1)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = _compute_num_kv_splits(inputs.workload.longest, multiprocessors)
    # A workspace for all layers.
    partial = torch.empty(len(q), heads, splits, LATENT_DIM + 1, dtype=torch.float32, device=device)
    scale = torch.ones(1, device=device) if inputs.kv_scale is None else inputs.kv_scale_tensor
    offsets = torch.arange(1 - s_q, 1, dtype=torch.int32, device=device)

    def call(kv_cache: Tensor) -> Tensor:
        out, lse = q.new_zeros(len(q), heads, LATENT_DIM), q.new_zeros(len(q), heads)
        block_table, seq_lens = inputs.block_table, inputs.seq_lens
        if s_q > 1:
            block_table = block_table.repeat_interleave(s_q, dim=0)
            seq_lens = (seq_lens.unsqueeze(1) + offsets).flatten().clamp(min=0)
        k = kv_cache.unsqueeze(2)
        lists = (block_table, seq_lens, partial, splits, inputs.softmax_scale, inputs.workload.page_size)
        decode_attention_fwd(q, k, k[..., :LATENT_DIM], out, lse, *lists, k_scale=scale, v_scale=scale, is_mla=True)
        return out

    return call


def flashmla_sparse_fp8(inputs: Inputs, *, pad_in_call: bool = True, module: str = FLASHMLA) -> Call:
    """All tokens are one request. Like vLLM, each call copies the queries of a rank with few heads among zeros to 64 or
    128 heads; without `pad_in_call` they lie padded before the clock runs."""
    interface, (tokens, heads, width) = importlib.import_module(module), inputs.q.shape
    padded = _padded_heads(heads, pad_in_call)
    q = inputs.q if pad_in_call else pad(inputs.q, (0, 0, 0, padded - heads))
    given = {"tile_scheduler_metadata": interface.get_mla_metadata()[0], **_flashmla_lists(inputs)}

    def call(kv_cache: Tensor, indices: Tensor) -> Tensor:
        queries = q.unsqueeze(0)
        if q.shape[1] < padded:
            queries = q.new_zeros((1, tokens, padded, width))
            queries[:, :, :heads, :] = q
        cache = {"k_cache": kv_cache.unsqueeze(-2), "indices": indices.unsqueeze(0)}
        return interface.flash_mla_with_kvcache(q=queries, **cache, **given)[0][0, :, :heads]

    return call


def flashmla_sparse(inputs: Inputs, *, pad_in_call: bool = True, module: str = FLASHMLA) -> Call:
    """FlashMLA's kernel for bfloat16 rows, as vLLM calls it; `pad_in_call` as above."""
    interface, (tokens, heads, width) = importlib.import_module(module), inputs.q.shape
    padded, counts = _padded_heads(heads, pad_in_call), inputs.counts(inputs.workload.length)
    q = inputs.q if pad_in_call else pad(inputs.q, (0, 0, 0, padded - heads))

    def call(kv_cache: Tensor, indices: Tensor) -> Tensor:
        queries = q
        if q.shape[1] < padded:
            queries = q.new_empty((tokens, padded, width))
            queries[:, :heads, :] = q
        given = (queries, kv_cache.view(-1, 1, width), indices.unsqueeze(1), inputs.softmax_scale)
        return interface.flash_mla_sparse_fwd(*given, topk_length=counts)[0][:, :heads]

    return call


def _padded_heads(heads: int, pad_in_call: bool) -> int:
    """Heads that FlashMLA's sparse kernels take: 64, or multiples of it."""
    padded = -(-heads // 64) * 64
    if not pad_in_call and heads == padded:
        raise NotImplementedError(f"{heads} heads need no padding")
    return padded


def fa3_sparse(inputs: Inputs) -> Call:
    """vLLM's FLASH_ATTN_MLA_SPARSE: pages of one token, a list is a page table, a token a request."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    counts = inputs.counts(inputs.workload.length)
    q_latent, q_rope = inputs.q.split([LATENT_DIM, ROPE_DIM], dim=-1)

    def call(kv_cache: Tensor, indices: Tensor) -> Tensor:
        rope, latent = kv_cache[:, :, LATENT_DIM:], kv_cache[:, :, :LATENT_DIM]
        cache = {"k": rope.view(-1, 1, 1, ROPE_DIM), "v": latent.view(-1, 1, 1, LATENT_DIM), "block_table": indices}
        starts = torch.arange(0, len(indices) + 1, dtype=torch.int32, device=q_rope.device)
        lengths = {"max_seqlen_q": 1, "max_seqlen_k": indices.shape[1], "cu_seqlens_q": starts, "seqused_k": counts}
        more = {"softmax_scale": inputs.softmax_scale, "causal": True, "fa_version": 3}
        return flash_attn_varlen_func(q=q_rope, q_v=q_latent, **cache, **lengths, **more)

    return call


def flashmla_v4(inputs: Inputs, *, module: str = FLASHMLA) -> Call:
    """As in vLLM 0.33: the operator before the call has written queries padded to 64 heads; sinks of the padding are
    -inf; both lists have counts."""
    interface, (tokens, heads, _) = importlib.import_module(module), inputs.q.shape
    padded = 64 if heads <= 64 else 128
    q = pad(inputs.q, (0, 0, 0, padded - heads)).unsqueeze(1)
    given = {"tile_scheduler_metadata": interface.get_mla_metadata()[0], **_flashmla_lists(inputs)}
    given["attn_sink"] = pad(inputs.sinks, (0, padded - heads), value=-math.inf)
    given["topk_length"] = inputs.counts(V4_WINDOW)
    given["extra_topk_length"] = inputs.counts(inputs.workload.extra) if inputs.workload.extra else None
    if "out" in inspect.signature(interface.flash_mla_with_kvcache).parameters:
        given["out"] = q.new_empty(tokens, 1, padded, LATENT_DIM)

    def call(cache: Tensor, indices: Tensor, extra_cache: Tensor | None, extra_indices: Tensor | None) -> Tensor:
        extra = {"extra_k_cache": None, "extra_indices_in_kvcache": None}
        if extra_cache is not None:
            extra = {"extra_k_cache": extra_cache.unsqueeze(-2), "extra_indices_in_kvcache": extra_indices.unsqueeze(1)}
        lists = {"k_cache": cache.unsqueeze(-2), "indices": indices.unsqueeze(1), **extra}
        return interface.flash_mla_with_kvcache(q=q, **lists, **given)[0][:, 0, :heads]

    return call

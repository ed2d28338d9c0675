"""FlashAttention-3's decode calls with `qv`, which are MLA's, on ETAP's kernels.

Use `from etap_backend.compat import flash_attn_interface` in place of `import flash_attn_interface`. The calls follow
FlashAttention 0251105 (`hopper/`), sgl-kernel's copy and, in the varlen form, vLLM 0.33. Arguments after the positional
ones are given by name, as the engines do.
"""

import itertools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._operator import check_tensor
from etap_backend.compat import check_out, named, plan, refuse_options, whole_rows
from etap_backend.dense import mla_decode
from etap_backend.limits import DTYPES, LATENT_DIM, MAX_COUNT, ROPE_DIM, WORK_RANGE_FIELDS, count, dtype_name
from etap_backend.schedule import BuiltSchedule, decode_shape, sms_of

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"]

NAMES = {
    "q": "qv",
    "q_rope": "q",
    "kv_cache": "v_cache",
    "rope_cache": "k_cache",
    "block_table": "page_table",
    "seq_lens": "cache_seqlens",
    "schedule": "scheduler_metadata",
    "work_ranges": "scheduler_metadata",
    "split_offsets": "scheduler_metadata",
}
"""Argument names of `flash_attn_with_kvcache` by ETAP's, for refusals."""
VARLEN = {"qv": "q_v", "v_cache": "v", "k_cache": "k", "page_table": "block_table", "cache_seqlens": "seqused_k"}
"""Argument names of vLLM's `flash_attn_varlen_func` by those of `flash_attn_with_kvcache`."""
NO_EFFECT = (
    *("pack_gqa", "sm_margin", "rotary_interleaved", "cu_seqlens_k_new", "deterministic", "cp_rank", "page_size"),
    *("cp_tot_seqused_k", "q_descale", "k_descale", "v_descale"),
)
"""Options that say how to compute, or mean nothing without others that are refused: descales scale FP8 only."""
CHOICES = {"window_size": ((-1, -1), [-1, -1]), "fa_version": (3,), "ver": (3,), "cp_world_size": (1,)}
"""Values of other options that are served, beside None, False and 0."""


class _Layer(NamedTuple):
    """What all queries of a call have in common; unsplit asks for bits that do not depend on the batch."""

    k_cache: Tensor
    v_cache: Tensor
    softmax_scale: float
    causal: bool
    metadata: Tensor | None
    unsplit: bool


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    qv: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    max_seqlen_k: int | None = None,
    **options: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """MLA decode attention over a paged cache. Copies nothing to the host and may be captured in a CUDA graph.

    Args:
        q: bfloat16 or float16 [b, s_q, h, 64], the rope part of the queries; with cu_seqlens_q [total_q, h, 64].
        k_cache: [num_blocks, page_block_size, 1, 64], the rope part of the rows, of q's type. k_cache and v_cache may
            be two parts of one tensor.
        v_cache: [num_blocks, page_block_size, 1, 512], the latent part, which is also multiplied by qv.
        qv: [b, s_q, h, 512] or [total_q, h, 512], the latent part of the queries.
        cache_seqlens: int32 [b], tokens of each request, the new ones included.
        page_table: int32 [b, max_num_blocks_per_seq]; unused entries may hold anything. Of a view of a wider table all
            columns in memory count, as in FlashAttention.
        cu_seqlens_q: int32 [b + 1], where each request's tokens begin in q; the last number may be below total_q. Its
            numbers are checked on the CPU, outside torch.compile.
        max_seqlen_q: with cu_seqlens_q, no request has more tokens. Where it is 1 and q has b rows, row i belongs to
            request i, and requests without a token come last; 2 allows them anywhere.
        softmax_scale: factor of the scores; 1 / sqrt(576) when None.
        causal: query token i of s_q sees the first cache_seqlens - (s_q - 1 - i) tokens; else each sees all.
        scheduler_metadata: from this module's `get_scheduler_metadata`; with None or FlashAttention's each call plans.
        num_splits: 1 splits no context, so results do not depend on the batch; other values have no effect.
        return_softmax_lse: return lse, too.
        out: [.., h, 512] like q, contiguous; allocated when None.
        max_seqlen_k: no context is longer; ragged queries then copy no more of page_table.
        options: those in NO_EFFECT, and others with FlashAttention's defaults.

    Returns:
        out [b, s_q, h, 512] or [total_q, h, 512] of q's type. With return_softmax_lse also lse, float32 [b, h, s_q] or
        [h, total_q], natural logarithm. A query that sees nothing has out 0 and lse -inf; rows of q after the last
        token have results without meaning.

    Raises:
        NotImplementedError: FlashAttention serves this, ETAP does not; the text names the argument.
        ValueError, TypeError: an argument is not as described.
    """
    refuse_options(options, CHOICES, NO_EFFECT)
    qv = _check_mla({"q": q, "qv": qv, "k_cache": k_cache, "v_cache": v_cache}, 4 if cu_seqlens_q is None else 3)
    batch, longest = (len(q), 0) if cu_seqlens_q is None else _requests(cu_seqlens_q, max_seqlen_q, q)
    lengths = _integers("cache_seqlens", cache_seqlens, (batch,), q.device)
    table = whole_rows(_integers("page_table", page_table, (batch, None), q.device))
    check_out("out", out, (*q.shape[:-1], LATENT_DIM), (q.dtype,), q)
    out = q.new_empty(*q.shape[:-1], LATENT_DIM) if out is None else out
    scale = (ROPE_DIM + LATENT_DIM) ** -0.5 if softmax_scale is None else softmax_scale
    layer = _Layer(k_cache, v_cache, scale, causal, scheduler_metadata, num_splits == 1)
    if not q.numel():
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    elif cu_seqlens_q is None:
        lse = _decode(layer, q, qv, table, lengths, out)
    elif longest == 1 and len(q) == batch:
        lse = _decode(layer, q[:, None], qv[:, None], table, lengths, out[:, None])[:, 0]
    elif not layer.unsplit and _padding_pays(q, batch, longest):
        lse = _padded(layer, q, qv, cu_seqlens_q[1:], longest, table, lengths, out)
    else:
        lse = _token_by_token(layer, q, qv, cu_seqlens_q[1:], _narrow(table, k_cache, max_seqlen_k), lengths, out)
    return (out, lse.transpose(-2, -1).contiguous()) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    softmax_scale: float | None = None,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """vLLM's form of the same call, `vllm.vllm_flash_attn.flash_attn_varlen_func(..., q_v=..., fa_version=3)`.

    Args:
        q, q_v: as q and qv of `flash_attn_with_kvcache`, ragged.
        k, v, block_table, seqused_k: as its k_cache, v_cache, page_table and cache_seqlens.
        softmax_scale: factor of the scores; 1 / sqrt(64) when None, as in vLLM.
        max_seqlen_q, cu_seqlens_q, max_seqlen_k: as there.
        options: causal, return_softmax_lse, out, scheduler_metadata, num_splits and options, as there.

    Returns, raises: as `flash_attn_with_kvcache`.
    """
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    own = {"qv": q_v, "cache_seqlens": seqused_k, "page_table": block_table, "cu_seqlens_q": cu_seqlens_q}
    own |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    own["softmax_scale"] = ROPE_DIM**-0.5 if softmax_scale is None else softmax_scale
    return named(VARLEN, flash_attn_with_kvcache, q, k, v, **own, **options)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    *,
    causal: bool = False,
    num_splits: int = 0,
    **options: object,
) -> Tensor:
    """Plan a step for all its layers. Copies nothing to the host and may be captured in a CUDA graph.

    Args:
        batch_size, max_seqlen_q, num_heads_q, num_splits: of the calls.
        cache_seqlens: int32 [batch_size], tokens of each request, the new ones included.
        num_heads_kv, headdim, headdim_v: 1, 64 and 512.
        max_seqlen_k, qkv_dtype, cu_seqlens_q, causal: no effect.
        options: as of `flash_attn_with_kvcache`.

    Returns:
        int32 [n, 8] for ETAP's calls only; n follows from batch_size, max_seqlen_q * num_heads_q and the GPU. With
        other lengths results are as right, but the work is divided for the planned ones.

    Raises:
        NotImplementedError, ValueError, TypeError: as `flash_attn_with_kvcache`.
    """
    refuse_options(options, CHOICES, NO_EFFECT)
    given = {"num_heads_kv": (num_heads_kv, 1), "headdim": (headdim, ROPE_DIM), "headdim_v": (headdim_v, LATENT_DIM)}
    for name, (got, wanted) in given.items():
        if got != wanted:
            raise NotImplementedError(f"{name}: wanted {wanted}, got {got}")
    _integers("cache_seqlens", cache_seqlens, (batch_size,), check_tensor("cache_seqlens", cache_seqlens).device)
    heads = count("num_heads_q", num_heads_q)
    rows = heads * count("max_seqlen_q", max_seqlen_q, MAX_COUNT // heads)
    # One row of metadata for each request and one more hold the offsets: the shape gives the number of requests.
    room = (batch_size + 1) * WORK_RANGE_FIELDS - 1
    kind = {"batch_invariant": num_splits == 1, "handed_over": True}
    built = named(NAMES, plan, cache_seqlens, room, rows, cache_seqlens.device, **kind)
    return torch.cat([built.work_ranges, built.split_offsets.view(-1, WORK_RANGE_FIELDS)])


def _check_mla(parts: dict[str, Tensor | None], query_dims: int) -> Tensor:
    """Refuse what is not MLA over pages, in the types and sizes of the kernels; returns qv."""
    if parts["qv"] is None:
        raise NotImplementedError("qv: wanted the latent part of the queries, as of MLA, got None")
    q, qv = (check_tensor(name, parts[name]) for name in ("q", "qv"))
    for name, value in parts.items():
        tensor, width = check_tensor(name, value), LATENT_DIM if "v" in name else ROPE_DIM
        wanted = ["any", "any", 1, width] if "cache" in name else ["any"] * (query_dims - 1) + [width]
        got = list(tensor.shape)
        if len(got) != len(wanted) or got[-1] != width or "cache" in name and got[2] != 1:
            raise NotImplementedError(f"{name}: wanted shape [{', '.join(map(str, wanted))}], got {got}")
        if tensor.dtype != q.dtype or q.dtype not in DTYPES:
            raise NotImplementedError(
                f"{name}.dtype: wanted bfloat16 or float16 like q, got {dtype_name(tensor.dtype)}"
            )
    if qv.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"qv: wanted q's rows, {list(q.shape[:-1])}, got {list(qv.shape)}")
    return qv


def _integers(name: str, value: object, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
    """The tensor, or a refusal; None fits any size."""
    if not isinstance(value, Tensor):
        raise NotImplementedError(f"{name}: wanted a tensor, got {value}")
    fits = value.dim() == len(shape) and (shape[0] is None or shape[0] == len(value))
    if value.dtype != torch.int32 or value.device != device or not fits:
        wanted = f"int32 [{', '.join('any' if size is None else str(size) for size in shape)}] on {device}"
        raise ValueError(
            f"{name}: wanted {wanted}, got {dtype_name(value.dtype)} {list(value.shape)} on {value.device}"
        )
    return value


def _requests(starts: Tensor, longest: Any, q: Tensor) -> tuple[int, int]:
    """Number of ragged requests and the most tokens of one; bounds that the host sees are checked."""
    starts = _integers("cu_seqlens_q", starts, (None,), q.device)
    longest, batch = count("max_seqlen_q", longest), count("cu_seqlens_q's requests", len(starts) - 1)
    if starts.is_cpu and not is_compiling():
        numbers = starts.tolist()
        if numbers != sorted(numbers) or numbers[0] != 0 or numbers[-1] > len(q):
            raise ValueError(f"cu_seqlens_q: wanted ascending numbers from 0 to at most {len(q)}, got {numbers}")
        most = max((end - start for start, end in itertools.pairwise(numbers)))
        if most > longest:
            raise ValueError(f"max_seqlen_q: wanted at least the {most} tokens of a request, got {longest}")
        if longest == 1 and batch == len(q) and numbers != [min(row, numbers[-1]) for row in range(batch + 1)]:
            wanted = "requests without a token last, or max_seqlen_q 2"
            raise ValueError(f"cu_seqlens_q: wanted {wanted}, got {numbers}")
    return batch, min(longest, max(1, len(q)))


def _padding_pays(q: Tensor, batch: int, longest: int) -> bool:
    """Whether requests padded to one length read their contexts less often than their tokens one by one."""
    num_sms, (tokens, heads) = sms_of(q.device), q.shape[:2]
    padded, single = (decode_shape(operator.index(rows), num_sms).row_groups for rows in (longest * heads, heads))
    return batch * padded <= tokens * single


def _padded(layer: _Layer, q, qv, ends: Tensor, longest: int, table: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    """Pad requests to the longest, each one's tokens at the end of its rows, which the causal mask wants."""
    tokens, heads = q.shape[:2]
    numbers = torch.arange(-longest, tokens, dtype=torch.int32, device=ends.device)
    source = (ends[:, None] + numbers[:longest]).clamp_(0, tokens - 1).flatten()
    q, qv = (part.index_select(0, source).unflatten(0, (len(ends), longest)) for part in (q, qv))
    padded = out.new_empty(*qv.shape)
    lse = _decode(layer, q, qv, table, lengths, padded)
    token = numbers[longest:]
    request = torch.bucketize(token, ends[:-1], right=True, out_int32=True)
    # Rows of q after the last token repeat its result.
    target = ((request + 1) * longest + token - ends.index_select(0, request)).clamp_(0, len(source) - 1)
    torch.index_select(padded.view(-1, heads, LATENT_DIM), 0, target, out=out)
    return lse.view(-1, heads).index_select(0, target)


def _token_by_token(layer: _Layer, q, qv, ends: Tensor, table: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    """Decode each token as a request of its own; only rows of the block table are copied."""
    number = torch.arange(1, len(q) + 1, dtype=torch.int32, device=ends.device)
    request = torch.bucketize(number, ends[:-1], out_int32=True)
    following = ends.index_select(0, request) - number  # tokens of the same request; below 0 after the last token
    seen = lengths.index_select(0, request)
    seen = (seen - following if layer.causal else seen).masked_fill_(following < 0, 0)
    own = layer._replace(metadata=None)
    return _decode(own, q[:, None], qv[:, None], table.index_select(0, request), seen, out[:, None])[:, 0]


def _narrow(table: Tensor, cache: Tensor, longest_context: int | None) -> Tensor:
    """Columns for the longest context; all of them in a CUDA graph, whose replays may bring longer ones.

    A function that torch.compile has traced may be captured later.
    """
    capturing = is_compiling() or table.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or not isinstance(longest_context, int):
        return table
    return table[:, : max(1, -(-longest_context // max(1, cache.shape[1])))]


def _decode(layer: _Layer, q, qv, table: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    """Decode q [b, s_q, h, 64] and qv into out [b, s_q, h, 512]; returns lse [b, s_q, h].

    Without a causal mask all query tokens of a request see the same context, so they are heads of one token.
    """
    batch, s_q, heads, _ = q.shape
    shape = (batch, s_q, heads) if layer.causal else (batch, 1, s_q * heads)
    built = _planned(layer, lengths, s_q * heads)._replace(s_q=shape[1], num_heads=shape[2])
    _, lse = named(
        NAMES,
        mla_decode,
        qv.reshape(*shape, LATENT_DIM),
        layer.v_cache,
        table,
        lengths,
        built,
        softmax_scale=layer.softmax_scale,
        q_rope=q.reshape(*shape, ROPE_DIM),
        rope_cache=layer.k_cache,
        out=out.view(*shape, LATENT_DIM),
    )
    return lse.view(batch, s_q, heads)


def _planned(layer: _Layer, lengths: Tensor, rows: int) -> BuiltSchedule:
    """The plan of `get_scheduler_metadata`, which has two dimensions unlike FlashAttention's, or one for this call."""
    metadata, batch, num_sms = layer.metadata, len(lengths), sms_of(lengths.device)
    if metadata is None or check_tensor("scheduler_metadata", metadata).dim() != 2:
        return named(NAMES, plan, lengths, batch, rows, lengths.device, batch_invariant=layer.unsplit)
    shape = decode_shape(operator.index(rows), num_sms)  # a constant under torch.compile
    partitions = shape.partitions(num_sms)
    size = (partitions + batch + 1, WORK_RANGE_FIELDS)
    if metadata.shape != size:
        wanted = f"get_scheduler_metadata's {list(size)} for {batch} requests of {rows} query rows"
        raise ValueError(f"scheduler_metadata: wanted {wanted}, got {list(metadata.shape)}")
    workspace = lengths.new_empty(shape.workspace_floats(partitions), dtype=torch.float32)
    ranges, offsets = metadata[:partitions], metadata[partitions:].flatten()
    return BuiltSchedule(batch, 1, rows, partitions, shape.row_tile, num_sms, ranges, offsets, workspace)

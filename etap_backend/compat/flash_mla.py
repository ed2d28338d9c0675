"""FlashMLA's calls (commit 9241ae3, the last with Hopper) on ETAP's kernels.

Use `from etap_backend.compat import flash_mla` in place of `import flash_mla`, or call `install()` before the program
imports `flash_mla`.
"""

import functools
import importlib
import importlib.util
import math
import operator
import sys
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from etap_backend._operator import check_tensor, type_name
from etap_backend.compat import check_out, named, plan, renamed, whole_rows
from etap_backend.compat._capture import capture_id
from etap_backend.dense import mla_decode
from etap_backend.limits import (
    HEAD_DIM,
    LATENT_DIM,
    SPARSE_FP8,
    V4_ROW_BYTES,
    WORK_RANGE_FIELDS,
    count,
    dtype_name,
    output_dtypes,
    why_unsupported,
    why_unsupported_sparse,
)
from etap_backend.schedule import BuiltSchedule, decode_shape, sms_of
from etap_backend.sparse import device_sms, sparse_decode_shape, sparse_mla_decode

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "install",
]

MODULES = ("flash_mla", "flash_mla.flash_mla_interface")
"""Modules that `install` replaces."""
NAMES = {
    "dtype": "q.dtype",
    "head_dim": "q's head_dim",
    "num_heads": "q's heads",
    "kv_cache": "k_cache",
    "kv_cache_dtype": "k_cache.dtype",
    "page_size": "page_block_size",
    "v_head_dim": "head_dim_v",
    "seq_lens": "cache_seqlens",
    "work_ranges": "tile_scheduler_metadata",
    "schedule": "tile_scheduler_metadata",
    "split_offsets": "num_splits",
    "q_scale": "descale_q",
    "kv_scale": "descale_k",
    "valid_counts": "topk_length",
    "extra_kv_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
    "extra_valid_counts": "extra_topk_length",
    "sinks": "attn_sink",
}
"""FlashMLA's argument names by ETAP's, for refusals."""
PROMPT_NAMES = NAMES | {"kv_cache": "kv", "page_size": "s_kv", "v_head_dim": "d_v", "softmax_scale": "sm_scale"}
PLAN_NAMES = {"seq_lens": "seqlens_k", "num_heads": "num_q_tokens_per_head_k"}
FORMATS = {"V32": (HEAD_DIM, 656), "V32_NO_ROPE": (LATENT_DIM, 528), "V4": (LATENT_DIM, V4_ROW_BYTES)}
"""Query columns and row bytes by `kv_format`. V4.1's rows have 528 bytes, too."""
EXTRA = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
EMPTY_LSE = math.inf
"""FlashMLA's log-sum-exp of queries that see nothing; ETAP's is -inf."""
_replaced: ModuleType | None = None
"""The FlashMLA that `install` replaced."""


def __getattr__(name: str) -> object:
    """Names that only the replaced FlashMLA has, such as kernels for other models."""
    if _replaced is None or name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_replaced, name)


@dataclass(eq=False)
class FlashMLASchedMeta:
    """The plan of a step's calls of one shape; the first call fills it.

    Attributes:
        have_initialized, config: set by the first call.
        tile_scheduler_metadata, num_splits: as of `get_mla_decoding_metadata`; may be assigned before the first call.
        workspace, row_tile: for partial results, and query rows per CTA.
        capture: the CUDA graph capture that recorded the planning; None for a plan that is already in memory.
    """

    @dataclass
    class Config:
        """What all calls have in common."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = field(default=None, repr=False)
    num_splits: Tensor | None = field(default=None, repr=False)
    workspace: Tensor | None = field(default=None, repr=False)
    row_tile: int | None = field(default=None, repr=False)
    capture: object | None = field(default=None, repr=False)


def install(*, replace: bool = False) -> ModuleType:
    """Make `import flash_mla` give this module, in this process and from now on.

    Earlier imports from another FlashMLA do not change.

    Args:
        replace: also replace a FlashMLA that is imported or installed. It is imported then, and this module gives the
            names that only the other has.

    Returns:
        This module.

    Raises:
        ImportError: there is another FlashMLA, and `replace` is False.
    """
    here: Any = sys.modules[__name__]
    there = sys.modules.get(MODULES[0])
    if there is not here:
        spec = importlib.util.find_spec(MODULES[0]) if there is None else there.__spec__
        if (there or spec) and not replace:
            where = spec.origin if spec else "this process"
            raise ImportError(f"flash_mla: wanted no other FlashMLA than ETAP's, or replace=True; got one in {where}")
        here._replaced = there or _other()
    sys.modules.update(dict.fromkeys(MODULES, here))
    here.flash_mla_interface = here  # for `import flash_mla.flash_mla_interface as ...`
    return here


def _other() -> ModuleType | None:
    """The installed FlashMLA; None where there is none, or this machine cannot load it."""
    try:
        return importlib.import_module(MODULES[0])
    except (ImportError, OSError, RuntimeError):
        return None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty plan, which the first call fills. Arguments of the older interface are ignored."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """The plan as two tensors, for programs that copy it into their own buffers. Copies nothing to the host.

    Args:
        seqlens_k: int32 [b], tokens of each request, the new ones included.
        num_q_tokens_per_head_k: s_q * h_q // h_k.
        h_k, h_q, is_fp8_kvcache, topk, use_legacy: ignored; the plan does not depend on them, and sparse calls have no
            plan.

    Returns:
        tile_scheduler_metadata, int32 [n, 8], where n follows from the GPU and num_q_tokens_per_head_k, and num_splits,
        int32 [b + 1]. ETAP and FlashMLA cannot read each other's.

    Raises:
        ValueError, TypeError: an argument is not as described.
    """
    _check_dims("seqlens_k", seqlens_k, 1, "[b]")
    of = (seqlens_k, seqlens_k.shape[0], num_q_tokens_per_head_k, seqlens_k.device)
    planned = named(PLAN_NAMES, plan, *of, batch_invariant=False, handed_over=True)
    return planned.work_ranges, planned.split_offsets


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    kv_format: str | None = None,
    use_legacy: bool = False,
    fp8_math: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode attention over a paged cache: dense with a block table, sparse with lists of rows (`indices`).

    May be captured in a CUDA graph, including the first call of a plan: each replay then plans again, and calls outside
    this capture make their own plan. A graph reads an earlier plan in place. Traced by torch.compile, each call makes
    its own plan where there is no earlier one. With other lengths than the planned ones results are as right, but the
    work is divided for the planned lengths.

    Each KV head is a launch, which reads its rows of the cache in place.

    Args:
        q: [b, s_q, h_q, 576], any strides with a contiguous last dimension. Dense: bfloat16, float16, or float8_e4m3fn
            with an FP8 cache. Sparse: bfloat16; [..., 512] with V4's rows and rows without rope. Any number of heads.
        k_cache: any page size. Dense: [num_blocks, page_block_size, h_k, 576] of q's type or float8_e4m3fn, h_k divides
            h_q. Sparse: bfloat16 [num_blocks, page_block_size, 1, 576 or 512], or any 8-bit type [num_blocks,
            page_block_size, 1, 656 (V3.2), 584 (V4's pages) or 528 (V32_NO_ROPE)].
        block_table: dense: int32 [b, max_num_blocks_per_seq]; unused entries may hold anything. Of a view of a wider
            table all columns in memory count, as in FlashMLA.
        cache_seqlens: dense: int32 [b], tokens of each request, the new ones included.
        head_dim_v: 512.
        tile_scheduler_metadata: from `get_mla_metadata`, for calls of the same shapes on one stream; or the first
            tensor of `get_mla_decoding_metadata`.
        num_splits: the second tensor beside the first, None beside a FlashMLASchedMeta.
        softmax_scale: factor of the scores; 1 / sqrt(q's columns) when None.
        causal: dense: query token i sees the first cache_seqlens - (s_q - 1 - i) tokens, else it sees all.
        is_fp8_kvcache: True wants a cache of an 8-bit type; None and False leave it to the cache.
        indices: int32 [b, s_q, topk], block * page_block_size + offset, any topk; entries that are negative or past the
            cache are skipped.
        attn_sink: sparse: float32 [>= h_q], natural logarithm; the output is multiplied by 1 / (1 + exp(sink - lse)).
        topk_length: sparse: int32 [b]; only the first topk_length entries of each list count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: sparse: a second cache of the same rows with its
            lists and lengths, in the same softmax. Cache and lists are given together.
        out: [b, s_q, h_q, 512] of the output's type; allocated when None. Dense: contiguous. Sparse: b and s_q form one
            dimension, rows at multiples of 16 bytes.
        enable_batch_invariant: split no request, so that its result has the same bits in every batch. Slower.
        descale_q, descale_k: float32 [1], factors of the elements of an FP8 q and of a dense FP8 cache.
        kv_format: None, "V32", "V4" or "V32_NO_ROPE" (rows of 528 bytes with 4 float32 scales), for sparse FP8 caches.
        use_legacy: ignored.
        fp8_math: not FlashMLA's: with a dense FP8 cache, multiply in float8_e4m3fn instead of float16.

    Returns:
        out [b, s_q, h_q, 512], of q's type, bfloat16 for an FP8 q; and lse, float32 [b, h_q, s_q], natural logarithm,
        with FlashMLA's strides (a transposed [b, s_q, h_q]). A query that sees nothing has out 0 and lse +inf.

    Raises:
        NotImplementedError: FlashMLA serves this, ETAP does not; the text names the argument.
        ValueError, TypeError: an argument is not as described.
    """
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    given = {"attn_sink": attn_sink, "topk_length": topk_length, "kv_format": kv_format}
    given |= dict(zip(EXTRA, extra, strict=True))
    dense_only = {"causal": causal, "descale_q": descale_q, "descale_k": descale_k, "fp8_math": fp8_math}
    config = _config(q, k_cache, causal, is_fp8_kvcache, indices, extra, enable_batch_invariant)
    _check_metadata(tile_scheduler_metadata, num_splits, config)
    count("head_dim_v", head_dim_v)  # an int, which the caches below can hash
    check_out("out", out, (*q.shape[:3], LATENT_DIM), output_dtypes(q.dtype), q, contiguous=indices is None)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        _check_absent("without indices", given)
        block_table = _check_dims("block_table", block_table, 2, "[b, max_num_blocks_per_seq]")
        cache_seqlens = _check_dims("cache_seqlens", cache_seqlens, 1, "[b]")
        group = config.h_q // config.h_k
        _refuse(_why_not_dense(q.dtype, k_cache.dtype, group, q.shape[-1], head_dim_v, k_cache.shape[1]))
        if q.numel() == 0:
            return _nothing(q, out)
        planned = _planned(tile_scheduler_metadata, num_splits, q, cache_seqlens, config, fp8_math)
        scales = {"softmax_scale": scale, "q_scale": descale_q, "kv_scale": descale_k}
        options = {**scales, "fp8_math": fp8_math, "empty_lse": EMPTY_LSE}
        out, lse = _dense(q, k_cache, whole_rows(block_table), cache_seqlens, planned, out, options)
    else:
        _check_absent("with indices", dense_only)
        _refuse(_why_not_sparse(q.dtype, k_cache.dtype, config.h_q, q.shape[-1], head_dim_v))
        _check_format(q.shape[-1], k_cache, kv_format)
        planned = None
        lists = (_SparseList("", k_cache, indices, topk_length), _SparseList("extra_", *extra))
        options = {"softmax_scale": scale, "sinks": attn_sink, "empty_lse": EMPTY_LSE}
        out, lse = _sparse(q, lists, enable_batch_invariant, out, options)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        _store(tile_scheduler_metadata, config, planned)
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = LATENT_DIM,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[Tensor, None, Tensor | None]:
    """Sparse attention of a prompt: each token attends to the rows in its list.

    Args:
        q: bfloat16 [s_q, h_q, 576 or 512], any number of heads.
        kv: bfloat16 [s_kv, 1, 576 or 512], as many columns as q.
        indices: int32 [s_q, 1, topk]; entries below 0 or from s_kv on are skipped.
        sm_scale: factor of the scores.
        d_v: 512.
        attn_sink: float32 [>= h_q], natural logarithm, as in `flash_mla_with_kvcache`.
        topk_length: int32 [s_q]; only the first topk_length entries of each list count.
        out: bfloat16 [s_q, h_q, 512], also a slice of a wider buffer; allocated when None.
        use_legacy: ignored.
        return_log2_lse: True for lse in base 2, False for none, as in sgl-flash-mla.

    Returns:
        out [s_q, h_q, 512]; None in place of FlashMLA's largest scores, which these kernels do not store; float32 lse
        [s_q, h_q], natural logarithm, +inf for an empty list.

    Raises:
        NotImplementedError, ValueError, TypeError: as `flash_mla_with_kvcache`.
    """
    for name, tensor, wanted in (
        ("q", q, "[s_q, h_q, d]"),
        ("kv", kv, "[s_kv, 1, d]"),
        ("indices", indices, "[s_q, 1, topk]"),
    ):
        _check_dims(name, tensor, 3, wanted)
        if name != "q" and tensor.shape[1] != 1:
            raise ValueError(f"{name}: wanted shape {wanted}, got {list(tensor.shape)}")
    if kv.dtype != torch.bfloat16:
        raise TypeError(f"kv: wanted bfloat16, got {dtype_name(kv.dtype)}")
    count("d_v", d_v)
    _refuse(_why_not_sparse(q.dtype, kv.dtype, q.shape[1], q.shape[2], d_v), PROMPT_NAMES)
    options = {"softmax_scale": sm_scale, "sinks": attn_sink, "valid_counts": topk_length, "empty_lse": EMPTY_LSE}
    out, lse = named(PROMPT_NAMES, sparse_mla_decode, q, kv.transpose(0, 1), indices[:, 0], out=out, **options)
    if return_log2_lse is False:
        return out, None, None
    return out, None, lse.mul_(math.log2(math.e)) if return_log2_lse else lse


def _refuse(reason: str | None, names: dict[str, str] = NAMES) -> None:
    if reason:
        raise NotImplementedError(renamed(reason, names))


def _check_absent(where: str, values: dict[str, object]) -> None:
    for name, value in values.items():
        if value is not None and value is not False:
            got = value if isinstance(value, bool | str) else type_name(value)
            raise ValueError(f"{name}: wanted None or False {where}, got {got}")


def _check_dims(name: str, tensor: object, dims: int, wanted: str) -> Tensor:
    tensor = check_tensor(name, tensor)
    if tensor.dim() != dims:
        raise ValueError(f"{name}: wanted shape {wanted}, got {list(tensor.shape)}")
    return tensor


@functools.lru_cache(maxsize=256)
def _why_not_dense(dtype, cache_dtype, heads: int, head_dim: int, head_dim_v: int, page_size: int) -> str | None:
    sizes: dict[str, Any] = {"num_heads": heads, "head_dim": head_dim, "v_head_dim": head_dim_v, "page_size": page_size}
    return why_unsupported(dtype=dtype, kv_cache_dtype=cache_dtype, **sizes)


@functools.lru_cache(maxsize=256)
def _why_not_sparse(dtype, cache_dtype, heads: int, head_dim: int, head_dim_v: int) -> str | None:
    cache = SPARSE_FP8 if cache_dtype.itemsize == 1 else cache_dtype
    return why_unsupported_sparse(
        dtype=dtype, kv_cache_dtype=cache, num_heads=heads, head_dim=head_dim, v_head_dim=head_dim_v
    )


def _check_format(columns: int, k_cache: Tensor, kv_format: str | None) -> None:
    """Refuse 8-bit rows in a format that the sparse call does not read; sizes alone are ambiguous."""
    if k_cache.element_size() > 1:
        return _check_absent(f"beside a k_cache of {dtype_name(k_cache.dtype)}", {"kv_format": kv_format})
    if kv_format is not None and not isinstance(kv_format, str):
        raise TypeError(f"kv_format: wanted a str or None, got {kv_format!r}")
    width = k_cache.shape[-1]
    name = kv_format or ("V4" if width == V4_ROW_BYTES else "V32")
    if FORMATS.get(name) != (columns, width):
        known = ", ".join(f"{name}: {columns} columns, {width} bytes" for name, (columns, width) in FORMATS.items())
        got = f"kv_format {kv_format}, {columns} columns, {width} bytes"
        raise NotImplementedError(f"k_cache: wanted rows of a format that is served ({known}), got {got}")


def _config(q, k_cache, causal, is_fp8_kvcache, indices, extra: tuple, batch_invariant) -> FlashMLASchedMeta.Config:
    """What a plan's calls have in common; checks the dimensions of the tensors."""
    _check_dims("q", q, 4, "[b, s_q, h_q, d]")
    _check_dims("k_cache", k_cache, 4, "[num_blocks, page_block_size, h_k, d]")
    batch, s_q, heads, _ = q.shape
    _, page_size, kv_heads, _ = k_cache.shape
    if heads < 1:
        raise ValueError(f"q: wanted at least one head, got {list(q.shape)}")
    if kv_heads < 1 or heads % kv_heads or indices is not None and kv_heads > 1:
        wanted = "1 KV head with indices" if indices is not None else "KV heads that divide the query heads"
        raise ValueError(f"k_cache: wanted {wanted}, got {kv_heads} for {heads}")
    if is_fp8_kvcache and k_cache.element_size() > 1:
        raise ValueError(f"is_fp8_kvcache: wanted False beside a k_cache of {dtype_name(k_cache.dtype)}, got True")
    fp8, top_k = k_cache.element_size() == 1, None if indices is None else _top_k("indices", indices, q)
    extra_k_cache, extra_indices, _ = extra
    extra_page, extra_top_k = (None, None) if indices is None else _extra_sizes(extra_k_cache, extra_indices, q)
    flags = (bool(causal), fp8, top_k, extra_page, extra_top_k, bool(batch_invariant))
    return FlashMLASchedMeta.Config(batch, s_q, heads, page_size, kv_heads, *flags)


def _top_k(name: str, indices: object, q: Tensor) -> int:
    """Entries per list; refuses lists that do not fit q's tokens."""
    indices = _check_dims(name, indices, 3, "[b, s_q, topk]")
    if indices.shape[:2] != q.shape[:2]:
        wanted = [*q.shape[:2], "topk"]
        raise ValueError(f"{name}: wanted [{', '.join(map(str, wanted))}] for q's shape, got {list(indices.shape)}")
    return indices.shape[2]


def _extra_sizes(k_cache: object, indices: object, q: Tensor) -> tuple[int | None, int | None]:
    """page_block_size and topk of the second cache; None where there is none."""
    top_k = None if indices is None else _top_k("extra_indices_in_kvcache", indices, q)
    if k_cache is None:
        return None, top_k
    return _check_dims("extra_k_cache", k_cache, 4, "[num_blocks, page_block_size, 1, d]").shape[1], top_k


def _check_metadata(metadata: object, num_splits: object, config: FlashMLASchedMeta.Config) -> None:
    """Refuse metadata in neither form, or of calls that differ from this one."""
    by_hand = isinstance(metadata, Tensor)
    if not by_hand and not isinstance(metadata, FlashMLASchedMeta):
        wanted = "what get_mla_metadata or get_mla_decoding_metadata returned"
        raise TypeError(f"tile_scheduler_metadata: wanted {wanted}, got {type_name(metadata)}")
    if by_hand != isinstance(num_splits, Tensor) or not by_hand and num_splits is not None:
        wanted = "a tensor beside a tensor" if by_hand else "None beside a FlashMLASchedMeta"
        raise TypeError(f"num_splits: wanted {wanted}, got {type_name(num_splits)}")
    if not by_hand and metadata.have_initialized:
        if metadata.config == config:  # torch 2.14 does not trace != of symbolic sizes
            return
        pairs = (
            (each.name, getattr(metadata.config, each.name), getattr(config, each.name)) for each in fields(config)
        )
        name, before, now = next(pair for pair in pairs if pair[1] != pair[2])
        raise ValueError(f"tile_scheduler_metadata: wanted a plan for {name} {now}, got one for {before}")
    splits = by_hand or metadata.tile_scheduler_metadata is not None
    if config.enable_batch_invariant and config.topk is None and splits:
        wanted = "False with a plan of get_mla_decoding_metadata, which splits requests"
        raise ValueError(f"enable_batch_invariant: wanted {wanted}, got True")


def _check_plan(work_ranges: object, split_offsets: object, batch: int) -> None:
    """Refuse tensors without the shapes of a plan for this many requests; contents are not checked."""
    rows, columns = _check_dims("tile_scheduler_metadata", work_ranges, 2, "[n, 8]").shape
    if rows < 1 or columns != WORK_RANGE_FIELDS:
        wanted = f"at least one row of {WORK_RANGE_FIELDS}"
        raise ValueError(f"tile_scheduler_metadata: wanted {wanted}, got {[rows, columns]}")
    _check_requests("num_splits", split_offsets, batch + 1)


def _check_requests(name: str, tensor: object, wanted: int) -> None:
    tensor = _check_dims(name, tensor, 1, f"[{wanted}]")
    if tensor.shape[0] != wanted:
        raise ValueError(f"{name}: wanted shape [{wanted}], got {list(tensor.shape)}")


def _planned(metadata, num_splits, q: Tensor, cache_seqlens: Tensor, config, fp8_math: bool) -> BuiltSchedule:
    """The plan of each KV head's call.

    Without a causal mask all query tokens of a request see the same context, so they are heads of one token.
    """
    group = config.h_q // config.h_k
    rows, tokens = config.s_q * group, config.s_q if config.causal else 1
    sizes = {"batch": config.b, "s_q": tokens, "num_heads": rows // tokens}
    work_ranges, split_offsets, workspace, row_tile = metadata, num_splits, None, None
    if isinstance(metadata, FlashMLASchedMeta):
        work_ranges, split_offsets, workspace, row_tile = _plan_of(metadata, q.device)
    if work_ranges is None:
        types = {"fp8_cache": config.is_fp8_kvcache, "fp8_math": fp8_math}
        options = {"batch_invariant": config.enable_batch_invariant} | types
        return named(NAMES, plan, cache_seqlens, config.b, rows, q.device, **options)._replace(**sizes)
    _check_plan(work_ranges, split_offsets, config.b)
    partitions, num_sms = work_ranges.shape[0], sms_of(q.device)
    shape = decode_shape(operator.index(rows), num_sms)
    if workspace is None:
        workspace = q.new_empty(shape.workspace_floats(partitions), dtype=torch.float32)
    return BuiltSchedule(
        **sizes,
        partitions=partitions,
        row_tile=row_tile or shape.row_tile,
        num_sms=num_sms,
        work_ranges=work_ranges,
        split_offsets=split_offsets,
        workspace=workspace,
    )


def _plan_of(metadata: FlashMLASchedMeta, device: torch.device) -> tuple[Any, Any, Tensor | None, int | None]:
    """Work ranges, offsets, workspace and row tile of earlier calls; all None where this call has to plan.

    A plan recorded by another capture exists in that graph's replays only: its buffers may hold anything here.
    A function that torch.compile has traced may run in any capture.
    """
    if metadata.capture is not None and (is_compiling() or metadata.capture != capture_id(device)):
        return None, None, None, None
    return metadata.tile_scheduler_metadata, metadata.num_splits, metadata.workspace, metadata.row_tile


def _store(metadata: FlashMLASchedMeta, config: FlashMLASchedMeta.Config, planned: BuiltSchedule | None) -> None:
    """Store the plan of a call that succeeded for those that follow.

    A call that torch.compile traces keeps its plan to itself: which captures will record it is not known.
    """
    metadata.have_initialized, metadata.config = True, config
    if planned and not is_compiling():
        if planned.work_ranges is not metadata.tile_scheduler_metadata:
            metadata.capture = capture_id(planned.work_ranges.device)
        metadata.tile_scheduler_metadata, metadata.num_splits = planned.work_ranges, planned.split_offsets
        metadata.workspace, metadata.row_tile = planned.workspace, planned.row_tile


def _nothing(q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty results, for no requests or no query tokens."""
    batch, s_q, heads, _ = q.shape
    out = q.new_empty(batch, s_q, heads, LATENT_DIM, dtype=output_dtypes(q.dtype)[0]) if out is None else out
    return out, q.new_empty(batch, s_q, heads, dtype=torch.float32).transpose(1, 2)


def _dense(q, k_cache, block_table, cache_seqlens, planned: BuiltSchedule, out, options: dict) -> tuple[Tensor, Tensor]:
    """One call per KV head, on a view of the cache; returns out [b, s_q, h_q, 512] and lse [b, s_q, h_q]."""
    kv_heads = k_cache.shape[2]
    if kv_heads == 1:
        return _dense_head(q, k_cache, block_table, cache_seqlens, planned, out, options)
    group = q.shape[2] // kv_heads
    options = {**options, "out_dtype": None if out is None else out.dtype}
    results = [
        _dense_head(
            q[:, :, head * group : (head + 1) * group],
            k_cache[:, :, head],
            block_table,
            cache_seqlens,
            planned,
            None,
            options,
        )
        for head in range(kv_heads)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=2, out=out), torch.cat(lses, dim=2)


def _dense_head(q, k_cache, block_table, cache_seqlens, planned: BuiltSchedule, out, options) -> tuple[Tensor, Tensor]:
    """Decode the queries of one KV head in the plan's shape; results as of `_dense`."""
    shape, inner = q.shape[:3], (planned.batch, planned.s_q, planned.num_heads)
    if shape == inner:
        return named(NAMES, mla_decode, q, k_cache, block_table, cache_seqlens, planned, out=out, **options)
    whole = None if out is None else out.view(*inner, LATENT_DIM)
    rows = q.reshape(*inner, q.shape[3])
    out, lse = named(NAMES, mla_decode, rows, k_cache, block_table, cache_seqlens, planned, out=whole, **options)
    return out.view(*shape, LATENT_DIM), lse.view(shape)


class _SparseList(NamedTuple):
    """A cache and the lists of its rows, as given to FlashMLA's call."""

    prefix: str  # of the argument names
    k_cache: Tensor | None
    indices: Tensor | None
    topk_length: Tensor | None

    def arguments(self, batch: int, s_q: int, part: slice) -> dict[str, Tensor | None]:
        """Arguments of the sparse call for a part of the b * s_q tokens."""
        cache, indices, counts = self.k_cache, self.indices, self.topk_length
        if cache is not None and cache.dtype == torch.int8:
            cache = cache.view(torch.uint8)
        if counts is not None:
            _check_requests(f"{self.prefix}topk_length", counts, batch)
            counts = counts[:, None].expand(batch, s_q).contiguous().flatten()[part]
        lists = None if indices is None else indices.flatten(0, 1)[part]
        arguments = {"kv_cache": cache, "indices": lists, "valid_counts": counts}
        return {f"{self.prefix}{name}": value for name, value in arguments.items()}


def _sparse(q, lists: tuple[_SparseList, ...], batch_invariant: bool, out, options: dict) -> tuple[Tensor, Tensor]:
    """One call over all query tokens; results as of `_dense`.

    Batch-invariant results take several calls, so that each token has its own partition and is not split.
    """
    batch, s_q, heads, _ = q.shape
    tokens = q.flatten(0, 1)
    out = q.new_empty(batch, s_q, heads, LATENT_DIM) if out is None else out
    if min(batch, s_q) > 1 and out.stride(0) != s_q * out.stride(1):
        raise ValueError(f"out: wanted strides that make b and s_q one dimension, got {list(out.stride())}")
    rows, lse = out.flatten(0, 1), q.new_empty(batch, s_q, heads, dtype=torch.float32)
    shape = sparse_decode_shape(operator.index(heads))  # a constant under torch.compile
    most = shape.partitions(device_sms(q.device)) if batch_invariant else max(1, batch * s_q)
    for first in range(0, batch * s_q, most):
        part = slice(first, min(first + most, batch * s_q))
        named(
            NAMES,
            sparse_mla_decode,
            tokens[part],
            **lists[0].arguments(batch, s_q, part),
            **lists[1].arguments(batch, s_q, part),
            num_sms=(part.stop - first) * shape.row_groups if batch_invariant else None,
            out=rows[part],
            lse=lse.view(-1, heads)[part],
            **options,
        )
    return out, lse

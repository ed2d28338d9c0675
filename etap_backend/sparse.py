"""The public call of sparse attention: every query token has a list of the cache rows that it attends to."""

import functools
import math

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend._operator import Operator, compiled, constant_result, schema, type_name
from etap_backend.calls import SparseCall
from etap_backend.cpu import sparse as cpu_sparse
from etap_backend.limits import LATENT_DIM, MAX_COUNT, MAX_SMS, count
from etap_backend.schedule import DecodeShape, sms_of

CPU_SMS = 132
"""CTAs that a call on the CPU is divided for: an H200's, so that the splits are the same."""


@functools.cache
@constant_result
def sparse_decode_shape(heads: int) -> DecodeShape:
    """The library's answer. Raises ImportError without a library, ValueError outside 1..MAX_COUNT heads."""
    return DecodeShape(*library().sparse_decode_shape(count("heads", heads)))


def sparse_workspace_floats(heads: int, num_sms: int) -> int:
    """The most floats that a `sparse_mla_decode` needs in its workspace, for any tokens, caches and lists.

    Args:
        heads: query heads on this GPU.
        num_sms: CTAs that the calls are launched on.

    Raises:
        ValueError, TypeError: a count is below 1, above MAX_COUNT or MAX_SMS of etap_backend.limits, or not an int.
        ImportError: the compiled library is missing or of another version.
    """
    shape = sparse_decode_shape(count("heads", heads))
    return shape.workspace_floats(shape.partitions(count("num_sms", num_sms, MAX_SMS)))


def device_sms(device: torch.device) -> int:
    """CTAs that a call on a device is divided for."""
    return sms_of(device, CPU_SMS)


def _library_call(
    q: Tensor,
    q_rope: Tensor | None,
    kv_cache: Tensor,
    indices: Tensor,
    block_table: Tensor | None,
    request_ids: Tensor | None,
    valid_counts: Tensor | None,
    extra_kv_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_block_table: Tensor | None,
    extra_valid_counts: Tensor | None,
    sinks: Tensor | None,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    num_sms: int | None,
    empty_lse: float,
) -> SparseCall:
    """The library's arguments: the operator's, with a workspace, and with partitions in place of num_sms."""
    heads = q.shape[1] if q.dim() == 3 else 0
    if heads > MAX_COUNT:
        raise ValueError(f"q: wanted at most {MAX_COUNT} heads, got {heads}")
    shape = sparse_decode_shape(max(1, heads))
    partitions = shape.partitions(device_sms(q.device) if num_sms is None else count("num_sms", num_sms, MAX_SMS))
    if workspace is None:
        workspace = q.new_empty(shape.workspace_floats(partitions), dtype=torch.float32)
    return SparseCall(
        q,
        q_rope,
        kv_cache,
        indices,
        block_table,
        request_ids,
        valid_counts,
        extra_kv_cache,
        extra_indices,
        extra_block_table,
        extra_valid_counts,
        sinks,
        workspace,
        out,
        lse,
        softmax_scale,
        partitions,
        empty_lse,
    )


def _on_cuda(*arguments) -> None:
    compiled("sparse_decode")(*_library_call(*arguments))


def _on_cpu(*arguments) -> None:
    call = _library_call(*arguments)
    compiled("check_sparse_decode")(*call)
    cpu_sparse.decode(call)


# Behind the operator, because torch.compile cannot trace the library.
_decode = Operator(schema("sparse_mla_decode", _library_call, written=("workspace", "out", "lse")), _on_cuda, _on_cpu)


def sparse_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    q_rope: Tensor | None = None,
    block_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    valid_counts: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_block_table: Tensor | None = None,
    extra_valid_counts: Tensor | None = None,
    sinks: Tensor | None = None,
    workspace: Tensor | None = None,
    num_sms: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    empty_lse: float = -math.inf,
) -> tuple[Tensor, Tensor]:
    """One layer's sparse MLA attention: every query token attends to the cache rows that its list names.

    Tokens are independent: decode tokens, drafts to verify and prompt tokens alike see what their own lists name. An
    entry that names no row is ignored, and nothing is read for it: a negative entry, a row past the cache's end, a
    position past the block table or on a page outside the cache, any entry of a token whose request is unknown. Such
    entries may stand anywhere in a list. A row that is named twice counts twice. A token whose lists name no row gets
    output 0 and log-sum-exp `empty_lse`. Cache rows that no list names may hold anything.

    A token may have a second list with rows of a second cache: DeepSeek-V4 keeps a window and compressed entries. One
    softmax covers the rows of both. Both caches have rows of the same format; their page sizes may differ.

    Shapes and each token's own counts divide the work. There is no schedule, a wide list costs as much as its valid
    entries, and in calls of the same shape a token's result has the same bits whatever the other tokens hold. On CUDA
    tensors the compiled kernels run on the current stream, without allocating when `out`, `lse` and `workspace` are
    given and without copying to the host; on CPU tensors `etap_backend.cpu.sparse` runs. Nothing is recorded for
    gradients. `out`, `lse` and `workspace` must not share memory with each other, the queries, the cache or the lists.

    A row of DeepSeek-V3.2's FP8 cache has 656 bytes: 512 e4m3 elements, 4 float32 scales for 128 elements each, and 64
    rope elements in bfloat16. The value of an element is the element times its scale, which may be any number up to
    2^100 in size. Rows without rope (512 wide, or 528 bytes in FP8, scales last) go with queries without rope.

    A page of DeepSeek-V4's cache holds its rows' data, 576 bytes each (448 e4m3 and 64 bfloat16 elements), followed by
    8 bytes of scales per row: 7 powers of two for 64 of the 448 elements each, byte b standing for 2^(b - 127), and
    one byte that is not read. All 512 elements are both key and value. The tensor has 584 bytes per row; a row's bytes
    are not contiguous there. An element times its scale is exact from 2^-126 on and may be 0 below.

    Args:
        q: bfloat16 [tokens, heads, 576], or its latent part [tokens, heads, 512] when q_rope is given or rows have no
            rope. Any strides with a contiguous last dimension and every row at a multiple of 16 bytes.
        kv_cache: bfloat16 [pages, page_size, 576 or 512], or uint8 or float8_e4m3fn [pages, page_size, 656, 528 or, for
            V4's pages, 584]; also [pages, page_size, 1, ...]. Any page_size, at least one page. Rows are contiguous and
            at multiples of 16 bytes; gaps between rows and between pages are allowed. V4's pages have the strides [any
            multiple of 16 bytes, 584, 1].
        indices: int32 [tokens, top_k], any top_k. A row of the cache, page * page_size + offset in the page; with
            block_table, a position in the token's request. Gaps between lists are allowed.
        softmax_scale: factor of the scores before softmax.
        q_rope: bfloat16 [tokens, heads, 64], the same freedom of strides as q.
        block_table: int32 [requests, max_pages]; the page of each page_size tokens of a request. Gaps between rows are
            allowed.
        request_ids: int32 [tokens], each token's row of block_table and of extra_block_table; required with either.
        valid_counts: int32 [tokens]; the number of leading entries of each list that count, none where it is negative.
            All when None.
        extra_kv_cache, extra_indices, extra_block_table, extra_valid_counts: the second cache, with rows like
            kv_cache's, and its lists, like the first's; cache and indices are given together. Each of the two lists
            may hold rows or positions.
        sinks: float32 [>= heads], natural logarithm: the output is multiplied by 1 / (1 + exp(sink - lse)); lse does
            not change. +inf makes the output 0; -inf and None have no effect.
        workspace: float32 [>= sparse_workspace_floats(heads, num_sms)], contiguous, aligned to 16 bytes; allocated when
            None. Calls that follow each other on one stream may share it.
        num_sms: CTAs to launch; all of the GPU's multiprocessors when None (132 on the CPU).
        out: bfloat16 [tokens, heads, 512], also a slice of a wider buffer: last dimension contiguous, rows at multiples
            of 16 bytes without overlap; allocated when None.
        lse: float32 [tokens, heads], natural logarithm, contiguous; allocated when None.
        empty_lse: log-sum-exp of tokens whose lists name no row: -inf, or FlashMLA's +inf.

    Returns:
        out and lse.

    Raises:
        ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        ImportError: the compiled library is missing or of another version.
    """
    if out is None or lse is None:
        out, lse = _outputs(q, out, lse)
    lists = (kv_cache, indices, block_table, request_ids, valid_counts)
    extra = (extra_kv_cache, extra_indices, extra_block_table, extra_valid_counts)
    _decode(q, (q, q_rope, *lists, *extra, sinks, workspace, out, lse, softmax_scale, num_sms, empty_lse))
    return out, lse


def _outputs(q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The given outputs, and new ones in place of None."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q: wanted a tensor, got {type_name(q)}")
    if q.dim() != 3:
        raise ValueError(f"q: wanted shape [tokens, heads, 576 or 512], got {list(q.shape)}")
    if out is None:
        out = q.new_empty(*q.shape[:2], LATENT_DIM)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse

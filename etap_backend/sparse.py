"""The public call of sparse attention, where every query token has a list of the cache rows that it attends to."""

import functools
import math

import torch
from torch import Tensor

from etap_backend._library import library
from etap_backend._operator import Operator, compiled, schema, type_name
from etap_backend.calls import SparseCall
from etap_backend.cpu import sparse as cpu_sparse
from etap_backend.limits import LATENT_DIM
from etap_backend.schedule import DecodeShape, count, sms_of

CPU_SMS = 132
"""CTAs that the CPU's executor divides a call for: an H200's, so that it walks the same pieces."""


@functools.cache
def sparse_decode_shape(heads: int) -> DecodeShape:
    """Ask the library; raises ImportError where there is none, and ValueError for less than one head."""
    return DecodeShape(*library().sparse_decode_shape(heads))


def sparse_workspace_floats(heads: int, num_sms: int) -> int:
    """Floats that the workspace of a `sparse_mla_decode` may have to have, whatever its tokens, caches and lists.

    Args:
        heads: query heads on this GPU.
        num_sms: CTAs that the calls are launched on.

    Raises:
        ValueError, TypeError: a count is below 1 or no int; ImportError: no library, or one of another version.
    """
    shape = sparse_decode_shape(count("heads", heads))
    return shape.workspace_floats(shape.partitions(count("num_sms", num_sms)))


def device_sms(device: torch.device) -> int:
    """CTAs that a call on a device is divided for."""
    return sms_of(device, CPU_SMS)


def _as_the_library_takes_it(
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
    """The operator's arguments with a workspace, and with partitions in place of num_sms."""
    heads = q.shape[1] if q.dim() == 3 else 0
    shape = sparse_decode_shape(max(1, heads))
    partitions = shape.partitions(device_sms(q.device) if num_sms is None else count("num_sms", num_sms))
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
    compiled("sparse_decode")(*_as_the_library_takes_it(*arguments))


def _on_cpu(*arguments) -> None:
    call = _as_the_library_takes_it(*arguments)
    compiled("check_sparse_decode")(*call)
    cpu_sparse.decode(call)


# The workspace and the partitions are found behind the operator: torch.compile cannot look into the library.
_decode = Operator(
    schema("sparse_mla_decode", _as_the_library_takes_it, written=("workspace", "out", "lse")), _on_cuda, _on_cpu
)


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

    Tokens are independent: whether they are requests' next ones, drafts to verify or a prompt's, what each may see is
    in its list. An entry that names no row is as if it were not there: a negative one, a row past the cache's last, a
    position past the block table or on a page that is not in the cache, any entry of a token of no known request. Such
    entries may be anywhere, and nothing is read for them. A row that is named twice counts twice. A token whose lists
    name no row gets output 0 and log-sum-exp `empty_lse`. Cache rows that no list names may hold anything.

    A token may have a second list, of rows of a second cache, as DeepSeek-V4 keeps its window and its compressed
    entries; one softmax is over the rows of both. The caches have rows of the same format, and pages of any two sizes.

    The work is divided by shapes and by each token's own counts, so that no schedule is built, a wide list costs what
    its valid entries cost, and a token's result has the same bits whatever the other tokens of a call of the same shape
    hold. On CUDA tensors the compiled kernels run on the current stream,
    with no allocation when `out`, `lse` and `workspace` are given and no copy to the host; on CPU tensors
    `etap_backend.cpu.sparse` runs. Nothing of it is recorded for gradients. `out`, `lse` and
    `workspace` share no memory with each other, queries, cache or lists.

    A row of DeepSeek-V3.2's FP8 cache has 656 bytes: 512 elements in e4m3, 4 float32 scales, each of 128 of them, and
    64 rope elements in bfloat16. An element stands for itself times its scale, which may be any number up to 2^100 in
    size. Rows without rope (512 wide, FP8 ones of 528 bytes, which end with the scales) go with queries without it.

    A page of DeepSeek-V4's cache holds its rows' data, 576 bytes each (448 elements in e4m3 and 64 in bfloat16), and
    behind all of them 8 bytes of scales for each row: 7 powers of two, the byte b for 2^(b - 127), each of 64 of the
    448 elements, and one byte that is not read. All 512 are both key and value. A tensor of it says 584 bytes a row,
    which is the size of a row and no place of one. An element times its scale is exact from 2^-126 on and may be 0
    below.

    Args:
        q: bfloat16 [tokens, heads, 576], or its latent part [tokens, heads, 512] when q_rope is given or rows have no
            rope. Any strides with a contiguous last dimension and every row at a multiple of 16 bytes.
        kv_cache: bfloat16 [pages, page_size, 576 or 512], or uint8 or float8_e4m3fn [pages, page_size, 656, 528 or, for
            V4's pages, 584]; in either case [pages, page_size, 1, ...], too. Any page_size, at least one page. Rows are
            contiguous and at multiples of 16 bytes, which is what the kernels read at a time; rows and pages may lie
            further apart than their size. Of V4's pages, strides are [any multiple of 16 bytes, 584, 1].
        indices: int32 [tokens, top_k], any top_k. Row of the cache, page * page_size + place in the page; with
            block_table, position in the token's request. Lists may lie apart.
        softmax_scale: factor of the scores before softmax.
        q_rope: bfloat16 [tokens, heads, 64], strides as free as q's.
        block_table: int32 [requests, max_pages]; the page that holds each page_size tokens of a request. Rows may lie
            apart.
        request_ids: int32 [tokens], row of block_table and of extra_block_table for each token; given where one is.
        valid_counts: int32 [tokens]; only so many entries of each list count, from its beginning; none where it is
            negative. All when None.
        extra_kv_cache, extra_indices, extra_block_table, extra_valid_counts: the second cache, rows as kv_cache's, and
            what names rows of it, as of the first; cache and indices are given together. Each list is of rows or of
            positions by itself.
        sinks: float32 [>= heads], natural logarithm: the output is multiplied by 1 / (1 + exp(sink - lse)), lse stays
            as it is. +inf makes the output 0, -inf and None leave it alone.
        workspace: float32 [>= sparse_workspace_floats(heads, num_sms)], contiguous, aligned to 16 bytes; allocated when
            None. Calls that follow each other on one stream may share it.
        num_sms: CTAs to launch; all of the GPU's multiprocessors when None (132 on the CPU).
        out: bfloat16 [tokens, heads, 512], also a slice of a wider buffer: the last dimension contiguous, rows at
            multiples of 16 bytes that do not overlap; allocated when None.
        lse: float32 [tokens, heads], natural logarithm, contiguous; allocated when None.
        empty_lse: log-sum-exp of tokens whose list names no row, -inf or, as FlashMLA has it, +inf.

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
    """Those of the outputs that were not given."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q: wanted a tensor, got {type_name(q)}")
    if q.dim() != 3:
        raise ValueError(f"q: wanted shape [tokens, heads, 576 or 512], got {list(q.shape)}")
    if out is None:
        out = q.new_empty(*q.shape[:2], LATENT_DIM)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse

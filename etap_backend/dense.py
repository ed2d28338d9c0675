"""The public call of dense attention."""

import math

import torch
from torch import Tensor

from etap_backend._operator import Operator, compiled, library_function, schema, type_name
from etap_backend.calls import DenseCall
from etap_backend.cpu import dense as cpu_dense
from etap_backend.limits import LATENT_DIM, dtype_name, output_dtypes
from etap_backend.schedule import BuiltSchedule


def _on_cpu(*arguments) -> None:
    call = DenseCall(*arguments)
    compiled("check_decode")(*call)
    cpu_dense.decode(call)


_decode = Operator(
    schema("mla_decode", DenseCall, written=("workspace", "out", "lse")), library_function("decode"), _on_cpu
)


def _outputs(q: Tensor, out: Tensor | None, lse: Tensor | None, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The given outputs, and new ones in place of None."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q: wanted a tensor, got {type_name(q)}")
    if q.dim() != 4:
        raise ValueError(f"q: wanted shape [batch, s_q, heads, 576 or 512], got {list(q.shape)}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: wanted None or a torch.dtype, got {type_name(out_dtype)}")
    allowed = output_dtypes(q.dtype)
    if out_dtype is not None and out_dtype not in allowed:
        names = " or ".join(map(dtype_name, allowed))
        raise ValueError(
            f"out_dtype: wanted None or {names} for a q of {dtype_name(q.dtype)}, got {dtype_name(out_dtype)}"
        )
    if out is None:
        out = q.new_empty(*q.shape[:3], LATENT_DIM, dtype=out_dtype or allowed[0])
    elif out_dtype is not None and isinstance(out, Tensor) and out.dtype != out_dtype:
        raise ValueError(f"out_dtype: wanted None or {dtype_name(out.dtype)} like out, got {dtype_name(out_dtype)}")
    return out, q.new_empty(q.shape[:3], dtype=torch.float32) if lse is None else lse


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    schedule: BuiltSchedule,
    *,
    softmax_scale: float,
    q_rope: Tensor | None = None,
    rope_cache: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    fp8_math: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    empty_lse: float = -math.inf,
    early_loads: bool = False,
) -> tuple[Tensor, Tensor]:
    """One layer's MLA decode attention over a paged KV cache.

    Causal inside the query block: row t of a request's s_q query tokens sees its first seq_len - s_q + t + 1 tokens. A
    row that sees no token (seq_len 0, for example) gets output 0 and log-sum-exp `empty_lse`. Cache rows past a
    request's length and unused block-table entries may hold anything. On CUDA tensors the compiled kernels run on the
    current stream, without allocating when `out` and `lse` are given and without copying to the host; on CPU tensors
    `etap_backend.cpu.dense` runs. Nothing is recorded for gradients. `out`, `lse` and the workspace must not share
    memory with each other, the queries or the cache.

    An FP8 cache takes half the memory. Its elements are multiplied as float16, which holds them exactly, so that only
    the cache's own rounding is lost; `fp8_math` multiplies them in FP8 and rounds queries and probabilities to 3 bits
    after the leading one.

    Args:
        q: bfloat16 or float16 [batch, s_q, heads, 576], or its latent part [batch, s_q, heads, 512] when q_rope is
            given; also float8_e4m3fn with an FP8 cache. Any strides with a contiguous last dimension and every row at
            a multiple of 16 bytes.
        kv_cache: [pages, page_size, 576] or [pages, page_size, 1, 576], dtype of q or float8_e4m3fn, or its latent part
            [.., 512] when rope_cache is given; at least one page. Any page_size: multiples of 64 are fastest, those of
            16 next, others are gathered row by row; float16 has multiples of 64 alone, and the rope columns behind the
            latent ones. Each row is contiguous, at a multiple of 16 bytes; gaps between
            rows and between pages (stride(1), stride(0)) may be up to 2^40 bytes.
        block_table: int32 [batch, max_pages]; the page of each page_size tokens. Gaps between rows are allowed. A page
            outside the cache among a request's tokens, as behind the table's end, makes its output and log-sum-exp NaN
            on a GPU; the CPU raises ValueError.
        seq_lens: int32 [batch], tokens of each request, new ones included. The result is right for any lengths; the
            work is divided for the lengths that the schedule was built from.
        schedule: what `DecodeSchedule.build` returned this step, for this batch, s_q and number of heads. If that
            schedule was built again since, the results are wrong (on the CPU ValueError is raised). If it shares
            prefixes, block_table and seq_lens must hold what they held in `build`.
        softmax_scale: factor of the scores before softmax.
        q_rope: [batch, s_q, heads, 64], dtype of q, the same freedom of strides.
        rope_cache: [pages, page_size, 64] or [pages, page_size, 1, 64], dtype of kv_cache, the same freedom of strides.
        q_scale: float32 [] or [1] on q's device; the value of an element of a float8_e4m3fn q (and q_rope) is the
            element times q_scale; 1 when None.
        kv_scale: float32 [] or [1] on q's device; the same for a float8_e4m3fn cache.
        fp8_math: with an FP8 cache, multiply in float8_e4m3fn; queries of another type are rounded to it, row by row.
        workspace: float32 [>= DecodeSchedule.max_workspace_floats], contiguous, aligned to 16 bytes; the schedule's
            when None. Calls that follow each other on one stream may share it.
        out: [batch, s_q, heads, 512], contiguous, aligned to 16 bytes; allocated when None. Its dtype is q's; bfloat16
            or float16 when q is float8_e4m3fn.
        lse: float32 [batch, s_q, heads], natural logarithm, contiguous; allocated when None.
        out_dtype: dtype of an output that is allocated: bfloat16 (when None) or float16 when q is float8_e4m3fn, else
            q's. If `out` is given, its dtype.
        empty_lse: log-sum-exp of rows that see no token: -inf, or FlashMLA's +inf.
        early_loads: True promises that the schedule, seq_lens, block_table, kv_scale and all cache rows but those of
            each request's last s_q tokens were written before the preceding kernel on this stream began; for a page
            that requests share, the promise covers each of them. The call then reads them while that kernel ends, if
            that kernel allows it.

    Returns:
        out and lse.

    Raises:
        ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        ImportError: the compiled library is missing or of another version.
    """
    if not isinstance(schedule, BuiltSchedule):
        raise TypeError(f"schedule: wanted what DecodeSchedule.build() returns, got {type_name(schedule)}")
    if out is None or lse is None or out_dtype is not None:
        out, lse = _outputs(q, out, lse, out_dtype)
    workspace = schedule.workspace if workspace is None else workspace
    if workspace is None:
        raise TypeError("workspace: wanted a tensor, got None, and the schedule has none")
    if schedule.page_size is not None and kv_cache.shape[1] != schedule.page_size:
        found = f"{kv_cache.shape[1]}, and the schedule was built for {schedule.page_size}"
        raise ValueError(f"kv_cache: wanted pages of as many tokens as the schedule, got pages of {found}")
    call = DenseCall(
        q,
        q_rope,
        kv_cache,
        rope_cache,
        q_scale,
        kv_scale,
        block_table,
        seq_lens,
        schedule.work_ranges,
        schedule.split_offsets,
        schedule.shared,
        workspace,
        out,
        lse,
        softmax_scale,
        schedule.batch,
        schedule.s_q,
        schedule.num_heads,
        schedule.partitions,
        schedule.row_tile,
        schedule.num_sms,
        fp8_math,
        empty_lse,
        early_loads,
    )
    _decode(q, call)
    return out, lse

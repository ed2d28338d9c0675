"""The public call, and the torch operator behind it."""

import math

import torch
from torch import Tensor

from etap_backend import executor
from etap_backend._library import library
from etap_backend.schedule import DecodeSchedule
from etap_backend.support import DTYPES, FP8, LATENT_DIM

# A hand-made registration: torch.library.custom_op costs several microseconds a call, as much as a short decode step.
_LIBRARY = torch.library.Library("etap_backend", "DEF")
_LIBRARY.define(
    "mla_decode(Tensor q, Tensor? q_rope, Tensor kv_cache, Tensor? q_scale, Tensor? kv_scale, Tensor block_table, "
    "Tensor seq_lens, Tensor work_ranges, Tensor split_offsets, Tensor(a!) workspace, Tensor(b!) out, Tensor(c!) lse, "
    "float softmax_scale, int partitions, bool fp8_math) -> ()",
    # The strides of q, q_rope and kv_cache carry meaning: torch.compile must pass them as they are.
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _decode_on_cuda(q: Tensor, q_rope: Tensor | None, kv_cache: Tensor, *others) -> None:
    if kv_cache.dtype == FP8:
        # As plain bytes: what carries tensors over to the library need not know 8-bit floats.
        q, q_rope, kv_cache = (
            x.view(torch.uint8) if x is not None and x.dtype == FP8 else x for x in (q, q_rope, kv_cache)
        )
    library().decode(q, q_rope, kv_cache, *others)


_LIBRARY.impl("mla_decode", _decode_on_cuda, "CUDA")
_LIBRARY.impl("mla_decode", executor.decode, "CPU")
torch.library.register_fake("etap_backend::mla_decode", lambda *arguments: None, lib=_LIBRARY)
_decode = torch.ops.etap_backend.mla_decode.default


def _check_call(q: Tensor, schedule: DecodeSchedule, softmax_scale: float) -> None:
    """What the operator itself cannot see: it is given the schedule's buffers, not what they were built for."""
    if q.dim() != 4:
        raise ValueError(f"q: wanted shape [batch, s_q, heads, 576 or 512], got {list(q.shape)}")
    batch, s_q, heads, _ = q.shape
    if schedule.batch is None:
        raise ValueError("schedule: wanted one that was built, got one whose build() was never called")
    if (batch, s_q, heads) != (schedule.batch, schedule.s_q, schedule.num_heads):
        planned = f"batch {schedule.batch}, s_q {schedule.s_q}, {schedule.num_heads} heads"
        raise ValueError(f"schedule: wanted one for q's batch {batch}, s_q {s_q}, {heads} heads, got {planned}")
    if q.device != schedule.device:
        raise ValueError(f"schedule: wanted one on {q.device} like q, got one on {schedule.device}")
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: wanted a positive finite number, got {softmax_scale}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_types(q: Tensor, q_rope: Tensor | None, kv_cache: Tensor, fp8_math: bool) -> None:
    """The types of what may be FP8, which the compiled library is given as plain bytes."""
    fp8_cache = kv_cache.dtype == FP8
    if q.dtype not in DTYPES and not (fp8_cache and q.dtype == FP8):
        wanted = "bfloat16 or float16, or float8_e4m3fn with an FP8 cache"
        raise TypeError(f"q: wanted {wanted}, got {_name(q.dtype)}")
    if q_rope is not None and q_rope.dtype != q.dtype:
        raise TypeError(f"q_rope: wanted {_name(q.dtype)} like q, got {_name(q_rope.dtype)}")
    if not fp8_cache and kv_cache.dtype != q.dtype:
        raise TypeError(f"kv_cache: wanted {_name(q.dtype)} like q or float8_e4m3fn, got {_name(kv_cache.dtype)}")
    if fp8_math and not fp8_cache:
        raise ValueError(f"fp8_math: wanted False beside a kv_cache of {_name(kv_cache.dtype)}, got True")


def _check_scale(name: str, scale: Tensor, scaled_name: str, scaled: Tensor) -> None:
    if scaled.dtype != FP8:
        raise ValueError(f"{name}: wanted None beside a {scaled_name} of {_name(scaled.dtype)}, got a tensor")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: wanted float32, got {_name(scale.dtype)}")
    if scale.dim() > 1 or scale.numel() != 1:
        raise ValueError(f"{name}: wanted one element, shape [] or [1], got {list(scale.shape)}")
    if scale.device != scaled.device:
        raise ValueError(f"{name}: wanted a tensor on {scaled.device}, got one on {scale.device}")


def _out_dtype(q: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """The type of an output that is allocated."""
    allowed = DTYPES if q.dtype == FP8 else (q.dtype,)
    if out is not None and out.dtype not in allowed:
        names = " or ".join(map(_name, allowed))
        raise TypeError(f"out: wanted {names} for a q of {_name(q.dtype)}, got {_name(out.dtype)}")
    if out_dtype is not None and out_dtype not in allowed:
        names = " or ".join(map(_name, allowed))
        raise ValueError(f"out_dtype: wanted None or {names} for a q of {_name(q.dtype)}, got {_name(out_dtype)}")
    if out_dtype is not None and out is not None and out.dtype != out_dtype:
        raise ValueError(f"out_dtype: wanted None or {_name(out.dtype)} like out, got {_name(out_dtype)}")
    return out_dtype or allowed[0]


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    schedule: DecodeSchedule,
    *,
    softmax_scale: float,
    q_rope: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    fp8_math: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer's MLA decode attention over a paged KV cache.

    Causal inside the query block: row t of a request's s_q query tokens sees its first seq_len - s_q + t + 1 tokens. A
    row that sees none (seq_len 0, say) gets output 0 and log-sum-exp -inf. Cache rows past a request's length and
    unused block-table entries may hold anything. On CUDA tensors the compiled kernels run on the current stream, with
    no allocation when `out` and `lse` are given and no copy to the host; on CPU tensors `etap_backend.executor` runs.

    An FP8 cache takes half the memory. Its elements are multiplied as float16, which holds each of them exactly, so
    that nothing is lost but what the cache's own rounding lost; `fp8_math` multiplies them as they are, which needs
    queries and probabilities in 3 bits after the leading one.

    Args:
        q: bfloat16 or float16 [batch, s_q, heads, 576], or its latent part [batch, s_q, heads, 512] when q_rope is
            given; float8_e4m3fn, too, where the cache has it. Any strides with a contiguous last dimension and every
            row at a multiple of 16 bytes.
        kv_cache: [pages, page_size, 576] or [pages, page_size, 1, 576], dtype of q or float8_e4m3fn; page_size a
            multiple of 64. Rows are contiguous; pages may lie further apart than their size (stride(0)).
        block_table: int32 [batch, max_pages]; the page that holds each page_size tokens. Rows may lie apart.
        seq_lens: int32 [batch], tokens of each request, the new ones included; those that the schedule was built from.
        schedule: built this step for this batch, s_q and number of heads.
        softmax_scale: factor of the scores before softmax.
        q_rope: [batch, s_q, heads, 64], dtype of q, strides as free as q's.
        q_scale: float32 [] or [1] on q's device; what an element of a float8_e4m3fn q (and q_rope) is multiplied by
            for what it stands for, 1 when None.
        kv_scale: float32 [] or [1] on q's device; the same for a float8_e4m3fn cache.
        fp8_math: with an FP8 cache, multiply in float8_e4m3fn; queries of another type are rounded to it, row by row.
        out: [batch, s_q, heads, 512], contiguous; allocated when None. Its dtype is q's; bfloat16 or float16 when q is
            float8_e4m3fn.
        lse: float32 [batch, s_q, heads], natural logarithm, contiguous; allocated when None.
        out_dtype: dtype of an output that is allocated: bfloat16 (when None) or float16 when q is float8_e4m3fn, else
            q's. If `out` is given, its dtype.

    Returns:
        out and lse.

    Raises:
        ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        ImportError: CUDA tensors, and the compiled library is missing or of another version.
    """
    _check_call(q, schedule, softmax_scale)
    if kv_cache.dim() == 4:
        if kv_cache.shape[2] != 1:
            raise ValueError(f"kv_cache: wanted shape [pages, page_size, 1, 576], got {list(kv_cache.shape)}")
        kv_cache = kv_cache.squeeze(2)
    _check_types(q, q_rope, kv_cache, fp8_math)
    if q_scale is not None:
        _check_scale("q_scale", q_scale, "q", q)
    if kv_scale is not None:
        _check_scale("kv_scale", kv_scale, "kv_cache", kv_cache)
    dtype = _out_dtype(q, out, out_dtype)
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], q.shape[2], LATENT_DIM, dtype=dtype)
    if lse is None:
        lse = q.new_empty(q.shape[0], q.shape[1], q.shape[2], dtype=torch.float32)
    _decode(
        q,
        q_rope,
        kv_cache,
        q_scale,
        kv_scale,
        block_table,
        seq_lens,
        schedule.work_ranges,
        schedule.split_offsets,
        schedule.workspace,
        out,
        lse,
        softmax_scale,
        schedule.partitions,
        fp8_math,
    )
    return out, lse

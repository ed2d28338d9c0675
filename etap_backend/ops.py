"""The public call, and the torch operator behind it."""

import math

import torch
from torch import Tensor

from etap_backend import executor
from etap_backend._library import library
from etap_backend.schedule import DecodeSchedule
from etap_backend.support import LATENT_DIM

# A hand-made registration: torch.library.custom_op costs several microseconds a call, as much as a short decode step.
_LIBRARY = torch.library.Library("etap_backend", "DEF")
_LIBRARY.define(
    "mla_decode(Tensor q, Tensor? q_rope, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor work_ranges, "
    "Tensor split_offsets, Tensor(a!) workspace, Tensor(b!) out, Tensor(c!) lse, float softmax_scale, int partitions) "
    "-> ()",
    # The strides of q, q_rope and kv_cache carry meaning: torch.compile must pass them as they are.
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _decode_on_cuda(*arguments) -> None:
    library().decode(*arguments)


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


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    schedule: DecodeSchedule,
    *,
    softmax_scale: float,
    q_rope: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer's MLA decode attention over a paged KV cache.

    Causal inside the query block: row t of a request's s_q query tokens sees its first seq_len - s_q + t + 1 tokens. A
    row that sees none (seq_len 0, say) gets output 0 and log-sum-exp -inf. Cache rows past a request's length and
    unused block-table entries may hold anything. On CUDA tensors the compiled kernels run on the current stream, with
    no allocation when `out` and `lse` are given and no copy to the host; on CPU tensors `etap_backend.executor` runs.

    Args:
        q: bfloat16 or float16 [batch, s_q, heads, 576], or its latent part [batch, s_q, heads, 512] when q_rope is
            given. Any strides with a contiguous last dimension and every row at a multiple of 16 bytes.
        kv_cache: [pages, page_size, 576] or [pages, page_size, 1, 576], dtype of q; page_size a multiple of 64. Rows
            are contiguous; pages may lie further apart than their size (stride(0)).
        block_table: int32 [batch, max_pages]; the page that holds each page_size tokens. Rows may lie apart.
        seq_lens: int32 [batch], tokens of each request, the new ones included; those that the schedule was built from.
        schedule: built this step for this batch, s_q and number of heads.
        softmax_scale: factor of the scores before softmax.
        q_rope: [batch, s_q, heads, 64], dtype of q, strides as free as q's.
        out: [batch, s_q, heads, 512], dtype of q, contiguous; allocated when None.
        lse: float32 [batch, s_q, heads], natural logarithm, contiguous; allocated when None.

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
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], q.shape[2], LATENT_DIM)
    if lse is None:
        lse = q.new_empty(q.shape[0], q.shape[1], q.shape[2], dtype=torch.float32)
    _decode(
        q,
        q_rope,
        kv_cache,
        block_table,
        seq_lens,
        schedule.work_ranges,
        schedule.split_offsets,
        schedule.workspace,
        out,
        lse,
        softmax_scale,
        schedule.partitions,
    )
    return out, lse

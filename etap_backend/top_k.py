"""The public call of the sparse indexer's selection: which positions have a row's largest logits."""

import torch
from torch import Tensor

from etap_backend._operator import Operator, check_tensor, compiled, library_function, schema
from etap_backend.calls import TopKCall
from etap_backend.cpu import top_k as cpu_top_k
from etap_backend.limits import MAX_SMS, count
from etap_backend.schedule import sms_of


def _on_cpu(*arguments) -> None:
    compiled("check_top_k")(*arguments)
    cpu_top_k.select(TopKCall(*arguments))


_select = Operator(schema("sparse_top_k", TopKCall, written=("out",)), library_function("top_k"), _on_cpu)


def sparse_top_k(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    *,
    block_table: Tensor | None = None,
    page_size: int = 1,
    early_lengths: bool = False,
    num_sms: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The positions of each row's k largest logits, in ascending order.

    The selection is exact. Of equal logits the lowest positions are taken. 0 and -0 are equal, +inf is above all
    numbers, and NaN is below all, -inf too. A row with at most k logits gets all its positions, and none of its logits
    is read; -1 stands behind them. What lies behind a row's length may be anything. A row's result does not depend on
    the other rows or on the GPU.

    On CUDA tensors one kernel runs on the current stream. It allocates nothing when `out` is given, needs no workspace
    and copies nothing to the host. Its grid depends on shapes alone, and lengths are read on the device, so a CUDA
    graph may be replayed with other lengths. It may start before the preceding kernel ends and waits for it before it
    reads logits. On CPU tensors `etap_backend.cpu.top_k` runs.

    Args:
        logits: float32 [rows, width], any stride between rows, a contiguous last dimension.
        lengths: int32, contiguous: [rows], how many leading logits each row has; or [requests], where each request has
            n = rows / requests consecutive rows, its query tokens, and token t has length - n + 1 + t. Lengths outside
            of 0 to width count as the nearest of these.
        k: how many positions to select, at least 1.
        block_table: int32 [rows] or [requests] by pages, a contiguous last dimension: the result holds cache rows,
            page * page_size + offset, in place of positions, -1 for one past the table. Entries of pages of which no
            position is selected are not read.
        page_size: tokens of a page of the block table.
        early_lengths: whether lengths were written before the kernel that precedes this call on the stream began. They
            are then read while it still runs.
        num_sms: CTAs that rows are spread over; all of the GPU's multiprocessors when None.
        out: int32 [rows, k], a contiguous last dimension; allocated when None.

    Returns:
        out.

    Raises:
        ValueError, TypeError: an argument is not as described; the text names it, what was wanted and what came.
        ImportError: the compiled library is missing or of another version.
    """
    check_tensor("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits: wanted shape [rows, width], got {list(logits.shape)}")
    rows = logits.shape[0]
    if out is None:
        out = logits.new_empty(rows, count("k", k), dtype=torch.int32)
    elif check_tensor("out", out).shape != (rows, k):
        raise ValueError(f"out: wanted shape [{rows}, {k}], got {list(out.shape)}")
    num_sms = sms_of(logits.device) if num_sms is None else count("num_sms", num_sms, MAX_SMS)
    _select(logits, TopKCall(logits, lengths, block_table, out, page_size, num_sms, early_lengths))
    return out

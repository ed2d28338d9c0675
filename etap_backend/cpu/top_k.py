"""Top-k of logits in plain torch on the CPU: what the kernel selects, in the same order."""

import torch
from torch import Tensor

from etap_backend.calls import TopKCall


def row_lengths(lengths: Tensor, rows: int, width: int) -> Tensor:
    """How many logits each row has, int64 [rows], from each row's own lengths or from each request's."""
    each = max(1, rows // max(1, len(lengths)))
    token = torch.arange(rows) % each
    return (lengths.long().repeat_interleave(each) - each + 1 + token).clamp(0, width)


def highest(logits: Tensor, k: int) -> Tensor:
    """Positions of the k highest of one row's logits in their order; of equal ones the lowest positions are taken."""
    # No number is below -inf: NaN comes last by a sort of its own. -0 equals 0 in torch's comparisons.
    numbers, nan = (~logits.isnan()).nonzero()[:, 0], logits.isnan().nonzero()[:, 0]
    order = logits[numbers].sort(descending=True, stable=True).indices
    return torch.cat([numbers[order], nan])[:k].sort().values


def on_pages(positions: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Cache rows of a request's positions, -1 past its block table."""
    page = positions // page_size
    there = page < len(pages)
    found = torch.full_like(positions, -1)
    found[there] = pages[page[there]].long() * page_size + positions[there] % page_size
    return found


@torch.inference_mode()
def select(call: TopKCall) -> None:
    """Fill `out` as the library's `check_top_k` allowed it."""
    (rows, width), k, table = call.logits.shape, call.out.shape[1], call.block_table
    for row, length in enumerate(row_lengths(call.lengths, rows, width).tolist()):
        positions = torch.arange(length) if length <= k else highest(call.logits[row, :length], k)
        if table is not None:
            positions = on_pages(positions, table[row // (rows // len(table))], call.page_size)
        call.out[row, : len(positions)] = positions.int()
        call.out[row, len(positions) :] = -1

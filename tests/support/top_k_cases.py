"""Rows of logits for top-k, and what a selection from them must be.

What lies behind a row's end is +inf or NaN: a selection that takes or counts it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Law = Callable[[int, torch.Generator], Tensor]
INF, NAN = float("inf"), float("nan")


def normal(n: int, draw: torch.Generator) -> Tensor:
    return torch.randn(n, generator=draw)


def signs_of_zero(n: int, draw: torch.Generator) -> Tensor:
    return torch.where(torch.rand(n, generator=draw) < 0.5, 0.0, -0.0)


def plateau(n: int, draw: torch.Generator) -> Tensor:
    """Mostly zeros of both signs, as where no head's product is positive; few logits are above."""
    high = normal(n, draw)
    return torch.where(high > 2.5, high, signs_of_zero(n, draw))


def few_values(n: int, draw: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, (n,), generator=draw).float()


def neighbours(n: int, draw: torch.Generator) -> Tensor:
    """Consecutive float32 numbers, shuffled: thousands in one bin of a coarse histogram."""
    return (torch.randperm(n, generator=draw).int() + 0x3F800000).view(torch.float32)


def neighbouring_ties(n: int, draw: torch.Generator) -> Tensor:
    return (torch.randint(0, 5, (n,), generator=draw).int() + 0x40490000).view(torch.float32)


def negative(n: int, draw: torch.Generator) -> Tensor:
    return -normal(n, draw).abs() - 1e-3


def subnormal(n: int, draw: torch.Generator) -> Tensor:
    return torch.randint(-(1 << 22), 1 << 22, (n,), generator=draw).float() * 2.0**-149


def every_number(n: int, draw: torch.Generator) -> Tensor:
    """Any bits at all, NaN and infinities among them."""
    return torch.randint(-(1 << 31), 1 << 31, (n,), generator=draw).int().view(torch.float32)


def infinities(n: int, draw: torch.Generator) -> Tensor:
    """A third each of +inf, -inf and numbers."""
    which = torch.randint(0, 3, (n,), generator=draw)
    return torch.where(which == 0, INF, torch.where(which == 1, -INF, normal(n, draw)))


def mostly_nan(n: int, draw: torch.Generator) -> Tensor:
    """So many NaN that some are selected, and -inf, which comes before them."""
    drawn = torch.rand(n, generator=draw)
    return torch.where(drawn < 0.97, NAN, torch.where(drawn < 0.98, -INF, normal(n, draw)))


def rising(n: int, draw: torch.Generator) -> Tensor:
    return torch.arange(n).float()


def falling(n: int, draw: torch.Generator) -> Tensor:
    return -torch.arange(n).float() * 1e30


def sampled(n: int) -> Tensor:
    """Positions of the logits that the kernel takes its bounds from, as it works them out."""
    part = torch.arange(256)
    return ((part << 24 | part * 0x9E3779 & 0xFFFFFF) * n) >> 32


def sampled_high(n: int, draw: torch.Generator) -> Tensor:
    return normal(n, draw).index_fill(0, sampled(n), 10)


def sampled_low(n: int, draw: torch.Generator) -> Tensor:
    return normal(n, draw).index_fill(0, sampled(n), -10)


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        *(normal, signs_of_zero, plateau, few_values, neighbours, neighbouring_ties, negative, subnormal),
        *(every_number, infinities, mostly_nan, rising, falling, sampled_high, sampled_low),
    )
}


@dataclass(frozen=True)
class TopKCase:
    """Rows of these lengths in logits of a width, or the longest row's."""

    lengths: Sequence[int]
    k: int = 512
    law: str = "normal"
    width: int = 0
    stride: int = 0  # between rows; 0: the width, rounded up to 256 as DeepGEMM does
    offset: int = 0  # of the first row in its memory, in elements
    behind: float = INF  # what lies behind a row's end
    seed: int = 0

    def logits(self) -> Tensor:
        """float32 [rows, width] on the CPU, with `behind` in all that no row holds."""
        draw = torch.Generator().manual_seed(self.seed)
        width = self.width or max(1, *self.lengths)
        stride = self.stride or -(-width // 256) * 256
        memory = torch.full((self.offset + stride * len(self.lengths) + width,), self.behind)
        logits = memory.as_strided((len(self.lengths), width), (stride, 1), self.offset)
        for row, length in zip(logits, self.lengths, strict=True):
            row[:length] = LAWS[self.law](length, draw)
        return logits


def expected(logits: Tensor, lengths: Sequence[int], k: int) -> Tensor:
    """The selection by float64 keys in numpy, int32 [rows, k] on the CPU."""
    out = np.full((len(lengths), k), -1, np.int32)
    with np.errstate(invalid="ignore"):  # some NaN are signalling
        keys = logits.cpu().numpy().astype(np.float64)
    for row, (values, length) in enumerate(zip(keys, lengths, strict=True)):
        values = values[:length]
        nan = np.isnan(values)
        # By NaN last, then by value from above, then by position; numpy's zeros of both signs are equal.
        order = np.lexsort((np.arange(length), -np.where(nan, 0, values), nan))[:k]
        out[row, : len(order)] = np.sort(order)
    return torch.from_numpy(out)


def on_pages(positions: Tensor, tables: Tensor, page_size: int, rows_per_table: int = 1) -> Tensor:
    """The cache rows of expected positions; -1 stays, and stands for a position past the table."""
    out = torch.full_like(positions, -1)
    for row, column in (positions >= 0).nonzero().tolist():
        page, offset = divmod(int(positions[row, column]), page_size)
        if page < tables.shape[1]:
            out[row, column] = tables[row // rows_per_table, page] * page_size + offset
    return out

"""The tensors of a benchmark's rows: queries, caches that L2 does not serve, and the true output on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from etap_backend.lab.bench import kernels
from etap_backend.lab.bench.grids import PAGE_SIZE, SparseWorkload, Workload
from etap_backend.lab.bench.kernels import Copy, Inputs, SparseInputs
from etap_backend.lab.bench.method import KV_SCALE, MOST_COPIES, ROTATED_BYTES
from etap_backend.lab.bench.providers import Provider
from etap_backend.limits import FP8, HEAD_DIM, LATENT_DIM, SCALE_DIM
from etap_backend.reference import mla_decode_reference, sparse_mla_decode_reference

DEVICE = "cuda"
SOFTMAX_SCALE = HEAD_DIM**-0.5
CHUNK_PAGES = 4096  # what is rounded to FP8 at a time


def copies_of(workload: Workload) -> int:
    """Of the cache, or lists of a sparse call that have no row in common, unless one call names all rows there are."""
    most = workload.context // workload.tokens if isinstance(workload, SparseWorkload) else MOST_COPIES
    return max(1, min(MOST_COPIES, most, -(-int(ROTATED_BYTES) // workload.kv_bytes)))


class Pool(ABC):
    """One buffer of random cache pages for all rows of a run, and what rows have of it."""

    def __init__(self, pages: int):
        self.pages = torch.empty(pages, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE).normal_()
        self._others: dict[torch.dtype, Tensor] = {}

    def pages_in(self, dtype: torch.dtype) -> Tensor:
        if dtype == self.pages.dtype:
            return self.pages
        if dtype not in self._others:
            one = self.converted(self.pages[:1], dtype)
            pages = one.new_empty(len(self.pages), *one.shape[1:])
            for to, chunk in zip(pages.split(CHUNK_PAGES), self.pages.split(CHUNK_PAGES), strict=True):
                to.copy_(self.converted(chunk, dtype))
            self._others[dtype] = pages
        return self._others[dtype]

    @abstractmethod
    def converted(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """These bfloat16 pages in another type."""

    @abstractmethod
    def cache_dtype(self, workload: Workload, provider: Provider) -> torch.dtype:
        """The type of the cache that a kernel of a row is given."""

    @abstractmethod
    def inputs(self, workload: Workload, num_sms: int | None) -> Inputs | SparseInputs:
        """What every kernel of a row is given."""

    def with_cache(self, inputs: Inputs | SparseInputs, dtype: torch.dtype) -> Inputs | SparseInputs:
        """These inputs beside a cache of that type."""
        return replace(inputs, kv_dtype=dtype)

    @abstractmethod
    def copies(self, workload: Workload, dtype: torch.dtype) -> list[Copy]:
        """What calls take in turns, the same for every kernel."""

    @abstractmethod
    def truth(self, inputs: Inputs | SparseInputs, copy: Copy) -> Tensor:
        """The output in float64 on what the cache stands for."""


class DensePool(Pool):
    """The buffer is cut into copies for the row at hand."""

    def __init__(self, workloads: tuple[Workload, ...]):
        super().__init__(-(-max(self._rows(workload) * copies_of(workload) for workload in workloads) // PAGE_SIZE))

    @staticmethod
    def _pages_of_requests(workload: Workload) -> list[int]:
        return [-(-length // workload.page_size) for length in workload.lengths]

    def _rows(self, workload: Workload) -> int:
        return sum(self._pages_of_requests(workload)) * workload.page_size

    def converted(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return kernels.to_fp8(pages, KV_SCALE) if dtype == FP8 else pages.to(dtype)

    def cache_dtype(self, workload: Workload, provider: Provider) -> torch.dtype:
        if workload.fp8 and not provider.bf16_cache:
            return FP8
        return getattr(torch, workload.dtype)

    def inputs(self, workload: Workload, num_sms: int | None) -> Inputs:
        batch = len(workload.lengths)
        pages = self._pages_of_requests(workload)
        shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        block_table = torch.zeros(batch, max(pages), dtype=torch.int32)
        for row, ids in zip(block_table, shuffled.split(pages), strict=True):
            row[: len(ids)] = ids
        q = torch.randn(batch, workload.s_q, workload.heads, HEAD_DIM, device=DEVICE)
        return Inputs(
            q=q.to(getattr(torch, workload.dtype)),
            block_table=block_table.to(DEVICE),
            seq_lens=torch.tensor(workload.lengths, dtype=torch.int32, device=DEVICE),
            lengths=workload.lengths,
            page_size=workload.page_size,
            softmax_scale=SOFTMAX_SCALE,
            num_sms=num_sms,
        )

    def with_cache(self, inputs: Inputs, dtype: torch.dtype) -> Inputs:
        return replace(inputs, kv_dtype=dtype, kv_scale=KV_SCALE if dtype == FP8 else None)

    def copies(self, workload: Workload, dtype: torch.dtype) -> list[Copy]:
        rows = self.pages_in(dtype).flatten(0, 1)[: self._rows(workload) * copies_of(workload)]
        return [(part.unflatten(0, (-1, workload.page_size)),) for part in rows.split(self._rows(workload))]

    def truth(self, inputs: Inputs, copy: Copy) -> Tensor:
        scale = inputs.kv_scale_tensor
        table, lengths = inputs.block_table, inputs.seq_lens
        return mla_decode_reference(inputs.q, *copy, table, lengths, inputs.softmax_scale, kv_scale=scale)[0]


class SparsePool(Pool):
    """Every row has the same cache, and lists of its own."""

    def __init__(self, workloads: tuple[SparseWorkload, ...]):
        super().__init__(max(workload.context for workload in workloads) // PAGE_SIZE)

    def converted(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return fp8_rows(pages)

    def cache_dtype(self, workload: SparseWorkload, provider: Provider) -> torch.dtype:
        return torch.uint8 if workload.fp8 else torch.bfloat16

    def inputs(self, workload: SparseWorkload, num_sms: int | None) -> SparseInputs:
        q = torch.randn(len(workload.lengths), workload.heads, HEAD_DIM, device=DEVICE)
        return SparseInputs(q.to(torch.bfloat16), workload.top_k, SOFTMAX_SCALE, num_sms)

    def copies(self, workload: SparseWorkload, dtype: torch.dtype) -> list[Copy]:
        pages = self.pages_in(dtype)[: workload.context // PAGE_SIZE]
        return [(pages, lists) for lists in lists_of(workload)]

    def truth(self, inputs: SparseInputs, copy: Copy) -> Tensor:
        return sparse_mla_decode_reference(inputs.q, *copy, softmax_scale=inputs.softmax_scale)[0]


def pool_of(workloads: tuple[Workload, ...]) -> Pool:
    """The pool of a run, whose rows are all of one call."""
    return (SparsePool if isinstance(workloads[0], SparseWorkload) else DensePool)(workloads)


def fp8_rows(rows: Tensor) -> Tensor:
    """bfloat16 [..., 576] as uint8 [..., 656], a group's scale being its largest magnitude / 448, as in vLLM 0.26."""
    groups = rows[..., :LATENT_DIM].unflatten(-1, (-1, SCALE_DIM)).float()
    scales = groups.abs().amax(dim=-1) / 448
    values = (groups / scales.unsqueeze(-1)).to(FP8).flatten(-2)
    parts = (values, scales, rows[..., LATENT_DIM:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def lists_of(workload: SparseWorkload) -> tuple[Tensor, ...]:
    """int32 [tokens, top_k] for each copy: pieces of as many permutations of the cache's rows as it takes."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens = len(workload.lengths)
    whole = workload.context // workload.top_k  # lists of a permutation: a row is never twice in one
    drawn = []
    for _ in range(-(-tokens * copies_of(workload) // whole)):
        rows = torch.randperm(workload.context, generator=generator, device=DEVICE, dtype=torch.int32)
        drawn.append(rows[: whole * workload.top_k].view(whole, workload.top_k))
    return torch.cat(drawn)[: tokens * copies_of(workload)].split(tokens)

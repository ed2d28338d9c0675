"""The tensors of a benchmark's rows: queries, caches that L2 does not serve, and the true output on them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.kernels import kernels
from bench.kernels.grids import PAGE_SIZE, SparseWorkload, V4Workload, Workload
from bench.kernels.kernels import Copy, Inputs, SparseInputs, V4Inputs
from bench.kernels.providers import Provider
from etap_backend.limits import FP8, HEAD_DIM, LATENT_DIM, SCALE_DIM, V4_NOPE_DIM, V4_SCALE_DIM
from etap_backend.reference import mla_decode_reference, sparse_mla_decode_reference

DEVICE = "cuda"
ROTATED_BYTES = 400e6  # that calls of a graph walk over together; an H200's L2 holds 60 MB
MOST_COPIES = 512
KV_SCALE = 0.0125  # of FP8 caches: their largest number stands for 5.6 standard deviations
SOFTMAX_SCALE = HEAD_DIM**-0.5
CHUNK_PAGES = 4096  # what is rounded to FP8 at a time


def copies_of(workload: Workload) -> int:
    """Of the cache, or lists of a sparse call that have no row in common, unless one call names all rows there are."""
    most = workload.context // max(1, workload.drawn) if isinstance(workload, SparseWorkload) else MOST_COPIES
    return max(1, min(MOST_COPIES, most, -(-int(ROTATED_BYTES) // workload.kv_bytes)))


AnyInputs = Inputs | SparseInputs | V4Inputs


class Pool:
    """One buffer of random cache pages for all rows of a run, and what rows have of it.

    Each kind has besides `converted(pages, dtype)`, these bfloat16 pages in another type; `inputs(workload, num_sms)`,
    what every kernel of a row is given; `copies(workload, dtype)`, what calls take in turns, the same for every kernel;
    and `truth(inputs, copy)`, the output in float64 on what the cache stands for.
    """

    def __init__(self, pages: int, width: int = HEAD_DIM):
        self.pages = torch.empty(pages, PAGE_SIZE, width, dtype=torch.bfloat16, device=DEVICE).normal_()
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

    def cache_dtype(self, workload: Workload, provider: Provider) -> torch.dtype:
        """The type of the cache that a kernel of a row is given."""
        return torch.uint8 if workload.fp8 else torch.bfloat16

    def with_cache(self, inputs: AnyInputs, dtype: torch.dtype) -> AnyInputs:
        """These inputs beside a cache of that type."""
        return replace(inputs, kv_dtype=dtype)


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

    def inputs(self, workload: SparseWorkload, num_sms: int | None) -> SparseInputs:
        q = torch.randn(len(workload.lengths), workload.heads, HEAD_DIM, device=DEVICE)
        return SparseInputs(q.to(torch.bfloat16), workload.top_k, SOFTMAX_SCALE, num_sms)

    def copies(self, workload: SparseWorkload, dtype: torch.dtype) -> list[Copy]:
        pages = self.pages_in(dtype)[: workload.context // PAGE_SIZE]
        return [(pages, lists) for lists in lists_of(workload)]

    def truth(self, inputs: SparseInputs, copy: Copy) -> Tensor:
        return sparse_mla_decode_reference(inputs.q, *copy, softmax_scale=inputs.softmax_scale)[0]


class V4Pool(Pool):
    """Both caches are the same for every row, a call's lists its own: pairs of pages for the last tokens, rows drawn
    evenly for the compressed ones."""

    def __init__(self, workloads: tuple[V4Workload, ...]):
        context = max(workload.context for workload in workloads)
        super().__init__(2 * context // PAGE_SIZE, LATENT_DIM)

    def converted(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return v4_pages(pages)

    def inputs(self, workload: V4Workload, num_sms: int | None) -> V4Inputs:
        q = torch.randn(len(workload.lengths), workload.heads, LATENT_DIM, device=DEVICE).to(torch.bfloat16)
        sinks = torch.randn(workload.heads, device=DEVICE)
        return V4Inputs(q, workload.window, workload.extra, sinks, LATENT_DIM**-0.5, num_sms)

    def copies(self, workload: V4Workload, dtype: torch.dtype) -> list[Copy]:
        cache, extra_cache = self.pages_in(dtype).chunk(2)
        tokens, generator = len(workload.lengths), torch.Generator(DEVICE).manual_seed(1)
        made = []
        for lists in lists_of(workload, workload.extra) if workload.extra else [None] * copies_of(workload):
            places = workload.context - workload.window + 1
            first = torch.randint(places, (tokens, 1), generator=generator, device=DEVICE, dtype=torch.int32)
            window = first + torch.arange(workload.window, device=DEVICE, dtype=torch.int32)
            made.append((cache, window, None if lists is None else extra_cache, lists))
        return made

    def truth(self, inputs: V4Inputs, copy: Copy) -> Tensor:
        cache, indices, extra_cache, extra_indices = copy
        more = {"extra_kv_cache": extra_cache, "extra_indices": extra_indices, "sinks": inputs.sinks}
        return sparse_mla_decode_reference(inputs.q, cache, indices, inputs.softmax_scale, **more)[0]


def pool_of(workloads: tuple[Workload, ...]) -> Pool:
    """The pool of a run, whose rows are all of one call."""
    return {Workload: DensePool, SparseWorkload: SparsePool, V4Workload: V4Pool}[type(workloads[0])](workloads)


def v4_pages(pages: Tensor) -> Tensor:
    """bfloat16 [pages, page_size, 512] as uint8 [pages, page_size, 584] in DeepSeek-V4's page layout.

    A page holds its rows of 448 e4m3 and 64 bfloat16 first, and behind them 8 bytes per row: 7 exponents of scales,
    each of 64 columns, rounded up so that nothing saturates, and a 0.
    """
    groups = pages[..., :V4_NOPE_DIM].unflatten(-1, (-1, V4_SCALE_DIM)).float()
    exponents = (groups.abs().amax(dim=-1).clamp(min=1e-4) / 448).log2().ceil()
    values = (groups / exponents.exp2().unsqueeze(-1)).to(FP8).flatten(-2).view(torch.uint8)
    data = torch.cat([values, pages[..., V4_NOPE_DIM:].contiguous().view(torch.uint8)], dim=-1)
    scales = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, 1))
    whole = torch.cat([data.flatten(1), scales.flatten(1)], dim=-1)
    return whole.view(*pages.shape[:2], -1)


def fp8_rows(rows: Tensor) -> Tensor:
    """bfloat16 [..., 576] as uint8 [..., 656], a group's scale being its largest magnitude / 448, as in vLLM 0.26."""
    groups = rows[..., :LATENT_DIM].unflatten(-1, (-1, SCALE_DIM)).float()
    scales = groups.abs().amax(dim=-1) / 448
    values = (groups / scales.unsqueeze(-1)).to(FP8).flatten(-2)
    parts = (values, scales, rows[..., LATENT_DIM:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def lists_of(workload: SparseWorkload, entries: int | None = None) -> tuple[Tensor, ...]:
    """int32 [tokens, entries], or [tokens, top_k], for each copy: pieces of as many permutations of the cache's rows as
    it takes."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens, entries = len(workload.lengths), entries or workload.top_k
    whole = workload.context // entries  # lists of a permutation: a row is never twice in one
    drawn = []
    for _ in range(-(-tokens * copies_of(workload) // whole)):
        rows = torch.randperm(workload.context, generator=generator, device=DEVICE, dtype=torch.int32)
        drawn.append(rows[: whole * entries].view(whole, entries))
    return torch.cat(drawn)[: tokens * copies_of(workload)].split(tokens)

"""The tensors of a benchmark: queries, caches too large for L2, lists of rows, and the true output in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.kernels.grids import PAGE_SIZE, V4_WINDOW, Workload
from etap_backend.limits import FP8, HEAD_DIM, LATENT_DIM, SCALE_DIM, V4_NOPE_DIM, V4_SCALE_DIM
from etap_backend.reference import mla_decode_reference, sparse_mla_decode_reference

DEVICE = "cuda"
ROTATED_BYTES = 400e6  # that the calls of a graph read together; an H200's L2 holds 60 MB
MAX_COPIES = 512
KV_SCALE = 0.0125  # of FP8 caches: their largest number stands for 5.6 standard deviations
SOFTMAX_SCALE = HEAD_DIM**-0.5
CHUNK_PAGES = 4096  # converted to FP8 at a time

Copy = tuple[Tensor | None, ...]
"""What differs between the calls of a graph. Dense: one copy of the cache, [pages, page_size, 576]. Sparse: the cache,
bfloat16 [pages, page_size, 576] or uint8 [.., 656], and int32 [tokens, top_k], the rows of each token. DeepSeek-V4:
cache, uint8 [pages, page_size, 584], and list of the last tokens, then cache and list of the compressed ones, or None
twice."""

Call = Callable[..., Tensor]
"""Takes the tensors of a Copy; returns the output, batch * s_q * heads * 512 or tokens * heads * 512 numbers."""


@dataclass(frozen=True)
class Inputs:
    """What a kernel of the dense call gets besides a Copy."""

    q: Tensor  # bfloat16 or float16 [batch, s_q, heads, 576], contiguous
    block_table: Tensor  # int32 [batch, max_pages]
    seq_lens: Tensor  # int32 [batch]
    lengths: tuple[int, ...]  # seq_lens on the host
    page_size: int
    softmax_scale: float
    num_sms: int | None  # CTAs of ETAP's launch; None for the device's multiprocessors
    kv_dtype: torch.dtype = torch.bfloat16
    kv_scale: float | None = None  # of an FP8 cache

    @property
    def kv_scale_tensor(self) -> Tensor | None:
        return None if self.kv_scale is None else torch.tensor([self.kv_scale], device=self.q.device)

    @property
    def query_starts(self) -> Tensor:
        batch, s_q = self.q.shape[:2]
        return torch.arange(batch + 1, dtype=torch.int32, device=self.q.device) * s_q


@dataclass(frozen=True)
class SparseInputs:
    """What a kernel of the sparse call gets besides a Copy."""

    q: Tensor  # bfloat16 [tokens, heads, 576], contiguous
    top_k: int
    softmax_scale: float
    num_sms: int | None
    kv_dtype: torch.dtype = torch.bfloat16  # or uint8 for FP8 rows

    def counts(self, entries: int) -> Tensor:
        return torch.full(self.q.shape[:1], entries, dtype=torch.int32, device=self.q.device)


@dataclass(frozen=True)
class V4Inputs(SparseInputs):
    """What a kernel of DeepSeek-V4's call gets besides a Copy; q is [tokens, heads, 512]."""

    window: int = 0  # entries of each token's list of its last tokens
    extra: int = 0  # entries of its list of compressed tokens
    sinks: Tensor | None = None  # float32 [heads]


AnyInputs = Inputs | SparseInputs


def copies_of(workload: Workload) -> int:
    """Copies of the cache; of a sparse call, lists without a common row, unless one call names every row."""
    wanted = min(MAX_COPIES, -(-int(ROTATED_BYTES) // workload.bytes))
    if workload.call == "dense":
        return wanted
    drawn = len(workload.lengths) * (workload.extra if workload.call == "v4" else workload.lengths[0])
    return max(1, min(wanted, workload.context // max(1, drawn)))


class Pool:
    """One buffer of random cache pages for all rows of a run.

    Subclasses give `convert(pages, dtype)`, bfloat16 pages in another type; `inputs(workload, num_sms)`;
    `copies(workload, dtype)`, which the calls take in turns; and `truth(inputs, copy)`, the output in float64 on the
    rounded cache.
    """

    def __init__(self, pages: int, width: int = HEAD_DIM):
        self.pages = torch.empty(pages, PAGE_SIZE, width, dtype=torch.bfloat16, device=DEVICE).normal_()
        self._converted: dict[torch.dtype, Tensor] = {}

    def pages_in(self, dtype: torch.dtype) -> Tensor:
        """The buffer in a type, converted once."""
        if dtype == self.pages.dtype:
            return self.pages
        if dtype not in self._converted:
            first = self.convert(self.pages[:1], dtype)
            pages = first.new_empty(len(self.pages), *first.shape[1:])
            for to, chunk in zip(pages.split(CHUNK_PAGES), self.pages.split(CHUNK_PAGES), strict=True):
                to.copy_(self.convert(chunk, dtype))
            self._converted[dtype] = pages
        return self._converted[dtype]

    def cache_dtype(self, workload: Workload, bf16_cache: bool = False) -> torch.dtype:
        return torch.uint8 if workload.fp8 else torch.bfloat16

    def with_cache(self, inputs: AnyInputs, dtype: torch.dtype) -> AnyInputs:
        """The inputs for a cache of this type."""
        return replace(inputs, kv_dtype=dtype)


class DensePool(Pool):
    """Cuts the buffer into copies of a row's cache."""

    def __init__(self, workloads: tuple[Workload, ...]):
        super().__init__(-(-max(self._rows(workload) * copies_of(workload) for workload in workloads) // PAGE_SIZE))

    @staticmethod
    def _pages_of_requests(workload: Workload) -> list[int]:
        return [-(-length // workload.page_size) for length in workload.lengths]

    def _rows(self, workload: Workload) -> int:
        return sum(self._pages_of_requests(workload)) * workload.page_size

    def convert(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return to_fp8(pages, KV_SCALE) if dtype == FP8 else pages.to(dtype)

    def cache_dtype(self, workload: Workload, bf16_cache: bool = False) -> torch.dtype:
        return FP8 if workload.fp8 and not bf16_cache else getattr(torch, workload.dtype)

    def with_cache(self, inputs: Inputs, dtype: torch.dtype) -> Inputs:
        return replace(inputs, kv_dtype=dtype, kv_scale=KV_SCALE if dtype == FP8 else None)

    def inputs(self, workload: Workload, num_sms: int | None) -> Inputs:
        pages = self._pages_of_requests(workload)
        shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, ids in zip(block_table, shuffled.split(pages), strict=True):
            row[: len(ids)] = ids
        q = torch.randn(len(pages), workload.s_q, workload.heads, HEAD_DIM, device=DEVICE)
        seq_lens = torch.tensor(workload.lengths, dtype=torch.int32, device=DEVICE)
        lists = (block_table.to(DEVICE), seq_lens, workload.lengths, workload.page_size)
        return Inputs(q.to(getattr(torch, workload.dtype)), *lists, SOFTMAX_SCALE, num_sms)

    def copies(self, workload: Workload, dtype: torch.dtype) -> list[Copy]:
        rows = self.pages_in(dtype).flatten(0, 1)[: self._rows(workload) * copies_of(workload)]
        return [(part.unflatten(0, (-1, workload.page_size)),) for part in rows.split(self._rows(workload))]

    def truth(self, inputs: Inputs, copy: Copy) -> Tensor:
        lists, scale = (inputs.block_table, inputs.seq_lens), inputs.kv_scale_tensor
        return mla_decode_reference(inputs.q, *copy, *lists, inputs.softmax_scale, kv_scale=scale)[0]


class SparsePool(Pool):
    """One cache for every row; calls differ in their lists."""

    def __init__(self, workloads: tuple[Workload, ...]):
        super().__init__(max(workload.context for workload in workloads) // PAGE_SIZE)

    def convert(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return fp8_rows(pages)

    def inputs(self, workload: Workload, num_sms: int | None) -> SparseInputs:
        q = torch.randn(len(workload.lengths), workload.heads, HEAD_DIM, device=DEVICE)
        return SparseInputs(q.to(torch.bfloat16), workload.lengths[0], SOFTMAX_SCALE, num_sms)

    def copies(self, workload: Workload, dtype: torch.dtype) -> list[Copy]:
        pages = self.pages_in(dtype)[: workload.context // PAGE_SIZE]
        return [(pages, lists) for lists in lists_of(workload, workload.lengths[0])]

    def truth(self, inputs: SparseInputs, copy: Copy) -> Tensor:
        return sparse_mla_decode_reference(inputs.q, *copy, softmax_scale=inputs.softmax_scale)[0]


class V4Pool(Pool):
    """Two caches for every row. A token's last tokens are consecutive rows; its compressed ones are drawn evenly."""

    def __init__(self, workloads: tuple[Workload, ...]):
        super().__init__(2 * max(workload.context for workload in workloads) // PAGE_SIZE, LATENT_DIM)

    def convert(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return v4_pages(pages)

    def inputs(self, workload: Workload, num_sms: int | None) -> V4Inputs:
        q = torch.randn(len(workload.lengths), workload.heads, LATENT_DIM, device=DEVICE).to(torch.bfloat16)
        sinks = torch.randn(workload.heads, device=DEVICE)
        given = (workload.lengths[0], LATENT_DIM**-0.5, num_sms, torch.uint8)
        return V4Inputs(q, *given, window=V4_WINDOW, extra=workload.extra, sinks=sinks)

    def copies(self, workload: Workload, dtype: torch.dtype) -> list[Copy]:
        cache, extra_cache = self.pages_in(dtype).chunk(2)
        tokens, generator = len(workload.lengths), torch.Generator(DEVICE).manual_seed(1)
        places, made = workload.context - V4_WINDOW + 1, []
        for lists in lists_of(workload, workload.extra) if workload.extra else [None] * copies_of(workload):
            first = torch.randint(places, (tokens, 1), generator=generator, device=DEVICE, dtype=torch.int32)
            window = first + torch.arange(V4_WINDOW, device=DEVICE, dtype=torch.int32)
            made.append((cache, window, None if lists is None else extra_cache, lists))
        return made

    def truth(self, inputs: V4Inputs, copy: Copy) -> Tensor:
        cache, indices, extra_cache, extra_indices = copy
        more = {"extra_kv_cache": extra_cache, "extra_indices": extra_indices, "sinks": inputs.sinks}
        return sparse_mla_decode_reference(inputs.q, cache, indices, inputs.softmax_scale, **more)[0]


def pool_of(workloads: tuple[Workload, ...]) -> Pool:
    """The pool of a run, whose workloads are of one call."""
    return {"dense": DensePool, "sparse": SparsePool, "v4": V4Pool}[workloads[0].call](workloads)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """`x` / `scale` in e4m3, saturated."""
    return (x / scale).clamp(-448, 448).to(FP8)


def fp8_rows(rows: Tensor) -> Tensor:
    """bfloat16 [..., 576] as uint8 [..., 656] with a scale per 128 columns, their largest magnitude / 448."""
    groups = rows[..., :LATENT_DIM].unflatten(-1, (-1, SCALE_DIM)).float()
    scales = groups.abs().amax(dim=-1) / 448
    values = (groups / scales.unsqueeze(-1)).to(FP8).flatten(-2)
    parts = (values, scales, rows[..., LATENT_DIM:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def v4_pages(pages: Tensor) -> Tensor:
    """bfloat16 [pages, page_size, 512] as uint8 [pages, page_size, 584] in DeepSeek-V4's page layout.

    A page holds its rows (448 e4m3, 64 bfloat16) first, then 8 bytes per row: 7 exponents of scales per 64 columns,
    rounded up so that nothing saturates, and a 0.
    """
    groups = pages[..., :V4_NOPE_DIM].unflatten(-1, (-1, V4_SCALE_DIM)).float()
    exponents = (groups.abs().amax(dim=-1).clamp(min=1e-4) / 448).log2().ceil()
    values = (groups / exponents.exp2().unsqueeze(-1)).to(FP8).flatten(-2).view(torch.uint8)
    data = torch.cat([values, pages[..., V4_NOPE_DIM:].contiguous().view(torch.uint8)], dim=-1)
    scales = pad((exponents + 127).to(torch.uint8), (0, 1))
    return torch.cat([data.flatten(1), scales.flatten(1)], dim=-1).view(*pages.shape[:2], -1)


def lists_of(workload: Workload, entries: int) -> tuple[Tensor, ...]:
    """int32 [tokens, entries] for each copy, cut from permutations of the cache's rows: no list names a row twice."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens, per_permutation = len(workload.lengths), workload.context // entries
    lists = []
    for _ in range(-(-tokens * copies_of(workload) // per_permutation)):
        rows = torch.randperm(workload.context, generator=generator, device=DEVICE, dtype=torch.int32)
        lists.append(rows[: per_permutation * entries].view(per_permutation, entries))
    return torch.cat(lists)[: tokens * copies_of(workload)].split(tokens)

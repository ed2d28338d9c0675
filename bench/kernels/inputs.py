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
CHUNK_PAGES = 4096  # converted to FP8 at a time

Copy = tuple[Tensor | None, ...]
"""What differs between the calls of a graph. Dense: one copy of the cache, [pages, page_size, 576]. Sparse: the cache,
bfloat16 [pages, page_size, 576] or uint8 [.., 656], and int32 [tokens, length], the rows of each token. DeepSeek-V4:
cache, uint8 [pages, page_size, 584], and list of the last tokens, then cache and list of the compressed ones, or None
twice."""

Call = Callable[..., Tensor]
"""Takes the tensors of a Copy; returns the output, batch * s_q * heads * 512 or tokens * heads * 512 numbers."""


@dataclass(frozen=True)
class Inputs:
    """What a kernel gets besides a Copy."""

    workload: Workload
    q: Tensor  # bfloat16: dense [batch, s_q, heads, 576], sparse [tokens, heads, 576], V4 [tokens, heads, 512]
    softmax_scale: float
    num_sms: int | None  # CTAs of ETAP's launch; None for the device's multiprocessors
    kv_dtype: torch.dtype = torch.bfloat16  # FP8 of a dense cache; uint8 of rows with their own scales
    kv_scale: float | None = None  # of a dense FP8 cache
    block_table: Tensor | None = None  # dense: int32 [batch, max_pages]
    seq_lens: Tensor | None = None  # dense: int32 [batch]
    sinks: Tensor | None = None  # V4: float32 [heads]

    @property
    def kv_scale_tensor(self) -> Tensor | None:
        return None if self.kv_scale is None else torch.tensor([self.kv_scale], device=self.q.device)

    @property
    def query_starts(self) -> Tensor:
        return torch.arange(self.workload.batch + 1, dtype=torch.int32, device=self.q.device) * self.workload.s_q

    def counts(self, entries: int) -> Tensor:
        """int32 [tokens]: the valid entries of every list."""
        return torch.full(self.q.shape[:1], entries, dtype=torch.int32, device=self.q.device)


def copies_of(workload: Workload) -> int:
    """Copies of the cache; of a sparse call, lists without a common row, unless one call names every row."""
    wanted = min(MAX_COPIES, -(-int(ROTATED_BYTES) // workload.bytes))
    if workload.call == "dense":
        return wanted
    drawn = workload.batch * (workload.extra if workload.call == "v4" else workload.length)
    return max(1, min(wanted, workload.context // max(1, drawn)))


class Pool:
    """One buffer of random cache pages for all rows of a run, which are of one call. Dense rows cut it into copies of
    their cache; the calls of a sparse row differ in their lists."""

    def __init__(self, workloads: tuple[Workload, ...]):
        rows = max(map(_pool_rows, workloads))
        shape = (-(-rows // PAGE_SIZE), PAGE_SIZE, _width(workloads[0]))
        self.pages = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
        self._convert = {"dense": to_fp8, "sparse": fp8_rows, "v4": v4_pages}[workloads[0].call]
        self._fp8: Tensor | None = None

    def pages_in(self, fp8: bool) -> Tensor:
        """The buffer in bfloat16, or in the call's FP8 layout, converted once."""
        if not fp8:
            return self.pages
        if self._fp8 is None:
            first = self._convert(self.pages[:1])
            self._fp8 = first.new_empty(len(self.pages), *first.shape[1:])
            for to, chunk in zip(self._fp8.split(CHUNK_PAGES), self.pages.split(CHUNK_PAGES), strict=True):
                to.copy_(self._convert(chunk))
        return self._fp8

    def copies(self, workload: Workload, fp8: bool) -> list[Copy]:
        """What the calls of a graph take in turns."""
        pages = self.pages_in(fp8)
        if workload.call == "dense":
            rows = _copy_rows(workload)
            parts = pages.flatten(0, 1)[: rows * copies_of(workload)].split(rows)
            return [(part.unflatten(0, (-1, workload.page_size)),) for part in parts]
        if workload.call == "sparse":
            cache = pages[: workload.context // PAGE_SIZE]
            return [(cache, lists) for lists in lists_of(workload, workload.length)]
        cache, extra_cache = pages.chunk(2)
        if not workload.extra:
            return [(cache, window, None, None) for window in windows_of(workload)]
        both = zip(windows_of(workload), lists_of(workload, workload.extra), strict=True)
        return [(cache, window, extra_cache, extra) for window, extra in both]


def _pool_rows(workload: Workload) -> int:
    if workload.call == "dense":
        return _copy_rows(workload) * copies_of(workload)
    return workload.context * (2 if workload.call == "v4" else 1)


def _request_rows(workload: Workload) -> int:
    return -(-workload.longest // workload.page_size) * workload.page_size


def _copy_rows(workload: Workload) -> int:
    """Rows of a dense call's copy: the common pages, then each request's own."""
    return workload.common + workload.batch * (_request_rows(workload) - workload.common)


def _width(workload: Workload) -> int:
    return LATENT_DIM if workload.call == "v4" else HEAD_DIM


def inputs_of(workload: Workload, num_sms: int | None) -> Inputs:
    """A row's queries and, of a dense call, its shuffled block table."""
    batch, heads = workload.batch, workload.heads
    shape = (batch, workload.s_q, heads) if workload.call == "dense" else (batch, heads)
    q = torch.randn(*shape, _width(workload), device=DEVICE).to(torch.bfloat16)
    given = Inputs(workload, q, _width(workload) ** -0.5, num_sms)
    if workload.call == "v4":
        return replace(given, sinks=torch.randn(heads, device=DEVICE))
    if workload.call == "sparse":
        return given
    pages, common = _copy_rows(workload) // workload.page_size, workload.common // workload.page_size
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    own = shuffled[common:].view(batch, -1)
    table = torch.cat([shuffled[:common].expand(batch, -1), own], dim=1)
    spread = torch.linspace(1 - 1 / batch, 1 / batch - 1, batch) * (workload.longest - workload.length)
    seq_lens = (workload.length + spread).round().to(torch.int32).to(DEVICE)
    return replace(given, block_table=table.to(DEVICE), seq_lens=seq_lens)


def with_cache(inputs: Inputs, fp8: bool) -> Inputs:
    """The inputs for a cache of this type."""
    if fp8 and inputs.workload.call == "dense":
        return replace(inputs, kv_dtype=FP8, kv_scale=KV_SCALE)
    return replace(inputs, kv_dtype=torch.uint8 if fp8 else torch.bfloat16)


def truth(inputs: Inputs, copy: Copy) -> Tensor:
    """The output in float64 on the rounded cache."""
    if inputs.workload.call == "dense":
        lists, scale = (inputs.block_table, inputs.seq_lens), inputs.kv_scale_tensor
        return mla_decode_reference(inputs.q, *copy, *lists, inputs.softmax_scale, kv_scale=scale)[0]
    cache, indices, extra_cache, extra_indices = copy if len(copy) == 4 else (*copy, None, None)
    more = {"extra_kv_cache": extra_cache, "extra_indices": extra_indices, "sinks": inputs.sinks}
    return sparse_mla_decode_reference(inputs.q, cache, indices, inputs.softmax_scale, **more)[0]


def to_fp8(x: Tensor, scale: float = KV_SCALE) -> Tensor:
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
    tokens, per_permutation = workload.batch, workload.context // entries
    lists = []
    for _ in range(-(-tokens * copies_of(workload) // per_permutation)):
        rows = torch.randperm(workload.context, generator=generator, device=DEVICE, dtype=torch.int32)
        lists.append(rows[: per_permutation * entries].view(per_permutation, entries))
    return torch.cat(lists)[: tokens * copies_of(workload)].split(tokens)


def windows_of(workload: Workload) -> list[Tensor]:
    """int32 [tokens, 128] for each copy: consecutive rows, the last tokens of each query token."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    places, shape = workload.context - V4_WINDOW + 1, (workload.batch, 1)
    window = torch.arange(V4_WINDOW, device=DEVICE, dtype=torch.int32)
    return [
        torch.randint(places, shape, generator=generator, device=DEVICE, dtype=torch.int32) + window
        for _ in range(copies_of(workload))
    ]

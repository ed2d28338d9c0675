"""The shapes that `etap bench` measures, and the files that list them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bench.common import configs
from bench.kernels.rows import PAGE_SIZE, Published, Shape, SparseShape
from bench.common.configs import Strict
from bench.common.units import in_k
from etap_backend.limits import HEAD_DIM, LATENT_DIM, ROPE_DIM, SPARSE_FP8_BYTES, V4_ROW_BYTES

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
FP8_ROW_BYTES = SPARSE_FP8_BYTES + ROPE_DIM * ELEMENT_BYTES["bfloat16"]  # of a sparse cache
MEMORY_SHARE = 0.8  # of the GPU's, that caches may take

DType = Literal["bfloat16", "float16"]
KvDType = Literal["same", "fp8"]
Calls = Literal["decode", "drop-ins"]
Count = Annotated[int, Field(ge=1, strict=True)]
Counts = Annotated[list[Count], Field(min_length=1)]
Batches = Annotated[list[tuple[Count, Count]], Field(min_length=1)]


@dataclass(frozen=True)
class Workload:
    """One row of a benchmark: tokens of each request, query heads of one GPU, query tokens a request."""

    lengths: tuple[int, ...]
    heads: int = 16
    s_q: int = 1
    dtype: str = "bfloat16"
    name: str = ""  # for batches that are not even
    kv_dtype: str = "same"
    page_size: int = PAGE_SIZE

    @property
    def fp8(self) -> bool:
        return self.kv_dtype == "fp8"

    @property
    def kind(self) -> str:
        """Which kernels there are for it, one of `providers.KINDS`."""
        return "fp8" if self.fp8 else "plain"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache that one call must read."""
        return self.tokens * HEAD_DIM * ELEMENT_BYTES["fp8" if self.fp8 else self.dtype]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the caches that a run holds; beside an FP8 cache stands the bf16 one that it was made of."""
        return self.kv_bytes + (self.tokens * HEAD_DIM * ELEMENT_BYTES["bfloat16"] if self.fp8 else 0)

    @property
    def flops(self) -> int:
        return 2 * self.heads * self.s_q * self.tokens * (HEAD_DIM + LATENT_DIM)

    @property
    def label(self) -> str:
        shape = self.name or f"{len(self.lengths)} x {in_k(self.lengths[0])}"
        types = ("" if self.dtype == "bfloat16" else f", {self.dtype}") + (", FP8 cache" if self.fp8 else "")
        pages = "" if self.page_size == PAGE_SIZE else f", pages of {self.page_size}"
        return f"{shape}, {self.heads} heads, s_q {self.s_q}{types}{pages}"

    @property
    def shape(self) -> Shape:
        even = len(set(self.lengths)) == 1
        return Shape(
            label=self.label,
            name=self.name,
            batch=len(self.lengths),
            length=self.lengths[0] if even else None,
            longest=max(self.lengths),
            tokens=self.tokens,
            heads=self.heads,
            s_q=self.s_q,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            bytes=self.kv_bytes,
            flops=self.flops,
        )


@dataclass(frozen=True)
class SparseWorkload(Workload):
    """One row of the sparse call: each query token is a request of its own that attends to as many gathered rows."""

    context: int = 0  # rows of the cache that the lists are drawn from

    @property
    def kind(self) -> str:
        return "sparse_fp8" if self.fp8 else "sparse"

    @property
    def top_k(self) -> int:
        return self.lengths[0]

    @property
    def drawn(self) -> int:
        """Rows that the lists of one call name, drawn from the whole cache."""
        return self.tokens

    @property
    def row_bytes(self) -> int:
        return FP8_ROW_BYTES if self.fp8 else HEAD_DIM * ELEMENT_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Where tokens share rows, as in a prefill, a row counts once."""
        return min(self.tokens, self.context) * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        return self.context * (HEAD_DIM * ELEMENT_BYTES[self.dtype] + (FP8_ROW_BYTES if self.fp8 else 0))

    @property
    def label(self) -> str:
        shape = f"{len(self.lengths)} x {in_k(self.top_k)} of {in_k(self.context)}, {self.heads} heads"
        return shape + (", FP8 rows" if self.fp8 else "")

    @property
    def shape(self) -> SparseShape:
        return SparseShape(**super().shape.model_dump(), context=self.context)


@dataclass(frozen=True)
class V4Workload(SparseWorkload):
    """One row of DeepSeek-V4's call: each token has a list of its last tokens and one of compressed ones, the rest of
    its length, in a cache of its own. K and V are the same 512 values."""

    window: int = 128

    @property
    def kind(self) -> str:
        return "v4"

    @property
    def extra(self) -> int:
        return self.top_k - self.window

    @property
    def drawn(self) -> int:
        return len(self.lengths) * self.extra

    @property
    def row_bytes(self) -> int:
        return V4_ROW_BYTES

    @property
    def kv_bytes(self) -> int:
        return self.tokens * V4_ROW_BYTES

    @property
    def memory_bytes(self) -> int:
        """Of two caches, each with `context` rows, and what they are made of."""
        return 2 * self.context * (V4_ROW_BYTES + LATENT_DIM * ELEMENT_BYTES["bfloat16"])

    @property
    def flops(self) -> int:
        return 2 * self.heads * self.tokens * 2 * LATENT_DIM

    @property
    def label(self) -> str:
        lists = f"{self.window}" + (f" + {self.extra}" if self.extra else "")
        return f"{len(self.lengths)} x {lists}, {self.heads} heads, V4 rows"

    @property
    def shape(self) -> SparseShape:
        return super().shape.model_copy(update={"window": self.window})


class LogNormal(Strict):
    """Lengths drawn around a median, at most `longest`, the same every time."""

    requests: Count
    median: Count
    sigma: float = Field(gt=0, allow_inf_nan=False)
    longest: Count
    seed: int

    def lengths(self) -> tuple[int, ...]:
        draw = random.Random(self.seed)
        drawn = (round(self.median * draw.lognormvariate(0, self.sigma)) for _ in range(self.requests))
        return tuple(max(1, min(self.longest, length)) for length in drawn)


class Table(Strict):
    """A [[rows]] table: its batches, each with all of its heads, s_q and page sizes.

    Batches come in one of four ways: `shapes` (pairs of requests and tokens), `batch` and `tokens` (all combinations),
    or a `name` with `mixed` (pairs of requests and tokens in one batch) or with `lognormal`; beside the last two
    `even = true` adds a batch of the same tokens spread evenly.
    """

    heads: Counts = [16]
    s_q: Counts = [1]
    dtype: DType = "bfloat16"
    kv_dtype: KvDType = "same"  # fp8 (e4m3), or the query's
    page_size: Counts = [PAGE_SIZE]
    shapes: Batches | None = None
    batch: Counts | None = None
    tokens: Counts | None = None
    name: str | None = None
    mixed: Batches | None = None
    lognormal: LogNormal | None = None
    even: bool = False

    @model_validator(mode="after")
    def _batches_in_one_way(self) -> Table:
        uneven = self.mixed or self.lognormal
        ways = [self.shapes, self.batch or self.tokens, self.mixed, self.lognormal]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("wanted one of shapes, batch with tokens, mixed, lognormal")
        if bool(self.batch) != bool(self.tokens):
            raise ValueError("wanted batch and tokens together")
        if bool(self.name) != bool(uneven):
            raise ValueError("wanted a name beside mixed or lognormal, and none beside even batches")
        if self.even and not uneven:
            raise ValueError("even: wanted mixed or lognormal beside it")
        return self

    def batches(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, lengths) of every batch; even batches have no name."""
        if pairs := self.shapes or (self.batch and list(product(self.batch, self.tokens))):
            return [("", (tokens,) * requests) for requests, tokens in pairs]
        if self.mixed:
            lengths = tuple(tokens for requests, tokens in self.mixed for _ in range(requests))
        else:
            lengths = self.lognormal.lengths()
        made = [(self.name, lengths)]
        if self.even:
            share, rest = divmod(sum(lengths), len(lengths))
            made.append((f"{self.name}, evened out", tuple(share + (n < rest) for n in range(len(lengths)))))
        return made

    def workloads(self, kv_dtype: KvDType | None) -> list[Workload]:
        rows = product(self.heads, self.s_q, self.batches(), self.page_size)
        cache = kv_dtype or self.kv_dtype
        return [
            Workload(lengths, heads, s_q, self.dtype, name, cache, page_size)
            for heads, s_q, (name, lengths), page_size in rows
        ]


class SparseTable(Strict):
    """A [[sparse]] table: every kind of cache with every number of heads and of query tokens."""

    tokens: Counts
    heads: Counts = [16]
    kv_dtype: Annotated[list[KvDType], Field(min_length=1)] = ["same"]  # fp8: rows of 656 bytes, or bfloat16
    top_k: Count = 2048
    context: Count  # rows of the cache that each token's are drawn from

    @model_validator(mode="after")
    def _enough_rows(self) -> SparseTable:
        if self.context % PAGE_SIZE or self.context < self.top_k:
            raise ValueError(f"context: wanted a multiple of {PAGE_SIZE} of at least top_k, got {self.context}")
        return self

    def workloads(self, kv_dtype: KvDType | None) -> list[Workload]:
        rows = product([kv_dtype] if kv_dtype else self.kv_dtype, self.heads, self.tokens)
        return [
            SparseWorkload((self.top_k,) * tokens, heads, kv_dtype=cache, context=self.context)
            for cache, heads, tokens in rows
        ]


class V4Table(Strict):
    """A [[v4]] table: every number of heads and query tokens with every number of compressed entries."""

    tokens: Counts
    heads: Counts
    extra: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
    context: Annotated[int, Field(ge=PAGE_SIZE, multiple_of=PAGE_SIZE)]  # rows of each of the two caches

    def workloads(self, kv_dtype: KvDType | None) -> list[Workload]:
        if kv_dtype == "same":
            raise ValueError("--kv-dtype: wanted fp8 or none, which DeepSeek-V4's rows are, got same")
        rows = product(self.heads, self.extra, self.tokens)
        return [
            V4Workload((V4Workload.window + extra,) * tokens, heads, kv_dtype="fp8", context=self.context)
            for heads, extra, tokens in rows
        ]


class File(Strict):
    """A file of configs/bench: [[rows]] of the dense call, [[sparse]] ones, or [[v4]] ones."""

    title: str | None = None
    calls: Calls = "decode"  # mla_decode and its peers, or the drop-ins and what they stand in for
    rows: list[Table] = []
    sparse: list[SparseTable] = []
    v4: list[V4Table] = []
    published: list[Published] = []

    @model_validator(mode="after")
    def _of_one_call(self) -> File:
        if sum(map(bool, (self.rows, self.sparse, self.v4))) != 1:
            raise ValueError("wanted [[rows]], or [[sparse]], or [[v4]]")
        return self


@dataclass(frozen=True)
class Grid:
    """What one run measures."""

    name: str
    title: str
    workloads: tuple[Workload, ...]
    published: tuple[Published, ...] = ()
    calls: Calls = "decode"

    @property
    def sparse(self) -> bool:
        return isinstance(self.workloads[0], SparseWorkload)

    def within(self, memory_bytes: float) -> tuple[Grid, list[str]]:
        """The rows whose cache leaves room on a GPU with this much free, and the labels of the others."""
        fits = [workload.memory_bytes < MEMORY_SHARE * memory_bytes for workload in self.workloads]
        kept = tuple(workload for workload, fit in zip(self.workloads, fits, strict=True) if fit)
        left_out = [workload.label for workload, fit in zip(self.workloads, fits, strict=True) if not fit]
        return replace(self, workloads=kept), left_out


def read_grid(path: Path, kv_dtype: KvDType | None = None) -> Grid:
    """The grid of a file; `kv_dtype`, unless None, takes the place of every row's.

    Raises ValueError, naming file and key, when it is not like `Table`.
    """
    file = configs.read_toml(path, File)
    workloads = (workload for table in (*file.rows, *file.sparse, *file.v4) for workload in table.workloads(kv_dtype))
    unique = tuple(dict.fromkeys(workloads))
    return Grid(path.stem, file.title or path.stem, unique, tuple(file.published), file.calls)


def read_grids(names: list[str], kv_dtype: KvDType | None = None) -> Grid:
    """One grid of several, each by path or name; a row that several have is measured once.

    Raises ValueError when they are of different calls.
    """
    grids = [read_grid(configs.find("bench", name), kv_dtype) for name in names]
    if len(grids) == 1:
        return grids[0]
    if len({type(grid.workloads[0]) for grid in grids}) > 1:
        raise ValueError(f"grids: wanted all of the dense call or all of the sparse one, got {', '.join(names)}")
    if len({grid.calls for grid in grids}) > 1:
        raise ValueError(f"grids: wanted all of drop-ins or none, got {', '.join(names)}")
    workloads = dict.fromkeys(workload for grid in grids for workload in grid.workloads)
    published = tuple(one for grid in grids for one in grid.published)
    name = "-".join(grid.name for grid in grids)
    return Grid(name, "; ".join(grid.title for grid in grids), tuple(workloads), published, grids[0].calls)

"""The shapes that a run measures, and the TOML files (bench/configs/grids) that list them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bench.common import configs
from bench.common.configs import Strict
from bench.common.units import in_k
from etap_backend.limits import HEAD_DIM, LATENT_DIM, ROPE_DIM, SPARSE_FP8_BYTES, TILE_TOKENS, V4_ROW_BYTES

PAGE_SIZE = TILE_TOKENS  # unless a row names another
V4_WINDOW = 128  # DeepSeek-V4's list of last tokens
MEMORY_SHARE = 0.8  # of the GPU's free memory, for caches


class KvDtype(str, Enum):
    """Type of the cache: the query's, or e4m3."""

    SAME = "same"
    FP8 = "fp8"


@dataclass(frozen=True)
class Workload:
    """One call. In a sparse or V4 call every query token is a request that attends to as many rows as its length says:
    of V4 the last 128 tokens, and compressed ones of a second cache."""

    call: str  # "dense", "sparse" or "v4"
    lengths: tuple[int, ...]
    heads: int = 16
    s_q: int = 1
    dtype: str = "bfloat16"
    fp8: bool = False  # the cache is FP8
    page_size: int = PAGE_SIZE
    context: int = 0  # sparse and V4: rows of each cache
    name: str = ""  # of requests of different lengths

    @property
    def kind(self) -> str:
        """A key of `providers.KINDS`: which kernels can run this call."""
        return {"dense": "fp8" if self.fp8 else "plain", "sparse": "sparse_fp8" if self.fp8 else "sparse", "v4": "v4"}[
            self.call
        ]

    @property
    def extra(self) -> int:
        """V4: entries of each token's list of compressed tokens."""
        return self.lengths[0] - V4_WINDOW

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def row_bytes(self) -> int:
        if not self.fp8:
            return 2 * HEAD_DIM
        return {"dense": HEAD_DIM, "sparse": SPARSE_FP8_BYTES + 2 * ROPE_DIM, "v4": V4_ROW_BYTES}[self.call]

    @property
    def bytes(self) -> int:
        """That one call must read of the cache; a row that several tokens of a prefill share counts once."""
        return (min(self.tokens, self.context) if self.call == "sparse" else self.tokens) * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the run's caches; FP8 ones are made from bfloat16 rows, which stay."""
        rows = {"dense": self.tokens, "sparse": self.context, "v4": 2 * self.context}[self.call]
        return rows * ((2 * LATENT_DIM if self.call == "v4" else 2 * HEAD_DIM) + (self.row_bytes if self.fp8 else 0))

    @property
    def flops(self) -> int:
        width = 2 * LATENT_DIM if self.call == "v4" else HEAD_DIM + LATENT_DIM
        return 2 * self.heads * self.s_q * self.tokens * width

    @property
    def label(self) -> str:
        if self.call == "v4":
            extra = f" + {self.extra}" if self.extra else ""
            return f"{len(self.lengths)} x {V4_WINDOW}{extra}, {self.heads} heads, V4 rows"
        shape = self.name or f"{len(self.lengths)} x {in_k(self.lengths[0])}"
        if self.call == "sparse":
            return f"{shape} of {in_k(self.context)}, {self.heads} heads" + (", FP8 rows" if self.fp8 else "")
        types = ("" if self.dtype == "bfloat16" else f", {self.dtype}") + (", FP8 cache" if self.fp8 else "")
        pages = "" if self.page_size == PAGE_SIZE else f", pages of {self.page_size}"
        return f"{shape}, {self.heads} heads, s_q {self.s_q}{types}{pages}"

    @property
    def fields(self) -> dict:
        """The shape in a results file; `length` is None where requests differ."""
        kept = {name: getattr(self, name) for name in ("label", "name", "heads", "s_q", "dtype", "page_size")}
        sparse = {"context": self.context, "window": V4_WINDOW if self.call == "v4" else 0}
        return {
            **kept,
            "batch": len(self.lengths),
            "length": self.lengths[0] if len(set(self.lengths)) == 1 else None,
            "tokens": self.tokens,
            "kv_dtype": "fp8" if self.fp8 else "same",
            "bytes": self.bytes,
            "flops": self.flops,
            **({} if self.call == "dense" else sparse),
        }


Count = Annotated[int, Field(ge=1, strict=True)]
Counts = Annotated[list[Count], Field(min_length=1)]
Batches = Annotated[list[tuple[Count, Count]], Field(min_length=1)]
"""Pairs of requests and tokens per request."""


class DenseTable(Strict):
    """A [[rows]] table: every batch with every number of heads and query tokens and every page size.

    Batches are `shapes`; or all combinations of `batch` and `tokens`; or, with a `name`, the `mixed` requests of one
    batch, and beside it the same tokens spread evenly.
    """

    heads: Counts = [16]
    s_q: Counts = [1]
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    kv_dtype: KvDtype = KvDtype.SAME
    page_size: Counts = [PAGE_SIZE]
    shapes: Batches | None = None
    batch: Counts | None = None
    tokens: Counts | None = None
    name: str = ""
    mixed: Batches | None = None

    @model_validator(mode="after")
    def _batches_in_one_way(self) -> DenseTable:
        if sum(way is not None for way in (self.shapes, self.batch, self.mixed)) != 1:
            raise ValueError("wanted one of shapes, batch with tokens, mixed with name")
        if bool(self.batch) != bool(self.tokens) or bool(self.name) != bool(self.mixed):
            raise ValueError("wanted batch with tokens, mixed with name")
        return self

    def batches(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, lengths) of every batch."""
        if not self.mixed:
            return [("", (tokens,) * requests) for requests, tokens in self.shapes or product(self.batch, self.tokens)]
        lengths = tuple(tokens for requests, tokens in self.mixed for _ in range(requests))
        share, rest = divmod(sum(lengths), len(lengths))
        even = tuple(share + (request < rest) for request in range(len(lengths)))
        return [(self.name, lengths), (f"{self.name}, evened out", even)]

    def workloads(self, kv_dtype: KvDtype | None) -> list[Workload]:
        fp8 = (kv_dtype or self.kv_dtype) == KvDtype.FP8
        rows = product(self.heads, self.s_q, self.batches(), self.page_size)
        return [
            Workload("dense", lengths, heads, s_q, self.dtype, fp8, page_size, name=name)
            for heads, s_q, (name, lengths), page_size in rows
        ]


class SparseTable(Strict):
    """A [[sparse]] table: every type of cache with every number of heads and of query tokens."""

    tokens: Counts
    heads: Counts = [16]
    kv_dtype: Annotated[list[KvDtype], Field(min_length=1)] = [KvDtype.SAME]  # fp8: rows of 656 bytes
    top_k: Count = 2048
    context: Annotated[int, Field(ge=PAGE_SIZE, multiple_of=PAGE_SIZE)]  # cache rows that lists are drawn from

    @model_validator(mode="after")
    def _enough_rows(self) -> SparseTable:
        if self.context < self.top_k:
            raise ValueError(f"context: wanted at least top_k, got {self.context}")
        return self

    def workloads(self, kv_dtype: KvDtype | None) -> list[Workload]:
        rows = product([kv_dtype] if kv_dtype else self.kv_dtype, self.heads, self.tokens)
        return [
            Workload("sparse", (self.top_k,) * tokens, heads, fp8=cache == KvDtype.FP8, context=self.context)
            for cache, heads, tokens in rows
        ]


class V4Table(Strict):
    """A [[v4]] table: every number of heads and query tokens with every number of compressed entries."""

    tokens: Counts
    heads: Counts
    extra: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
    context: Annotated[int, Field(ge=PAGE_SIZE, multiple_of=PAGE_SIZE)]  # rows of each of the two caches

    def workloads(self, kv_dtype: KvDtype | None) -> list[Workload]:
        if kv_dtype == KvDtype.SAME:
            raise ValueError("--kv-dtype: wanted fp8 or none for DeepSeek-V4's rows, got same")
        rows = product(self.heads, self.extra, self.tokens)
        return [
            Workload("v4", (V4_WINDOW + extra,) * tokens, heads, fp8=True, context=self.context)
            for heads, extra, tokens in rows
        ]


class Published(Strict):
    """TFLOP/s that others published for a kernel, for the picture."""

    kernel: str
    gpu: str
    source: str
    batch: Count
    heads: Count
    tflops: dict[int, float]  # by tokens per request


class File(Strict):
    """A grid's file: tables of one call."""

    title: str = ""
    rows: list[DenseTable] = []
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
    """What one run measures: workloads of one call."""

    name: str
    title: str
    workloads: tuple[Workload, ...]
    published: tuple[Published, ...] = ()

    def within(self, memory_bytes: float) -> tuple[Grid, list[str]]:
        """The grid without the rows whose caches exceed 80% of this memory, and those rows' labels."""
        kept = tuple(one for one in self.workloads if one.memory_bytes < MEMORY_SHARE * memory_bytes)
        return replace(self, workloads=kept), [one.label for one in self.workloads if one not in kept]


def read_grid(name: str, kv_dtype: KvDtype | None = None) -> Grid:
    """The grid of a file, by its path or by its name in bench/configs/grids; `kv_dtype` replaces every row's.

    Raises ValueError when there is no such file, or when its content is wrong; the text names file and key.
    """
    path = configs.find("grids", name)
    file = configs.read_toml(path, File)
    workloads = (workload for table in (*file.rows, *file.sparse, *file.v4) for workload in table.workloads(kv_dtype))
    return Grid(path.stem, file.title or path.stem, tuple(dict.fromkeys(workloads)), tuple(file.published))

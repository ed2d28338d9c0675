"""The shapes that `etap bench` measures, and the files that list them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from etap_backend.lab import configs
from etap_backend.lab.bench.rows import Published, Shape
from etap_backend.lab.configs import Strict
from etap_backend.lab.units import in_k
from etap_backend.support import HEAD_DIM, LATENT_DIM

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
MEMORY_SHARE = 0.8  # of the GPU's, that caches may take

DType = Literal["bfloat16", "float16"]
KvDType = Literal["same", "fp8"]
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

    @property
    def fp8(self) -> bool:
        return self.kv_dtype == "fp8"

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
        return f"{shape}, {self.heads} heads, s_q {self.s_q}{types}"

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
            bytes=self.kv_bytes,
            flops=self.flops,
        )


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
    """A [[rows]] table: its batches, each with all of its heads and s_q.

    Batches come in one of four ways: `shapes` (pairs of requests and tokens), `batch` and `tokens` (all combinations),
    or a `name` with `mixed` (pairs of requests and tokens in one batch) or with `lognormal`; beside the last two
    `even = true` adds a batch of the same tokens spread evenly.
    """

    heads: Counts = [16]
    s_q: Counts = [1]
    dtype: DType = "bfloat16"
    kv_dtype: KvDType = "same"  # fp8 (e4m3), or the query's
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
        rows = product(self.heads, self.s_q, self.batches())
        cache = kv_dtype or self.kv_dtype
        return [Workload(lengths, heads, s_q, self.dtype, name, cache) for heads, s_q, (name, lengths) in rows]


class File(Strict):
    """A file of configs/bench."""

    title: str | None = None
    rows: list[Table] = Field(min_length=1)
    published: list[Published] = []


@dataclass(frozen=True)
class Grid:
    """What one run measures."""

    name: str
    title: str
    workloads: tuple[Workload, ...]
    published: tuple[Published, ...] = ()

    def within(self, memory_bytes: float) -> tuple[Grid, list[str]]:
        """The rows whose cache leaves room on a GPU with this much free, and the labels of the others."""
        fits = [workload.memory_bytes < MEMORY_SHARE * memory_bytes for workload in self.workloads]
        kept = tuple(workload for workload, fit in zip(self.workloads, fits, strict=True) if fit)
        left_out = [workload.label for workload, fit in zip(self.workloads, fits, strict=True) if not fit]
        return Grid(self.name, self.title, kept, self.published), left_out


def find_grid(name: str) -> Path:
    """A grid's file, by its path or by its name in configs/bench. Raises ValueError, listing what there is."""
    return configs.find("bench", name)


def read_grid(path: Path, kv_dtype: KvDType | None = None) -> Grid:
    """The grid of a file; `kv_dtype`, unless None, takes the place of every row's.

    Raises ValueError, naming file and key, when it is not like `Table`.
    """
    file = configs.read_toml(path, File)
    workloads = tuple(workload for table in file.rows for workload in table.workloads(kv_dtype))
    return Grid(path.stem, file.title or path.stem, workloads, tuple(file.published))


def read_grids(names: list[str], kv_dtype: KvDType | None = None) -> Grid:
    """One grid of several, each by path or name; a row that several have is measured once."""
    grids = [read_grid(find_grid(name), kv_dtype) for name in names]
    if len(grids) == 1:
        return grids[0]
    workloads = dict.fromkeys(workload for grid in grids for workload in grid.workloads)
    published = tuple(one for grid in grids for one in grid.published)
    name = "-".join(grid.name for grid in grids)
    return Grid(name, "; ".join(grid.title for grid in grids), tuple(workloads), published)

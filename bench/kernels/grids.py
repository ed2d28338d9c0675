"""The shapes that a run measures, and the TOML files (bench/configs/grids) that list them."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
CallName = Literal["dense", "sparse", "v4"]
KvDtype = Literal["same", "fp8"]
KINDS = {
    ("dense", "same"): "plain",
    ("dense", "fp8"): "fp8",
    ("sparse", "same"): "sparse",
    ("sparse", "fp8"): "sparse_fp8",
    ("v4", "fp8"): "v4",
}
"""The kinds of workloads, by call and type of the cache: each has kernels that can run it."""


@dataclass(frozen=True)
class Workload:
    """One call. In a sparse or V4 call every query token is a request that attends to `length` rows: of V4 the last 128
    tokens, and compressed ones of a second cache."""

    call: CallName
    batch: int
    length: int  # tokens of each request
    heads: int = 16
    s_q: int = 1
    kv_dtype: KvDtype = "same"  # the query's type, bfloat16, or FP8
    page_size: int = PAGE_SIZE
    context: int = 0  # sparse and V4: rows of each cache
    common: int = 0  # dense: tokens that all requests begin with, in the same pages; `length` is an average then

    @property
    def fp8(self) -> bool:
        return self.kv_dtype == "fp8"

    @property
    def kind(self) -> str:
        """A value of KINDS."""
        return KINDS[self.call, self.kv_dtype]

    @property
    def extra(self) -> int:
        """V4: entries of each token's list of compressed tokens."""
        return self.length - V4_WINDOW

    @property
    def distinct_rows(self) -> int:
        """Cache rows of the requests; those that all begin with count once."""
        return self.common + self.batch * (self.length - self.common)

    @property
    def longest(self) -> int:
        """Tokens of the longest request: own ones behind common ones are spread evenly around their average."""
        return self.length + (self.length - self.common if self.common else 0)

    @property
    def row_bytes(self) -> int:
        fp8 = {"dense": HEAD_DIM, "sparse": SPARSE_FP8_BYTES + 2 * ROPE_DIM, "v4": V4_ROW_BYTES}
        return fp8[self.call] if self.fp8 else 2 * HEAD_DIM

    @property
    def bytes(self) -> int:
        """That one call must read of the cache; a row that several tokens of a prefill share counts once."""
        rows = self.distinct_rows
        return (min(rows, self.context) if self.call == "sparse" else rows) * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the run's caches; FP8 ones are made from bfloat16 rows, which stay."""
        dense = self.common + self.batch * (self.longest - self.common)
        rows = {"dense": dense, "sparse": self.context, "v4": 2 * self.context}[self.call]
        return rows * (2 * HEAD_DIM + (self.row_bytes if self.fp8 else 0))

    @property
    def flops(self) -> int:
        width = 2 * LATENT_DIM if self.call == "v4" else HEAD_DIM + LATENT_DIM
        return 2 * self.heads * self.s_q * self.batch * self.length * width

    @property
    def label(self) -> str:
        shape = f"{self.batch} x {in_k(self.length)}"
        if self.call == "v4":
            shape = f"{self.batch} x {V4_WINDOW}" + (f" + {self.extra}" if self.extra else "")
        if self.common:
            shape = f"{self.batch} x ({in_k(self.common)} + {in_k(self.length - self.common)})"
        where = f" of {in_k(self.context)}" if self.context else ""
        pages = "" if self.page_size == PAGE_SIZE else f", pages of {self.page_size}"
        return f"{shape}{where}, {self.heads} heads, s_q {self.s_q}" + (", FP8 cache" if self.fp8 else "") + pages

    @property
    def fields(self) -> dict:
        """The shape in a results file."""
        names = ("label", "batch", "length", "heads", "s_q", "kv_dtype", "page_size", "context", "common", "bytes")
        found = {name: getattr(self, name) for name in (*names, "flops")}
        return found | {"window": V4_WINDOW if self.call == "v4" else 0}


Count = Annotated[int, Field(ge=1, strict=True)]
Counts = Annotated[list[Count], Field(min_length=1)]


class Rows(Strict):
    """A [[rows]] table: the product of its lists. Requests and tokens per request are pairs of `shapes`, or all
    combinations of `batch` and `tokens`; a sparse call's `batch` are query tokens, its `tokens` the lists' lengths. Of
    a dense request's tokens the first `common` ones are the same for all, and the others differ in number."""

    call: CallName = "dense"
    heads: Counts = [16]
    s_q: Counts = [1]
    kv_dtype: Annotated[list[KvDtype], Field(min_length=1)] = ["same"]
    page_size: Counts = [PAGE_SIZE]
    shapes: list[tuple[Count, Count]] = []
    batch: list[Count] = []
    tokens: list[Count] = []
    context: Annotated[int, Field(ge=0, multiple_of=PAGE_SIZE)] = 0
    common: Annotated[int, Field(ge=0, multiple_of=PAGE_SIZE)] = 0

    @model_validator(mode="after")
    def _fits(self) -> Rows:
        if bool(self.shapes) == bool(self.batch and self.tokens):
            raise ValueError("wanted shapes, or batch and tokens")
        if self.common and (self.call != "dense" or self.page_size != [PAGE_SIZE] or self.common > self._shortest()):
            raise ValueError("common: wanted with call = 'dense' and the usual pages, at most a request's tokens")
        if self.call == "dense":
            if self.context:
                raise ValueError("context: wanted with call = 'sparse' or 'v4' only")
            return self
        if not self.tokens or self.context < max(self.tokens):
            raise ValueError(f"context: wanted at least as many rows as a list of tokens names, got {self.context}")
        if (self.s_q, self.page_size) != ([1], [PAGE_SIZE]):
            raise ValueError("s_q, page_size: wanted with call = 'dense' only")
        if self.call == "v4" and (self.kv_dtype != ["fp8"] or min(self.tokens) < V4_WINDOW):
            raise ValueError(f"wanted kv_dtype = ['fp8'] and tokens from {V4_WINDOW} on with call = 'v4'")
        return self

    def _shortest(self) -> int:
        return min(self.tokens or (tokens for _, tokens in self.shapes))

    def workloads(self) -> list[Workload]:
        shapes = self.shapes or list(product(self.batch, self.tokens))
        rows = product(self.kv_dtype, self.heads, self.s_q, shapes, self.page_size)
        return [
            Workload(self.call, *shape, heads, s_q, kv_dtype, page_size, self.context, self.common)
            for kv_dtype, heads, s_q, shape, page_size in rows
        ]


class File(Strict):
    """A grid's file."""

    title: str
    rows: Annotated[list[Rows], Field(min_length=1)]
    published: list[dict] = []  # TFLOP/s that others published for a kernel, for the picture

    @model_validator(mode="after")
    def _of_one_call(self) -> File:
        if len({table.call for table in self.rows}) > 1:
            raise ValueError("wanted rows of one call")
        return self


@dataclass(frozen=True)
class Grid:
    """What one run measures: workloads of one call."""

    name: str
    title: str
    workloads: tuple[Workload, ...]
    published: list[dict]

    def within(self, memory_bytes: float) -> tuple[Grid, list[str]]:
        """The grid without the rows whose caches exceed 80% of this memory, and those rows' labels."""
        kept = tuple(one for one in self.workloads if one.memory_bytes < MEMORY_SHARE * memory_bytes)
        return replace(self, workloads=kept), [one.label for one in self.workloads if one not in kept]


def read_grid(name: str, fp8: bool = False) -> Grid:
    """The grid of a file, by its path or by its name in bench/configs/grids; `fp8` gives every row an FP8 cache.

    Raises ValueError when there is no such file, or when its content is wrong; the text names file and key.
    """
    path = configs.find("grids", name)
    file = configs.parse(File, configs.read_toml_table(path), path)
    found = [workload for table in file.rows for workload in table.workloads()]
    found = [replace(workload, kv_dtype="fp8") for workload in found] if fp8 else found
    return Grid(path.stem, file.title, tuple(dict.fromkeys(found)), file.published)

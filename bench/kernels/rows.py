"""What a results file of `etap bench` holds. Reading one imports no kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bench.common import results
from bench.kernels.floors import Floor, GatherFloor
from bench.common.configs import Strict
from bench.common.provenance import Provenance
from bench.common.units import in_k

PAGE_SIZE = 64  # where a row names no other
OURS = "etap"
FP8_MATH = "etap-fp8-math"
OUR_BF16 = "etap-bf16"
OWN = (OURS, FP8_MATH, OUR_BF16)
"""Columns that are no peers'; the last is the time that a bf16 cache of the same tokens takes."""
MATH_SUFFIX = FP8_MATH.removeprefix(OURS)
AS_FLASHMLA, AS_FLASHINFER, AS_FA3 = "compat.flash_mla", "compat.flashinfer", "compat.flash_attn_interface"
DROP_INS = {AS_FLASHMLA: "FlashMLA", AS_FLASHINFER: "FlashInfer", AS_FA3: "FA3"}
"""Columns of the drop-ins of `etap_backend.compat`, and those of the libraries whose calls they answer."""
WITH_PLAN = "{} with its plan"  # of host_calls

# Twice what plain torch errs in that type; the kernels of these tables lie between 1.6e-3 and 2.5e-3 in bf16.
LARGEST_RMSE = {"bfloat16": 5e-3, "float16": 6e-4}
FP8_MATH_RMSE = 4.5e-2  # the root of twice the cosine difference that it may have, 1e-3


class Timing(Strict):
    """Microseconds a call: median and interquartile range of the replays."""

    us: float
    iqr_us: float
    replays: int


class ScheduleBuild(Timing):
    """Building the schedule of `batch` requests on the GPU, once a step."""

    batch: int


class Measured(Timing):
    state: Literal["measured"] = "measured"
    behind: Timing | None = None  # behind a kernel that lets nothing begin before its end, that kernel's time included
    relative_rmse: float | None = None  # against float64; None where that was not asked for
    same_bits: bool | None = None  # of a further library: whether its output is the first one's, bit for bit


class Refused(Strict):
    """The kernel does not take this row."""

    state: Literal["refused"] = "refused"
    reason: str


class Failed(Strict):
    """The kernel should take this row, and raised an error or gave a wrong result."""

    state: Literal["failed"] = "failed"
    error: str


Result = Annotated[Measured | Refused | Failed, Field(discriminator="state")]


class Shape(Strict):
    """What a row was asked for."""

    label: str
    name: str  # of a batch that is not even
    batch: int
    length: int | None = None  # of every request, None where they differ
    longest: int
    tokens: int
    heads: int
    s_q: int
    dtype: Literal["bfloat16", "float16"]
    kv_dtype: Literal["same", "fp8"]
    page_size: int = PAGE_SIZE
    bytes: int  # of the cache, which a call must read
    flops: int

    @property
    def fp8(self) -> bool:
        return self.kv_dtype == "fp8"

    @property
    def cache(self) -> str:
        return "FP8" if self.fp8 else {"bfloat16": "bf16", "float16": "fp16"}[self.dtype]

    @property
    def batch_text(self) -> str:
        """Its first column in tables, such as "16 x 4K"."""
        return self.name or f"{self.batch} x {in_k(self.length)}"

    @property
    def others_text(self) -> str:
        """What a caption says of the rest."""
        return f"{self.heads} heads, {self.s_q} query token{'s' * (self.s_q > 1)} per request"

    @property
    def series(self) -> tuple[int, int, int]:
        """What rows of one panel of a plot have in common."""
        return self.heads, self.s_q, self.batch

    @property
    def place(self) -> int | None:
        """Where it lies on a panel's axis; None where it belongs in none."""
        return self.length

    @property
    def series_text(self) -> str:
        requests = f"{self.batch} request{'s' * (self.batch > 1)}, {self.heads} heads"
        return requests + (f", {self.s_q} query tokens" if self.s_q > 1 else "")

    def tflops(self, us: float) -> float:
        return self.flops / us / 1e6

    def gigabytes(self, us: float) -> float:
        """Gigabytes a second."""
        return self.bytes / us / 1e3


class SparseShape(Shape):
    """Of a sparse call: each of `batch` query tokens is a request of its own that attends to `length` gathered rows.

    `tokens` counts the rows of all lists, `bytes` those of different rows.
    """

    context: int  # rows of the cache that the lists are drawn from
    window: int = 0  # of DeepSeek-V4's call: how many of `length` are in the cache of the last tokens

    @property
    def batch_text(self) -> str:
        if self.window:
            return f"{self.batch} x {self.window}" + (f" + {self.length - self.window}" * (self.length > self.window))
        return super().batch_text

    @property
    def others_text(self) -> str:
        return f"{self.heads} heads, {self.cache} rows"

    @property
    def series(self) -> tuple[int, int, int]:
        return self.heads, self.length, self.fp8

    @property
    def place(self) -> int:
        return self.batch

    @property
    def series_text(self) -> str:
        return f"{self.others_text}, top-k {self.length}"


class Row(Shape):
    """A shape, and what became of each kernel on it."""

    calls: int  # of a graph
    rotated_bytes: int
    floor_us: float | None = None
    results: dict[str, Result]

    def timing(self, name: str) -> Measured | None:
        result = self.results.get(name)
        return result if isinstance(result, Measured) else None

    def us(self, name: str) -> float | None:
        timing = self.timing(name)
        return timing and timing.us

    def behind(self, name: str) -> float | None:
        """Microseconds behind another kernel."""
        timing = self.timing(name)
        return timing and timing.behind and timing.behind.us


class SparseRow(SparseShape, Row):
    pass


def row_of(shape: Shape, **measured) -> Row:
    """A shape's row, `measured` being its other fields."""
    return (SparseRow if isinstance(shape, SparseShape) else Row)(**shape.model_dump(), **measured)


class Options(Strict):
    """What a run was asked for."""

    kernels: list[str] = []
    replays: int = 21  # of each graph
    validated: bool = True  # whether results are compared with float64
    num_sms: int | None = None  # CTAs of our launch
    time_limit: float | None = None
    h20_proxy: bool = False
    behind: bool = False  # whether calls were timed behind another kernel, too
    traffic: float = 0.0  # TB/s that the proxy's held SMs read meanwhile


class Library(Strict):
    """One of several builds of our own that were timed in turns."""

    package: str  # the Python that called it
    sha256: str
    commit: str


class Published(Strict):
    """TFLOP/s of a kernel as others published them, of even batches, for the plots."""

    kernel: str
    gpu: str
    source: str
    batch: int = Field(ge=1)
    heads: int = Field(ge=1)
    tflops: dict[int, float]  # by tokens of each request


class Document(Provenance):
    """A results file of `etap bench`."""

    BATCHES: ClassVar[str] = "requests x tokens"  # what the rows' batch_text is
    OTHERS: ClassVar[tuple[str, ...]] = ("heads", "s_q")  # what else tells rows apart in a table
    AXIS: ClassVar[str] = "context (tokens)"  # of plots

    kind: Literal["bench"] = "bench"
    grid: str
    title: str
    multiprocessors: int
    options: Options
    libraries: dict[str, Library] = {}
    published: list[Published] = []
    floor: Floor | None = None
    left_out: list[str] = []  # rows that the GPU has no memory for
    complete: bool = False
    stopped: str | None = None
    schedule_build: ScheduleBuild | None = None
    # What launching one call takes of the host, of ours or of each library; of drop-ins' and their originals' also
    # WITH_PLAN.
    host_calls: dict[str, Timing] = {}
    rows: list[Row] = []

    @property
    def names(self) -> list[str]:
        """Kernels that have a time in at least one row, in their order of columns."""
        timed = {name for row in self.rows for name in row.results if row.us(name)}
        return [name for name in dict.fromkeys(name for row in self.rows for name in row.results) if name in timed]

    @property
    def own(self) -> list[str]:
        """Those of `names` that are ours: with one library its kernels, else those of every library; or drop-ins."""
        return [name for name in self.names if name in _ours(self)]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.names if name not in self.own]

    @property
    def drop_ins(self) -> dict[str, str]:
        """The drop-ins that were timed beside what they stand in for, and the column of that."""
        return {name: original for name, original in DROP_INS.items() if {name, original} <= {*self.names}}


class SparseDocument(Document):
    """A results file of `etap bench` on the sparse call."""

    BATCHES: ClassVar[str] = "tokens x keys"
    OTHERS: ClassVar[tuple[str, ...]] = ("heads", "cache")
    AXIS: ClassVar[str] = "query tokens"

    kind: Literal["bench-sparse"] = "bench-sparse"
    floor: GatherFloor | None = None
    rows: list[SparseRow] = []


def read(path: Path) -> Document:
    """A results file of either call. Raises ValueError, naming file and key, when it is none."""
    content = results.read_json(path)
    sparse = isinstance(content, dict) and content.get("kind") == SparseDocument.model_fields["kind"].default
    return results.parse(path, content, SparseDocument if sparse else Document)


def problems(document: Document) -> list[str]:
    """Rows where a result of our own is missing or further from float64 than its type allows."""
    wrong = []
    for row in document.rows:
        for name in _ours(document):
            limit = FP8_MATH_RMSE if _rounds_more(name, row) else LARGEST_RMSE[row.dtype]
            match row.results.get(name):
                case Failed(error=error):
                    wrong.append(f"{row.label}: {name}: {error}")
                case Measured(relative_rmse=float(rmse)) if not rmse <= limit:
                    wrong.append(f"{row.label}: {name}: relative RMSE {rmse:.2e}, wanted at most {limit:.1e}")
    return wrong


def _ours(document: Document) -> tuple[str, ...]:
    """Columns that may be ours in a document."""
    return tuple(name + suffix for name in document.libraries for suffix in ("", MATH_SUFFIX)) or (*OWN, *DROP_INS)


def _rounds_more(name: str, row: Row) -> bool:
    """Whether operands are rounded to e4m3 that the row's truth does not round: probabilities, or queries as FlashMLA
    wants them beside an FP8 cache."""
    return name.endswith(MATH_SUFFIX) or name == AS_FLASHMLA and row.fp8 and not isinstance(row, SparseShape)


def fastest(row: Row, names: Iterable[str], time: Callable[[Row, str], float | None] = Row.us) -> float | None:
    """Microseconds of the fastest of these kernels."""
    return min((us for name in names if (us := time(row, name))), default=None)


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under and math.isfinite(over / under) else None


def dumped(document: Document) -> dict:
    """A results file's content: what is not known or does not apply is not in it."""
    return document.model_dump(mode="json", exclude_none=True)

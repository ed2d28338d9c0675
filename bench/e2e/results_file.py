"""What a results file of `etap e2e` holds. Reading one imports no engine and no kernel."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, computed_field, model_serializer

from bench.common import results
from bench.common.configs import Strict
from bench.common.provenance import Provenance
from bench.common.units import load_text

HOST_TOLERANCE = 0.10
EVEN_ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # set where experts were drawn instead of chosen
DRAWING_PLUGIN = "drawn_experts"  # that does so in SGLang
COMPARABLE = (
    *("title", "engine", "gpu", "weights", "gpus", "layout", "draft_tokens", "kv_dtype", "versions", "environment"),
)


class Sparse(Strict):
    """Data whose absent values are absent in the file, too."""

    @model_serializer(mode="wrap")
    def _without_none(self, dump) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class Spread(Strict):
    median: float
    min: float
    max: float


def spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), min=min(values), max=max(values))


class Reading(Sparse):
    """One run of the load generator: times in milliseconds, of requests (TTFT, TPOT) or of all steps (ITL)."""

    median_ttft_ms: float
    median_tpot_ms: float
    output_throughput: float  # tokens a second
    mean_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    median_itl_ms: float | None = None
    duration: float | None = None  # seconds, of the load alone
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
    tokens_per_chunk: float | None = None  # of a stream
    acceptance_length: float | None = None
    seconds: float | None = None  # of the whole run, the load generator's own preparations included
    cached_share: float | None = None  # of the prompts' tokens
    host_ms: tuple[float, float] | None = None  # of a fixed loop of plain Python, before and after

    @property
    def host(self) -> float | None:
        """The slower of the host's loops before and after; None where it was not timed."""
        return max(self.host_ms) if self.host_ms else None


class Profile(Sparse):
    """Attention's share of the GPU time in decode steps, from a profiler's trace, or why there is none."""

    attention_share: float | None = None
    attention_ms: float | None = None
    kernels_ms: float | None = None
    steps: int | None = None
    kernels: list[dict] | None = None
    trace: str | None = None
    error: str | None = None


class Shape(Sparse):
    """The load that a row is of."""

    backend: str
    input: int
    output: int
    concurrency: int
    prefill: Literal["served", "cached"]
    waves: int = 1
    prefix: int = 0  # tokens of the input that all prompts have in common
    run: int = 0  # which of the document's runs it is of

    @property
    def shape(self) -> tuple[int, int, int, str, int]:
        return self.input, self.output, self.concurrency, self.prefill, self.prefix

    @property
    def load_of(self) -> dict[str, Any]:
        """Backend and load, which name a row of a document."""
        return self.model_dump(include={"backend", "input", "prefix", "output", "concurrency", "prefill", "waves"})

    @property
    def load_text(self) -> str:
        return load_text(self.concurrency, self.input, self.output, self.prefill, self.prefix)


def _spread_of(name: str):
    """A field of a row that follows from its readings: the spread of theirs, None where they have none."""

    def found(self) -> Spread | None:
        values = [value for reading in self.readings if (value := getattr(reading, name)) is not None]
        return spread(values) if values else None

    return computed_field(property(found))


class Measured(Shape):
    """Readings, as many as there are yet; and their median and range."""

    state: Literal["measured"] = "measured"
    readings: list[Reading] = []
    warm_up: Reading | None = None
    discarded: Reading | None = None  # of prompts that were to be in the cache and had been evicted
    complete: bool = False
    left_out: int | None = None  # readings at another speed of the host than those that are compared
    at_other_host: bool | None = None  # all were, so that the row is compared with none
    profile: Profile | None = None

    tpot_ms = _spread_of("median_tpot_ms")
    itl_ms = _spread_of("median_itl_ms")
    ttft_ms = _spread_of("median_ttft_ms")
    tokens_per_second = _spread_of("output_throughput")
    tokens_per_chunk = _spread_of("tokens_per_chunk")
    acceptance_length = _spread_of("acceptance_length")


class Skipped(Shape):
    """The server's cache is too small for it."""

    state: Literal["skipped"] = "skipped"
    reason: str


class Failed(Shape):
    """The load generator or the server failed."""

    state: Literal["failed"] = "failed"
    error: str
    readings: list[Reading] = []  # that there were before


COMPUTED = {*Measured.model_computed_fields, "tokens_per_second_per_gpu"}


def _as_read(data: Any) -> Any:
    """A row of a file without what follows from its readings, which is computed anew."""
    return {key: value for key, value in data.items() if key not in COMPUTED} if isinstance(data, dict) else data


Row = Annotated[Measured | Skipped | Failed, Field(discriminator="state"), BeforeValidator(_as_read)]


class Server(Sparse):
    """The last server of a backend."""

    command: str | None = None
    log: str | None = None
    seconds_to_ready: float | None = None
    cache: list[str] | None = None  # what its log says of it
    cache_tokens: int | None = None
    full_cuda_graphs: bool | None = None
    error: str | None = None


class Layout(Strict):
    """Tensor, pipeline and data parallelism, and decode context parallelism."""

    tp: int
    pp: int
    dp: int
    dcp: int = 1


class RunOf(Strict):
    """One of the runs that a document has rows of."""

    date: str
    commit: str
    library_sha256: str | None
    command: str
    note: str


class Document(Provenance):
    """A results file of `etap e2e`; it grows while the run goes on."""

    model_config = ConfigDict(extra="forbid", frozen=False)

    kind: Literal["e2e"] = "e2e"
    title: str
    engine: Literal["vllm", "sglang"]
    model: str
    weights: str
    dummy: bool
    model_shape: dict[str, Any] | None
    gpus: int
    layout: Layout
    draft_tokens: int
    acceptance: float | None
    kv_dtype: Literal["same", "fp8"] = "same"
    environment: dict[str, str] = {}
    method: str
    complete: bool = False
    stopped: str | None = None
    servers: dict[str, Server] = {}
    rows: list[Row] = []
    runs: list[RunOf] = []

    @property
    def all_runs(self) -> list[RunOf]:
        """What each run was that rows are of."""
        return self.runs or [RunOf(**{key: getattr(self, key) for key in RunOf.model_fields})]

    @property
    def draws_experts(self) -> bool:
        """Whether each token's experts were drawn, all equally likely, instead of chosen by the model's router."""
        return bool(self.environment.get(EVEN_ROUTING)) or DRAWING_PLUGIN in self.environment.get("SGLANG_PLUGINS", "")

    def by_shape(self) -> dict[tuple, dict[str, Measured | Skipped | Failed]]:
        """{shape: {backend: row}} in the order of the rows."""
        shapes: dict[tuple, dict] = {}
        for row in self.rows:
            shapes.setdefault(row.shape, {})[row.backend] = row
        return shapes

    def measured(self) -> list[Measured]:
        """Rows with a reading."""
        return [row for row in self.rows if isinstance(row, Measured) and row.readings]


def read(path: Path) -> Document:
    """Raises ValueError, naming file and key, when the file is none of `etap e2e`."""
    return results.read(path, Document)


def must_be_comparable(document: Document, other: Document) -> None:
    """Raises ValueError when rows of the two do not belong into one table."""
    if differing := [key for key in COMPARABLE if getattr(document, key) != getattr(other, key)]:
        raise ValueError(f"differs in {', '.join(differing)}")


def _equal_host(rows: list[Measured]) -> tuple[float, float] | None:
    """The span of host times, HOST_TOLERANCE wide, that has readings of most of these rows, then most readings, then
    the fastest; None where no host was timed."""
    hosts = [(reading.host, number) for number, row in enumerate(rows) for reading in row.readings if reading.host]

    def held(low: float) -> tuple[int, int, float]:
        within = [number for host, number in hosts if low <= host <= low * (1 + HOST_TOLERANCE)]
        return len(set(within)), len(within), -low

    low = max((host for host, _ in hosts), key=held, default=None)
    return None if low is None else (low, low * (1 + HOST_TOLERANCE))


def at_equal_host_speed(document: Document) -> Document:
    """The document with those readings of each point whose hosts were within HOST_TOLERANCE of each other, and in
    `left_out` how many others a row had. A row that has no such reading keeps its own and is `at_other_host`: it is
    compared with none. Readings from before hosts were timed stay."""
    found = []
    for of_point in document.by_shape().values():
        span = _equal_host([row for row in of_point.values() if isinstance(row, Measured) and not row.at_other_host])
        found += [_within(row, *span) if span and isinstance(row, Measured) else row for row in of_point.values()]
    return document.model_copy(update={"rows": found})


def _within(row: Measured, low: float, high: float) -> Measured:
    kept = [reading for reading in row.readings if not reading.host or low <= reading.host <= high]
    if not (left_out := len(row.readings) - len(kept)):
        return row
    changes = {"readings": kept, "left_out": left_out + (row.left_out or 0)} if kept else {"at_other_host": True}
    return row.model_copy(update=changes)

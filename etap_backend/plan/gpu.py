"""A GPU: memory, rates, and what one attention call takes there."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from etap_backend.limits import TILE_TOKENS
from etap_backend.plan import files
from etap_backend.plan.files import CACHE_BYTES, Quantity, Size

Status = Literal["measured", "nominal", "derived", "given"]
Cost = Annotated[float, 0, 1e18]
TILES_OF_A_REQUEST = 5


@dataclass(frozen=True)
class Figure:
    """A number, how it was found, and where."""

    value: Quantity
    status: Status
    source: str


@dataclass(frozen=True)
class Load:
    """What one call computes: requests (sparse attention: query tokens), the cache rows of each, and the CTAs that the
    call has for a row tile of 64."""

    requests: int
    tokens: float
    partitions: int

    @property
    def tiles(self) -> int:
        """Tiles of 64 cache rows of one request."""
        return max(1, math.ceil(self.tokens / TILE_TOKENS))

    @property
    def share(self) -> int:
        """Tiles of the fullest CTA, where a new request costs as much as TILES_OF_A_REQUEST (FlashMLA's scheduler)."""
        return -(-self.requests * (self.tiles + TILES_OF_A_REQUEST) // self.partitions)

    @property
    def splits(self) -> int:
        """Parts of one request that different CTAs compute."""
        return -(-self.tiles // self.share)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Time of one call of a kernel, fitted to files of results/ by bench/qualify/plan_agreement.py.

    It is fixed_us, and factor x the roofline or longest_us per 1,024 rows of one request, whichever is longer; then
    what the division of the work costs: full_factor x the roofline of a call whose CTAs are all as full as the
    fullest, wave_factor x that of whole waves of one CTA per request, part_us per part of all requests, split_us per
    part of one request and combine_us where requests have parts.
    """

    kernel: str
    kind: Literal["bfloat16", "fp8", "sparse", "sparse_fp8", "v4", "indexer", "top_k"]
    """A dense cache, what lists of rows are read from, or a sparse model's choice of tokens: logits and selection."""
    rows: Size
    """Query rows per request of a dense call, heads of a sparse one or an indexer, keys of a row of a selection."""
    fixed_us: Cost
    factor: Cost
    longest_us: Cost = 0.0
    full_factor: Cost = 0.0
    wave_factor: Cost = 0.0
    part_us: Cost = 0.0
    split_us: Cost = 0.0
    combine_us: Cost = 0.0
    status: Status
    source: str

    def microseconds(self, roofline_us: float, load: Load) -> float:
        return sum(map(operator.mul, self.costs, numbers(roofline_us, load, self.longest_us)))

    @property
    def costs(self) -> tuple[float, ...]:
        """The factors of `numbers`."""
        cut = self.full_factor, self.wave_factor, self.split_us, self.combine_us
        return self.fixed_us, self.factor, self.part_us, *cut


def numbers(roofline_us: float, load: Load, longest_us: float = 0.0) -> tuple[float, ...]:
    """What the costs of a call are multiplied by."""
    work = max(roofline_us, longest_us * load.tokens / 1024) if longest_us else roofline_us
    fullest = load.partitions * (load.share + TILES_OF_A_REQUEST) * TILE_TOKENS
    full = roofline_us * fullest / (load.requests * load.tokens)
    waves = roofline_us * -(-load.requests // load.partitions) * load.partitions / load.requests
    return 1.0, work, load.requests * load.splits, full, waves, load.splits, load.splits > 1


LONGEST_REST = Figure(
    1.77,
    "derived",
    "attention is 30% of a step at 16 x 16K on 8 x H20 (README of FlashMLA-ETAP): 42.9 ms of rest, planned 24.2",
)


@dataclass(frozen=True)
class Gpu:
    """A file of configs/hardware; rates in bytes or dense operations per second."""

    name: str
    memory_bytes: Figure
    bandwidth: Figure
    sustained_bandwidth: Figure
    bf16_flops: Figure
    fp8_flops: Figure
    sustained_bf16_flops: Figure
    sms: Figure
    calls: tuple[Call, ...] = ()
    calls_like: str = ""  # the GPU whose calls stand in for this one's
    longest_rest: Figure = LONGEST_REST  # how many times its estimate the rest of a step may take

    def calls_of(self, kind: str, rows: int) -> dict[str, Call]:
        """Each kernel's call, from this file or the one that it names: of the next larger number of rows that was
        timed, and of a dense cache, whose rows are computed in groups, at most of the largest."""
        like = _stand_in(self.calls_like) if self.calls_like else self
        found: dict[str, Call] = {}
        for call in sorted((call for call in like.calls if call.kind == kind), key=lambda call: call.rows):
            if call.kernel not in found or found[call.kernel].rows < rows:
                found[call.kernel] = call
        for kernel, call in list(found.items()):
            if call.rows < rows and kind not in CACHE_BYTES:
                del found[kernel]
            elif call.rows != rows or like is not self:
                of = "rows" if kind in CACHE_BYTES else "keys" if kind == "top_k" else "heads"
                others = f"as of {call.rows} {of}" * (call.rows != rows)
                source = "; ".join(filter(None, (call.source, others, f"as on an {like.name}" * (like is not self))))
                found[kernel] = replace(call, source=source, status="derived")
        return found

    def sustained_flops(self, *, fp8: bool) -> float:
        """Operations per second of WGMMA on 16-bit or FP8 numbers; FP8 reaches the same share of its nominal rate."""
        share = self.sustained_bf16_flops.value / self.bf16_flops.value
        return self.fp8_flops.value * share if fp8 else self.sustained_bf16_flops.value


@functools.cache
def _stand_in(name: str) -> Gpu:
    """The GPU whose calls stand in for another's, read once."""
    return read_gpu(name)


def read_gpu(name: str) -> Gpu:
    """A shipped GPU by name, or any file like it. Raises ValueError otherwise."""
    path = files.find("hardware", name)
    content = files.read_json(path, "gpu")
    try:
        return files.record(Gpu, content, strict=True)
    except ValueError as error:
        raise ValueError(f"gpu: {path}: {error}") from error

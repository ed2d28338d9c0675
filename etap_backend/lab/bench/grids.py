"""What `etap bench` measures and against what: workloads, the files that list them, and the floors."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from etap_backend.support import HEAD_DIM, LATENT_DIM

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CACHE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
KV_DTYPES = ("same", "fp8")
"""Types that a grid may ask for: the query's, or e4m3."""


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
        return self.tokens * HEAD_DIM * CACHE_BYTES["fp8" if self.fp8 else self.dtype]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the caches that a run holds; beside an FP8 cache stands the bf16 one that it was made of."""
        return self.kv_bytes + (self.tokens * HEAD_DIM * CACHE_BYTES["bfloat16"] if self.fp8 else 0)

    @property
    def flops(self) -> int:
        return 2 * self.heads * self.s_q * self.tokens * (HEAD_DIM + LATENT_DIM)

    @property
    def label(self) -> str:
        shape = self.name or f"{len(self.lengths)} x {in_k(self.lengths[0])}"
        types = ("" if self.dtype == "bfloat16" else f", {self.dtype}") + (", FP8 cache" if self.fp8 else "")
        return f"{shape}, {self.heads} heads, s_q {self.s_q}{types}"

    def describe(self) -> dict:
        even = len(set(self.lengths)) == 1
        return {
            "label": self.label,
            "name": self.name,
            "batch": len(self.lengths),
            "length": self.lengths[0] if even else None,
            "longest": max(self.lengths),
            "tokens": self.tokens,
            "heads": self.heads,
            "s_q": self.s_q,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "bytes": self.kv_bytes,
            "flops": self.flops,
        }


def in_k(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True)
class Floor:
    """The time that no call can beat: bytes over bandwidth or operations over the tensor cores' rate, and a launch."""

    bandwidth: float  # bytes a second that the copy engine reaches on random pages
    flops: float  # bf16 operations a second that WGMMA reaches in its best shape; in FP8 they are twice as many
    launch_us: float = 3.5

    def microseconds(self, workload: Workload) -> float:
        seconds = max(workload.kv_bytes / self.bandwidth, workload.flops / (self.flops * (2 if workload.fp8 else 1)))
        return seconds * 1e6 + self.launch_us

    def describe(self, *, fp8: bool = False) -> dict:
        rate = f"{self.flops * (2 if fp8 else 1) / 1e12:.0f} TFLOP/s{' in FP8' if fp8 else ''}"
        roofs = f"bytes / {self.bandwidth / 1e12:.2f} TB/s, operations / {rate}"
        return {**asdict(self), "text": f"max({roofs}) + {self.launch_us} us"}


# Both measured on an H200, with 132 CTAs at its own rate and with 78 CTAs and throttled WGMMA.
H200_FLOOR = Floor(4.57e12, 947e12)
PROXY_FLOOR = Floor(4.30e12, 132e12)


def floor_for(gpu: str) -> Floor | None:
    """The floor of a GPU by its name, or None where nothing was measured."""
    if "H20 proxy" in gpu:
        return PROXY_FLOOR
    return H200_FLOOR if "H200" in gpu else None


def load_grid(path: Path, memory_bytes: float | None = None, kv_dtype: str | None = None) -> tuple[str, list[Workload]]:
    """Title and workloads of a grid file; rows whose cache takes more than 80% of `memory_bytes` are left out.

    `kv_dtype`, unless None, takes the place of every row's.

    A [[rows]] table gives heads and s_q (lists), dtype, kv_dtype (fp8, or same as dtype), and the batches in one of
    three ways: `shapes` (pairs of requests and tokens), `batch` and `tokens` (lists, all combinations), or `name` with
    `mixed` (pairs of requests and tokens in one batch) or `lognormal` (requests, median, sigma, longest, seed), where
    `even = true` adds a batch of the same tokens spread evenly.

    Raises ValueError, naming file and key, when the file is not like that.
    """
    with path.open("rb") as file:
        try:
            content = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
    workloads = []
    for number, table in enumerate(content.get("rows", [])):
        try:
            workloads += _workloads(table if kv_dtype is None else {**table, "kv_dtype": kv_dtype})
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: rows {number}: {what}") from error
    if not workloads:
        raise ValueError(f"{path}: wanted at least one [[rows]] table with a batch")
    fitting = [w for w in workloads if memory_bytes is None or w.memory_bytes < 0.8 * memory_bytes]
    return content.get("title", path.stem), fitting


KEYS = {"heads", "s_q", "dtype", "kv_dtype", "shapes", "batch", "tokens", "name", "mixed", "lognormal", "even"}


def _workloads(table: dict) -> list[Workload]:
    if unknown := set(table) - KEYS:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    dtype = table.get("dtype", "bfloat16")
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype: wanted bfloat16 or float16, got {dtype}")
    kv_dtype = table.get("kv_dtype", "same")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype: wanted {' or '.join(KV_DTYPES)}, got {kv_dtype}")
    batches = _batches(table)
    if any(not lengths or min(lengths) < 1 for _, lengths in batches):
        raise ValueError("wanted at least one request, each of at least one token")
    rows = product(table.get("heads", [16]), table.get("s_q", [1]), batches)
    return [Workload(lengths, heads, s_q, dtype, name, kv_dtype) for heads, s_q, (name, lengths) in rows]


def _batches(table: dict) -> list[tuple[str, tuple[int, ...]]]:
    """(name, lengths) of every batch of a table; even batches need no name."""
    if "shapes" in table:
        return [("", (tokens,) * batch) for batch, tokens in table["shapes"]]
    if "batch" in table:
        return [("", (tokens,) * batch) for batch, tokens in product(table["batch"], table["tokens"])]
    if "mixed" in table:
        lengths = tuple(tokens for requests, tokens in table["mixed"] for _ in range(requests))
    else:
        lengths = _lognormal(**table["lognormal"])
    batches = [(table["name"], lengths)]
    if table.get("even"):
        share, rest = divmod(sum(lengths), len(lengths))
        even = tuple(share + (request < rest) for request in range(len(lengths)))
        batches.append((f"{table['name']}, evened out", even))
    return batches


def _lognormal(requests: int, median: int, sigma: float, longest: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(max(1, min(longest, round(median * draw.lognormvariate(0, sigma)))) for _ in range(requests))

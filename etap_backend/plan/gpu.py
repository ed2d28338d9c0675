"""A GPU: memory, rates, and what one attention call takes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from etap_backend.plan import files
from etap_backend.plan.files import Quantity, Size

Status = Literal["measured", "nominal", "derived", "given"]
Microseconds = Annotated[float, 0, 1e18]


@dataclass(frozen=True)
class Figure:
    """A number, how it was found, and where."""

    value: Quantity
    status: Status
    source: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """Time of one attention call: `fixed_us` + `factor` x its roofline."""

    fixed_us: Microseconds
    factor: Annotated[float, 1, 1e18]
    status: Status
    source: str

    def microseconds(self, roofline_us: float) -> float:
        return self.fixed_us + self.factor * roofline_us


@dataclass(frozen=True, kw_only=True)
class SparseCall(Call):
    """Time of one sparse attention call of `heads` heads on a bfloat16 or FP8 cache, or on DeepSeek-V4's."""

    kernel: str
    heads: Size
    fp8: bool
    v4: bool = False


LONGEST_REST = Figure(
    1.74,
    "derived",
    "attention is 30% of a step at 16 x 16K on 8 x H20 (README of FlashMLA-ETAP): 42.1 ms of rest, planned 24.2",
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
    etap: Call
    padded: Call  # FlashMLA's kernels without an engine, built from its sources
    etap_fp8_math: Call | None = None  # with FP8 products, where they follow another line
    padded_in_vllm: Call | None = None  # FlashMLA as vLLM ships and calls it, where that was measured
    longest_rest: Figure = LONGEST_REST  # how many times its estimate the rest of a step may take
    sparse: tuple[SparseCall, ...] = ()
    sparse_like: str = ""  # the GPU whose `sparse` calls stand in for this one's

    def sustained_flops(self, *, fp8: bool) -> float:
        """Operations per second of WGMMA on 16-bit or FP8 numbers; FP8 reaches the same share of its nominal rate."""
        share = self.sustained_bf16_flops.value / self.bf16_flops.value
        return self.fp8_flops.value * share if fp8 else self.sustained_bf16_flops.value


def read_gpu(name: str) -> Gpu:
    """A shipped GPU by name, or any file like it. Raises ValueError otherwise."""
    path = files.find("hardware", name)
    content = files.read_json(path, "gpu")
    try:
        return files.record(Gpu, content, strict=True)
    except ValueError as error:
        raise ValueError(f"gpu: {path}: {error}") from error

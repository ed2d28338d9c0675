"""The floor, the time that no call can beat: bytes / bandwidth or operations / tensor-core rate, and a launch."""

from __future__ import annotations

from typing import NamedTuple

from bench.kernels.grids import Workload


class Floor(NamedTuple):
    """Measured limits of a GPU: bytes and operations per second, microseconds of a launch."""

    bandwidth: float
    flops: float
    launch_us: float

    def us(self, workload: Workload) -> float:
        """Microseconds of a call."""
        return max(workload.bytes / self.bandwidth, workload.flops / self.flops) * 1e6 + self.launch_us

    @property
    def text(self) -> str:
        limits = f"bytes / {self.bandwidth / 1e12:.2f} TB/s, operations / {self.flops / 1e12:.0f} TFLOP/s"
        return f"max({limits}) + {self.launch_us} us"


# Measured on an H200 at 132 CTAs, and throttled at 78. Dense: the copy engine on random pages, WGMMA in its fastest
# shape. Sparse: gathering 2048 rows per token into shared memory by 16-byte cp.async, for 8 to 128 tokens, takes this
# time to 6% more; every kernel multiplies FP8 rows (656 bytes) in 16 bits. Nothing was measured for V4's rows.
FLOORS = {
    "H200": {
        "plain": Floor(4.57e12, 947e12, 3.5),
        "fp8": Floor(4.57e12, 2 * 947e12, 3.5),
        "sparse": Floor(4.46e12, 947e12, 2.7),
        "sparse_fp8": Floor(3.71e12, 947e12, 2.7),
    },
    "H20 proxy": {
        "plain": Floor(4.30e12, 132e12, 3.5),
        "fp8": Floor(4.30e12, 2 * 132e12, 3.5),
        "sparse": Floor(4.36e12, 132e12, 2.6),
        "sparse_fp8": Floor(2.92e12, 132e12, 2.6),
    },
}


def floor_for(gpu: str, kind: str) -> Floor | None:
    """The floor of a GPU by its name, for a workload's kind; None where nothing was measured."""
    name = "H20 proxy" if "H20 proxy" in gpu else "H200" if "H200" in gpu else ""
    return FLOORS.get(name, {}).get(kind)

"""The floor, the time that no call can beat: bytes / bandwidth or operations / tensor-core rate, and a launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Floor:
    """Measured limits of a GPU: bytes and operations per second, microseconds of a launch."""

    bandwidth: float
    fp8_bandwidth: float
    flops: float
    fp8_flops: float
    launch_us: float

    def us(self, *, read: int, flops: int, fp8: bool) -> float:
        """Microseconds of a call that reads so many bytes of a cache."""
        seconds = read / (self.fp8_bandwidth if fp8 else self.bandwidth)
        return max(seconds, flops / (self.fp8_flops if fp8 else self.flops)) * 1e6 + self.launch_us

    @property
    def text(self) -> str:
        bytes_, operations = (
            f"bytes / {self.bandwidth / 1e12:.2f} TB/s",
            f"operations / {self.flops / 1e12:.0f} TFLOP/s",
        )
        if self.fp8_bandwidth != self.bandwidth:
            bytes_ += f" (FP8 rows: {self.fp8_bandwidth / 1e12:.2f})"
        if self.fp8_flops != self.flops:
            operations += f" (FP8 cache: {self.fp8_flops / 1e12:.0f})"
        return f"max({bytes_}, {operations}) + {self.launch_us} us"


# Measured on an H200 at 132 CTAs, and throttled at 78: the copy engine on random pages, WGMMA in its fastest shape.
DENSE = {
    "H200": Floor(bandwidth=4.57e12, fp8_bandwidth=4.57e12, flops=947e12, fp8_flops=2 * 947e12, launch_us=3.5),
    "H20 proxy": Floor(bandwidth=4.30e12, fp8_bandwidth=4.30e12, flops=132e12, fp8_flops=2 * 132e12, launch_us=3.5),
}
# Gathering 2048 rows per token into shared memory by 16-byte cp.async, for 8 to 128 tokens, takes this time to 6% more.
# Every kernel multiplies FP8 rows (656 bytes) in 16 bits.
SPARSE = {
    "H200": Floor(bandwidth=4.46e12, fp8_bandwidth=3.71e12, flops=947e12, fp8_flops=947e12, launch_us=2.7),
    "H20 proxy": Floor(bandwidth=4.36e12, fp8_bandwidth=2.92e12, flops=132e12, fp8_flops=132e12, launch_us=2.6),
}


def floor_for(gpu: str, kind: str) -> Floor | None:
    """The floor of a GPU by its name, for a workload's kind; None where nothing was measured, as for V4's rows."""
    floors = {"plain": DENSE, "fp8": DENSE, "sparse": SPARSE, "sparse_fp8": SPARSE}.get(kind, {})
    name = "H20 proxy" if "H20 proxy" in gpu else "H200" if "H200" in gpu else ""
    return floors.get(name)

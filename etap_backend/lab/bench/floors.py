"""The time that no call can beat: bytes over bandwidth or operations over the tensor cores' rate, and a launch."""

from __future__ import annotations

from etap_backend.lab.configs import Strict


class Floor(Strict):
    """What a GPU reaches at best; `text` says it to a reader."""

    bandwidth: float  # bytes a second that the copy engine reaches on random pages
    flops: float  # bf16 operations a second that WGMMA reaches in its best shape; in FP8 they are twice as many
    launch_us: float = 3.5
    text: str = ""

    def microseconds(self, *, kv_bytes: int, flops: int, fp8: bool) -> float:
        return self.seconds(kv_bytes=kv_bytes, flops=flops, fp8=fp8) * 1e6 + self.launch_us

    def seconds(self, *, kv_bytes: int, flops: float, fp8: bool) -> float:
        """Of the longer of the two, without a launch."""
        return max(kv_bytes / self.bandwidth, flops / (self.flops * (2 if fp8 else 1)))

    def said(self, *, fp8: bool) -> Floor:
        """The floor with its text."""
        rate = f"{self.flops * (2 if fp8 else 1) / 1e12:.0f} TFLOP/s{' in FP8' if fp8 else ''}"
        roofs = f"bytes / {self.bandwidth / 1e12:.2f} TB/s, operations / {rate}"
        return self.model_copy(update={"text": f"max({roofs}) + {self.launch_us} us"})


# Both measured on an H200, with 132 CTAs at its own rate and with 78 CTAs and throttled WGMMA.
H200_FLOOR = Floor(bandwidth=4.57e12, flops=947e12)
PROXY_FLOOR = Floor(bandwidth=4.30e12, flops=132e12)


def floor_for(gpu: str) -> Floor | None:
    """The floor of a GPU by its name, or None where nothing was measured."""
    if "H20 proxy" in gpu:
        return PROXY_FLOOR
    return H200_FLOOR if "H200" in gpu else None

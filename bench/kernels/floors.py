"""The time that no call can beat: bytes over bandwidth or operations over the tensor cores' rate, and a launch."""

from __future__ import annotations

from bench.common.configs import Strict


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


class GatherFloor(Floor):
    """Of the sparse call: `bandwidth` is that of gathering rows of 1152 bytes one by one."""

    fp8_bandwidth: float  # the same of rows of 656 bytes

    def seconds(self, *, kv_bytes: int, flops: float, fp8: bool) -> float:
        """Products are taken in 16 bits for FP8 rows too: every kernel widens them, a row's rope part is bf16."""
        return max(kv_bytes / (self.fp8_bandwidth if fp8 else self.bandwidth), flops / self.flops)

    def said(self, *, fp8: bool) -> GatherFloor:
        rate = f"{self.bandwidth / 1e12:.2f} TB/s"
        if fp8:
            rate += f" (rows of 656 bytes: {self.fp8_bandwidth / 1e12:.2f})"
        roofs = f"gathered bytes / {rate}, operations / {self.flops / 1e12:.0f} TFLOP/s"
        return self.model_copy(update={"text": f"max({roofs}) + {self.launch_us} us"})


# Both measured on an H200, with 132 CTAs at its own rate and with 78 CTAs and throttled WGMMA.
H200_FLOOR = Floor(bandwidth=4.57e12, flops=947e12)
PROXY_FLOOR = Floor(bandwidth=4.30e12, flops=132e12)
# As many CTAs. Gathering 2048 rows for each of 8, 16, 64 and 128 tokens into shared memory by 16-byte cp.async, and
# nothing else, takes this time to 6% more.
H200_GATHER_FLOOR = GatherFloor(bandwidth=4.46e12, fp8_bandwidth=3.71e12, flops=947e12, launch_us=2.7)
PROXY_GATHER_FLOOR = GatherFloor(bandwidth=4.36e12, fp8_bandwidth=2.92e12, flops=132e12, launch_us=2.6)


def floor_for(gpu: str, *, sparse: bool = False) -> Floor | None:
    """The floor of a GPU by its name, of the dense call or of the sparse one; None where nothing was measured."""
    h200, proxy = (H200_GATHER_FLOOR, PROXY_GATHER_FLOOR) if sparse else (H200_FLOOR, PROXY_FLOOR)
    if "H20 proxy" in gpu:
        return proxy
    return h200 if "H200" in gpu else None

"""Asks the driver about the GPUs through NVML, without touching CUDA."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pynvml

MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU; `clocks` are the greatest ones of SMs and memory, and the power limit, as far as known."""

    name: str
    memory_mib: int | None
    driver: str
    clocks: list[str]


@contextmanager
def _devices() -> Iterator[list]:
    """NVML's handles of all GPUs while it is open; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _visible(devices: list) -> list:
    """The GPUs that CUDA_VISIBLE_DEVICES names by index or UUID, or all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return devices
    by_name = {str(index): device for index, device in enumerate(devices)}
    by_name |= {pynvml.nvmlDeviceGetUUID(device): device for device in devices}
    return [by_name[name] for name in map(str.strip, names.split(",")) if name in by_name]


def _known(read, *arguments):
    """NVML's answer, or None where this GPU or driver has none."""
    with suppress(pynvml.NVMLError):
        return read(*arguments)
    return None


def _clocks(device) -> list[str]:
    kinds = (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    found = [_known(pynvml.nvmlDeviceGetMaxClockInfo, device, kind) for kind in kinds]
    limit = _known(pynvml.nvmlDeviceGetEnforcedPowerLimit, device)
    return [f"{mhz} MHz" for mhz in found if mhz] + ([f"{limit / 1e3:.0f} W"] if limit else [])


def gpus() -> list[Gpu]:
    """The visible GPUs in the order of CUDA_VISIBLE_DEVICES; none without a driver."""
    with _devices() as devices:
        driver = pynvml.nvmlSystemGetDriverVersion() if devices else ""
        return [
            Gpu(pynvml.nvmlDeviceGetName(one), pynvml.nvmlDeviceGetMemoryInfo(one).total // MIB, driver, _clocks(one))
            for one in _visible(devices)
        ]


def used_mib() -> float | None:
    """MiB in use on the visible GPUs together, by any process; None without a driver or a GPU."""
    with _devices() as devices:
        used = [pynvml.nvmlDeviceGetMemoryInfo(one).used / MIB for one in _visible(devices)]
    return sum(used) if used else None


def process_mib(pids: Collection[int]) -> float | None:
    """MiB of these processes on all GPUs of the machine.

    None where the driver knows none of them: outside a container process ids may differ.
    """
    found: list[float] = []
    with _devices() as devices:
        for device in devices:
            running = _known(pynvml.nvmlDeviceGetComputeRunningProcesses, device) or ()
            found += [each.usedGpuMemory / MIB for each in running if each.pid in pids and each.usedGpuMemory]
    return sum(found) if found else None

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
    """One GPU with its greatest clocks and power; None where the driver does not know."""

    name: str
    memory_mib: int
    driver: str
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_limit_w: float | None

    @property
    def clocks(self) -> list[str]:
        """Greatest clocks of SMs and memory, and the power limit, as far as known."""
        known = ((self.sm_clock_mhz, "MHz", 0), (self.memory_clock_mhz, "MHz", 0), (self.power_limit_w, "W", 2))
        return [f"{value:.{digits}f} {unit}" for value, unit, digits in known if value is not None]


@contextmanager
def _nvml() -> Iterator[bool]:
    """Open NVML; yields whether there is a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _handles(*, everywhere: bool = False) -> list:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES names by index or UUID, or of all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if everywhere or visible is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        try:
            if name.isdecimal():
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                handles.append(pynvml.nvmlDeviceGetHandleByUUID(name))
        except pynvml.NVMLError:
            break  # like CUDA: devices after the first invalid one are not visible
    return handles


def _known(read, *arguments):
    """NVML's answer, or None where this GPU or driver has none."""
    with suppress(pynvml.NVMLError):
        return read(*arguments)
    return None


def count() -> int:
    """GPUs of the machine, visible or not; 0 without a driver."""
    with _nvml() as there:
        return pynvml.nvmlDeviceGetCount() if there else 0


def gpus() -> list[Gpu]:
    """The visible GPUs in the order of CUDA_VISIBLE_DEVICES; none without a driver."""
    found = []
    with _nvml() as there:
        driver = pynvml.nvmlSystemGetDriverVersion() if there else ""
        for handle in _handles() if there else ():
            limit = _known(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
            found.append(
                Gpu(
                    name=pynvml.nvmlDeviceGetName(handle),
                    memory_mib=pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB,
                    driver=driver,
                    sm_clock_mhz=_known(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
                    memory_clock_mhz=_known(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
                    power_limit_w=limit and limit / 1e3,
                )
            )
    return found


def used_mib() -> float | None:
    """MiB in use on the visible GPUs together, by any process; None without a driver or a GPU."""
    with _nvml() as there:
        handles = _handles() if there else []
        used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used / MIB for handle in handles]
    return sum(used) if used else None


def process_mib(pids: Collection[int]) -> float | None:
    """MiB of these processes on all GPUs of the machine.

    None where the driver knows none of them: outside a container process ids may differ.
    """
    found: list[float] = []
    with _nvml() as there:
        for handle in _handles(everywhere=True) if there else ():
            running = _known(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            found += [each.usedGpuMemory / MIB for each in running if each.pid in pids and each.usedGpuMemory]
    return sum(found) if found else None

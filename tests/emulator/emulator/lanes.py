"""The lanes of a warp, as numbers with 32 bits and as masks, and instructions that run in some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .ptx import LANES, SINK, EmulationError, Instruction

FULL = 0xFFFFFFFF


@dataclass
class Group:
    """Lanes of a warp that are at the same segment of code."""

    pc: int
    bits: int
    waits: str = ""  # for what; empty when it can run
    since: int = -1  # how many events the CTA had had when it began to wait
    ticket: tuple | None = None  # what an operation keeps between its tries


@lru_cache(maxsize=4096)
def lanes_of(bits: int) -> np.ndarray:
    mask = np.array([bool(bits >> lane & 1) for lane in range(LANES)])
    mask.setflags(write=False)
    return mask


def bits_of(mask: np.ndarray) -> int:
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def put(warp, reg, value: np.ndarray, bits: int) -> None:
    """Write a register in some lanes."""
    if reg == SINK:
        return
    value = value.view(reg.dtype)
    warp.R[reg.index] = value if bits == FULL else np.where(lanes_of(bits), value, warp.R[reg.index])


def uniform(values: np.ndarray, bits: int, what: str) -> int:
    """The value that all lanes agree on."""
    chosen = values if bits == FULL else values[lanes_of(bits)]
    if (chosen != chosen[0]).any():
        raise EmulationError(f"{what} differs between the lanes: {chosen.tolist()}")
    return int(chosen[0])


def active(item: Instruction, warp, group: Group) -> int:
    """Lanes of a group for which the instruction's guard holds."""
    if item.guard is None:
        return group.bits
    reg, negated = item.guard
    taken = warp.R[reg.index]
    return bits_of(~taken if negated else taken) & group.bits


def aligned(item: Instruction, run: Callable) -> Callable:
    """Handler of an instruction that needs all of the warp's living lanes, with a guard that is the same for all."""

    def handler(cta, warp, group: Group):
        if group.bits != warp.live:
            return "the warp's other lanes"
        bits = active(item, warp, group)
        if bits not in (0, group.bits):
            raise EmulationError("the guard of a warp-wide instruction differs between the lanes")
        return run(cta, warp, group) if bits else None

    return handler


def lanewise(item: Instruction, run: Callable) -> Callable:
    """Handler of an instruction that each active lane runs for itself."""

    def handler(cta, warp, group: Group):
        bits = active(item, warp, group)
        return run(cta, warp, bits) if bits else None

    return handler

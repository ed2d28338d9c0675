"""A CTA's shared memory, with what is known of each byte.

That is whether anyone wrote it, whether a copy still fills it, whether an mbarrier lies there, and whose write the
asynchronous units (TMA, WGMMA) may not see yet.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from .ptx import SHARED_BASE, EmulationError

MAX_SHARED = 232448
UNWRITTEN, IN_FLIGHT, BARRIER = 1, 2, 4  # flags of a byte; none: it holds data
WHY = {UNWRITTEN: "never written", IN_FLIGHT: "being filled by a copy in flight", BARRIER: "an mbarrier"}
COPIED = 128  # added to the mark of an unfenced write by cp.async
ONES = {1: np.uint8(1), 2: np.uint16(0x0101), 4: np.uint32(0x01010101), 8: np.uint64(0x0101010101010101)}
LOCKED = {size: ones * ones.dtype.type(IN_FLIGHT | BARRIER) for size, ones in ONES.items()}


class SharedMemory:
    """Items of 1, 2, 4 or 8 bytes are indexed by address / size; `units` are 16 bytes."""

    def __init__(self, size: int):
        self.end = SHARED_BASE + -(-size // 16) * 16
        data = np.full(self.end, 0xFF, np.uint8)  # NaN in every type
        state = np.full(self.end, UNWRITTEN, np.uint8)
        unfenced = np.zeros(self.end, np.uint8)  # 1 + the warp whose write is not fenced (+ COPIED)
        self._numbers = np.zeros(self.end // 4, np.int64)  # of the write that brought a word, among its warp's writes
        self._state, self._unfenced = state, unfenced
        self._views, self._state_views, self._unfenced_views = (
            {n: x.view(f"uint{n * 8}") for n in (1, 2, 4, 8)} for x in (data, state, unfenced)
        )
        self._data_units, self._state_units, self._unfenced_units = (x.reshape(-1, 16) for x in (data, state, unfenced))
        self._written: dict[int, list] = defaultdict(list)  # by warp: (item bytes, index, mark) since its last fence

    def index(self, address: np.ndarray, size: int, count: int = 1) -> np.ndarray:
        """Indices of the first of `count` items; accesses are aligned to all of them."""
        whole = size * count
        if (address & np.uint32(whole - 1)).any():
            raise EmulationError(f"misaligned shared access of {whole} bytes at {[hex(a) for a in address.tolist()]}")
        if int(address.min()) < SHARED_BASE or int(address.max()) + whole > self.end:
            at = [hex(a) for a in address.tolist()]
            bounds = f"[{SHARED_BASE:#x}, {self.end:#x})"
            raise EmulationError(f"shared access of {whole} bytes out of bounds {bounds}: {at}")
        return (address // np.uint32(size)).astype(np.int64)

    def load(self, address: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        index, out = self.index(address, size, count), []
        for n in range(count):
            at = index + n
            if self._state_views[size][at].any():
                self._refuse(at, size, "read of")
            out.append(self._views[size][at])
        return out

    def store(self, address: np.ndarray, size: int, values: list[np.ndarray], warp: int, number: int) -> None:
        """A warp's ordinary write, its number-th."""
        index = self.index(address, size, len(values))
        for n, value in enumerate(values):
            self._put(index + n, size, value, warp, number)

    def read_units(self, units: np.ndarray, what: str, fenced: np.ndarray | None = None) -> np.ndarray:
        """Bytes [..., 16], for an asynchronous unit NaN where a write is not fenced, which a kernel may throw away.

        fenced: how many of each warp's cp.async, and then of each one's ordinary writes, the reader has fenced itself;
            None for an ordinary read.
        """
        if self._state_units.view(np.uint64)[units].any():
            self._refuse(units, 16, what)
        raw = self._data_units[units]
        if fenced is not None and (marks := self._unfenced_units[units]).any():
            writer = (marks % COPIED).astype(np.int64) - 1 + np.where(marks > COPIED, 0, len(fenced) // 2)
            numbers = self._numbers.reshape(-1, 4)[units].repeat(4, axis=-1)
            raw[(marks > 0) & (fenced[writer] < numbers)] = 0xFF
        return raw

    def store_units(self, units: np.ndarray, raw: np.ndarray, warp: int, number: int) -> None:
        """The same of 16 bytes each."""
        self._put(units[:, None] * 2 + np.arange(2), 8, raw.view(np.uint64), warp, number)

    def begin_copy(self, index: np.ndarray, size: int = 8) -> None:
        """A copy to `size` bytes each is on its way."""
        if (self._state_views[size][index] & LOCKED[size]).any():
            self._refuse(index, size, "copy to")
        self._views[size][index] = ~self._views[size].dtype.type(0)
        self._state_views[size][index] = ONES[size] * IN_FLIGHT

    def end_copy(self, index: np.ndarray, raw: np.ndarray, warp: int | None, number: int = 0) -> None:
        """The data arrives; a warp's own cp.async is a write of its that the asynchronous units may not see yet."""
        size = min(8, raw.shape[-1])
        self._state_views[size][index] = 0
        self._views[size][index] = raw.view(f"uint{8 * size}")
        if warp is not None:
            self._mark(index, size, warp, number, COPIED)

    def lock_barrier(self, address: int) -> None:
        self.index(np.array([address], np.uint32), 8)
        self._state[address : address + 8] = BARRIER

    def fence(self, warp: int) -> None:
        """What the warp has written so far is visible to the asynchronous units."""
        for size, index, mark in self._written.pop(warp, ()):
            marks = self._unfenced_views[size]
            found = marks[index]
            marks[index] = np.where(found == mark, 0, found)

    def refuse_unfenced(self, units: np.ndarray, what: str) -> None:
        marks = self._unfenced_units[units]
        if marks.any():
            raise EmulationError(
                f"{what} shared memory that warp {int(marks.max()) % COPIED - 1} wrote without fence.proxy.async since"
            )

    def _put(self, index: np.ndarray, size: int, value: np.ndarray, warp: int, number: int) -> None:
        if (self._state_views[size][index] & LOCKED[size]).any():
            self._refuse(index, size, "write to")
        self._views[size][index] = value
        self._state_views[size][index] = 0
        self._mark(index, size, warp, number)

    def _mark(self, index: np.ndarray, size: int, warp: int, number: int, how: int = 0) -> None:
        mark = (warp + 1 + how) * ONES[size]
        self._unfenced_views[size][index] = mark
        self._numbers.reshape(-1, max(1, size // 4))[index // max(1, 4 // size)] = number
        self._written[warp].append((size, index, mark))

    def _refuse(self, index: np.ndarray, size: int, what: str) -> None:
        flags = self._state.reshape(-1, size)[index].max(axis=-1).reshape(-1)
        worst = int(flags.argmax())
        at = int(index.reshape(-1)[worst]) * size
        reasons = [text for flag, text in WHY.items() if int(flags[worst]) & flag]
        raise EmulationError(
            f"{what} shared memory at {at:#x} (offset {at - SHARED_BASE}) that is {' and '.join(reasons)}"
        )

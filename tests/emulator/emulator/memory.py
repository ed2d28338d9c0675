"""Global memory, bounded tensor by tensor, and the tensor maps that TMA reads it through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ptx import EmulationError


@dataclass
class TensorMap:
    """A tiled CUtensorMap: dims, box and coordinates in elements, innermost first; strides in bytes, from dim 1 on."""

    address: int
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128  # bytes: 64 or 128, as wide as a row of the box
    fill: bytes = b"\0"  # an element beyond the tensor

    def __post_init__(self):
        if not len(self.dims) == len(self.box) == len(self.strides) + 1:
            raise ValueError(f"tensor map of other ranks: dims {self.dims}, strides {self.strides}, box {self.box}")
        if self.address % 16 or any(stride % 16 or not 0 <= stride < 1 << 40 for stride in self.strides):
            raise ValueError(f"tensor map: {self.address:#x} and strides {self.strides} must be multiples of 16")
        if any(not 1 <= size <= 256 for size in self.box) or any(size < 1 for size in self.dims):
            raise ValueError(f"tensor map: box {self.box}, dims {self.dims}")
        if self.swizzle not in (64, 128) or self.box[0] * self.element_bytes != self.swizzle:
            raise ValueError(f"tensor map: box {self.box} of {self.element_bytes} bytes with swizzle {self.swizzle}")

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element_bytes


class Memory:
    """The arrays that a kernel may touch, where they lie in this process; it reads and writes them in place."""

    def __init__(self):
        self.late: np.ndarray | None = None  # [ranges, 2], what the kernel's predecessor may still write; None: nothing
        self._buffers: list[tuple[int, int, np.ndarray, str]] = []  # begin, end, bytes, name

    def add(self, array: np.ndarray, name: str) -> int:
        """Register a contiguous array; returns its address."""
        data = array.reshape(-1).view(np.uint8)
        if data.size and not np.shares_memory(data, array):
            raise ValueError(f"{name}: wanted a contiguous array")
        begin = data.ctypes.data
        self._buffers.append((begin, begin + data.size, data, name))
        return begin

    def refuse_late(self, addresses: np.ndarray, size: int, how: str = "without having waited for it") -> None:
        """An access that may miss what the kernel's predecessor writes, as one that does not wait for it may."""
        if self.late is None:
            return
        begin = addresses.reshape(-1, 1).astype(np.uint64)
        if ((begin < self.late[:, 1]) & (begin + np.uint64(size) > self.late[:, 0])).any():
            raise EmulationError(f"an access to what the predecessor may still write, {how}")

    def refuse_late_box(self, tensor_map: TensorMap, coordinates: tuple[int, ...]) -> None:
        if self.late is None:
            return
        address = np.array([tensor_map.address], np.uint64)
        for c, box, dim, stride in zip(
            coordinates[1:], tensor_map.box[1:], tensor_map.dims[1:], tensor_map.strides, strict=True
        ):
            inside = np.arange(max(0, c), min(dim, c + box), dtype=np.uint64)
            address = (address[:, None] + inside * np.uint64(stride)).reshape(-1)
        self.refuse_late(address, tensor_map.box[0] * tensor_map.element_bytes)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes [lanes, size]."""
        out = np.empty((len(addresses), size), np.uint8)
        for lanes, data, index in self._locate(addresses, size):
            out[lanes] = data[index]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Bytes [lanes, size]; of lanes that write the same place the highest wins."""
        for lanes, data, index in self._locate(addresses, values.shape[1]):
            data[index] = values[lanes]

    def _locate(self, addresses: np.ndarray, size: int):
        """(lanes, buffer, indices [lanes, size]) of each buffer that aligned accesses hit."""
        if (addresses % np.uint64(size)).any():
            raise EmulationError(f"misaligned global access of {size} bytes at {[hex(a) for a in addresses.tolist()]}")
        left = np.arange(len(addresses))
        while len(left):
            begin, end, data = self._find(int(addresses[left[0]]), size)
            inside = (addresses[left] >= begin) & (addresses[left] <= max(end - size, begin))
            lanes, left = left[inside], left[~inside]
            yield lanes, data, (addresses[lanes] - np.uint64(begin)).astype(np.int64)[:, None] + np.arange(size)

    def _find(self, address: int, size: int) -> tuple[int, int, np.ndarray]:
        for begin, end, data, _ in self._buffers:
            if begin <= address and address + size <= end:
                return begin, end, data
        near = [f"{name} [{b:#x}, {e:#x})" for b, e, _, name in self._buffers if b - 4096 <= address <= e + 4096]
        raise EmulationError(f"global access of {size} bytes at {address:#x} is out of bounds; near: {', '.join(near)}")

    def read_box(self, tensor_map: TensorMap, coordinates: tuple[int, ...]) -> np.ndarray:
        """The bytes of a box, the map's fill outside of the tensor."""
        box = np.empty(tensor_map.box[::-1] + (tensor_map.element_bytes,), np.uint8)
        box[:] = np.frombuffer(tensor_map.fill, np.uint8)
        first = [max(0, c) for c in coordinates]
        last = [min(d, c + b) for d, c, b in zip(tensor_map.dims, coordinates, tensor_map.box, strict=True)]
        counts = [b - a for a, b in zip(first, last, strict=True)]
        if min(counts) <= 0:
            return box.reshape(-1)
        strides = (tensor_map.element_bytes, *tensor_map.strides)
        address = tensor_map.address + sum(a * s for a, s in zip(first, strides, strict=True))
        span = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + tensor_map.element_bytes
        begin, _, data = self._find(address, span)
        source = np.lib.stride_tricks.as_strided(
            data[address - begin :], (*counts[::-1], tensor_map.element_bytes), (*strides[::-1], 1)
        )
        place = tuple(slice(a - c, b - c) for a, b, c in zip(first, last, coordinates, strict=True))
        box[place[::-1]] = source
        return box.reshape(-1)

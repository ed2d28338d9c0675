"""WGMMA: its operands from descriptors and registers, the rules for registers while it is in flight; 8 x 8 matrices.

Each warp of a warpgroup computes its quarter, 16 rows of D, by itself and at a time of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from .formats import to_f32
from .instructions import Translator
from .lanes import FULL, aligned, put, uniform
from .ptx import LANES, SHARED_BASE, EmulationError, Instruction, Reg, UnknownInstruction, Vec

INPUT_BYTES = {"f16": 2, "bf16": 2, "e4m3": 1}
K_BYTES = 32  # of one WGMMA, whatever the type


@dataclass
class Product:
    """One warp's quarter of a WGMMA: D [16, N] (+)= A [16, K] B^T [K, N]."""

    instruction: Instruction
    columns: int
    kind: str
    d: tuple[Reg, ...]
    a: tuple[Reg, ...] | int  # registers or a descriptor
    b: int  # a descriptor
    accumulate: bool
    transposed: tuple[bool, bool]
    fenced: np.ndarray  # of the warp that issued it, then
    done: bool = False


class ProductsInFlight:
    """A warp's WGMMAs from issue to wait, and which registers they hold meanwhile."""

    def __init__(self, cta, warp):
        self.cta, self.warp = cta, warp
        self.held_d: set[Reg] = set()
        self.held_a: set[Reg] = set()
        self.used_since_fence: set[int] | None = None  # segments run since the last wgmma.fence; None: never fenced
        self._open: list[Product] = []
        self._committed: list[list[Product]] = []
        self._accumulators: dict[tuple[Reg, ...], np.ndarray] = {}
        self._issued = 0

    def any(self) -> bool:
        return bool(self._open or self._committed)

    def pending(self) -> Iterator[Product]:
        for group in (*self._committed, self._open):
            yield from (product for product in group if not product.done)

    def fence(self) -> None:
        self.used_since_fence = set()

    def issue(self, product: Product) -> None:
        d_regs = frozenset(product.d)
        a_regs = frozenset() if isinstance(product.a, int) else frozenset(product.a)
        if product.d not in self._accumulators:  # accumulating into the same registers needs no fence and no wait
            for reg in d_regs & (self.held_d | self.held_a):
                raise EmulationError(f"{reg.name} belongs to a WGMMA in flight that writes other registers")
            self._check_fenced(d_regs, reads_too=True)
            fragment = np.stack([self.warp.R[reg.index].view(np.float32) for reg in product.d])
            self._accumulators[product.d] = matrix_of(fragment)
        for reg in a_regs & self.held_d:
            raise EmulationError(f"{reg.name} is an accumulator of a WGMMA in flight")
        self._check_fenced(a_regs, reads_too=False)
        self.cta.check_same_product(self.warp, self._issued, product)
        self._issued += 1
        self._open.append(product)
        self.held_d |= d_regs
        self.held_a |= a_regs

    def commit(self) -> None:
        self._committed.append(self._open)
        self._open = []

    def wait(self, groups_left: int) -> None:
        finished: list[Product] = []
        while len(self._committed) > groups_left:
            finished += self._committed.pop(0)
        for product in finished:
            if not product.done:
                self.run(product)
        left = [product for group in (*self._committed, self._open) for product in group]
        for d in {product.d for product in finished} - {product.d for product in left}:
            for reg, value in zip(d, fragment_of(self._accumulators.pop(d)), strict=True):
                self.warp.R[reg.index] = value.view(reg.dtype)
        self.held_d = {reg for product in left for reg in product.d}
        self.held_a = {reg for product in left if not isinstance(product.a, int) for reg in product.a}

    def run(self, product: Product) -> None:
        if isinstance(product.a, int):
            quarter = self.warp.index % 4  # other rows of A are none of this warp's business
            a = operand(self.cta.shared, product.a, 64, product, product.transposed[0], quarter)
        else:
            a = register_matrix(np.stack([self.warp.R[reg.index] for reg in product.a]), product.kind)
        result = a @ operand(self.cta.shared, product.b, product.columns, product, product.transposed[1]).T
        if product.accumulate:
            result += self._accumulators[product.d]
        self._accumulators[product.d] = result
        product.done = True

    def refuse_held(self, instructions: list[Instruction]) -> None:
        """Nothing but another WGMMA may touch what one in flight writes, or write what it reads."""
        for item in instructions:
            if "mma_async" in item.parts:
                continue  # `issue` looks for itself
            for reg in (item.reads | item.writes) & self.held_d:
                raise EmulationError(f"{reg.name} is an accumulator of a WGMMA in flight: {item}")
            for reg in item.writes & self.held_a:
                raise EmulationError(f"{reg.name} is operand A of a WGMMA in flight: {item}")

    def _check_fenced(self, regs: frozenset[Reg], *, reads_too: bool) -> None:
        """wgmma.fence must lie between other accesses to a WGMMA's registers and it."""
        if self.used_since_fence is None:
            raise EmulationError("WGMMA without a wgmma.fence before it")
        if not regs:
            return
        for number in self.used_since_fence:
            segment = self.cta.kernel.segments[number]
            if not regs.isdisjoint(segment.touched if reads_too else segment.writes):
                for item in segment.instructions:
                    used = regs & (item.reads | item.writes if reads_too else item.writes)
                    if used and "mma_async" not in item.parts:
                        raise EmulationError(f"no wgmma.fence since {next(iter(used)).name} was used: {item}")


def wgmma(t: Translator, item: Instruction):
    simple = {
        "wgmma.fence.sync.aligned": lambda cta, warp, group: warp.products.fence(),
        "wgmma.commit_group.sync.aligned": lambda cta, warp, group: warp.products.commit(),
        "wgmma.wait_group.sync.aligned": lambda cta, warp, group: warp.products.wait(int(item.operands[0].text)),
    }
    return aligned(item, simple[item.opcode]) if item.opcode in simple else _wgmma_product(t, item)


def _wgmma_product(t: Translator, item: Instruction):
    shape = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)", item.opcode)
    if shape is None or shape[3] != shape[4] or int(shape[2]) * INPUT_BYTES.get(shape[3], 0) != K_BYTES:
        raise UnknownInstruction(str(item))
    columns, kind = int(shape[1]), shape[3]
    d, a, b, accumulate, *rest = item.operands
    scales, majors = [int(x.text) for x in rest[:2]], [bool(int(x.text)) for x in rest[2:]]
    in_registers = isinstance(a, Vec)
    # Operands of 8-bit types and operands in registers are never transposed.
    if scales != [1, 1] or len(majors) != (0 if INPUT_BYTES[kind] == 1 else 1 if in_registers else 2):
        raise UnknownInstruction(str(item))
    if len(d.items) != columns // 2 or in_registers and len(a.items) != 4:
        raise UnknownInstruction(str(item))
    transposed = (*[False] * (2 - len(majors)), *majors)
    a_of = None if in_registers else t.reader(a, "u64")
    b_of, scale_d = t.reader(b, "u64"), t.reader(accumulate, "pred")

    def run(cta, warp, group):
        a_operand = a.items if in_registers else uniform(a_of(warp), FULL, "descriptor A")
        b_operand = uniform(b_of(warp), FULL, "descriptor B")
        accumulates = bool(uniform(scale_d(warp), FULL, "scale-d"))
        operands = (a_operand, b_operand, accumulates, transposed)
        warp.products.issue(Product(item, columns, kind, d.items, *operands, warp.fenced))
        if cta.timing == "early":
            for waiting in list(warp.products.pending()):
                warp.products.run(waiting)

    return aligned(item, run)


def operand(shared, descriptor: int, rows: int, product: Product, transposed: bool, quarter=None) -> np.ndarray:
    """[rows, K] or a quarter of the rows, in float32 from shared memory."""
    units, first, last = operand_units(descriptor, rows, transposed, quarter)
    if last >= shared.end // 16 or first < SHARED_BASE // 16:
        raise EmulationError(f"descriptor {descriptor:#x} leaves shared memory: {product.instruction}")
    what = f"{product.instruction.parts[4]} WGMMA at {product.instruction.place}: read of"
    raw = shared.read_units(units, what, product.fenced)  # [rows, units, 16] or [rows / 8, k, 16]
    values = to_f32(raw, product.kind)
    if transposed:
        values = np.ascontiguousarray(values.transpose(0, 2, 1))
    return values.reshape(-1, values.shape[-1] if transposed else values[0].size)


@cache
def operand_units(descriptor: int, rows: int, transposed: bool, quarter: int | None) -> tuple[np.ndarray, int, int]:
    """An operand's units or a quarter of them, with the first and the last that any of them is."""
    units = descriptor_units(descriptor, rows, transposed)
    if quarter is not None:
        units = np.split(units, 4)[quarter]
    return units, int(units.min()), int(units.max())


def descriptor_units(descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """Where an operand's units of 16 bytes lie, in shared memory addresses / 16.

    K-major: [rows, 2]; MN-major, 16-bit types alone: [rows / 8, 16]. The layouts are the canonical ones of the PTX
    manual's matrix descriptors, with a swizzle of 64 or 128 bytes.
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 not in (1, 2) or descriptor >> 49 & 7:
        raise UnknownInstruction(f"descriptor {descriptor:#x}: its swizzle or base offset")
    width = 128 if descriptor >> 62 == 1 else 64  # bytes of a row of the pattern
    if not transposed:
        row, unit = np.arange(rows)[:, None], np.arange(K_BYTES // 16)[None, :]
        offset = row % 8 * width + row // 8 * stride + unit * 16
    else:
        group, k = np.arange(rows // 8)[:, None], np.arange(K_BYTES // 2)[None, :]
        units = width // 16
        offset = group % units * 16 + group // units * leading + k % 8 * width + k // 8 * stride
    address = start + offset
    return (address ^ (address >> 7 & width // 16 - 1) << 4) >> 4


def fragment_of(d: np.ndarray) -> np.ndarray:
    """[16, N] of one warp as its registers [N / 2, lanes]."""
    n = d.shape[1] // 8
    return np.ascontiguousarray(d.reshape(2, 8, n, 4, 2).transpose(2, 0, 4, 1, 3)).reshape(4 * n, LANES)


def matrix_of(fragment: np.ndarray) -> np.ndarray:
    n = fragment.shape[0] // 4
    return np.ascontiguousarray(fragment.reshape(n, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2)).reshape(16, 8 * n)


def register_matrix(registers: np.ndarray, kind: str) -> np.ndarray:
    """Operand A [16, K] from its four 32-bit registers [4, lanes]."""
    raw = np.ascontiguousarray(registers).view(np.uint8).reshape(2, 2, 8, 4, 4)  # k half, row half, row, k, byte
    return np.ascontiguousarray(to_f32(raw, kind).transpose(1, 2, 0, 3, 4)).reshape(16, -1)


def matrix_instruction(t: Translator, item: Instruction):
    """ldmatrix, stmatrix and movmatrix: matrices of 8 x 8 elements of 16 bits in lanes and shared memory."""
    if item.opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
        source = t.reader(item.operands[1], "b32")
        return aligned(
            item, lambda cta, warp, group: put(warp, item.operands[0], _lanes_matrix(source(warp), True), FULL)
        )
    shape = re.fullmatch(r"(ld|st)matrix\.sync\.aligned\.x([124])(\.trans)?\.m8n8\.shared\.b16", item.opcode)
    if shape is None:
        raise UnknownInstruction(str(item))
    count, transposed = int(shape[2]), bool(shape[3])
    vector, mem = item.operands if shape[1] == "ld" else item.operands[::-1]
    address = t.address(mem)
    values = [t.reader(reg, "b32") for reg in vector.items]

    def load(cta, warp, group):
        units = cta.shared.index(address(warp)[: 8 * count], 16)
        rows = cta.shared.read_units(units, "read of").view(np.uint32).reshape(count, LANES)
        for reg, matrix in zip(vector.items, rows, strict=True):
            put(warp, reg, _lanes_matrix(matrix, transposed), FULL)

    def store(cta, warp, group):
        units = cta.shared.index(address(warp)[: 8 * count], 16)
        rows = np.stack([_lanes_matrix(value(warp), transposed) for value in values])
        cta.shared.store_units(units, rows.reshape(8 * count, 4), warp.index, warp.write())

    return aligned(item, load if shape[1] == "ld" else store)


def _lanes_matrix(words: np.ndarray, transposed: bool) -> np.ndarray:
    """Row by row, two elements a lane."""
    matrix = words.view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(matrix.T if transposed else matrix).reshape(-1).view(np.uint32)

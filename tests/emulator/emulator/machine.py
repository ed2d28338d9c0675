"""Kernels as segments of code, and the CTAs that run them: warps that take turns, barriers, and copies in flight.

A warp runs in lockstep with one position for each group of its lanes, the one farthest behind first. Which warp runs,
for how long, and when a copy or a WGMMA takes effect comes from a seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from .instructions import CLUSTER_SHIFT, Translator
from .lanes import FULL, Group, bits_of, lanes_of, uniform
from .memory import Memory, TensorMap
from .operations import OPERATIONS, ret
from .ptx import (
    DTYPES,
    LANES,
    PARAM_BASE,
    SHARED_BASE,
    Edit,
    EmulationError,
    Entry,
    Instruction,
    Label,
    Module,
    Reg,
    UnknownInstruction,
)
from .shared import MAX_SHARED, SharedMemory
from .tensor_cores import Product, ProductsInFlight

TIMINGS = ("early", "late", "random")
POISON = {  # what a register holds before it is written: NaN, or false
    dtype: np.full(LANES * dtype.itemsize, 0 if dtype.kind == "b" else 0xFF, np.uint8).view(dtype)
    for dtype in DTYPES.values()
}
ALL_TRUE, ALL_FALSE = b"\x01" * LANES, b"\x00" * LANES
L1_LINE = 128  # bytes
MOST_STEPS = 1_000_000  # segments that a CTA may run before it counts as a livelock


@dataclass
class Segment:
    """Straight-line code that runs without interruption, or one operation with the rest of the machine."""

    instructions: list[Instruction]
    handler: Callable | None = None  # of the operation
    branch: tuple[Reg | None, bool, int] | None = None  # predicate, negated, target segment
    reads: frozenset[Reg] = frozenset()
    writes: frozenset[Reg] = frozenset()
    touched: frozenset[Reg] = frozenset()
    functions: dict[bool, Callable] = field(default_factory=dict)  # masked -> the code in Python


class Kernel:
    """One kernel of a module, translated; an instruction that is not known raises here."""

    def __init__(self, module: Module, name: str, edit: Edit | None = None):
        self.entry = Entry(module, name, edit)
        self.translator = Translator(self.entry)
        self.segments: list[Segment] = []
        self._cut()
        self.poison = [POISON[reg.dtype] for reg in self.entry.registers]

    def launch(
        self,
        grid: tuple[int, int],
        block: int,
        shared_bytes: int,
        params: list,
        memory: Memory,
        *,
        cluster: int = 1,
        seed: int = 0,
        timing: str = "random",
    ) -> set[int]:
        """Run the grid, one cluster after another; returns the segments that ran (see `missed`).

        Args:
            grid, block: CTAs in x and y, and threads of each.
            cluster: neighbours in x that run together.
            shared_bytes: dynamic shared memory.
            params: for each parameter bytes, a TensorMap, or a list of both (a struct that holds tensor maps).
            timing: "early", "late" or "random": when copies and products happen.
        """
        if timing not in TIMINGS:
            raise ValueError(f"timing: wanted one of {TIMINGS}, got {timing!r}")
        if self.entry.static_shared + shared_bytes > MAX_SHARED:
            raise EmulationError(f"more than {MAX_SHARED} bytes of shared memory")
        data, maps = self._fill_params(params)
        for name, array in self.entry.constants.items():
            memory.add(array, name)
        ran: set[int] = set()
        if grid[0] % cluster:
            raise ValueError(f"grid: wanted clusters of {cluster} in x, got {grid}")
        with np.errstate(all="ignore"):
            for first in range(0, grid[0] * grid[1], cluster):
                ctas = []
                for number in range(first, first + cluster):
                    rng = random.Random(seed * 1_000_003 + number)
                    place = {"%ctaid.x": number % grid[0], "%ctaid.y": number // grid[0], "%nctaid.y": grid[1]}
                    place |= {"%cluster_ctarank": number - first, "%cluster_nctarank": cluster}
                    ctas.append(Cta(self, place, block // LANES, shared_bytes, data, maps, memory, rng, timing))
                Cluster(ctas).run()
                ran = ran.union(*(cta.ran for cta in ctas))
        return ran

    def missed(self, ran: set[int]) -> list[str]:
        """Instructions that no lane reached."""
        return [item.text for n, s in enumerate(self.segments) if n not in ran for item in s.instructions]

    def code(self, segment: Segment, masked: bool) -> Callable:
        if masked not in segment.functions:
            segment.functions[masked] = self.translator.function(segment.instructions, masked)
        return segment.functions[masked]

    def _cut(self) -> None:
        labels: dict[Label, int] = {}
        branches: dict[int, Instruction] = {}
        run: list[Instruction] = []

        def close():
            if run:
                self.segments.append(Segment(list(run)))
                run.clear()

        for item in self.entry.items:
            if isinstance(item, Label):
                close()
                labels[item] = len(self.segments)
            elif item.parts[0] == "bra":
                branches[len(self.segments)] = item
                self.segments.append(Segment(list(run)))
                run.clear()
            elif item.parts[0] in OPERATIONS:
                close()
                self.segments.append(Segment([item], self._handler(item)))
            else:
                self.translator.line(item, "None")  # raises now what would raise when it is reached
                run.append(item)
        close()
        self.segments.append(Segment([], ret(self.translator, None)))
        for number, segment in enumerate(self.segments):
            if number in branches:
                segment.branch = self._branch(branches[number], labels)
                segment.reads |= branches[number].reads
            segment.reads = segment.reads.union(*(x.reads for x in segment.instructions))
            segment.writes = frozenset().union(*(x.writes for x in segment.instructions))
            segment.touched = segment.reads | segment.writes

    def _handler(self, item: Instruction) -> Callable:
        try:
            return OPERATIONS[item.parts[0]](self.translator, item)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise UnknownInstruction(str(item)) from error

    @staticmethod
    def _branch(item: Instruction, labels: dict[Label, int]) -> tuple[Reg | None, bool, int]:
        name = item.operands[0].text
        scopes = (item.scope[:depth] for depth in range(len(item.scope), -1, -1))
        target = next(labels[Label(scope, name)] for scope in scopes if Label(scope, name) in labels)
        return (*(item.guard or (None, False)), target)

    def _fill_params(self, params: list) -> tuple[np.ndarray, dict[int, TensorMap]]:
        if len(params) != len(self.entry.params):
            raise ValueError(f"{self.entry.name} has {len(self.entry.params)} parameters, got {len(params)}")
        data, maps = np.zeros(self.entry.param_bytes, np.uint8), {}
        for (name, _, size), param in zip(self.entry.params, params, strict=True):
            start = offset = self.entry.symbols[name] - PARAM_BASE
            for part in param if isinstance(param, list) else [param]:
                if isinstance(part, TensorMap):
                    maps[PARAM_BASE + offset] = part
                    offset += 128
                else:
                    data[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
                    offset += len(part)
            if offset - start != size:
                raise ValueError(f"{name}: wanted {size} bytes, got {offset - start}")
        return data, maps


@dataclass
class MBarrier:
    expected: int
    pending: int
    transaction_bytes: int = 0
    phase: int = 0
    gathering: tuple = ()  # what the warps that arrived know of writes, see Warp.known
    told: tuple = ()  # what a warp learns that sees the phase completed


@dataclass
class NamedBarrier:
    number: int
    generation: int = 0
    arrived: int = 0
    expected: int = 0  # 0: all threads of the CTA
    gathering: list[np.ndarray] = field(default_factory=list)
    votes: list[np.ndarray] = field(default_factory=list)  # of the generation before
    known: tuple = ()  # what the warps that arrived know, see Warp.known
    told: tuple = ()  # what the generation before knew


def _latest(a: tuple, b: tuple) -> tuple:
    """What both know together; nothing is ()."""
    return a if a == b or not b else tuple(map(max, a, b)) if a else b


class Warp:
    def __init__(self, cta: Cta, index: int, warps: int):
        self.cta, self.index = cta, index
        self.R: list[np.ndarray] = cta.kernel.poison.copy()
        self.groups = [Group(0, FULL)]
        self.live = FULL
        self.here: tuple[Segment, int] | None = None  # and the lanes that run it, for messages
        self.copies: list[Callable] = []  # cp.async in flight, and the arrivals that wait for them, oldest first
        self.copies_begun = 0
        self.copies_there = 0  # of whole groups
        self.groups_begun = self.groups_there = 0
        self.cluster_phase: int | None = None  # of the cluster's barrier at which it has arrived and not yet waited
        self.writes = 0  # to shared memory, but for cp.async
        # Of each warp, how many of its cp.async are there and known to be; then, of each, how many of its writes.
        self.known = (0,) * (2 * warps)
        self.fenced = np.array(self.known)  # `known` at the last fence.proxy.async
        self.products = ProductsInFlight(cta, self)
        self.followed = False  # has waited for the kernel's predecessor

    def end(self, group: Group, bits: int) -> None:
        """These lanes of a group return; the others go on."""
        self.live &= ~bits
        group.bits &= ~bits
        for other in self.groups:
            other.since = -1  # who waits for the warp's other lanes looks again
        if not self.live:
            if self.products.any():
                raise EmulationError("a warp ended with WGMMAs in flight")
            self.cta.warp_ended()

    def group_arrives(self, copies: int) -> None:
        self.groups_there += 1
        self.copies_there = copies

    def learn(self, told: tuple) -> None:
        self.known = _latest(self.known, told)

    def write(self) -> int:
        """The number of the write to shared memory that the warp does now; it knows of its own."""
        self.writes += 1
        own = len(self.known) // 2 + self.index
        self.known = self.known[:own] + (self.writes,) + self.known[own + 1 :]
        return self.writes

    # The translated code calls these with all lanes' addresses, and a mask of the active lanes or None.

    def special(self, name: str) -> np.ndarray:
        lane = np.arange(LANES, dtype=np.uint32)
        if name == "%tid.x":
            return lane + LANES * self.index
        if name == "%laneid":
            return lane
        if name == "%clock_hi":  # stands still: the emulator sees a deadlock before a kernel's patience ends
            return np.zeros(LANES, np.uint32)
        if name not in self.cta.place:
            raise UnknownInstruction(f"special register {name}")
        return np.full(LANES, self.cta.place[name], np.uint32)

    def load_param(self, address, mask, size, count):
        first = int(address[0 if mask is None else mask.argmax()]) - PARAM_BASE
        data = self.cta.params
        if not 0 <= first <= data.size - size * count:
            raise EmulationError(f"ld.param of {size * count} bytes at {first} of {data.size}")
        values = data[first : first + size * count].view(f"uint{size * 8}")
        return np.repeat(values[:, None], LANES, axis=1)

    def load_global(self, address, mask, size, count):
        if mask is not None and not mask.any():
            return np.zeros((count, LANES), f"uint{size * 8}")
        address = _safe(address, mask)
        if self.cta.memory.late is not None:
            self.cta.in_l1(address, size * count, self.followed)
        return self.load_past_l1(address, mask, size, count)

    def load_past_l1(self, address, mask, size, count):
        if mask is not None and not mask.any():
            return np.zeros((count, LANES), f"uint{size * 8}")
        address = _safe(address, mask)
        if not self.followed:
            self.cta.memory.refuse_late(address, size * count)
        raw = self.cta.memory.load(address, size * count)
        return np.ascontiguousarray(raw.view(f"uint{size * 8}").T)

    def store_global(self, address, mask, size, values):
        raw = np.stack(values, axis=1).view(np.uint8)
        if mask is not None:
            address, raw = address[mask], raw[mask]
        if len(address):
            if not self.followed:
                self.cta.memory.refuse_late(address, raw.shape[1])
            self.cta.memory.store(address, raw)

    def load_shared(self, address, mask, size, count):
        if mask is not None and not mask.any():
            return np.zeros((count, LANES), f"uint{size * 8}")
        return self.cta.shared.load(_safe(address, mask), size, count)

    def load_cluster(self, address, mask, size, count):
        """Shared memory of the cluster's CTAs, as `mapa` names it."""
        out = np.zeros((count, LANES), f"uint{size * 8}")
        taking = np.ones(LANES, bool) if mask is None else mask
        for window in np.unique(address[taking] >> CLUSTER_SHIFT):
            there = taking & (address >> CLUSTER_SHIFT == window)
            shared = self.cta.cluster.shared_of(self.cta, int(window))
            loaded = shared.load(_safe(address, there) & np.uint32((1 << CLUSTER_SHIFT) - 1), size, count)
            out[:, there] = np.stack(loaded)[:, there]
        return out

    def store_shared(self, address, mask, size, values):
        if mask is not None:
            address, values = address[mask], [value[mask] for value in values]
        if len(address):
            self.cta.shared.store(address, size, values, self.index, self.write())

    def store_cluster(self, address, mask, size, values):
        """To shared memory of the cluster's CTAs; a warp's own number, as writes of its, goes with it."""
        taking = np.ones(LANES, bool) if mask is None else mask
        for window in np.unique(address[taking] >> CLUSTER_SHIFT):
            there = taking & (address >> CLUSTER_SHIFT == window)
            shared = self.cta.cluster.shared_of(self.cta, int(window))
            local = address[there] & np.uint32((1 << CLUSTER_SHIFT) - 1)
            shared.store(local, size, [value[there] for value in values], self.index, self.write())

    def send(self, address, mask, words, barrier):
        """st.async: to shared memory of a cluster's CTA, whose mbarrier counts the bytes when they are there."""
        taking = np.ones(LANES, bool) if mask is None else mask
        if ((address ^ barrier)[taking] >> CLUSTER_SHIFT).any():
            raise EmulationError("st.async to one CTA with the mbarrier of another")
        local = np.uint32((1 << CLUSTER_SHIFT) - 1)
        for window in np.unique(address[taking] >> CLUSTER_SHIFT):
            there = taking & (address >> CLUSTER_SHIFT == window)
            counter = uniform(barrier & local, bits_of(there), "the mbarrier of st.async")
            self.cta.cluster.cta_of(self.cta, int(window)).receive(address[there] & local, words[there], counter)

    def add_shared(self, address, mask, values):
        """Atomic additions of words, lane by lane; returns what each found."""
        found = np.zeros(LANES, np.uint32)
        for lane in range(LANES) if mask is None else np.flatnonzero(mask):
            place = address[lane : lane + 1]
            (found[lane : lane + 1],) = self.cta.shared.load(place, 4, 1)
            self.cta.shared.store(place, 4, [found[lane : lane + 1] + values[lane]], self.index, self.write())
        return found


def _safe(address: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Lanes that do not take part read where one does."""
    return address if mask is None else np.where(mask, address, address[mask.argmax()])


class Cluster:
    """CTAs that take turns, share a barrier of all their threads and read each other's shared memory."""

    def __init__(self, ctas: list[Cta]):
        self.ctas = ctas
        self.phase = 0
        self.arrived: set[Warp] = set()
        self.stuck: set[Cta] = set()  # since any of them went on
        for cta in ctas:
            cta.cluster = self

    def run(self) -> None:
        turns = {cta: cta.turns() for cta in self.ctas}
        draw = self.ctas[0].rng
        late = draw.choice(self.ctas) if len(turns) > 1 and draw.random() < 0.5 else None  # falls far behind
        while turns:
            others = [cta for cta in turns if cta is not late or len(turns) == 1 or draw.random() < 0.01]
            cta = draw.choice(others) if len(others) > 1 else others[0]
            if next(turns[cta], "ended") == "ended":
                del turns[cta]

    def arrive(self, warp: Warp) -> None:
        if warp.cluster_phase is not None:
            raise EmulationError("a warp arrives at the cluster's barrier again and has not waited")
        warp.cluster_phase = self.phase
        self.arrived.add(warp)
        self.settle()

    def settle(self) -> None:
        """The barrier's phase ends when all warps that have not ended are there."""
        if self.arrived and all(warp in self.arrived for cta in self.ctas for warp in cta.warps if warp.live):
            self.arrived.clear()
            self.phase += 1
            for cta in self.ctas:
                cta.events += 1
                cta.progress += 1

    def waits(self, cta: Cta) -> bool:
        """A CTA cannot go on alone; False when none can."""
        self.stuck.add(cta)
        return any(other.running() and other not in self.stuck for other in self.ctas)

    def shared_of(self, cta: Cta, window: int) -> SharedMemory:
        return self.cta_of(cta, window).shared

    def cta_of(self, cta: Cta, window: int) -> Cta:
        """The CTA itself (0) or the one with a rank (from 1 on)."""
        if window > len(self.ctas):
            raise EmulationError(f"shared memory of CTA {window - 1} in a cluster of {len(self.ctas)}")
        other = self.ctas[window - 1] if window else cta
        if not other.running():
            raise EmulationError("shared memory of a CTA that has ended")
        return other


class Cta:
    """One thread block: its shared memory, barriers, warps and what is in flight."""

    def __init__(self, kernel, place, warps, dynamic_bytes, params, maps, memory, rng, timing):
        self.kernel, self.place, self.params, self.maps, self.memory = kernel, place, params, maps, memory
        self.rng, self.timing = rng, timing
        self.shared = SharedMemory(kernel.entry.static_shared + dynamic_bytes)
        self.barriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.transfers: list[tuple] = []  # TMA copies in flight, the most urgent last: (urgency, what to do)
        self.events = 0  # what can end a wait
        self.progress = 0  # any change that others can see
        self.steps = 0
        self.ran: set[int] = set()
        self.early_lines: set[int] = set()
        self.give_up = False  # try_wait returns false instead of waiting
        self._issued: dict[tuple[int, int], tuple] = {}  # (warpgroup, number of WGMMA): what it is, warps that did
        self.warps: list[Warp] = []
        self.warps += [Warp(self, n, warps) for n in range(warps)]
        # Half of the CTAs have priorities among the warps that change now and then: one warp may fall far behind.
        self.priorities = [rng.random() for _ in self.warps] if rng.random() < 0.5 else None
        self.cluster: Cluster  # sets it

    def running(self) -> bool:
        return any(warp.live for warp in self.warps)

    def in_l1(self, addresses: np.ndarray, size: int, followed: bool) -> None:
        """Lines that are read before the predecessor has ended stay in L1, with what it had not written by then."""
        lines = addresses // np.uint64(L1_LINE)
        if not followed:
            self.early_lines.update(lines.tolist())
        elif self.early_lines and (stale := np.isin(lines, list(self.early_lines))).any():
            self.memory.refuse_late(addresses[stale], size, "through a line of L1 that was read before it had ended")

    # -- barriers

    def init_barrier(self, address: int, arrivals: int) -> None:
        if address in self.barriers:
            raise EmulationError(f"mbarrier.init of a live mbarrier at {address:#x}")
        if not 0 < arrivals < 1 << 20:
            raise EmulationError(f"mbarrier.init with {arrivals} arrivals")
        self.shared.lock_barrier(address)
        self.barriers[address] = MBarrier(arrivals, arrivals)

    def barrier(self, address: int) -> MBarrier:
        if address not in self.barriers:
            raise EmulationError(f"no mbarrier at {address:#x} (offset {address - SHARED_BASE})")
        return self.barriers[address]

    def arrive(self, address: int, *, arrivals: int = 1, transaction_bytes: int = 0, told: tuple = ()) -> None:
        barrier = self.barrier(address)
        barrier.gathering = _latest(barrier.gathering, told)
        barrier.transaction_bytes += transaction_bytes
        barrier.pending -= arrivals
        if barrier.pending < 0 or abs(barrier.transaction_bytes) >= 1 << 20:
            raise EmulationError(
                f"mbarrier at {address:#x} (offset {address - SHARED_BASE}): more arrivals or bytes than expected"
            )
        self.progress += 1
        if barrier.pending == 0 and barrier.transaction_bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.expected
            barrier.told = barrier.gathering
            self.events += 1

    def meet(self, number: int, threads: int, known: tuple, vote: np.ndarray | None) -> tuple[NamedBarrier, int]:
        """A warp arrives at a named barrier; returns the barrier and the generation whose end the warp waits for."""
        barrier = self.named.setdefault(number, NamedBarrier(number))
        generation = barrier.generation
        if barrier.arrived and barrier.expected != threads:
            raise EmulationError(
                f"barrier {number}: {threads} threads expected here, {barrier.expected} by another warp"
            )
        barrier.expected = threads
        barrier.arrived += LANES
        barrier.known = _latest(barrier.known, known)
        if vote is not None:
            barrier.gathering.append(vote)
        self.progress += 1
        self._settle(barrier)
        return barrier, generation

    def warp_ended(self) -> None:
        self.progress += 1
        for barrier in self.named.values():  # warps that have ended are not waited for
            if barrier.arrived and barrier.expected == 0:
                self._settle(barrier)
        self.cluster.settle()

    def _settle(self, barrier: NamedBarrier) -> None:
        wanted = barrier.expected or LANES * sum(bool(warp.live) for warp in self.warps)
        if barrier.arrived > wanted:
            raise EmulationError(f"barrier {barrier.number}: {barrier.arrived} threads arrived, {wanted} expected")
        if barrier.arrived == wanted:
            barrier.votes, barrier.gathering = barrier.gathering, []
            barrier.told = barrier.known
            barrier.arrived = 0
            barrier.generation += 1
            self.events += 1

    # -- asynchronous work

    def start_transfer(self, destination: int, box: Callable, tensor_map: TensorMap, barrier: int, item) -> None:
        """TMA: `box` reads the data when it happens."""
        if destination % 128:
            raise EmulationError(f"misaligned destination {destination:#x} of a TMA copy")
        size = tensor_map.box_bytes
        self.shared.index(np.array([destination, destination + size - 16], np.uint32), 16)
        units = np.arange(destination // 16, (destination + size) // 16)
        units = units ^ (units >> 3 & tensor_map.swizzle // 16 - 1)
        self.shared.refuse_unfenced(units, "copy to")
        index = units[:, None] * 2 + np.arange(2)
        self.shared.begin_copy(index)
        self.barrier(barrier)

        def finish():
            try:
                data = box()
            except EmulationError as error:
                raise EmulationError(f"{error}: {item}") from error
            self.shared.end_copy(index, data.reshape(-1, 16), None)
            self.arrive(barrier, arrivals=0, transaction_bytes=-size)

        self._put_off(finish)

    def receive(self, address: np.ndarray, words: np.ndarray, barrier: int) -> None:
        """st.async: a word for each address."""
        index = self.shared.index(address, 4)[:, None]
        self.shared.begin_copy(index, 4)
        self.barrier(barrier)

        def finish():
            self.shared.end_copy(index, words[:, None].view(np.uint8), None)
            self.arrive(barrier, arrivals=0, transaction_bytes=-words.nbytes)

        self._put_off(finish)

    def _put_off(self, finish: Callable) -> None:
        self.transfers.append((self.rng.random(), finish))
        if self.timing == "early":
            self._finish_transfer()
        self.transfers.sort(key=lambda transfer: transfer[0])  # urgency is drawn, so that some wait for long

    def _finish_transfer(self) -> None:
        self.transfers.pop()[1]()

    def start_copy(self, warp: Warp, address: np.ndarray, data: np.ndarray) -> None:
        """cp.async of a warp's lanes."""
        size = min(8, data.shape[1])
        each = data.shape[1] // size
        index = self.shared.index(address, size, each)[:, None] + np.arange(each)
        self.shared.begin_copy(index, size)
        warp.copies_begun += 1
        warp.copies.append(partial(self.shared.end_copy, index, data, warp.index, warp.copies_begun))
        if self.timing == "early":
            self._finish_copy(warp)

    def announce_copies(self, warp: Warp, addresses: np.ndarray) -> None:
        """cp.async.mbarrier.arrive of lanes: arrivals, expected from now on, when the warp's copies are there."""
        told = warp.known[: warp.index] + (warp.copies_begun,) + warp.known[warp.index + 1 :]
        for address, lanes in zip(*np.unique(addresses, return_counts=True), strict=True):
            self.barrier(int(address)).pending += int(lanes)
            warp.copies.append(partial(self.arrive, int(address), arrivals=int(lanes), told=told))
        if self.timing == "early":
            while warp.copies:
                self._finish_copy(warp)

    @staticmethod
    def commit_copies(warp: Warp) -> None:
        """cp.async.commit_group: the warp's copies since the last one are a group."""
        warp.groups_begun += 1
        warp.copies.append(partial(warp.group_arrives, warp.copies_begun))

    def finish_copies(self, warp: Warp, groups: int | None) -> None:
        """The warp waits for all its copies, or for all but the copies of its latest groups."""
        while warp.copies and (groups is None or warp.groups_begun - warp.groups_there > groups):
            self._finish_copy(warp)
        there = warp.copies_begun if groups is None else warp.copies_there
        warp.learn(warp.known[: warp.index] + (there,) + warp.known[warp.index + 1 :])

    @staticmethod
    def _finish_copy(warp: Warp) -> None:
        warp.copies.pop(0)()

    def check_same_product(self, warp: Warp, number: int, product: Product) -> None:
        """All four warps of a warpgroup issue the same WGMMAs in the same order."""
        a = product.a if isinstance(product.a, int) else None
        mine = (product.instruction.text, a, product.b, product.accumulate)
        key = (warp.index // 4, number)
        known, warps = self._issued.get(key, (mine, 0))
        if known != mine:
            raise EmulationError(f"the warps of a warpgroup issue different WGMMAs: {known} and {mine}")
        self._issued[key] = (known, warps + 1)

    def _wander(self) -> None:
        """Let some of what is in flight happen."""
        while self.transfers and self.rng.random() < 0.4:
            self._finish_transfer()
        warp = self.rng.choice(self.warps)
        for product in list(warp.products.pending()):
            if self.rng.random() < 0.2:
                break
            warp.products.run(product)
        while warp.copies and self.rng.random() < 0.7:
            self._finish_copy(warp)

    # -- taking turns

    def turns(self) -> Iterator[None]:
        """Runs the CTA, one warp's turn at a time."""
        stuck_at = -1
        while self.running():
            yield
            ready = [w for w in self.warps if any(not g.waits or g.since != self.events for g in w.groups)]
            if not ready:
                stuck_at = self._unblock(stuck_at)
                continue
            self.cluster.stuck.clear()
            warp = self._choose(ready)
            try:
                for _ in range(self.rng.randint(1, 24)):
                    if not self._step(warp):
                        break
                self.give_up = False
                if self.timing == "random":
                    self._wander()
            except EmulationError as error:
                raise type(error)(f"{error}\n{self._where(warp)}") from error
            if self.steps > MOST_STEPS:
                raise EmulationError(f"livelock: {self.steps} segments were run\n{self._report()}")
        if self.transfers or any(warp.copies for warp in self.warps):
            raise EmulationError("a CTA ended with copies in flight")

    def _unblock(self, stuck_at: int) -> int:
        """All warps wait: let a copy arrive, or the polls see once that nothing has; returns when that was."""
        if self.transfers:
            self._finish_transfer()
            return stuck_at
        if copying := [warp for warp in self.warps if warp.copies]:
            self._finish_copy(self.rng.choice(copying))
            return stuck_at
        polls = any(group.waits == "try_wait" for warp in self.warps for group in warp.groups)
        if stuck_at == self.progress or not polls:
            if self.cluster.waits(self):
                return stuck_at
            raise EmulationError(f"deadlock\n{self._report()}")
        self.give_up = True
        for warp in self.warps:
            for group in warp.groups:
                group.since = -1
        return self.progress

    def _choose(self, ready: list[Warp]) -> Warp:
        if self.priorities is None:
            return self.rng.choice(ready)
        if self.rng.random() < 0.05:
            self.priorities[self.rng.randrange(len(self.warps))] = self.rng.random()
        return max(ready, key=lambda warp: self.priorities[warp.index])

    def _step(self, warp: Warp) -> bool:
        """Run a segment of the warp's first group that can; False when none can."""
        group = None
        for g in warp.groups:
            if (not g.waits or g.since != self.events) and (group is None or g.pc < group.pc):
                group = g
        if group is None:
            return False
        self.steps += 1
        number = group.pc
        self.ran.add(number)
        segment = self.kernel.segments[number]
        warp.here = (segment, group.bits)
        products = warp.products
        if not (products.held_d.isdisjoint(segment.touched) and products.held_a.isdisjoint(segment.writes)):
            products.refuse_held(segment.instructions)
        if segment.handler is not None:
            group.waits = segment.handler(self, warp, group) or ""
            if group.waits:
                group.since = self.events
                return True
            group.pc += 1
        else:
            full = group.bits == FULL
            if segment.instructions:
                self.kernel.code(segment, not full)(warp, None if full else lanes_of(group.bits))
            self._branch(warp, group, segment, full)
        if products.used_since_fence is not None:
            products.used_since_fence.add(number)
        if len(warp.groups) > 1 or not group.bits:
            self._merge(warp)
        return True

    @staticmethod
    def _branch(warp: Warp, group: Group, segment: Segment, full: bool) -> None:
        if segment.branch is None:
            group.pc += 1
            return
        reg, negated, target = segment.branch
        if reg is None:
            group.pc = target
            return
        taken = ~warp.R[reg.index] if negated else warp.R[reg.index]
        if not full:
            taken = taken & lanes_of(group.bits)
        raw = taken.tobytes()
        if raw == ALL_FALSE:
            group.pc += 1
        elif raw == ALL_TRUE or (bits := bits_of(taken)) == group.bits:
            group.pc = target
        else:
            warp.groups.append(Group(target, bits))
            group.bits &= ~bits
            group.pc += 1

    @staticmethod
    def _merge(warp: Warp) -> None:
        """Groups at the same place become one."""
        kept: dict[int, Group] = {}
        for group in warp.groups:
            if group.bits and group.pc in kept:
                kept[group.pc].bits |= group.bits
                kept[group.pc].waits = ""
            elif group.bits:
                kept[group.pc] = group
        warp.groups = list(kept.values())

    # -- messages

    def _where(self, warp: Warp) -> str:
        segment, bits = warp.here
        item = _failing(segment) or "the kernel's end"
        return f"  in warp {warp.index} (lanes {bits:#010x}) of CTA {tuple(self.place.values())[:2]}: {item}"

    def _report(self) -> str:
        lines = []
        for w in self.warps:
            for g in w.groups:
                items = self.kernel.segments[g.pc].instructions
                state = f"waits ({g.waits})" if g.waits else "runs"
                lines.append(f"  warp {w.index} lanes {g.bits:#010x} {state}: {items[0] if items else 'a branch'}")
        for address, b in sorted(self.barriers.items()):
            lines.append(
                f"  mbarrier {address:#x} (offset {address - SHARED_BASE}): phase {b.phase}, {b.pending} of "
                f"{b.expected} arrivals and {b.transaction_bytes} bytes missing"
            )
        for number, b in self.named.items():
            if b.arrived:
                lines.append(f"  barrier {number}: {b.arrived} of {b.expected or 'all'} threads")
        return "\n".join(lines)


def _failing(segment: Segment) -> Instruction | None:
    """The instruction of a segment that raised what is being handled."""
    error = sys.exc_info()[1]
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<ptx>":
                return segment.instructions[trace.tb_lineno - 3]  # behind `def` and the line that names R
            trace = trace.tb_next
        error = error.__context__
    return segment.instructions[0] if segment.instructions else None

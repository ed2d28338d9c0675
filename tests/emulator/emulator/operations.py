"""What the instructions do that concern other threads or shared memory's copies: barriers, exchanges, fences, copies.

Each function takes a kernel's translator and an instruction and returns its handler, which the machine calls with CTA,
warp and group of lanes. A handler returns what it waits for, and is called again later, or None when it is done.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from .instructions import Translator
from .lanes import FULL, active, aligned, bits_of, lanes_of, lanewise, put, uniform
from .ptx import LANES, SINK, EmulationError, Instruction, Mem, UnknownInstruction, Vec
from .tensor_cores import matrix_instruction, wgmma


def ret(t: Translator, item: Instruction | None):
    def run(cta, warp, group):
        warp.end(group, active(item, warp, group) if item else group.bits)

    return run


def _trap(t: Translator, item: Instruction):
    def run(cta, warp, bits: int):
        raise EmulationError("trap")

    return lanewise(item, run)


CLUSTER_BARRIER = tuple(
    f"barrier.cluster.{half}.aligned" for half in ("arrive.release", "arrive.relaxed", "wait.acquire")
)


def _cluster_barrier(item: Instruction):
    def arrive(cta, warp, group):
        cta.cluster.arrive(warp)

    def wait(cta, warp, group):
        if warp.cluster_phase is None:
            raise EmulationError("a warp waits at the cluster's barrier and has not arrived")
        if warp.cluster_phase == cta.cluster.phase:
            return "the cluster's barrier"
        warp.cluster_phase = None
        return None

    return aligned(item, arrive if "arrive" in item.parts else wait)


def _barrier(t: Translator, item: Instruction):
    if item.opcode == "bar.warp.sync":
        return _among_members(t, item, lambda warp, bits: None)
    if item.opcode in CLUSTER_BARRIER:
        return _cluster_barrier(item)
    known = ("bar.sync", "barrier.cta.sync.aligned", "barrier.cta.arrive.aligned", "barrier.cta.red.or.pred.aligned")
    if item.opcode not in known:
        raise UnknownInstruction(str(item))
    votes, waits = "red" in item.parts, "arrive" not in item.parts
    operands = item.operands[1:-1] if votes else item.operands
    number = t.reader(operands[0], "u32")
    count = t.reader(operands[1], "u32") if len(operands) > 1 else None
    predicate = t.reader(item.operands[-1], "pred") if votes else None

    def run(cta, warp, group):
        if group.ticket is None:
            at = uniform(number(warp), group.bits, "the barrier's number")
            threads = uniform(count(warp), group.bits, "the barrier's count") if count else 0
            if at >= 16 or threads % LANES:
                raise EmulationError(f"barrier {at} with {threads} threads")
            group.ticket = cta.meet(at, threads, warp.known, predicate(warp) if votes else None)
            if not waits:
                group.ticket = None
                return None
        barrier, generation = group.ticket
        if barrier.generation == generation:
            return f"barrier {barrier.number}"
        group.ticket = None
        warp.learn(barrier.told)
        if votes:
            put(warp, item.operands[0], np.full(LANES, np.stack(barrier.votes).any()), FULL)
        return None

    return aligned(item, run)


def _among_members(t: Translator, item: Instruction, run):
    """An operation with a member mask as its last operand: it waits until all its living lanes are here."""
    mask = t.reader(item.operands[-1], "u32")

    def handler(cta, warp, group):
        bits = active(item, warp, group)
        if not bits:
            return None
        members = uniform(mask(warp), bits, "the member mask")
        if members & warp.live & ~bits:
            return "the member mask's other lanes"
        if bits & ~members:
            raise EmulationError(f"lanes {bits & ~members:#x} are not in their own member mask {members:#x}")
        run(warp, bits)
        return None

    return handler


def _shfl(t: Translator, item: Instruction):
    mode = item.parts[2]
    if item.parts[1] != "sync" or mode not in ("up", "bfly", "idx"):
        raise UnknownInstruction(str(item))
    target, source, lane_operand, clamp_operand, _ = item.operands
    value, b, c = t.reader(source, "b32"), t.reader(lane_operand, "u32"), t.reader(clamp_operand, "u32")
    targets = target.items if isinstance(target, Vec) else (target, SINK)
    lane = np.arange(LANES, dtype=np.int64)

    def run(warp, bits: int):
        amount, control = b(warp).astype(np.int64) & 31, c(warp).astype(np.int64)
        clamp, segment = control & 31, control >> 8 & 31
        bound = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            j = lane - amount
            valid = j >= bound
        else:
            j = lane ^ amount if mode == "bfly" else (lane & segment) | (amount & ~segment)
            valid = j <= bound
        j = np.where(valid, j, lane) & 31
        if bits != FULL and not lanes_of(bits)[j[lanes_of(bits)]].all():
            raise EmulationError("shfl reads a lane that does not take part")
        put(warp, targets[0], value(warp)[j], bits)
        put(warp, targets[1], valid, bits)

    return _among_members(t, item, run)


def _redux(t: Translator, item: Instruction):
    functions = {"add": np.add, "max": np.maximum, "min": np.minimum}
    if item.parts[2] not in functions or item.parts[3] != "u32":
        raise UnknownInstruction(str(item))
    function, value = functions[item.parts[2]], t.reader(item.operands[1], "u32")

    def run(warp, bits: int):
        result = function.reduce(value(warp)[lanes_of(bits)], dtype=np.uint32)
        put(warp, item.operands[0], np.full(LANES, result), bits)

    return _among_members(t, item, run)


def _vote(t: Translator, item: Instruction):
    if item.opcode not in ("vote.sync.any.pred", "vote.sync.all.pred", "vote.sync.ballot.b32"):
        raise UnknownInstruction(str(item))
    value = t.reader(item.operands[1], "pred")

    def run(warp, bits: int):
        voted = bits_of(value(warp)) & bits
        result = {"any": bool(voted), "all": voted == bits, "ballot": np.uint32(voted)}[item.parts[2]]
        put(warp, item.operands[0], np.full(LANES, result), bits)

    return _among_members(t, item, run)


def _elect(t: Translator, item: Instruction):
    """PTX does not say which lane; the highest is none that a kernel would take by mistake."""
    if item.opcode != "elect.sync":
        raise UnknownInstruction(str(item))
    lane, elected = item.operands[0].items

    def run(warp, bits: int):
        highest = bits.bit_length() - 1
        put(warp, lane, np.full(LANES, highest, np.uint32), bits)
        put(warp, elected, np.arange(LANES) == highest, bits)

    return _among_members(t, item, run)


def _mbarrier(t: Translator, item: Instruction):
    if item.opcode in ("mbarrier.try_wait.parity.shared::cta.b64", "mbarrier.test_wait.parity.shared::cta.b64"):
        return _mbarrier_wait(t, item)
    operands = [x for x in item.operands if x != SINK]
    what = item.opcode.removeprefix("mbarrier.").removesuffix(".shared::cta.b64")
    if what not in ("init", "arrive", "arrive.expect_tx") or not isinstance(operands[0], Mem):
        raise UnknownInstruction(str(item))
    address = t.address(operands[0])
    value = t.reader(operands[1], "u32") if len(operands) > 1 else None

    def run(cta, warp, bits: int):
        addresses, values = address(warp), value(warp) if value else np.ones(LANES, np.uint32)
        for lane in np.flatnonzero(lanes_of(bits)):
            at, number = int(addresses[lane]), int(values[lane])
            if what == "init":
                cta.init_barrier(at, number)
            elif what == "arrive":
                cta.arrive(at, arrivals=number, told=warp.known)
            else:
                cta.arrive(at, transaction_bytes=number, told=warp.known)

    return lanewise(item, run)


def _mbarrier_wait(t: Translator, item: Instruction):
    address, parity = t.address(item.operands[1]), t.reader(item.operands[2], "u32")

    def run(cta, warp, bits: int):
        addresses, parities, done = address(warp), parity(warp), np.zeros(LANES, bool)
        for lane in np.flatnonzero(lanes_of(bits)):
            barrier = cta.barrier(int(addresses[lane]))
            done[lane] = barrier.phase & 1 != int(parities[lane]) & 1
            if done[lane]:
                warp.learn(barrier.told)
        # It may give up waiting: always when nothing else can happen, and now and then as hardware does.
        waits = "try_wait" in item.parts and not cta.give_up and cta.rng.random() > 0.02
        if waits and not done[lanes_of(bits)].any():
            return "try_wait"
        put(warp, item.operands[0], done, bits)
        return None

    return lanewise(item, run)


def _fence(t: Translator, item: Instruction):
    if item.opcode not in ("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster"):
        raise UnknownInstruction(str(item))
    proxy = "proxy" in item.parts

    def run(cta, warp, bits: int):
        if proxy:
            cta.shared.fence(warp.index)
            warp.fenced = np.array(warp.known)

    return lanewise(item, run)


def _cp(t: Translator, item: Instruction):
    if item.opcode.startswith("cp.async.bulk.tensor."):
        return _tensor_copy(t, item)
    if item.opcode.startswith(("cp.async.cg.shared.global", "cp.async.ca.shared.global")):
        return _async_copy(t, item)
    if item.opcode == "cp.async.mbarrier.arrive.shared::cta.b64":
        return _announcement(t, item)
    if item.opcode == "cp.async.commit_group":
        return lanewise(item, lambda cta, warp, bits: cta.commit_copies(warp))
    if item.opcode in ("cp.async.wait_all", "cp.async.wait_group"):
        groups = int(item.operands[0].text) if item.operands else None
        return lanewise(item, lambda cta, warp, bits: cta.finish_copies(warp, groups))
    raise UnknownInstruction(str(item))


def _tensor_copy(t: Translator, item: Instruction):
    rank = re.fullmatch(
        r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cluster\.global\.mbarrier::complete_tx::bytes\.L2::cache_hint",
        item.opcode,
    )
    if rank is None:
        raise UnknownInstruction(str(item))
    destination, source, barrier, _ = item.operands
    to, barrier_at = t.address(destination), t.address(barrier)
    map_at = t.address(source, "u64")
    coordinates = [t.reader(c, "s32") for c in source.coordinates]

    def run(cta, warp, bits: int):
        columns = [c(warp) for c in coordinates]
        for lane in np.flatnonzero(lanes_of(bits)):
            at = int(map_at(warp)[lane])
            if at not in cta.maps:
                raise EmulationError(f"no tensor map at {at:#x}")
            tensor_map = cta.maps[at]
            if not len(tensor_map.dims) == len(columns) == int(rank[1]):
                raise EmulationError(f"a copy of rank {rank[1]} with a tensor map of rank {len(tensor_map.dims)}")
            place = tuple(int(c[lane]) for c in columns)
            if not warp.followed:
                cta.memory.refuse_late_box(tensor_map, place)
            box = partial(cta.memory.read_box, tensor_map, place)
            cta.start_transfer(int(to(warp)[lane]), box, tensor_map, int(barrier_at(warp)[lane]), item)

    return lanewise(item, run)


def _async_copy(t: Translator, item: Instruction):
    """4, 8 or 16 bytes per lane; the last operand says how many come from memory, the rest are zeros."""
    destination, source, size, *taken = item.operands
    each = int(size.text)
    if each not in ((4, 8, 16) if item.parts[2] == "ca" else (16,)) or len(taken) > 1:
        raise UnknownInstruction(str(item))
    to, source_at = t.address(destination), t.address(source, "u64")
    count_of = t.reader(taken[0] if taken else size, "u32")

    def run(cta, warp, bits: int):
        lanes = lanes_of(bits)
        counts, addresses = count_of(warp)[lanes], source_at(warp)[lanes]
        if not ((counts == 0) | (counts == each)).all():
            raise EmulationError(f"cp.async of {counts.tolist()} bytes: our kernels copy {each} or none")
        data = np.zeros((len(counts), each), np.uint8)
        if not warp.followed:
            cta.memory.refuse_late(addresses[counts == each], each)
        data[counts == each] = cta.memory.load(addresses[counts == each], each)
        cta.start_copy(warp, to(warp)[lanes], data)

    return lanewise(item, run)


def _announcement(t: Translator, item: Instruction):
    """An arrival when the lane's copies are there, which the mbarrier waits for from now on."""
    address = t.address(item.operands[0])
    return lanewise(item, lambda cta, warp, bits: cta.announce_copies(warp, address(warp)[lanes_of(bits)]))


OPERATIONS = {
    "ret": ret,
    "trap": _trap,
    "bar": _barrier,
    "barrier": _barrier,
    "shfl": _shfl,
    "redux": _redux,
    "vote": _vote,
    "elect": _elect,
    "movmatrix": matrix_instruction,
    "ldmatrix": matrix_instruction,
    "stmatrix": matrix_instruction,
    "mbarrier": _mbarrier,
    "fence": _fence,
    "cp": _cp,
    "wgmma": wgmma,
}

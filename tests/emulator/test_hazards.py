"""Kernels survive callers and predecessors on the stream that do what no engine should."""

from collections import defaultdict
from dataclasses import replace

import kernels
import numpy as np
import pytest
import torch
from emulator import faults
from emulator.machine import TIMINGS, Cta, Warp
from emulator.memory import Memory
from emulator.ptx import LANES, EmulationError

from etap_backend import DecodeSchedule
from support import sparse_cases
from support.cases import Case, Runner, build
from support.compare import problems_with, truth
from support.covering import covering
from support.sparse_cases import SparseCase

pytestmark = kernels.NEEDS_COMPILER

CACHES = {"bf16": {}, "fp8": {"kv_dtype": "fp8"}, "fp8_math": {"kv_dtype": "fp8", "fp8_math": True}}
MOST_TOKENS = 2**31 - 128  # kMostTokens of csrc/params.h
TILE = 64
TRAP_TICKS = 5  # kTrapTicks of csrc/common/pipeline.cuh, in the upper half of the clock
STEPS_A_TICK = 1000


class GrowingLengths(Memory):
    """Every length is one more once the first of a CTA's warps has read it."""

    def load(self, addresses, size):
        loaded = super().load(addresses, size)
        lengths = next((data for *_, data, name in self._buffers if name == "seq_lens"), None)
        if lengths is not None and not hasattr(self, "grown"):
            begin = lengths.ctypes.data
            if begin <= int(addresses[0]) < begin + lengths.size:
                self.grown = True
                lengths.view(np.int32)[:] += 1
        return loaded


@covering(1, {"kind": list(CACHES), "heads": [16, 64], "early_loads": [False, True]})
def test_all_warps_take_the_same_one_of_two_lengths(kind, heads, early_loads, monkeypatch):
    """At a multiple of 64 one more token is one more tile: warps that read both lengths would wait for each other."""
    monkeypatch.setattr(kernels, "Memory", GrowingLengths)
    after = build(Case((2 * TILE + 1,), heads=heads, num_sms=1, **CACHES[kind]), "cpu")
    before = replace(after, case=replace(after.case, lengths=(2 * TILE,)), seq_lens=after.seq_lens - 1)
    wanted = [(problem, truth(problem)) for problem in (before, after)]
    for seed, timing in enumerate(TIMINGS):
        runner = Runner(before)
        out, lse = runner.out.tensor, runner.lse.tensor
        how = dict(early_loads=early_loads, seed=seed, timing=timing)
        kernels.run_decode(before, runner.build(), runner, **how)
        found = [problems_with(out, lse, *each) for each in wanted]
        assert not all(found), found


def through_l1(item, _):
    return item.text.replace("ld.global.cg.", "ld.global.") + ";" * ("cg" in item.parts)


def test_a_scale_beside_one_that_comes_late_is_not_read_through_its_line(monkeypatch):
    """kv_scale may be read before the predecessor has ended, which may still write q_scale in the same 128 bytes."""
    placed = kernels.placed

    def placed_together(memory, tensors):
        copies = placed(memory, tensors)
        pair = np.array([copies["q_scale"].item(), copies["kv_scale"].item()] + [0] * 62, np.float32)
        first = -pair.ctypes.data // 4 % 32  # a line begins there
        pair[first : first + 2] = pair[:2].copy()
        memory.add(pair, "scales")
        together = torch.from_numpy(pair)
        return copies | {"q_scale": together[first : first + 1], "kv_scale": together[first + 1 : first + 2]}

    monkeypatch.setattr(kernels, "placed", placed_together)
    types = dict(dtype="float8_e4m3fn", kv_dtype="fp8", q_scale=0.02, kv_scale=0.03, fp8_math=True)
    problem = build(Case((200, 0, 64), num_sms=2, **types), "cpu")
    runner = Runner(problem)
    arguments = (problem, runner.build(), runner)
    kernels.run_decode(*arguments, early_loads=True)
    assert not problems_with(runner.out.tensor, runner.lse.tensor, problem, truth(problem))
    with pytest.raises(EmulationError, match="a line of L1"):
        kernels.run_decode(*arguments, early_loads=True, edit=through_l1)


@pytest.mark.parametrize("page_size", [1, 32, 64])
@pytest.mark.parametrize("heads", [16, 64])
def test_the_longest_lengths_have_a_last_tile(heads, page_size):
    """A partition of the last two tiles: int32 holds all that is computed, and there is no page: it is NaN."""
    problem = build(Case((192,), heads=heads, page_size=page_size, num_sms=1), "cpu")
    problem = replace(problem, seq_lens=torch.tensor([2**31 - 1], dtype=torch.int32))
    runner = Runner(problem)
    planned = runner.schedule.build(torch.tensor([192], dtype=torch.int32))
    planned.work_ranges[0, :5] = torch.tensor([0, MOST_TOKENS // TILE - 2, 1, 0, 0])
    out, lse = runner.out.tensor, runner.lse.tensor
    kernels.run_decode(problem, planned, runner)
    assert out.isnan().all() and lse.isnan().all()


@covering(1, {
    "kind": list(CACHES), "heads": [16, 64], "first, second": [(3, 20), (2, 3), (20, 3)], "fixed": [False, True],
}, most=2)  # fmt: skip
def test_a_plan_whose_schedule_was_built_again_since_touches_nothing_out_of_bounds(kind, heads, first, second, fixed):
    """The result is wrong; every access lies in a tensor of the call, or this raises."""
    problem = build(Case((300, 70, 130, 1) * 5, heads=heads, **CACHES[kind]), "cpu")
    types = {"fp8_cache": kind != "bf16", "fp8_math": kind == "fp8_math"}
    schedule = DecodeSchedule(20, heads, batch_invariant=fixed, num_sms=24, device="cpu", **types)
    rows = {name: getattr(problem, name)[:first] for name in ("q", "call_q", "block_table", "seq_lens")}
    case = replace(problem.case, lengths=problem.case.lengths[:first], num_sms=24)
    part = replace(problem, case=case, **rows)
    runner = Runner(part)
    stale = schedule.build(part.seq_lens)
    schedule.build(problem.seq_lens[:second])
    wanted = DecodeSchedule.workspace_floats(heads, 1, 24, max_batch=first, batch_invariant=fixed)
    assert stale.workspace is not None
    kernels.run_decode(part, stale._replace(workspace=stale.workspace[:wanted]), runner)


class FlippingLengths(Memory):
    """Every other load of lengths finds them all of thousands of tiles, the others of one or none."""

    def load(self, addresses, size):
        lengths = next(data for *_, data, name in self._buffers if name == "seq_lens")
        begin = lengths.ctypes.data
        if begin <= int(addresses[0]) < begin + lengths.size:
            self.loads = getattr(self, "loads", 0) + 1
            lengths.view(np.int32)[:] = 300_000 if self.loads % 3 == 0 else self.loads % 2
        return super().load(addresses, size)


@pytest.mark.parametrize("batch, fixed_splits", [(40, 0), (300, 0), (5, 0), (5, 4)])
def test_lengths_that_change_while_a_schedule_is_built(batch, fixed_splits, monkeypatch):
    """Ranges and splits are of no batch then; they lie in their buffers, and decode reads no tile before a request."""
    monkeypatch.setattr(kernels, "Memory", FlippingLengths)
    ranges, offsets = torch.zeros(24, 8, dtype=torch.int32), torch.zeros(batch + 1, dtype=torch.int32)
    kernels.run_schedule(torch.zeros(batch, dtype=torch.int32), ranges, offsets, fixed_splits, 16, 2, 4)
    assert ranges[:, :5].min() >= 0 and offsets.min() >= 0


ONE = {"num_sms": 1}
DENSE_DEADLOCKS = [  # a case, and which of its signals are left out
    (Case((1000,), **ONE), "stage_release"),
    (Case((1000,), page_size=1, **ONE), "tile_ready"),
    (Case((100,), heads=60, **ONE), "length_commit"),  # 60 heads: queries that TMA cannot bring
    (Case((200,), heads=60, **ONE), "expected_bytes"),
    (Case((100,), page_size=1, **CACHES["fp8"], **ONE), "length_commit"),
    (Case((200, 600), heads=64, **CACHES["fp8_math"], **ONE), "expected_bytes"),
    (Case((100,), heads=64, page_size=1, **CACHES["fp8_math"], **ONE), "rows_commit"),
]
SPARSE_DEADLOCKS = [
    (SparseCase(2, 16, 130, **ONE), "rows_commit"),
    (SparseCase(2, 16, 130, **ONE), "lent_commit"),
    (SparseCase(1, 16, 64, **ONE), "rows_commit"),
    (SparseCase(1, 32, 64, "fp8", **ONE), "tile_ready"),
    (SparseCase(1, 64, 400, **ONE), "stage_release"),
    (SparseCase(1, 64, 64, **ONE), "rows_commit"),
    (SparseCase(1, 64, 400, "v4", **ONE), "rows_commit"),
    (SparseCase(1, 64, 64, "v4", **ONE), "rows_commit"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case, mark", DENSE_DEADLOCKS + SPARSE_DEADLOCKS)
def test_a_deadlock_ends_in_a_trap(case, mark, monkeypatch):
    """On a GPU nobody sees a deadlock: one of the waits must trap, one period after the predecessor's end."""

    def nothing_happens(cta, stuck_at):
        if cta.steps - stuck_since.setdefault(cta, cta.steps) > 10 * TRAP_TICKS * STEPS_A_TICK:
            raise EmulationError("no wait gives up")
        cta.give_up = True
        for warp in cta.warps:
            for group in warp.groups:
                group.since = -1
        return stuck_at

    def ticking(warp, name):
        if name != "%clock_hi":
            return special(warp, name)
        clocks[warp.index].append(warp.cta.steps // STEPS_A_TICK)
        return np.full(LANES, clocks[warp.index][-1], np.uint32)

    def moves(cta):
        return cta.transfers or any(warp.copies for warp in cta.warps)

    clocks, stuck_since = defaultdict(list), {}
    special, unblock = Warp.special, Cta._unblock
    monkeypatch.setattr(Warp, "special", ticking)
    monkeypatch.setattr(Cta, "_unblock", lambda cta, at: (unblock if moves(cta) else nothing_happens)(cta, at))
    with pytest.raises(EmulationError, match="trap"):
        if isinstance(case, SparseCase):
            listed = sparse_cases.build(case, "cpu")
            runner = sparse_cases.SparseRunner(listed)
            kernels.run_sparse(listed, runner, sources=kernels.MARKED_SPARSE, edit=faults.without(mark))
        else:
            problem = build(case, "cpu")
            runner = Runner(problem)
            arguments = (problem, runner.build(), runner)
            kernels.run_decode(*arguments, sources=kernels.MARKED, edit=faults.without(mark))
    assert min(seen[-1] - seen[0] for seen in clocks.values() if len(seen) > 1) <= TRAP_TICKS + 1

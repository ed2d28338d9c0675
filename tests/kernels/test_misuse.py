"""What no engine should do: a GPU touches nothing that is not the call's, and the executor on the CPU refuses it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch

from etap_backend import DecodeSchedule
from support.cases import WILD_PAGES, Case, Guarded, Runner, build, decode
from support.compare import check, truth
from support.covering import both_devices, covering

KINDS = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp8": {"kv_dtype": "fp8", "kv_scale": 0.0137},
    "fp8 math": {"kv_dtype": "fp8", "kv_scale": 0.0137, "fp8_math": True},
}


class GuardedSchedule(DecodeSchedule):
    """A schedule whose buffers lie between guard elements."""

    GUARD = 1024

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.whole = {name: self._guarded(name) for name in ("work_ranges", "split_offsets", "workspace")}

    def _guarded(self, name: str) -> torch.Tensor:
        buffer = getattr(self, name)
        whole = buffer.new_full((buffer.numel() + 2 * self.GUARD,), 7)
        setattr(self, name, whole[self.GUARD : -self.GUARD].view(buffer.shape))
        return whole

    def check(self) -> None:
        for name, whole in self.whole.items():
            beside = torch.cat([whole[: self.GUARD], whole[-self.GUARD :]])
            assert bool((beside == 7).all()), f"{name}: elements beside it were written"


@both_devices
@covering(1, {
    "kind": list(KINDS),
    "heads": [16, 64],
    "first, second": [(8, 64), (64, 8), (3, 64)],
    "batch_invariant": [False, True],
}, most=4)  # fmt: skip
def test_a_plan_whose_schedule_was_built_again_since(device, kind, heads, first, second, batch_invariant):
    problem = build(Case((900, 70, 300, 5) * 16, heads=heads, **KINDS[kind]), device)
    types = {"fp8_cache": "fp8" in kind, "fp8_math": kind == "fp8 math"}
    schedule = GuardedSchedule(64, heads, device=device, num_sms=132, batch_invariant=batch_invariant, **types)
    rows = {name: getattr(problem, name)[:first] for name in ("q", "call_q", "block_table", "seq_lens")}
    part = replace(problem, case=replace(problem.case, lengths=problem.case.lengths[:first]), **rows)
    out = Guarded((first, 1, heads, 512), problem.case.out_dtype, device)
    lse = Guarded((first, 1, heads), torch.float32, device)
    stale = schedule.build(part.seq_lens)
    schedule.build(problem.seq_lens[:second])
    # On the CPU it is refused, unless it has all tiles of the call.
    with suppress(ValueError) if device == "cpu" else nullcontext():
        decode(part, stale, out=out.tensor, lse=lse.tensor)
    for guarded, name in ((out, "out"), (lse, "lse")):
        guarded.check(name)
    schedule.check()
    decode(part, schedule.build(part.seq_lens), out=out.tensor, lse=lse.tensor)
    check(out.tensor, lse.tensor, part, truth(part))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("batch", [100, 1024])
def test_lengths_that_change_while_a_schedule_is_built(batch, heads):
    """Another stream flips lengths between one tile and thousands."""
    schedule = GuardedSchedule(batch, heads)
    lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
    flipping = torch.cuda.Stream()
    torch.cuda.synchronize()
    for i in range(3000):
        with torch.cuda.stream(flipping):
            lengths[i % 7 :: 7].fill_(1 if i // 7 % 2 else 100_000)
        schedule.build(lengths)
    torch.cuda.synchronize()
    schedule.check()


@both_devices
@covering(1, {
    "kind, page_size": [(kind, size) for kind in KINDS for size in (64, 16, 1) if kind != "fp16" or size == 64],
    "heads": [8, 16, 32, 64],
    "page": WILD_PAGES,
}, most=2)  # fmt: skip
def test_a_page_outside_the_cache_spoils_its_request_alone(device, kind, heads, page_size, page):
    """Inside of the request's length: no finite number passes for a result."""
    problem = build(Case((300, 200, 500), heads=heads, page_size=page_size, num_sms=4, **KINDS[kind]), device)
    out, lse = (result.clone() for result in Runner(problem).run())
    spoiled = replace(problem, block_table=problem.block_table.clone())
    spoiled.block_table[1, 70 // page_size] = page
    if device == "cpu":
        with pytest.raises(ValueError, match="^block_table: wanted pages from 0 "):
            Runner(spoiled).run()
        return
    found = Runner(spoiled)
    found_out, found_lse = found.run()
    found.check_guards()
    assert found_out[1].isnan().all() and found_lse[1].isnan().all()
    for r in (0, 2):
        assert torch.equal(found_out[r], out[r]) and torch.equal(found_lse[r], lse[r])

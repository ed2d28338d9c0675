"""The compiled top-k kernel in the emulator, against float64 keys: clusters, lists, laws of logits, planted faults."""

from __future__ import annotations

from functools import cache
from itertools import count

import pytest
import torch
from emulator.machine import TIMINGS
from emulator.ptx import Edit, EmulationError, Instruction
from kernels import NEEDS_COMPILER, run_top_k, top_k_kernel

from support.covering import covering
from support.top_k_cases import INF, LAWS, NAN, TopKCase, expected, on_pages

pytestmark = NEEDS_COMPILER

WIDE = 20000  # logits so wide that a row has as many CTAs as there are multiprocessors, up to eight


def select(case: TopKCase, num_sms: int, *, table=None, page_size=1, early_lengths=False, **how) -> torch.Tensor:
    out = torch.full((len(case.lengths), case.k), -77, dtype=torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    run_top_k(case.logits(), lengths, table, out, page_size, num_sms, early_lengths, **how)
    return out


def verify(case: TopKCase, num_sms: int, **how) -> None:
    assert torch.equal(select(case, num_sms, **how), expected(case.logits(), case.lengths, case.k))


@pytest.mark.exhaustive
@covering(1, {"law": tuple(LAWS), "ctas": (1, 2, 4, 8), "length": (2100, 9000, 17000), "k": (512, 2048)}, most=40)
def test_laws(law, ctas, length, k):
    """Up to 8192 logits are one CTA's, 17000 are five CTAs', and more than one has in flight."""
    verify(TopKCase([length], k, law, width=WIDE, seed=20), ctas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_warps_may_run_in_any_order(seed):
    verify(TopKCase([9000, 8999], 512, "few_values", width=WIDE, seed=21), 8, seed=seed, timing="random")


@covering(1, {"sms": (1, 7, 40), "behind": (INF, NAN)})
def test_lengths(sms, behind):
    verify(TopKCase([0, 1, 511, 512, 513, 640, 5001], 512, behind=behind, seed=22), sms)


@covering(1, {"k": (7, 512, 1024), "length": (8193, 12301), "sms": (4, 8)})
def test_rows_of_several_ctas(k, length, sms):
    verify(TopKCase([length, 700], k, width=WIDE, behind=NAN, seed=27), sms)


@pytest.mark.parametrize("length", [2600, 9000])
@pytest.mark.parametrize("law", ["sampled_high", "sampled_low"])
def test_samples_may_mislead(law, length):
    """The bounds that they give are too high, or let all logits through."""
    verify(TopKCase([length], 512, law, width=WIDE, seed=28), 8)


@covering(1, {"stride": (5001, 5002, 5004), "offset": (0, 1, 2)})
def test_strides_and_alignment(stride, offset):
    verify(TopKCase([5000, 4097], 512, width=5000, stride=stride, offset=offset, seed=23), 4)


def test_lengths_that_were_written_early_are_read_early():
    verify(TopKCase([700, 600, 3], 512, seed=24), 3, early_lengths=True)


def test_cache_rows_by_a_block_table():
    case = TopKCase([3000, 100], 512, seed=25)
    table = torch.randperm(100).int().view(2, 50)
    found = select(case, 2, table=table[:, :45], page_size=64)
    assert torch.equal(found, on_pages(expected(case.logits(), case.lengths, 512), table[:, :45], 64))


def test_a_request_s_query_tokens_have_one_length():
    case = TopKCase([0, 0, 1, 4998, 4999, 5000], 512, seed=26)
    out = torch.full((6, 512), -77, dtype=torch.int32)
    run_top_k(case.logits(), torch.tensor([1, 5000], dtype=torch.int32), None, out, 1, 12)
    assert torch.equal(out, expected(case.logits(), case.lengths, 512))


# ------------------------------------------------------------------------------------------------------ planted faults

FAULTY = (  # cases that together need every wait: several CTAs, several rounds, one CTA, lists that have no room
    (TopKCase([9000], 512, width=WIDE, seed=29), 4),
    (TopKCase([9000], 512, "sampled_high", width=WIDE, seed=29), 4),
    (TopKCase([3000], 512, seed=29), 1),
    (TopKCase([17000], 512, "plateau", seed=29), 1),
)


@cache
def steps() -> list[list[int]]:
    """What a fault leaves out, as numbers of instructions: a wait with all its tries, or a single instruction."""
    found: dict[str, list[int]] = {}
    for number, item in enumerate(top_k_kernel().entry.instructions()):
        if "try_wait" in item.parts:
            found.setdefault(item.operands[1].base.name, []).append(number)
        elif "wait_group" in item.parts or item.parts[0] in ("bar", "barrier", "mbarrier") and "warp" not in item.parts:
            found[item.text + str(number)] = [number]
    waits = [key for key in found if key.startswith("barrier.cluster.wait")]
    del found[waits[0]]  # of rows without an exchange: no CTA of a cluster ends before all have begun
    return list(found.values())


def without(step: list[int]) -> Edit:
    numbers = count()

    def edit(item: Instruction, _: str) -> str:
        if next(numbers) not in step:
            return item.text
        return f"setp.eq.u32 {item.operands[0].name}, 0, 0;" if "try_wait" in item.parts else ""

    return edit


def fault_of(step: list[int]) -> str:
    """What is wrong without a step; empty when nothing is found."""
    edit = without(step)
    for seed in range(3):
        for case, ctas in FAULTY:
            for timing in TIMINGS:
                try:
                    found = select(case, ctas, edit=edit, seed=seed, timing=timing)
                except EmulationError as error:
                    return str(error)
                if not torch.equal(found, expected(case.logits(), case.lengths, case.k)):
                    return "another selection"
    return ""


@pytest.mark.exhaustive
def test_missing_synchronisation_is_found():
    assert len(steps()) > 18
    instructions = top_k_kernel().entry.instructions()
    missed = [instructions[step[0]].text for step in steps() if not fault_of(step)]
    assert not missed, missed

"""The stacks of a step against a model that compares every page of every request."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etap_backend import mla_decode
from etap_backend import schedule as schedule_module
from etap_backend.limits import MOST_SHARED, SHARED_FIELDS
from etap_backend.schedule import DecodeSchedule, stack_shape
from support.cases import stacked_from
from support.shared import LEAST_TILES, Tree, plan_of

TILE = 64
ROWS = [(8, 1, 132), (16, 1, 132), (32, 1, 132), (8, 2, 132), (16, 2, 132), (4, 4, 132), (8, 1, 78)]
"""Heads, query tokens, multiprocessors."""


def bound(length: int, s_q: int, width: int, page_size: int) -> int:
    return max(0, min(length - s_q, width * page_size)) // TILE


def common_tiles(table, lengths, one: int, other: int, s_q: int, page_size: int) -> int:
    """Leading tiles of two requests all of whose pages are the same."""
    most = min(bound(lengths[request], s_q, len(table[0]), page_size) for request in (one, other))
    tiles = 0
    while tiles < most:
        pages = range(tiles * TILE // page_size, ((tiles + 1) * TILE - 1) // page_size + 1)
        if any(table[one][page] != table[other][page] for page in pages):
            break
        tiles += 1
    return tiles


def model(order, common, places: int, least: int, least_tiles: int) -> list[tuple[list[int], int]]:
    """The stacks along an order of the requests: members, and tiles that they read together."""
    stacks, members, depth = [], order[:1], math.inf
    for place in range(1, len(order) + 1):
        shared = common[place] if place < len(order) else 0
        joined = min(depth, shared)
        if len(members) == 1:
            worth = place + 1 >= len(order) or common[place + 1] // 2 < shared
        else:
            worth = (len(members) + 1) * joined >= len(members) * depth
        if shared >= LEAST_TILES and len(members) < places and worth:
            members, depth = [*members, order[place]], joined
            continue
        if len(members) >= least:
            stacks.append((members, depth))
        members, depth = order[place : place + 1], math.inf
    return stacks if sum(len(members) * depth for members, depth in stacks) >= least_tiles else []


def check(tree: Tree, heads: int = 16, s_q: int = 1, num_sms: int = 132, least_tiles: int = 0) -> list:
    """Build the plan of a step and compare all of it with the model; returns the stacks."""
    shape, batch = stack_shape(heads * s_q, num_sms), len(tree.lengths)
    with stacked_from(least_tiles):
        options = dict(max_s_q=s_q, device="cpu", num_sms=num_sms, shared_prefix=True)
        schedule = DecodeSchedule(max(batch, 1), heads, **options)
        planned = schedule.build(tree.seq_lens, s_q, block_table=tree.block_table, page_size=tree.page_size)
    if planned.shared is None:
        assert batch < shape.least
        return []
    plan, table = plan_of(planned), tree.block_table.tolist()
    assert sorted(plan.order) == list(range(batch))
    pairs = zip(plan.order, plan.order[1:], strict=False)
    common = [0, *(common_tiles(table, tree.lengths, *pair, s_q, tree.page_size) for pair in pairs)]
    assert plan.common == common
    wanted = model(plan.order, common, shape.places, shape.least, least_tiles)
    assert plan.stacks == [(members, depth * TILE) for members, depth in wanted]
    first = dict.fromkeys(range(batch), 0) | {member: depth for members, depth in wanted for member in members}
    assert plan.first_tiles == [first[request] for request in range(batch)]
    assert plan.own_lens == [length - TILE * first[request] for request, length in enumerate(tree.lengths)]
    for request in range(batch):  # those of stacks have partials, and others where they are split
        slots = planned.split_offsets[request + 1] - planned.split_offsets[request]
        assert (slots >= 1) if first[request] else (slots == 0 or slots > 1)
    assert all(slots >= 1 for slots in plan.stack_slots)
    return wanted


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(ROWS),
    st.sampled_from([1, 16, 48, 64, 256]),
    st.integers(0, 40),
    st.sampled_from([0, 200]),
    st.integers(0, 2**32),
)
def test_stacks(rows, page_size, batch, least_tiles, seed):
    check(Tree.drawn(batch, page_size, seed), *rows, least_tiles)


def test_groups_are_found_wherever_their_requests_are():
    """Eight groups of four, in any order, of one page each that all have in common."""
    requests = [(group, 30 * TILE + 5 * request) for request in range(4) for group in range(8)]
    wanted = check(Tree(requests, 64, shared_tiles=24, trunk=1))
    assert sorted(sorted(members) for members, _ in wanted) == [[g, g + 8, g + 16, g + 24] for g in range(8)]
    assert {depth for _, depth in wanted} == {24}


def test_a_pair_with_much_in_common_is_not_spoilt_by_a_neighbour():
    rows = [[*range(10), *range(first, first + 90)] for first in (100, 300, 300)]
    assert check(Tree.of_rows(rows, 64), heads=32) == [([1, 2], 99)]


def test_tables_that_agree_again_share_no_more_than_before():
    """Behind a page of their own, as prompts computed at the same time have, the same ids say nothing."""
    rows = [[*range(9), 500 + r, *range(10, 40)] for r in range(4)]
    assert check(Tree.of_rows(rows, 64)) == [([0, 1, 2, 3], 9)]
    rows = [[500 + r, *range(1, 40)] for r in range(4)]
    assert check(Tree.of_rows(rows, 64)) == []


def test_one_page_repeated():
    assert check(Tree.of_rows([[7] * 40] * 4, 64)) == [([0, 1, 2, 3], 39)]


def test_nothing_is_stacked_where_little_is_shared():
    shape = stack_shape(16, 132)
    tiles = shape.least_tiles // 4
    rows = [list(range(tiles + 1))] * 4
    assert check(Tree.of_rows(rows, 64), least_tiles=shape.least_tiles) == [([0, 1, 2, 3], tiles)]
    assert check(Tree.of_rows([row[:-1] for row in rows], 64), least_tiles=shape.least_tiles) == []


@pytest.mark.parametrize("heads, num_sms, wanted", [
    (16, 132, (64, 4, 3)), (8, 132, (64, 8, 6)), (32, 132, (64, 2, 2)), (64, 132, (64, 1, 1)), (12, 132, (64, 1, 1)),
    (8, 78, (16, 2, 2)), (16, 78, (16, 1, 1)),
])  # fmt: skip
def test_stack_shapes(heads, num_sms, wanted):
    assert stack_shape(heads, num_sms)[:3] == wanted


def test_the_buffers_stay_and_the_workspace_grows():
    options = dict(device="cpu", num_sms=132)
    plain, shared = DecodeSchedule(8, 16, **options), DecodeSchedule(8, 16, shared_prefix=True, **options)
    assert plain.shared is None and shared.shared.shape == (SHARED_FIELDS, 8)
    assert shared.max_workspace_floats == DecodeSchedule.workspace_floats(16, 1, 132, max_batch=8, shared_prefix=True)
    assert shared.max_workspace_floats == (132 + 8) * 16 * 513 + (132 + 8 // 3) * 64 * 513
    tree = Tree.drawn(8, 64, 0)
    built = shared.build(tree.seq_lens, block_table=tree.block_table, page_size=64)
    assert built.shared is shared.shared
    assert built == shared.build(tree.seq_lens, block_table=tree.block_table, page_size=64)
    assert plain.build(tree.seq_lens, block_table=tree.block_table, page_size=64).shared is None
    assert shared.build(tree.seq_lens[:2], block_table=tree.block_table[:2], page_size=64).shared is None


def test_refusals():
    with pytest.raises(ValueError, match="shared_prefix: wanted False beside batch_invariant, got True"):
        DecodeSchedule(4, 16, device="cpu", batch_invariant=True, shared_prefix=True)
    with pytest.raises(ValueError, match=f"max_batch: wanted 1 to {MOST_SHARED}, got {MOST_SHARED + 1}"):
        DecodeSchedule(MOST_SHARED + 1, 16, device="cpu", shared_prefix=True)
    schedule = DecodeSchedule(4, 16, device="cpu", num_sms=132, shared_prefix=True)
    lengths, table = torch.ones(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    pages_of_three = dict(block_table=table[:3], page_size=64)
    for error, wanted, pages in [
        (TypeError, "block_table: wanted a tensor of int32 with shared_prefix, got None", {}),
        (TypeError, "page_size: wanted an int with shared_prefix, got None", dict(block_table=table)),
        (ValueError, "page_size: wanted 1 to", dict(block_table=table, page_size=0)),
        (
            TypeError,
            "block_table: wanted a tensor of int32 with shared_prefix, got torch.int64",
            dict(block_table=table.long(), page_size=64),
        ),
        (ValueError, r"block_table: wanted \[4, max_pages\] on cpu, got \[3, 2\] on cpu", pages_of_three),
        (ValueError, "block_table: wanted stride 1", dict(block_table=table.T.contiguous().T, page_size=64)),
    ]:
        with pytest.raises(error, match=wanted):
            schedule.build(lengths, **pages)
    with pytest.raises(ValueError, match=r"block_table: wanted \[2, max_pages\]"):
        schedule.build(lengths[:2], block_table=table, page_size=64)  # too few requests for a stack


def test_a_cache_of_other_pages_than_the_schedules_is_refused():
    schedule = DecodeSchedule(4, 16, device="cpu", num_sms=132, shared_prefix=True)
    lengths, table = torch.ones(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    built = schedule.build(lengths, block_table=table, page_size=64)
    cache, q = torch.zeros(3, 16, 576, dtype=torch.bfloat16), torch.zeros(4, 1, 16, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="kv_cache: wanted pages of as many tokens as the schedule, got pages of 16"):
        mla_decode(q, cache, table, lengths, built, softmax_scale=1.0)


def test_constants():
    constants = schedule_module.library().constants()
    assert (constants["shared_fields"], constants["most_shared"]) == (SHARED_FIELDS, MOST_SHARED)

"""The schedule against a model that lays the batch out on a line, tile by tile, and cuts the line."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etap_backend import limits
from etap_backend import schedule as schedule_module
from etap_backend._library import library
from etap_backend.cpu.dense import splits
from etap_backend.schedule import BuiltSchedule, DecodeSchedule, decode_shape

CONSTANTS = library().constants()
NAMES = ("own_tolerance", "split_rows", "memory_rows", "many_split_rows", "fixed_tiles")
OWN_TOLERANCE, SPLIT_ROWS, MEMORY_ROWS, MANY_SPLIT_ROWS, FIXED_TILES = map(CONSTANTS.get, NAMES)
SHORT_TILES = CONSTANTS["short_tiles"]
ROW_TILES = (8, 16, 32, 64)


class Calls(NamedTuple):
    """A schedule's parameters, which follow from a call's rows and cache."""

    row_tile: int  # more rows make combining dearer; 0: it is cheap
    split_cost: int  # a split's fixed cost, in tiles
    single_tiles: int = 0  # most tiles of a request that is cut into single tiles where each has a partition


def single_tiles(lengths, partitions: int, calls: Calls) -> int:
    """Tiles of the longest request that may be cut into single ones: any where half of the partitions would be idle, of
    many rows short ones where three quarters would be."""
    tiles = sum(tiles_of(lengths))
    few_rows = calls.row_tile <= MEMORY_ROWS
    if (2 if few_rows else 4) * tiles <= partitions:
        return tiles if few_rows else SHORT_TILES
    return calls.single_tiles if tiles <= partitions else 0


def least_tiles(lengths, partitions: int, calls: Calls) -> list[int]:
    """Fewest tiles of a split of each request: below, combining costs more than the split saves."""
    pairs = 2 * sum(tiles_of(lengths)) <= 3 * partitions and calls.row_tile <= MEMORY_ROWS
    single = single_tiles(lengths, partitions, calls)
    return [1 if n <= single else 2 if pairs else max(2, math.ceil(math.sqrt(n) / 4)) for n in tiles_of(lengths)]


def least_bound(lengths, partitions: int, calls: Calls) -> int:
    return max(-(-sum(tiles_of(lengths)) // partitions), 1 if single_tiles(lengths, partitions, calls) > 0 else 2)


def line_share(lengths, partitions: int, calls: Calls) -> int:
    """Load of a partition of the cost line beside the fixed cost of one split."""
    return -(-(sum(tiles_of(lengths)) + calls.split_cost * len(lengths)) // partitions)


def most_load(lengths, partitions: int, calls: Calls) -> int:
    """Tiles of the busiest partition that own partitions may have, beside the fixed cost of one split."""
    share = line_share(lengths, partitions, calls)
    return max(share, least_bound(lengths, partitions, calls)) + share // OWN_TOLERANCE


def own_bound(lengths, partitions: int, calls: Calls) -> int:
    """The most tiles of a partition where each has one split; 0 when the cost line serves the batch better."""
    for bound in range(least_bound(lengths, partitions, calls), most_load(lengths, partitions, calls) + 1):
        if sum(own_partitions(lengths, partitions, bound, calls)) <= partitions:
            return bound
    return 0


def own_partitions(lengths, partitions: int, bound: int, calls: Calls) -> list[int]:
    """How many partitions each request gets to itself."""
    least = least_tiles(lengths, partitions, calls)
    return [max(1, -(-n // max(bound, split))) for n, split in zip(tiles_of(lengths), least, strict=True)]


def whole_load(lengths, partitions: int, calls: Calls) -> int:
    """Most load of a partition of whole requests: that of splitting them, and what whole requests save."""
    row_tile = calls.row_tile
    share = line_share(lengths, partitions, calls)
    rows = min(len(lengths), partitions) * row_tile
    many = MANY_SPLIT_ROWS * partitions
    own = own_bound(lengths, partitions, calls)
    dear = rows * (3 if own else 4) / (4 * SPLIT_ROWS * partitions)
    saved = (rows + many // 2) // many if row_tile > MEMORY_ROWS else math.ceil(dear)
    split = own or share
    return split + calls.split_cost + saved + share // OWN_TOLERANCE


def counted(requests: int, partitions: int) -> list[int]:
    """The first request of each partition, and the end, where all have as many whole requests."""
    return [-(-p * requests // partitions) for p in range(partitions + 1)]


def stay_whole(lengths, partitions: int, calls: Calls) -> bool:
    costs = [tiles + calls.split_cost for tiles in tiles_of(lengths)]
    firsts = counted(len(lengths), partitions)
    heaviest = max(sum(costs[first:end]) for first, end in zip(firsts, firsts[1:], strict=False))
    return heaviest <= whole_load(lengths, partitions, calls)


def model(lengths: list[int], partitions: int, calls: Calls) -> list[tuple[int, int]]:
    """Where each partition begins, as (request, tile), and behind them the end of the batch."""
    end = (len(lengths), 0)
    if stay_whole(lengths, partitions, calls):
        firsts = range(partitions + 1) if len(lengths) <= partitions else counted(len(lengths), partitions)
        return [(min(first, len(lengths)), 0) for first in firsts]
    if bound := own_bound(lengths, partitions, calls):
        counts = own_partitions(lengths, partitions, bound, calls)
        shares = zip(range(len(lengths)), tiles_of(lengths), counts, strict=True)
        points = [(request, i * tiles // count) for request, tiles, count in shares for i in range(count)]
        return points + [end] * (partitions + 1 - len(points))
    line = []
    for request, tiles in enumerate(tiles_of(lengths)):
        line += [(request, 0)] * calls.split_cost + [(request, tile) for tile in range(tiles)]
    parts = min(partitions, len(line))  # more would leave empty partitions between the splits of one request
    return [line[p * len(line) // parts] if p < parts else end for p in range(partitions)] + [end]


def fixed_model(lengths: list[int], partitions: int, most: int) -> list[tuple[int, int]]:
    """The same where a request's length alone decides its number of splits, `most` at most."""
    end = (len(lengths), 0)
    tiles = tiles_of(lengths)
    if most > 1:
        counts = [max(1, min(most, -(-n // FIXED_TILES))) for n in tiles]
        points = [(r, i * n // k) for r, (n, k) in enumerate(zip(tiles, counts, strict=True)) for i in range(k)]
        return points + [end] * (partitions + 1 - len(points))
    places = [sum(tiles[:r]) + r for r in range(len(lengths) + 1)]
    parts = min(partitions, places[-1])
    cuts = [p * places[-1] // parts for p in range(parts)]
    first = [next(r for r, place in enumerate(places) if place >= cut) for cut in cuts]
    return [(r, 0) for r in first] + [end] * (partitions + 1 - parts)


def build(
    lengths,
    partitions: int,
    device: str = "cpu",
    fixed: int = 0,
    row_tile: int = 16,
    split_cost: int | None = None,
    single_tiles: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build for that many rows on a GPU of many tensor cores, unless split_cost says otherwise."""
    weighed = (fixed, row_tile, split_cost or decode_shape(row_tile, 132).split_cost, single_tiles)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    # One row more than needed, filled with a number that no schedule has: it must stay.
    work_ranges = torch.full((partitions + 1, 8), -99, dtype=torch.int32, device=device)
    split_offsets = torch.full((len(lengths) + 2,), -99, dtype=torch.int32, device=device)
    library().build_schedule(seq_lens, work_ranges, split_offsets, partitions, *weighed)
    assert work_ranges[partitions:].eq(-99).all() and split_offsets[len(lengths) + 1 :].eq(-99).all()
    return work_ranges[:partitions].cpu(), split_offsets[:-1].cpu()


def tiles_of(lengths) -> list[int]:
    return [-(-max(0, length) // 64) for length in lengths]


def owned(lengths, work_ranges) -> list[tuple[int, range, int]]:
    return list(splits(work_ranges, len(work_ranges), tiles_of(lengths)))


def check_invariants(lengths: list[int], partitions: int, work_ranges, split_offsets) -> None:
    tiles, offsets = tiles_of(lengths), split_offsets.tolist()
    runs = [[] for _ in lengths]
    for request, run, split in owned(lengths, work_ranges):
        assert split == len(runs[request]), "the splits of a request are numbered in their order"
        runs[request].append(run)
    for request, request_runs in enumerate(runs):
        assert [tile for run in request_runs for tile in run] == list(range(tiles[request])), "each tile once, in order"
        assert request_runs, "an empty request has a split, too, which writes its zeros"
        wanted = len(request_runs) if len(request_runs) > 1 else 0
        assert offsets[request + 1] - offsets[request] == wanted
    assert offsets[0] == 0 and offsets[-1] <= 2 * partitions, "the workspace has two slots per partition"
    split_requests = [request for request, request_runs in enumerate(runs) if len(request_runs) > 1]
    assert work_ranges[:, 5].tolist() == split_requests + [-1] * (partitions - len(split_requests))
    for (slot, count), request in zip(work_ranges[:, 6:].tolist(), split_requests, strict=False):
        assert (slot, count) == (offsets[request], len(runs[request]))


def check_balance(lengths: list[int], partitions: int, calls: Calls, work_ranges) -> None:
    cost = calls.split_cost
    most = max(most_load(lengths, partitions, calls), *least_tiles(lengths, partitions, calls), 0)
    if not work_ranges[:, 5].ge(0).any():  # where nothing is split a little more is worth it
        most = max(most, whole_load(lengths, partitions, calls) - cost)
    for p in range(partitions):
        mine = list(splits(work_ranges[p : p + 1], 1, tiles_of(lengths)))
        load = sum(len(run) for _, run, _ in mine) + cost * len(mine)
        assert load <= most + cost, "near the mean, and one more split"


MIXED = st.lists(
    st.one_of(st.sampled_from([0, 1, 63, 64, 65, -5]), st.integers(0, 300), st.integers(0, 20_000)),
    min_size=1,
    max_size=300,
)


@st.composite
def near_even(draw) -> list[int]:
    """Requests of about the same length, where whole ones may be spread evenly."""
    shortest, batch = draw(st.integers(0, 5_000)), draw(st.integers(1, 600))
    longest = shortest + draw(st.sampled_from([0, 0, 64, 1_000]))
    return draw(st.lists(st.integers(shortest, longest), min_size=batch, max_size=batch))


LENGTHS = st.one_of(MIXED, near_even())
PARTITIONS = st.integers(1, 264)
CALLS = st.builds(
    Calls, st.sampled_from((0, *ROW_TILES)), st.sampled_from([1, 2, 3, 8]), st.sampled_from([0, 4, 8, 16])
)
SEARCH = settings(max_examples=150, deadline=None, derandomize=True)


@SEARCH
@given(LENGTHS, PARTITIONS, CALLS)
def test_the_host_builds_what_the_model_says(lengths, partitions, calls):
    work_ranges, split_offsets = build(lengths, partitions, **calls._asdict())
    points = model(lengths, partitions, calls)
    assert work_ranges[:, :2].tolist() == [list(point) for point in points[:-1]]
    assert work_ranges[:, 2:4].tolist() == [list(point) for point in points[1:]]
    check_invariants(lengths, partitions, work_ranges, split_offsets)
    check_balance(lengths, partitions, calls, work_ranges)


@pytest.mark.gpu
@SEARCH
@given(LENGTHS, PARTITIONS, CALLS)
def test_the_device_builds_what_the_host_builds(lengths, partitions, calls):
    pairs = (build(lengths, partitions, device, **calls._asdict()) for device in ("cpu", "cuda"))
    for on_host, on_device in zip(*pairs, strict=True):
        assert on_device.tolist() == on_host.tolist()


@pytest.mark.parametrize("batch, tokens", [(256, 1024), (256, 8192), (512, 256), (100, 1024)])
def test_even_requests_stay_whole_where_a_split_costs_more_than_it_saves(batch, tokens):
    work_ranges, split_offsets = build([tokens] * batch, 132, row_tile=32)
    assert not split_offsets.any() and not work_ranges[:, 1].any()
    counts = [len(list(splits(work_ranges[p : p + 1], 1, [tokens // 64] * batch))) for p in range(132)]
    assert max(counts) == -(-batch // 132) and sum(counts) == batch


def test_how_many_rows_leave_requests_whole():
    """64 on 132 partitions: halves halve each partition's work, but more rows make a split dearer."""
    for tokens, whole in ((4096, ()), (1024, ()), (512, (32, 64)), (128, ROW_TILES)):
        uncut = [tile for tile in ROW_TILES if not build([tokens] * 64, 132, row_tile=tile)[1].any()]
        assert uncut == list(whole)
    assert build([128] * 4, 132, row_tile=64)[1].any()  # few requests: there is hardly anything to combine


def test_where_splits_are_cheap_only_even_requests_stay_whole():
    """64 on an H20's 78 partitions: 14 of them would be idle."""
    shape = decode_shape(16, 78)
    cheap = {"row_tile": shape.split_rows, "split_cost": shape.split_cost}
    assert build([4096] * 64, 78, **cheap)[1].any()
    assert not build([4096] * 78, 78, **cheap)[1].any()


@pytest.mark.parametrize("num_sms, alike", [(78, True), (132, False)])
def test_many_rows_make_splits_dear_where_tensor_cores_are_many(num_sms, alike):
    seq_lens = torch.full((64,), 512, dtype=torch.int32)
    options = {"max_s_q": 4, "device": "cpu", "num_sms": num_sms, "fp8_cache": True}  # whose 64 rows are one tile
    few_rows, many_rows = (DecodeSchedule(64, heads, **options) for heads in (2, 16))
    few_rows.build(seq_lens, s_q=4)
    many_rows.build(seq_lens, s_q=4)
    assert torch.equal(few_rows.work_ranges, many_rows.work_ranges) == alike


@pytest.mark.parametrize(
    "rows, kind, most",
    [
        *[(8, (), 16), (16, (), 16), (32, (), 8), (64, (), 0)],
        *[(8, (True, True), 0), (16, (True,), 4), (32, (True,), 8), (64, (True,), 16)],
        *[(16, (True, True), 8), (32, (True, True), 8), (64, (True, True), 16)],
    ],
)
def test_short_requests_are_cut_into_single_tiles_where_each_has_a_partition(rows, kind, most):
    shape = decode_shape(rows, 132, 1, *kind)
    assert shape.single_tiles == most
    for tiles in (8, 9, 16, 17) if rows > 16 else (4, 5, 8, 9, 16, 17):  # the shortest stay whole with more rows
        batch = 132 // tiles
        work_ranges, _ = build([64 * tiles] * batch, 132, row_tile=shape.row_tile, single_tiles=most)
        longest = max(len(run) for _, run, _ in owned([64 * tiles] * batch, work_ranges))
        assert (longest == 1) == (tiles <= most)


def test_one_request_of_not_many_more_tiles_than_partitions_is_cut_into_pairs():
    for row_tile, tiles, longest in ((16, 128, 2), (16, 198, 2), (16, 199, 4), (64, 128, 3)):
        work_ranges, _ = build([64 * tiles], 132, row_tile=row_tile)
        assert max(len(run) for _, run, _ in owned([64 * tiles], work_ranges)) == longest


def test_one_long_request_among_many_is_split_whatever_the_rows():
    lengths = [1024] * 255 + [65_536]
    for row_tile in ROW_TILES:
        work_ranges, split_offsets = build(lengths, 132, row_tile=row_tile)
        assert split_offsets[-1] > split_offsets[-2]
        check_balance(lengths, 132, Calls(row_tile, max(1, row_tile // 8)), work_ranges)


FIXED = st.one_of(st.just(1), st.integers(2, 40))


def fixed_partitions(lengths, partitions: int, fixed: int) -> int:
    """Fixed splits need a partition each."""
    return len(lengths) * fixed if fixed > 1 else partitions


@SEARCH
@given(LENGTHS, PARTITIONS, FIXED)
def test_fixed_splits_are_what_the_model_says(lengths, partitions, fixed):
    partitions = fixed_partitions(lengths, partitions, fixed)
    work_ranges, split_offsets = build(lengths, partitions, fixed=fixed)
    points = fixed_model(lengths, partitions, fixed)
    assert work_ranges[:, :2].tolist() == [list(point) for point in points[:-1]]
    assert work_ranges[:, 2:4].tolist() == [list(point) for point in points[1:]]
    check_invariants(lengths, partitions, work_ranges, split_offsets)
    if fixed == 1:
        assert not split_offsets.any() and not work_ranges[:, 1].any()


@pytest.mark.gpu
@SEARCH
@given(LENGTHS, PARTITIONS, FIXED)
def test_the_device_builds_the_same_fixed_splits(lengths, partitions, fixed):
    partitions = fixed_partitions(lengths, partitions, fixed)
    pairs = zip(build(lengths, partitions, fixed=fixed), build(lengths, partitions, "cuda", fixed), strict=True)
    for on_host, on_device in pairs:
        assert on_device.tolist() == on_host.tolist()


def test_fixed_splits_need_partitions_for_all_of_them():
    with pytest.raises(ValueError, match="partitions: wanted at least 6, got 5"):
        build([1000, 2000], 5, fixed=3)
    with pytest.raises(ValueError, match="fixed_splits: wanted at least 0, got -1"):
        build([1000], 5, fixed=-1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lengths_at_the_end_of_int32_do_not_overflow(device):
    lengths, partitions = [2**31 - 1] * 300, 264
    work_ranges, split_offsets = build(lengths, partitions, device)
    place = 2**25 + 2  # of a request on the cost line
    for p, begin in enumerate(work_ranges[:, :2].tolist()):
        request, x = divmod(p * 300 * place // partitions, place)
        assert begin == [request, max(0, x - 2)]
    assert work_ranges[-1, 2:4].tolist() == [300, 0] and split_offsets[-1] <= 2 * partitions


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_empty_batch_leaves_every_partition_empty(device):
    work_ranges, split_offsets = build([], 7, device)
    assert owned([], work_ranges) == [] and split_offsets.tolist() == [0]


def test_one_long_request_goes_to_every_partition():
    work_ranges, split_offsets = build([64 * 128], 8)
    assert split_offsets.tolist() == [0, 8]
    assert [len(run) for _, run, _ in owned([64 * 128], work_ranges)] == pytest.approx([16] * 8, abs=1)


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize(
    "rows, groups, tile",
    [(1, 1, 8), (8, 1, 8), (9, 1, 16), (32, 1, 32), (33, 1, 64), (64, 1, 64), (65, 2, 64), (128, 2, 64), (129, 3, 64)],
)
def test_the_library_groups_rows(rows, groups, tile, fp8_cache):
    """In groups of 64, and one group in the smallest tile that holds it."""
    for batch in 0, 1, 100:
        split_cost = 4 if tile == 64 and batch and not fp8_cache else tile // 8
        assert decode_shape(rows, 132, batch, fp8_cache)[:5] == (tile, groups, tile * 513, tile, split_cost)


# Batch (0: any), FP8 cache, FP8 math: the rows that go in groups of 16 on few tensor cores, besides rows that leave
# padding in tiles of 64.
GROUPED = {
    (0, False, False): (),
    (0, True, True): (),
    (1, False, False): range(17, 65),
    (8, True, False): range(17, 65),
    (9, False, False): range(33, 65),
    (9, True, False): (),
    (256, True, True): range(17, 33),
}


@pytest.mark.parametrize("told", GROUPED, ids=str)
def test_on_few_tensor_cores_rows_go_in_groups_of_16(told):
    small_batch = 1 <= told[0] <= 8
    for rows in range(1, 400):
        groups, whole = -(-rows // 16), -(-rows // 64)
        grouped = (16, groups, 16 * 513)
        padded = 32 < rows <= 112 and groups / (4 * whole) <= 7 / 8
        others = decode_shape(rows, 100, *told)[:3]
        for num_sms in 1, 78, 99:
            shape = decode_shape(rows, num_sms, *told)
            assert shape[:3] == (grouped if padded or rows in GROUPED[told] else others)
            assert (shape.split_rows, shape.single_tiles) == (0, 0), "splits are cheap, tiles are not"
            assert shape.split_cost == (3 if shape.row_tile <= 16 else 1)
        assert not small_batch or rows > 64 or decode_shape(rows, 78, *told).row_tile <= 16


def test_groups_of_16_take_no_more_workspace_than_tiles_of_64():
    """So that the workspace does not depend on batch and cache."""
    for num_sms in range(1, 100):
        for rows in range(1, 300):
            most = decode_shape(rows, num_sms)
            for told in GROUPED:
                shape = decode_shape(rows, num_sms, *told)
                floats = [one.workspace_floats(one.partitions(num_sms)) for one in (shape, most)]
                assert floats[0] <= floats[1]


@pytest.mark.parametrize("alike", ["any_batch", "batch_invariant", None])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_may_lie_alike_whatever_the_batch(fp8, alike):
    """For batch invariance, and for programs whose schedules have buffers of one size."""
    lengths = torch.full((40,), 100, dtype=torch.int32)
    options = {"device": "cpu", "num_sms": 78, "fp8_cache": fp8, "fp8_math": fp8} | ({alike: True} if alike else {})
    schedule = DecodeSchedule(40, 32, **options)
    tiles = {schedule.build(lengths[:batch]).row_tile for batch in (1, 8, 9, 40)}
    assert tiles == ({32} if alike else {16} if fp8 else {16, 32})


def test_the_workspace_serves_fewer_query_tokens_than_the_most():
    for num_sms in (78, 132):
        floats = [DecodeSchedule.workspace_floats(16, most, num_sms) for most in (1, 2, 3, 4)]
        assert floats == sorted(floats), "two tokens' tile of 32 rows takes more than each of three tokens' of 16"
        for s_q in (1, 2, 3, 4):
            shape = decode_shape(16 * s_q, num_sms)
            needed = 2 * (num_sms // shape.row_groups) * shape.row_groups * shape.partial_floats
            assert needed == shape.workspace_floats(shape.partitions(num_sms))
            assert needed <= floats[s_q - 1] <= floats[3]


def test_one_partition_needs_no_workspace():
    """It splits nothing: a call needs memory for its results, not gigabytes for partials."""
    for num_sms in (1, 8, 132):
        shape = decode_shape(64 * num_sms, num_sms)
        assert shape.partitions(num_sms) == 1 and shape.workspace_floats(1) == 0
        assert shape.workspace_floats(2) == 4 * shape.row_groups * shape.partial_floats
    schedule = DecodeSchedule(3, 64 * 8, device="cpu", num_sms=8)
    assert schedule.workspace.numel() == schedule.max_workspace_floats == 0
    assert schedule.build(torch.tensor([5000, 1, 0], dtype=torch.int32)).partitions == 1


@pytest.mark.parametrize("num_sms", [1, 3, 8, 13, 78, 132])
@pytest.mark.parametrize("heads", [1, 16, 80, 128])
def test_the_workspace_is_that_of_the_tokens_that_need_most(heads, num_sms, monkeypatch):
    shapes = [decode_shape(heads * s_q, num_sms) for s_q in range(1, 1000)]
    most = max(shape.workspace_floats(shape.partitions(num_sms)) for shape in shapes)
    asked = []
    monkeypatch.setattr(schedule_module, "decode_shape", lambda *rows: asked.append(rows) or decode_shape(*rows))
    assert DecodeSchedule.workspace_floats(heads, 999, num_sms) == most
    assert len(asked) <= 64 * num_sms // heads + 2, "larger ones have one partition"


def test_no_rows_and_no_multiprocessors_have_no_shape():
    with pytest.raises(ValueError, match="rows: wanted 1 to .*, got 0"):
        decode_shape(0, 78)
    with pytest.raises(ValueError, match="num_sms: wanted 1 to .*, got 0"):
        decode_shape(16, 0)


@pytest.mark.parametrize("argument, most", [
    ("max_batch", limits.MAX_COUNT), ("num_heads", limits.MAX_COUNT), ("max_s_q", limits.MAX_COUNT // 3),
    ("num_sms", limits.MAX_SMS),
])  # fmt: skip
def test_counts_have_an_upper_bound(argument, most):
    """The kernels count in 32 bits: a larger number would mean another one there."""
    valid = {"max_batch": 1, "num_heads": 3, "max_s_q": 1, "num_sms": 8}
    for value in 0, most + 1, 2**38 + 16, 2**64:
        with pytest.raises(ValueError, match=f"^{argument}: wanted 1 to {most}, got {value}$"):
            DecodeSchedule(**valid | {argument: value}, device="cpu")
        with pytest.raises(ValueError, match=f"^{argument}: wanted 1 to {most}, got {value}$"):
            DecodeSchedule.workspace_floats(**valid | {argument: value})
    largest = DecodeSchedule(**valid | {"num_heads": limits.MAX_COUNT}, device="cpu")
    assert largest.shape(1).row_groups == limits.MAX_COUNT // 64


def test_python_and_library_have_the_same_constants():
    for name in ("tile_tokens", "latent_dim", "rope_dim", "work_range_fields"):
        assert CONSTANTS[name] == getattr(limits, name.upper())


@pytest.mark.parametrize("heads, s_q, num_sms, partitions", [(16, 1, 132, 132), (128, 1, 132, 66), (128, 2, 3, 1)])
def test_partitions_times_row_groups_fill_the_gpu(heads, s_q, num_sms, partitions):
    schedule = DecodeSchedule(2, heads, max_s_q=s_q, device="cpu", num_sms=num_sms)
    assert schedule.build(torch.tensor([100, 5], dtype=torch.int32), s_q).partitions == partitions


def test_rebuilding_keeps_every_address():
    schedule = DecodeSchedule(4, 16, max_s_q=2, device="cpu")
    addresses = {tuple(buffer.data_ptr() for buffer in schedule.build(torch.ones(1, dtype=torch.int32))[6:9])}
    for lengths, s_q in (([5000, 0], 1), ([1, 2, 3, 4], 2), ([], 1)):
        planned = schedule.build(torch.tensor(lengths, dtype=torch.int32), s_q)
        assert (planned.batch, planned.s_q, planned.num_heads) == (len(lengths), s_q, 16)
        addresses.add(tuple(buffer.data_ptr() for buffer in planned[6:9]))
    assert len(addresses) == 1


def test_a_later_build_does_not_change_an_earlier_result():
    schedule = DecodeSchedule(4, 64, max_s_q=2, device="cpu", num_sms=132)
    first = schedule.build(torch.tensor([64, 64], dtype=torch.int32))
    kept = BuiltSchedule(*first)
    second = schedule.build(torch.tensor([64, 64, 64], dtype=torch.int32), 2)
    assert second.partitions < first.partitions and second.batch == 3
    assert first[:4] == kept[:4] == (2, 1, 64, 132)
    with pytest.raises(AttributeError):
        first.batch = 3


def test_schedules_share_a_workspace_that_is_large_enough():
    floats = DecodeSchedule.workspace_floats(16, 2, 8)
    shared = torch.empty(floats)
    assert DecodeSchedule(4, 16, max_s_q=2, device="cpu", num_sms=8, workspace=shared).workspace is shared
    with pytest.raises(ValueError, match="workspace"):
        DecodeSchedule(4, 16, max_s_q=2, device="cpu", num_sms=8, workspace=shared[:-1])


def test_built_schedules_are_compared_and_printed_by_their_buffers():
    lengths = torch.tensor([1000, 3], dtype=torch.int32)
    schedule, other = (DecodeSchedule(2, 16, device="cpu") for _ in range(2))
    first, again = schedule.build(lengths), schedule.build(lengths)
    assert first == again and len({first, again}) == 1
    assert (first != again) is False  # a tuple has a != of its own  # noqa: SIM202
    assert first != other.build(lengths) and first != schedule.build(lengths[:1]) and first != tuple(first)
    assert "work_ranges=<int32 [8, 8] on cpu>" in repr(first) and "tensor(" not in repr(first)

"""The sparse executor: how lists are cut, what a split is, and the operator around it; what its cases are made of."""

import math
import random
from dataclasses import replace

import pytest
import torch

from etap_backend import limits
from etap_backend._library import library
from etap_backend.cpu import dense as cpu_dense
from etap_backend.cpu import sparse as cpu_sparse
from etap_backend.reference import sparse_mla_decode_reference
from etap_backend.sparse import sparse_decode_shape, sparse_mla_decode, sparse_workspace_floats
from support.cases import SOFTMAX_SCALE
from support.sparse_cases import (
    CACHE_LAYOUTS,
    CACHES,
    COUNTS,
    HOLES,
    SCALE_LAWS,
    SINKS,
    SparseCase,
    SparseRunner,
    build,
    decode,
)
from support.sparse_compare import problems_with, truth


def drawn_tiles(tokens: int, most: int, seed: int) -> list[int]:
    """Tiles of each token: none, all, or a number between."""
    draw = random.Random(seed)
    return [draw.choice([0, most, draw.randint(0, most)]) for _ in range(tokens)]


@pytest.mark.parametrize("partitions", [1, 2, 7, 66, 132])
@pytest.mark.parametrize("most", [0, 1, 2, 10, 18, 32, 34, 130])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 33, 131, 300])
def test_splits_are_all_tiles_once_in_slots_of_their_own(tokens, most, partitions):
    for tiles in ([most] * tokens, drawn_tiles(tokens, most, seed=tokens + most)):
        splits = list(cpu_sparse.splits(tiles, most, 16, partitions))
        covered = [(split.token, tile) for split in splits for tile in split.tiles]
        assert covered == [(token, tile) for token in range(tokens) for tile in range(tiles[token])]
        slots = [p.slot for p in splits if p.slot is not None]
        assert len(set(slots)) == len(slots) and all(0 <= slot < 2 * partitions for slot in slots)
        for token in range(tokens):
            of_token = [p for p in splits if p.token == token]
            assert (len(of_token) == 1) == (of_token[0].slot is None)
            assert [p.slot for p in of_token[1:]] == [of_token[0].slot + i for i in range(1, len(of_token))]


@pytest.mark.parametrize("most", [1, 2, 10, 18, 32, 130])
@pytest.mark.parametrize("tokens", [1, 7, 16, 64, 128, 300])
def test_partitions_are_as_even_as_whole_tiles_allow(tokens, most):
    """A partition has few tiles more than its share, of full lists or of equally short lists."""
    for valid in (most, -(-most // 3)):
        loads: dict[int, int] = {}
        for _, partition, begin, end, _ in library().sparse_splits(
            torch.full((tokens,), valid, dtype=torch.int32), most, 16, 132
        ):
            loads[partition] = loads.get(partition, 0) + end - begin
        assert len(loads) <= 132
        assert max(loads.values()) <= math.ceil(tokens * most / 132) * math.ceil(valid / most) + 2


@pytest.mark.parametrize("tokens", [3, 16, 130])
def test_where_a_token_is_cut_depends_on_its_own_tiles(tokens):
    most = 34
    for seed in range(20):
        tiles = drawn_tiles(tokens, most, seed)
        others = drawn_tiles(tokens, most, seed + 1000)
        for token in random.Random(seed).sample(range(tokens), min(tokens, 5)):
            mixed = [*others[:token], tiles[token], *others[token + 1 :]]
            of = [[p for p in cpu_sparse.splits(each, most, 16, 132) if p.token == token] for each in (tiles, mixed)]
            assert of[0] == of[1]


@pytest.mark.parametrize("heads, of_token", [(16, 8), (64, 5)])
def test_a_lone_token_is_cut_for_a_cluster_where_there_is_one(heads, of_token):
    assert len(list(cpu_sparse.splits([10], 10, heads, 8))) == of_token


@pytest.mark.parametrize("tokens, most, whole", [(1, 1, 1), (16, 32, 8), (64, 32, 2), (132, 32, 1), (100, 2, 1)])
def test_tokens_are_cut_into_equal_splits_where_that_costs_little(tokens, most, whole):
    of_token = [p for p in cpu_sparse.splits([most] * tokens, most, 16, 132) if p.token == tokens - 1]
    assert [len(split.tiles) for split in of_token] == [most // whole] * whole


def test_partitions_end_with_tokens_where_that_costs_little():
    assert all(split.slot is None for split in cpu_sparse.splits([32] * 264, 32, 16, 132))


def lists_of(problem) -> cpu_sparse.Lists:
    counts = problem.valid_counts
    lists = cpu_sparse.RowList.of(problem.kv_cache, problem.indices, problem.block_table, problem.request_ids, counts)
    return cpu_sparse.Lists((lists,))


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("cuts", [(), (1,), (3, 4), (1, 2, 3, 4, 5, 6, 7)])
def test_partials_combine_to_the_whole(cuts, cache):
    problem = build(SparseCase(1, 5, 500, cache, holes="anywhere"), "cpu")
    bounds = (0, *cuts, 8)
    arguments = (cpu_sparse.queries_of(problem.q[0], cache == "fp8"), lists_of(problem), 0)
    parts = [
        cpu_sparse.decode_split(*arguments, range(a, b), SOFTMAX_SCALE, scaled=cache == "fp8")
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    out, lse = cpu_dense.combine(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))
    assert problems_with(out[None].bfloat16(), lse[None], truth(problem)) == []


@pytest.mark.parametrize("seed", range(12))
def test_the_truth_is_the_references_result(seed):
    draw = random.Random(seed)
    case = SparseCase(
        tokens=7,
        heads=5,
        top_k=100,
        cache=draw.choice(CACHES),
        page_size=draw.choice([1, 16, 100]),
        scales=draw.choice(SCALE_LAWS),
        holes=draw.choice(HOLES),
        counts=draw.choice(COUNTS),
        sinks=draw.choice(SINKS),
        repeats=draw.random() < 0.5,
        requests=draw.choice([0, 3]),
        cache_layout=draw.choice(CACHE_LAYOUTS),
        seed=seed,
    )
    problem = build(case, "cpu")
    wanted = sparse_mla_decode_reference(
        problem.q, problem.kv_cache, softmax_scale=SOFTMAX_SCALE, sinks=problem.sinks, **problem.lists()
    )
    found = truth(problem)
    torch.testing.assert_close((found.out, found.lse), wanted, rtol=1e-9, atol=1e-12 * wanted[0].abs().max().item())


@pytest.mark.parametrize(("scales", "p_dtype"), [("fitted", torch.float16), ("tiny", torch.bfloat16)])
def test_an_fp8_row_is_not_multiplied_out(scales, p_dtype):
    """Its scale multiplies P, which is rounded then: a single key is as far off as P's type rounds the scale."""
    problem = build(SparseCase(1, 4, 1, "fp8", scales=scales), "cpu")
    queries = cpu_sparse.queries_of(problem.q[0], True)
    out, lse = cpu_sparse.decode_split(queries, lists_of(problem), 0, range(1), SOFTMAX_SCALE, scaled=True)
    wanted = truth(problem)
    rows, _ = lists_of(problem).rows(0, 0)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    rounded = scales.to(p_dtype).double() / scales.double()
    torch.testing.assert_close(out.double(), wanted.out[0] * rounded.repeat_interleave(128, dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.double(), wanted.lse[0], rtol=1e-6, atol=1e-6)
    assert (out.double() != wanted.out[0]).any()


@pytest.mark.parametrize("seed", [13, 359])
def test_v4s_small_probabilities_are_subnormal_beside_few_query_rows(seed):
    """Where a dominating key's value is zero they are the whole element, and 64 rows give it more exactly than 16."""
    case = SparseCase(1, 10, 64, "v4 as e4m3", holes="wild", counts="drawn", requests=1, q_layout="expanded")
    case = replace(case, law="dominating", scales="powers", num_sms=104, extra=0, out_layout="sliced", seed=seed)
    problem = build(case, "cpu")
    wanted = truth(problem)
    assert problems_with(*decode(problem), wanted) == []
    exact = truth(replace(problem, q=problem.q.repeat(1, 7, 1)[:, :64]))
    error = (decode(problem)[0].double() - wanted.out).abs()
    assert (error > exact.max_error[:, :10]).any()


def test_the_workspace_holds_two_partials_per_cta():
    for heads in (1, 16, 64, 128):
        shape = sparse_decode_shape(heads)
        assert shape.row_groups * shape.row_tile >= heads and shape.partial_floats >= shape.row_tile * 513
        floats = sparse_workspace_floats(heads, 132)
        assert floats == 2 * (132 // shape.row_groups) * shape.row_groups * shape.partial_floats
        assert floats >= 2 * (132 // shape.row_groups) * heads * 513
    for heads in 0, 2**40, 2**64:
        with pytest.raises(ValueError, match=f"^heads: wanted 1 to {limits.MAX_COUNT}, got {heads}$"):
            sparse_workspace_floats(heads, 132)
    with pytest.raises(ValueError, match=f"^num_sms: wanted 1 to {limits.MAX_SMS}, got"):
        sparse_workspace_floats(16, 2**31)
    with pytest.raises(ValueError, match=f"^q: wanted at most {limits.MAX_COUNT} heads, got"):
        q = torch.empty(0, 2**40, 576, dtype=torch.bfloat16)
        sparse_mla_decode(q, q.new_zeros(1, 1, 576), torch.empty(0, 1, dtype=torch.int32), softmax_scale=1)
    with pytest.raises(TypeError, match="^num_sms: wanted an int, got '7'"):
        sparse_workspace_floats(16, "7")


def test_on_the_cpu_work_is_divided_as_on_a_gpu_of_132_multiprocessors():
    problem = build(SparseCase(1, 16, 2048), "cpu")
    floats = sparse_workspace_floats(16, 132)
    out, lse = decode(problem, workspace=torch.empty(floats))
    assert problems_with(out, lse, truth(problem)) == []
    with pytest.raises(ValueError, match=rf"^workspace: wanted .*{floats}.*, got \[{floats - 1}\]"):
        decode(problem, workspace=torch.empty(floats - 1))


@pytest.mark.parametrize("case", [SparseCase(3, 4, 70), SparseCase(3, 4, 70, "fp8", requests=2, counts="drawn")])
def test_a_row_that_no_entry_names_is_poison(case):
    problem = build(case, "cpu")
    cache = problem.kv_cache.view(torch.uint8) if case.fp8 else problem.kv_cache
    named = torch.zeros(case.pages * case.page_size, dtype=torch.bool)
    named[problem.meant[problem.meant >= 0]] = True
    rows = cache.reshape(len(named), -1)
    assert named.any() and (~named).sum() >= named.sum()
    if case.fp8:
        for part, dtype in (((0, 512), torch.float8_e4m3fn), ((512, 528), torch.float32), ((528, 656), torch.bfloat16)):
            numbers = rows[:, slice(*part)].contiguous().view(dtype).float()
            assert numbers[~named].isnan().all() and numbers[named].isfinite().all()
    else:
        assert not rows[~named].isfinite().any() and rows[named].isfinite().all()


def test_a_wrong_result_is_found():
    problem = build(SparseCase(3, 16, 100, "fp8", sinks="drawn"), "cpu")
    wanted = truth(problem)
    out, lse = SparseRunner(problem).run()
    assert problems_with(out, lse, wanted) == []
    assert any("RMSE" in line for line in problems_with(out * 1.01, lse, wanted))
    assert any("log-sum-exp" in line for line in problems_with(out, lse + 1e-4, wanted))
    spoiled = out.clone()
    spoiled[1, 2, 3] += 0.1 * out[1].abs().max()
    assert any("largest error" in line and "token 1" in line for line in problems_with(spoiled, lse, wanted))
    spoiled[1, 2, 3] = torch.nan
    assert any("NaN" in line for line in problems_with(spoiled, lse, wanted))
    without = decode(build(SparseCase(3, 16, 100, "fp8"), "cpu"))[0]
    assert problems_with(without, lse, wanted)


def test_torch_accepts_the_operators_registration():
    problem = build(SparseCase(3, 16, 100, requests=2, counts="drawn", sinks="drawn"), "cpu")
    floats = sparse_workspace_floats(16, 7)
    lists = (problem.block_table, problem.request_ids, problem.valid_counts, None, None, None, None, problem.sinks)
    outputs = (torch.zeros(floats), torch.zeros(3, 16, 512, dtype=torch.bfloat16), torch.zeros(3, 16))
    torch.library.opcheck(
        torch.ops.etap_backend.sparse_mla_decode.default,
        (problem.q, None, problem.kv_cache, problem.indices, *lists, *outputs, SOFTMAX_SCALE, 7, -torch.inf),
        # The poison in what must not be read is NaN, which opcheck's comparison of unread inputs takes for a change.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )

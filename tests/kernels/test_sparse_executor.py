"""The sparse executor: how lists are cut, what a piece is, and the operator around it; what its cases are made of."""

import random

import pytest
import torch

from etap_backend._library import library
from etap_backend.cpu import dense as cpu_dense
from etap_backend.cpu import sparse as cpu_sparse
from etap_backend.reference import sparse_mla_decode_reference
from etap_backend.sparse import sparse_decode_shape, sparse_workspace_floats
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


@pytest.mark.parametrize("partitions", [1, 2, 7, 66, 132])
@pytest.mark.parametrize("top_k", [1, 64, 65, 512, 2048, 2176])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 131, 300])
def test_pieces_are_all_tiles_once_in_slots_of_their_own(tokens, top_k, partitions):
    tiles = -(-top_k // 64)
    each = library().sparse_partition_tiles(tokens, top_k, partitions)
    pieces = list(cpu_sparse.pieces(tokens, tiles, each))
    covered = [(piece.token, tile) for piece in pieces for tile in piece.tiles]
    assert covered == [(token, tile) for token in range(tokens) for tile in range(tiles)]
    slots = [p.slot for p in pieces if p.slot is not None]
    assert len(set(slots)) == len(slots) and all(0 <= slot < 2 * partitions for slot in slots)
    for token in range(tokens):
        of_token = [p for p in pieces if p.token == token]
        assert (len(of_token) == 1) == (of_token[0].slot is None)
        assert [p.slot for p in of_token[1:]] == [of_token[0].slot + i for i in range(1, len(of_token))]
    assert -(-tokens * tiles // each) <= partitions


@pytest.mark.parametrize("tokens, tiles", [(1, 1), (16, 4), (64, 16), (132, 32), (264, 64)])
def test_partitions_end_where_lists_do_where_that_costs_little(tokens, tiles):
    assert library().sparse_partition_tiles(tokens, 2048, 132) == tiles


def lists_of(problem) -> cpu_sparse.Lists:
    cache = problem.kv_cache.view(torch.uint8) if problem.case.fp8 else problem.kv_cache
    counts = [problem.case.top_k] * problem.case.tokens
    return cpu_sparse.Lists(cache, problem.indices, problem.block_table, problem.request_ids, counts)


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("cuts", [(), (1,), (3, 4), (1, 2, 3, 4, 5, 6, 7)])
def test_pieces_merge_to_the_whole(cuts, cache):
    problem = build(SparseCase(1, 5, 500, cache, holes="anywhere"), "cpu")
    bounds = (0, *cuts, 8)
    arguments = (cpu_sparse.queries_of(problem.q[0], cache == "fp8"), lists_of(problem), 0)
    parts = [
        cpu_sparse.decode_piece(*arguments, range(a, b), SOFTMAX_SCALE)
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    out, lse = cpu_dense.combine(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))
    assert problems_with(out[None].bfloat16(), lse[None], truth(problem)) == []


@pytest.mark.parametrize("seed", range(12))
def test_the_truth_is_the_references_on_the_calls_own_lists(seed):
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
    out, lse = cpu_sparse.decode_piece(queries, lists_of(problem), 0, range(1), SOFTMAX_SCALE)
    wanted = truth(problem)
    rows, _ = lists_of(problem).rows(0, 0)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    rounded = scales.to(p_dtype).double() / scales.double()
    torch.testing.assert_close(out.double(), wanted.out[0] * rounded.repeat_interleave(128, dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.double(), wanted.lse[0], rtol=1e-6, atol=1e-6)
    assert (out.double() != wanted.out[0]).any()


def test_the_workspace_is_two_partial_results_a_cta():
    for heads, fp8 in ((1, True), (16, True), (16, False), (64, False), (128, True)):
        shape = sparse_decode_shape(heads, fp8)
        assert shape.row_groups * shape.row_tile >= heads and shape.piece_floats >= shape.row_tile * 513
        floats = sparse_workspace_floats(heads, fp8, 132)
        assert floats == 2 * (132 // shape.row_groups) * shape.row_groups * shape.piece_floats
        assert floats >= 2 * (132 // shape.row_groups) * heads * 513
    with pytest.raises(ValueError, match="^heads: wanted at least 1, got 0"):
        sparse_workspace_floats(0, True, 132)
    with pytest.raises(TypeError, match="^num_sms: wanted an int, got '7'"):
        sparse_workspace_floats(16, True, "7")


def test_on_the_cpu_work_is_divided_as_on_a_gpu_of_132_multiprocessors():
    problem = build(SparseCase(1, 16, 2048), "cpu")
    floats = sparse_workspace_floats(16, False, 132)
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


def test_the_operator_is_registered_as_torch_wants_it():
    problem = build(SparseCase(3, 16, 100, requests=2, counts="drawn", sinks="drawn"), "cpu")
    floats = sparse_workspace_floats(16, False, 7)
    lists = (problem.block_table, problem.request_ids, problem.valid_counts, problem.sinks)
    outputs = (torch.zeros(floats), torch.zeros(3, 16, 512, dtype=torch.bfloat16), torch.zeros(3, 16))
    torch.library.opcheck(
        torch.ops.etap_backend.sparse_mla_decode.default,
        (problem.q, None, problem.kv_cache, problem.indices, *lists, *outputs, SOFTMAX_SCALE, 7, -torch.inf),
        # The poison in what must not be read is NaN, which opcheck's comparison of unread inputs takes for a change.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )

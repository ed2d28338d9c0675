"""The reference against torch's own attention in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from etap_backend.reference import mla_decode_reference, named_rows, sparse_mla_decode_reference
from support.cases import SOFTMAX_SCALE, Case, build
from support.sparse_cases import CACHES, COUNTS, HOLES, SparseCase
from support.sparse_cases import build as build_sparse


def contiguous_tokens(problem, request: int) -> torch.Tensor:
    """Float64 [length, 576]: a request's tokens, gathered one by one."""
    size = problem.case.page_size
    cache, table = problem.kv_cache_3d, problem.block_table[request].tolist()
    rows = [cache[table[token // size], token % size] for token in range(problem.case.lengths[request])]
    return torch.stack(rows).double()


def dequantised(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x if scale is None else x * scale.double()


def sdpa(problem, request: int) -> torch.Tensor:
    """[s_q, heads, 512] by scaled_dot_product_attention: one KV head for all query heads."""
    keys = dequantised(contiguous_tokens(problem, request), problem.kv_scale)
    length, s_q = len(keys), problem.case.s_q
    position, last = torch.arange(length), torch.arange(s_q) + length - s_q
    q = dequantised(problem.q[request].double(), problem.q_scale).transpose(0, 1)[None]
    heads = q.shape[1]
    k, v = keys.expand(1, heads, -1, -1), keys[:, :512].expand(1, heads, -1, -1)
    mask = position[None] <= last[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SOFTMAX_SCALE)[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("page_size, layout", [(64, "dense"), (128, "gapped"), (64, "headed")])
@pytest.mark.parametrize("s_q", [1, 3])
def test_it_agrees_with_torch(dtype, page_size, layout, s_q):
    lengths = (3, 63, 64, 65, 200, 129)
    problem = build(Case(lengths, 5, s_q, dtype, page_size, cache_layout=layout), "cpu")
    out, lse = mla_decode_reference(problem.q, problem.kv_cache, problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    assert out.dtype == lse.dtype == torch.float64
    for request in range(len(lengths)):
        torch.testing.assert_close(out[request], sdpa(problem, request), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_scale", [None, 1e-3, 0.021, 1e3])
@pytest.mark.parametrize("kv_scale", [None, 1e-3, 0.0137, 1e3])
def test_it_agrees_with_torch_on_dequantized_fp8(q_scale, kv_scale):
    case = Case((3, 64, 200), 5, s_q=2, dtype="float8_e4m3fn", q_scale=q_scale, kv_dtype="fp8", kv_scale=kv_scale)
    problem = build(case, "cpu")
    assert problem.kv_cache.isnan().any() and problem.kv_cache.dtype == problem.q.dtype == torch.float8_e4m3fn
    arguments = (problem.q, problem.kv_cache, problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    out, lse = mla_decode_reference(*arguments, q_scale=problem.q_scale, kv_scale=problem.kv_scale)
    for request in range(3):
        torch.testing.assert_close(out[request], sdpa(problem, request), rtol=1e-9, atol=1e-12)
    keys = dequantised(contiguous_tokens(problem, 2), problem.kv_scale)
    scores = dequantised(problem.q[2, -1].double(), problem.q_scale) @ keys.T * SOFTMAX_SCALE
    torch.testing.assert_close(lse[2, -1], scores.logsumexp(1), rtol=1e-12, atol=1e-12)


def test_the_log_sum_exp_is_that_of_the_scores():
    problem = build(Case((130,), 4), "cpu")
    _, lse = mla_decode_reference(problem.q, problem.kv_cache, problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    scores = problem.q[0, 0].double() @ contiguous_tokens(problem, 0).T * SOFTMAX_SCALE
    torch.testing.assert_close(lse[0, 0], scores.exp().sum(1).log(), rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_are_zero_with_log_sum_exp_minus_infinity():
    problem = build(Case((0, 1, 2, 70), 2, s_q=3), "cpu")
    out, lse = mla_decode_reference(problem.q, problem.kv_cache, problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    blind = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert out[blind].eq(0).all() and lse[blind].eq(-torch.inf).all()
    assert out[~blind].ne(0).all() and lse[~blind].isfinite().all()


def test_its_intermediate_type_is_the_one_asked_for():
    problem = build(Case((500,), 16), "cpu")
    arguments = (problem.q, problem.kv_cache, problem.block_table, problem.seq_lens, SOFTMAX_SCALE)
    truth, _ = mla_decode_reference(*arguments)
    errors = [
        (mla_decode_reference(*arguments, dtype=dtype)[0].double() - truth).norm() / truth.norm()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert 1e-4 < errors[0] < 1e-1 and errors[1] < 1e-5


def test_a_length_beyond_the_block_table_and_a_page_beyond_the_cache_are_refused():
    problem = build(Case((70,), 2), "cpu")
    too_long = torch.tensor([64 * problem.block_table.shape[1] + 1])
    with pytest.raises(ValueError, match="seq_lens: wanted at most 256 tokens.*got 257"):
        mla_decode_reference(problem.q, problem.kv_cache, problem.block_table, too_long, SOFTMAX_SCALE)
    pages = len(problem.kv_cache)
    table = problem.block_table.clone()
    table[0, 1] = pages
    with pytest.raises(ValueError, match=f"block_table: wanted pages from 0 to {pages - 1} for request 0, got {pages}"):
        mla_decode_reference(problem.q, problem.kv_cache, table, problem.seq_lens, SOFTMAX_SCALE)


def stored_rows(problem, token: int) -> torch.Tensor:
    """The cache rows that the problem says a token attends to, gathered one by one."""
    case, cache = problem.case, problem.kv_cache
    if case.fp8:
        cache = cache.view(torch.uint8)
    rows = cache.squeeze(2) if cache.dim() == 4 else cache
    named = [row for row in problem.meant[token].tolist() if row >= 0]
    found = [stored_row(case, rows[row // case.page_size], row % case.page_size) for row in named]
    return torch.stack(found or [rows[0, 0, :0]])


def stored_row(case: SparseCase, page: torch.Tensor, place: int) -> torch.Tensor:
    """A row of a page [page_size, width]; V4's rows are not rows of the tensor and are taken byte by byte."""
    if not case.v4:
        return page[place]
    page, behind = page.flatten(), 576 * case.page_size
    return torch.cat([page[576 * place :][:576], page[behind + 8 * place :][:8]])


def keys_of(rows: torch.Tensor) -> torch.Tensor:
    """Float64 [n, 576 or 512] of stored rows, by groups of columns that share a scale."""
    if rows.dtype == torch.bfloat16:
        return rows.double()
    if rows.shape[1] == 584:
        groups = [
            rows[:, 64 * g : 64 * g + 64].view(torch.float8_e4m3fn).double()
            * 2.0 ** (rows[:, 576 + g, None].double() - 127)
            for g in range(7)
        ]
        return torch.cat([*groups, rows[:, 448:576].view(torch.bfloat16).double()], dim=1)
    groups = [
        rows[:, 128 * g : 128 * g + 128].view(torch.float8_e4m3fn).double()
        * rows[:, 512 + 4 * g : 516 + 4 * g].view(torch.float32).double()
        for g in range(4)
    ]
    return torch.cat([*groups, rows[:, 528:].view(torch.bfloat16).double()], dim=1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("requests", [0, 3])
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("counts", COUNTS)
def test_the_sparse_one_agrees_with_torch(counts, holes, requests, cache):
    case = SparseCase(6, 4, 70, cache, holes=holes, counts=counts, sinks="infinite", requests=requests, page_size=16)
    problem = build_sparse(case, "cpu")
    lists = problem.lists()
    out, lse = sparse_mla_decode_reference(
        problem.q, problem.kv_cache, softmax_scale=SOFTMAX_SCALE, sinks=problem.sinks, **lists
    )
    assert out.dtype == lse.dtype == torch.float64
    first = ("indices", "block_table", "request_ids", "valid_counts")
    found = dict(named_rows(problem.kv_cache, *(lists[name] for name in first)))
    for token in range(case.tokens):
        rows = stored_rows(problem, token)
        if not rows.numel():
            assert token not in found and out[token].eq(0).all() and lse[token].eq(-torch.inf).all()
            continue
        assert torch.equal(found[token].view(torch.uint8), rows.view(torch.uint8))
        keys = keys_of(rows)
        k, v = keys.expand(1, 4, -1, -1), keys[:, :512].expand(1, 4, -1, -1)
        q = problem.q[token].double()
        plain = scaled_dot_product_attention(q[None, :, None], k, v, scale=SOFTMAX_SCALE)[0, :, 0]
        sums = (q @ keys.T * SOFTMAX_SCALE).exp().sum(1)
        share = sums / (sums + problem.sinks[: case.heads].double().exp())
        torch.testing.assert_close(lse[token], sums.log(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out[token], plain * share[:, None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cache", ["bf16", "fp8", "v4"])
def test_two_lists_are_attended_to_like_one_of_all_their_rows(cache):
    case = SparseCase(
        5, 4, 70, cache, holes="all", counts="drawn", requests=3, page_size=16, extra=40, extra_page_size=2
    )
    problem = build_sparse(case, "cpu")
    second = replace(problem, case=case.of_each_list()[1], kv_cache=problem.extra_kv_cache, meant=problem.extra_meant)
    out, lse = sparse_mla_decode_reference(problem.q, problem.kv_cache, softmax_scale=SOFTMAX_SCALE, **problem.lists())
    for token in range(case.tokens):
        keys = [keys_of(stored_rows(each, token)) for each in (problem, second) if (each.meant[token] >= 0).any()]
        if not keys:
            assert out[token].eq(0).all() and lse[token].eq(-torch.inf).all()
            continue
        keys = torch.cat(keys)
        scores = problem.q[token].double() @ keys.T * SOFTMAX_SCALE
        torch.testing.assert_close(lse[token], scores.exp().sum(1).log(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out[token], scores.softmax(1) @ keys[:, :512], rtol=1e-9, atol=1e-12)


def test_a_page_of_deepseek_v4_byte_by_byte():
    """Two rows: their data, then their scales, then unread bytes."""
    page = torch.full((1, 3 * 576), 0xFF, dtype=torch.uint8)
    one, two = torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    page[0, :448], page[0, 576 : 576 + 448] = one, two
    page[0, 448:576].view(torch.bfloat16).fill_(3.0)
    page[0, 576 + 448 : 1152].view(torch.bfloat16).fill_(-0.25)
    page[0, 1152:1160] = torch.tensor([127, 128, 126, 137, 117, 0, 254, 255])
    page[0, 1160:1168] = torch.tensor([120, 120, 120, 120, 120, 120, 120, 0])
    cache = page[:, : 2 * 584].view(1, 2, 584)
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    out, lse = sparse_mla_decode_reference(q, cache, torch.tensor([[0]], dtype=torch.int32), 1.0)
    groups = [1.0, 2.0, 0.5, 2.0**10, 2.0**-10, 2.0**-127, 2.0**127, 3.0]
    assert lse.eq(0).all() and out[0, 0].view(8, 64).eq(torch.tensor(groups, dtype=torch.float64)[:, None]).all()
    out, lse = sparse_mla_decode_reference(q, cache, torch.tensor([[-1, 1, 2]], dtype=torch.int32), 1.0)
    assert lse.eq(0).all() and out[0, 0, :448].eq(-3.5).all() and out[0, 0, 448:].eq(-0.25).all()

"""The executor, the kernel's algorithm in plain torch: a split, the combining, and the operator around it."""

import functools
import math

import pytest
import torch
from test_reference import contiguous_tokens, sdpa
from torch._subclasses.fake_tensor import FakeTensorMode

from etap_backend import DecodeSchedule, mla_decode
from etap_backend.cpu import dense as cpu_dense
from etap_backend.limits import LATENT_DIM
from support.cases import SOFTMAX_SCALE, Case, build, decode


def one_request(length: int, heads: int = 5, s_q: int = 1, dtype: str = "bfloat16"):
    problem = build(Case((length,), heads, s_q, dtype), "cpu")
    rows = problem.q.reshape(1, s_q * heads, 576)
    batch = cpu_dense.batch_of(
        rows, problem.kv_cache, None, None, problem.block_table, [length], heads, SOFTMAX_SCALE, False
    )
    return problem, batch


def tolerance(dtype: torch.dtype) -> float:
    """P is rounded to the input type, by half a unit in its last place; so is the output."""
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("s_q", [1, 2])
def test_a_split_is_the_attention_over_its_tiles(length, s_q, dtype):
    problem, batch = one_request(length, s_q=s_q, dtype=dtype)
    out, lse = cpu_dense.decode_split(batch, 0, range(-(-length // 64)))
    wanted = sdpa(problem, 0).reshape(-1, 512)
    seen = lse.isfinite()
    assert seen.tolist() == [length - s_q + t + 1 > 0 for t in range(s_q) for _ in range(5)]
    error = (out[seen].double() - wanted[seen]).norm() / wanted[seen].norm()
    assert error < tolerance(problem.q.dtype)
    scores = batch.q[0, -1].double() @ contiguous_tokens(problem, 0).T * SOFTMAX_SCALE
    assert lse[-1].item() == pytest.approx(torch.logsumexp(scores, 0).item(), abs=1e-5)


@pytest.mark.parametrize("fp8_math", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_split_of_an_fp8_cache_is_the_attention_over_dequantized_rows(dtype, fp8_math):
    case = Case((500,), 5, 2, dtype, kv_dtype="fp8", kv_scale=0.0137, q_scale=0.021 if dtype[:6] == "float8" else None)
    problem = build(case, "cpu")
    rows = problem.q.reshape(1, 10, 576)
    scales = (problem.q_scale, problem.kv_scale)
    table = problem.block_table
    batch = cpu_dense.batch_of(rows, problem.kv_cache, *scales, table, [500], 5, SOFTMAX_SCALE, fp8_math)
    out, _ = cpu_dense.decode_split(batch, 0, range(8))
    wanted = sdpa(problem, 0).reshape(-1, 512)
    error = ((out.double() - wanted).norm() / wanted.norm()).item()
    # P, and queries that are rounded, with 3 bits after the leading one; else P in float16 and nothing rounded before.
    low, high = (0.005, tolerance(torch.float8_e4m3fn)) if fp8_math else (1e-5, tolerance(torch.float16))
    assert low < error < high


@pytest.mark.parametrize("p_dtype, largest", [(torch.float16, 2.0**14), (torch.float8_e4m3fn, 2.0**7)])
def test_query_rows_take_the_power_of_two_that_fills_the_products_type(p_dtype, largest):
    rows = torch.tensor([1.0, 1.99, 2.0, 3e-30, 1e38, 0.0, 2.0**-130])[None, :, None].to(torch.bfloat16)
    rows = rows * torch.tensor([1.0, -0.5, 2.0**-9])
    q, factor = cpu_dense.product_queries(rows, p_dtype)
    assert torch.equal(torch.log2(factor), torch.log2(factor).round())
    assert q[0, :5, 0].ge(largest).all() and q[0, :5, 0].le(2 * largest).all()
    torch.testing.assert_close(q * factor[..., None], rows.float(), rtol=torch.finfo(p_dtype).eps / 2, atol=1e-38)
    assert q[0, 5].eq(0).all() and q.isfinite().all()
    assert factor.ge(torch.finfo(torch.float32).tiny).all() and factor.reciprocal().isfinite().all()


@pytest.mark.parametrize("p_dtype", [torch.float16, torch.float8_e4m3fn])
def test_query_rows_of_the_products_type_or_of_fp8_stay_as_they_are(p_dtype):
    for dtype in {p_dtype, torch.float8_e4m3fn}:
        rows = torch.randn(2, 3, 576).to(dtype)
        q, factor = cpu_dense.product_queries(rows, p_dtype)
        assert torch.equal(q, rows.float()) and factor.eq(1).all()


@pytest.mark.parametrize("p_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_rounding_of_p_cancels_in_the_output_and_is_not_in_the_log_sum_exp(p_dtype):
    """The output is divided by the sum of the rounded P; the log-sum-exp takes the sum before rounding."""
    scores = torch.tensor([[0.0], [-0.7]])
    assert torch.exp2(scores).to(p_dtype).float().sum() != torch.exp2(scores).sum()
    product = functools.partial(cpu_dense.rounded_product, torch.ones(2, LATENT_DIM), p_dtype)
    out, lse = cpu_dense.attend(1, cpu_dense.PRange(0.0, 8.0), [(scores, product)])
    assert out.eq(1).all()
    assert lse.item() == pytest.approx(math.log(1 + 2**-0.7), abs=1e-6)


@pytest.mark.parametrize("cuts", [(1,), (3, 4), (1, 2, 3, 4, 5, 6, 7)])
def test_partials_combine_to_the_whole(cuts):
    problem, batch = one_request(500, s_q=2)
    whole_out, whole_lse = cpu_dense.decode_split(batch, 0, range(8))
    bounds = (0, *cuts, 8)
    parts = [cpu_dense.decode_split(batch, 0, range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    out, lse = cpu_dense.combine(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    assert (out - whole_out).norm() / whole_out.norm() < tolerance(problem.q.dtype)


def test_combining_ignores_partials_without_tokens():
    out, lse = torch.randn(3, 4, LATENT_DIM), torch.randn(3, 4)
    out[1], lse[1] = 0, -torch.inf
    out[:, 3], lse[:, 3] = 0, -torch.inf
    merged_out, merged_lse = cpu_dense.combine(out, lse)
    without_out, without_lse = cpu_dense.combine(out[[0, 2]], lse[[0, 2]])
    torch.testing.assert_close(merged_out, without_out)
    torch.testing.assert_close(merged_lse, without_lse)
    assert merged_out[3].eq(0).all() and merged_lse[3] == -torch.inf


@pytest.mark.parametrize("kind", [{}, {"kv_dtype": "fp8"}])
def test_torchs_default_type_changes_nothing(kind):
    problem = build(Case((300, 2, 65), 16, **kind), "cpu")
    schedule = DecodeSchedule(3, 16, device="cpu").build(problem.seq_lens)
    wanted, before = decode(problem, schedule), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(torch.equal(got, want) for got, want in zip(decode(problem, schedule), wanted, strict=True))
    finally:
        torch.set_default_dtype(before)


def test_partials_of_very_large_scores_weigh_together_no_more_than_one():
    out, lse = torch.randn(1, 4, LATENT_DIM).expand(3, -1, -1), torch.full((3, 4), 8e31)
    merged_out, merged_lse = cpu_dense.combine(out, lse)
    torch.testing.assert_close(merged_out, out[0])
    assert merged_lse.eq(8e31).all()


def test_torch_accepts_the_operators_registration():
    problem = build(Case((70, 300), 16), "cpu")
    schedule = DecodeSchedule(2, 16, device="cpu").build(problem.seq_lens)
    buffers = (schedule.work_ranges, schedule.split_offsets, schedule.shared, schedule.workspace)
    outputs = (torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16), torch.zeros(2, 1, 16))
    inputs = (problem.q, None, problem.kv_cache, None, None, None, problem.block_table, problem.seq_lens)
    torch.library.opcheck(
        torch.ops.etap_backend.mla_decode.default,
        (*inputs, *buffers, *outputs, SOFTMAX_SCALE, *schedule[:6], False, -torch.inf, False),
        # The poison in what must not be read is NaN, which opcheck's comparison of unread inputs takes for a change.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_torch_accepts_the_registration_of_building_a_schedule():
    schedule = DecodeSchedule(3, 16, device="cpu")
    lengths = torch.tensor([70, 300, 4000], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.etap_backend.build_schedule.default,
        (lengths, schedule.work_ranges, schedule.split_offsets, 8, 0, 16, 4, 1),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    schedule = DecodeSchedule(3, 16, device="cpu", num_sms=132, shared_prefix=True)
    buffers = (schedule.work_ranges, schedule.split_offsets, schedule.shared)
    torch.library.opcheck(
        torch.ops.etap_backend.build_shared_schedule.default,
        (lengths, torch.zeros(3, 70, dtype=torch.int32), *buffers, 64, 1, 16, 0, 132, 132, 16, 4, 1),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("option", ["any_batch", "batch_invariant", "shared_prefix"])
def test_fake_tensors_go_through_a_step(option):
    """As a compiler or a memory profile passes them; they have no memory that the library could look at."""
    with FakeTensorMode():
        lengths, table = torch.ones(3, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int32)
        schedule = DecodeSchedule(3, 16, device="cpu", num_sms=132, **{option: True})
        planned = schedule.build(lengths, block_table=table, page_size=64)
        q, cache = (torch.zeros(*shape, 576, dtype=torch.bfloat16) for shape in ((3, 1, 16), (9, 64)))
        out, lse = mla_decode(q, cache, table, lengths, planned, softmax_scale=SOFTMAX_SCALE)
    assert (out.shape, lse.shape, out.dtype) == ((3, 1, 16, 512), (3, 1, 16), torch.bfloat16)


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("requests", [1, 3])
def test_torch_compile_takes_a_build_for_any_number_of_requests(requests, shared_prefix):
    schedule = DecodeSchedule(4, 16, device="cpu", num_sms=132, shared_prefix=shared_prefix)
    table = torch.zeros(4, 20, dtype=torch.int32)
    lengths = [torch.tensor([1000 + n] * requests, dtype=torch.int32) for n in (1, 2)]

    def ranges(seq_lens):
        planned = schedule.build(seq_lens, block_table=table[: seq_lens.shape[0]], page_size=64)
        return planned.work_ranges + 0

    compiled = torch.compile(ranges, fullgraph=True, backend="aot_eager")
    for seq_lens in (*lengths, torch.ones(4, dtype=torch.int32)):
        assert torch.equal(compiled(seq_lens), ranges(seq_lens))


def test_autocast_changes_nothing_on_the_cpu():
    problem = build(Case((70, 300), 16), "cpu")
    schedule = DecodeSchedule(2, 16, device="cpu").build(problem.seq_lens)
    wanted = decode(problem, schedule)
    with torch.autocast("cpu"):
        assert all(map(torch.equal, decode(problem, schedule), wanted))


@pytest.mark.parametrize("name", ["mla_decode", "sparse_mla_decode"])
def test_a_compiler_must_keep_strides(name):
    """Strides say where queries and cache rows lie; without the tag a compiler may change the layout."""
    assert torch.Tag.needs_fixed_stride_order in getattr(torch.ops.etap_backend, name).default.tags

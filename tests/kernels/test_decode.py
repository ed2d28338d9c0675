"""The public call against float64: the compiled kernels on a Hopper GPU, the executor on the CPU.

Both walk the same schedule and take the same tests. The CPU's problems are smaller and fewer: every value of every
parameter, not every combination. Every case runs three times on poisoned outputs and workspace, between guard bytes,
and must give the same bits each time.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from refusals import REFUSALS

from etap_backend import DecodeSchedule, mla_decode
from support.cases import LAWS, SOFTMAX_SCALE, Case, Problem, Runner, build, decode
from support.compare import Truth, check, truth
from support.covering import both_devices, on_devices

# A scale as engines calibrate it for keys of size 1: neither a power of two nor small enough to saturate.
FP8_CACHE = {"kv_dtype": "fp8", "kv_scale": 0.0137}
FP8_QUERY = {"dtype": "float8_e4m3fn", "q_scale": 0.021}
KINDS = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp8 cache": {**FP8_CACHE},
    "fp16 q, fp8 cache": {**FP8_CACHE, "dtype": "float16"},
    "fp8": {**FP8_CACHE, **FP8_QUERY},
    "fp8 cache, fp8 math": {**FP8_CACHE, "fp8_math": True},
    "fp8, fp8 math": {**FP8_CACHE, **FP8_QUERY, "fp8_math": True},
}
"""Types of queries and cache."""
PAGED_KINDS = {name: kind for name, kind in KINDS.items() if name != "fp16"}
"""Those whose pages may have any size."""
CACHES = ("bf16", "fp8 cache")
ROWS = (8, 16, 32, 64)  # a row tile each
LENGTHS = {"cpu": (0, 1, 63, 64, 65, 200), "cuda": (0, 1, 63, 64, 65, 1000, 4097, 65536)}


@lru_cache(maxsize=2)
def _truth(case: Case, device: str) -> Truth:
    return truth(build(case, device))


def verify(case: Case, device: str) -> None:
    problem = build(case, device)
    wanted = _truth(replace(case, num_sms=None), device)
    runner = Runner(problem)
    first = [result.clone() for result in runner.run()]
    check(*first, problem, wanted)
    found = runner.differences(first, (torch.nan, torch.nan))
    assert not found, "\n".join([*found, f"the case: {case!r}"])


def check_once(problem: Problem) -> None:
    runner = Runner(problem)
    check(*runner.run(), problem, truth(problem))
    runner.check_guards()


# -------------------------------------------------------------------------------------------------------------- shapes


@on_devices({"kind": list(KINDS), "s_q": (1, 2, 4), "heads": (1, 8, 16, 32, 64, 128)})
def test_heads_query_tokens_and_lengths(device, kind, s_q, heads):
    verify(Case(LENGTHS[device], heads=heads, s_q=s_q, **KINDS[kind]), device)


@on_devices({"kind": CACHES, "heads, s_q": [(3, 1), (24, 1), (48, 1), (40, 3), (16, 7), (96, 2)]})
def test_rows_between_the_tile_widths(device, kind, heads, s_q):
    verify(Case((1, 3, 64, 130, 700), heads=heads, s_q=s_q, seed=1, **KINDS[kind]), device)


FEW_SMS = [(33, 1), (16, 3), (12, 3), (8, 6), (6, 7), (16, 2), (16, 4), (10, 5), (64, 1), (16, 5), (112, 1)]


@on_devices({"kind": list(KINDS), "heads, s_q": FEW_SMS, "num_sms": (1, 78)})
def test_groups_of_16_rows_on_few_multiprocessors(device, kind, heads, s_q, num_sms):
    """As an H20 takes up to 64 rows of a few requests, and numbers of rows that leave padding in tiles of 64."""
    rows = dict(heads=heads, s_q=s_q, num_sms=num_sms, groups=True)
    verify(Case((1, 3, 64, 130, 700), seed=26, **rows, **KINDS[kind]), device)


@on_devices({"kind": CACHES, "heads": (16, 128), "s_q": (1, 3), "num_sms": (132, 78, 60, 16, 7, 1)})
def test_numbers_of_multiprocessors(device, kind, heads, s_q, num_sms):
    lengths = {"cpu": (0, 700, 1, 64, 300), "cuda": (0, 7000, 1, 64, 300, 20_000)}[device]
    verify(Case(lengths, heads=heads, s_q=s_q, num_sms=num_sms, seed=4, **KINDS[kind]), device)


SHARED_ROWS = [(16, 1, 132), (8, 1, 132), (32, 1, 132), (16, 2, 132), (4, 4, 132), (8, 1, 78)]


@on_devices({"kind": list(KINDS), "heads, s_q, num_sms": SHARED_ROWS})
def test_shared_prefixes(device, kind, heads, s_q, num_sms):
    """Groups that fill stacks and more, one that fills none, and requests that share nothing."""
    scale = {"cpu": 1, "cuda": 8}[device]
    groups = [(9, 640), (3, 1000), (1, 0), (8, 768), (2, 64)]
    lengths = [tokens * scale + 7 + 61 * i for members, tokens in groups for i in range(members)]
    prefixes = tuple((members, tokens * scale) for members, tokens in groups)
    verify(Case((*lengths, 0), heads, s_q, num_sms=num_sms, prefixes=prefixes, seed=31, **KINDS[kind]), device)


@on_devices({"kind": list(PAGED_KINDS), "page_size": (1, 16, 48, 128, 256), "q_layout": ("strided", "split")})
def test_shared_prefixes_in_pages_of_any_size(device, kind, page_size, q_layout):
    layout = dict(page_size=page_size, q_layout=q_layout, num_sms=132, prefixes=((4, 900), (3, 700)))
    verify(Case((1000, 1300, 901, 950, 800, 707, 701, 300), 16, seed=32, **layout, **KINDS[kind]), device)


@on_devices({"kind": CACHES, "batch": (1, 2, 31, 64, 133, 256)}, cpu={"batch": (1, 2, 64, 133)})
def test_ragged_batches(device, kind, batch):
    draw = random.Random(batch)
    longest = {"cpu": 300, "cuda": 16_000}[device]
    lengths = [min(longest, int(draw.lognormvariate(0.4, 1.2) * longest / 16)) for _ in range(batch)]
    lengths[0], lengths[-1] = 0, longest
    verify(Case(tuple(lengths), heads=16, seed=5, **KINDS[kind]), device)


@on_devices({"kind": CACHES, "length": (64 * 64, 131_072)}, cpu={"length": (64 * 64,)})
def test_one_request_over_all_multiprocessors(device, kind, length):
    verify(Case((length,), heads=16, seed=6, **KINDS[kind]), device)


@on_devices({"kind": CACHES, "heads": (1, 16, 64)})
def test_splits_that_a_row_does_not_see(device, kind, heads):
    """The last tile of these requests belongs to the last query tokens only, and is a split of its own."""
    verify(Case((65, 66, 129, 130, 2, 67), heads=heads, s_q=4, num_sms=132, seed=12, **KINDS[kind]), device)


@on_devices({"kind": list(PAGED_KINDS), "heads": ROWS, "page_size": (1, 16, 64)})
def test_requests_of_one_tile(device, kind, heads, page_size):
    """On a GPU the producer is as many splits ahead as its ring has tiles: more than four barriers tell apart."""
    draw = random.Random(heads)
    lengths = tuple(draw.randint(1, 64) for _ in range({"cpu": 20, "cuda": 200}[device]))
    verify(Case(lengths, heads=heads, page_size=page_size, num_sms=3, seed=27, **KINDS[kind]), device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("batch", [2, 20, 40, 80])
def test_requests_of_many_and_of_few_splits(batch, heads, kind):
    """The combine kernel takes them together, up to four at a time, and those of many splits by themselves."""
    lengths = (20_000, *[700 + 10 * i for i in range(batch - 1)])
    problem = build(Case(lengths, heads=heads, seed=19, **KINDS[kind]), "cuda")
    runner = Runner(problem)
    out, lse = runner.run()
    assert runner.schedule.split_offsets[1] > 8
    check(out, lse, problem, truth(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8 cache", "fp8 cache, fp8 math"])
@pytest.mark.parametrize("heads", ROWS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_many_runs_of_ctas_with_many_splits(page_size, heads, kind):
    """The warpgroups' hand-over from split to split depends on timing: a race once showed in a run of 75."""
    draw = random.Random(heads)
    lengths = tuple(min(16_000, int(draw.lognormvariate(7.0, 1.2))) for _ in range(200))
    runner = Runner(build(Case(lengths, heads=heads, page_size=page_size, seed=10, **KINDS[kind]), "cuda"))
    first = [result.clone() for result in runner.run()]
    assert runner.differences(first, (torch.nan,) * 60) == []


# -------------------------------------------------------------------------------------------------------------- values


@on_devices({"kind": list(KINDS), "law": LAWS, "heads": (8, 16, 128)})
def test_input_laws(device, kind, law, heads):
    lengths = {"cpu": (5, 64, 129, 500), "cuda": (5, 64, 129, 1000, 20_000)}[device]
    verify(Case(lengths, heads=heads, s_q=2, law=law, seed=2, **KINDS[kind]), device)


FP8_KINDS = [name for name, kind in KINDS.items() if "kv_dtype" in kind]
SCALES = (1e-3, None, 1e3)


@on_devices({"kind": FP8_KINDS, "kv_scale": SCALES, "q_scale": SCALES}, together=2)
def test_scales(device, kind, kv_scale, q_scale):
    """Too small a scale makes most elements +-448, too large a one leaves zeros and the smallest number there is."""
    scales = {"kv_scale": kv_scale} | ({"q_scale": q_scale} if "q_scale" in KINDS[kind] else {})
    case = Case((1, 64, 200, 333), heads=16, seed=13, **KINDS[kind] | scales)
    values = build(case, device).kv_cache.double().abs()
    values = values[values.isfinite()]
    share = {1e-3: values == 448, None: values <= 8, 1e3: values <= 2**-8}[kv_scale].double().mean()
    assert share > 0.6
    verify(case, device)


@on_devices({"power": (-40, -20, 20, 40), "fp8_math": (False, True)})
def test_bfloat16_queries_outside_float16s_range(device, power, fp8_math):
    """With an FP8 cache they are multiplied as float16, each row by its power of two, or as e4m3."""
    kind = {"kv_dtype": "fp8", "kv_scale": 0.0137 * 2.0**-power, "fp8_math": fp8_math}
    verify(Case((1, 65, 200, 700), heads=16, s_q=2, q_power=power, seed=14, **kind), device)


@both_devices
@pytest.mark.parametrize("fp8_math", [False, True])
def test_each_query_row_has_its_own_power_of_two(device, fp8_math):
    problem = build(Case((65, 300), heads=16, seed=15, fp8_math=fp8_math, **FP8_CACHE), device)
    # From rows of subnormal numbers and of zeros, that see all keys alike, to rows with scores above 100.
    powers = torch.tensor([-133, -126, -112, -100, -60, -30, -15, -8, -4, -2, 0, 1, 2, 3, 5, 0], device=device)
    if fp8_math:  # where scores are large, e4m3 queries choose other keys
        powers = powers.clamp(max=0)
    problem.q.copy_(torch.ldexp(problem.q.float(), powers[:, None]))
    problem.q[:, :, -1] = 0
    check_once(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_fp8_math_sums_scores_as_tensor_cores_do(heads):
    """One token's log-sum-exp is its score: it errs as PyTorch's product of the same e4m3 numbers does."""
    kind = KINDS["fp8, fp8 math"]
    problem = build(Case((1,) * 192, heads=heads, page_size=1, law="outliers", seed=19, **kind), "cuda")
    q, one = problem.q.flatten(0, 2), torch.ones((), device="cuda")
    keys = problem.kv_cache.view(torch.uint8)[problem.block_table[:, 0].long(), 0].view(q.dtype)
    products = torch._scaled_mm(q, keys.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
    exact = (problem.q.double().view(192, heads, 576) @ keys.double()[..., None])[..., 0]
    factor = problem.q_scale.double() * problem.kv_scale * SOFTMAX_SCALE
    error = Runner(problem).run()[1].squeeze(1) - exact * factor
    of_product = (products.double().view(192, heads, 192).diagonal(dim1=0, dim2=2).T - exact) * factor
    assert error.square().mean().sqrt() < 1.1 * of_product.square().mean().sqrt()


@on_devices({"kind": list(KINDS)})
def test_keys_of_little_weight_count_together(device, kind):
    """A thousand keys of a thousandth of the largest weight make half the output. Beside 1, e4m3 holds none of them."""
    problem = build(Case((1025,), heads=16, seed=18, **KINDS[kind]), device)
    keys, q = torch.zeros(1025, 576, device=device), torch.zeros(problem.q.shape, device=device)
    q[..., 512:] = 1  # the scores come from these columns alone, and only the first key has a score
    keys[0, 512:], keys[0, :256], keys[1:, 256:512] = 2.6, 1, 1
    problem.q.copy_((q / (problem.case.q_scale or 1)).to(problem.q.dtype))
    problem.kv_cache = problem.kv_cache.clone()
    for page, chunk in zip(problem.block_table[0].tolist(), keys.split(64), strict=False):
        problem.kv_cache[page, : len(chunk)] = (chunk / (problem.case.kv_scale or 1)).to(problem.kv_cache.dtype)
    wanted = truth(problem)
    assert 0.4 < wanted.out[..., :256].mean() < 0.6 and 0.4 < wanted.out[..., 256:].mean() < 0.6
    check(*Runner(problem).run(), problem, wanted)


@on_devices({"output": ("bfloat16", "float16")})
def test_outputs_beside_fp8_queries(device, output):
    case = Case((65, 300, 0), heads=16, seed=16, output=output, **KINDS["fp8"])
    verify(case, device)
    problem = build(case, device)
    schedule = DecodeSchedule(3, 16, device=device).build(problem.seq_lens)
    assert decode(problem, schedule, out_dtype=case.out_dtype)[0].dtype == case.out_dtype
    assert decode(problem, schedule)[0].dtype == torch.bfloat16


@both_devices
def test_a_scale_of_one_has_any_allowed_shape_and_changes_nothing(device):
    problem = build(Case((65, 300), heads=16, seed=17, kv_dtype="fp8", dtype="float8_e4m3fn"), device)
    schedule = DecodeSchedule(2, 16, device=device).build(problem.seq_lens)
    wanted = decode(problem, schedule)
    for shape in ([], [1]):
        problem.q_scale = problem.kv_scale = torch.ones(shape, device=device)
        for got, want in zip(decode(problem, schedule), wanted, strict=True):
            assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------------------- layouts

CACHE_LAYOUTS = ("dense", "gapped", "rows apart", "headed", "apart")
Q_LAYOUTS = ("packed", "strided", "split")


@on_devices({
    "kind": ("bf16", "fp8"),
    "page_size": (64, 128, 256),
    "cache_layout": CACHE_LAYOUTS,
    "q_layout": Q_LAYOUTS,
})  # fmt: skip
def test_layouts(device, kind, page_size, cache_layout, q_layout):
    case = Case((0, 1, 65, 255, 256, 257, 600), page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(replace(case, heads=16, s_q=2, seed=3, **KINDS[kind]), device)


@on_devices({"kind": list(PAGED_KINDS), "page_size": (1, 16, 32), "heads": ROWS})
def test_small_pages(device, kind, page_size, heads):
    lengths = {"cpu": (0, 1, 63, 64, 65, 200), "cuda": (0, 1, 15, 16, 17, 1000, 4097, 20_000)}[device]
    verify(Case(lengths, heads=heads, page_size=page_size, seed=21, **KINDS[kind]), device)


@on_devices({
    "kind": CACHES,
    "page_size": (2, 5, 24, 48, 63, 80, 96, 100, 192, 1000),
    "heads, cache_layout, q_layout": [(16, "gapped", "packed"), (24, "apart", "strided"), (64, "headed", "split")],
})  # fmt: skip
def test_pages_of_any_size(device, kind, page_size, cache_layout, heads, q_layout):
    layouts = dict(page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(Case((0, 1, 99, 300, 700), heads=heads, s_q=2, num_sms=7, seed=22, **layouts, **KINDS[kind]), device)


@on_devices({"kind": ("bf16", "fp8 cache", "fp8 cache, fp8 math"), "heads, s_q": [(16, 1), (64, 2)]})
def test_the_page_size_changes_no_bit(device, kind, heads, s_q):
    """However its rows come to shared memory, the same cache gives the same result."""
    problem = build(Case((64, 700, 1, 333), heads=heads, s_q=s_q, seed=23, **KINDS[kind]), device)
    wanted = [result.clone() for result in Runner(problem).run()]
    whole, table = problem.kv_cache, problem.block_table.clone()
    table[table < 0], table[table >= len(whole)] = 0, 0
    for size in (1, 16, 32):
        within = torch.arange(64 // size, dtype=torch.int32, device=device)
        problem.kv_cache = whole.reshape(-1, size, 576)
        problem.block_table = (table[..., None] * len(within) + within).flatten(1)
        for got, want in zip(Runner(problem).run(), wanted, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
def test_cache_of_more_than_2_to_the_31_bytes_and_elements(kind):
    for page_size in (64, 16, 1):
        pool_pages = 60_000 * 64 // page_size
        layout = dict(page_size=page_size, pool_pages=pool_pages)
        verify(Case((5000, 64, 1, 0, 3000), seed=7, **layout, **KINDS[kind]), "cuda")
    assert 60_000 * 64 * 576 > 2**31


@on_devices({"seed": range(80)}, cpu={"seed": range(20)})
def test_random_cases(device, seed):
    draw = random.Random(seed)
    longest = {"cpu": 400, "cuda": 12_000}[device]
    case = Case(
        lengths=tuple(int(longest ** draw.random()) - draw.randrange(2) for _ in range(draw.choice([1, 2, 5, 9]))),
        heads=draw.choice([1, 2, 8, 12, 16, 20, 32, 64, 100, 128]),
        s_q=draw.choice([1, 1, 2, 3, 4]),
        page_size=draw.choice([64, 128, 256, 1, 16, 32, draw.randint(1, 300)]),
        law=draw.choice(LAWS),
        q_layout=draw.choice(Q_LAYOUTS),
        cache_layout=draw.choice(CACHE_LAYOUTS),
        num_sms=draw.choice([None, 132, 78, 5, 1]),
        seed=100 + seed,
        **draw.choice(list(KINDS.values())),
    )
    if case.kv_torch_dtype == torch.float16:
        case = replace(case, page_size=64 * draw.randint(1, 4), cache_layout=draw.choice(CACHE_LAYOUTS[:-1]))
    verify(case, device)


# --------------------------------------------------------------------------------------------------------------- edges


@on_devices({"kind": CACHES, "heads, s_q": [(16, 1), (128, 2)]})
def test_negative_lengths_count_as_empty(device, kind, heads, s_q):
    problem = build(Case((0, 130, 0), heads=heads, s_q=s_q, seed=11, **KINDS[kind]), device)
    problem.seq_lens = torch.tensor([-1, 130, -(2**31)], dtype=torch.int32, device=device)
    check_once(problem)


@both_devices
def test_a_batch_of_no_requests(device):
    problem = build(Case((70,), heads=16), device)
    problem.call_q, problem.block_table = problem.q[:0], problem.block_table[:0]
    problem.seq_lens = problem.seq_lens[:0]
    schedule = DecodeSchedule(1, 16, device=device).build(problem.seq_lens)
    out, lse = decode(problem, schedule)
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 1, 16)


@pytest.mark.gpu
def test_refused_calls_leave_everything_usable():
    for refusal in REFUSALS:
        with pytest.raises(refusal.error):
            refusal.call("cuda")
    verify(Case((70, 1, 128), heads=16, s_q=2, seed=10), "cuda")


@on_devices({"kind": CACHES})
def test_outputs_are_allocated_when_not_given(device, kind):
    problem = build(Case((100, 0, 3), heads=8, s_q=2, seed=8, **KINDS[kind]), device)
    runner = Runner(problem)
    wanted = [result.clone() for result in runner.run()]
    got = decode(problem, runner.build())
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@on_devices({"kind": list(KINDS), "heads": (4, 16, 32), "num_sms": (1, 132)})
def test_rows_that_see_nothing_have_the_requested_log_sum_exp(device, kind, heads, num_sms):
    """No tokens, query tokens before the only one, splits of a request that has no tokens any more; NaN stays NaN."""
    problem = build(Case((130, 0, 300, 1), heads, s_q=2, num_sms=num_sms, seed=25, **KINDS[kind]), device)
    problem.q[2, 0, 0] = torch.nan
    runner = Runner(problem)
    planned = runner.schedule.build(torch.tensor([300, 700, 300, 1], dtype=torch.int32, device=device), 2)
    assert (planned.split_offsets[2] > planned.split_offsets[1]) == (num_sms > 1)
    out, lse = decode(problem, planned)
    assert lse[2, 0, 0].isnan() and lse.isneginf().sum() == 3 * heads
    runner.workspace.poison()
    other_out, other_lse = decode(problem, planned, empty_lse=math.inf)
    assert torch.equal(other_out.view(torch.uint8), out.view(torch.uint8))
    wanted = lse.masked_fill(lse.isneginf(), math.inf)
    assert torch.equal(other_lse.view(torch.int32), wanted.view(torch.int32))


# --------------------------------------------------------------------------------------------------------- early loads


def _bits(results: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [result.view(torch.uint8).clone() for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, page_size",
    [(kind, page_size) for kind in KINDS for page_size in (64, 16) if page_size == 64 or kind in PAGED_KINDS],
)
@pytest.mark.parametrize("heads, s_q", [(8, 1), (16, 1), (16, 3), (32, 1), (64, 1), (24, 4)])
def test_early_loads_wait_for_what_the_kernel_before_writes(kind, heads, s_q, page_size):
    """The queries, and the last tokens' rows of the cache. The copies let nothing begin before they end: see below."""
    lengths = (1, 64, 130, 1000, 4097, 0, 20_000)
    problem = build(Case(lengths, heads, s_q=s_q, page_size=page_size, seed=30, **KINDS[kind]), "cuda")
    planned = Runner(problem).build()
    wanted = _bits(decode(problem, planned))
    last = [(r, t) for r, n in enumerate(lengths) for t in range(max(0, n - s_q), n)]
    requests, tokens = torch.tensor(last, device="cuda").T
    cache = problem.call_kv_cache.view(torch.uint8)
    rows = problem.block_table[requests, tokens // page_size].long(), tokens % page_size
    queries, kept = problem.call_q.view(torch.uint8), cache[rows]
    kept_queries, nan = queries.clone(), 0xFF
    for _ in range(5):
        for late, spoil, write in (
            ("queries", lambda: queries.fill_(nan), lambda: queries.copy_(kept_queries)),
            ("rows", lambda: cache.index_put_(rows, torch.full_like(kept, nan)), lambda: cache.index_put_(rows, kept)),
        ):
            spoil()
            write()
            got = _bits(decode(problem, planned, early_loads=True))
            assert all(map(torch.equal, got, wanted)), late


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if "q_scale" not in kind])
@pytest.mark.parametrize("lengths", [(40,), (3000,), (1000, 64, 200)])
@pytest.mark.parametrize("heads", ROWS)
def test_early_loads_behind_a_kernel_that_lets_the_next_begin_at_once(kind, heads, lengths):
    """The queries are the result of the call before, whose combine kernel lets the next kernel begin at once."""
    first = build(Case((20_000,) * len(lengths), heads, seed=31, **KINDS[kind]), "cuda")
    second = build(Case(lengths, heads, seed=32, **KINDS[kind]), "cuda")
    plans = [Runner(problem).build() for problem in (first, second)]
    latent, rope = torch.empty_like(second.call_q[..., :512]), second.call_q[..., 512:].contiguous()

    def result(early_loads: bool) -> list[torch.Tensor]:
        latent.fill_(torch.nan)
        decode(first, plans[0], out=latent)
        if not early_loads:
            torch.cuda.synchronize()
        arguments = (second.call_kv_cache, second.block_table, second.seq_lens, plans[1])
        options = {"q_rope": rope, "kv_scale": second.kv_scale, "fp8_math": second.case.fp8_math}
        return _bits(mla_decode(latent, *arguments, softmax_scale=SOFTMAX_SCALE, early_loads=early_loads, **options))

    wanted = result(False)
    for _ in range(20):
        assert all(map(torch.equal, result(True), wanted))


# --------------------------------------------------------------------------------------------------- calls in a program


@both_devices
def test_one_schedule_serves_batch_after_batch(device):
    schedule = DecodeSchedule(40, 16, max_s_q=4, device=device, num_sms={"cpu": 8, "cuda": None}[device])
    for step, (batch, s_q) in enumerate([(40, 1), (3, 4), (1, 1), (17, 2), (40, 4), (2, 1)]):
        draw = random.Random(step)
        case = Case(tuple(draw.randrange(500) for _ in range(batch)), s_q=s_q, seed=20 + step)
        problem = build(case, device)
        schedule.workspace.fill_(torch.nan)
        check(*decode(problem, schedule.build(problem.seq_lens, s_q)), problem, truth(problem))


@both_devices
def test_a_built_schedule_serves_many_layers(device):
    """Engines build once per step and call once per layer: nothing of a call may leak into the next one."""
    first, second = (build(Case((500, 0, 64, 129), heads=16, seed=seed), device) for seed in (30, 31))
    schedule = DecodeSchedule(4, 16, device=device).build(first.seq_lens)
    for problem in (first, second, first):
        check(*decode(problem, schedule), problem, truth(problem))


@both_devices
@pytest.mark.parametrize("kind", ["bf16", "fp8 cache", "fp8, fp8 math"])
def test_torch_compile_leaves_no_graph_break_and_the_same_bits(device, kind):
    problem = build(Case((100, 65), heads=16, seed=9, **KINDS[kind]), device)
    schedule = DecodeSchedule(2, 16, device=device).build(problem.seq_lens)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(scale):
        out, lse = decode(problem, schedule)
        return out * scale, lse

    wanted = decode(problem, schedule)
    assert all(torch.equal(a, b) for a, b in zip(layer(torch.ones((), device=device)), wanted, strict=True))

"""The public call against float64: the compiled kernels on a Hopper GPU, the reference executor on the CPU.

Both walk the same schedule, so both take the same tests; the CPU's problems are only smaller. Every case runs three
times on poisoned outputs and workspace, between guard bytes, and must give the same bits each time.
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
from support.cases import LAWS, SOFTMAX_SCALE, Case, Runner, build, decode
from support.compare import Truth, check, truth

both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# A scale as engines calibrate it for keys of size 1: neither a power of two nor small enough to saturate.
FP8_CACHE = {"kv_dtype": "fp8", "kv_scale": 0.0137}
FP8_QUERY = {"dtype": "float8_e4m3fn", "q_scale": 0.021}
KINDS = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "bf16 q, fp8": {**FP8_CACHE},
    "fp16 q, fp8": {**FP8_CACHE, "dtype": "float16"},
    "fp8 q, fp8": {**FP8_CACHE, **FP8_QUERY},
    "bf16 q, fp8 math": {**FP8_CACHE, "fp8_math": True},
    "fp8 q, fp8 math": {**FP8_CACHE, **FP8_QUERY, "fp8_math": True},
}
FP8_KINDS = {name: kind for name, kind in KINDS.items() if "kv_dtype" in kind}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
bf16_or_fp8_cache = pytest.mark.parametrize("cache", [{}, FP8_CACHE], ids=["bf16", "fp8"])

GRID = {"cpu": (0, 1, 63, 64, 65, 200), "cuda": (0, 1, 63, 64, 65, 1000, 4097, 65536)}


@lru_cache(maxsize=2)
def _truth(case: Case, device: str) -> Truth:
    return truth(build(case, device))


def verify(case: Case, device: str) -> None:
    problem = build(case, device)
    wanted = _truth(replace(case, num_sms=None), device)
    runner = Runner(problem)
    first = [result.clone() for result in runner.run()]
    check(*first, problem, wanted)
    for run in (2, 3):
        for name, result, before in zip(("out", "lse"), runner.run(), first, strict=True):
            same = torch.equal(result.view(torch.uint8), before.view(torch.uint8))
            assert same, f"{name}: run {run} gave other bits than run 1\nthe case: {case!r}"
    runner.check_guards()


@both_devices
@every_kind
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
def test_heads_query_tokens_and_lengths(device, kind, s_q, heads):
    verify(Case(GRID[device], heads=heads, s_q=s_q, **kind), device)


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("heads, s_q", [(3, 1), (24, 1), (48, 1), (40, 3), (16, 7), (96, 2)])
def test_rows_between_the_tile_widths(device, cache, heads, s_q):
    verify(Case((1, 3, 64, 130, 700), heads=heads, s_q=s_q, seed=1, **cache), device)


@both_devices
@every_kind
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_input_laws(device, kind, law, heads):
    lengths = {"cpu": (5, 64, 129, 500), "cuda": (5, 64, 129, 1000, 20_000)}[device]
    verify(Case(lengths, heads=heads, s_q=2, law=law, seed=2, **kind), device)


def scales(kind: dict) -> list[dict]:
    """The kind with every scale of its cache and, where it has one, of its queries."""
    q_scales = [1e-3, None, 1e3] if kind.get("dtype") == "float8_e4m3fn" else [None]
    return [
        {**kind, "kv_scale": kv_scale, "q_scale": q_scale} for kv_scale in (1e-3, None, 1e3) for q_scale in q_scales
    ]


@both_devices
@pytest.mark.parametrize("kind", [each for kind in FP8_KINDS.values() for each in scales(kind)], ids=str)
def test_scales(device, kind):
    """Too small a scale makes of most elements +-448, too large a one leaves zeros and the smallest number there is."""
    case = Case((1, 64, 200, 333), heads=16, seed=13, **kind)
    values = build(case, device).kv_cache.double().abs()
    values = values[values.isfinite()]
    share = {1e-3: values == 448, None: values <= 8, 1e3: values <= 2**-8}[case.kv_scale].double().mean()
    assert share > 0.6
    verify(case, device)


@both_devices
@pytest.mark.parametrize("power", [-40, -20, 20, 40])
@pytest.mark.parametrize("fp8_math", [False, True])
def test_bfloat16_queries_that_no_float16_holds(device, power, fp8_math):
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
    runner = Runner(problem)
    check(*runner.run(), problem, truth(problem))
    runner.check_guards()


@both_devices
@every_kind
def test_keys_of_little_weight_count_together(device, kind):
    """A thousand keys of a thousandth of the largest weight make half the output. Beside 1, e4m3 holds none of them."""
    problem = build(Case((1025,), heads=16, seed=18, **kind), device)
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


@both_devices
@pytest.mark.parametrize("output", ["bfloat16", "float16"])
def test_outputs_beside_fp8_queries(device, output):
    case = Case((65, 300, 0), heads=16, seed=16, output=output, **FP8_CACHE, **FP8_QUERY)
    verify(case, device)
    problem = build(case, device)
    schedule = DecodeSchedule(3, 16, device=device).build(problem.seq_lens)
    assert decode(problem, schedule, out_dtype=case.out_dtype)[0].dtype == case.out_dtype
    assert decode(problem, schedule)[0].dtype == torch.bfloat16


@both_devices
def test_a_scale_may_have_one_dimension_or_none_and_one_is_as_good_as_1(device):
    problem = build(Case((65, 300), heads=16, seed=17, kv_dtype="fp8", dtype="float8_e4m3fn"), device)
    schedule = DecodeSchedule(2, 16, device=device).build(problem.seq_lens)
    wanted = decode(problem, schedule)
    for shape in ([], [1]):
        problem.q_scale = problem.kv_scale = torch.ones(shape, device=device)
        for got, want in zip(decode(problem, schedule), wanted, strict=True):
            assert torch.equal(got, want)


@both_devices
@pytest.mark.parametrize("kind", [{}, KINDS["fp8 q, fp8"]], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [64, 128, 256])
@pytest.mark.parametrize("cache_layout", ["dense", "gapped", "rows apart", "headed", "apart"])
@pytest.mark.parametrize("q_layout", ["packed", "strided", "split"])
def test_layouts(device, kind, page_size, cache_layout, q_layout):
    case = Case((0, 1, 65, 255, 256, 257, 600), page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(replace(case, heads=16, s_q=2, seed=3, **kind), device)


@both_devices
@every_kind
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_small_pages(device, kind, page_size, heads):
    lengths = {"cpu": (0, 1, 63, 64, 65, 200), "cuda": (0, 1, 15, 16, 17, 1000, 4097, 20_000)}[device]
    verify(Case(lengths, heads=heads, page_size=page_size, seed=21, **kind), device)


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("page_size", [2, 5, 24, 48, 63, 80, 96, 100, 192, 1000])
@pytest.mark.parametrize(
    "heads, cache_layout, q_layout", [(16, "gapped", "packed"), (24, "apart", "strided"), (64, "headed", "split")]
)
def test_pages_of_any_size(device, cache, page_size, cache_layout, heads, q_layout):
    layouts = dict(page_size=page_size, cache_layout=cache_layout, q_layout=q_layout)
    verify(Case((0, 1, 99, 300, 700), heads=heads, s_q=2, num_sms=7, seed=22, **layouts, **cache), device)


@both_devices
@pytest.mark.parametrize("cache", [{}, FP8_CACHE, {**FP8_CACHE, "fp8_math": True}], ids=["bf16", "fp8", "fp8_math"])
@pytest.mark.parametrize("heads, s_q", [(16, 1), (64, 2)])
def test_the_page_size_changes_no_bit(device, cache, heads, s_q):
    """However its rows come to shared memory, the same cache gives the same result."""
    problem = build(Case((64, 700, 1, 333), heads=heads, s_q=s_q, seed=23, **cache), device)
    wanted = [result.clone() for result in Runner(problem).run()]
    whole, table = problem.kv_cache, problem.block_table.clone()
    table[table < 0], table[table >= len(whole)] = 0, 0
    for size in (1, 16, 32):
        within = torch.arange(64 // size, dtype=torch.int32, device=device)
        problem.kv_cache = whole.reshape(-1, size, 576)
        problem.block_table = (table[..., None] * len(within) + within).flatten(1)
        for got, want in zip(Runner(problem).run(), wanted, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("num_sms", [132, 78, 7, 1])
def test_numbers_of_multiprocessors(device, cache, heads, s_q, num_sms):
    lengths = {"cpu": (0, 700, 1, 64, 300), "cuda": (0, 7000, 1, 64, 300, 20_000)}[device]
    verify(Case(lengths, heads=heads, s_q=s_q, num_sms=num_sms, seed=4, **cache), device)


@both_devices
@every_kind
@pytest.mark.parametrize(
    "heads, s_q", [(33, 1), (16, 3), (12, 3), (8, 6), (6, 7), (16, 2), (16, 4), (10, 5), (64, 1), (16, 5), (112, 1)]
)
@pytest.mark.parametrize("num_sms", [1, 78])
def test_groups_of_16_rows_on_few_multiprocessors(device, kind, heads, s_q, num_sms):
    """As an H20 takes up to 64 rows of a few requests, and numbers of rows that leave padding in tiles of 64."""
    rows = dict(heads=heads, s_q=s_q, num_sms=num_sms, groups=True)
    verify(Case((1, 3, 64, 130, 700), seed=26, **rows, **kind), device)


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("batch", [1, 2, 31, 64, 133, 256])
def test_ragged_batches(device, cache, batch):
    draw = random.Random(batch)
    longest = {"cpu": 300, "cuda": 16_000}[device]
    lengths = [min(longest, int(draw.lognormvariate(0.4, 1.2) * longest / 16)) for _ in range(batch)]
    lengths[0], lengths[-1] = 0, longest
    verify(Case(tuple(lengths), heads=16, seed=5, **cache), device)


@pytest.mark.gpu
@bf16_or_fp8_cache
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("batch", [2, 20, 40, 80])
def test_requests_of_many_and_of_few_splits(batch, heads, cache):
    """The combination takes them together, up to four at a time, and those of many splits by themselves."""
    problem = build(Case((20_000, *[700 + 10 * i for i in range(batch - 1)]), heads=heads, seed=19, **cache), "cuda")
    runner = Runner(problem)
    out, lse = runner.run()
    assert runner.schedule.split_offsets[1] > 8
    check(out, lse, problem, truth(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, FP8_CACHE, KINDS["bf16 q, fp8 math"]], ids=["bf16", "fp8", "fp8 math"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_many_runs_of_ctas_with_many_pieces(page_size, heads, kind):
    """What the warpgroups hand each other from piece to piece depends on timing: a race once showed in a run of 75."""
    draw = random.Random(heads)
    lengths = tuple(min(16_000, int(draw.lognormvariate(7.0, 1.2))) for _ in range(200))
    runner = Runner(build(Case(lengths, heads=heads, page_size=page_size, seed=10, **kind), "cuda"))
    first = [result.clone() for result in runner.run()]
    for run in range(60):
        for name, result, before in zip(("out", "lse"), runner.run(), first, strict=True):
            assert torch.equal(result.view(torch.uint8), before.view(torch.uint8)), f"{name}: run {run} differs"


@both_devices
@every_kind
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rows_of_requests_of_one_tile(device, kind, heads, page_size):
    """On a GPU the producer is as many pieces ahead as its ring has tiles: more than four barriers tell apart."""
    draw = random.Random(heads)
    lengths = tuple(draw.randint(1, 64) for _ in range({"cpu": 20, "cuda": 200}[device]))
    verify(Case(lengths, heads=heads, page_size=page_size, num_sms=3, seed=27, **kind), device)


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("length", [64 * 64, 131_072])
def test_one_request_over_all_multiprocessors(device, cache, length):
    if device == "cpu" and length > 10_000:
        pytest.skip("the CPU's executor takes minutes for it; the shorter request is split as often")
    verify(Case((length,), heads=16, seed=6, **cache), device)


@both_devices
@pytest.mark.parametrize("seed", range(80))
def test_random_cases(device, seed):
    draw = random.Random(seed)
    longest = {"cpu": 400, "cuda": 12_000}[device]
    case = Case(
        lengths=tuple(int(longest ** draw.random()) - draw.randrange(2) for _ in range(draw.choice([1, 2, 5, 9]))),
        heads=draw.choice([1, 2, 8, 12, 16, 20, 32, 64, 100, 128]),
        s_q=draw.choice([1, 1, 2, 3, 4]),
        page_size=draw.choice([64, 128, 256, 1, 16, 32, draw.randint(1, 300)]),
        law=draw.choice(LAWS),
        q_layout=draw.choice(["packed", "strided", "split"]),
        cache_layout=draw.choice(["dense", "gapped", "rows apart", "headed", "apart"]),
        num_sms=draw.choice([None, 132, 78, 5, 1]),
        seed=100 + seed,
        **draw.choice(list(KINDS.values())),
    )
    verify(case, device)


@pytest.mark.gpu
@bf16_or_fp8_cache
def test_cache_of_more_than_2_to_the_31_bytes_and_elements(cache):
    for page_size in (64, 16, 1):
        pool_pages = 60_000 * 64 // page_size
        verify(Case((5000, 64, 1, 0, 3000), page_size=page_size, pool_pages=pool_pages, seed=7, **cache), "cuda")
    assert 60_000 * 64 * 576 > 2**31


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("heads, s_q", [(16, 1), (128, 2)])
def test_negative_lengths_count_as_empty(device, cache, heads, s_q):
    problem = build(Case((0, 130, 0), heads=heads, s_q=s_q, seed=11, **cache), device)
    problem.seq_lens = torch.tensor([-1, 130, -(2**31)], dtype=torch.int32, device=device)
    runner = Runner(problem)
    check(*runner.run(), problem, truth(problem))
    runner.check_guards()


@both_devices
def test_a_batch_of_no_requests(device):
    problem = build(Case((70,), heads=16), device)
    problem.call_q, problem.block_table = problem.q[:0], problem.block_table[:0]
    problem.seq_lens = problem.seq_lens[:0]
    schedule = DecodeSchedule(1, 16, device=device).build(problem.seq_lens)
    out, lse = decode(problem, schedule)
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 1, 16)


@both_devices
def test_refused_calls_leave_everything_usable(device):
    for refusal in REFUSALS:
        with pytest.raises(refusal.error):
            refusal.call(device)
    verify(Case((70, 1, 128), heads=16, s_q=2, seed=10), device)


@both_devices
@bf16_or_fp8_cache
def test_outputs_are_allocated_when_not_given(device, cache):
    problem = build(Case((100, 0, 3), heads=8, s_q=2, seed=8, **cache), device)
    runner = Runner(problem)
    wanted = [result.clone() for result in runner.run()]
    got = decode(problem, runner.build())
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@both_devices
@bf16_or_fp8_cache
@pytest.mark.parametrize("heads", [1, 16, 64])
def test_pieces_of_which_a_row_sees_nothing(device, cache, heads):
    """The last tile of these requests belongs to the last query tokens only, and is a piece of its own."""
    verify(Case((65, 66, 129, 130, 2, 67), heads=heads, s_q=4, num_sms=132, seed=12, **cache), device)


@both_devices
@every_kind
@pytest.mark.parametrize("heads", [4, 16, 32])
@pytest.mark.parametrize("num_sms", [1, 132])
def test_rows_that_see_nothing_have_the_log_sum_exp_that_is_asked_for(device, kind, heads, num_sms):
    """No tokens, query tokens before the only one, a plan's pieces of what has none any more; NaN stays what it is."""
    problem = build(Case((130, 0, 300, 1), heads, s_q=2, num_sms=num_sms, seed=25, **kind), device)
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


def _bits(results: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [result.view(torch.uint8).clone() for result in results]


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("heads, s_q", [(8, 1), (16, 1), (16, 3), (32, 1), (64, 1), (24, 4)])
def test_early_loads_wait_for_what_the_kernel_before_writes(kind, heads, s_q, page_size):
    """The queries, and the last tokens' rows of the cache. The copies let nothing begin before they end: see below."""
    lengths = (1, 64, 130, 1000, 4097, 0, 20_000)
    problem = build(Case(lengths, heads, s_q=s_q, page_size=page_size, seed=30, **kind), "cuda")
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
@every_kind
@pytest.mark.parametrize("lengths", [(40,), (3000,), (1000, 64, 200)])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_early_loads_behind_a_kernel_that_lets_the_next_begin_at_once(kind, heads, lengths):
    """The queries are what a call before leaves as its result, whose combination lets the next kernel begin at once."""
    if kind.get("dtype") == "float8_e4m3fn":
        pytest.skip("a result is never e4m3")
    first = build(Case((20_000,) * len(lengths), heads, seed=31, **kind), "cuda")
    second = build(Case(lengths, heads, seed=32, **kind), "cuda")
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
    """The engines build once a step and call once a layer: nothing of a call may leak into the next one."""
    first, second = (build(Case((500, 0, 64, 129), heads=16, seed=seed), device) for seed in (30, 31))
    schedule = DecodeSchedule(4, 16, device=device).build(first.seq_lens)
    for problem in (first, second, first):
        check(*decode(problem, schedule), problem, truth(problem))


@both_devices
@pytest.mark.parametrize("kind", [{}, FP8_CACHE, KINDS["fp8 q, fp8 math"]], ids=["bf16", "fp8", "fp8 math"])
def test_the_call_lives_inside_torch_compile(device, kind):
    problem = build(Case((100, 65), heads=16, seed=9, **kind), device)
    schedule = DecodeSchedule(2, 16, device=device).build(problem.seq_lens)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(scale):
        out, lse = decode(problem, schedule)
        return out * scale, lse

    wanted = decode(problem, schedule)
    assert all(torch.equal(a, b) for a, b in zip(layer(torch.ones((), device=device)), wanted, strict=True))

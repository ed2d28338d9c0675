"""The sparse call against float64: the compiled kernels on a Hopper GPU, the executor on the CPU.

Both take the same tests; the CPU's problems are smaller and fewer: every value of every parameter, not every
combination. Every case runs several times on poisoned outputs and workspace, between guard bytes, and must give the
same bits each time.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from sparse_refusals import REFUSALS

from etap_backend import sparse_mla_decode, sparse_workspace_floats
from support.cases import LAWS, SOFTMAX_SCALE
from support.covering import both_devices, on_devices
from support.held_sms import sms_held
from support.sparse_cases import (
    CACHE_LAYOUTS,
    CACHES,
    COUNTS,
    HOLES,
    OUT_LAYOUTS,
    Q_LAYOUTS,
    SCALE_LAWS,
    SINKS,
    RecordedCall,
    SparseCase,
    SparseRunner,
    build,
    decode,
)
from support.sparse_compare import check, truth

ROWS = ("bf16", "fp8", "v4")
every_cache = pytest.mark.parametrize("cache", ROWS)
EVERYTHING = {"holes": "wild", "counts": "drawn", "sinks": "infinite"}
RUNS = {"cpu": 2, "cuda": 3}


def verify(case: SparseCase, device: str) -> None:
    problem = build(case, device)
    runner = SparseRunner(problem)
    first = [result.clone() for result in runner.run()]
    check(*first, problem, truth(problem))
    found = runner.differences(first, (torch.nan,) * (RUNS[device] - 1))
    assert not found, "\n".join([*found, f"the case: {case!r}"])


HEADS = (1, 5, 8, 12, 16, 24, 32, 64, 96, 128)
ROW_TILES = (8, 16, 32, 64)
TOKENS = (0, 1, 2, 7, 16, 33, 130, 300)
TOP_KS = (1, 63, 64, 65, 100, 128, 512, 2048)


@on_devices({"cache": ROWS, "heads": HEADS, "tokens": TOKENS}, cpu={"tokens": (0, 1, 3, 7, 33)})
def test_heads_and_tokens(device, heads, tokens, cache):
    verify(SparseCase(tokens, heads, {"cpu": 65, "cuda": 512}[device], cache, seed=1, **EVERYTHING), device)


@on_devices(
    {"cache": ROWS, "heads": ROW_TILES, "tokens": (1, 2, 7, 33, 300), "top_k": TOP_KS}, cpu={"tokens": (1, 2, 3)}
)
def test_lengths_of_lists(device, heads, tokens, top_k, cache):
    verify(SparseCase(tokens, heads, top_k, cache, seed=2), device)


@on_devices({
    "cache": ROWS, "requests": (0, 3), "counts": COUNTS, "holes": HOLES, "heads": (16, 64), "tokens": (33, 150),
}, cpu={"heads": (12,), "tokens": (6,)}, together=2)  # fmt: skip
def test_what_lists_may_hold(device, heads, tokens, holes, counts, requests, cache):
    case = SparseCase(tokens, heads, 200, cache, holes=holes, counts=counts, requests=requests, seed=3)
    verify(case, device)
    verify(replace(case, repeats=True), device)


@on_devices({"cache": ROWS, "law": LAWS, "heads": ROW_TILES, "tokens": (3, 40)}, cpu={"tokens": (3,)})
def test_input_laws(device, heads, tokens, law, cache):
    verify(SparseCase(tokens, heads, 520, cache, law=law, seed=4), device)


@on_devices({
    "cache": ("fp8", "v4"), "scales": SCALE_LAWS, "law": ("normal", "outliers", "dominating"), "heads": ROW_TILES,
    "tokens": (3, 40),
}, cpu={"heads": (16,), "tokens": (3,)}, together=2)  # fmt: skip
def test_scales_of_rows(device, heads, tokens, law, scales, cache):
    verify(SparseCase(tokens, heads, 300, cache, law=law, scales=scales, sinks="drawn", seed=5), device)


@on_devices({
    "cache": CACHES, "requests": (0, 2), "page_size": (1, 2, 64, 100, 256), "cache_layout": CACHE_LAYOUTS,
})  # fmt: skip
def test_layouts_of_the_cache(device, cache_layout, page_size, requests, cache):
    layout = {"cache_layout": cache_layout, "page_size": page_size}
    verify(SparseCase(4, 8, 130, cache, holes="wild", requests=requests, seed=6, **layout), device)


@on_devices({"cache": ROWS, "q_layout": Q_LAYOUTS, "heads": (1, 12, 16, 64, 100)})
def test_layouts_of_the_queries(device, heads, q_layout, cache):
    verify(SparseCase(4, heads, 70, cache, q_layout=q_layout, seed=7), device)


@on_devices({
    "cache": ("bf16", "fp8"), "q_layout": ("packed", "strided"), "page_size": (1, 64), "heads": HEADS,
    "tokens": (1, 7, 130),
}, cpu={"heads": (1, 16, 64), "tokens": (3,)})  # fmt: skip
def test_rows_without_rope(device, heads, tokens, page_size, q_layout, cache):
    layout = {"page_size": page_size, "q_layout": q_layout}
    verify(SparseCase(tokens, heads, 150, cache, rope=False, seed=18, **layout, **EVERYTHING), device)
    verify(SparseCase(tokens, heads, 150, cache, rope=False, seed=19, law="dominating", scales="mixed"), device)


@on_devices({
    "cache": ROWS, "top_k, extra": [(128, 512), (100, 130), (1, 65), (0, 70), (70, 0), (0, 0)],
    "heads": (8, 16, 32, 64, 128), "tokens": (1, 4, 16, 64, 131),
}, cpu={"heads": (8,), "tokens": (3,)})  # fmt: skip
def test_one_softmax_over_two_lists(device, heads, tokens, top_k, extra, cache):
    case = SparseCase(tokens, heads, top_k, cache, extra=extra, extra_page_size=2, out_layout="sliced", seed=50)
    verify(case, device)
    verify(replace(case, seed=51, **EVERYTHING), device)
    verify(replace(case, page_size=256, extra_page_size=64, counts="drawn", num_sms=7, seed=52), device)


@on_devices({
    "cache": ROWS, "holes": HOLES, "requests, extra_requests": [(0, 3), (3, 0), (2, 3), (3, 2)],
})  # fmt: skip
def test_each_list_is_of_rows_or_of_positions(device, requests, extra_requests, holes, cache):
    lists = {"requests": requests, "extra": 150, "extra_requests": extra_requests, "extra_page_size": 61}
    verify(SparseCase(7, 16, 100, cache, holes=holes, counts="drawn", seed=53, **lists), device)


@on_devices({"cache": ROWS, "holes": ("none", "all"), "num_sms": (1, 7, 132)})
def test_a_list_of_no_valid_entries_changes_nothing(device, num_sms, holes, cache):
    """Either list, of any width."""
    problem = build(SparseCase(5, 12, 128, cache, extra=704, holes=holes, seed=54), device)
    nothing, everything = (torch.full((5,), count, dtype=torch.int32, device=device) for count in (-3, 2**31 - 1))
    for counts, extra_counts in ((everything, nothing), (nothing, everything), (nothing, nothing)):
        one = replace(problem, valid_counts=counts, extra_valid_counts=extra_counts)
        one.meant = problem.meant if counts is everything else torch.full_like(problem.meant, -1)
        one.extra_meant = problem.extra_meant if extra_counts is everything else torch.full_like(one.extra_meant, -1)
        results = [x.clone() for x in decode(one, num_sms=num_sms)]
        check(*results, one, truth(one))
        emptied = replace(one, valid_counts=None, extra_valid_counts=None)
        emptied.indices = one.indices if counts is everything else torch.full_like(one.indices, -1)
        emptied.extra_indices = (
            one.extra_indices if extra_counts is everything else torch.full_like(one.extra_indices, -1)
        )
        check(*decode(emptied, num_sms=num_sms), emptied, truth(one))


@on_devices({
    "cache": ROWS, "q_layout": Q_LAYOUTS, "out_layout": ("sliced", "transposed"), "heads": (1, 16, 64, 100),
    "num_sms": (1, 132),
})  # fmt: skip
def test_layouts_of_the_output(device, num_sms, heads, q_layout, out_layout, cache):
    layouts = dict(q_layout=q_layout, out_layout=out_layout)
    verify(SparseCase(4, heads, 130, cache, num_sms=num_sms, seed=55, **layouts), device)


@on_devices({"cache": ROWS, "sinks": SINKS, "holes": ("none", "all"), "num_sms": (1, 132)})
def test_sinks_of_whole_and_of_split_lists(device, num_sms, holes, sinks, cache):
    verify(SparseCase(4, 12, 512, cache, sinks=sinks, holes=holes, num_sms=num_sms, seed=8), device)


@on_devices(
    {
        "cache": ROWS,
        "num_sms": (132, 78, 60, 16, 7, 2, 1),
        "heads": (8, 16, 32, 64, 128),
        "tokens": (1, 3, 20, 131, 264),
    },
    cpu={"heads": (8, 128), "tokens": (1, 3, 20)},
)
def test_numbers_of_multiprocessors(device, heads, tokens, num_sms, cache):
    verify(SparseCase(tokens, heads, 200, cache, num_sms=num_sms, seed=9, **EVERYTHING), device)


@on_devices({
    "cache": ROWS, "holes": ("wild", "tail", "all"), "heads": (1, 8, 16, 32, 40, 128),
    "tokens": (5, 8, 9, 16, 28, 32, 60, 64),
}, cpu={"heads": (12,), "tokens": (16,)})  # fmt: skip
def test_splits_that_clusters_sum(device, heads, tokens, holes, cache):
    """8, 4 and 2 splits per token on 132 multiprocessors, some without entries; some that are combined."""
    top_k = {"cpu": 512, "cuda": 2048}[device]
    case = SparseCase(tokens, heads, top_k, cache, holes=holes, counts="drawn", sinks="infinite", num_sms=132, seed=21)
    verify(case, device)
    verify(replace(case, counts="none", sinks="none", requests=3), device)


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("tokens", [3, 6, 8, 16, 32, 64])
def test_calls_end_beside_a_kernel_that_holds_three_sms_of_each_gpc(tokens, cache):
    """As a communication kernel that itself waits for another GPU may do: a cluster still finds its room."""
    runner = SparseRunner(build(SparseCase(tokens, 16, 2048, cache, seed=24), "cuda"))
    first = [result.clone() for result in runner.run()]
    assert not runner.differences(first, (torch.nan,))  # nothing is loaded later, which would wait for all that runs
    with sms_held(24) as holding:
        found = runner.differences(first, (torch.nan,) * 3)
        assert not found and not holding.query(), (found, "or the call waited for the SMs that were held")


# Whole lists, splits that are combined, clusters of up to 32 heads.
@on_devices({"cache": ROWS, "heads": ROW_TILES, "num_sms": (1, 7, 132)})
def test_tokens_of_no_row_have_the_requested_log_sum_exp(device, num_sms, heads, cache):
    problem = build(SparseCase(8, heads, 1024, cache, holes="all", sinks="infinite", num_sms=num_sms, seed=23), device)
    problem.call_q[-1, 0] = torch.nan
    out, lse = decode(problem, num_sms=num_sms)
    assert lse.isneginf().any() and lse[-1, 0].isnan()
    other_out, other_lse = decode(problem, num_sms=num_sms, empty_lse=math.inf)
    assert torch.equal(other_out.view(torch.uint8), out.view(torch.uint8))
    wanted = lse.masked_fill(lse.isneginf(), math.inf)
    assert torch.equal(other_lse.view(torch.int32), wanted.view(torch.int32))


@on_devices({"cache": ROWS})
def test_more_clusters_than_a_gpu_has_room_for(device, cache):
    verify(SparseCase(60, 16, 512, cache, num_sms=1000, seed=22, **EVERYTHING), device)


@pytest.mark.gpu
@every_cache
def test_a_green_context_has_room_for_fewer_clusters(cache):
    """8 clusters of 8 CTAs fit on any card, whose groups of SMs differ; of 16 SMs a second kernel combines splits."""
    problem = build(SparseCase(8, 16, 2048, cache, num_sms=64, seed=24), "cuda")
    runner, wanted = SparseRunner(problem), truth(problem)

    def kernels(stream: torch.cuda.Stream) -> list[str]:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile, torch.cuda.stream(stream):
            out, lse = runner.run()
            stream.synchronize()
        check(out, lse, problem, wanted)
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return [name for name in names if "etap" in name]

    whole, few = torch.cuda.current_stream(), torch.cuda.green_contexts.GreenContext.create(num_sms=16, device_id=0)
    assert len(kernels(whole)) == 1
    assert len(kernels(few.Stream())) == 2
    assert len(kernels(whole)) == 1


@on_devices({"seed": range(200)}, cpu={"seed": range(16)})
def test_random_cases(device, seed):
    draw = random.Random(seed)
    case = SparseCase(
        tokens=draw.choice({"cpu": (1, 2, 3, 7), "cuda": TOKENS}[device]),
        heads=draw.choice(HEADS),
        top_k=draw.choice({"cpu": TOP_KS[:-2], "cuda": TOP_KS}[device]),
        cache=draw.choice(CACHES),
        page_size=draw.choice([1, 2, 16, 64, 100]),
        law=draw.choice(LAWS),
        scales=draw.choice(SCALE_LAWS),
        holes=draw.choice(HOLES),
        counts=draw.choice(COUNTS),
        sinks=draw.choice(SINKS),
        repeats=draw.random() < 0.2,
        requests=draw.choice([0, 0, 1, 4]),
        q_layout=draw.choice(Q_LAYOUTS),
        cache_layout=draw.choice(CACHE_LAYOUTS),
        num_sms=draw.choice([None, 132, 78, 5, 1]),
        seed=100 + seed,
        extra=draw.choice([None, None, 0, 64, 130]),
        extra_page_size=draw.choice([1, 2, 64, 256]),
        extra_requests=draw.choice([0, 0, 3]),
        out_layout=draw.choice(OUT_LAYOUTS),
    )
    verify(case, device)


@on_devices({"cache": ROWS, "heads": (16, 64), "num_sms": (7, 132)})
def test_a_tokens_bits_do_not_depend_on_its_company(device, cache, heads, num_sms):
    """The other tokens' lists, counts and queries may hold anything."""
    problem = build(SparseCase(9, heads, 200, cache, counts="drawn", sinks="drawn", extra=100, seed=9), device)
    out, lse = decode(problem, num_sms=num_sms)
    lists = ("indices", "valid_counts", "extra_indices", "extra_valid_counts")
    for kept in (0, 4, 8):
        others = torch.arange(9, device=device) != kept
        changed = replace(problem, call_q=problem.q.clone(), **{name: getattr(problem, name).clone() for name in lists})
        changed.call_q[others] = torch.nan
        changed.indices[others], changed.extra_indices[others] = problem.indices[kept], problem.extra_indices[kept]
        changed.valid_counts[others], changed.extra_valid_counts[others] = 150, 70
        some_out, some_lse = decode(changed, num_sms=num_sms)
        assert torch.equal(some_out[kept], out[kept]) and torch.equal(some_lse[kept], lse[kept])
        assert not torch.equal(some_out[others], out[others])


@on_devices({"cache": ROWS})
def test_outputs_and_workspace_are_allocated_when_not_given(device, cache):
    problem = build(SparseCase(5, 12, 300, cache, seed=10), device)
    wanted = [result.clone() for result in SparseRunner(problem).run()]
    got = decode(problem)
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@on_devices({"cache": ROWS})
def test_nothing_to_do(device, cache):
    for tokens, heads in ((0, 16), (3, 0)):
        problem = build(SparseCase(tokens, heads, 65, cache, extra=3), device)
        out, lse = decode(problem)
        assert out.shape == (tokens, heads, 512) and lse.shape == (tokens, heads)


@on_devices({"cache": ROWS})
def test_the_call_lives_inside_torch_compile(device, cache):
    problem = build(SparseCase(5, 16, 130, cache, holes="anywhere", requests=2, extra=70, seed=11), device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(scale):
        out, lse = decode(problem)
        return out * scale, lse

    wanted = decode(problem)
    assert all(torch.equal(a, b) for a, b in zip(layer(torch.ones((), device=device)), wanted, strict=True))


@both_devices
def test_a_prompts_tokens(device):
    """As many tokens as an engine passes with a prompt: the one at position t sees t + 1 rows."""
    tokens, heads = {"cpu": (70, 2), "cuda": (3000, 16)}[device]
    case = SparseCase(tokens, heads, 64, requests=1, seed=12)
    problem = build(case, device)
    problem.valid_counts = torch.arange(tokens, dtype=torch.int32, device=device) + 1
    problem.meant[torch.arange(64, device=device) >= problem.valid_counts[:, None]] = -1
    check(*SparseRunner(problem).run(), problem, truth(problem))


@pytest.mark.gpu
def test_refused_calls_leave_everything_usable():
    for refusal in REFUSALS:
        with pytest.raises(refusal.error):
            refusal.call("cuda")
    verify(SparseCase(5, 16, 130, seed=13), "cuda")


@pytest.mark.gpu
@every_cache
def test_cache_rows_beyond_2_to_the_31_bytes_and_elements(cache):
    case = SparseCase(20, 16, 2048, cache, pool_pages=75_000, extra=100, seed=14)
    assert case.pool_pages * case.page_size * case.row_width > 2**31
    verify(case, "cuda")
    verify(replace(case, requests=3), "cuda")


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("requests", [0, 1])
def test_pages_far_apart(cache, requests):
    """Rows of few pages; the last one begins more than 2^32 bytes and 2^31 elements behind the first."""
    verify(SparseCase(20, 16, 1024, cache, requests=requests, pool_pages=40, far_pages=True, seed=15), "cuda")
    verify(SparseCase(20, 16, 64, cache, extra=1024, extra_requests=requests, pool_pages=40, far_pages=True), "cuda")


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_many_runs_of_ctas_with_many_splits(heads, cache):
    """The warpgroups' hand-over from split to split depends on timing."""
    runner = SparseRunner(build(SparseCase(300, heads, 100, cache, num_sms=20, seed=16, **EVERYTHING), "cuda"))
    first = [result.clone() for result in runner.run()]
    assert runner.differences(first, (torch.nan,) * 60) == []


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("requests", [0, 3], ids=["rows", "positions"])
@pytest.mark.parametrize("heads, top_k", [(16, 512), (16, 448), (128, 512)])  # in clusters of 8; combined
@pytest.mark.parametrize("extra", [None, 512])
def test_one_graph_serves_other_lists(extra, heads, top_k, requests, cache):
    lists = {"requests": requests, "counts": "drawn", "extra": extra, "extra_page_size": 2}
    case = SparseCase(16, heads, top_k, cache, sinks="drawn", **lists)
    problems = [build(replace(case, holes=holes, seed=20 + i), "cuda") for i, holes in enumerate(HOLES)]
    recorded = RecordedCall(problems[0])
    for problem in [*problems, *problems[::-1]]:
        results = recorded.replay(problem)
        check(*results, problem, truth(problem))
        recorded.runner.check_guards()
        assert all(torch.equal(got, plain) for got, plain in zip(results, decode(problem), strict=True))


@pytest.mark.gpu
@every_cache
def test_layers_of_one_graph_share_a_workspace(cache):
    """The next layer's kernels may start while the last layer's finish: shared buffers must allow that."""
    layers = [build(SparseCase(6, 16, 512, cache, seed=30 + layer), "cuda") for layer in range(8)]
    shared = torch.empty(sparse_workspace_floats(16, 132), device="cuda")
    results = [decode(problem, workspace=shared, num_sms=132) for problem in layers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode(problem, workspace=shared, num_sms=132) for problem in layers]
    for _ in range(5):
        for result in (result for both in results for result in both):
            result.fill_(torch.nan)
        graph.replay()
    for problem, (out, lse) in zip(layers, results, strict=True):
        check(out, lse, problem, truth(problem))


@pytest.mark.gpu
@every_cache
def test_the_call_allocates_nothing_and_waits_for_nothing(cache):
    problem = build(SparseCase(6, 16, 512, cache, requests=2, counts="drawn", sinks="drawn", seed=40), "cuda")
    runner = SparseRunner(problem)
    runner.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(200_000_000)
    busy = torch.cuda.Event()
    busy.record()
    for _ in range(10):
        runner.call()
    assert not busy.query(), "the host waited for the GPU"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@every_cache
def test_a_call_launches_its_kernels_and_nothing_else(cache):
    runner = SparseRunner(build(SparseCase(6, 16, 512, cache, sinks="drawn", seed=41), "cuda"))
    runner.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.call()
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(launched) <= 2 and all("etap" in name for name in launched), launched


@pytest.mark.gpu
@every_cache
def test_the_current_stream_is_used(cache):
    """On any other stream the call would run before its inputs are there."""
    problem = build(SparseCase(6, 16, 512, cache, seed=42), "cuda")
    static = replace(problem, indices=torch.full_like(problem.indices, -1))
    runner = SparseRunner(static)
    runner.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        static.indices.copy_(problem.indices)
        runner.call()
    stream.synchronize()
    check(runner.out.tensor, runner.lse.tensor, problem, truth(problem))


@pytest.fixture
def bfloat16_by_default():
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(before)


@on_devices({"cache": ROWS})
def test_torchs_default_type_changes_nothing(device, cache, bfloat16_by_default):
    """Engines set it to the model's while they build it."""
    problem = build(SparseCase(4, 16, 300, cache, sinks="drawn", seed=44), device)
    wanted = decode(problem)
    bfloat16_by_default()
    assert all(torch.equal(got, want) for got, want in zip(decode(problem), wanted, strict=True))


@both_devices
def test_the_calls_softmax_scale_counts(device):
    problem = build(SparseCase(3, 16, 100, seed=43), device)
    out, lse = decode(problem)
    doubled = replace(problem, call_q=problem.q * 2)
    same = sparse_mla_decode(doubled.call_q, problem.kv_cache, problem.indices, softmax_scale=SOFTMAX_SCALE / 2)
    assert torch.equal(same[0], out) and torch.equal(same[1], lse)

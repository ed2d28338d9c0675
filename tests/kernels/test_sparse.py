"""The sparse call against float64: the compiled kernels on a Hopper GPU, the executor on the CPU.

Both take the same tests; the CPU's problems are smaller. Every case runs three times on poisoned outputs and workspace,
between guard bytes, and must give the same bits each time.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sparse_refusals import REFUSALS

from etap_backend import sparse_mla_decode, sparse_workspace_floats
from etap_backend.lab.checks.cases import LAWS, SOFTMAX_SCALE
from etap_backend.lab.checks.sparse_cases import (
    CACHE_LAYOUTS,
    COUNTS,
    HOLES,
    Q_LAYOUTS,
    SCALE_LAWS,
    SINKS,
    SparseCase,
    SparseRunner,
    build,
    decode,
)
from etap_backend.lab.checks.sparse_compare import check, truth
from etap_backend.support import SPARSE_FP8_ROW_BYTES

both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_cache = pytest.mark.parametrize("cache", ["bf16", "fp8"])
EVERYTHING = {"holes": "wild", "counts": "drawn", "sinks": "infinite"}


def verify(case: SparseCase, device: str) -> None:
    problem = build(case, device)
    runner = SparseRunner(problem)
    first = [result.clone() for result in runner.run()]
    check(*first, problem, truth(problem))
    for run in (2, 3):
        for name, result, before in zip(("out", "lse"), runner.run(), first, strict=True):
            same = torch.equal(result.view(torch.uint8), before.view(torch.uint8))
            assert same, f"{name}: run {run} gave other bits than run 1\nthe case: {case!r}"
    runner.check_guards()


def smaller(device: str, case: SparseCase, most: int = 2**20) -> SparseCase:
    """On the CPU with fewer tokens where heads, entries and tokens make too much of it."""
    if device == "cuda":
        return case
    return replace(case, tokens=max(1, min(case.tokens, most // (case.heads * case.top_k))))


@both_devices
@every_cache
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 16, 33, 130, 300])
@pytest.mark.parametrize("heads", [1, 5, 8, 12, 16, 24, 32, 64, 96, 128])
def test_heads_and_tokens(device, cache, heads, tokens):
    top_k = {"cpu": 65 if heads * tokens < 2000 else 3, "cuda": 512}[device]
    verify(SparseCase(tokens, heads, top_k, cache, seed=1, **EVERYTHING), device)


@both_devices
@every_cache
@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 100, 128, 512, 2048])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 300])
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_lists(device, cache, heads, tokens, top_k):
    verify(smaller(device, SparseCase(tokens, heads, top_k, cache, seed=2)), device)


@both_devices
@every_cache
@pytest.mark.parametrize("requests", [0, 3], ids=["rows", "positions"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("heads", [16, 64])
def test_what_lists_may_hold(device, cache, heads, holes, counts, requests):
    case = SparseCase(33, heads, 300, cache, holes=holes, counts=counts, requests=requests, seed=3)
    verify(smaller(device, case, 2**17), device)
    verify(replace(smaller(device, case, 2**17), repeats=True), device)


@both_devices
@every_cache
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_input_laws(device, cache, heads, law):
    verify(smaller(device, SparseCase(20, heads, 520, cache, law=law, seed=4), 2**17), device)


@both_devices
@pytest.mark.parametrize("scales", SCALE_LAWS)
@pytest.mark.parametrize("law", ["normal", "outliers", "dominating"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_scales_of_rows(device, heads, law, scales):
    case = SparseCase(20, heads, 300, "fp8", law=law, scales=scales, holes="tail", sinks="drawn", seed=5)
    verify(smaller(device, case, 2**17), device)


@both_devices
@pytest.mark.parametrize("cache", ["bf16", "fp8", "fp8 as e4m3"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS)
@pytest.mark.parametrize("q_layout", Q_LAYOUTS)
def test_layouts(device, cache, page_size, cache_layout, q_layout):
    layouts = {"page_size": page_size, "cache_layout": cache_layout, "q_layout": q_layout}
    for requests in (0, 2):
        verify(SparseCase(5, 16, 130, cache, holes="wild", requests=requests, seed=6, **layouts), device)


@both_devices
@every_cache
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("holes", ["none", "all"])
@pytest.mark.parametrize("num_sms", [1, 132])
def test_sinks_of_whole_and_of_split_lists(device, cache, num_sms, holes, sinks):
    verify(SparseCase(4, 12, 512, cache, sinks=sinks, holes=holes, num_sms=num_sms, seed=7), device)


@both_devices
@every_cache
@pytest.mark.parametrize("num_sms", [132, 78, 7, 2, 1])
@pytest.mark.parametrize("tokens", [1, 3, 20, 131])
@pytest.mark.parametrize("heads", [16, 128])
def test_numbers_of_multiprocessors(device, cache, heads, tokens, num_sms):
    case = SparseCase(tokens, heads, 200, cache, num_sms=num_sms, seed=8, **EVERYTHING)
    verify(smaller(device, case, 2**18), device)


@both_devices
@pytest.mark.parametrize("seed", range(60))
def test_random_cases(device, seed):
    draw = random.Random(seed)
    on_cpu = device == "cpu"
    case = SparseCase(
        tokens=draw.choice([1, 2, 3, 7] if on_cpu else [1, 2, 7, 16, 33, 130, 300]),
        heads=draw.choice([1, 5, 8, 12, 16, 24, 32, 64, 100, 128]),
        top_k=draw.choice([1, 63, 64, 65, 100, 128] + [512, 2048] * (not on_cpu)),
        cache=draw.choice(["bf16", "fp8", "fp8 as e4m3"]),
        page_size=draw.choice([1, 16, 64, 100]),
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
    )
    verify(case, device)


@both_devices
@every_cache
@pytest.mark.parametrize("heads", [16, 64])
def test_a_tokens_bits_do_not_depend_on_its_company(device, cache, heads):
    """Neither on what the other tokens' lists, counts and queries hold, nor on how often the call was made."""
    problem = build(SparseCase(9, heads, 200, cache, counts="drawn", sinks="drawn", seed=9), device)
    out, lse = decode(problem, num_sms=7)
    for kept in (0, 4, 8):
        others = torch.arange(9, device=device) != kept
        changed = replace(problem, call_q=problem.q.clone(), indices=problem.indices.clone())
        changed.valid_counts = problem.valid_counts.clone()
        changed.call_q[others] = torch.nan
        changed.indices[others] = problem.indices[kept]
        changed.valid_counts[others] = 150
        some_out, some_lse = decode(changed, num_sms=7)
        assert torch.equal(some_out[kept], out[kept]) and torch.equal(some_lse[kept], lse[kept])
        assert not torch.equal(some_out[others], out[others])


@both_devices
@every_cache
def test_outputs_and_workspace_are_allocated_when_not_given(device, cache):
    problem = build(SparseCase(5, 12, 300, cache, seed=10), device)
    wanted = [result.clone() for result in SparseRunner(problem).run()]
    got = decode(problem)
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@both_devices
@every_cache
def test_nothing_to_do(device, cache):
    for tokens, heads in ((0, 16), (3, 0), (0, 0)):
        problem = build(SparseCase(tokens, heads, 65, cache), device)
        out, lse = decode(problem)
        assert out.shape == (tokens, heads, 512) and lse.shape == (tokens, heads)


@both_devices
@every_cache
def test_the_call_lives_inside_torch_compile(device, cache):
    problem = build(SparseCase(5, 16, 130, cache, holes="anywhere", requests=2, seed=11), device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(scale):
        out, lse = decode(problem)
        return out * scale, lse

    wanted = decode(problem)
    assert all(torch.equal(a, b) for a, b in zip(layer(torch.ones((), device=device)), wanted, strict=True))


@both_devices
def test_a_prompts_tokens(device):
    """As many rows as an engine hands over with a prompt, each with what it may see: position t sees t + 1 others."""
    tokens, heads = {"cpu": (70, 2), "cuda": (3000, 16)}[device]
    case = SparseCase(tokens, heads, 64, requests=1, seed=12)
    problem = build(case, device)
    problem.valid_counts = torch.arange(tokens, dtype=torch.int32, device=device) + 1
    problem.meant[torch.arange(64, device=device) >= problem.valid_counts[:, None]] = -1
    check(*SparseRunner(problem).run(), problem, truth(problem))


@both_devices
def test_refused_calls_leave_everything_usable(device):
    for refusal in REFUSALS:
        with pytest.raises(refusal.error):
            refusal.call(device)
    verify(SparseCase(5, 16, 130, seed=13), device)


@pytest.mark.gpu
@every_cache
def test_cache_rows_beyond_2_to_the_31_bytes_and_elements(cache):
    case = SparseCase(20, 16, 2048, cache, pool_pages=75_000, seed=14)
    assert case.pool_pages * case.page_size * (SPARSE_FP8_ROW_BYTES if case.fp8 else 576) > 2**31
    verify(case, "cuda")
    verify(replace(case, requests=3), "cuda")


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("requests", [0, 1])
def test_pages_far_apart(cache, requests):
    """Rows of few pages, the last of them more than 2^31 bytes and elements behind the first."""
    verify(SparseCase(20, 16, 1024, cache, requests=requests, pool_pages=40, far_pages=True, seed=15), "cuda")


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_many_runs_of_ctas_with_many_pieces(heads, cache):
    """What the warpgroups hand each other from piece to piece depends on timing."""
    runner = SparseRunner(build(SparseCase(300, heads, 100, cache, num_sms=20, seed=16, **EVERYTHING), "cuda"))
    first = [result.clone() for result in runner.run()]
    for run in range(60):
        for name, result, before in zip(("out", "lse"), runner.run(), first, strict=True):
            assert torch.equal(result.view(torch.uint8), before.view(torch.uint8)), f"{name}: run {run} differs"


class Recorded:
    """A graph of the call on buffers of its own; `load` puts another problem of the same shapes into them."""

    def __init__(self, problem):
        tensors = {name: x.clone() for name, x in vars(problem).items() if isinstance(x, torch.Tensor)}
        self.static = replace(problem, **tensors, call_q=problem.q.clone(), call_q_rope=None)
        self.runner = SparseRunner(self.static)
        self.runner.run()  # as engines do, so that nothing is loaded while recording
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.runner.call()

    def load(self, problem) -> None:
        self.runner.poison()
        self.static.call_q.copy_(problem.q)
        for name in ("kv_cache", "indices", "block_table", "request_ids", "valid_counts", "sinks"):
            if (there := getattr(problem, name)) is not None:
                getattr(self.static, name).copy_(there)


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("requests", [0, 3], ids=["rows", "positions"])
@pytest.mark.parametrize("heads", [16, 128])
def test_one_graph_serves_other_lists(heads, requests, cache):
    case = SparseCase(16, heads, 512, cache, requests=requests, counts="drawn", sinks="drawn")
    problems = [build(replace(case, holes=holes, seed=20 + i), "cuda") for i, holes in enumerate(HOLES)]
    recorded = Recorded(problems[0])
    for problem in [*problems, *problems[::-1]]:
        recorded.load(problem)
        recorded.graph.replay()
        check(recorded.runner.out.tensor, recorded.runner.lse.tensor, problem, truth(problem))
        recorded.runner.check_guards()
        plain = decode(problem)
        assert torch.equal(recorded.runner.out.tensor, plain[0]) and torch.equal(recorded.runner.lse.tensor, plain[1])


@pytest.mark.gpu
@every_cache
def test_layers_of_one_graph_share_a_workspace(cache):
    """The next layer's kernels may start while the last one's finish: what they share must stand that."""
    layers = [build(SparseCase(6, 16, 512, cache, seed=30 + layer), "cuda") for layer in range(8)]
    shared = torch.empty(sparse_workspace_floats(16, cache == "fp8", 132), device="cuda")
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
def test_a_call_launches_our_kernels_and_nothing_else(cache):
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


@both_devices
def test_the_softmax_scale_is_that_of_the_call(device):
    problem = build(SparseCase(3, 16, 100, seed=43), device)
    out, lse = decode(problem)
    doubled = replace(problem, call_q=problem.q * 2)
    same = sparse_mla_decode(doubled.call_q, problem.kv_cache, problem.indices, softmax_scale=SOFTMAX_SCALE / 2)
    assert torch.equal(same[0], out) and torch.equal(same[1], lse)

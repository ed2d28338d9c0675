"""Calls as engines make them: recorded in a CUDA graph, replayed with other lengths, on any stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from etap_backend import DecodeSchedule
from support.cases import WILD_PAGES, Case, Guarded, Problem, build, decode, stacked_from
from support.compare import check, truth
from support.held_sms import sms_held

pytestmark = pytest.mark.gpu

FP8_CACHE = {"kv_dtype": "fp8", "kv_scale": 0.0137}
CACHES = {"bf16": {}, "fp8": FP8_CACHE, "fp8 math": {**FP8_CACHE, "fp8_math": True}}
every_cache = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)

REPLAYS = 100_000  # with each cache, in equal parts
HELD_SMS = (1, 24, 100)
STRESS_REPLAYS = int(os.environ.get("ETAP_STRESS_REPLAYS", "10000"))
"""Replays of each case beside foreign traffic: the emulator sees neither time nor weak memory ordering."""
POOL_PAGES = 400
BATCHES = [
    (700, 64, 5000, 1, 0, 300),
    (0, 0, 0, 0, 0, 0),
    (12_000, 1, 1, 1, 1, 1),
    (65,) * 6,
    (1, 63, 127, 191, 255, 319),
]


class Recorded:
    """Buffers that a graph was recorded with; `load` puts another problem of the same batch into them."""

    def __init__(self, problem: Problem, num_sms: int | None = None):
        case, batch = problem.case, len(problem.case.lengths)
        shared = bool(case.prefixes)
        self.schedule = DecodeSchedule(batch, case.heads, max_s_q=case.s_q, num_sms=num_sms, shared_prefix=shared)
        self.out = Guarded(problem.q.shape[:3] + (512,), case.out_dtype, "cuda")
        self.lse = Guarded(problem.q.shape[:3], torch.float32, "cuda")
        wild = torch.tensor(WILD_PAGES, dtype=torch.int32, device="cuda")
        self.table = wild.repeat(batch, POOL_PAGES // len(WILD_PAGES))
        self.wild = self.table.clone()
        self.static = replace(
            problem, call_q=problem.q.clone(), kv_cache=problem.kv_cache.clone(), seq_lens=problem.seq_lens.clone()
        )
        self.static.block_table = self.table
        self.load(problem)

    def load(self, problem: Problem):
        for guarded in (self.out, self.lse):
            guarded.poison()
        self.schedule.workspace.fill_(torch.nan)
        self.table.copy_(self.wild)
        self.table[:, : problem.block_table.shape[1]] = problem.block_table
        self.static.call_q.copy_(problem.q)
        self.static.kv_cache.copy_(problem.kv_cache)
        self.static.seq_lens.copy_(problem.seq_lens)

    def build(self):
        pages = dict(block_table=self.table, page_size=self.static.case.page_size)
        with stacked_from(0):
            self.planned = self.schedule.build(self.static.seq_lens, self.static.case.s_q, **pages)

    def decode(self):
        decode(self.static, self.planned, out=self.out.tensor, lse=self.lse.tensor)

    def record(self, *steps) -> torch.cuda.CUDAGraph:
        """A graph of the steps; they run once before, as engines do, so that nothing is loaded while recording."""
        self.build()
        for step in steps:
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        return graph

    def check(self, problem: Problem):
        check(self.out.tensor, self.lse.tensor, problem, truth(problem))
        self.out.check("out")
        self.lse.check("lse")


def problems(heads: int, s_q: int, **cache) -> list[Problem]:
    cases = [
        Case(lengths, heads, s_q, pool_pages=POOL_PAGES, seed=50 + i, **cache) for i, lengths in enumerate(BATCHES)
    ]
    return [build(case, "cuda") for case in cases]


@every_cache
@pytest.mark.parametrize("where", ["schedule built before each replay", "schedule built in the graph"])
@pytest.mark.parametrize("heads, s_q", [(16, 1), (16, 2), (128, 1)])
def test_one_graph_serves_other_lengths(heads, s_q, where, cache):
    batches = problems(heads, s_q, **cache)
    recorded = Recorded(batches[0])
    inside = where == "schedule built in the graph"
    graph = recorded.record(*[recorded.build] * inside, recorded.decode)
    for problem in [*batches, *batches[::-1]]:
        recorded.load(problem)
        if not inside:
            recorded.build()
        graph.replay()
        recorded.check(problem)


@every_cache
@pytest.mark.parametrize("heads, s_q, num_sms", [(16, 1, 132), (8, 2, 132), (8, 1, 78)])
def test_one_graph_serves_steps_whose_sharing_comes_and_goes(heads, s_q, num_sms, cache):
    steps = [
        ((2000, 1500, 1200, 1400, 700, 900), ((4, 1100), (2, 600))),
        ((700, 64, 5000, 1, 0, 300), ((1, 0),)),
        ((700, 5000, 900, 701, 3000, 2000), ((6, 640),)),
        ((3000, 1, 3000, 3000, 3001, 64), ((1, 0), (1, 0), (3, 2900))),
    ]
    cases = [
        Case(lengths, heads, s_q, pool_pages=POOL_PAGES, prefixes=prefixes, seed=70 + i, **cache)
        for i, (lengths, prefixes) in enumerate(steps)
    ]
    batches = [build(case, "cuda") for case in cases]
    recorded = Recorded(batches[0], num_sms)
    graph = recorded.record(recorded.build, recorded.decode)
    for problem in [*batches, *batches[::-1]]:
        recorded.load(problem)
        graph.replay()
        recorded.check(problem)


class Turns:
    """Batches of different lengths over one pool: a graph takes them in turn and compares with the first bits."""

    def __init__(self, batches: list[Problem]):
        self.recorded = Recorded(batches[0])
        self.turn = torch.zeros((1,), dtype=torch.int64, device="cuda")
        self.differing = torch.zeros((), dtype=torch.int64, device="cuda")
        static, width = self.recorded.static, self.recorded.table.shape[1]
        static.kv_cache = torch.cat([p.kv_cache.view(torch.uint8) for p in batches]).view(static.kv_cache.dtype)
        tables = self.recorded.wild.repeat(len(batches), 1, 1)
        for i, problem in enumerate(batches):
            pages = problem.block_table
            used = (pages >= 0) & (pages < POOL_PAGES)
            tables[i, :, : min(width, pages.shape[1])] = torch.where(used, pages + i * POOL_PAGES, pages)
        lengths, queries = (torch.stack([getattr(p, name) for p in batches]) for name in ("seq_lens", "q"))
        self.inputs = [(lengths, static.seq_lens), (queries, static.call_q), (tables, self.recorded.table)]
        self.first = []
        for i, problem in enumerate(batches):
            self.turn.fill_(i)
            self.step()
            self.recorded.check(problem)
            self.first.append([x.clone() for x in (self.recorded.out.tensor, self.recorded.lse.tensor)])
        self.first = [torch.stack(each) for each in zip(*self.first, strict=True)]

    def step(self) -> None:
        for values, buffer in self.inputs:
            buffer.copy_(values.index_select(0, self.turn)[0])
        self.recorded.build()
        self.recorded.decode()

    def step_and_compare(self) -> None:
        self.turn.add_(1).remainder_(len(self.first[0]))
        for guarded in (self.recorded.out, self.recorded.lse):
            guarded.poison()
        self.step()
        for first, now in zip(self.first, (self.recorded.out.tensor, self.recorded.lse.tensor), strict=True):
            self.differing += (first.index_select(0, self.turn)[0] != now).any()


@every_cache
@pytest.mark.parametrize("held", HELD_SMS)
def test_replays_with_changing_lengths_beside_a_kernel_that_holds_sms(held, cache):
    """As beside a communication kernel: a call's CTAs do not all run at once, in another arrangement each time."""
    turns = Turns(problems(16, 1, **cache))
    graph = turns.recorded.record(turns.step_and_compare)
    turns.differing.zero_()
    with sms_held(held) as holding:
        for _ in range(-(-REPLAYS // len(HELD_SMS))):
            graph.replay()
        torch.cuda.current_stream().synchronize()
        assert not holding.query(), "the SMs were given back before the last replay"
    assert not turns.differing


@contextmanager
def foreign_traffic() -> Iterator[Callable[[], None]]:
    """Copies and products of another stream, of changing length. Yields what begins the next one."""
    source, target = torch.randn(2, 8192, 2048, device="cuda", dtype=torch.bfloat16)
    stream, ended, turns = torch.cuda.Stream(), torch.cuda.Event(), [0]
    torch.cuda.synchronize()

    def go_on() -> None:
        if not ended.query():
            return
        turns[0] += 1
        rows = 1024 << turns[0] % 4
        with torch.cuda.stream(stream):
            target[:rows].copy_(source[:rows])
            torch.mm(source[:rows], source[:2048, :2048])
            ended.record()

    yield go_on
    torch.cuda.synchronize()


@every_cache
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_replays_beside_foreign_traffic(heads, cache):
    turns = Turns(problems(heads, 1, **cache))
    graph = turns.recorded.record(turns.step_and_compare)
    turns.differing.zero_()
    with foreign_traffic() as go_on:
        for _ in range(STRESS_REPLAYS):
            graph.replay()
            go_on()
        torch.cuda.synchronize()
    assert not turns.differing


@every_cache
def test_a_graph_gives_the_bits_of_a_plain_call(cache):
    problem = problems(16, 1, **cache)[0]
    recorded = Recorded(problem)
    graph = recorded.record(recorded.decode)
    plain = recorded.out.tensor.clone(), recorded.lse.tensor.clone()
    for _ in range(3):
        recorded.load(problem)
        recorded.build()
        graph.replay()
        assert torch.equal(recorded.out.tensor, plain[0]) and torch.equal(recorded.lse.tensor, plain[1])


@every_cache
def test_layers_of_one_graph_share_schedule_and_workspace(cache):
    """The next layer's kernels may start while the last layer's finish: shared buffers must allow that."""
    layers = [build(Case(BATCHES[0], heads=16, seed=60 + layer, **cache), "cuda") for layer in range(8)]
    schedule = DecodeSchedule(6, 16).build(layers[0].seq_lens)
    results = [decode(problem, schedule) for problem in layers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode(problem, schedule) for problem in layers]
    for _ in range(5):
        for out, lse in results:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        graph.replay()
    for problem, (out, lse) in zip(layers, results, strict=True):
        check(out, lse, problem, truth(problem))


@every_cache
def test_a_call_launches_its_kernels_and_nothing_else(cache):
    """No copy, no memset: build and decode launch the project's kernels, which the sanitizer's filter knows by name."""
    recorded = Recorded(problems(16, 1, **cache)[0])
    recorded.build()
    recorded.decode()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        recorded.build()
        recorded.decode()
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 3 and all("etap" in name for name in launched), launched


@every_cache
def test_build_and_decode_allocate_nothing_and_wait_for_nothing(cache):
    recorded = Recorded(problems(16, 1, **cache)[0])
    recorded.build()
    recorded.decode()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(200_000_000)
    busy = torch.cuda.Event()
    busy.record()
    for _ in range(10):
        recorded.build()
        recorded.decode()
    assert not busy.query(), "the host waited for the GPU"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_current_stream_is_used():
    """On any other stream the call would run before its inputs are there."""
    earlier, later = problems(16, 1)[:2]
    recorded = Recorded(later)
    recorded.build()
    recorded.decode()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        recorded.load(earlier)
        recorded.build()
        recorded.decode()
    stream.synchronize()
    recorded.check(earlier)


def test_torch_compile_generates_code_around_the_call():
    problem = problems(16, 1)[0]
    schedule = DecodeSchedule(6, 16).build(problem.seq_lens)

    @torch.compile(fullgraph=True)
    def layer(scale):
        out, lse = decode(problem, schedule)
        return out * scale, lse

    wanted = decode(problem, schedule)
    got = layer(torch.ones((), device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_call_may_be_the_first_that_a_thread_asks_of_the_gpu():
    problem = build(Case((300, 65, 4000)), "cuda")
    planned = DecodeSchedule(3, 16).build(problem.seq_lens)
    outputs = {"out": problem.q.new_empty(3, 1, 16, 512), "lse": problem.q.new_empty(3, 1, 16, dtype=torch.float32)}
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        out, lse = thread.submit(decode, problem, planned, **outputs).result()
    torch.cuda.synchronize()
    check(out, lse, problem, truth(problem))

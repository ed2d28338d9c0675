"""FlashInfer's wrapper on ETAP, against float64 by FlashInfer's conventions.

Cache rows that no request has are NaN, unused entries of page lists and block tables 2147480000; queries, cache and
their parts lie in wider buffers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import drop_ins
import pytest
import torch
from drop_ins import FP8, WILD, both_devices

from etap_backend.compat import flashinfer
from etap_backend.compat.flashinfer import BatchMLAPagedAttentionWrapper

KINDS = {name: kinds for name, kinds in drop_ins.KINDS.items() if name != "fp8"}  # FP8 queries are not served
SCALE = 192**-0.5
CKV_SCALE = 0.0137
WORKSPACE = 128 << 20
PAGE = drop_ins.DOCS / "flashinfer.md"
CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


@dataclass
class Problem:
    """Requests with their cache, and what its elements stand for in float64."""

    plan: dict  # without the requests
    requests: dict[str, torch.Tensor]  # as page lists
    block_table: torch.Tensor
    run: dict
    keys: list[torch.Tensor]  # [tokens, 576] of each request
    query_lens: list[int]

    @property
    def device(self) -> torch.device:
        return self.run["q_nope"].device

    def wrapper(self, **more) -> BatchMLAPagedAttentionWrapper:
        return BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE, dtype=torch.int8, device=self.device), **more)

    def graph_wrapper(self) -> BatchMLAPagedAttentionWrapper:
        """With buffers that have room for more pages."""
        sizes = dict(zip(CSR, (len(self.query_lens) + 1,) * 2 + (700, len(self.query_lens)), strict=True))
        buffers = {name: torch.full((n,), WILD, dtype=torch.int32, device=self.device) for name, n in sizes.items()}
        return self.wrapper(use_cuda_graph=True, **buffers)

    def results(self, wrapper=None, **more) -> tuple[torch.Tensor, torch.Tensor]:
        wrapper = wrapper or self.wrapper()
        wrapper.plan(**self.requests | self.plan | more)
        return wrapper.run(**self.run, return_lse=True)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out and lse in base 2; query token t of n sees the first tokens - (n - 1 - t) keys, or all."""
        q = torch.cat((self.run["q_nope"], self.run["q_pe"]), dim=-1).double()
        outs, lses = [], []
        for own, keys in zip(q.split(self.query_lens), self.keys, strict=True):
            scores = torch.einsum("qhd,kd->qhk", own, keys) * SCALE
            if self.plan["causal"]:
                seen = torch.ones(len(own), len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - len(own))
                scores.masked_fill_(~seen[:, None], -torch.inf)
            outs.append(scores.softmax(-1).nan_to_num(0) @ keys[:, :512])
            lses.append(scores.logsumexp(-1) * math.log2(math.e))
        return torch.cat(outs), torch.cat(lses)


def make(
    lengths, query_lens, *, causal=True, heads=8, kind="bf16", page_size=16, apart=True, kpe_scale=CKV_SCALE, seed=0,
    device="cpu"
) -> Problem:  # fmt: skip
    torch.manual_seed(seed)
    dtype, kv_dtype = KINDS[kind]
    counts = [-(-length // page_size) for length in lengths]
    pages, tokens = sum(counts) + 2, sum(query_lens)
    q = (torch.randn(tokens + 1, heads + 1, 640) / 10).clamp(-1, 1).to(dtype)[:tokens, :heads]
    scales = torch.tensor([CKV_SCALE] * 512 + [kpe_scale] * 64) if kv_dtype == FP8 else torch.ones(576)
    cache = ((torch.randn(pages, page_size, 576) / 10).clamp(-1, 1) / scales).to(kv_dtype)
    order = torch.randperm(pages, dtype=torch.int32)
    unused = torch.ones(pages, page_size, dtype=torch.bool)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.full((len(lengths), max(counts, default=0) + 3), WILD, dtype=torch.int32)
    keys = []
    for i, length in enumerate(lengths):
        table[i, : counts[i]] = order[starts[i] : starts[i + 1]]
        used = torch.arange(length)
        page, place = table[i, used // page_size].long(), used % page_size
        keys.append((cache[page, place].double() * scales.double()).to(device))
        unused[page, place] = False
    cache.view(torch.uint8 if kv_dtype == FP8 else dtype)[unused] = 0x7F if kv_dtype == FP8 else torch.nan
    latent, rope = cache[..., :512], cache[..., 512:]
    if apart:
        latent, rope = (torch.cat((part, part), dim=-1)[..., : part.shape[-1]] for part in (latent, rope))
    ends = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lists = torch.cat((order[: starts[-1]], torch.full((5,), WILD, dtype=torch.int32)))
    given = (ends, starts, lists, torch.tensor(lengths, dtype=torch.int32))
    plan = {"num_heads": heads, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": page_size, "causal": causal,
            "sm_scale": SCALE, "q_data_type": dtype, "kv_data_type": kv_dtype}  # fmt: skip
    run = {"q_nope": q[..., :512], "q_pe": q[..., 512:576], "ckv_cache": latent, "kpe_cache": rope}
    run = {name: one.to(device) for name, one in run.items()}
    if kv_dtype == FP8:
        run |= {"ckv_scale": CKV_SCALE, "kpe_scale": kpe_scale}
    requests = {name: one.to(device) for name, one in zip(CSR, given, strict=True)}
    return Problem(plan, requests, table.to(device), run, keys, list(query_lens))


def check(results, problem: Problem) -> None:
    """FlashMLA's limits: absolute, or relative to the float64 result."""
    (out, lse), truths = results, problem.truth()
    assert out.dtype == problem.plan["q_data_type"] and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert torch.equal(lse.isneginf(), truths[1].isneginf()) and out[truths[1].isneginf()].eq(0).all()
    for ours, truth, most, share in zip((out, lse), truths, (8e-4, 1e-5), (2.01 / 128, 1e-5), strict=True):
        assert ours.shape == truth.shape
        torch.testing.assert_close(ours.double(), truth, atol=most, rtol=share)


BATCHES = {
    "decode": [1, 1, 1, 1, 1],
    "drafts": [3, 3, 3, 3, 3],
    "prompts behind": [1, 1, 4, 4, 7],
    "a request without queries": [2, 0, 2, 2, 1],
    "lengths that take turns": [1, 3, 2, 3, 1],
}
LENGTHS = (97, 130, 2, 16, 65)


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_query_lengths(device, kind, query_lens, causal):
    problem = make(LENGTHS, query_lens, causal=causal, kind=kind, device=device)
    for name in CSR:
        problem.requests[name] = problem.requests[name].cpu()
    check(problem.results(), problem)


@pytest.mark.parametrize(
    "query_lens, calls",
    [([1, 1, 2, 2, 3], [1, 2, 3]), ([1, 2, 3, 4, 4], [1, 2, 3, 4]), ([1, 2, 3, 4, 5], [5])],
    ids=str,
)
def test_up_to_four_lengths_of_queries_are_a_call_each_and_more_are_padded_into_one(monkeypatch, query_lens, calls):
    made, decode = [], flashinfer.mla_decode

    def counted(q, *arguments, **options):
        made.append(q.shape[1])
        return decode(q, *arguments, **options)

    monkeypatch.setattr(flashinfer, "mla_decode", counted)
    check((problem := make(LENGTHS, query_lens)).results(), problem)
    assert made == calls


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 7, 16, 32, 64, 128])
@pytest.mark.parametrize("apart", [False, True])
def test_pages_of_any_size_and_parts_that_lie_apart(device, apart, page_size, causal):
    problem = make(LENGTHS, [2] * 5, page_size=page_size, causal=causal, apart=apart, heads=16, device=device)
    check(problem.results(), problem)


@both_devices
@pytest.mark.parametrize("query_lens, longest", [([1] * 4, None), ([3] * 4, None), ([3] * 4, 3), ([1, 3, 0, 2], 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_plans_for_graphs_are_not_looked_at(device, causal, query_lens, longest):
    """Each further plan moves nothing, and the call that was made for the first serves it."""
    wrapper, addresses = None, set()
    for lengths in (96, 130, 2, 5), (0, 20, 300, 1), (64, 64, 64, 64):
        problem = make(lengths, query_lens, causal=causal, device=device)
        wrapper = wrapper or problem.graph_wrapper()
        check(problem.results(wrapper, max_q_len=longest), problem)
        addresses.add((wrapper._requests.block_table.data_ptr(), wrapper._requests.seq_lens.data_ptr()))
        query_lens = query_lens[::-1] if longest else query_lens
    assert len(addresses) == 1


@both_devices
@pytest.mark.parametrize("form", ["page lists", "block table"])
def test_longest_lengths_hold_for_what_the_host_sees(device, form):
    """Lists on the CPU for a wrapper anywhere: the plan refuses what would end in an assertion on the GPU."""
    problem, csr = make(LENGTHS, [1, 3, 0, 2, 3], device=device), "page lists"
    on_cpu = {name: one.cpu() for name, one in problem.requests.items()}
    if form != csr:
        on_cpu = {"cum_seq_lens_q": on_cpu["qo_indptr"], "block_tables": problem.block_table,
                  "seq_lens": on_cpu["kv_len_arr"]}  # fmt: skip
    problem.requests = on_cpu
    check(problem.results(max_q_len=3, max_kv_len=130), problem)
    check(problem.results(max_q_len=3, max_kv_len=129), problem)  # as many pages
    with pytest.raises(ValueError, match=f"^max_q_len: wanted at least the 3 .* in {next(iter(on_cpu))}, got 2"):
        problem.results(max_q_len=2)
    if form == csr:
        with pytest.raises(ValueError, match="^max_kv_len: wanted room for the 9 pages of 16 "):
            problem.results(max_kv_len=128)


def test_lengths_that_are_not_looked_at_are_asserted():
    problem = make(LENGTHS, [2, 1, 2, 3, 2])
    with pytest.raises(RuntimeError, match="^qo_indptr: wanted exactly 2 query tokens for each request"):
        problem.results(problem.graph_wrapper())
    with pytest.raises(RuntimeError, match="^qo_indptr: wanted at most 2 query tokens"):
        problem = make(LENGTHS, [1, 1, 1, 3, 2])
        problem.results(problem.graph_wrapper(), max_q_len=2)
    with pytest.raises(RuntimeError, match="^kv_indptr: wanted max_kv_len's 8 pages at most"):
        make(LENGTHS, [1] * 5).results(problem.graph_wrapper(), max_kv_len=128)


def with_rows(problem: Problem, rows: int) -> Problem:
    """The same with so many query rows; those behind its tokens are NaN."""
    for name in ("q_nope", "q_pe"):
        part = problem.run[name]
        problem.run[name] = torch.cat([part, part.new_full((rows - len(part), *part.shape[1:]), torch.nan)])
    return problem


def check_first(results, problem: Problem) -> None:
    """As `check`, of the rows that have tokens."""
    own = Problem(**vars(problem))
    tokens = sum(problem.query_lens)
    own.run = problem.run | {name: problem.run[name][:tokens] for name in ("q_nope", "q_pe")}
    check([one[:tokens] for one in results], own)


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query_lens", [*BATCHES.values(), [0] * 5])
def test_rows_behind_the_last_request_are_no_ones(device, query_lens, causal):
    """With lengths that the host sees, too."""
    problem = with_rows(make(LENGTHS, query_lens, causal=causal, device=device), sum(query_lens) + 3)
    problem.requests = {name: one.cpu() for name, one in problem.requests.items()}
    check_first(problem.results(), problem)


REPLAYED = {
    "shorter ones": (4, ([4, 4, 4], [3, 3, 3], [1, 4, 2], [0, 0, 4], [4, 4, 4])),
    "fewer requests": (1, ([1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1])),
    "none among one token each": (2, ([1, 1, 1], [0, 1, 0], [2, 2, 2])),
}


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_as_many_rows_as_the_longest_lengths_have_serve_shorter_ones(device, name, causal):
    """As a CUDA graph has them, whose plans are not looked at."""
    longest, batches = REPLAYED[name]
    wrapper = None
    for query_lens in batches:
        problem = with_rows(make((97, 130, 20), query_lens, causal=causal, device=device), 3 * longest)
        wrapper = wrapper or problem.graph_wrapper()
        check_first(problem.results(wrapper, max_q_len=longest), problem)


def test_a_request_without_a_token_before_others_is_asserted_where_none_has_two():
    problem = with_rows(make((97, 130, 20), [1, 0, 1]), 3)
    with pytest.raises(RuntimeError, match="^qo_indptr: wanted a query token for each request, those without one last"):
        problem.results(problem.graph_wrapper(), max_q_len=1)
    check_first(problem.results(problem.graph_wrapper(), max_q_len=2), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_a_graph_of_the_longest_lengths_is_replayed_with_shorter_ones(name):
    longest, batches = REPLAYED[name]
    problems = [with_rows(make((97, 130, 20), one, device="cuda", seed=9), 3 * longest) for one in batches]
    static = {key: one.clone() for key, one in problems[0].run.items()}
    wrapper = problems[0].graph_wrapper()
    problems[0].results(wrapper, max_q_len=longest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = wrapper.run(**static, return_lse=True)
    for problem in problems:
        wrapper.plan(**problem.requests, **problem.plan, max_q_len=longest)
        for key, one in problem.run.items():
            static[key].copy_(one)
        graph.replay()
        check_first(results, problem)


def test_a_table_as_wide_as_the_longest_request_is_enough():
    problem = make(LENGTHS, [1] * 5)
    wrapper = problem.graph_wrapper()
    check(problem.results(wrapper, max_kv_len=130), problem)
    assert wrapper._requests.block_table.shape == (5, 9)


@both_devices
@pytest.mark.parametrize("for_graphs", [False, True])
@pytest.mark.parametrize("form", ["arguments", "metadata", "both forms"])
def test_a_block_table_serves_as_it_is(device, form, for_graphs):
    problem = make(LENGTHS, [2] * 5, device=device)
    csr = problem.requests
    table = {"cum_seq_lens_q": csr["qo_indptr"], "block_tables": problem.block_table, "seq_lens": csr["kv_len_arr"]}
    table["max_q_len"] = 2
    wrong = {name: one.clone().fill_(WILD) for name, one in csr.items()} if form == "both forms" else {}
    problem.requests = table if form == "arguments" else {"metadata": SimpleNamespace(**table, **wrong)}
    wrapper = problem.wrapper(use_cuda_graph=for_graphs)
    for _ in range(2):
        check(problem.results(wrapper), problem)
    assert (wrapper._requests.block_table.data_ptr() == problem.block_table.data_ptr()) != for_graphs


@both_devices
@pytest.mark.parametrize("form", ["page lists", "block table"])
def test_metadata_may_leave_the_longest_length_to_the_argument(device, form):
    """FlashInfer's object has no place for it beside page lists."""
    problem = make(LENGTHS, [1, 3, 0, 2, 3], device=device)
    csr = problem.requests
    if form == "block table":
        csr = {"cum_seq_lens_q": csr["qo_indptr"], "block_tables": problem.block_table, "seq_lens": csr["kv_len_arr"]}
    problem.requests = {"metadata": SimpleNamespace(**csr, max_q_len=None)}
    check(problem.results(problem.graph_wrapper(), max_q_len=3), problem)
    problem.requests = {"metadata": SimpleNamespace(**csr, max_q_len=3)}
    check(problem.results(problem.graph_wrapper()), problem)
    with pytest.raises(ValueError, match="^max_q_len: wanted None beside metadata, got int"):
        problem.results(problem.graph_wrapper(), max_q_len=3)


@both_devices
def test_results_go_where_they_are_wanted_and_in_the_base_that_is(device):
    problem = make(LENGTHS, [1, 1, 4, 4, 7], device=device)
    problem.requests = {name: one.cpu() for name, one in problem.requests.items()}
    wrapper = problem.wrapper()
    wanted, base_2 = problem.results(wrapper)
    out = torch.full_like(wanted, torch.nan)
    lse = torch.full_like(base_2, torch.nan)
    assert wrapper.run(**problem.run, out=out, lse=lse) is out
    assert torch.equal(out, wanted) and torch.equal(lse, base_2)
    assert torch.equal(wrapper.run(**problem.run), wanted)
    _, natural = wrapper.run(**problem.run, return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(natural * math.log2(math.e), base_2)


def test_ends_behind_the_last_request_are_not_looked_at():
    problem = make(LENGTHS, [2, 0, 2, 2, 1])
    for name in ("qo_indptr", "kv_indptr"):
        problem.requests[name] = torch.cat((problem.requests[name], torch.tensor([3, WILD], dtype=torch.int32)))
    check(problem.results(), problem)


@both_devices
@pytest.mark.parametrize("packed", [False, True])
def test_structural_arguments(device, packed):
    problem = make(LENGTHS, [2] * 5, apart=False, device=device)
    run, wrapper = problem.run, problem.wrapper()
    wanted = problem.results(wrapper, query_layout="packed" if packed else "split")
    query, cache = (run["q_nope"], run["q_pe"]), (run["ckv_cache"], run["kpe_cache"])
    if packed:
        query, cache = torch.cat(query, dim=-1), torch.cat(cache, dim=-1)
    results = wrapper.run(query=query, kv_cache=cache, return_lse=True)
    assert all(map(torch.equal, results, wanted))


@both_devices
@pytest.mark.parametrize("kpe_scale", [CKV_SCALE * 0.25, CKV_SCALE * 1.37])
def test_latent_and_rope_have_scales_of_their_own(device, kpe_scale):
    """A ratio that is no power of two rounds q_pe: of 64 columns, by 2^-9 at most."""
    problem = make(LENGTHS, [2] * 5, kind="bf16 q, fp8", kpe_scale=kpe_scale, device=device)
    (out, lse), (true_out, true_lse) = problem.results(), problem.truth()
    torch.testing.assert_close(out.double(), true_out, atol=8e-4, rtol=2.01 / 128)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-5 if kpe_scale < CKV_SCALE else 2e-3, rtol=1e-5)
    assert torch.equal(problem.run["q_pe"], make(LENGTHS, [2] * 5, kind="bf16 q, fp8", device=device).run["q_pe"])


@both_devices
def test_nothing_at_all(device):
    problem = make((0, 0), [2, 2], device=device)
    for cache in problem.run["ckv_cache"], problem.run["ckv_cache"][:0]:
        problem.run |= {"ckv_cache": cache, "kpe_cache": problem.run["kpe_cache"][: len(cache)]}
        out, lse = problem.results()
        assert out.eq(0).all() and lse.isneginf().all() and out.shape == (4, 8, 512)
    for lengths, query_lens in (((5, 6), [0, 0]), ((), [])):
        out, lse = make(lengths, query_lens, device=device).results()
        assert out.shape == (0, 8, 512) and lse.shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, query_lens, longest",
    [
        ("bf16", [1] * 4, None),
        ("fp16", [3] * 4, None),
        ("bf16", [1, 3, 0, 2], 3),
        ("bf16 q, fp8", [2] * 4, 2),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_a_graph_serves_other_lengths(kind, query_lens, longest, causal, warm):
    shape = {"kind": kind, "causal": causal, "device": "cuda", "seed": 9}
    batches = ((700, 1500, 1, 4), (64, 0, 3000, 5), (2, 65, 3, 96))
    problems = [make(lengths, query_lens, **shape) for lengths in batches]
    cached = {"ckv_cache": 512, "kpe_cache": 64}
    static = dict(problems[0].run)
    for name, width in cached.items():
        static[name] = torch.zeros(400, 16, width, dtype=static[name].dtype, device="cuda")
    wrapper = problems[0].graph_wrapper()
    wrapper.plan(**problems[0].requests, **problems[0].plan, max_q_len=longest)
    problems[0].results(max_q_len=longest)  # so that nothing is loaded while recording
    if warm:
        wrapper.run(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [wrapper.run(**static, return_lse=True) for _ in range(3)]
    for problem in [*problems, *problems[::-1]]:
        wrapper.plan(**problem.requests, **problem.plan, max_q_len=longest)
        for name, one in problem.run.items():
            if isinstance(one, torch.Tensor):
                static[name][: len(one)].copy_(one.view(static[name].dtype))
        graph.replay()
        for layer in layers:
            check(layer, problem)
    check(wrapper.run(**static, return_lse=True), problems[0])


@pytest.mark.gpu
def test_each_graph_of_a_plan_can_be_replayed_alone():
    problem, graphs, layers = make((700, 1500, 1, 4), [1] * 4, device="cuda"), [], []
    problem.results()  # so that nothing is loaded while recording
    wrapper = problem.graph_wrapper()
    wrapper.plan(**problem.requests, **problem.plan)
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            layers.append(wrapper.run(**problem.run, return_lse=True))
    for graph, layer in zip(graphs[::-1], layers[::-1], strict=True):
        graph.replay()
        check(layer, problem)


@pytest.mark.gpu
@pytest.mark.parametrize("for_graphs", [False, True])
@pytest.mark.parametrize("query_lens, longest", [([1] * 5, None), ([3] * 5, None), ([1, 3, 0, 2, 3], 3)])
def test_a_plan_waits_for_nothing(query_lens, longest, for_graphs):
    problem = make(LENGTHS, query_lens, device="cuda")
    wrapper = problem.graph_wrapper() if for_graphs else problem.wrapper()
    check(problem.results(wrapper, max_q_len=longest), problem)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = problem.results(wrapper, max_q_len=longest)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    check(results, problem)


@pytest.mark.parametrize("after", [None, "in another capture"])
def test_a_plan_that_was_only_recorded_is_made_anew(monkeypatch, after):
    """As a capture leaves it: nothing has filled its buffers, which are refused here as they are."""
    problem, now = make(LENGTHS, [1] * 5), ["in a capture"]
    monkeypatch.setattr(flashinfer, "capture_id", lambda device: now[0])
    wrapper = problem.graph_wrapper()
    problem.results(wrapper)
    (call,) = wrapper._calls._calls
    call._schedule.work_ranges.zero_()
    # Runs of one capture share a plan.
    with pytest.raises(ValueError, match="^schedule: wanted the buffers that build"):
        wrapper.run(**problem.run)
    now[0] = after
    check(wrapper.run(**problem.run, return_lse=True), problem)


def test_a_scale_below_the_largest_gives_numbers():
    assert not any(one.isnan().any() for one in make(LENGTHS, [1] * 5).results(sm_scale=2.3e38))


NUMBERS = torch.arange(6, dtype=torch.int32)
PLAN_REFUSALS = {
    "no requests": (TypeError, "^qo_indptr: wanted a tensor, got None", {**dict.fromkeys(CSR)}),
    "lists without lengths": (TypeError, "^kv_len_arr: wanted a tensor, got None", {"kv_len_arr": None}),
    "both forms": (ValueError, "^qo_indptr: wanted None beside a block table", {"block_tables": NUMBERS}),
    "lists beside metadata": (ValueError, "^qo_indptr: wanted None beside metadata", {"metadata": SimpleNamespace()}),
    "numbers of 64 bits": (ValueError, r"^kv_indices: wanted int32 \[pages\].* got \[\d+\] of int64",
                           lambda r: {"kv_indices": r["kv_indices"].long()}),
    "ends of fewer requests": (ValueError, r"^kv_indptr: wanted int32 \[b \+ 1\] for 5 requests, got \[5\]",
                               lambda r: {"kv_indptr": r["kv_indptr"][:5]}),
    "too few pages": (ValueError, "^kv_indptr: wanted pages for 97 tokens of request 0, got 0 of 16",
                      lambda r: {"kv_indptr": r["kv_indptr"] * 0}),
    "pages that are not there": (ValueError, "^kv_indptr: wanted ascending numbers from 0 to at most 3",
                                 lambda r: {"kv_indices": r["kv_indices"][:3]}),
    "queries that go back": (ValueError, "^qo_indptr: wanted ascending",
                             lambda r: {"qo_indptr": r["qo_indptr"].flip(0)}),
    "no heads": (TypeError, "^num_heads: wanted one, got None", {"num_heads": None}),
    "less than one head": (ValueError, "^num_heads: wanted at least 1, got 0", {"num_heads": 0}),
    "pages of nothing": (ValueError, "^page_size: wanted at least 1, got 0", {"page_size": 0}),
    "another model": (NotImplementedError, "^head_dim_ckv, .* got 256 and 64", {"head_dim_ckv": 256}),
    "no rope": (NotImplementedError, "^head_dim_ckv, head_dim_kpe: wanted 512 and 64, got 512 and 0",
                {"head_dim_kpe": 0}),
    "FP8 queries": (NotImplementedError, "^q_data_type: .* got float8_e4m3fn", {"q_data_type": FP8}),
    "a cache of another type": (NotImplementedError, "^kv_data_type float16 ", {"kv_data_type": torch.float16}),
    "a type by its name": (TypeError, "^q_data_type: wanted a torch.dtype, got 'float16'", {"q_data_type": "float16"}),
    "a cache by its name": (TypeError, "^kv_data_type: wanted a torch.dtype, got 'fp8'", {"kv_data_type": "fp8"}),
    **{f"a scale of {scale!r}": (ValueError, "^sm_scale: wanted a positive finite number of float32, .* got ",
                                 {"sm_scale": scale})
       for scale in (0.0, math.nan, "1", torch.tensor(0.1), 3e38, 1e39, 1e-50, 10**400)},
    "a request of more query tokens": (
        ValueError, "^max_q_len: wanted at least the 3 query tokens of a request in qo_indptr, got 2",
        {"qo_indptr": torch.tensor([0, 1, 1, 4, 4, 5], dtype=torch.int32), "max_q_len": 2}),
    "a longer request": (
        ValueError, "^max_kv_len: wanted room for the 9 pages of 16 of a request in kv_indptr, got 128",
        {"max_kv_len": 128}),
    "no longest length": (ValueError, "^max_kv_len: wanted at least 1, got 0", {"max_kv_len": 0}),
    "requests that are no metadata": (TypeError, "^metadata: wanted FlashInfer's MLAPlanMetadata, got int",
                                      {**dict.fromkeys(CSR), "metadata": 3}),
    "another output": (NotImplementedError, "^output_dtype: ", {"output_dtype": torch.float32}),
    "a profiler": (NotImplementedError, "^use_profiler: wanted False, got True", {"use_profiler": True}),
    "sinks": (NotImplementedError, "^use_sinks: ", {"use_sinks": True}),
    "skipped softmax": (NotImplementedError, "^skip_softmax: ", {"skip_softmax": True}),
    "dependent launches": (NotImplementedError, "^enable_pdl: wanted None or False, got True", {"enable_pdl": True}),
    "a scaled output": (NotImplementedError, "^output_scale: ", {"output_scale": "per-tensor"}),
    "scales of products": (NotImplementedError, "^scale_mode: ", {"scale_mode": "bmm-scalar"}),
    "no such lse": (NotImplementedError, "^lse_mode: .* got 'base10'", {"lse_mode": "base10"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAN_REFUSALS)
def test_plans_that_are_not_served_are_refused_by_name(name):
    kind, text, spoiled = PLAN_REFUSALS[name]
    problem = make(LENGTHS, [1] * 5)
    wrapper = problem.wrapper()
    with pytest.raises(kind, match=text):
        problem.results(wrapper, **(spoiled(problem.requests) if callable(spoiled) else spoiled))
    with pytest.raises(RuntimeError, match="^run: wanted a plan before it"):
        wrapper.run(**problem.run)


ROW = torch.zeros(1)
NOT_SERVED = (
    *("profiler_buffer", "kv_len", "page_table", "o_scale", "ckv_scale_arr", "sinks"),
    *("skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"),
)
RUN_REFUSALS = {
    **{name: (NotImplementedError, f"^{name}: wanted None, got Tensor", {name: ROW}) for name in NOT_SERVED},
    "half a query": (TypeError, "^q_pe: wanted a tensor, got None", {"q_pe": None}),
    "a query twice": (ValueError, "^q_nope: wanted None beside query", {"query": ROW}),
    "a list of parts": (TypeError, "^query: wanted a tensor or a pair", {"query": [ROW], "q_nope": None, "q_pe": None}),
    "rows without rope": (ValueError, "^kv_cache: wanted three dimensions, the last of 576, got ",
                          lambda r: {"kv_cache": r["ckv_cache"], "ckv_cache": None, "kpe_cache": None}),
    "another query type": (ValueError, r"^q_nope.dtype: wanted bfloat16 as planned, got float16",
                           lambda r: {"q_nope": r["q_nope"].half()}),
    "another cache type": (ValueError, r"^ckv_cache.dtype: wanted bfloat16 as planned",
                           lambda r: {"ckv_cache": r["ckv_cache"].half()}),
    "fewer rope rows": (ValueError, r"^kpe_cache: wanted \[\d+, 16, 64\], got ",
                        lambda r: {"kpe_cache": r["kpe_cache"][1:]}),
    "other heads": (ValueError, "^q_nope: wanted 8 heads as planned",
                    lambda r: {name: r[name][:, 1:] for name in ("q_nope", "q_pe")}),
    "other pages": (ValueError, "^ckv_cache: wanted pages of 16 tokens as planned",
                    lambda r: {name: r[name][:, 1:] for name in ("ckv_cache", "kpe_cache")}),
    "columns that step": (ValueError, "^ckv_cache: wanted stride 1",
                          lambda r: {"ckv_cache": r["ckv_cache"].repeat_interleave(2, -1)[..., ::2]}),
    "rope columns that step": (ValueError, "^q_pe: wanted stride 1",
                               lambda r: {"q_pe": r["q_pe"].repeat_interleave(2, -1)[..., ::2]}),
    "a query without memory": (ValueError, "^q_nope: .* got one on meta", lambda r: {"q_nope": r["q_nope"].to("meta")}),
    "FP8 math without FP8": (ValueError, "^fp8_math: wanted False beside a ckv_cache of bfloat16", {"fp8_math": True}),
    "no queries": (ValueError, "^q_nope: wanted 5 query tokens as planned, got 0",
                   lambda r: {name: r[name][:0] for name in ("q_nope", "q_pe")}),
    "fewer queries": (ValueError, "^q_nope: wanted 5 query tokens as planned, got 4",
                      lambda r: {name: r[name][1:] for name in ("q_nope", "q_pe")}),
    "a scale without FP8": (ValueError, "^ckv_scale: wanted None with a cache of bfloat16", {"ckv_scale": 1.0}),
    "an output of another shape": (ValueError, r"^out: wanted a contiguous \[5, 8, 512\] of bfloat16",
                                   {"out": torch.zeros(5, 512, 8, dtype=torch.bfloat16).transpose(1, 2)}),
    "an lse of 16 bits": (ValueError, "^lse: wanted a contiguous .* of float32",
                          {"lse": torch.zeros(5, 8, dtype=torch.bfloat16)}),
    "an output that is none": (TypeError, "^out: wanted a tensor", {"out": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUN_REFUSALS)
def test_runs_that_are_not_served_are_refused_by_name(name):
    kind, text, spoiled = RUN_REFUSALS[name]
    problem = make(LENGTHS, [1] * 5)
    wrapper = problem.wrapper()
    wanted = problem.results(wrapper)
    with pytest.raises(kind, match=text):
        wrapper.run(**problem.run | (spoiled(problem.run) if callable(spoiled) else spoiled))
    assert torch.equal(wrapper.run(**problem.run), wanted[0])


@pytest.mark.parametrize(
    "scales",
    [{"ckv_scale": None}, {"kpe_scale": None}, {"kpe_scale": 0.0}, {"ckv_scale": math.inf}, {"ckv_scale": 1e-50}],
)
def test_an_fp8_cache_has_its_scales(scales):
    problem = make(LENGTHS, [1] * 5, kind="bf16 q, fp8")
    problem.run |= scales
    with pytest.raises(ValueError, match=f"^{next(iter(scales))}: wanted a positive finite number of float32 with "):
        problem.results()


def test_wrappers_that_cannot_be_are_refused_by_name():
    space = torch.empty(WORKSPACE, dtype=torch.int8)
    for wrong, kind, text in (
        ({"backend": "cutlass"}, ValueError, "^backend: wanted one of auto, etap, fa2, fa3, got 'cutlass'"),
        ({"float_workspace_buffer": None}, TypeError, "^float_workspace_buffer: wanted a tensor"),
        ({"float_workspace_buffer": space.to("meta")}, ValueError, "^float_workspace_buffer: .* got one on meta"),
        ({"float_workspace_buffer": space.view(2, -1).T}, ValueError, "^float_workspace_buffer: wanted a contiguous"),
        ({"use_cuda_graph": True, "kv_indptr": space}, ValueError, "^kv_indptr: wanted a contiguous int32 .* of int8"),
    ):
        with pytest.raises(kind, match=text):
            BatchMLAPagedAttentionWrapper(**{"float_workspace_buffer": space} | wrong)


@both_devices
def test_a_workspace_may_begin_anywhere(device):
    problem = make(LENGTHS, [1] * 5, device=device)
    space = torch.empty(WORKSPACE, dtype=torch.int8, device=device)[1:]
    check(problem.results(BatchMLAPagedAttentionWrapper(space)), problem)


@both_devices
@pytest.mark.parametrize("form", ["page lists", "block table"])
def test_a_plan_keeps_its_lengths(device, form):
    """Programs write the next plan's before they run this one's."""
    problem = make(LENGTHS, [2] * 5, device=device)
    csr = problem.requests
    if form == "block table":
        table = {"cum_seq_lens_q": csr["qo_indptr"], "block_tables": problem.block_table, "seq_lens": csr["kv_len_arr"]}
        problem.requests = table | {"max_q_len": 2}
    wrapper = problem.wrapper()
    wrapper.plan(**problem.requests, **problem.plan)
    for name in problem.requests.keys() - {"block_tables", "max_q_len"}:
        problem.requests[name].fill_(WILD)
    check(wrapper.run(**problem.run, return_lse=True), problem)


@both_devices
def test_lengths_may_lie_apart(device):
    problem = make(LENGTHS, [2] * 5, device=device)
    lengths = problem.requests["kv_len_arr"].repeat_interleave(2)
    problem.requests["kv_len_arr"] = lengths[::2]
    check(problem.results(), problem)


def test_the_workspace_that_is_promised_to_suffice_does_with_any_number_of_rows():
    problem = make((40,), [260], causal=False, heads=128)
    check(problem.results(problem.wrapper()), problem)


def test_too_small_a_workspace_is_refused_by_size():
    problem = make(LENGTHS, [1] * 5)
    with pytest.raises(ValueError, match=r"^float_workspace_buffer: wanted at least \d+ bytes .*, got 64"):
        problem.results(BatchMLAPagedAttentionWrapper(torch.empty(64, dtype=torch.int8)))


def test_plans_for_graphs_have_the_shapes_of_the_first():
    problem = make(LENGTHS, [2] * 5)
    wrapper = problem.graph_wrapper()
    problem.results(wrapper)
    with pytest.raises(ValueError, match="^causal: wanted True as in the first plan for CUDA graphs, got False"):
        problem.results(wrapper, causal=False)
    with pytest.raises(ValueError, match="^q_nope: wanted 10 query tokens as before, got 5"):
        wrapper.run(**problem.run | {name: problem.run[name][:5] for name in ("q_nope", "q_pe")})
    table = {"cum_seq_lens_q": problem.requests["qo_indptr"], "block_tables": problem.block_table}
    with pytest.raises(ValueError, match="^metadata: wanted page lists as in the first plan .*, got a block table"):
        problem.results(wrapper, **dict.fromkeys(CSR), **table, seq_lens=problem.requests["kv_len_arr"])
    with pytest.raises(ValueError, match="^max_kv_len: wanted None as in the first plan for CUDA graphs, got 130"):
        problem.results(wrapper, max_kv_len=130)
    with pytest.raises(ValueError, match="^batch: wanted 5"):
        make(LENGTHS[:4], [2] * 4).results(wrapper)
    with pytest.raises(ValueError, match=r"^kv_indices: wanted \[700\] of int32 as the wrapper's buffer has, got \[7"):
        make((1,) * 5, [2] * 5).results(wrapper, kv_indices=torch.zeros(701, dtype=torch.int32))
    check(wrapper.run(**problem.run, return_lse=True), problem)
    with pytest.raises(ValueError, match="^qo_indptr: wanted a buffer in the wrapper for CUDA graphs, got None"):
        problem.results(problem.wrapper(use_cuda_graph=True))


@both_devices
def test_block_tables_for_graphs_may_be_narrower_than_the_first(device):
    first, second = make(LENGTHS, [1] * 5, device=device), make((16, 1, 0, 30, 5), [1] * 5, device=device)
    wrapper, places = first.wrapper(use_cuda_graph=True), set()
    for problem in first, second, first:
        csr = problem.requests
        table = {"cum_seq_lens_q": csr["qo_indptr"], "seq_lens": csr["kv_len_arr"], "block_tables": problem.block_table}
        check(Problem(**vars(problem) | {"requests": table}).results(wrapper), problem)
        places.add((wrapper._requests.block_table.data_ptr(), wrapper._requests.block_table.shape))
    assert len(places) == 1 and second.block_table.shape[1] < first.block_table.shape[1]
    wider = torch.cat([first.block_table, first.block_table[:, :1]], dim=1)
    with pytest.raises(ValueError, match=r"^block_tables: wanted \[5, 12\] of int32 as .* buffer has, got \[5, 13\]"):
        Problem(**vars(first) | {"requests": table | {"block_tables": wider}}).results(wrapper)


def test_mixed_lengths_that_the_host_does_not_see_are_refused_where_their_sum_shows_them():
    problem = make(LENGTHS, [2, 2, 2, 2, 3])
    with pytest.raises(ValueError, match="^q_nope: wanted equally many query tokens for each of 5 requests, max_q_len"):
        problem.results(problem.graph_wrapper())


def test_a_table_that_would_be_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(flashinfer, "TABLE_BYTES", 4 * 6 * 699)
    problem = make(LENGTHS, [1] * 5)
    with pytest.raises(
        ValueError, match="^kv_indices: wanted max_kv_len, or at most 699 entries for 5 requests, .* 700"
    ):
        problem.results(problem.graph_wrapper())
    check(problem.results(problem.graph_wrapper(), max_kv_len=130), problem)


def test_installing_wants_backends_that_it_serves():
    with pytest.raises(ValueError, match="^backends: wanted some of auto, etap, fa2, fa3, got cutlass"):
        flashinfer.install(backends=("etap", "cutlass"))


def test_the_program_of_the_page_runs():
    first, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(first, names)
    keys = names["cache"].double().flatten(0, 1)
    keys = [keys[:200], keys[208:215]]
    run = {"q_nope": names["q"][..., :512], "q_pe": names["q"][..., 512:]}
    out, lse = Problem({"causal": True}, {}, None, run, keys, [1, 1]).truth()
    torch.testing.assert_close(names["out"].double(), out, rtol=0.02, atol=0.01)
    torch.testing.assert_close(names["lse"].double(), lse, rtol=1e-5, atol=1e-5)

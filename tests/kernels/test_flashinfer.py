"""FlashInfer's wrapper on ETAP against float64, with FlashInfer's conventions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from drop_ins import FP8, KINDS, KV_SCALE, WILD, Drawn, both_devices, check, check_traced, draw, refused

from etap_backend.compat import flashinfer
from etap_backend.compat.flashinfer import LISTS, BatchMLAPagedAttentionWrapper

SERVED_KINDS = [kind for kind in KINDS if kind != "fp8"]  # FP8 queries are refused
WHOLE_TILES = {"fp16": {"page_size": 64, "apart": False}}  # by kind: as its kernels want its cache
SCALE = 192**-0.5
WORKSPACE = 128 << 20
LENGTHS = (97, 130, 2, 0, 65)


@dataclass
class Problem:
    """The arguments of `plan` and `run`."""

    drawn: Drawn
    lists: dict
    model: dict
    call: dict

    def wrapper(self, **more) -> BatchMLAPagedAttentionWrapper:
        space = torch.empty(WORKSPACE, dtype=torch.int8, device=self.drawn.q.device)
        return BatchMLAPagedAttentionWrapper(space, **more)

    def graph_wrapper(self, pages: int = 700) -> BatchMLAPagedAttentionWrapper:
        """With FlashInfer's four buffers, and room for more pages than this problem has."""
        batch = len(self.drawn.counts)
        sizes = dict(zip(LISTS, (batch + 1, batch + 1, pages, batch), strict=True))
        new = {"dtype": torch.int32, "device": self.drawn.q.device}
        return self.wrapper(use_cuda_graph=True, **{name: torch.full((n,), WILD, **new) for name, n in sizes.items()})

    def results(self, wrapper=None, **more) -> tuple[torch.Tensor, torch.Tensor]:
        wrapper = wrapper or self.wrapper()
        wrapper.plan(**self.lists | self.model | more)
        return wrapper.run(**self.call, return_lse=True)

    def check(self, results) -> None:
        """`results` with lse in base 2, of the rows that have tokens."""
        out, lse = (one[: len(self.drawn.q)] for one in results)
        check(out, lse * math.log(2), self.drawn.truth(self.model["causal"], SCALE), self.drawn.q.dtype)


def make(lengths=LENGTHS, counts=1, *, causal=True, on="cpu", apart=True, rope_scale=KV_SCALE, spare=0, **more):
    """`on`: where the lists are; `apart`: latent and rope in two tensors; `spare`: more rows of q, which are NaN."""
    drawn = draw(lengths, counts, more.pop("heads", 8), page_size=more.pop("page_size", 16), rope_scale=rope_scale,
                 **more)  # fmt: skip
    page_size, rows = drawn.rows.shape[1], drawn.rows[:, :, 0]
    counted = -(-drawn.lengths // page_size)
    ends = torch.cat([counted.new_zeros(1), counted.cumsum(0)]).int()
    pages = torch.cat([row[:n] for row, n in zip(drawn.table, counted.tolist(), strict=True)])
    given = (drawn.starts, ends, torch.cat([pages, pages.new_full((5,), WILD)]), drawn.lengths)
    latent, rope = rows[..., :512], rows[..., 512:]
    if apart:
        latent, rope = (torch.cat((part, part), dim=-1)[..., : part.shape[-1]] for part in (latent, rope))
    q = torch.cat([drawn.q, drawn.q.new_full((spare, *drawn.q.shape[1:]), torch.nan)]) if spare else drawn.q
    model = {"num_heads": q.shape[1], "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": page_size,
             "causal": causal, "sm_scale": SCALE, "q_data_type": q.dtype, "kv_data_type": rows.dtype}  # fmt: skip
    call = {"q_nope": q[..., :512], "q_pe": q[..., 512:], "ckv_cache": latent, "kpe_cache": rope}
    if rows.dtype == FP8:
        call |= {"ckv_scale": KV_SCALE, "kpe_scale": rope_scale}
    moved = {name: one.to(on if name != "kv_indices" else q.device) for name, one in zip(LISTS, given, strict=True)}
    return Problem(drawn, moved, model, call)


@both_devices
@pytest.mark.parametrize("kind", SERVED_KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts", [1, 3])
def test_decode_and_drafts(device, counts, causal, kind):
    problem = make(counts=counts, causal=causal, kind=kind, device=device, on=device, **WHOLE_TILES.get(kind, {}))
    problem.check(problem.results())


@both_devices
@pytest.mark.parametrize("page_size", [1, 7, 16, 32, 64, 128])
@pytest.mark.parametrize("apart", [False, True])
def test_pages_of_any_size_in_one_tensor_or_two(device, apart, page_size):
    problem = make(counts=2, page_size=page_size, apart=apart, heads=16, device=device)
    problem.check(problem.results())


@both_devices
@pytest.mark.parametrize("counts", [(2, 2, 2, 0, 0), (1, 1, 1, 1, 0), (0,) * 5])
def test_requests_without_a_query_token_come_last(device, counts):
    spare = 5 * max(*counts, 1) - sum(counts)
    problem = make(counts=counts, spare=spare, device=device)
    problem.check(problem.results())
    problem.check(problem.results(problem.graph_wrapper()))


@both_devices
@pytest.mark.parametrize("rope_scale", [KV_SCALE * 0.25, KV_SCALE * 1.37])
def test_latent_and_rope_have_their_own_scales(device, rope_scale):
    """A ratio that is no power of two rounds q_pe: of 64 columns, by 2^-9 at most."""
    problem = make(counts=2, kind="bf16 q, fp8", rope_scale=rope_scale, device=device)
    before = problem.call["q_pe"].clone()
    (out, lse), (true_out, true_lse) = problem.results(), problem.drawn.truth(True, SCALE)
    torch.testing.assert_close(out.double(), true_out, atol=8e-4, rtol=2.01 / 128)
    limit = 1e-5 if rope_scale < KV_SCALE else 2e-3
    torch.testing.assert_close(lse.double() * math.log(2), true_lse, atol=limit, rtol=1e-5)
    assert torch.equal(problem.call["q_pe"], before)


@both_devices
def test_outputs_and_bases(device):
    problem = make(counts=2, device=device)
    wrapper = problem.wrapper()
    wanted, base_2 = problem.results(wrapper)
    out, lse = torch.full_like(wanted, torch.nan), torch.full_like(base_2, torch.nan)
    assert wrapper.run(**problem.call, out=out, lse=lse) is out
    assert torch.equal(out, wanted) and torch.equal(lse, base_2)
    _, natural = wrapper.run(**problem.call, return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(natural * math.log2(math.e), base_2)


@both_devices
def test_a_plan_has_its_own_copy_of_the_lists(device):
    problem = make(counts=2, device=device, on=device)
    wrapper = problem.wrapper()
    wrapper.plan(**problem.lists, **problem.model)
    for one in problem.lists.values():
        one.fill_(WILD)
    problem.check(wrapper.run(**problem.call, return_lse=True))


def test_metadata_and_longer_lists_are_accepted():
    """FlashInfer 0.7's object holds the same lists; programs pass offsets of more requests."""
    problem = make(counts=2)
    for name in ("qo_indptr", "kv_indptr"):
        problem.lists[name] = torch.cat([problem.lists[name], torch.tensor([3, WILD], dtype=torch.int32)])
    problem.check(problem.results())
    problem.lists = {"metadata": SimpleNamespace(**problem.lists)}
    problem.check(problem.results(query_layout="split", kv_cache_layout="split", lse_mode="base2"))


@both_devices
@pytest.mark.parametrize("counts", [1, 3])
def test_plans_for_graphs_stay_in_place(device, counts):
    wrapper, addresses = None, set()
    for lengths in (96, 130, 2, 5), (0, 20, 300, 1), (64, 64, 64, 64):
        problem = make(lengths, counts, device=device)
        wrapper = wrapper or problem.graph_wrapper()
        problem.check(problem.results(wrapper))
        addresses.add((wrapper._table.data_ptr(), wrapper._lengths.data_ptr(), wrapper._built.work_ranges.data_ptr()))
    assert len(addresses) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SERVED_KINDS)
@pytest.mark.parametrize("counts", [1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_a_graph_serves_later_plans(warm, counts, kind):
    batches = (700, 1500, 1, 4), (64, 0, 3000, 5), (2, 65, 3, 96)
    problems = [
        make(lengths, counts, kind=kind, device="cuda", seed=9, **WHOLE_TILES.get(kind, {})) for lengths in batches
    ]
    static = dict(problems[0].call)
    rows = problems[0].drawn.rows
    cache = torch.zeros(1000, *rows.shape[1:], dtype=rows.dtype, device="cuda")[:, :, 0]
    parts = cache[..., :512], cache[..., 512:]
    static["ckv_cache"], static["kpe_cache"] = parts if kind in WHOLE_TILES else map(torch.clone, parts)
    wrapper = problems[0].graph_wrapper()
    problems[0].results()  # so that nothing is loaded while recording
    wrapper.plan(**problems[0].lists, **problems[0].model)
    if warm:
        wrapper.run(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [wrapper.run(**static, return_lse=True) for _ in range(3)]
    for problem in [*problems, *problems[::-1]]:
        wrapper.plan(**problem.lists, **problem.model)
        for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache"):
            static[name][: len(problem.call[name])].copy_(problem.call[name])
        graph.replay()
        for layer in layers:
            problem.check(layer)


@pytest.mark.gpu
def test_a_run_waits_for_nothing():
    problem = make(counts=2, device="cuda")
    wrapper = problem.wrapper()
    problem.results(wrapper)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = wrapper.run(**problem.call, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    problem.check(results)


def test_a_spoiled_plan_is_noticed():
    """The reference notices work that a plan leaves out, and a page list of another request."""
    problem = make((700, 65, 3), heads=16)
    wrapper = problem.wrapper()
    problem.results(wrapper)
    wrapper._table[0, 1] = wrapper._table[0, 0]
    with pytest.raises(AssertionError):
        problem.check(wrapper.run(**problem.call, return_lse=True))
    wrapper._built.work_ranges.zero_()
    with refused(ValueError, "schedule"):
        wrapper.run(**problem.call)


def test_plans_for_graphs_keep_the_first_ones_shape():
    problem = make(counts=2)
    wrapper = problem.graph_wrapper(pages=30)
    problem.results(wrapper)
    for name, more in ("causal", {"causal": False}), ("sm_scale", {"sm_scale": 1.0}):
        with refused(ValueError, name):
            problem.results(wrapper, **more)
    for name, other in (
        ("kv_len_arr", make(LENGTHS[:4], 2)),
        ("qo_indptr", make(counts=1)),
        ("kv_indptr", make((500, 1, 1, 1, 1), 2)),
    ):
        with refused(ValueError, name):
            other.results(wrapper)
    problem.check(wrapper.run(**problem.call, return_lse=True))


def test_a_table_for_graphs_has_a_limit(monkeypatch):
    monkeypatch.setattr(flashinfer, "GRAPH_TABLE_BYTES", 4 * 5 * 9)
    problem = make()
    problem.check(problem.results(problem.graph_wrapper()))
    assert problem.lists["kv_indptr"].diff().max() == 9
    with refused(ValueError, "kv_indptr"):
        make((150, 1, 1, 1, 1)).results(problem.graph_wrapper())


@both_devices
def test_a_workspace_of_any_address_suffices_for_any_number_of_rows(device):
    problem = make((40,), 260, causal=False, heads=128, device=device)
    space = torch.empty(WORKSPACE, dtype=torch.int8, device=device)[1:]
    problem.check(problem.results(BatchMLAPagedAttentionWrapper(space)))
    with refused(ValueError, "float_workspace_buffer"):
        problem = make(device=device)
        problem.results(BatchMLAPagedAttentionWrapper(space[:64]))


INT32 = torch.arange(6, dtype=torch.int32)
PLAN_REFUSALS = [
    *((TypeError, name, {name: None}) for name in (*LISTS, "num_heads", "page_size")),
    (ValueError, "kv_indices", {"kv_indices": INT32.long()}),
    (ValueError, "kv_indptr", {"kv_indptr": INT32[:5]}),
    (ValueError, "kv_len_arr", {"kv_indptr": INT32 * 0}),
    (ValueError, "kv_len_arr", {"kv_len_arr": INT32[:5] - 1}),
    (ValueError, "kv_len_arr", {"kv_len_arr": INT32[:0]}),
    (ValueError, "kv_indices", {"kv_indices": INT32[:3]}),
    (ValueError, "qo_indptr", {"qo_indptr": INT32.flip(0)}),
    (ValueError, "qo_indptr", {"qo_indptr": INT32 + 1}),
    *((NotImplementedError, "qo_indptr", {"qo_indptr": torch.tensor(one, dtype=torch.int32)})
      for one in ([0, 1, 3, 4, 5, 6], [0, 1, 1, 2, 3, 4], [0, 0, 2, 4, 6, 8])),
    (ValueError, "qo_indptr", {"qo_indptr": torch.arange(len(LENGTHS) + 1, dtype=torch.int32) << 28}),
    (ValueError, "num_heads", {"num_heads": 0}),
    (ValueError, "num_heads", {"num_heads": 2**40}),
    (ValueError, "page_size", {"page_size": 0}),
    *((NotImplementedError, name, {name: value}) for name, value in (
        ("head_dim_ckv", 256), ("head_dim_kpe", 0), ("causal", None), ("q_data_type", FP8), ("q_data_type", None),
        ("kv_data_type", torch.float16), ("kv_data_type", "fp8"), ("output_dtype", torch.float32),
        ("use_profiler", True), ("use_sinks", True), ("skip_softmax", True), ("enable_pdl", True),
        ("output_scale", "per-tensor"), ("scale_mode", "bmm-scalar"), ("lse_mode", "base10"), ("new_option", 1),
        ("block_tables", INT32), ("seq_lens", INT32), ("cum_seq_lens_q", INT32), ("max_q_len", 2),
    )),
    (NotImplementedError, "qo_indptr", {"metadata": SimpleNamespace()}),
    (TypeError, "qo_indptr", dict.fromkeys(LISTS) | {"metadata": SimpleNamespace(block_tables=INT32)}),
]  # fmt: skip


@pytest.mark.parametrize("kind, name, wrong", PLAN_REFUSALS, ids=lambda one: one if isinstance(one, str) else "")
def test_plans_are_refused_by_name(kind, name, wrong):
    problem = make()
    wrapper = problem.wrapper()
    with refused(kind, name):
        problem.results(wrapper, **wrong)
    with refused(RuntimeError, "run"):
        wrapper.run(**problem.call)


ONE = torch.zeros(1)
OPTIONS = ("profiler_buffer", "kv_len", "page_table", "o_scale", "ckv_scale_arr", "sinks", "query", "kv_cache",
           "skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale", "new_option")  # fmt: skip
RUN_REFUSALS = [
    *((NotImplementedError, name, {name: ONE}) for name in OPTIONS),
    (TypeError, "q_pe", {"q_pe": None}),
    (ValueError, "q_nope", lambda c: {"q_nope": c["q_nope"].half()}),
    (ValueError, "q_nope", lambda c: {"q_nope": c["q_nope"][1:]}),
    (ValueError, "q_nope", lambda c: {"q_nope": c["q_nope"][:, 1:]}),
    (ValueError, "q_nope", lambda c: {"q_nope": c["q_nope"].to("meta")}),
    (ValueError, "q_pe", lambda c: {"q_pe": c["q_pe"].repeat_interleave(2, -1)[..., ::2]}),
    (ValueError, "ckv_cache", lambda c: {"ckv_cache": c["ckv_cache"].half()}),
    (ValueError, "ckv_cache", lambda c: {"ckv_cache": c["ckv_cache"][:, 1:]}),
    (ValueError, "ckv_cache", lambda c: {"ckv_cache": c["ckv_cache"].repeat_interleave(2, -1)[..., ::2]}),
    (ValueError, "kpe_cache", lambda c: {"kpe_cache": c["kpe_cache"][1:]}),
    (ValueError, "ckv_scale", {"ckv_scale": 1.0}),
    (ValueError, "out", {"out": torch.zeros(5, 512, 8, dtype=torch.bfloat16).transpose(1, 2)}),
    (ValueError, "lse", {"lse": torch.zeros(5, 8, dtype=torch.bfloat16)}),
    (TypeError, "out", {"out": 1}),
]  # fmt: skip


@pytest.mark.parametrize("kind, name, wrong", RUN_REFUSALS, ids=lambda one: one if isinstance(one, str) else "")
def test_runs_are_refused_by_name(kind, name, wrong):
    problem = make()
    wrapper = problem.wrapper()
    wanted, _ = problem.results(wrapper)
    with refused(kind, name):
        wrapper.run(**problem.call | (wrong(problem.call) if callable(wrong) else wrong))
    assert torch.equal(wrapper.run(**problem.call), wanted)


@pytest.mark.parametrize("name, value", [("ckv_scale", None), ("kpe_scale", None), ("kpe_scale", 0.0),
                                         ("ckv_scale", math.inf)])  # fmt: skip
def test_an_fp8_cache_needs_its_scales(name, value):
    problem = make(kind="bf16 q, fp8")
    problem.call[name] = value
    with refused(ValueError, name):
        problem.results()


@pytest.mark.parametrize("scale", [0.0, math.nan, "1", None, 3e38, 1e39])
def test_softmax_scales_are_numbers_of_float32(scale):
    with refused((TypeError, ValueError), "sm_scale"):
        make().results(sm_scale=scale)


@pytest.mark.parametrize("kind, name, wrong", [
    (ValueError, "backend", {"backend": "cutlass"}),
    (TypeError, "float_workspace_buffer", {"float_workspace_buffer": None}),
    (ValueError, "float_workspace_buffer", {"float_workspace_buffer": torch.empty(4, device="meta")}),
    (ValueError, "float_workspace_buffer", {"float_workspace_buffer": torch.empty(4, 4).T}),
    (TypeError, "kv_indices", {"use_cuda_graph": True}),
    (ValueError, "kv_indices", {"use_cuda_graph": True, "kv_indices": torch.empty(4)}),
])  # fmt: skip
def test_wrappers_are_refused_by_name(kind, name, wrong):
    with refused(kind, name):
        BatchMLAPagedAttentionWrapper(**{"float_workspace_buffer": torch.empty(64)} | wrong)


@both_devices
@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_torch_compile_leaves_no_graph_break_and_the_same_bits(device, kind):
    problem = make(counts=2, kind=kind, device=device, **WHOLE_TILES.get(kind, {}))
    wrapper = problem.wrapper()
    wrapper.plan(**problem.lists | problem.model)
    check_traced(lambda: wrapper.run(**problem.call, return_lse=True))

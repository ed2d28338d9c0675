"""FlashAttention-3's calls with qv on ETAP against float64, with FlashAttention's mask and layouts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from drop_ins import (
    KINDS,
    SOFTMAX_SCALE,
    Drawn,
    both_devices,
    check,
    check_traced,
    check_traces,
    draw,
    refused,
    traced_gpu,
)

from etap_backend.compat import flash_attn_interface as fa3

LENGTHS = (140, 0, 1, 64, 3, 300)
SIZES = {"num_heads_kv": 1, "headdim": 64, "headdim_v": 512}


@dataclass
class Problem:
    """Arguments by flash_attn_with_kvcache's names."""

    drawn: Drawn
    call: dict

    def run(self, **more):
        return fa3.flash_attn_with_kvcache(**self.call | {"return_softmax_lse": True} | more)

    def run_varlen(self, **more):
        """The same in vLLM's form."""
        call = {fa3.VARLEN.get(name, name): value for name, value in self.call.items()}
        more = {"max_seqlen_k": 1 << 20, "fa_version": 3, "softmax_scale": SOFTMAX_SCALE} | more
        return fa3.flash_attn_varlen_func(**call | {"return_softmax_lse": True} | more)

    def check(self, results, causal=True) -> None:
        """Of the rows that have tokens, in either layout."""
        out, lse = results
        assert out.is_contiguous() and lse.is_contiguous()
        if out.dim() == 4:
            assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        tokens = len(self.drawn.q)
        check(out[:tokens], lse.T[:tokens], self.drawn.truth(causal), self.drawn.q.dtype)

    def metadata(self, longest: int, **more) -> torch.Tensor:
        lengths, heads = self.call["cache_seqlens"], self.call["q"].shape[-2]
        given = {"batch_size": len(lengths), "max_seqlen_q": longest, "max_seqlen_k": 9, "num_heads_q": heads}
        return fa3.get_scheduler_metadata(**given | SIZES | {"cache_seqlens": lengths} | more)


def make(lengths=LENGTHS, counts=1, *, apart=False, rows=0, longest=None, **more) -> Problem:
    """`counts`: a number, or one for each request in ragged queries; `rows`: of q at least, NaN where no token is."""
    drawn = draw(lengths, counts, **more)
    q, ragged = drawn.q, not isinstance(counts, int)
    if rows > len(q):
        q = torch.cat([q, q.new_full((rows - len(q), *q.shape[1:]), torch.nan)])
    latent, rope = drawn.rows[..., :512], drawn.rows[..., 512:]
    if apart:
        latent, rope = latent.contiguous(), rope.contiguous()
    q = q if ragged else q.unflatten(0, (len(lengths), counts))
    call = {"q": q[..., 512:], "qv": q[..., :512], "k_cache": rope, "v_cache": latent, "page_table": drawn.table,
            "cache_seqlens": drawn.lengths}  # fmt: skip
    if ragged:
        call |= {"cu_seqlens_q": drawn.starts, "max_seqlen_q": longest or max(counts)}
    return Problem(drawn, call)


@both_devices
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, s_q", [(1, 1), (6, 3), (16, 4), (63, 2), (128, 1)])
def test_equal_lengths(device, heads, s_q, causal, kind):
    problem = make(counts=s_q, heads=heads, kind=kind, device=device)
    problem.check(problem.run(causal=causal), causal)


@both_devices
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16, 96, 128])
def test_pages_of_any_size(device, page_size, apart):
    for counts in 2, (3, 1, 2, 4, 4, 3), (1, 1, 2, 1, 1, 40):
        problem = make(counts=counts, page_size=page_size, apart=apart, device=device)
        problem.check(problem.run(causal=True))


@both_devices
@pytest.mark.parametrize("counts", [1, 2, (3, 1, 2, 4, 4, 3), (1,) * 6, (1, 1, 2, 1, 1, 40)])
def test_lengths_alone_bound_the_columns_that_are_read(device, counts):
    """Programs capture graphs with a view of one column of a wide table, and replay them with longer contexts."""
    problem = make(counts=counts, device=device)
    problem.check(problem.run(causal=True, page_table=problem.call["page_table"][:, :1]))


RAGGED = {
    "padded": ((3, 1, 2, 4, 4, 3), 16),
    "token by token, one long": ((1, 1, 2, 1, 1, 40), 16),
    "token by token, many heads": ((3, 1, 2, 4, 4, 3), 128),
    "without tokens": ((2, 0, 2, 0, 2, 2), 16),
    "without tokens, token by token": ((0, 1, 9, 0, 1, 0), 64),
}


@both_devices
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_queries(device, name, causal, kind):
    counts, heads = RAGGED[name]
    problem = make(counts=counts, heads=heads, kind=kind, device=device)
    assert fa3._padding_pays(problem.call["q"], len(counts), max(counts)) == ("token by token" not in name)
    results = problem.run(causal=causal)
    problem.check(results, causal)
    buffer = torch.full_like(results[0], torch.nan)
    out, lse = problem.run_varlen(causal=causal, out=buffer)
    assert out.data_ptr() == buffer.data_ptr() and torch.equal(out, results[0]) and torch.equal(lse, results[1])


MORE_ROWS = [
    ((3, 2), 4, 8, 16),
    ((3, 2), 4, 8, 128),
    ((3, 0, 1, 0, 4), 4, 20, 16),
    ((0, 2, 1), 2, 6, 16),
    ((1, 1, 1, 0, 0), 1, 5, 16),
    ((1, 0, 1), 2, 3, 16),
    ((0, 1, 1, 1), 2, 4, 16),
    ((3, 3, 3), 6, 14, 16),
    ((1, 1, 2, 1, 1, 40), 43, 51, 16),
]


@both_devices
@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts, longest, rows, heads", MORE_ROWS)
def test_rows_without_a_token_and_a_larger_bound(device, counts, longest, rows, heads, causal, num_splits):
    """Engines pad a step for a CUDA graph, whose replays have shorter requests, and fewer."""
    problem = make(LENGTHS[: len(counts)], counts, heads=heads, rows=rows, longest=longest, device=device)
    results = problem.run(causal=causal, num_splits=num_splits)
    assert results[0].shape[0] == rows
    problem.check(results, causal)


@pytest.mark.parametrize("page_size, longest", [(16, 65), (16, 80), (64, 1), (16, 144)])
def test_pages_that_no_request_reaches_are_not_copied(page_size, longest, monkeypatch):
    problem = make((longest, 3, 1), (1, 1, 30), heads=64, page_size=page_size)
    problem.call["page_table"] = torch.nn.functional.pad(problem.call["page_table"], (0, 9))
    selected, select = [], torch.Tensor.index_select
    record = lambda *given: (selected.append(given[0].shape), select(*given))[1]  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "index_select", record)
    problem.check(problem.run_varlen(causal=True, max_seqlen_k=longest))
    assert (3, -(-longest // page_size)) in selected


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts", [2, (2, 2, 2), (2, 1, 0), (1, 1, 30)])
def test_one_plan_serves_layers_and_other_lengths(device, counts, causal):
    longest = counts if isinstance(counts, int) else max(counts)
    problems = [make(lengths, counts, device=device) for lengths in ((700, 65, 3), (5, 0, 900))]
    plan = problems[0].metadata(longest, causal=causal, page_size=64, cu_seqlens_q=None)
    assert plan.dtype == torch.int32 and plan.dim() == 2 and plan.shape[1] == 8
    for problem in problems:
        problem.check(problem.run(causal=causal, scheduler_metadata=plan.clone()), causal)
    original = torch.full((17,), 123, dtype=torch.int32, device=device)  # FlashAttention's has one dimension
    problems[0].check(problems[0].run(causal=causal, scheduler_metadata=original), causal)


def test_a_wrong_plan_is_noticed():
    problem = make((700, 65, 3), heads=64)
    plan = problem.metadata(1)
    problem.check(problem.run(scheduler_metadata=plan), False)
    plan[:, 0].sub_(1)
    with pytest.raises((AssertionError, ValueError)):
        problem.check(problem.run(scheduler_metadata=plan), False)
    for batch, heads in (2, 64), (3, 16), (3, 128):
        other = problem.metadata(1, batch_size=batch, num_heads_q=heads, cache_seqlens=problem.drawn.lengths[:batch])
        if other.shape != plan.shape:
            with refused(ValueError, "scheduler_metadata"):
                problem.run(scheduler_metadata=other)
    lengths = torch.full((20,), 65, dtype=torch.int32)
    for rows in 16, 32, 64:  # or a batch's plan could have the shape of another batch's with other partitions
        shapes = {len(problem.metadata(1, batch_size=b, num_heads_q=rows, cache_seqlens=lengths[:b])) - b
                  for b in (1, 8, 9, 20)}  # fmt: skip
        assert len(shapes) == 1


FIRSTS = {"one token each": (1,) * 6, "ragged": (2, 1, 4, 3, 1, 2), "equal": 2}


@both_devices
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", FIRSTS)
def test_with_one_split_bits_do_not_depend_on_the_batch(device, name, planned):
    """vLLM and SGLang ask for batch invariance so."""
    counts, lengths = FIRSTS[name], {"cpu": (2000, *[65] * 5), "cuda": (5000, *[20_000] * 5)}[device]
    ragged = not isinstance(counts, int)

    def first(requests: int, splits: int) -> torch.Tensor:
        problem = make(lengths, counts, device=device)
        tokens = sum(counts[:requests]) if ragged else requests
        for key in "page_table", "cache_seqlens":
            problem.call[key] = problem.call[key][:requests]
        for key in "q", "qv":
            problem.call[key] = problem.call[key][:tokens]
        longest = max(counts[:requests]) if ragged else counts
        if ragged:
            problem.call |= {"cu_seqlens_q": problem.call["cu_seqlens_q"][: requests + 1], "max_seqlen_q": longest}
        metadata = problem.metadata(longest, num_splits=splits) if planned else None
        out, _ = problem.run(causal=True, num_splits=splits, scheduler_metadata=metadata)
        return out[: counts[0]] if ragged else out[0]

    assert torch.equal(first(1, 1), first(6, 1))
    assert not torch.equal(first(1, 0), first(6, 0)), "without it they do"


@both_devices
def test_outputs(device):
    for counts in 2, (2, 2, 2), (2, 1, 0), (1, 1, 30):
        problem = make((300, 0, 65), counts, device=device)
        wanted, _ = problem.run(causal=True)
        buffer = torch.full((len(wanted) + 2, *wanted.shape[1:]), torch.nan, dtype=torch.bfloat16, device=device)
        assert problem.run(causal=True, out=buffer[1:-1], return_softmax_lse=False).data_ptr() == buffer[1:].data_ptr()
        assert torch.equal(buffer[1:-1], wanted) and buffer[[0, -1]].isnan().all()
    problem = make((5, 6), 2)
    out, lse = problem.run(**{name: problem.call[name][:, :0] for name in ("q", "qv")})
    assert out.shape == (2, 0, 16, 512) and lse.shape == (2, 16, 0) and out.dtype == torch.bfloat16


def test_scales_and_options_without_effect():
    problem = make(counts=(1,) * 6)
    wanted = problem.run()
    assert all(map(torch.equal, problem.run(softmax_scale=SOFTMAX_SCALE), wanted))
    other = problem.run(softmax_scale=64**-0.5)  # vLLM's default
    assert all(map(torch.equal, problem.run_varlen(softmax_scale=None), other))
    assert not torch.equal(wanted[0], other[0])
    options = {
        "attention_chunk": 0, "num_splits": 5, "pack_gqa": True, "sm_margin": 3, "rotary_interleaved": True,
        "sinks": None, "only_qv": False, "ver": 3, "window_size": (-1, -1), "cu_seqlens_k_new": torch.zeros(7),
        "softcap": 0.0, "k_descale": torch.ones(6, 1), "v_descale": torch.ones(6, 1), "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    assert all(map(torch.equal, problem.run(**options), wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("counts, rows, longest", [
    ([1, 1, 1], 0, None), ([2, 2, 2], 0, None),
    ([(2, 1, 3), (1, 3, 2), (3, 3, 0)], 6, 3), ([(3, 3, 3), (3, 1, 2), (0, 2, 0)], 9, 3),
    ([(1, 1, 1), (1, 1, 0), (1, 0, 0)], 3, 1), ([(1, 1, 30), (30, 2, 0), (1, 1, 30)], 32, 30),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_serves_other_lengths(counts, rows, longest, causal):
    contexts = (700, 6000, 1), (64, 0, 6000), (6000, 65, 3)
    problems = [make(lengths, one, rows=rows, longest=longest, seed=9, pages=100, device="cuda")
                for lengths, one in zip(contexts, counts, strict=True)]  # fmt: skip
    loaded = [name for name, one in problems[0].call.items() if isinstance(one, torch.Tensor)]
    static = Problem(
        problems[0].drawn, {**problems[0].call, **{name: problems[0].call[name].clone() for name in loaded}}
    )
    static.run(causal=causal)  # so that nothing is loaded while recording
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.run(causal=causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [static.run(causal=causal) for _ in range(3)]
    for problem in [*problems, *problems[::-1]]:
        for name in loaded:
            static.call[name].copy_(problem.call[name])
        graph.replay()
        for layer in layers:
            problem.check(layer, causal)


def int32(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


REFUSALS = [
    *((NotImplementedError, name, {name: value}) for name, value in (
        ("qv", None), ("page_table", None), ("cache_seqlens", None), ("cache_seqlens", 5),
        ("k", torch.zeros(6, 1, 1, 64)), ("v", torch.zeros(1)), ("rotary_cos", torch.zeros(9, 8)),
        ("cache_batch_idx", int32(0)), ("cache_leftpad", int32(0)), ("attention_chunk", 7), ("softcap", 0.5),
        ("window_size", (3, 0)), ("window_size", torch.tensor([3, 0])), ("sinks", torch.zeros(16)),
        ("only_qv", True), ("ver", 4), ("cp_world_size", 2), ("new_option", "x"),
    )),
    *((NotImplementedError, name, lambda c, name=name, width=width: {name: c[name][..., :width]})
      for name, width in (("q", 32), ("qv", 256), ("k_cache", 32), ("v_cache", 256))),
    (NotImplementedError, "k_cache", lambda c: {"k_cache": c["k_cache"].expand(-1, -1, 3, -1)}),
    (NotImplementedError, "q", lambda c: {"q": c["q"][:, 0]}),
    (NotImplementedError, "q", {"cu_seqlens_q": torch.arange(7), "max_seqlen_q": 1}),
    (NotImplementedError, "q", lambda c: {name: c[name].float() for name in ("q", "qv", "k_cache", "v_cache")}),
    (NotImplementedError, "k_cache", lambda c: {"k_cache": c["k_cache"].to(KINDS["fp8"][1])}),
    (NotImplementedError, "qv", lambda c: {"qv": c["qv"].half()}),
    (TypeError, "q", {"q": None}),
    (TypeError, "v_cache", {"v_cache": None}),
    (ValueError, "qv", lambda c: {"qv": c["qv"][:5]}),
    (ValueError, "page_table", lambda c: {"page_table": c["page_table"][:2]}),
    (ValueError, "page_table", lambda c: {"page_table": c["page_table"].long()}),
    (ValueError, "cache_seqlens", lambda c: {"cache_seqlens": c["cache_seqlens"][:2]}),
    (ValueError, "cache_seqlens", lambda c: {"cache_seqlens": c["cache_seqlens"].long()}),
    (ValueError, "cache_seqlens", lambda c: {"cache_seqlens": c["cache_seqlens"].to("meta")}),
    (ValueError, "k_cache", lambda c: {"k_cache": c["k_cache"][:9]}),
    (ValueError, "v_cache", lambda c: {name: c[name][:0] for name in ("k_cache", "v_cache")}),
    (ValueError, "v_cache", lambda c: {"v_cache": c["v_cache"].repeat_interleave(2, -1)[..., ::2]}),
    (ValueError, "q", lambda c: {"q": c["q"].repeat_interleave(2, -1)[..., ::2]}),
    (TypeError, "out", {"out": 1}),
    (ValueError, "out", {"out": torch.zeros(6, 1, 16, 512)}),
    (ValueError, "out", {"out": torch.zeros(6, 1, 16, 576, dtype=torch.bfloat16)[..., :512]}),
    (TypeError, "softmax_scale", {"softmax_scale": "1"}),
    (TypeError, "scheduler_metadata", {"scheduler_metadata": [1]}),
    (TypeError, "scheduler_metadata", {"scheduler_metadata": torch.zeros(15, 8)}),
    (ValueError, "scheduler_metadata", {"scheduler_metadata": torch.zeros(8, 8, dtype=torch.int32)}),
]  # fmt: skip


@pytest.mark.parametrize("kind, name, wrong", REFUSALS, ids=lambda one: one if isinstance(one, str) else "")
def test_calls_are_refused_by_name(kind, name, wrong):
    problem = make()
    with refused(kind, name):
        problem.run(**(wrong(problem.call) if callable(wrong) else wrong))


@pytest.mark.parametrize("kind, name, wrong", [
    (TypeError, "max_seqlen_q", {"max_seqlen_q": None}),
    (ValueError, "max_seqlen_q", {"max_seqlen_q": 0}),
    (ValueError, "max_seqlen_q", {"cu_seqlens_q": int32(0, 3, 4), "max_seqlen_q": 2}),
    (ValueError, "cu_seqlens_q", {"cu_seqlens_q": torch.zeros(3)}),
    (ValueError, "cu_seqlens_q", {"cu_seqlens_q": int32(0)}),
    (ValueError, "cu_seqlens_q", {"cu_seqlens_q": int32(0, 1, 2).to("meta")}),
    *((ValueError, "cu_seqlens_q", {"cu_seqlens_q": int32(*one), "max_seqlen_q": 9})
      for one in ((0, 4, 3), (1, 3, 4), (0, 3, 5))),
    (ValueError, "out", {"out": torch.zeros(4, 16, 512)}),
])  # fmt: skip
@pytest.mark.parametrize("num_splits", [0, 1])
def test_ragged_bounds_are_refused_by_name(kind, name, wrong, num_splits):
    out = torch.full((4, 16, 512), torch.nan, dtype=torch.bfloat16)
    with refused(kind, name):
        make((48, 48), (3, 1)).run(causal=True, num_splits=num_splits, **{"out": out} | wrong)
    assert out.isnan().all()


@pytest.mark.parametrize("counts", [(1, 0, 1), (0, 1, 1, 1), (1, 0, 0, 1, 0)])
def test_requests_without_a_token_before_others_want_a_larger_bound(counts):
    with refused(ValueError, "cu_seqlens_q"):
        make(LENGTHS[: len(counts)], counts, rows=len(counts)).run()


def test_vllms_form_names_its_own_arguments():
    problem = make(counts=(1,) * 6)
    for kind, name, value in (
        (NotImplementedError, "q_v", None), (NotImplementedError, "fa_version", 2), (NotImplementedError, "s_aux", 1),
        (NotImplementedError, "seqused_k", None), (NotImplementedError, "block_table", None),
        (NotImplementedError, "k", problem.call["k_cache"][:, :, 0]), (TypeError, "cu_seqlens_q", None),
        (ValueError, "seqused_k", problem.call["cache_seqlens"].long()),
        (ValueError, "v", problem.call["v_cache"].repeat_interleave(2, -1)[..., ::2]),
    ):  # fmt: skip
        with refused(kind, name):
            problem.run_varlen(**{name: value})


@pytest.mark.parametrize("kind, name, value", [
    (TypeError, "cache_seqlens", None), (ValueError, "cache_seqlens", torch.zeros(6)),
    (ValueError, "cache_seqlens", int32(1)), (ValueError, "max_seqlen_q", 0), (TypeError, "max_seqlen_q", None),
    (ValueError, "max_seqlen_q", 2**30), (ValueError, "num_heads_q", 2**40), (TypeError, "num_heads_q", None),
    (NotImplementedError, "num_heads_kv", 8), (NotImplementedError, "headdim", 128),
    (NotImplementedError, "headdim_v", None), (NotImplementedError, "window_size", (3, 0)),
])  # fmt: skip
def test_plans_are_refused_by_name(kind, name, value):
    given = {"max_seqlen_q": 1} | {name: value}
    with refused(kind, name):
        make().metadata(given.pop("max_seqlen_q"), **given)


@both_devices
@pytest.mark.parametrize("counts", [1, 3, (1,) * 6, (3, 1, 2, 4, 4, 3), (1, 1, 2, 1, 1, 40)])
def test_torch_compile_leaves_no_graph_break_and_the_same_bits(device, counts):
    """Lists on the host are read to check them, which a trace cannot."""
    problem = make(counts=counts, device=device)
    check_traced(lambda: problem.run(causal=True))
    metadata = problem.metadata(max(problem.drawn.counts))
    check_traced(lambda: problem.run(causal=True, scheduler_metadata=metadata))
    if not isinstance(counts, int):
        check_traced(lambda: problem.run_varlen(causal=True))


@pytest.mark.parametrize("counts", [1, (1, 1, 2, 1, 1, 40)])
def test_torch_compile_traces_calls_on_a_gpu(counts):
    problem = make(counts=counts)
    run = problem.run if isinstance(counts, int) else problem.run_varlen
    with traced_gpu() as moved:
        problem.call = moved(problem.call)
        check_traces(lambda: run(causal=True))
        check_traces(lambda: problem.metadata(max(problem.drawn.counts)))

"""FlashAttention-3's calls with qv on ETAP, against float64 by FlashAttention's rules: its mask, its layouts.

Unused cache rows are NaN and unused page-table entries 2147480000; latent and rope lie in wider buffers, alone or as
parts of one row.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from drop_ins import DOCS, FP8, KINDS, KV_SCALE, Q_SCALE, WILD, both_devices
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from etap_backend.compat import flash_attn_interface as fa3

PAGE = DOCS / "flash_attn_interface.md"
LENGTHS = (140, 0, 1, 64, 3, 300)


@dataclass
class Problem:
    """A call's arguments by flash_attn_with_kvcache's names, and what they stand for in float64."""

    call: dict
    queries: list[torch.Tensor]  # [s_q, h, 576] of each request
    keys: list[torch.Tensor]  # [tokens, 576] of each request

    def run(self, **more):
        return fa3.flash_attn_with_kvcache(**self.call | {"return_softmax_lse": True} | more)

    def run_varlen(self, **more):
        """The same in vLLM's form."""
        names = {"k_cache": "k", "v_cache": "v", "qv": "q_v", "cache_seqlens": "seqused_k", "page_table": "block_table"}
        call = {names.get(name, name): value for name, value in self.call.items()}
        call |= {"max_seqlen_k": 1 << 20, "fa_version": 3, "return_softmax_lse": True, "softmax_scale": 576**-0.5}
        return fa3.flash_attn_varlen_func(**call | more)

    def truth(self, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out [tokens, h, 512] and lse [h, tokens] of all requests, one behind another.

        Key i is seen by query token t of s_q when i <= t + s_k - s_q, or always.
        """
        outs, lses = [], []
        for q, keys in zip(self.queries, self.keys, strict=True):
            scores = torch.einsum("qhd,kd->hqk", q, keys) * 576**-0.5
            if causal:
                seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(len(keys) - len(q))
                scores.masked_fill_(~seen, -torch.inf)
            outs.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1).nan_to_num(0), keys[:, :512]))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses, dim=1)


def problem_of(
    lengths=LENGTHS, s_q=1, *, heads=16, kind="bf16", page_size: int | None = 64, packed=False, device="cpu", seed=0
) -> Problem:
    """s_q: query tokens of each request, a number or ragged ones; page_size None: one stretch for each request."""
    torch.manual_seed(seed)
    batch, (dtype, kv_dtype) = len(lengths), KINDS[kind]
    counts = [s_q] * batch if isinstance(s_q, int) else s_q
    page, pages = (page_size, -(-max(lengths) // page_size) + 1) if page_size else (max(lengths) + 5, 1)
    q = (torch.randn(sum(counts), heads + 1, 576 + 128) / 10).clamp(-1, 1)
    rows = (torch.randn(batch * pages + 1, page, 1, 576 + 128) / 10).clamp(-1, 1)
    q = (q / Q_SCALE if dtype == FP8 else q).to(dtype)[:, :heads, :576]
    rows = (rows / KV_SCALE if kv_dtype == FP8 else rows).to(kv_dtype)[:-1, ..., :576]
    table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
    table = table if page_size else torch.arange(batch, dtype=torch.int32)[:, None]
    keys, unused = [], torch.ones(rows.shape[:2], dtype=torch.bool)
    for i, length in enumerate(lengths):
        used = torch.arange(length)
        at = table[i, used // page].long(), used % page
        keys.append((rows[at].double() * (KV_SCALE if kv_dtype == FP8 else 1)).squeeze(1).to(device))
        unused[at] = False
        table[i, -(-length // page) :] = WILD
    if kv_dtype == FP8:
        rows.view(torch.uint8)[unused] = 0x7F  # NaN
    else:
        rows[unused] = torch.nan
    queries = list((q.double() * (Q_SCALE if dtype == FP8 else 1)).to(device).split(counts))
    q, rows = q.to(device), rows.to(device)
    latent, rope = rows[..., :512], rows[..., 512:]
    if not packed:
        latent, rope = latent.contiguous(), rope.contiguous()
    if isinstance(s_q, int):
        q = q.unflatten(0, (batch, s_q))
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    kv_scale = torch.tensor(KV_SCALE, device=device).expand(batch, 1) if kv_dtype == FP8 else None
    call = {
        "q": q[..., 512:],
        "qv": q[..., :512],
        "k_cache": rope,
        "v_cache": latent,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "page_table": table.to(device) if page_size else None,
        "cu_seqlens_q": None if isinstance(s_q, int) else starts,
        "max_seqlen_q": None if isinstance(s_q, int) else max(counts),
        "q_descale": torch.tensor([Q_SCALE], device=device) if dtype == FP8 else None,
        "k_descale": kv_scale,
        "v_descale": kv_scale,
    }
    return Problem(call, queries, keys)


def check(results, wanted, dtype=torch.bfloat16) -> None:
    """Absolute or relative, and the cosine; infinities in the same places. `results` in either layout."""
    (out, lse), (true_out, true_lse) = results, wanted
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    if out.dim() == 4:
        assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert out.shape == true_out.shape and lse.shape == true_lse.shape
    out, lse = out.double(), lse.double()
    assert torch.equal(lse.isneginf(), true_lse.isneginf()) and not lse.isposinf().any()
    assert out[true_lse.T.isinf()].eq(0).all()
    for ours, truth, most, share in (out, true_out, 8e-4, 2.01 / 128), (lse, true_lse, 1e-6, 8.01 / 65536):
        ours, truth = (one.masked_fill(one.isneginf(), 0) for one in (ours, truth))
        error = (ours - truth).abs()
        wrong = ~((error < most) | (error < share * (truth.abs() + 1e-6)))
        assert not wrong.any(), (error[wrong].max(), truth[wrong][:3])
    assert 1 - 2 * (out * true_out).sum() / ((out**2).sum() + (true_out**2).sum()).clamp(min=1e-12) < 5e-6


@both_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, s_q", [(1, 1), (6, 3), (16, 4), (63, 2), (128, 1)])
def test_equal_lengths_are_as_flash_attention_defines_them(device, heads, s_q, causal, kind):
    problem = problem_of(s_q=s_q, heads=heads, kind=kind, device=device)
    check(problem.run(causal=causal), problem.truth(causal), KINDS[kind][0])


@both_devices
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [None, 1, 4, 16, 96, 128])
def test_pages_of_any_size_and_none(device, page_size, causal, packed):
    problem = problem_of(s_q=2, page_size=page_size, packed=packed, device=device)
    check(problem.run(causal=causal), problem.truth(causal))


@both_devices
@pytest.mark.parametrize("s_q", [1, 2, (3, 1, 2, 4, 4, 3), (1, 1, 1, 1, 1, 1)])
def test_lengths_alone_say_how_far_a_tables_rows_are_read(device, s_q):
    problem = problem_of(s_q=s_q, device=device)
    narrow = problem.call["page_table"][:, :1]
    check(problem.run(causal=True, page_table=narrow), problem.truth(True))
    with pytest.raises(ValueError, match="^cache_seqlens: wanted from 0 to 64, what there is room for, got 65"):
        problem.run(page_table=narrow, cache_seqlens=65)


RAGGED = {
    "padded": ((3, 1, 2, 4, 4, 3), 16),
    "one by one, for one long request": ((1, 1, 2, 1, 1, 40), 16),
    "one by one, for many heads": ((3, 1, 2, 4, 4, 3), 128),
    "without tokens": ((2, 0, 2, 0, 2, 2), 16),
    "without tokens, one by one": ((0, 1, 9, 0, 1, 0), 64),
}


@both_devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_queries(device, name, causal, kind):
    counts, heads = RAGGED[name]
    problem = problem_of(s_q=counts, heads=heads, kind=kind, device=device)
    pays = fa3._padding_pays(problem.call["q"], len(counts), max(counts))
    assert pays == ("one by one" not in name)
    wanted, results = problem.truth(causal), problem.run(causal=causal)
    check(results, wanted, KINDS[kind][0])
    buffer = torch.full_like(results[0], torch.nan)
    out, lse = problem.run_varlen(causal=causal, out=buffer)
    assert out.data_ptr() == buffer.data_ptr() and torch.equal(out, results[0]) and torch.equal(lse, results[1])


@both_devices
@pytest.mark.parametrize("s_q", [1, 2, (3, 1, 2, 4, 4, 3), (1, 1, 2, 1, 1, 40), (1,) * 6])
def test_queries_whose_columns_lie_apart_are_served(device, s_q):
    """FlashAttention's wrapper copies them."""
    problem = problem_of(s_q=s_q, device=device)
    problem.call |= {name: problem.call[name].repeat_interleave(2, -1)[..., ::2] for name in ("q", "qv")}
    check(problem.run(causal=True), problem.truth(True))


@both_devices
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_fp8_queries_have_an_output_of_either_type(device, name):
    counts, heads = RAGGED[name]
    problem = problem_of(s_q=counts, heads=heads, kind="fp8", device=device)
    for dtype in torch.float16, torch.bfloat16:
        out = torch.full((sum(counts), heads, 512), torch.nan, dtype=dtype, device=device)
        results = problem.run(causal=True, out=out)
        assert results[0].data_ptr() == out.data_ptr()
        check(results, problem.truth(True), dtype)


@both_devices
@pytest.mark.parametrize("page_size", [1, None])
def test_ragged_queries_over_other_pages(device, page_size):
    for counts in RAGGED["padded"][0], RAGGED["one by one, for one long request"][0]:
        problem = problem_of(s_q=counts, page_size=page_size, device=device)
        check(problem.run(causal=True), problem.truth(True))


@both_devices
@pytest.mark.parametrize("causal", [False, True])
def test_more_rows_than_tokens_and_a_larger_bound(device, causal):
    """As engines pad a step for a CUDA graph."""
    for counts in (3, 1, 2, 4, 4, 3), (1, 1, 2, 1, 1, 40), (2, 2, 2, 2, 0, 0):
        problem = problem_of(s_q=counts, device=device)
        tokens = sum(counts)
        spare = 4 if 0 in counts else 5
        rows = {name: torch.cat([problem.call[name], problem.call[name][:spare]]) for name in ("q", "qv")}
        bound = max(counts) if 0 in counts else max(counts) + 3
        out, lse = problem.run(causal=causal, max_seqlen_q=bound, **rows)
        assert out.shape[0] == tokens + spare and not out.isnan().any()
        check((out[:tokens], lse[:, :tokens].contiguous()), problem.truth(causal))


def padded_rows(problem: Problem, rows: int) -> dict[str, torch.Tensor]:
    """Its queries and so many rows in all; those behind its tokens are NaN."""
    parts = {name: problem.call[name] for name in ("q", "qv")}
    return {
        name: torch.cat([part, part.new_full((rows - len(part), *part.shape[1:]), torch.nan)])
        for name, part in parts.items()
    }


AS_MANY_ROWS = {
    "shorter ones": ((3, 2), 4, 16),
    "shorter ones, 128 heads": ((3, 2), 4, 128),
    "one alone": ((3,), 5, 16),
    "none in the middle": ((3, 0, 1, 0, 4), 4, 16),
    "none at first": ((0, 2, 1), 2, 16),
    "one token each, then none": ((1, 1, 1, 0, 0), 1, 16),
    "equal, then none": ((2, 2, 2, 0), 2, 16),
    "equal": ((3, 3, 3), 3, 16),
}


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", AS_MANY_ROWS)
def test_as_many_rows_as_equal_lengths_have_are_of_the_lengths_that_are_given(device, name, causal):
    """A CUDA graph has batch * max_seqlen_q rows and is replayed with shorter requests."""
    counts, longest, heads = AS_MANY_ROWS[name]
    problem = problem_of(LENGTHS[: len(counts)], counts, heads=heads, device=device)
    tokens, given = sum(counts), padded_rows(problem, len(counts) * longest) | {"max_seqlen_q": longest}
    out, lse = problem.run(causal=causal, **given)
    assert out.shape[0] == lse.shape[1] == len(counts) * longest
    check((out[:tokens], lse[:, :tokens].contiguous()), problem.truth(causal))
    buffer = torch.full_like(out, torch.nan)
    assert problem.run(causal=causal, out=buffer, return_softmax_lse=False, **given).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:tokens], out[:tokens])


WITHOUT_A_TOKEN = [(1, 0, 1), (0, 1, 1, 1), (1, 0, 0, 1, 0)]


@both_devices
@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts", WITHOUT_A_TOKEN)
def test_requests_without_a_token_stand_anywhere_where_one_might_have_two(device, counts, causal, num_splits):
    """As many rows as requests: told that none has more than one token, row i is taken for request i's."""
    problem = problem_of(LENGTHS[: len(counts)], counts, device=device)
    tokens, given = sum(counts), padded_rows(problem, len(counts)) | {"max_seqlen_q": 2, "num_splits": num_splits}
    out, lse = problem.run(causal=causal, **given)
    check((out[:tokens], lse[:, :tokens].contiguous()), problem.truth(causal))


@pytest.mark.parametrize("counts", WITHOUT_A_TOKEN)
def test_requests_without_a_token_before_others_are_refused_where_the_host_sees_them(counts):
    problem = problem_of(LENGTHS[: len(counts)], counts)
    problem.call |= padded_rows(problem, len(counts))
    out = torch.full((len(counts), 16, 512), torch.nan, dtype=torch.bfloat16)
    numbers = problem.call["cu_seqlens_q"].tolist()
    text = f"^cu_seqlens_q: wanted a token for each request .* or max_seqlen_q 2, .* got {re.escape(str(numbers))}$"
    for run, more in (problem.run, {}), (problem.run_varlen, {}), (problem.run, {"num_splits": 1}):
        with pytest.raises(ValueError, match=text):
            run(causal=True, out=out, **more)
    assert out.isnan().all()


def test_starts_without_numbers_are_not_looked_at():
    problem = problem_of((5, 6, 7), (1, 1, 1))
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for name, one in problem.call.items()
        }
        out, lse = Problem(fake, [], []).run(causal=True)
    assert out.shape == (3, 16, 512) and lse.shape == (16, 3)


@pytest.mark.parametrize("counts", [(3, 3, 3), (4, 1, 2), (3,)])
def test_ragged_queries_take_as_many_small_kernels_as_the_page_says(counts):
    taken = []
    for queries in counts, max(counts):
        problem = problem_of((5, 6, 7)[: len(counts)], queries)
        with Allocations() as allocations:
            problem.run(causal=True, return_softmax_lse=False)
        taken.append(len(allocations.kernels))
    assert taken[0] - taken[1] == 11 and "11 small kernels" in PAGE.read_text()


@both_devices
@pytest.mark.parametrize("page_size", [64, None])
def test_rows_of_the_cache_by_their_numbers(device, page_size):
    problem = problem_of(s_q=2, page_size=page_size, device=device)
    order = torch.tensor([4, 0, 3], dtype=torch.int32, device=device)
    some = {name: problem.call[name][order] for name in ("q", "qv", "cache_seqlens")}
    wanted = problem.run(causal=True)
    results = problem.run(causal=True, cache_batch_idx=order, **some)
    part = Problem({}, *([one[i] for i in order.tolist()] for one in (problem.queries, problem.keys)))
    check(results, part.truth(True))
    assert results[0].shape[0] == 3 and wanted[0].shape[0] == 6


@both_devices
@pytest.mark.parametrize("page_size", [16, None])
def test_one_length_for_all_and_all_there_is_room_for(device, page_size):
    problem = problem_of((48, 48, 48), page_size=page_size, device=device)
    wanted = problem.run()
    assert all(map(torch.equal, problem.run(cache_seqlens=48), wanted))
    table = problem.call["page_table"]
    full = {name: problem.call[name] for name in ("page_table", "k_cache", "v_cache")}
    if page_size:
        full["page_table"] = table[:, :3]
    else:
        full |= {name: full[name][:, :48] for name in ("k_cache", "v_cache")}
    assert all(map(torch.equal, problem.run(cache_seqlens=None, **full), wanted))


@both_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts", [2, (2, 2, 2), (2, 1, 0), (1, 1, 30)])
def test_one_plan_serves_the_layers_of_a_step_and_is_right_for_other_lengths(device, counts, causal):
    most = counts if isinstance(counts, int) else max(counts)
    problems = [problem_of(lengths, counts, device=device) for lengths in ((700, 65, 3), (5, 0, 900))]
    lengths = problems[0].call["cache_seqlens"]
    plan = fa3.get_scheduler_metadata(3, most, 1 << 20, 16, 1, 64, lengths, headdim_v=512, causal=causal)
    assert plan.dtype == torch.int32 and plan.dim() == 2 and plan.shape[1] == 8
    buffer = torch.full_like(plan, -1).copy_(plan)
    for problem in problems:
        for metadata in plan, buffer:
            check(problem.run(causal=causal, scheduler_metadata=metadata), problem.truth(causal))
    theirs = torch.full((17,), 123, dtype=torch.int32, device=device)
    plain = problems[0].run(causal=causal)
    assert all(map(torch.equal, problems[0].run(causal=causal, scheduler_metadata=theirs), plain))


FIRSTS = {"one token each": (1,) * 6, "ragged": (2, 1, 4, 3, 1, 2), "equal": 2}


@both_devices
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", FIRSTS)
def test_with_one_split_bits_do_not_depend_on_the_batch(device, name, planned):
    """As vLLM and SGLang ask for batch invariance."""
    counts, lengths = FIRSTS[name], {"cpu": (2000, *[65] * 5), "cuda": (5000, *[20_000] * 5)}[device]
    problem = problem_of(lengths, counts, device=device)
    own = 1 if name == "equal" else counts[0]

    def first(requests: int, splits: int) -> list[torch.Tensor]:
        some = {key: problem.call[key][:requests] for key in ("page_table", "cache_seqlens")}
        some |= {
            key: problem.call[key][: requests if name == "equal" else sum(counts[:requests])] for key in ("q", "qv")
        }
        if name != "equal":
            most = max(counts[:requests])
            some |= {"cu_seqlens_q": problem.call["cu_seqlens_q"][: requests + 1], "max_seqlen_q": most}
        if planned:
            most = problem.call["q"].shape[1] if name == "equal" else most
            sizes = (requests, most, 0, 16, 1, 64, some["cache_seqlens"])
            some["scheduler_metadata"] = fa3.get_scheduler_metadata(*sizes, headdim_v=512, num_splits=splits)
        out, lse = problem.run(causal=True, num_splits=splits, **some)
        return [out[:own], lse[:own] if name == "equal" else lse[:, :own]]

    alone, beside = (first(requests, 1) for requests in (1, 6))
    assert all(map(torch.equal, alone, beside))
    assert not torch.equal(first(1, 0)[0], first(6, 0)[0]), "without it they do"
    check(problem.run(causal=True, num_splits=1), problem.truth(True))


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 120, 256])
def test_a_plan_for_one_split_has_the_shape_of_others_and_splits_nothing(rows):
    lengths = torch.tensor([100_000, 5], dtype=torch.int32)
    plans = [fa3.get_scheduler_metadata(2, 1, 0, rows, 1, 64, lengths, headdim_v=512, num_splits=n) for n in (0, 1, 2)]
    splits = [plan[-3:].flatten()[:3].tolist() for plan in plans]
    partitions = plans[0].shape[0] - 3  # five row groups leave one
    assert plans[0].shape == plans[1].shape and splits[1] == [0, 0, 0] and splits[2] == splits[0]
    assert (splits[0][1] > 1) == (partitions > 1) == (rows != 65)


def call_of(problem: Problem, **more) -> fa3.Call:
    return fa3.Call.of(fa3.WITH_KVCACHE, problem.call | more, {})


def test_a_plan_is_what_a_call_would_make():
    """Of up to 16 rows: more of a few requests a call takes in groups on few multiprocessors, and no plan does."""
    problem = problem_of((700, 65, 3), 2, heads=8)
    plan = fa3.get_scheduler_metadata(3, 2, 0, 8, 1, 64, problem.call["cache_seqlens"], headdim_v=512)
    made, given = (
        fa3._planned(call_of(problem, scheduler_metadata=one), problem.call["cache_seqlens"], 3, 16)
        for one in (None, plan)
    )
    assert given[:4] == made[:4] and torch.equal(given.work_ranges, made.work_ranges[: made.partitions])
    assert torch.equal(given.split_offsets[:4], made.split_offsets[:4]) and made.split_offsets[1] > 1


@both_devices
def test_the_output_goes_where_it_is_wanted(device):
    for counts in 2, (2, 2, 2), (2, 1, 0), (1, 1, 30):
        problem = problem_of((300, 0, 65), counts, device=device)
        wanted = problem.run(causal=True)
        buffer = torch.full((len(wanted[0]) + 2, *wanted[0].shape[1:]), torch.nan, dtype=torch.bfloat16, device=device)
        assert problem.run(causal=True, out=buffer[1:-1], return_softmax_lse=False).data_ptr() == buffer[1:].data_ptr()
        assert torch.equal(buffer[1:-1], wanted[0]) and buffer[[0, -1]].isnan().all()
        with pytest.raises(ValueError, match=r"^out: wanted a contiguous \["):
            problem.run(causal=True, out=buffer)


def test_the_scale_is_each_forms_own():
    problem = problem_of(s_q=(1, 1, 1, 1, 1, 1))
    given = problem.run(softmax_scale=576**-0.5)
    assert all(map(torch.equal, problem.run(), given))
    other = problem.run(softmax_scale=64**-0.5)
    assert all(map(torch.equal, problem.run_varlen(softmax_scale=None), other))
    assert not torch.equal(given[0], other[0])


def test_no_queries_are_no_work():
    problem = problem_of((5, 6), 2)
    none = {name: problem.call[name][:, :0] for name in ("q", "qv")}
    out, lse = problem.run(**none)
    assert out.shape == (2, 0, 16, 512) and lse.shape == (2, 16, 0) and out.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts", [1, 2, (2, 2, 2), (2, 1, 2), (1, 1, 30)])
def test_a_graph_serves_other_lengths(counts, causal):
    shape = {"s_q": counts, "device": "cuda", "seed": 9}
    problems = [problem_of(lengths, **shape) for lengths in ((700, 6000, 1), (64, 0, 6000), (6000, 65, 3))]
    loaded = [name for name, one in problems[0].call.items() if isinstance(one, torch.Tensor)]
    static = Problem({**problems[0].call, **{name: problems[0].call[name].clone() for name in loaded}}, [], [])
    static.run(causal=causal)  # once before, as engines do, so that nothing is loaded while recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [static.run(causal=causal) for _ in range(3)]
    for problem in [*problems, *problems[::-1]]:
        for name in loaded:
            static.call[name].copy_(problem.call[name])
        graph.replay()
        for layer in layers:
            check(layer, problem.truth(causal))


@pytest.mark.gpu
@pytest.mark.parametrize("longest, replayed", [(3, ((3, 3, 3), (3, 1, 2), (0, 2, 0))), (1, ((1, 1, 1), (1, 1, 0)))])
def test_a_graph_of_equal_lengths_is_replayed_with_shorter_ones(longest, replayed):
    problems = [problem_of((700, 65, 300), counts, device="cuda") for counts in replayed]
    calls = [one.call | padded_rows(one, 3 * longest) for one in problems]
    loaded = [name for name, one in calls[0].items() if isinstance(one, torch.Tensor)]
    static = Problem(calls[0] | {name: calls[0][name].clone() for name in loaded}, [], [])
    static.run(causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = static.run(causal=True)
    for problem, call, counts in zip(problems, calls, replayed, strict=True):
        for name in loaded:
            static.call[name].copy_(call[name])
        graph.replay()
        check((out[: sum(counts)], lse[:, : sum(counts)].contiguous()), problem.truth(True))


@pytest.mark.gpu
def test_other_ragged_lengths_in_a_graph():
    """As many tokens, of other requests: what is gathered follows from the tensors alone."""
    problems = [problem_of((700, 65, 300), counts, device="cuda") for counts in ((2, 1, 3), (1, 3, 2), (3, 3, 0))]
    loaded = [name for name, one in problems[0].call.items() if isinstance(one, torch.Tensor)]
    static = Problem({**problems[0].call, **{name: problems[0].call[name].clone() for name in loaded}}, [], [])
    static.run(causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = static.run(causal=True)
    for problem in problems:
        for name in loaded:
            static.call[name].copy_(problem.call[name])
        graph.replay()
        check(results, problem.truth(True))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [1, (2, 2, 2), (2, 1, 0), (1, 1, 30)])
def test_nothing_is_copied_to_the_host(counts):
    problem = problem_of((300, 0, 65), counts, device="cuda")
    problem.run(causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


NOT_SERVED = {
    "no latent part": ("^qv: wanted the latent part .* got None", {"qv": None}),
    "another head size": (r"^q: wanted 64 columns, got \[6, 1, 16, 32\]", lambda c: {"q": c["q"][..., :32]}),
    "another latent part": (r"^qv: wanted 512 columns", lambda c: {"qv": c["qv"][..., :256]}),
    "another value width": (r"^v_cache: wanted 512 columns", lambda c: {"v_cache": c["v_cache"][..., :256]}),
    "several KV heads": (r"^k_cache: wanted \[num_blocks, page_block_size, 1, 64\], got \[\d+, 64, 3, 64\]",
                         lambda c: {"k_cache": c["k_cache"].expand(-1, -1, 3, -1)}),
    "another type": (r"^q\.dtype float32 ", lambda c: {"q": c["q"].float()}),
    "a cache of another type": (r"^k_cache\.dtype float16 ", lambda c: {"k_cache": c["k_cache"].half()}),
    "a window": (r"^window_size: wanted \(-1, -1\), got \(3, 0\)", {"window_size": (3, 0)}),
    "a window in a list": (r"^window_size: .* got \(3, 0\)", {"window_size": [3, 0]}),
    "a window in a tensor": (r"^window_size: .* got \[2\]", {"window_size": torch.tensor([3, 0])}),
    "chunks": ("^attention_chunk: wanted none, got 7", {"attention_chunk": 7}),
    "softcap": ("^softcap: wanted none, got 0.5", {"softcap": 0.5}),
    "rotary": (r"^rotary_cos: wanted none, got \[9, 8\]", {"rotary_cos": torch.zeros(9, 8)}),
    "keys to append": ("^k: wanted none, got", {"k": torch.zeros(6, 1, 1, 64)}),
    "values to append": ("^v: wanted none, got", {"v": torch.zeros(6, 1, 1, 512)}),
    "padding on the left": ("^cache_leftpad: wanted none", {"cache_leftpad": torch.zeros(6, dtype=torch.int32)}),
    "sinks": ("^sinks: wanted none", {"sinks": torch.zeros(16)}),
    "no rope": ("^only_qv: wanted none, got True", {"only_qv": True}),
    "another version": ("^ver: wanted 3, got 4", {"ver": 4}),
    "an output in wider rows": (r"^out: wanted a contiguous one, got strides \[9216, 9216, 576, 1\]",
                                {"out": torch.zeros(6, 1, 16, 576, dtype=torch.bfloat16)[..., :512]}),
    "what nobody knows": ("^new_thing: wanted none, got 'x'|^new_thing: wanted none, got x", {"new_thing": "x"}),
}  # fmt: skip
NOTHING_ASKED = {
    "attention_chunk": None, "num_splits": 5, "pack_gqa": True, "sm_margin": 3, "rotary_interleaved": False,
    "sinks": None, "only_qv": False, "ver": 3, "window_size": [-1, -1], "cu_seqlens_k_new": torch.zeros(7),
    "score_mod": None,
}  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    """A FlashAttention-3 of ten lines, found under its own name; it keeps its calls."""
    module = ModuleType(fa3.NAME)
    module.calls = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, qv=None, window_size=(-1, -1), softcap=0.0, causal=False, **more):
        module.calls.append({"q": q, "qv": qv, "window_size": window_size, "softcap": softcap, **more})
        return "theirs"

    def get_scheduler_metadata(batch_size, **more):
        return ("theirs", batch_size, more["headdim"])

    module.flash_attn_with_kvcache, module.get_scheduler_metadata = flash_attn_with_kvcache, get_scheduler_metadata
    monkeypatch.setitem(sys.modules, fa3.NAME, module)
    fa3._installed.cache_clear()
    yield module
    fa3._installed.cache_clear()


@pytest.fixture
def none_installed(monkeypatch):
    """So that this machine's is not found."""
    monkeypatch.setattr(fa3, "_installed", lambda form: None)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(none_installed, name):
    text, spoiled = NOT_SERVED[name]
    problem = problem_of()
    with pytest.raises(NotImplementedError, match=text) as refused:
        problem.run(**(spoiled(problem.call) if callable(spoiled) else spoiled))
    assert "no FlashAttention-3 was found" in str(refused.value)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_handed_over_as_it_came(installed, name):
    _, spoiled = NOT_SERVED[name]
    problem = problem_of()
    more = spoiled(problem.call) if callable(spoiled) else spoiled
    assert problem.run(**more) == "theirs"
    (call,) = installed.calls
    given = {name: value for name, value in (problem.call | more).items() if value is not None}
    assert all(call[name] is given[name] for name in call if name in given)
    assert set(more) - {"k_cache", "v_cache"} <= set(call), "what is not theirs by default is named"
    assert "rotary_sin" not in call, "an older FlashAttention need not know what nobody gave"


def test_prompts_are_handed_over_where_there_is_a_flash_attention(installed):
    rows = fa3.PROMPT_ROWS // 16
    long, longest = (problem_of((300,), s_q, seed=1) for s_q in (rows, rows + 1))
    assert longest.run(causal=True) == "theirs" and len(installed.calls) == 1
    check(long.run(causal=True), long.truth(True))


def of_fixed_parameters(
    q,
    k_cache,
    v_cache,
    qv=None,
    cache_seqlens=None,
    page_table=None,
    softcap=0.0,
    causal=False,
    return_softmax_lse=False,
):
    """As FlashAttention's own, which has no `out`."""
    return "theirs"


def test_prompts_with_what_the_installed_one_does_not_take_are_served(installed, monkeypatch):
    monkeypatch.setattr(installed, "flash_attn_with_kvcache", of_fixed_parameters)
    fa3._installed.cache_clear()
    problem = problem_of((300,), fa3.PROMPT_ROWS // 16 + 1)
    given = {name: value for name, value in problem.call.items() if value is not None}
    assert Problem(given, [], []).run(causal=True) == "theirs"
    out = torch.full((1, fa3.PROMPT_ROWS // 16 + 1, 16, 512), torch.nan, dtype=torch.bfloat16)
    results = Problem(given, [], []).run(causal=True, out=out)
    assert results[0].data_ptr() == out.data_ptr()
    check(results, problem.truth(True))
    text = "^softcap: wanted none, got 0.5; and FlashAttention-3's flash_attn_with_kvcache, .* takes no out$"
    with pytest.raises(NotImplementedError, match=text):
        problem.run(softcap=0.5, out=out)


def test_prompts_in_float16_are_served_whatever_is_installed(installed):
    """sgl-kernel's FlashAttention-3 has no kernels for it and ends the process."""
    problem = problem_of((300,), fa3.PROMPT_ROWS // 16 + 1, kind="fp16")
    check(problem.run(causal=True), problem.truth(True), torch.float16)
    assert not installed.calls


def test_prompts_are_served_where_there_is_none(none_installed):
    problem = problem_of((300,), fa3.PROMPT_ROWS // 16 + 1)
    check(problem.run(causal=True), problem.truth(True))


def test_what_asks_for_nothing_is_served(installed):
    problem = problem_of()
    assert all(map(torch.equal, problem.run(**NOTHING_ASKED), problem.run()))
    assert installed.calls == []


def test_plans_of_other_sizes_are_the_others(installed):
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    assert fa3.get_scheduler_metadata(2, 1, 99, 8, 8, 128, lengths, causal=True) == ("theirs", 2, 128)
    plan = fa3.get_scheduler_metadata(2, 1, 99, 8, 1, 64, lengths, headdim_v=512)
    problem = problem_of((3, 4))
    assert problem.run(softcap=1.0, scheduler_metadata=plan) == "theirs"
    assert "scheduler_metadata" not in installed.calls[0], "FlashAttention could not read it"
    theirs = torch.zeros(9, dtype=torch.int32)
    problem.run(softcap=1.0, scheduler_metadata=theirs)
    assert installed.calls[1]["scheduler_metadata"] is theirs


REFUSALS = {
    "no query": (TypeError, "^q: wanted a tensor, got None", {"q": None}),
    "no cache": (TypeError, "^v_cache: wanted a tensor, got None", {"v_cache": None}),
    "three dimensions": (ValueError, r"^q: wanted shape \[b, s_q, h, 64\], got \[6, 16, 64\]",
                         lambda c: {"q": c["q"][:, 0]}),
    "a latent part of other queries": (ValueError, r"^qv: wanted \[6, 1, 16, 512\]", lambda c: {"qv": c["qv"][:5]}),
    "four dimensions of ragged ones": (ValueError, r"^q: wanted shape \[total_q, h, 64\]",
                                       {"cu_seqlens_q": torch.arange(7), "max_seqlen_q": 1}),
    "pages of fewer requests": (ValueError, r"^page_table: wanted an int32 tensor of shape \[6, pages\], got \[2,",
                                lambda c: {"page_table": c["page_table"][:2]}),
    "lengths of fewer": (ValueError, "^cache_seqlens: wanted an int, or ",
                         lambda c: {"cache_seqlens": c["cache_seqlens"][:2]}),
    "more stretches": (ValueError, r"^k_cache: wanted \[6, seqlen, 1, 64\] without page_table", {"page_table": None}),
    "a latent part in other pages": (ValueError, "^k_cache: wanted shape ", lambda c: {"k_cache": c["k_cache"][:9]}),
    "an output that is none": (TypeError, "^out: wanted a tensor", {"out": 1}),
    "an output of another type": (ValueError, "^out: wanted a contiguous .* of bfloat16 on cpu, got .* of float32",
                                  {"out": torch.zeros(6, 1, 16, 512)}),
    "an output of another type beside no queries": (
        ValueError, r"^out: wanted a contiguous \[6, 0, 16, 512\] of bfloat16",
        lambda c: {"q": c["q"][:, :0], "qv": c["qv"][:, :0], "out": torch.zeros(6, 0, 16, 512)}),
    "lengths of 64 bits": (TypeError, "^cache_seqlens: wanted int32, got int64",
                           lambda c: {"cache_seqlens": c["cache_seqlens"].long()}),
    "lengths without memory": (ValueError, "^cache_seqlens: wanted a tensor on cpu like q, got one on meta",
                               lambda c: {"cache_seqlens": c["cache_seqlens"].to("meta")}),
    "a length that there is no room for": (ValueError, "^cache_seqlens: wanted from 0 to 384, .* got 385",
                                           {"cache_seqlens": 385}),
    "less than nothing": (ValueError, "^cache_seqlens: wanted from 0 to 384, .* got -1", {"cache_seqlens": -1}),
    "half a token": (ValueError, "^cache_seqlens: wanted an int, or .* got 0.5", {"cache_seqlens": 0.5}),
    "a table of 64 bits": (TypeError, "^page_table: wanted int32, got int64",
                           lambda c: {"page_table": c["page_table"].long()}),
    "numbers of rows in a list": (ValueError, r"^cache_batch_idx: wanted an int32 tensor of shape \[6\], got \[0\]",
                                  {"cache_batch_idx": [0]}),
    "numbers of rows of 64 bits": (TypeError, "^cache_batch_idx: wanted int32, got int64",
                                   {"cache_batch_idx": torch.arange(6)}),
    "fewer numbers of rows": (ValueError, r"^cache_batch_idx: wanted an int32 tensor of shape \[6\], got \[3\]",
                              {"cache_batch_idx": torch.arange(3, dtype=torch.int32)}),
    "values that step": (ValueError, "^v_cache: wanted stride 1",
                         lambda c: {"v_cache": c["v_cache"].repeat_interleave(2, -1)[..., ::2]}),
    "two types of queries": (TypeError, "^q: wanted float16 like qv, got bfloat16", lambda c: {"qv": c["qv"].half()}),
    "two types of queries beside an output": (
        ValueError, "^out: wanted None or float16 for a qv of float16, got bfloat16",
        lambda c: {"qv": c["qv"].half(), "out": torch.zeros(6, 1, 16, 512, dtype=torch.bfloat16)}),
    "no pages": (ValueError, "^v_cache: wanted at least one page",
                 lambda c: {name: c[name][:0] for name in ("k_cache", "v_cache")}),
    "a scale of queries": (TypeError, "^softmax_scale: wanted a number, got str", {"softmax_scale": "1"}),
    "a plan that is no tensor": (TypeError, "^scheduler_metadata: wanted a tensor, got list",
                                 {"scheduler_metadata": [1]}),
    "a plan of another type": (TypeError, "^scheduler_metadata: wanted int32, got float32",
                               {"scheduler_metadata": torch.zeros(15, 8)}),
    "a plan of other requests": (ValueError, r"^scheduler_metadata: .* for 6 requests of 16 .*\[15, 8\], got \[8, 8\]",
                                 {"scheduler_metadata": torch.zeros(8, 8, dtype=torch.int32)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_is_refused_by_name(installed, name):
    """Whoever else is there."""
    kind, text, spoiled = REFUSALS[name]
    problem = problem_of()
    with pytest.raises(kind, match=text):
        problem.run(**(spoiled(problem.call) if callable(spoiled) else spoiled))


class Allocations(TorchDispatchMode):
    """The elements of each tensor that torch makes, and the operators that write one."""

    def __init__(self):
        super().__init__()
        self.elements, self.kernels = [], []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        self.elements += [made.numel()] if isinstance(made, torch.Tensor) else []
        only_memory = function.is_view or "empty" in function.name() or "view" in function.name()
        self.kernels += [] if only_memory else [function.name()]
        return made


@pytest.mark.parametrize(
    "page_size, longest, columns", [(16, 65, 5), (16, 80, 5), (16, 81, 6), (64, 0, 1), (16, 999, 10)]
)
def test_pages_that_no_request_reaches_are_not_copied(page_size, longest, columns, monkeypatch):
    lengths, counts = (min(longest, 144), 3, 1), (1, 1, 30)
    problem = problem_of(lengths, counts, heads=64, page_size=page_size)
    short = 10 - problem.call["page_table"].shape[1]
    wide = torch.nn.functional.pad(problem.call["page_table"], (0, short), value=WILD)
    selected = []
    select = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor, "index_select", lambda *given: (selected.append(given[0].shape), select(*given))[1]
    )
    check(problem.run_varlen(causal=True, block_table=wide, max_seqlen_k=longest), problem.truth(True))
    assert (3, columns) in selected
    problem.run_varlen(causal=True, block_table=wide, max_seqlen_k=torch.tensor(longest))
    assert selected[-1] == (3, 10), "what would have to be copied to the host bounds nothing"
    problem.run_varlen(causal=True, block_table=wide.clamp(max=0), max_seqlen_k=longest, seqused_k=None)
    assert selected[-1] == (3, 10), "all there is room for"
    problem.run(causal=True, page_table=torch.nn.functional.pad(wide, (0, 9))[:, :10])
    assert selected[-1] == (3, 10), "no more than the view has"


def test_a_plan_allocates_no_workspace():
    """A step's is made anew each step, and each call has a workspace of its own."""
    lengths = torch.tensor((700, 65, 3), dtype=torch.int32)
    with Allocations() as allocations:
        plan = fa3.get_scheduler_metadata(3, 1, 0, 16, 1, 64, lengths, headdim_v=512)
    assert plan.numel() in allocations.elements and max(allocations.elements) <= plan.numel()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_plan_has_the_same_partitions_whatever_the_batch(kind):
    """Or one of more requests would have the shape of fewer requests' with other partitions, and be taken for it."""
    lengths = torch.full((20,), 65, dtype=torch.int32)
    for rows in (16, 32, 64):
        plans = [fa3.get_scheduler_metadata(b, 1, 0, rows, 1, 64, lengths[:b], headdim_v=512) for b in (1, 8, 9, 20)]
        assert len({len(plan) - b for plan, b in zip(plans, (1, 8, 9, 20), strict=True)}) == 1
    problem = problem_of((700, 65, 3), heads=64, kind=kind)
    plan = fa3.get_scheduler_metadata(3, 1, 0, 64, 1, 64, problem.call["cache_seqlens"], headdim_v=512)
    check(problem.run(scheduler_metadata=plan), problem.truth(False), KINDS[kind][0])


def test_plans_of_other_requests_and_heads_are_refused():
    """On a GPU they would leave out a part of the work."""
    lengths = torch.tensor((700, 65, 3, 1, 1, 1), dtype=torch.int32)
    problem = problem_of(lengths.tolist(), heads=128)
    for batch, heads in (6, 16), (3, 128), (5, 128):
        plan = fa3.get_scheduler_metadata(batch, 1, 0, heads, 1, 64, lengths[:batch], headdim_v=512)
        with pytest.raises(ValueError, match="^scheduler_metadata: wanted what .* for 6 requests of 128 query rows"):
            problem.run(scheduler_metadata=plan)


@pytest.mark.parametrize("more, text", [
    ({"cache_seqlens": None}, "cache_seqlens: wanted a tensor, got None"),
    ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens: wanted int32, got float32"),
    ({"batch_size": 3}, r"cache_seqlens: wanted shape \[3\], got \[2\]"),
    ({"max_seqlen_q": 0}, "max_seqlen_q: wanted at least 1, got 0"),
    ({"max_seqlen_q": None}, "max_seqlen_q: wanted an int, got None"),
    ({"num_heads_q": None}, "num_heads_q: wanted an int, got None"),
    ({"max_seqlen_q": -2, "num_heads_q": -8}, "max_seqlen_q: wanted at least 1, got -2"),
])  # fmt: skip
def test_plans_that_cannot_be_are_refused(more, text):
    call = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 9, "num_heads_q": 16, "num_heads_kv": 1, "headdim": 64}
    call |= {"cache_seqlens": torch.ones(2, dtype=torch.int32), "headdim_v": 512}
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        fa3.get_scheduler_metadata(**call | more)


def test_a_row_of_the_cache_that_is_not_there_is_refused_by_its_number():
    problem = problem_of(page_size=None)
    with pytest.raises(ValueError, match="^cache_batch_idx: wanted pages from 0 to 5 .* got 6"):
        problem.run(cache_batch_idx=torch.arange(1, 7, dtype=torch.int32))


@pytest.mark.parametrize("wrong", [6, -1])
def test_a_row_of_the_table_that_is_not_there_is_refused_where_the_host_sees_it(wrong):
    problem = problem_of()
    out = torch.full((6, 1, 16, 512), torch.nan, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"^cache_batch_idx: wanted numbers from 0 on below 6, .* got {wrong}$"):
        problem.run(cache_batch_idx=torch.tensor([0, 1, 2, 3, 4, wrong], dtype=torch.int32), out=out)
    assert out.isnan().all()


def test_numbers_of_rows_that_lie_apart_are_no_table_of_more_pages():
    problem = problem_of((48, 48), page_size=None)
    rows = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)[:, 0]
    swapped = {name: problem.call[name].flip(0) for name in ("q", "qv")}
    out, lse = problem.run(cache_batch_idx=rows, **swapped)
    check((out.flip(0), lse.flip(0)), problem.truth(False))
    with pytest.raises(ValueError, match="^cache_seqlens: wanted at most 53 tokens"):
        problem.run(cache_batch_idx=rows, cache_seqlens=torch.tensor([54, 1], dtype=torch.int32))


def test_numpys_ints_are_ints():
    numpy = pytest.importorskip("numpy")
    problem = problem_of((48, 48, 48), (1, 2, 1))
    given = problem.run(cache_seqlens=numpy.int64(48), max_seqlen_q=numpy.int32(2))
    assert all(map(torch.equal, given, problem.run()))


@pytest.mark.parametrize("wrong, text", [
    ({"cu_seqlens_q": torch.zeros(7, dtype=torch.int32, device="meta")}, "^cu_seqlens_q: wanted a tensor on cpu like"),
    ({"out": torch.zeros(7, 16, 512)}, r"^out: wanted a contiguous \[7, 16, 512\] of bfloat16 on cpu, got .* float32"),
    ({"max_seqlen_q": None}, "^max_seqlen_q: wanted an int of at least 1 with cu_seqlens_q, got None"),
    ({"max_seqlen_q": 0}, "^max_seqlen_q: .* got 0"),
    ({"cu_seqlens_q": torch.zeros(7)}, r"^cu_seqlens_q: wanted an int32 .* got float32 \[7\]"),
    ({"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}, r"^cu_seqlens_q: .* got int32 \[1\]"),
])  # fmt: skip
def test_ragged_queries_want_their_bounds(wrong, text):
    with pytest.raises(ValueError, match=text):
        problem_of(s_q=(1, 2, 1, 1, 1, 1)).run(**wrong)


@pytest.mark.parametrize("starts, longest, text", [
    ((0, 3, 4), 2, "max_seqlen_q: wanted at least the 3 tokens of a request in cu_seqlens_q, got 2"),
    ((0, 4, 3), 4, r"cu_seqlens_q: wanted ascending numbers from 0 to at most 4, q's rows, got \[0, 4, 3\]"),
    ((1, 3, 4), 4, r"cu_seqlens_q: wanted ascending .* got \[1, 3, 4\]"),
    ((0, 3, 5), 4, r"cu_seqlens_q: wanted ascending .* got \[0, 3, 5\]"),
])  # fmt: skip
@pytest.mark.parametrize("num_splits", [0, 1])
def test_tokens_beyond_the_bounds_are_refused_where_the_host_sees_them(starts, longest, text, num_splits):
    problem = problem_of((48, 48), (3, 1))
    out = torch.full((4, 16, 512), torch.nan, dtype=torch.bfloat16)
    given = {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32), "max_seqlen_q": longest, "out": out}
    with pytest.raises(ValueError, match=f"^{text}$"):
        problem.run(causal=True, num_splits=num_splits, **given)
    assert out.isnan().all()


def test_scales_are_one_for_all(none_installed):
    problem = problem_of(kind="fp8")
    for name in "q_descale", "k_descale", "v_descale":
        with pytest.raises(NotImplementedError, match=rf"^{name}: wanted one element, .* got \[6, 1\]"):
            problem.run(**{name: torch.ones(6, 1)})
    for other in None, torch.ones(1):
        with pytest.raises(NotImplementedError, match="^k_descale, v_descale: wanted one tensor for both"):
            problem.run(k_descale=other)
    plain = problem_of()
    ignored = {name: torch.ones(6, 1) for name in ("q_descale", "k_descale", "v_descale")}
    assert all(map(torch.equal, plain.run(**ignored), plain.run())), "as FlashAttention does beside 16 bits"


def test_vllms_form_says_its_own_names(none_installed):
    problem = problem_of(s_q=(1, 1, 1, 1, 1, 1))
    for wrong, text in (
        ({"q_v": None}, "^q_v: wanted the latent part"),
        ({"fa_version": 2}, "^fa_version: wanted 3, got 2"),
        ({"cp_world_size": 2}, "^cp_world_size: wanted 1, got 2"),
        ({"s_aux": torch.zeros(16)}, "^s_aux: wanted none"),
        ({"mask_mod": print}, "^mask_mod: wanted none"),
        ({"k": problem.call["k_cache"][:, :, 0]}, r"^k: wanted \[num_blocks, page_block_size, 1, 64\]"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            problem.run_varlen(**wrong)
    lengths, k = problem.call["cache_seqlens"], problem.call["k_cache"]
    for wrong, text in (
        ({"seqused_k": lengths[:2]}, "^seqused_k: wanted"),
        ({"seqused_k": lengths.long()}, "^seqused_k: wanted int32, got int64"),
        ({"k": k.repeat_interleave(2, -1)[..., ::2]}, "^k: wanted stride 1"),
        ({"block_table": problem.call["page_table"].long()}, "^block_table: wanted int32"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            problem.run_varlen(**wrong)


THEIRS = """
import torch
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, softcap=0.0, page_table=None, *, cache_seqlens=None, only_qv=False
):
    "Theirs."
    return "theirs", tuple(q.shape), softcap
"""


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Writes a module that may be imported by this name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> str:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_it_is_in_front_of_the_functions_of_an_installed_module(other):
    name = other("other_attention", THEIRS)
    before = importlib.import_module(name).flash_attn_with_kvcache
    module = fa3.install(name)
    ours = module.flash_attn_with_kvcache
    assert ours.handed_to is before and ours.__doc__ == "Theirs."
    assert fa3.install(name) is module and module.flash_attn_with_kvcache is ours
    call = problem_of().call
    arguments = [call[name] for name in ("q", "k_cache", "v_cache")]
    served = ours(*arguments, None, None, call["qv"], 0.0, call["page_table"], cache_seqlens=call["cache_seqlens"])
    assert torch.equal(served, problem_of().run(return_softmax_lse=False))
    assert ours(*arguments, softcap=0.5) == ("theirs", (6, 1, 16, 64), 0.5)
    assert ours(*arguments, None, None, call["qv"], only_qv=True) == ("theirs", (6, 1, 16, 64), 0.0)
    with pytest.raises(TypeError, match="takes from 3 to 8 positional arguments but 9 were given"):
        ours(*range(9))


def test_without_a_flash_attention_it_is_one(run):
    if importlib.util.find_spec(fa3.NAME) is not None:
        pytest.skip("this machine has one")
    program = "install(); import flash_attn_interface as f; print(f.flash_attn_with_kvcache.__module__, install() is f)"
    assert run(program) == "etap_backend.compat.flash_attn_interface True\n"


def test_what_cannot_be_installed_over_is_refused(other):
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        fa3.install("not_there")
    other(fa3.NAME, "import not_there")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        fa3.install()
    with pytest.raises(ValueError, match=r"^name: wanted a module with flash_attn_with_kvcache\(qv=.*, got empty"):
        fa3.install(other("empty", "def flash_attn_varlen_func(q, k, v, qv=None): pass"))


@pytest.fixture
def run(run_program):
    head = "from etap_backend.compat.flash_attn_interface import install; "
    return lambda program: "".join(run_program(head + program, may_fail=True))


def test_the_programs_of_the_page_run(run):
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(first, names)
    rows = torch.cat([names["latent"], names["rope"]], dim=-1).double().view(2, 256, 576)
    q = torch.cat([names["q_nope"], names["q_rope"]], dim=-1).double()
    keys = [own[:tokens] for own, tokens in zip(rows, (200, 7), strict=True)]
    out, lse = Problem({}, list(q), keys).truth(True)
    torch.testing.assert_close(names["out"].double().flatten(0, 1), out, rtol=0.02, atol=0.01)
    torch.testing.assert_close(names["lse"].double().transpose(0, 1).flatten(1), lse, rtol=1e-5, atol=1e-5)
    assert len(first.strip().splitlines()) <= 12 and math.isfinite(names["lse"].sum())
    program = f"0\n{second}\nimport flash_attn_interface as f; print(f.flash_attn_with_kvcache.__name__)"
    assert run(program) == "flash_attn_with_kvcache\n"

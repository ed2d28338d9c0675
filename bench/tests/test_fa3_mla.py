"""FlashAttention-3's suite, on a script with the function and the lists that FlashAttention's own has."""

import pytest
import torch

from etap_backend.compat import flash_attn_interface
from bench.qualify import fa3_mla
from bench.qualify.fake_checkout import checkout, outcomes
from bench.qualify.theirs import Errors

SCRIPT = """
import itertools
import os
import pytest
import torch
from flash_attn_interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func
from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

def listed(**lists):
    marks = [pytest.mark.parametrize(names.replace("_and_", ","), values) for names, values in lists.items()]
    def mark(test):
        for one in marks:
            test = one(test)
        return test
    return mark

@listed(dtype=[torch.bfloat16], mha_type=["mha", "mqa"], new_kv=[False] + [True] * (NO("APPENDKV")),
        has_leftpad=[False, True], causal_and_local=[(False, False), (True, False)] + [(False, True)] * NO("LOCAL"),
        page_size=[None, 64, 48],
        has_batch_idx=[False, True], varlen_q=[False, True], d=[128], seqlen_q_and_seqlen_k=[(3, 128)])
def test_flash_attn_kvcache(
    seqlen_q, seqlen_k, d, varlen_q, has_batch_idx, has_leftpad, page_size, causal, local, new_kv, mha_type, dtype
):
    print("on", page_size)
    assert (d, mha_type, has_leftpad, local, new_kv) == (64, "mqa", False, False, False)
    assert seqlen_k % (page_size or 1) == 0
    seen = []
    for dv, chunk in itertools.product([256, 512, 64], [0]):
        seen.append(dv)
        if SKIPS and page_size is None:
            pytest.skip("not here")
        for num_splits, precomputed in itertools.product([1, 0], [False, True]):
            page = page_size or seqlen_k
            caches = [torch.ones(4 * seqlen_k // page, page, 1, width, dtype=dtype) for width in (d, dv)]
            caches[1].mul_(VALUE)
            q, qv = (torch.ones(2, seqlen_q, 6, width, dtype=dtype) for width in (d, dv))
            table = torch.arange(len(caches[0]), dtype=torch.int32).view(4, -1) if page_size else None
            lengths = torch.tensor([2, 100], dtype=torch.int32)
            starts = None
            if varlen_q:
                q, qv, starts = q.flatten(0, 1)[:4], qv.flatten(0, 1)[:4], torch.tensor([0, 3, 4], dtype=torch.int32)
            elif not has_batch_idx:
                table, caches = (table[:2], caches) if page_size else (None, [one[:2] for one in caches])
            rows = torch.tensor([3, 1], dtype=torch.int32) if has_batch_idx or varlen_q else None
            plan = get_scheduler_metadata(2, 3, 128, 6, 1, d, lengths, q.dtype, headdim_v=dv) if precomputed else None
            out, lse, *_ = flash_attn_with_kvcache(
                q, *caches, None, None, qv=qv, cache_seqlens=lengths, cache_batch_idx=rows, page_table=table,
                cu_seqlens_q=starts, max_seqlen_q=3 if varlen_q else None, causal=causal, scheduler_metadata=plan,
                num_splits=num_splits, return_softmax_lse=True, window_size=(-1, -1), attention_chunk=chunk,
            )
            out = out if varlen_q else out.flatten(0, 1)
            assert out[0].eq(0).all() == causal and out[1:].eq(0.5).all()
    assert seen == [512]
"""
KINDS = {f"{pages}, {mask}" for pages in ("no pages", "pages of 64") for mask in ("causal", "not causal")}


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Cases of a script whose values are these; it wants 0.5."""
    for what in fa3_mla.NOT_SERVED:  # so that they are as before behind the test
        monkeypatch.setenv(f"FLASH_ATTENTION_DISABLE_{what}", "FALSE")
    flash_attn_interface._installed.cache_clear()
    given = 'def NO(what):\n    import os\n    return os.environ[f"FLASH_ATTENTION_DISABLE_{what}"] != "TRUE"\n'
    modules = (*flash_attn_interface.WITH_KVCACHE.modules, fa3_mla.SUITE.script.stem)
    with checkout(fa3_mla, tmp_path, monkeypatch, modules) as made:
        yield lambda value, skips=False, **options: made(f"{given}VALUE, SKIPS = {value}, {skips}\n{SCRIPT}", **options)
    flash_attn_interface._installed.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Those that come to our function."""
    made, ours = [], fa3_mla.fa3.flash_attn_with_kvcache
    monkeypatch.setattr(
        fa3_mla.fa3, "flash_attn_with_kvcache", lambda *of, **named: made.append(1) or ours(*of, **named)
    )
    return made


def test_prompts_are_not_handed_to_another_one(cases, calls, monkeypatch):
    monkeypatch.setattr(flash_attn_interface, "PROMPT_ROWS", 2)
    assert outcomes(cases(0.5)) == {kind: {"passed": 4} for kind in KINDS}
    assert len(calls) == 16 * 4, "a call was handed back to the stand-in"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_their_cases_run_with_our_sizes_and_without_what_is_not_served(cases, calls, dtype):
    assert outcomes(cases(0.5, dtype=dtype)) == {kind: {"passed": 4} for kind in KINDS}
    assert len(calls) == 16 * 4


def test_a_wrong_case_fails(cases):
    assert outcomes(cases(0.25)) == {kind: {"failed": 4} for kind in KINDS}


def test_a_skipped_case_and_one_without_a_call_fail(cases):
    found = outcomes(cases(0.5, skips=True))
    assert {kind: counts["failed"] for kind, counts in found.items() if counts["failed"]} == {
        kind: 4 for kind in KINDS if kind.startswith("no pages")
    }
    with pytest.raises(AssertionError, match="the test made no call"):
        fa3_mla.run(lambda: None, fa3_mla.Beside(None, Errors()), {})


def test_another_ones_errors_stand_beside_ours(cases):
    """That one is ETAP itself here."""
    outcomes(cases(0.5, beside="etap_backend.compat.flash_attn_interface"))
    found = fa3_mla.SUITE.errors.summary()
    assert set(found) == {f"{mask}{ragged}" for mask in ("causal", "not causal") for ragged in ("", ", ragged")}
    assert all(each["calls"] == 4 and each["ratio"] == 1 for each in found.values())
    fa3_mla.SUITE.must_be_no_worse()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_truth_beside_is_that_of_the_call(ragged, causal):
    torch.manual_seed(0)
    q, qv = torch.randn(2, 3, 4, 64).bfloat16(), torch.randn(2, 3, 4, 512).bfloat16()
    caches = [torch.randn(5, 16, 1, width).bfloat16() for width in (64, 512)]
    named = {
        "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32) if ragged else None,
        "max_seqlen_q": 3 if ragged else None,
        "qv": qv.flatten(0, 1)[:4] if ragged else qv,
        "page_table": torch.tensor([[3, 0], [1, 2], [4, 2]], dtype=torch.int32),
        "cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32),
        "cache_seqlens": torch.tensor([2, 30], dtype=torch.int32),
        "causal": causal,
    }
    q = q.flatten(0, 1)[:4] if ragged else q
    truth = fa3_mla.truth_of(fa3_mla.varlen_call(q, *caches, named))
    out = flash_attn_interface.flash_attn_with_kvcache(q, *caches, **named)
    torch.testing.assert_close(out.double().flatten(0, -3), truth, rtol=0.02, atol=0.01)
    assert truth.shape == (4 if ragged else 6, 4, 512)


def test_errors_are_summed_up_by_kind_and_held_to_the_others(monkeypatch):
    errors = Errors()
    monkeypatch.setattr(fa3_mla.SUITE, "errors", errors)
    errors.squares["causal"] = [(4.0, 1.0), (4.0, 1.0)]
    assert errors.summary() == {"causal": {"calls": 2, "ours": 2.0, "theirs": 1.0, "ratio": 2.0}}
    with pytest.raises(AssertionError):
        fa3_mla.SUITE.must_be_no_worse()

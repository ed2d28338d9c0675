"""The run of a script with the function and the lists that FlashAttention's own has."""

import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from etap_backend.compat import flash_attn_interface
from etap_backend.lab.checks import fa3_mla

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
def invoke(tmp_path, monkeypatch):
    """Run the program on a script whose values are these; it wants 0.5."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for what in fa3_mla.NOT_SERVED:  # so that they are as before behind the test
        monkeypatch.setenv(f"FLASH_ATTENTION_DISABLE_{what}", "FALSE")
    names = (*flash_attn_interface.WITH_KVCACHE.modules, fa3_mla.SCRIPT.stem)
    flash_attn_interface._installed.cache_clear()
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    app = typer.Typer()
    app.command()(fa3_mla.main)
    given = 'def NO(what):\n    import os\n    return os.environ[f"FLASH_ATTENTION_DISABLE_{what}"] != "TRUE"\n'

    def run(value: float, *words: str, skips: bool = False):
        script = tmp_path / fa3_mla.SCRIPT
        script.parent.mkdir(parents=True)
        script.write_text(f"{given}VALUE, SKIPS = {value}, {skips}\n{SCRIPT}")
        output = tmp_path / "result.json"
        result = CliRunner().invoke(app, [str(tmp_path), "--output", str(output), *words])
        return result, json.loads(output.read_text())

    yield run
    for name in names:
        sys.modules.pop(name, None)
    flash_attn_interface._installed.cache_clear()


def test_prompts_are_not_handed_to_another_one(invoke, monkeypatch):
    monkeypatch.setattr(flash_attn_interface, "PROMPT_ROWS", 2)
    result, document = invoke(0.5)
    assert result.exit_code == 0, document["failures"][:1]
    assert document["calls"] == 16 * 4, "a call was handed back to the stand-in"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_their_cases_run_with_our_sizes_and_without_what_is_not_served(invoke, dtype):
    result, document = invoke(0.5, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert document["cases"] == dict.fromkeys(document["cases"], {"wanted": 4, "passed": 4})
    assert set(document["cases"]) == KINDS and document["calls"] == 16 * 4
    assert document["complete"] and document["failures"] == [] and document["dtype"] == dtype
    assert document["script_sha256"] and document["flashattention_commit"] is None


def test_a_wrong_case_is_no_pass_and_ends_nothing(invoke):
    result, document = invoke(0.25)
    assert result.exit_code == 1 and not document["complete"] and document["failed"] == 16
    assert document["cases"] == dict.fromkeys(KINDS, {"wanted": 4, "passed": 0})
    assert document["failures"][0]["error"].startswith("AssertionError")
    assert document["failures"][0]["printed"].startswith("on ")


def test_a_skipped_case_is_no_pass(invoke):
    result, document = invoke(0.5, skips=True)
    assert result.exit_code == 1 and document["failed"] == 8
    assert {failure["error"] for failure in document["failures"]} == {"Skipped: not here"}


def test_another_ones_errors_stand_beside_ours(invoke):
    """That one is ETAP itself here."""
    result, document = invoke(0.5, "--beside", "etap_backend.compat.flash_attn_interface")
    assert result.exit_code == 0, result.output
    kinds = {f"{mask}{ragged}" for mask in ("causal", "not causal") for ragged in ("", ", ragged")}
    assert set(document["relative_rmse"]) == kinds
    assert all(each["calls"] == 4 and each["ratio"] == 1 for each in document["relative_rmse"].values())


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


def test_errors_are_summed_up_by_kind():
    call = fa3_mla.Beside(None)
    call.squares["causal"] = [(4.0, 1.0), (4.0, 1.0)]
    assert call.summary() == {"causal": {"calls": 2, "ours": 2.0, "theirs": 1.0, "ratio": 2.0}}

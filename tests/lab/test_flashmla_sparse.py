"""FlashMLA's call over the sparse one, and the run of a script with the functions that FlashMLA's has."""

import dataclasses
import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from etap_backend.lab.checks import flashmla_sparse
from etap_backend.lab.checks.sparse_cases import SparseCase, build
from etap_backend.reference import sparse_mla_decode_reference

SCRIPT = """
import dataclasses, sys
import torch
import flash_mla

@dataclasses.dataclass
class Case:
    h_q: int
    d_qk: int
    num_runs: int
    check_correctness: bool = True

@dataclasses.dataclass
class Result:
    is_correct: bool

def gen_testcase():
    return [Case(h_q, d_qk, num_runs) for d_qk in (576, 512) for h_q in (64, 128) for num_runs in (0, 10)]

def test_flash_mla(case):
    assert case.d_qk == 576 and case.num_runs == 0
    q = torch.ones(2, 3, case.h_q, 576, dtype=torch.bfloat16)
    cache = torch.zeros(4, 5, 1, 656, dtype=torch.float8_e4m3fn)
    cache.view(torch.uint8)[..., :512] = 0x38  # 1
    cache.view(torch.uint8)[..., 512:528] = torch.tensor(FACTOR).view(torch.uint8).repeat(4)
    indices = torch.full((2, 3, 64), -1, dtype=torch.int32)
    indices[:, :2] = 7
    metadata, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, metadata, splits, 0.01, False, True, indices, None, None, None, None, None
    )
    empty = lse[:, :, 2].eq(torch.inf).all() and out[:, 2].eq(0).all()
    return Result(bool(empty and out[:, :2].eq(0.5).all() and lse.shape == (2, case.h_q, 3)))

def main():
    for case in gen_testcase():
        if not test_flash_mla(case).is_correct:
            sys.exit(1)
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run the program on a script whose cache has this scale; it wants 0.5."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    app = typer.Typer()
    app.command()(flashmla_sparse.main)

    def run(factor: float, *words: str):
        for name in ("flash_mla", flashmla_sparse.SCRIPT.stem):
            monkeypatch.delitem(sys.modules, name, raising=False)
        folder = tmp_path / str(factor) / "tests"
        folder.mkdir(parents=True)
        (folder / flashmla_sparse.SCRIPT.name).write_text(SCRIPT.replace("FACTOR", f"[{factor}]"))
        output = tmp_path / "result.json"
        result = CliRunner().invoke(app, [str(folder.parent), "--output", str(output), *words])
        return result, json.loads(output.read_text())

    yield run
    for name in ("flash_mla", flashmla_sparse.SCRIPT.stem):
        sys.modules.pop(name, None)


def test_their_cases_of_our_format_run_with_more_heads(invoke):
    result, document = invoke(0.5)
    assert result.exit_code == 0, result.output
    assert document["cases"] == {str(heads): {"wanted": 2, "passed": 2} for heads in (8, 16, 32, 64, 128)}
    assert document["complete"] and document["failure"] is None and document["script_sha256"] and document["commit"]


def test_a_wrong_case_is_no_pass(invoke):
    result, document = invoke(0.25, "--heads", "16", "--heads", "64")
    assert result.exit_code == 1 and not document["complete"]
    assert document["cases"] == {heads: {"wanted": 2, "passed": 0} for heads in ("16", "64")}
    assert "h_q=64" in document["failure"]


def test_another_folder_than_flashmlas_is_refused(tmp_path):
    app = typer.Typer()
    app.command()(flashmla_sparse.main)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 2 and "FlashMLA's repository" in result.output


def arguments(problem, tokens: int, s_q: int) -> dict:
    case = problem.case
    return {
        "q": problem.q.view(tokens, s_q, case.heads, 576),
        "k_cache": problem.kv_cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "softmax_scale": 0.05,
        "is_fp8_kvcache": True,
        "indices": problem.indices.reshape(tokens, s_q, case.top_k),
        "attn_sink": problem.sinks,
    }


def test_the_call_is_theirs_in_shapes_and_in_what_an_empty_list_gives():
    problem = build(
        SparseCase(6, 5, 70, "fp8 as e4m3", cache_layout="headed", page_size=7, holes="all", sinks="drawn"), "cpu"
    )
    out, lse = flashmla_sparse.flash_mla_with_kvcache(**arguments(problem, 2, 3))
    truth, true_lse = sparse_mla_decode_reference(
        problem.q, problem.kv_cache, problem.indices, 0.05, sinks=problem.sinks
    )
    assert (out.shape, lse.shape) == ((2, 3, 5, 512), (2, 5, 3))
    torch.testing.assert_close(out.double().flatten(0, 1), truth, rtol=0.02, atol=0.01)
    wanted = true_lse.masked_fill(true_lse.isinf(), torch.inf).view(2, 3, 5).transpose(1, 2)
    assert wanted.isinf().any()
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-5, atol=1e-5)


def test_their_lengths_of_lists_are_a_requests():
    problem = build(SparseCase(6, 5, 70, "fp8 as e4m3"), "cpu")
    call = arguments(problem, 2, 3)
    out, _ = flashmla_sparse.flash_mla_with_kvcache(**call, topk_length=torch.tensor([3, 70], dtype=torch.int32))
    call["indices"] = call["indices"].clone()
    call["indices"][0, :, 3:] = -1
    assert torch.equal(out, flashmla_sparse.flash_mla_with_kvcache(**call)[0])


def test_what_the_sparse_call_has_not_is_refused():
    problem = build(SparseCase(6, 5, 70, "fp8 as e4m3"), "cpu")
    call = arguments(problem, 2, 3)
    for spoiled in (
        {"indices": None},
        {"causal": True},
        {"is_fp8_kvcache": False},
        {"head_dim_v": 256},
        {"q": call["q"][..., :512]},
        {"extra_k_cache": problem.kv_cache},
    ):
        with pytest.raises(NotImplementedError):
            flashmla_sparse.flash_mla_with_kvcache(**{**call, **spoiled})


def test_errors_of_two_kernels_are_compared_on_the_same_tensors():
    problem = build(SparseCase(6, 64, 70, "fp8 as e4m3"), "cpu")

    def worse(*words):
        out, lse = flashmla_sparse.flash_mla_with_kvcache(*words)
        return out * 1.01, lse

    module = flashmla_sparse.stand_in(worse)
    both = flashmla_sparse.Beside(module)
    call = arguments(problem, 2, 3)
    words = (call["q"], problem.kv_cache, None, None, 512, None, None, 0.05, False, True, call["indices"], None)
    out, _ = both(*words)
    assert torch.equal(out, flashmla_sparse.flash_mla_with_kvcache(**call)[0])
    found = both.summary()["64"]
    assert found["calls"] == 1 and 0.001 < found["ours"] < 0.004 < 0.009 < found["theirs"] and found["ratio"] < 0.5
    with_other_heads = (call["q"][:, :, :16], *words[1:])
    both(*with_other_heads)
    assert set(both.summary()) == {"64"}


def test_cases_are_neither_timed_nor_of_another_format():
    @dataclasses.dataclass
    class Case:
        h_q: int
        d_qk: int
        num_runs: int = 10
        check_correctness: bool = False

    cases = flashmla_sparse.cases_of([Case(64, 576), Case(128, 576), Case(64, 512)], (16, 64))
    assert [(case.h_q, case.d_qk) for case in cases] == [(64, 576), (16, 576)]
    assert all(case.num_runs == 0 and case.check_correctness for case in cases)

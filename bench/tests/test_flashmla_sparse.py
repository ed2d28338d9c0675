"""FlashMLA's sparse suite, on a script with the functions that FlashMLA's has."""

import dataclasses

import pytest
import torch

from etap_backend.compat import flash_mla
from bench.qualify import flashmla_sparse
from bench.qualify.fake_checkout import checkout, outcomes
from bench.qualify.flashmla_dense import stand_in
from bench.qualify.theirs import Errors
from support.sparse_cases import SparseCase, build

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
def cases(tmp_path, monkeypatch):
    """Cases of a script whose cache has this scale; it wants 0.5."""
    with checkout(flashmla_sparse, tmp_path, monkeypatch, ("flash_mla", flashmla_sparse.SCRIPT.stem)) as made:
        yield lambda scale, **options: made(SCRIPT.replace("FACTOR", f"[{scale}]"), **options)


def test_their_cases_of_our_format_run_with_more_heads(cases):
    kinds = {f"V3.2, {heads} heads": {"passed": 2} for heads in (8, 16, 32, 64, 128)}
    assert outcomes(cases(0.5)) == kinds


def test_a_wrong_case_fails(cases):
    found = outcomes(cases(0.25, query_heads=[16, 64]))
    assert found == {f"V3.2, {heads} heads": {"failed": 2} for heads in (16, 64)}


def test_v4s_format_has_cases_of_its_own(cases):
    found = cases(0.5, format="MODEL1", query_heads=[8, 128])
    assert [case.kind for case in found] == ["MODEL1, 128 heads"] * 2 + ["MODEL1, 8 heads"] * 2
    assert all("d_qk=512" in case.name for case in found)
    with pytest.raises(pytest.UsageError, match="--format: wanted one of V3.2, MODEL1, got V3"):
        cases(0.5, format="V3")


@pytest.mark.parametrize("cache", ["fp8 as e4m3", "v4 as e4m3"])
def test_errors_of_two_kernels_are_compared_on_the_same_tensors(cache):
    case = SparseCase(6, 64, 70, cache, cache_layout="headed", sinks="drawn", extra=40, extra_page_size=2)
    problem = build(case, "cpu")
    lengths, extra_lengths = torch.tensor([[70, 0], [3, 40]], dtype=torch.int32)

    def worse(*words):
        out, lse = flash_mla.flash_mla_with_kvcache(*words)
        return out * 1.01, lse

    errors = Errors()
    both = flashmla_sparse.Beside(stand_in(worse), errors)
    q, indices = problem.q.view(2, 3, 64, case.width), problem.indices.reshape(2, 3, 70)
    extra = (problem.extra_kv_cache, problem.extra_indices.reshape(2, 3, 40), lengths, extra_lengths)

    def words(q):
        metadata, _ = flash_mla.get_mla_metadata()
        lists = (indices, problem.sinks, *extra)
        return q, problem.kv_cache, None, None, 512, metadata, None, 0.05, False, True, *lists

    out, _ = both(*words(q))
    assert torch.equal(out, flash_mla.flash_mla_with_kvcache(*words(q))[0])
    found = errors.summary()["64"]
    assert found["calls"] == 1 and 0.001 < found["ours"] < 0.004 < 0.009 < found["theirs"] and found["ratio"] < 0.5
    both(*words(q[:, :, :16]))
    assert set(errors.summary()) == {"64"}


def test_cases_are_neither_timed_nor_of_another_format():
    @dataclasses.dataclass
    class Case:
        h_q: int
        d_qk: int
        num_runs: int = 10
        check_correctness: bool = False

    cases = flashmla_sparse.chosen([Case(64, 576), Case(128, 576), Case(64, 512)], 576, (16, 64))
    assert [(case.h_q, case.d_qk) for case in cases] == [(64, 576), (16, 576)]
    assert all(case.num_runs == 0 and case.check_correctness for case in cases)

"""FlashInfer's suite, on a file with the tests that FlashInfer's has and a wrapper of FlashInfer's shape."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from etap_backend.compat.flashinfer import BatchMLAPagedAttentionWrapper
from bench.kernels import kernels, peers, tensors
from bench.kernels.grids import Workload
from bench.qualify import flashinfer_mla
from bench.qualify.fake_checkout import checkout, outcomes

TESTS = """
import pytest
import torch
import flashinfer.mla
from tests.test_helpers.test_helpers import rows_of

def result(backend):
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(32 << 20, dtype=torch.int8), backend=backend)
    lists = [torch.tensor(one, dtype=torch.int32) for one in ([0, 1], [0, 2], [0, 1], [70])]
    wrapper.plan(*lists, 8, 512, 64, 64, False, 0.1, torch.half, torch.half)
    return wrapper.run(*rows_of(torch.half, VALUE))

@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("kv_len, page_size", [(1, 2), (3, 4)])
def test_batch_mla_page_attention(backend, kv_len, page_size):
    assert result(backend).eq(0.5).all(), (kv_len, page_size)

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_batch_mla_varlen_page_attention(causal, backend):
    if causal:
        pytest.skip("not for causal attention")
    assert result(backend).eq(0.5).all()

def test_batch_mla_oob_kv_nan():
    pass

def test_batch_mla_fp8_kv_matches_bf16_reference():
    assert result("fa3").eq(0.5).all()

def test_batch_mla_without_kpe():
    raise AssertionError("left out")

def test_single_prefill_with_kv_cache():
    raise AssertionError("none of ours")
"""
HELPERS = """
import torch
def rows_of(dtype, value):
    q, cache = torch.ones(1, 8, 576, dtype=dtype), torch.full((2, 64, 576), value, dtype=dtype)
    return q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]
"""


class TheirWrapper:
    """As FlashInfer's, whose kernels need a GPU."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto"):  # fmt: skip
        raise AssertionError(f"FlashInfer's own {backend} was asked for")


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Cases of tests whose cache has this value; they want 0.5."""
    mla = ModuleType("flashinfer.mla")
    mla.BatchMLAPagedAttentionWrapper = type("Wrapper", (TheirWrapper,), {"__init__": TheirWrapper.__init__})
    package = ModuleType("flashinfer")
    package.mla = mla
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    modules = ("tests", "tests.test_helpers", "tests.test_helpers.test_helpers")
    with checkout(flashinfer_mla, tmp_path, monkeypatch, modules) as made:
        yield lambda value, tests=TESTS: made(
            tests.replace("VALUE", str(value)), {Path("tests/test_helpers/test_helpers.py"): HELPERS}
        )


NAMES = flashinfer_mla.WANTED


def test_their_cases_for_fa3_run_on_ours(cases):
    found = cases(0.5)
    assert outcomes(found) == dict(
        zip(NAMES, ({"passed": 2}, {"passed": 1, "skipped": 1}, {"passed": 1}, {"passed": 1}), strict=True)
    )
    assert found[0].name == "test_batch_mla_page_attention(kv_len=1, page_size=2, backend=fa3)"
    assert "test_batch_mla_without_kpe" in flashinfer_mla.SUITE.left_out


def test_a_wrong_case_fails(cases):
    assert sum(counts["failed"] for counts in outcomes(cases(0.25)).values()) == 4


def test_another_file_is_refused(cases):
    with pytest.raises(pytest.UsageError, match="one without test_batch_mla_oob_kv_nan"):
        cases(0.5, tests=TESTS.replace("test_batch_mla_oob", "test_oob"))


@pytest.mark.parametrize("kv_dtype, s_q", [("same", 1), ("same", 2), ("fp8", 1)])
def test_our_wrapper_is_timed_as_theirs(monkeypatch, kv_dtype, s_q):
    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    monkeypatch.setattr(tensors, "ROTATED_BYTES", 4e5)
    workload = Workload((200, 7), 8, kv_dtype=kv_dtype, s_q=s_q)
    pool = tensors.pool_of((workload,))
    inputs = pool.inputs(workload, None)
    (cache,) = pool.copies(workload, inputs.kv_dtype)[0]
    prepare = partial(peers.flashinfer, wrapper_type=BatchMLAPagedAttentionWrapper)
    ours, theirs = (make(inputs)(cache).view(2, s_q, 8, 512) for make in (kernels.etap, prepare))
    torch.testing.assert_close(ours, theirs)

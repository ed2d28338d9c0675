"""Random cases: what they cover, and that a wrong call is found, on the CPU executor."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.qualify import random_cases, random_sparse_cases
from support import cases, sparse_cases
from support.cases import Case
from support.sparse_cases import SparseCase


@pytest.fixture(params=[(), ("--sparse",)], ids=["dense", "sparse"])
def judged(request, monkeypatch, tmp_path):
    """Run 8 cases whose calls' results `change(number of the call, out, lse)` alters; gives exit code and results."""

    def run(change=lambda *_: None):
        module, calls = sparse_cases if request.param else cases, []
        right, app = module.decode, typer.Typer()

        def decode(*args, **named):
            out, lse = right(*args, **named)
            calls.append(out)
            change(len(calls), out, lse)
            return out, lse

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(module, "decode", decode)
        app.command()(random_cases.main)
        words = ["--output", str(tmp_path / "r.json"), "--count", "8", "--seed", "5", *request.param]
        code = CliRunner().invoke(app, words).exit_code
        return code, json.loads((tmp_path / "r.json").read_text())

    return run


def test_the_executor_is_right_in_all_cases(judged):
    code, document = judged()
    assert code == 0 and (document["cases"], document["wrong"], document["seed"]) == (8, 0, 5)


def test_a_wrong_result_is_found_and_its_case_can_be_built_again(judged):
    code, document = judged(lambda call, out, lse: out.mul_(1.02))
    assert code == 1 and document["wrong"] >= 5
    failure = document["failures"][0]
    draw = random_sparse_cases.random_case if "SparseCase" in failure["case"] else random_cases.random_case
    assert eval(failure["case"], {"Case": Case, "SparseCase": SparseCase}) == draw(5, failure["index"], "cpu")


def test_different_bits_in_a_later_run_are_found(judged):
    def flip_a_bit(call, out, lse):
        if call % 2 == 0 and lse.numel():
            lse.view(torch.int32).view(-1)[0] ^= 1

    code, document = judged(flip_a_bit)
    assert code == 1 and any("bits" in problem for one in document["failures"] for problem in one["problems"])


def test_the_gpu_s_cases_cover_what_they_promise():
    found = [random_cases.random_case(1, index, "cuda") for index in range(1000)]
    lengths = {length for case in found for length in case.lengths}
    assert {0, 1, 64, 70_000} <= lengths and {case.heads for case in found} == set(range(1, 129))
    assert len({(case.dtype, case.kv_dtype, case.fp8_math) for case in found}) == 2 + 3 * 2
    assert {case.heads * case.s_q for case in found if case.prefixes} >= {8, 16, 32, 64}
    sparse = [random_sparse_cases.random_case(1, index, "cuda") for index in range(1000)]
    assert {case.cache for case in sparse} >= {"bf16", "fp8", "v4"} and {0} < {case.tokens for case in sparse}
    assert {case.extra is None for case in sparse} == {case.rope for case in sparse} == {True, False}

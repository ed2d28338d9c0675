"""The random cases: what they cover, that a wrong call is found, and what is written when a run ends early."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.qualify import random_cases, random_sparse_cases
from support import cases, sparse_cases
from support.cases import Case, build
from support.sparse_cases import SparseCase


def invoke(output, *arguments):
    app = typer.Typer()
    app.command()(random_cases.main)
    result = CliRunner().invoke(app, ["--output", str(output), *arguments])
    return result, json.loads(output.read_text()) if output.is_file() else None


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def decode_with(monkeypatch):
    """Let `change(calls so far, out, lse)` do something to what the call wrote."""
    right, calls = cases.decode, []

    def install(change):
        def decode(problem, schedule, **outputs):
            out, lse = right(problem, schedule, **outputs)
            calls.append(problem)
            change(len(calls), out, lse)
            return out, lse

        monkeypatch.setattr(cases, "decode", decode)

    return install


def test_the_executor_is_right_in_all_of_them(tmp_path):
    result, document = invoke(tmp_path / "cases.json", "--count", "25", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert (document["cases"], document["wrong"], document["complete"], document["seed"]) == (25, 0, True, 3)
    assert sum(kind["cases"] for kind in document["kinds"].values()) == 25
    assert all(0 <= each["of_limit"] <= 1 for kind in document["kinds"].values() for each in kind["worst"].values())
    assert document["commit"] and document["versions"]["torch"] and "executor" in document["device"]
    assert document["command"].startswith("PYTHONPATH=tests python -m bench.qualify.random_cases")


def test_a_wrong_result_is_found_and_its_case_can_be_built_again(tmp_path, decode_with):
    decode_with(lambda call, out, lse: out.mul_(1.01))
    result, document = invoke(tmp_path / "cases.json", "--count", "8")
    assert result.exit_code == 1 and document["wrong"] >= 6 and document["complete"]
    failure = document["failures"][0]
    again = eval(failure["case"], {"Case": Case})
    assert again == random_cases.random_case(0, failure["index"], "cpu")
    assert any("cosine" in problem for problem in failure["problems"])
    assert failure["case"] in result.output.replace("\n", "")


def test_other_bits_in_the_second_run_are_found(tmp_path, decode_with):
    def one_bit(call, out, lse):
        if call % 2 == 0:
            lse.view(torch.int32).view(-1)[0] ^= 1

    decode_with(one_bit)
    result, document = invoke(tmp_path / "cases.json", "--count", "3")
    assert result.exit_code == 1 and document["wrong"] == 3
    assert document["failures"][0]["problems"] == ["lse: run 2 gave other bits than run 1"]


def test_a_run_that_its_time_limit_ends_is_no_pass(tmp_path):
    result, document = invoke(tmp_path / "cases.json", "--count", "100000", "--time-limit", "1")
    assert result.exit_code == 1 and 0 < document["cases"] < 100_000
    assert not document["complete"] and document["stopped"] == "by the time limit of 1 s"


def test_a_run_says_on_what_and_how_far_it_is_and_writes_only_where_told_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(random_cases, "BEAT_SECONDS", -1)
    app = typer.Typer()
    app.command()(random_cases.main)
    result = CliRunner().invoke(app, ["--count", "3"])
    assert result.exit_code == 0 and list(tmp_path.iterdir()) == []
    lines = result.output.splitlines()
    assert lines[0] == "3 cases of seed 0 on the executor on the CPU, small cases"
    assert lines[1:4] == [f"{done} of 3 cases, 0 wrong" for done in range(3)]
    assert lines[-1].startswith("3 of 3 cases on the executor on the CPU, small cases: 0 wrong (")


@pytest.mark.exhaustive
def test_several_processes_run_the_same_cases(tmp_path):
    _, one = invoke(tmp_path / "one.json", "--count", "9")
    result, several = invoke(tmp_path / "several.json", "--count", "9", "--jobs", "2")
    assert result.exit_code == 0, result.output
    for key in ("cases", "wrong", "longest", "kinds", "complete"):
        assert one[key] == several[key], key
    result, cut = invoke(tmp_path / "cut.json", "--count", "100000", "--jobs", "2", "--time-limit", "1")
    assert result.exit_code == 1 and cut["stopped"] == "by the time limit of 1 s"
    assert cut["cases"] < 100_000 and not cut["complete"]


def test_an_output_that_cannot_be_written_is_refused_before_the_first_case(tmp_path):
    (tmp_path / "file").touch()
    result, _ = invoke(tmp_path / "file" / "cases.json")
    assert result.exit_code == 2 and "--output" in result.output and "Traceback" not in result.output


def test_the_cases_of_a_gpu_cover_what_they_promise():
    found = [random_cases.random_case(1, index, "cuda") for index in range(3000)]
    lengths = [length for case in found for length in case.lengths]
    assert (min(lengths), max(lengths)) == (0, 70_000)
    assert sum(max(case.lengths) > 16_384 for case in found) > 100
    assert {case.heads for case in found} == set(range(1, 129)) and {case.s_q for case in found} == {1, 2, 3, 4}
    kinds = {(case.dtype, case.kv_dtype, case.fp8_math) for case in found}
    assert kinds == {(dtype, "same", False) for dtype in ("bfloat16", "float16")} | {
        (dtype, "fp8", math) for dtype in ("bfloat16", "float16", "float8_e4m3fn") for math in (False, True)
    }
    for what in ("aliased", "cache_layout", "q_layout", "law", "page_size", "output"):
        counts = [sum(getattr(case, what) == value for case in found) for value in {getattr(c, what) for c in found}]
        assert len(counts) > 1 and min(counts) > 100, what
    assert random_cases.random_case(1, 5, "cuda") == found[5] != random_cases.random_case(2, 5, "cuda")


def test_the_sparse_executor_is_right_in_all_of_them(tmp_path):
    result, document = invoke(tmp_path / "cases.json", "--sparse", "--count", "40", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert (document["cases"], document["wrong"], document["complete"]) == (40, 0, True)
    assert "sparse" in document["what"] and "bfloat16 rows" in document["kinds"]
    assert all(0 <= each["of_limit"] <= 1 for kind in document["kinds"].values() for each in kind["worst"].values())


def test_a_wrong_sparse_result_is_found_and_its_case_can_be_built_again(tmp_path, monkeypatch):
    right = sparse_cases.decode

    def wrong(problem, **options):
        out, lse = right(problem, **options)
        return out.mul_(1.02), lse

    monkeypatch.setattr(sparse_cases, "decode", wrong)
    result, document = invoke(tmp_path / "cases.json", "--sparse", "--count", "12", "--seed", "5")
    assert result.exit_code == 1 and document["wrong"] >= 6 and document["complete"]
    failure = document["failures"][0]
    again = eval(failure["case"], {"SparseCase": SparseCase})
    assert again == random_sparse_cases.random_case(5, failure["index"], "cpu")
    assert any("RMSE" in problem for problem in failure["problems"])


def test_the_sparse_cases_of_a_gpu_cover_what_they_promise():
    found = [random_sparse_cases.random_case(1, index, "cuda") for index in range(3000)]
    assert {case.heads for case in found} == set(range(1, 129))
    assert min(case.tokens for case in found) == 0 and max(case.tokens for case in found) > 3500
    assert min(case.top_k for case in found) == 1 and max(case.top_k for case in found) > 8000
    assert sum(case.top_k == 2048 for case in found) > 100
    every = ["cache", "law", "scales", "holes", "counts", "sinks", "repeats", "q_layout", "cache_layout"]
    for what in every:
        counts = [sum(getattr(case, what) == value for case in found) for value in {getattr(c, what) for c in found}]
        assert len(counts) > 1 and min(counts) > 100, what
    assert sum(case.requests > 0 for case in found) > 1000


@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_aliased_pages_are_named_twice_and_pages_that_nobody_names_hold_poison(kv_dtype):
    case = Case((640, 64, 130, 0, 700), heads=1, kv_dtype=kv_dtype, aliased=True, seed=4)
    problem = build(case, "cpu")
    named = [
        page
        for row, length in zip(problem.block_table.tolist(), case.lengths, strict=True)
        for page in row[: -(-length // 64)]
    ]
    unnamed = sorted(set(range(len(problem.kv_cache))) - set(named))
    assert len(set(named)) < len(named) and len(unnamed) > 3
    assert not problem.kv_cache[unnamed].float().isfinite().any()
    for row, length in zip(problem.block_table.tolist(), case.lengths, strict=True):
        tokens = problem.kv_cache[row[: -(-length // 64)]].reshape(-1, 576)[:length]
        assert tokens.float().isfinite().all()

"""Random cases: what they cover, and that a wrong call is found, on the CPU executor."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.qualify import random_cases, random_sparse_cases, sanitize
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


@pytest.fixture(params=[(), ("--sparse",)], ids=["dense", "sparse"])
def arguments(request) -> tuple[str, ...]:
    return request.param


@pytest.fixture
def spoil(monkeypatch, arguments):
    """Let `change(number of the call, out, lse)` alter what each call writes."""
    module, calls = sparse_cases if arguments else cases, []

    def install(change):
        right = module.decode

        def decode(*args, **named):
            out, lse = right(*args, **named)
            calls.append(out)
            change(len(calls), out, lse)
            return out, lse

        monkeypatch.setattr(module, "decode", decode)

    return install


def test_the_executor_is_right_in_all_cases(tmp_path, arguments):
    result, document = invoke(tmp_path / "cases.json", "--count", "12", "--seed", "3", *arguments)
    assert result.exit_code == 0, result.output
    assert (document["cases"], document["wrong"], document["seed"]) == (12, 0, 3)
    assert sum(kind["cases"] for kind in document["kinds"].values()) == 12
    shares = [each["of_limit"] for kind in document["kinds"].values() for each in kind["worst"].values()]
    assert shares and all(0 <= share <= 1 for share in shares)
    assert document["commit"] and document["versions"]["torch"] and "CPU" in document["device"]


def test_a_wrong_result_is_found_and_its_case_can_be_built_again(tmp_path, arguments, spoil):
    spoil(lambda call, out, lse: out.mul_(1.02))
    result, document = invoke(tmp_path / "cases.json", "--count", "8", "--seed", "5", *arguments)
    assert result.exit_code == 1 and document["wrong"] >= 5
    failure = document["failures"][0]
    draw = random_sparse_cases.random_case if arguments else random_cases.random_case
    assert eval(failure["case"], {"Case": Case, "SparseCase": SparseCase}) == draw(5, failure["index"], "cpu")
    assert failure["case"] in result.output


def test_different_bits_in_a_later_run_are_found(tmp_path, arguments, spoil):
    runs = 3 if arguments else 2

    def flip_a_bit(call, out, lse):
        if call % runs == 0 and lse.numel():
            lse.view(torch.int32).view(-1)[0] ^= 1

    spoil(flip_a_bit)
    result, document = invoke(tmp_path / "cases.json", "--count", "3", "--seed", "1", *arguments)
    assert result.exit_code == 1 and document["wrong"] >= 2
    assert all("bits" in problem for failure in document["failures"] for problem in failure["problems"])


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result, _ = invoke(tmp_path / "file" / "cases.json")
    assert result.exit_code == 2 and "--output" in result.output


def often(found: list, fields: list[str], least: int) -> bool:
    """Whether each field has several values, and each of them so many cases."""
    values = {field: [getattr(case, field) for case in found] for field in fields}
    return all(len(set(all_)) > 1 and min(map(all_.count, set(all_))) > least for all_ in values.values())


def test_the_gpu_s_cases_cover_what_they_promise():
    found = [random_cases.random_case(1, index, "cuda") for index in range(2000)]
    lengths = [length for case in found for length in case.lengths]
    assert (min(lengths), max(lengths)) == (0, 70_000)
    assert sum(max(case.lengths) > 16_384 for case in found) > 60
    assert {case.heads for case in found} == set(range(1, 129)) and {case.s_q for case in found} == {1, 2, 3, 4}
    assert len({(case.dtype, case.kv_dtype, case.fp8_math) for case in found}) == 2 + 3 * 2
    assert often(found, ["aliased", "cache_layout", "q_layout", "law", "page_size", "output", "groups"], 60)
    assert random_cases.random_case(1, 5, "cuda") == found[5] != random_cases.random_case(2, 5, "cuda")


def test_the_gpu_s_sparse_cases_cover_what_they_promise():
    found = [random_sparse_cases.random_case(1, index, "cuda") for index in range(2000)]
    assert {case.heads for case in found} == set(range(1, 129))
    assert min(case.tokens for case in found) == 0 and max(case.tokens for case in found) > 3500
    assert min(case.top_k for case in found) == 1 and max(case.top_k for case in found) > 8000
    lists = ["holes", "counts", "sinks", "repeats"]
    assert often(found, ["cache", "law", "scales", "q_layout", "cache_layout", "rope", "out_layout", *lists], 60)
    assert sum(case.requests > 0 for case in found) > 600 and sum(case.extra is not None for case in found) > 600


@pytest.mark.parametrize("kv_dtype", ["same", "fp8"])
def test_pages_that_aliasing_frees_hold_poison(kv_dtype):
    case = Case((640, 64, 130, 0, 700), heads=1, kv_dtype=kv_dtype, aliased=True, seed=4)
    problem = build(case, "cpu")
    rows = zip(problem.block_table.tolist(), case.lengths, strict=True)
    named = [page for row, length in rows for page in row[: -(-length // 64)]]
    unnamed = sorted(set(range(len(problem.kv_cache))) - set(named))
    assert len(set(named)) < len(named) and len(unnamed) > 3
    assert not problem.kv_cache[unnamed].float().isfinite().any()


def test_a_sanitizer_s_exit_code_is_the_program_s(monkeypatch):
    codes = {"memcheck": 0, "racecheck": 9}
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    monkeypatch.setattr(sanitize, "sanitize", codes.get)
    app = typer.Typer()
    app.command()(sanitize.main)
    assert [CliRunner().invoke(app, list(words)).exit_code for words in (["memcheck"], [])] == [0, 1]

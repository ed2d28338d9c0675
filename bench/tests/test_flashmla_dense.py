"""FlashMLA's dense suite, and the results file of any suite, on a script with the functions that FlashMLA's has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.qualify import flashmla_dense
from bench.qualify.fake_checkout import checkout, outcomes
from bench.qualify.theirs import part_of

pytestmark = pytest.mark.exhaustive  # each starts a pytest of its own

SCRIPT = """
import dataclasses
import torch
import flash_mla

@dataclasses.dataclass
class TestParam:
    h_kv: int
    is_causal: bool
    test_performance: bool = True

def test_flash_mla(case):
    print("on", case)
    assert not case.test_performance
    q = torch.ones(2, 3, 8, 576, dtype=DTYPE)
    cache = torch.full((2, 64, case.h_kv, 576), VALUE, dtype=DTYPE)
    table, lengths = torch.arange(2, dtype=torch.int32).view(2, 1), torch.tensor([2, 64], dtype=torch.int32)
    metadata, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, table, lengths, 512, metadata, splits, causal=case.is_causal
    )
    assert out[1].eq(0.5).all() and lse.shape == (2, 8, 3) and lse[0, :, 0].isposinf().all() == case.is_causal

def main(dtype):
    global DTYPE
    DTYPE = dtype
    for h_kv in (1, 2):
        for is_causal in (False, True):
            for _ in range(2):
                test_flash_mla(TestParam(h_kv, is_causal))
"""


KINDS = [f"h_kv {heads}, {mask}" for heads in (1, 2) for mask in ("not causal", "causal")]
TESTS = Path(__file__).parents[1]


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Cases of a script whose cache has this value; it wants 0.5."""
    with checkout(flashmla_dense, tmp_path, monkeypatch, ("flash_mla", flashmla_dense.SUITE.script.stem)) as made:
        yield lambda value, **options: made(SCRIPT.replace("VALUE", str(value)), **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_all_their_cases_run_and_none_is_timed(cases, dtype):
    assert outcomes(cases(0.5, dtype=dtype)) == {kind: {"passed": 2} for kind in KINDS}


def test_a_wrong_case_fails(cases):
    assert outcomes(cases(0.25)) == {kind: {"failed": 2} for kind in KINDS}


def test_parts_are_the_whole():
    cases = list(range(10))
    parts = [part_of(cases, f"{i}/3") for i in (1, 2, 3)]
    assert parts[1] == [1, 4, 7] and sorted(sum(parts, [])) == cases
    for wrong in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(pytest.UsageError, match="wanted I/N"):
            part_of(cases, wrong)


def run(folder: Path, value: float | None, *words: str) -> tuple[subprocess.CompletedProcess, dict | None]:
    """pytest on the suite and a checkout whose cache has this value, or on none; what it said and wrote."""
    if value is not None:
        script = folder / flashmla_dense.SUITE.script
        script.parent.mkdir(parents=True)
        script.write_text(SCRIPT.replace("VALUE", str(value)))
        words = ("--checkout", str(folder), *words)
    output, suite = folder / "result.json", TESTS / "qualify/flashmla_dense.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(suite), "--output", str(output), *words]
    # From elsewhere, so that the installed package is tested and not the source tree.
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return ended, json.loads(output.read_text()) if output.exists() else None


def test_a_right_run_is_written_with_what_it_was_made_of(tmp_path):
    ended, document = run(tmp_path, 0.5, "--part", "2/2", "--dtype", "fp16")
    assert ended.returncode == 0, ended.stdout
    assert document["cases"] == {kind: {"wanted": 1, "passed": 1, "skipped": 0} for kind in KINDS}
    assert document["complete"] and (document["failed"], document["failures"]) == (0, [])
    assert (document["part"], document["dtype"], document["flashmla_commit"]) == ("2/2", "fp16", None)
    assert document["script_sha256"] and document["commit"]
    assert document["command"].startswith("python -m pytest ") and document["command"].endswith("--dtype fp16")


def test_a_wrong_case_is_no_pass_and_ends_nothing(tmp_path):
    ended, document = run(tmp_path, 0.25)
    assert ended.returncode == 1 and not document["complete"] and document["failed"] == 8
    assert document["cases"] == {kind: {"wanted": 2, "passed": 0, "skipped": 0} for kind in KINDS}
    first = document["failures"][0]
    assert "h_kv=1, is_causal=False" in first["case"] and "AssertionError" in first["error"]
    assert first["printed"].startswith("on TestParam")


def test_another_folder_than_flashmlas_is_refused(tmp_path):
    ended, document = run(tmp_path, None)
    assert ended.returncode != 0 and not (document and document["complete"])
    assert f"--checkout: wanted FlashMLA's repository with {flashmla_dense.SUITE.script}, got None" in ended.stdout

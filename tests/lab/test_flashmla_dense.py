"""The run of a script with the functions that FlashMLA's dense one has."""

import pytest
import typer
from flashmla_checkout import runner

from etap_backend.lab.checks import flashmla_dense
from etap_backend.lab.checks.their_tests import part_of

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


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run the program on a script whose cache has this value; it wants 0.5."""
    with runner(flashmla_dense, tmp_path, monkeypatch) as run:
        yield lambda value, *words: run(SCRIPT.replace("VALUE", str(value)), *words)


KINDS = [f"h_kv {heads}, {mask}" for heads in (1, 2) for mask in ("not causal", "causal")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_all_their_cases_run_and_none_is_timed(invoke, dtype):
    result, document = invoke(0.5, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert document["cases"] == {kind: {"wanted": 2, "passed": 2} for kind in KINDS}
    assert document["complete"] and document["failures"] == [] and document["dtype"] == dtype
    assert document["script_sha256"] and document["commit"]


def test_a_wrong_case_is_no_pass_and_ends_nothing(invoke):
    result, document = invoke(0.25)
    assert result.exit_code == 1 and not document["complete"] and document["failed"] == 8
    assert document["cases"] == {kind: {"wanted": 2, "passed": 0} for kind in KINDS}
    first = document["failures"][0]
    assert "h_kv=1, is_causal=False" in first["case"] and first["error"].startswith("AssertionError")
    assert first["printed"].startswith("on TestParam")


def test_parts_are_the_whole():
    cases = list(range(10))
    parts = [part_of(cases, f"{i}/3") for i in (1, 2, 3)]
    assert parts[1] == [1, 4, 7] and sorted(sum(parts, [])) == cases
    for wrong in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(typer.BadParameter, match="wanted I/N"):
            part_of(cases, wrong)


def test_no_cases_are_no_pass():
    assert not flashmla_dense.run(lambda case: None, [])["complete"]

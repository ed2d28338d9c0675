"""One results file of those that parts of another project's tests wrote."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.common import results, tables
from bench.qualify import theirs


def part(numbers: str = "1/2", dtype: str | None = "bf16", passed: int = 3, skipped: int = 0, **others) -> dict:
    document = {
        "what": "tests",
        "date": f"2026-01-01T00:00:0{numbers[0]}+00:00",
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "versions": {"torch": "2.11.0"},
        "commit": "abc1234",
        "command": f"etap check x --part {numbers}",
        "note": "",
        "part": numbers,
        "cases": {"causal": {"wanted": 3, "passed": passed, "skipped": skipped}},
        "complete": passed + skipped == 3,
        "failed": 3 - passed - skipped,
        "failures": [{"case": numbers}] * (3 - passed - skipped),
    }
    return document | ({"dtype": dtype} if dtype else {}) | others


def test_parts_become_one_file_with_all_their_commands():
    made = theirs.merged([part("2/2", date="2026-01-02"), part("1/2")])
    assert made["complete"] and made["failed"] == 0 and made["date"] == "2026-01-01T00:00:01+00:00"
    assert made["cases"] == {"bf16, causal": {"wanted": 6, "passed": 6, "skipped": 0}}
    assert made["parts"] == ["bf16 1/2", "bf16 2/2"] and "part" not in made and "command" not in made
    assert made["commands"] == ["etap check x --part 1/2", "etap check x --part 2/2"]
    said = "6 of 6 cases in bf16 pass, none is wrong (NVIDIA H200, driver 580.1; torch 2.11.0; commit abc1234)."
    assert theirs.sentence(made) == said


def test_errors_beside_another_kernel_are_those_of_all_calls():
    errors, whole = [theirs.Errors() for _ in range(2)], theirs.Errors()
    truth = torch.ones(4)
    for i, by in enumerate((0.1, 0.2, 0.4)):
        for one in (errors[i % 2], whole):
            one.add("64", truth + by, truth + 0.1, truth)
    made = theirs.merged([part(f"{i}/2", relative_rmse=errors[i - 1].summary()) for i in (1, 2)])
    assert made["relative_rmse"]["64"] == pytest.approx(whole.summary()["64"]) and made["complete"]


def test_types_of_elements_are_told_apart():
    made = theirs.merged([part(f"{i}/2", dtype) for dtype in ("fp16", "bf16") for i in (1, 2)])
    assert list(made["cases"]) == ["bf16, causal", "fp16, causal"] and made["complete"]
    assert theirs.sentence(made).startswith("12 of 12 cases in bf16 and fp16 pass, none is wrong (")


def test_a_missing_part_is_said():
    made = theirs.merged([part("1/3", None, passed=2, skipped=1), part("3/3", None)])
    assert not made["complete"] and list(made["cases"]) == ["causal"]
    said = "5 of 6 cases pass, 1 skip themselves, none is wrong; not run: 1 of 3 parts (NVIDIA"
    assert theirs.sentence(made).startswith(said)
    made = theirs.merged([part("1/2"), part("2/2"), part("1/2", "fp16")])
    assert not made["complete"] and "; not run: fp16 1 of 2 parts (" in theirs.sentence(made)


def test_a_wrong_case_is_said():
    made = theirs.merged([part("1/2"), part("2/2", passed=1)])
    assert not made["complete"] and made["failed"] == 2 and made["failures"] == [{"case": "2/2"}] * 2
    assert theirs.sentence(made).startswith("4 of 6 cases in bf16 pass, 2 are wrong (")


def test_a_run_without_merged_parts_is_said_too():
    assert "none is wrong (" in theirs.sentence(part("1/1"))
    assert "3 of 3 cases in bf16 pass, none is wrong; not run: bf16 3 of 4 parts (" in theirs.sentence(part("1/4"))


@pytest.mark.parametrize(
    "parts, words",
    [
        ([part("1/2"), part("2/2", commit="def5678")], "commit: wanted the same in all parts, got abc1234 and def5678"),
        (
            [part("1/2"), part("2/2", library_sha256="0")],
            "library_sha256: wanted the same in all parts, got None and 0",
        ),
        ([part("1/2"), part("1/2")], "part: wanted different parts of one number, got 1/2, 1/2"),
        ([part("1/2"), part("2/3")], "part: wanted different parts of one number, got 1/2, 2/3"),
        ([{"what": "tests"}], "parts: wanted results of runs with --part"),
        ([], "parts: wanted results of runs with --part"),
    ],
)
def test_parts_of_different_runs_are_refused(parts, words):
    with pytest.raises(ValueError, match=words):
        theirs.merged(parts)


def test_the_program_writes_the_file_and_a_page_cites_it(tmp_path):
    app = typer.Typer()
    app.command()(theirs.main)
    paths = [tmp_path / f"{i}.json" for i in (1, 2)]
    for i, path in enumerate(paths, 1):
        results.write(part(f"{i}/2"), path)
    output = tmp_path / "results" / "whole.json"
    result = CliRunner().invoke(app, [*map(str, paths), "--output", str(output)])
    assert result.exit_code == 0 and result.stdout.startswith("6 of 6 cases in bf16 pass")
    place = results.Place("claims", "all", (), "")
    said = theirs.sentence(json.loads(output.read_text())).partition(" (")[0]
    assert said == "6 of 6 cases in bf16 pass, none is wrong" and said in tables.table(place, output.parent)
    assert CliRunner().invoke(app, [str(paths[0]), "--output", str(output)]).exit_code == 1, "a part is missing"
    broken = CliRunner().invoke(app, [str(paths[0]), str(paths[0]), "--output", str(output)])
    assert broken.exit_code == 2 and "wanted different parts" in broken.output

"""Suites of other projects: a run in which nothing ran, something failed or ETAP was not called is no pass."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.qualify import flashmla, suites, vllm_upstream
from bench.qualify.suites import Case, Options, Report

FLASHMLA = """
import dataclasses, torch, flash_mla

@dataclasses.dataclass
class TestParam:
    h_kv: int
    is_causal: bool
    test_performance: bool = True

def test_flash_mla(case):
    assert not case.test_performance
    q, cache = torch.ones(2, 3, 8, 576), torch.full((2, 64, 1, 576), VALUE)
    table, lengths = torch.arange(2, dtype=torch.int32).view(2, 1), torch.tensor([2, 64], dtype=torch.int32)
    words = (q, cache, table, lengths, 512, *flash_mla.get_mla_metadata())
    out, lse = flash_mla.flash_mla_with_kvcache(*words, causal=case.is_causal)
    assert out[1].eq(0.5).all() and lse.shape == (2, 8, 3)

def main(dtype):
    torch.set_default_dtype(dtype)
    for is_causal in (False, True):
        test_flash_mla(TestParam(1, is_causal))
"""


def fine(report: Report, kind: str = "a", calls: int = 1) -> Case:
    def run():
        report.calls += calls

    return Case(kind, f"{kind} fine", run)


def broken() -> None:
    raise AssertionError("it differs")


def test_a_run_passes_only_if_all_its_cases_ran_on_etap_and_each_kind_has_one_that_passed():
    skip = Case("b", "b skips", lambda: (_ for _ in ()).throw(suites.unittest.SkipTest("why")))
    for passes, make in (
        (True, lambda report: [fine(report), fine(report, "b")]),
        (False, lambda report: []),
        (False, lambda report: [fine(report), Case("a", "a broken", broken)]),
        (False, lambda report: [fine(report, calls=0)]),
        (False, lambda report: [fine(report), skip]),
    ):
        report = Report()
        report.run(make(report), Options())
        assert report.document()["complete"] == passes == (not report.problems())
    report = Report()
    report.run([fine(report)], Options())
    report.expect("a")
    assert report.problems() == ["1 cases did not run"]


def test_parts_are_the_whole():
    parts = [Options(part=(i, 3)).chosen(range(10)) for i in (1, 2, 3)]
    assert parts[1] == [1, 4, 7] and sorted(sum(parts, [])) == list(range(10))


@pytest.mark.parametrize("value, passed", [(0.5, 4), (0.25, 0)])
def test_flashmla_s_script_runs_on_etap(tmp_path, monkeypatch, value, passed):
    monkeypatch.setattr(suites.sys, "path", [*suites.sys.path])
    script = Path(suites.SUITES["flashmla-dense"].script)
    for name in ("flash_mla", script.stem):
        monkeypatch.delitem(suites.sys.modules, name, raising=False)
    (tmp_path / script).parent.mkdir()
    (tmp_path / script).write_text(FLASHMLA.replace("VALUE", str(value)))
    report = Report()
    try:
        flashmla.dense(Options(tmp_path, script), report)
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.total("cases") == 4 and report.total("passed") == passed
    assert set(report.kinds) == {f"{d}, h_kv 1, {c}causal" for d in ("bf16", "fp16") for c in ("", "not ")}


@pytest.mark.parametrize(
    "body, problems",
    [
        ("calls.append(1)", []),
        ("pass", ["no case passed", "2 cases failed", *["no case of this kind"] * 2]),
        ("pytest.skip()", ["no case passed", *["no case of this kind"] * 2]),
        ("(", ["pytest ended with 2", "no case passed"]),
    ],
    ids=["passes", "without ETAP", "skips", "cannot be collected"],
)
def test_vllm_s_cases_are_counted(tmp_path, monkeypatch, body, problems):
    monkeypatch.setattr(suites.sys, "path", [*suites.sys.path])
    monkeypatch.chdir(tmp_path)
    report = Report()
    calls = type("Calls", (), {"append": report.counted(lambda self, one: None)})()
    monkeypatch.setattr(pytest, "etap_calls", calls, raising=False)
    (tmp_path / "vllm/tests").mkdir(parents=True)
    text = f"import pytest\ncalls = pytest.etap_calls\n@pytest.mark.parametrize('x', [1, 2])\ndef test_it(x): {body}\n"
    script = Path("tests", f"{tmp_path.name}.py")  # a name that no other test's module has
    (tmp_path / "vllm" / script).write_text(text + "def test_other(): assert False\n")
    plugin = type("Plugin", (vllm_upstream.Redirected,), {"test": "test_it", "kind_of": ("x",)})
    plugin.wanted = lambda self, given: True
    options = Options(tmp_path / "vllm", script)
    (tmp_path / "run").mkdir()
    vllm_upstream.run_pytest(plugin(options, report), options, tmp_path / "run")
    found = report.problems()
    assert len(found) == len(problems) and all(map(str.startswith, found, problems))


def test_the_program_writes_its_verdict(tmp_path, monkeypatch):
    def run(options, report):
        report.run([Case("a", "a broken", broken)], options)

    monkeypatch.setattr(flashmla, "v4", run)
    (tmp_path / "tests").mkdir()
    (tmp_path / suites.SUITES["flashmla-v4"].script).touch()
    app, output = typer.Typer(), tmp_path / "out.json"
    app.command()(suites.main)
    words = ["flashmla-v4", "--output", str(output)]
    assert CliRunner().invoke(app, words).exit_code == 2, "without a checkout"
    assert CliRunner().invoke(app, [*words, "--checkout", str(tmp_path)]).exit_code == 1
    document = json.loads(output.read_text())
    assert not document["complete"] and "it differs" in document["failures"][0]["error"] and document["commit"]

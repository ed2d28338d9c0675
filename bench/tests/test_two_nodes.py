"""The check of two nodes against small processes in the engine's place: both must name ETAP, the first must answer."""

import pytest
import typer
from bench.tests.fake_server import ANSWERING, Written, stand_in

from bench.serving.lifecycle import Process
from bench.qualify import two_nodes


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the check; gives the logs of both nodes."""
    stand_in(monkeypatch, tmp_path, ANSWERING)
    monkeypatch.setattr(two_nodes, "prepare_model", lambda *of: Written(of[-1]))

    def run(fault: str, scenario: str = "decode-plain") -> list[str]:
        monkeypatch.setenv("FAULT", fault)
        flags = ["--gpu-memory-utilization", "0.4"]
        two_nodes.main(flags, "vllm", tmp_path / "nodes", "127.0.0.1", scenario, 20)
        return [(tmp_path / f"nodes/vllm-node-{node}.log").read_text() for node in (0, 1)]

    yield run
    assert not Process.alive


def test_both_nodes_run_etap_and_get_the_scenarios_flags_and_variables(check, capsys):
    logs = check("")
    assert "2 nodes, ETAP in the workers of both, 16 tokens" in capsys.readouterr().out
    for node, log in enumerate(logs):
        assert f"--node-rank {node}" in log and "fuse_allreduce_rms" in log and "tp2 0" in log
        assert "--gpu-memory-utilization 0.4" in log


def test_a_node_that_does_not_name_etap_fails_it(check):
    with pytest.raises(SystemExit, match=r"none in \['vllm-node-1'\]"):
        check("silent")


OF_SGLANG_ALONE = """
title = "SGLang's"
model = "deepseek-r1"
gpus = 1
points = [{ input = 64, output = 2, concurrency = [1] }]
[sglang]
backends = ["etap"]
"""


@pytest.mark.parametrize("name, said", [
    ("no-such", "no-such"), ("sglang.toml", r"--scenario: wanted one with a table \[vllm\], got .*sglang\.toml"),
])  # fmt: skip
def test_a_scenario_that_is_none_or_of_another_engine_is_refused_and_nothing_written(check, tmp_path, name, said):
    (tmp_path / "sglang.toml").write_text(OF_SGLANG_ALONE)
    with pytest.raises(typer.BadParameter, match=said):
        check("", str(tmp_path / name))
    assert not (tmp_path / "nodes").exists()

"""The check of two nodes against small processes in the engine's place: both must name ETAP, the first must answer."""

import sys
from pathlib import Path

import pytest
from fake_server import ANSWERING

from etap_backend.lab.checks import two_nodes
from etap_backend.lab.e2e.scenario import EngineName
from etap_backend.lab.serving.engines import ENGINES
from etap_backend.lab.serving.lifecycle import Process


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the check; gives the logs of both nodes."""
    program = tmp_path / "server.py"
    program.write_text(ANSWERING)
    vllm = type(ENGINES["vllm"])
    command = vllm.server
    monkeypatch.setattr(vllm, "server", lambda *of: [sys.executable, str(program), *command(*of)[1:]])
    monkeypatch.setattr(two_nodes, "prepare_model", lambda *of: Written(str(of[-1])))

    def run(fault: str) -> list[str]:
        monkeypatch.setenv("FAULT", fault)
        flags = ["--gpu-memory-utilization", "0.4"]
        two_nodes.main(flags, EngineName.vllm, tmp_path / "nodes", "127.0.0.1", "decode-plain", 20)
        return [(tmp_path / f"nodes/vllm-node-{node}.log").read_text() for node in (0, 1)]

    yield run
    assert not Process.alive


class Written:
    """A model's folder, which needs no tokenizer here."""

    def __init__(self, model: str):
        self.model = model

    def write(self) -> None:
        Path(self.model).mkdir(parents=True)


def test_both_nodes_run_etap_and_get_the_scenarios_flags_and_variables(check, capsys):
    logs = check("")
    assert "2 nodes, ETAP in the workers of both, 16 tokens" in capsys.readouterr().out
    for node, log in enumerate(logs):
        assert f"--node-rank {node}" in log and "fuse_allreduce_rms" in log and "tp2 0" in log
        assert "--gpu-memory-utilization 0.4" in log


def test_a_node_that_does_not_name_etap_fails_it(check):
    with pytest.raises(SystemExit, match=r"none in \['vllm-node-1'\]"):
        check("silent")

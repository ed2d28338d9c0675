"""The program that joins two servers: blocks' names, judgement, and whole runs with small processes in vLLM's place."""

from __future__ import annotations

import json
import re

import pytest
from bench.tests.fake_server import IN_VLLMS_PLACE, Written, stand_in

from bench.serving.engines import Answer
from bench.serving.lifecycle import Process
from bench.qualify import two_servers

STEPS = 12

# Answers vLLM's command line in its format, writes blocks of prompts as files and finds them again. FAULT is "silent"
# where the server that decodes names no backend, "loses" where no file is written, "recomputes" where none is read,
# "differs" where what was read gives other answers, and "dies" where a server does at start.
SERVER = (
    IN_VLLMS_PLACE
    + """
import zlib
from pathlib import Path
ours = flag("--attention-backend") == "ETAP"
joined = "--kv-transfer-config" in sys.argv and json.loads(flag("--kv-transfer-config"))["kv_connector_extra_config"]
folder = Path(joined["secondary_tiers"][0]["root_dir"]) if joined else None
if fault == "dies" and joined and ours: sys.exit("RuntimeError: out of luck")
if not (fault == "silent" and joined and ours):
    print(f"Using AttentionBackendEnum.{flag('--attention-backend')} backend.")
print("Capturing CUDA graphs (decode, FULL)", os.environ["PYTHONHASHSEED"], os.environ["NCCL_NVLS_ENABLE"], flush=True)
counts = dict.fromkeys(("prefix_cache_hits", "prompt_tokens_cached", "external_prefix_cache_hits"), 0)
lock, known = threading.Lock(), set()

def reused(prompt, salt):
    came = False
    for end in range(64, len(prompt) + 1, 64):
        name = zlib.crc32(repr((salt, prompt[:end])).encode())
        file = folder / f"{name}.bin" if folder else None
        there = file is not None and file.exists() and not (fault == "recomputes" and ours)
        found = "prefix_cache_hits" if name in known else "external_prefix_cache_hits" if there else None
        came |= found == "external_prefix_cache_hits"
        for count in ("prompt_tokens_cached", found) if found else ():
            counts[count] += 64
        known.add(name)
        if file and not there and fault != "loses": file.touch()
    return came

class Handler(Replying):
    def do_GET(self):
        self.count(counts)

    def do_POST(self):
        asked, forced = self.asked()
        with lock: came = reused(asked["prompt"], asked["cache_salt"])
        first = -1.0 - sum(asked["prompt"]) % 7 - (came and fault == "differs")
        self.answer((forced or range(asked["max_tokens"]))[: asked["max_tokens"]], first, first - 2)
serve(Handler)
"""
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program; gives what it exits with. Nothing is left of it."""
    stand_in(monkeypatch, tmp_path, SERVER)
    monkeypatch.setattr(two_servers, "prepare_model", lambda *of: Written(of[-1]))
    monkeypatch.setattr(two_servers, "FILE_SECONDS", 1)

    def run(fault: str) -> object:
        monkeypatch.setenv("FAULT", fault)
        with pytest.raises(SystemExit) as end:
            two_servers.main(
                ["--max-num-seqs", "64"], "deepseek-r1", tmp_path / "servers.json", None, "decode-plain", 600
            )
        return end.value.code

    yield run
    assert not Process.alive and not (tmp_path / "servers/kv-blocks").exists()


def test_the_pair_answers_as_one_server_does_and_every_block_came_through_the_connector(run, tmp_path, capsys):
    assert run("") == 0
    said = capsys.readouterr().out
    assert "tokens' rows came through the connector" in said and "the pair beside alone, together 32 of 32" in said
    document = json.loads((tmp_path / "servers.json").read_text())
    assert document["outcome"] == said.strip() and not document["failures"]
    assert document["agreement"]["the pair beside theirs, few"]["median"] == 0.0
    for role, gpu in two_servers.SERVERS.items():
        log = (tmp_path / f"servers/{role}.log").read_text()
        assert "(decode, FULL) 0 0" in log and "--load-format seeded" in log and "--max-num-seqs 64" in log
        assert f"--attention-backend {('FLASHMLA', 'ETAP')[gpu]} " in log
        assert ("--kv-transfer-config" in log) == (role in two_servers.JOINED)


@pytest.mark.parametrize("fault, said", [
    ("silent", "decode.log does not say that ETAP is in use"),
    ("loses", r"wanted \d+ blocks after 1 s, got 0"),
    ("recomputes", r"wanted \d+ tokens of prompts from the other server, reused 0"),
    ("differs", r"the pair beside alone, together: median difference 1\.0000"),
    ("dies", r"the server ended with 1:\n(.*\n)*RuntimeError: out of luck"),
])  # fmt: skip
def test_a_fault_fails_it(run, fault, said):
    code = run(fault)
    assert isinstance(code, str) and re.search(said, code), code


def test_a_block_has_one_name_by_its_salt_and_all_tokens_up_to_its_end():
    long, other = list(range(200)), [9, *range(1, 200)]
    names = [two_servers.block_names([{"cache_salt": "a", "prompt": prompt}]) for prompt in (long, long[:128], other)]
    assert [len(of) for of in names] == [3, 2, 3]
    assert names[1] < names[0] and not names[0] & names[2]
    assert not two_servers.block_names([{"cache_salt": "a", "prompt": long[:63]}])
    assert not two_servers.block_names([{"cache_salt": "b", "prompt": long}]) & names[0]


def answers(shift: float) -> list[Answer]:
    return [Answer([7] * STEPS, [-2.0 - shift] * STEPS, [1.0] * STEPS) for _ in range(4)]


@pytest.mark.parametrize("alone, pair, against", [(0.0, 0.02, ""), (0.0, 1.0, "alone"), (1.0, 1.0, "theirs")])
def test_answers_are_judged_by_the_noise_of_the_other_backend(alone, pair, against):
    stages = {"together": 0.0, "again": 0.0, "few": 0.01, "turns": 0.0, "control": 3.0, "before control": 0.0}
    given = {
        name: {stage: answers(by + shift) for stage, by in stages.items()}
        for name, shift in (("theirs", 0.0), ("alone", alone), ("pair", pair))
    }
    found, failures = two_servers.judge(given)
    assert found["the pair beside alone, turns"].median() == pytest.approx(abs(pair - alone))
    assert bool(failures) == bool(against)
    assert not against or any(f"beside {against}, together: median difference" in failure for failure in failures)


def test_the_connector_reads_and_writes_one_folder(tmp_path):
    name, config = two_servers.connector(tmp_path)
    extra = json.loads(config)["kv_connector_extra_config"]
    assert name == "--kv-transfer-config" and json.loads(config)["kv_connector"] == "OffloadingConnector"
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path)}]

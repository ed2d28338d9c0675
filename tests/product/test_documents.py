"""What CONTRIBUTING.md promises of the source tree, and the README of its example."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_from_the_server_to_the_first_wgmma_a_reader_opens_at_most_18_files_each_once():
    section = CONTRIBUTING.split("## From")[1].split("\n## ")[0]
    path = re.findall(r"^(\d+)\. `(\S+)`", section, re.MULTILINE)
    assert [int(number) for number, _ in path] == list(range(1, len(path) + 1)) and 10 < len(path) <= 18
    files = [ROOT / name for _, name in path]
    assert len(set(files)) == len(files)
    assert [file for file in files if not file.is_file()] == []


def test_its_make_targets_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in re.findall(r"`make ([\w -]+)`", CONTRIBUTING) for word in words.split()}
    assert named and named <= targets


def test_the_readmes_call_runs_on_the_cpu_too():
    section = (ROOT / "README.md").read_text().split("## Call it")[1]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    found = {}
    exec(example.replace('device="cuda"', 'device="cpu"'), found)
    assert found["out"].shape == (4, 1, 16, 512) and found["out"].isfinite().all()

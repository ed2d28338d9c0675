"""What CONTRIBUTING.md promises of the source tree, and the pages of the programs that they show."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_from_the_server_to_the_first_wgmma_a_reader_opens_at_most_12_files_each_once():
    section = CONTRIBUTING.split("## From")[1].split("\n## ")[0]
    path = re.findall(r"^(\d+)\. `(\S+)`", section, re.MULTILINE)
    assert [int(number) for number, _ in path] == list(range(1, len(path) + 1)) and 10 < len(path) <= 12
    files = [ROOT / name for _, name in path]
    assert len(set(files)) == len(files)
    assert [file for file in files if not file.is_file()] == []


def test_its_make_targets_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in re.findall(r"`make ([\w -]+)`", CONTRIBUTING) for word in words.split()}
    assert named and named <= targets


def programs() -> list:
    """The pages' Python programs: one per page, and separately those that change a process for good."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        installing = [block for block in blocks if "install(" in block]
        calls = "\n".join(block for block in blocks if block not in installing)
        found += [pytest.param(calls, id=page.name)] if calls else []
        found += [pytest.param(block, id=f"{page.name}, install") for block in installing]
    return found


def test_readme_shows_the_public_calls():
    text = (ROOT / "README.md").read_text()
    assert "mla_decode(" in text and "DecodeSchedule(" in text and "etap plan" in text


@pytest.mark.parametrize("program", programs())
def test_the_programs_of_the_pages_run_without_a_gpu(run_program, program):
    program = program.replace('"cuda"', '"cpu"') + (
        "\nimport torch\n"
        "results = [one for name, one in globals().items() if name.endswith(('out', 'lse'))]\n"
        "assert all(isinstance(one, torch.Tensor) and one.isfinite().all() for one in results)\n"
        "print(len(results))"
    )
    lacks_flashinfer = "flashinfer.install(" in program and not importlib.util.find_spec("flashinfer")
    output, errors = run_program(program, may_fail=lacks_flashinfer)
    if lacks_flashinfer:
        assert errors.endswith("ModuleNotFoundError: No module named 'flashinfer'\n")
        return
    assert ("install(" in program) == (int(output) == 0)

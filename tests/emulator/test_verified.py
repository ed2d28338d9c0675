"""The digest that decides whether exhaustive cases run has all that decides how they end."""

import re
from pathlib import Path

import verified

HERE = Path(__file__).parent


def imported(path: Path) -> set[str]:
    """Modules of tests/support that a file imports."""
    found = re.findall(r"^from support(?:\.(\w+))? import (.*)$", path.read_text(), flags=re.M)
    return {name for module, names in found for name in ([module] if module else names.split(", "))}


def test_every_shared_module_is_an_input():
    tests = [path for path in HERE.rglob("*.py") if path != Path(__file__)]
    needed = set().union(*map(imported, tests))
    while more := set().union(*(imported(HERE.parent / "support" / f"{name}.py") for name in needed)) - needed:
        needed |= more
    assert needed == set(verified.SUPPORT)


def test_the_digest_changes_with_sources_and_build_requirements_alone(tmp_path):
    for path, content in verified.inputs().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert verified.digest(tmp_path) == (before := verified.digest())
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(f"# a comment\n{pyproject.read_text()}\n[project]\nname = 'other'\n")
    (tmp_path / "README.md").write_text("other")
    assert verified.digest(tmp_path) == before
    for changed in ("csrc/params.h", "tests/emulator/kernels.py", "tests/support/cases.py", "pyproject.toml"):
        content = (tmp_path / changed).read_text()
        (tmp_path / changed).write_text(f'"other"\n{content}')
        assert verified.digest(tmp_path) != before
        (tmp_path / changed).write_text(content)

"""How large documents, results and the laboratory may be. What does not fit is cut or moved, not the number here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = re.compile(r"<!-- ([\w-]+)[^>]* -->.*?<!-- /\1 -->", re.DOTALL)


def words(path: Path) -> int:
    """Of a document, without the tables that a program writes."""
    return len(GENERATED.sub("", path.read_text()).split())


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def test_what_a_program_writes_is_not_counted(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("two words <!-- bench targets: 1 x 4K -->\n| a | b |\n<!-- /bench --> and three")
    assert words(page) == 4


@pytest.mark.parametrize(
    "what, measured, most",
    [
        ("words of README.md", lambda: words(ROOT / "README.md"), 1_000),
        ("words of docs/", lambda: sum(map(words, (ROOT / "docs").rglob("*.md"))), 20_000),
        ("files in results/", lambda: sum(path.is_file() for path in (ROOT / "results").rglob("*")), 45),
        ("lines of the laboratory", lambda: lines(ROOT / "etap_backend" / "lab"), 9_500),
    ],
    ids=["README", "docs", "results", "laboratory"],
)
def test_budget(what, measured, most):
    assert measured() <= most, what

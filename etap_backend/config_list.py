"""`etap configs`: where the configurations of the servers lie, and what each of them is for."""

from itertools import takewhile
from pathlib import Path

_PACKAGE = Path(__file__).parent
# In a wheel the folder lies in the package; in a source tree beside it.
FOLDER = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())
ENGINES = ("vllm", "sglang")


def purpose(text: str) -> str:
    """The first sentence of a file's comments, behind the command that they begin with."""
    _, *comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
    words = " ".join(line.removeprefix("#").strip() for line in comments)
    return words.strip().partition(". ")[0].rstrip(".")


def run(options: object = None) -> int:
    """Print each file's path and purpose; gives 0."""
    for engine in ENGINES:
        for path in sorted((FOLDER / engine).glob("*.yaml")):
            print(f"{path}\n    {purpose(path.read_text())}")
    return 0

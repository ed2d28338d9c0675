"""Whether the emulated cases that are marked exhaustive have passed for the kernels of this tree.

    python tests/emulator/verified.py --check   exit status 0: they have; 1: sources changed since, run them
    python tests/emulator/verified.py --write   they have just passed: record that, for a commit

The digest covers the kernels' sources, the emulator and its tests, the problems and limits that they share with the
GPU's tests, and the build requirements, which pin the compiler. It does not cover PTX, which names the build's folder,
nor the package's Python, which the cases that always run check.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("verified.sha256")
FOLDERS = ("csrc", "tests/emulator")
NO_INPUTS = ("verified.py", "test_verified.py", RECORD.name)  # and what Python compiles
SUPPORT = ("cases", "compare", "covering", "shared", "sparse_cases", "sparse_compare", "top_k_cases")


def inputs(root: Path = ROOT) -> dict[str, bytes]:
    """Content of every input by its path below the root."""
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts and path.name not in NO_INPUTS]
    files += [root / "tests" / "support" / f"{name}.py" for name in SUPPORT]
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
    build_system, _, _ = (root / "pyproject.toml").read_bytes().partition(b"[project]")
    return found | {"pyproject.toml": b"\n".join(re.findall(rb'"[^"]+"', build_system))}


def digest(root: Path = ROOT) -> str:
    """One digest of all inputs with their paths."""
    total = hashlib.sha256()
    for path, content in sorted(inputs(root).items()):
        total.update(f"{path} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--check", action="store_true", help="exit with 1 if sources changed since they passed")
    how.add_argument("--write", action="store_true", help="record that they have passed")
    if parser.parse_args().write:
        RECORD.write_text(f"{digest()}\n")
        print(f"recorded in {RECORD.relative_to(ROOT)}: the exhaustive emulated cases pass")
        return 0
    if RECORD.exists() and RECORD.read_text().strip() == digest():
        print("exhaustive emulated cases: passed for these sources, not run again")
        return 0
    print("exhaustive emulated cases: kernels, emulator or their tests changed since they passed; they must run")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Measures and qualifies ETAP from a checkout. It shares the problems of tests/support, so tests/ goes on the path."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)

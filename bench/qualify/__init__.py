"""Qualifies a build on a GPU: random cases, sanitizers, other projects' test suites, the H20 proxy, trained models.

Programs run from the repository's root as `python -m bench.qualify.NAME`, the files that hold a suite under pytest.
They share the problems of tests/support, so this package puts the checkout's tests/ on the path.
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)

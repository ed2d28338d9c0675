"""Runs of other projects' own tests: a file of this folder on the project's repository, and its results file.

    python -m pytest tests/qualify/flashmla_dense.py --checkout FLASHMLA --output flashmla-dense.json [--part 1/4]

One file at a time, as each puts ETAP into the place of a module that its tests import. Without installation the source
tree has to be on PYTHONPATH.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from etap_backend._library import library_path
from bench.common.provenance import commit_of, provenance, sha256
from bench.common.results import must_be_writable, write
from bench.qualify.theirs import DTYPES, KEPT_FAILURES, KEPT_TEXT, Suite, part_of, told

PROGRAM = "python -m pytest"
PACKAGES = ("etap-backend", "torch", "apache-tvm-ffi", "sglang")


def pytest_addoption(parser):
    group = parser.getgroup("other projects' tests")
    group.addoption("--checkout", type=Path, help="the other project's repository")
    group.addoption("--output", type=Path, help="JSON file to write")
    group.addoption("--part", default="1/1", help="such as 2/4: the second of every four cases")
    group.addoption("--dtype", choices=sorted(DTYPES), default="bf16", help="of queries and cache")
    group.addoption("--beside", help="module with the other project's own call, to compare errors with")
    group.addoption("--query-heads", type=int, action="append", help="FlashMLA's sparse cases with so many; repeatable")
    group.addoption("--format", default="V3.2", help="of FlashMLA's sparse cases: V3.2 or MODEL1")


def pytest_configure(config):
    if (output := config.getoption("--output", None)) and not hasattr(config, "workerinput"):
        try:
            must_be_writable(output)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(Record(config))


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    suite, option = getattr(metafunc.module, "SUITE", None), metafunc.config.option
    if suite is not None and not (option.checkout and (option.checkout / suite.script).is_file()):
        wanted = f"wanted {suite.whose}'s repository with {suite.script}, got {option.checkout}"
        raise pytest.UsageError(f"--checkout: {wanted}")
    cases = part_of(metafunc.module.cases(option), option.part)
    metafunc.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.fixture(autouse=True)
def kind(request, record_property):
    """What a results file counts a case as."""
    if "case" in request.fixturenames:
        record_property("kind", request.getfixturevalue("case").kind)


class Record:
    """Counts what came of the cases, by kind, and writes the results file."""

    def __init__(self, config):
        self.config, self.suite = config, Suite("", Path(), "tests of ETAP")
        self.counts: dict[str, Counter] = {}
        self.failures: list[dict[str, str]] = []
        self.failed = 0

    def pytest_collection_modifyitems(self, items):
        suites = [item.module.SUITE for item in items if hasattr(item.module, "SUITE")]
        if suites:
            self.suite = suites[0]
        elif items:  # of an engine that is installed
            self.suite.what = items[0].module.__doc__.partition("\n")[0].rstrip(".")
        script = self.config.option.checkout / self.suite.script if suites else None
        packages = (*PACKAGES, *self.suite.packages)
        about = provenance(PROGRAM, packages=packages, library=library_path()).model_dump(mode="json")
        self.document = {"what": self.suite.what} | about
        if script:
            checkout = self.config.option.checkout
            commit = commit_of(checkout) if (checkout / ".git").exists() else None
            self.document |= {f"{self.suite.whose.lower()}_commit": commit, "script_sha256": sha256(script)}

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown" and report.passed or report.when == "setup" and report.passed:
            return
        kind = dict(report.user_properties).get("kind", report.nodeid.rpartition("::")[2].partition("[")[0])
        self.counts.setdefault(kind, Counter(wanted=0, passed=0, skipped=0)).update(["wanted", report.outcome])
        if report.failed:
            self.failed += 1
            said = {"case": report.nodeid, "error": str(report.longrepr)[-KEPT_TEXT:]}
            self.failures.append(said | {"printed": report.capstdout[-KEPT_TEXT:]})
            del self.failures[KEPT_FAILURES:]

    def pytest_sessionfinish(self, exitstatus):
        option = self.config.option
        cases = {kind: {k: counts[k] for k in ("wanted", "passed", "skipped")} for kind, counts in self.counts.items()}
        found = {"dtype": option.dtype, "part": option.part, "cases": cases}
        found |= {"left_out": self.suite.left_out} if self.suite.left_out else {}
        if option.beside:
            found |= {"beside": option.beside, "relative_rmse": self.suite.errors.summary()}
        passed = sum(counts["passed"] for counts in cases.values())
        found |= {"complete": bool(passed) and exitstatus == 0, "failed": self.failed, "failures": self.failures}
        write(told(self.document | found), option.output)

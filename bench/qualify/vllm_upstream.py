"""Runs vLLM's own tests of MLA backends with ETAP in their list of backends.

    PYTHONPATH=tests python -m bench.qualify.vllm_upstream CHECKOUT [--only-etap] [--kv-cache-dtype fp8] [--offline]
        [--output upstream.json] [-- pytest options]
    PYTHONPATH=tests python -m bench.qualify.vllm_upstream CHECKOUT --sparse [--tensor-parallel 1,2,4,8]

CHECKOUT is vLLM's repository, or its source distribution, at the version that is installed; nothing of it is copied
into this project. The tests are copied to a temporary folder, because beside CHECKOUT's own `vllm` folder they would
import that instead of the installed one. They read the configuration of deepseek-ai/DeepSeek-R1, or with --sparse of
DeepSeek-V2-Lite-Chat, from the Hugging Face hub; --offline gives them those that this package ships.

With --kv-cache-dtype fp8 the cases with an FP8 cache run, written by vLLM's own operator with scales of 1 and of 3.

The dense tests decide by themselves which backends a case takes. ETAP is appended to their lists when they are
collected. The sparse ones are parametrised: ETAP becomes another backend, and 128 heads over 8 ranks a further size;
both caches run, the FP8 one by its proper name, which vLLM turns `fp8` into before a backend sees it.

At the end the cases that ran ETAP are counted: a passed case without it (sparse: one of its own that did not call it),
or a batch, cache or size without a passed case, is a failure.
"""

import collections
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer

from etap_backend import _library
from bench.common import configs
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, write

PROGRAM = "PYTHONPATH=tests python -m bench.qualify.vllm_upstream"
PACKAGES = ("etap-backend", "vllm", "torch", "apache-tvm-ffi", "triton")
MODELS = {"deepseek-ai/DeepSeek-R1": "deepseek-r1", "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite"}
"""Whose configurations the tests read, and their names in configs/models."""


class Counting:
    """Pytest plugin: in which cases of a test ETAP ran, and which passed."""

    tests: str
    correctness: str

    def __init__(self) -> None:
        self.runs: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, str] = {}
        self.current = ""
        self.of_etap: set[str] = set()
        self.wanted: dict[str, list[str]] = {}

    @property
    def passed(self) -> list[str]:
        """Cases that ETAP should have run in."""
        return [test for test in self.of_etap if self.outcomes.get(test) == "passed"]

    @property
    def ran(self) -> list[str]:
        return [test for test in self.passed if self.runs[test]]

    def pytest_runtest_setup(self, item) -> None:
        self.current = item.nodeid

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def counts(self) -> dict[str, dict[str, int]]:
        """Cases that ran ETAP and passed, by each thing that is to be seen."""
        return {what: {name: sum(name in parts(t) for t in self.ran) for name in names}
                for what, names in self.wanted.items()}  # fmt: skip

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.write_line(f"ETAP ran and passed in {len(self.ran)} of {len(self.passed)} passed cases")
        for what, names in self.counts().items():
            terminalreporter.write_line(f"  {what}: " + ", ".join(f"{name} {count}" for name, count in names.items()))

    def nothing_ran(self) -> str | None:
        """Why the run proves nothing, or None."""
        if not self.passed:
            return "no case of the correctness tests passed"
        if without := [test for test in self.passed if not self.runs[test]]:
            return f"{len(without)} passed cases did not run ETAP, {without[0]} for one; narrow them with -k"
        for what, names in self.counts().items():
            if unseen := [name for name, count in names.items() if not count]:
                return f"no passed case for {what} {', '.join(unseen)}"
        return None


def parts(test: str) -> list[str]:
    """The parameters in a case's name. A batch's name has no hyphen, so they are what hyphens part."""
    return test.partition("[")[2].rstrip("]").split("-")


class WithEtap(Counting):
    """Puts ETAP into the lists of the collected modules of dense tests."""

    tests = "test_mla_backends.py"
    correctness = "test_backend_correctness"

    def __init__(self, only_etap: bool):
        super().__init__()
        self.only_etap = only_etap

    def pytest_collection_finish(self, session) -> None:
        """After the tests are imported, before any of them runs."""
        self.of_etap = {item.nodeid for item in session.items if self.correctness in item.name}
        for module in {item.module for item in session.items}:
            self.add(module)

    def add(self, module) -> None:
        """Append ETAP to what the module computed from its list when it was imported."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        etap = AttentionBackendEnum["ETAP"]
        for backends in (module.BACKENDS_TO_TEST, module.SPEC_DECODE_BACKENDS):
            if self.only_etap:
                backends.clear()
            if etap not in backends:
                backends.append(etap)
        module.BACKEND_BLOCK_SIZES[etap] = max(etap.get_class().get_supported_kernel_block_sizes())
        marks = getattr(module, self.correctness).pytestmark
        (self.wanted["batch"],) = [list(mark.args[1]) for mark in marks if mark.args[0] == "batch_spec_name"]
        run = module.run_attention_backend

        def counted(backend, *args, **kwargs):
            output = run(backend, *args, **kwargs)
            self.runs[self.current] += backend is etap
            return output

        module.run_attention_backend = counted


class WithSparseEtap(Counting):
    """Makes ETAP one of the backends that the sparse tests are parametrised by."""

    tests = "test_sparse_mla_backends.py"
    correctness = "test_sparse_backend_decode_correctness"

    def __init__(self, only_etap: bool, sizes: list[int], caches: list[str]):
        super().__init__()
        from etap_backend.vllm.sparse import ETAPSparseBackend, ETAPSparseImpl

        self.only_etap, self.sizes, self.backend = only_etap, sizes, ETAPSparseBackend
        self.wanted = {"cache": caches, "tensor parallel size": [f"tp{size}" for size in sizes]}
        forward = ETAPSparseImpl.forward_mqa

        def counted(*args, **kwargs):
            self.runs[self.current] += 1
            return forward(*args, **kwargs)

        ETAPSparseImpl.forward_mqa = counted

    def pytest_pycollect_makeitem(self, name, obj) -> None:
        """Before the test becomes its cases."""
        if name == self.correctness:
            obj.pytestmark = [self.extended(mark) for mark in obj.pytestmark]

    def extended(self, mark):
        """One of its parametrisations, with what is missing in it."""
        if mark.name != "parametrize":
            return mark
        names, values = mark.args
        if names == "batch_name":
            self.wanted["batch"] = list(values)
        if names == "backend_cls":
            backends, ids = ([], []) if self.only_etap else (list(values), list(mark.kwargs["ids"]))
            return pytest.mark.parametrize(names, [*backends, self.backend], ids=[*ids, "ETAP"]).mark
        if names == "tensor_parallel_size":
            return pytest.mark.parametrize(names, self.sizes, ids=[f"tp{size}" for size in self.sizes]).mark
        return mark

    def pytest_collection_modifyitems(self, config, items) -> None:
        """Leave out the cache types that no backend gets, and blocks that ETAP does not take.

        Heads without a rope part, which the tests have in 0.33, they give vLLM's own backend alone.
        """
        kept, left_out = [], []
        for item in items:
            given = item.callspec.params if hasattr(item, "callspec") else {}
            ours = given.get("backend_cls") is self.backend
            taken = ours and given["kv_cache_dtype"] in self.wanted["cache"] and given["block_size"] == 64
            fits = not ours or taken and given.get("qk_rope_head_dim") != 0
            (kept if fits else left_out).append(item)
            if ours and fits:
                self.of_etap.add(item.nodeid)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def offline_hub(folder: Path) -> None:
    """A Hugging Face cache in which the models have their configurations and nothing else."""
    snapshot = "0" * 40
    for name, shipped in MODELS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs/main").write_text(snapshot)
        (model / "snapshots" / snapshot).mkdir(parents=True)
        shutil.copy(configs.find("models", shipped, ".json"), model / "snapshots" / snapshot / "config.json")
    os.environ |= {"HF_HOME": str(folder), "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}


def find_tests(checkout: Path, name: str) -> Path:
    """Where the checkout has them. Raises BadParameter where it has none."""
    found = sorted((checkout / "tests/v1/attention").rglob(name))
    if len(found) != 1:
        raise typer.BadParameter(f"checkout: wanted vLLM's repository with tests/v1/attention/{name}, got {checkout}")
    return found[0].relative_to(checkout)


def parse_sizes(text: str) -> list[int]:
    """Tensor parallel sizes. Raises BadParameter where one does not divide 128 heads."""
    if any(not part.isdigit() or int(part) < 1 or 128 % int(part) for part in text.split(",")):
        raise typer.BadParameter(f"--tensor-parallel: wanted a list of divisors of 128, got {text}")
    return [int(part) for part in text.split(",")]


def run_tests(checkout: Path, tests: Path, folder: Path, plugin: Counting, options: list[str]) -> int:
    """Copy the tests and run them there: pytest's status."""
    shutil.copytree(checkout / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    usual = ["--rootdir", str(folder), "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    return int(pytest.main([str(tests), *usual, *options], plugins=[plugin]))


def document(plugin: Counting, status: int, reason: str | None) -> dict:
    """The results file."""
    about = provenance(PROGRAM, packages=PACKAGES, library=_library.library_path())
    outcomes = collections.Counter(plugin.outcomes.values())
    counted = {
        "status": status,
        "outcomes": outcomes,
        "ran_etap_and_passed": len(plugin.ran),
        "of": len(plugin.of_etap),
        "outcome": f"ETAP ran and passed in {len(plugin.ran)} of {len(plugin.of_etap)}",
    }
    what = f"vLLM's own {plugin.tests} with ETAP among its backends"
    return {"what": what} | about.model_dump() | counted | {"by": plugin.counts(), "proves_nothing": reason}


def main(
    checkout: Annotated[Path, typer.Argument(help="vLLM's repository at the installed version.")],
    pytest_options: Annotated[list[str] | None, typer.Argument(help="For pytest, after --.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="The tests of sparse attention.")] = False,
    tensor_parallel: Annotated[str, typer.Option(help="Sizes that share 128 heads, for --sparse.")] = "1,2,4,8",
    only_etap: Annotated[bool, typer.Option("--only-etap", help="Take the other backends out of the lists.")] = False,
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"] | None, typer.Option(help="Cases to run; default: auto, and with --sparse both.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Read the shipped configurations of models.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Run vLLM's own MLA tests with ETAP; exit with pytest's status, or 1 when they prove nothing."""
    options, sizes = pytest_options or [], parse_sizes(tensor_parallel)
    if "etap" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        sys.exit("etap-backend is not installed beside vLLM: no plugin named etap")
    if output:
        output = output.absolute()
        try:
            must_be_writable(output)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    caches = {"auto": ["auto"], "fp8": ["fp8_ds_mla"], None: ["auto", "fp8_ds_mla"]}[kv_cache_dtype]
    checkout, kind = checkout.absolute(), WithSparseEtap if sparse else WithEtap
    tests = find_tests(checkout, kind.tests)
    with tempfile.TemporaryDirectory() as name:
        if offline:
            offline_hub(Path(name) / "huggingface")
        # Where the hub's cache is, is read when this is imported.
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        plugin = WithSparseEtap(only_etap, sizes, caches) if sparse else WithEtap(only_etap)
        if "-k" not in options:
            options += ["-k", kind.correctness + ("" if sparse else f" and {kv_cache_dtype or 'auto'}")]
        status = run_tests(checkout, tests, Path(name), plugin, options)
    reason = None if "--collect-only" in options else plugin.nothing_ran()
    if output:
        write(document(plugin, status, reason), output)
    if status == 0 and reason:
        sys.exit(f"vLLM {importlib.metadata.version('vllm')}: {reason}")
    sys.exit(status)


if __name__ == "__main__":
    typer.run(main)

"""vLLM's own tests of MLA backends, with ETAP as the only backend: the suites `vllm` and `vllm-sparse`.

The checkout is vLLM's repository, or its source distribution, at the installed version. Its tests are copied to a
temporary folder: beside the checkout's own `vllm` folder they would import that instead of the installed one. The
tests read the configurations of two models from the Hugging Face hub; they get the ones that this repository ships.

The dense test takes the backends in its module's lists, which are replaced by ETAP alone when the tests are collected.
The sparse test is parametrised by backend: ETAP takes the place of the others, and 128 heads on 8 ranks are added.
Dense prompts run with FLASH_ATTN. Sparse cases keep to ETAP's cache types and page sizes, and to heads with rope.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from bench.common import configs
from bench.qualify.suites import Options, Report

MODELS = {"deepseek-ai/DeepSeek-R1": "deepseek-r1", "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite"}
"""Models whose configurations the tests read, and their files' names."""
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
SPARSE_CACHES = ("auto", "fp8_ds_mla")  # vLLM turns `fp8` into the second before a backend sees it
QUIET = ("-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning", "--tb=short")


class Redirected:
    """Pytest plugin: runs one test of the collected file, counts its cases and its calls of ETAP."""

    test: str
    kind_of: tuple[str, str]  # the parameters that a case's kind is made of

    def __init__(self, options: Options, report: Report):
        self.options, self.report = options, report
        self.kinds: dict[str, str] = {}

    def wanted(self, given: dict) -> bool:
        """Whether ETAP serves the case with these parameters."""
        raise NotImplementedError

    def pytest_collection_modifyitems(self, config, items) -> None:
        cases = [item for item in items if item.originalname == self.test and self.wanted(item.callspec.params)]
        chosen = self.options.chosen(cases)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        for item in items:
            kind = ", ".join(str(item.callspec.params[name]) for name in self.kind_of)
            self.kinds[item.nodeid] = kind
            self.report.expect(kind)

    def pytest_runtest_setup(self, item) -> None:
        self.report.calls = 0

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.report.add(self.kinds[report.nodeid], report.nodeid, report.outcome, str(report.longrepr))


class Dense(Redirected):
    test = "test_backend_correctness"
    kind_of = ("kv_cache_dtype", "batch_spec_name")

    def wanted(self, given: dict) -> bool:
        return getattr(given.get("prefill_backend"), "name", "FLASH_ATTN") == "FLASH_ATTN"

    def pytest_collection_finish(self, session) -> None:
        """Put ETAP into what the imported module computed from its list of backends."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        etap = AttentionBackendEnum["ETAP"]
        for module in {item.module for item in session.items}:
            module.BACKENDS_TO_TEST[:] = module.SPEC_DECODE_BACKENDS[:] = [etap]
            module.BACKEND_BLOCK_SIZES[etap] = max(etap.get_class().get_supported_kernel_block_sizes())
            run = module.run_attention_backend

            def counted(backend, *args, run=run, **kwargs):
                self.report.calls += backend is etap
                return run(backend, *args, **kwargs)

            module.run_attention_backend = counted


class Sparse(Redirected):
    test = "test_sparse_backend_decode_correctness"
    kind_of = ("kv_cache_dtype", "batch_name")

    def wanted(self, given: dict) -> bool:
        fits = given["kv_cache_dtype"] in SPARSE_CACHES and given["block_size"] == 64
        return fits and given.get("qk_rope_head_dim") != 0

    def pytest_pycollect_makeitem(self, name, obj) -> None:
        """Change the test's parameters before it becomes its cases."""
        if name == self.test:
            obj.pytestmark = [self.redirected(mark) for mark in obj.pytestmark]

    @staticmethod
    def redirected(mark):
        from etap_backend.vllm.sparse import ETAPSparseBackend

        names = mark.args[0] if mark.name == "parametrize" else None
        if names == "backend_cls":
            return pytest.mark.parametrize(names, [ETAPSparseBackend], ids=["ETAP"]).mark
        if names == "tensor_parallel_size":
            ids = [f"tp{size}" for size in TENSOR_PARALLEL_SIZES]
            return pytest.mark.parametrize(names, TENSOR_PARALLEL_SIZES, ids=ids).mark
        return mark


def offline_hub(folder: Path) -> None:
    """Make a Hugging Face cache that holds the models' configurations and nothing else, and set its variables."""
    snapshot = "0" * 40
    for name, shipped in MODELS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs/main").write_text(snapshot)
        (model / "snapshots" / snapshot).mkdir(parents=True)
        shutil.copy(configs.find("models", shipped, ".json"), model / "snapshots" / snapshot / "config.json")
    os.environ |= {"HF_HOME": str(folder), "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}


def run_pytest(plugin: Redirected, options: Options, folder: Path) -> None:
    """Copy the checkout's tests into `folder` and run the script there."""
    assert options.checkout and options.script
    shutil.copytree(options.checkout / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    status = int(pytest.main([str(options.script), "--rootdir", str(folder), *QUIET], plugins=[plugin]))
    if status and not plugin.report.failures:
        plugin.report.faults.append(f"pytest ended with {status}")


def run(kind: type[Redirected], options: Options, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        offline_hub(Path(name) / "huggingface")
        from vllm.plugins import load_general_plugins  # importing vLLM reads the place of the hub's cache

        load_general_plugins()
        run_pytest(kind(options, report), options, Path(name))


def dense(options: Options, report: Report) -> None:
    run(Dense, options, report)


def sparse(options: Options, report: Report) -> None:
    from etap_backend.vllm.sparse import ETAPSparseImpl

    with report.counting(ETAPSparseImpl, "forward_mqa"):
        run(Sparse, options, report)

"""Runs vLLM's own tests of MLA backends with ETAP in their list of backends.

    python -m etap_backend.lab.checks.vllm_upstream CHECKOUT [--only-etap] [--kv-cache-dtype fp8] [--config FOLDER]
        [-- pytest options]

CHECKOUT is vLLM's repository, or its source distribution, at the version that is installed; nothing of it is copied
into this project. The tests are copied to a temporary folder, because beside CHECKOUT's own `vllm` folder they would
import that instead of the installed one. They read the configuration of deepseek-ai/DeepSeek-R1 from the Hugging Face
hub; without a network, FOLDER is one with its config.json.

With --kv-cache-dtype fp8 the cases with an FP8 cache run, written by vLLM's own operator with scales of 1 and of 3.

The tests decide by themselves which backends a case takes. ETAP is appended to their lists when they are collected, and
at the end the cases that ran it are counted: a passed case without it, or a batch specification without a passed case,
is a failure.
"""

import collections
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer

MODEL = "deepseek-ai/DeepSeek-R1"
TESTS = Path("tests/v1/attention/test_mla_backends.py")
CORRECTNESS = "test_backend_correctness"


class WithEtap:
    """Pytest plugin: puts ETAP into the lists of the collected modules, and counts where it ran."""

    def __init__(self, only_etap: bool):
        self.only_etap = only_etap
        self.runs: collections.Counter[str] = collections.Counter()
        self.passed: set[str] = set()
        self.batch_specs: list[str] = []
        self.current = ""

    def pytest_collection_finish(self, session) -> None:
        """After the tests are imported, before any of them runs."""
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
        (module.BACKEND_BLOCK_SIZES[etap],) = etap.get_class().get_supported_kernel_block_sizes()
        self.batch_specs = list(module.BATCH_SPECS)
        run = module.run_attention_backend

        def counted(backend, *args, **kwargs):
            output = run(backend, *args, **kwargs)
            self.runs[self.current] += backend is etap
            return output

        module.run_attention_backend = counted

    def pytest_runtest_setup(self, item) -> None:
        self.current = item.nodeid

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed and CORRECTNESS in report.nodeid:
            self.passed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if not self.passed:
            return
        ran = [test for test in self.passed if self.runs[test]]
        terminalreporter.write_line(f"ETAP ran and passed in {len(ran)} of {len(self.passed)} passed cases")
        for spec in self.batch_specs:
            terminalreporter.write_line(f"  {spec}: {sum(spec in test for test in ran)}")

    def nothing_ran(self) -> str | None:
        """Why the run proves nothing, or None."""
        if not self.passed:
            return "no case of the correctness tests passed"
        if without := [test for test in self.passed if not self.runs[test]]:
            return f"{len(without)} passed cases did not run ETAP, {without[0]} for one; narrow them with -k"
        if unseen := [spec for spec in self.batch_specs if not any(spec in test for test in self.passed)]:
            return f"no passed case for the batches {', '.join(unseen)}"
        return None


def offline_hub(folder: Path, config: Path) -> None:
    """A Hugging Face cache in which the model has its configuration and nothing else."""
    snapshot = "0" * 40
    model = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(snapshot)
    (model / "snapshots" / snapshot).mkdir(parents=True)
    shutil.copy(config / "config.json", model / "snapshots" / snapshot)
    os.environ |= {"HF_HOME": str(folder), "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}


def check_config(config: Path) -> None:
    found = json.loads((config / "config.json").read_text())
    wanted = {"model_type": "deepseek_v3", "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for name, value in wanted.items():
        if found.get(name) != value:
            sys.exit(f"{config}/config.json: wanted {name} {value} as in {MODEL}, got {found.get(name)}")


def main(
    checkout: Annotated[Path, typer.Argument(help="vLLM's repository at the installed version.")],
    pytest_options: Annotated[list[str] | None, typer.Argument(help="For pytest, after --.")] = None,
    only_etap: Annotated[bool, typer.Option("--only-etap", help="Take the other backends out of the lists.")] = False,
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="Cases to run.")] = "auto",
    config: Annotated[Path | None, typer.Option(help=f"Folder with config.json of {MODEL}; else the network.")] = None,
) -> None:
    """Run vLLM's own MLA tests with ETAP; exit with pytest's status, or 1 when they prove nothing."""
    options = pytest_options or []
    if not (checkout / TESTS).exists():
        raise typer.BadParameter(f"checkout: wanted vLLM's repository with {TESTS}, got {checkout}")
    if "etap" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        sys.exit("etap-backend is not installed beside vLLM: no plugin named etap")
    plugin = WithEtap(only_etap)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if config:
            check_config(config)
            offline_hub(folder / "huggingface", config)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / "tests", folder / "tests", ignore=ignored)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        selection = [] if "-k" in options else ["-k", f"{CORRECTNESS} and {kv_cache_dtype}"]
        usual = ["--rootdir", str(folder), "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
        outcome = pytest.main([str(TESTS), *selection, *usual, *options], plugins=[plugin])
    if outcome == 0 and "--collect-only" not in options and (reason := plugin.nothing_ran()):
        sys.exit(f"vLLM {importlib.metadata.version('vllm')}: {reason}")
    sys.exit(int(outcome))


if __name__ == "__main__":
    typer.run(main)

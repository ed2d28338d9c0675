"""FlashInfer's own tests of its paged MLA wrapper, on ETAP in the place of its backend fa3.

    python -m pytest tests/qualify/flashinfer_mla.py --checkout FLASHINFER [--output FILE] [--part 1/4]

Run are the cases for fa3, and those that name no backend, of the tests of batches and of FP8 caches, with their data,
references and limits; what is left out, and why, is in the results. The tests need FlashInfer 0.6 or 0.7, whose kernels
are not called, and a Hopper GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from etap_backend.compat import flashinfer
from bench.qualify.theirs import Case, Suite

SCRIPT = Path("tests/attention/test_deepseek_mla.py")
BACKEND = "fa3"
PREFIXES = ("test_batch_mla_", "test_fp8_kv_")
LEFT_OUT = {
    "test_batch_mla_without_kpe": "models without rope are refused",
    "test_batch_mla_fp8_nope_group_scales_matches_bf16_reference": "scales of groups are refused",
    "test_fp8_kv_plan_rejects_fp16_q": "float16 queries with an FP8 cache are served",
    "test_fp8_kv_requires_scales": "it is about the words of a refusal",
    "test_fp8_kv_scales_are_keyword_only": "it is about the signature of FlashInfer's class",
}
WANTED = (
    "test_batch_mla_page_attention",
    "test_batch_mla_varlen_page_attention",
    "test_batch_mla_oob_kv_nan",
    "test_batch_mla_fp8_kv_matches_bf16_reference",
)
"""Without these the file is another one."""
SUITE = Suite(
    "FlashInfer", SCRIPT, "FlashInfer's tests of paged MLA attention on ETAP", ("flashinfer-python",), LEFT_OUT
)


def load(checkout: Path) -> types.ModuleType:
    """Their tests as a module, with ETAP as FlashInfer's fa3."""
    flashinfer.install(backends=(BACKEND,))
    # The file imports helpers from `tests`; the repository itself must not come onto the path, before the installation.
    package = types.ModuleType("tests")
    package.__path__ = [str(checkout / "tests")]
    sys.modules["tests"] = package
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, checkout / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(options) -> list[Case]:
    """What pytest would run of these tests, for one backend."""
    tests = vars(load(options.checkout))
    named = {name: one for name, one in tests.items() if name.startswith(PREFIXES) and name not in LEFT_OUT}
    if missing := [name for name in WANTED if name not in named]:
        said = f"wanted {SCRIPT} with {', '.join(WANTED)}, got one without {missing[0]}"
        raise pytest.UsageError(f"--checkout: {said}")
    return [
        Case(name, f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})", partial(test, **given))
        for name, test in named.items()
        for given in _arguments(test)
        if given.get("backend", BACKEND) == BACKEND
    ]


def _arguments(test: Callable) -> list[dict[str, Any]]:
    """All combinations of a test's parameters."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            axes.append([dict(zip(names, one if len(names) > 1 else [one], strict=True)) for one in values])
    return [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*axes)]


def test_theirs(case):
    case.run()

"""FlashMLA's own tests of its dense decode kernel, on ETAP.

    python -m pytest tests/qualify/flashmla_dense.py --checkout FLASHMLA [--dtype fp16] [--output FILE] [--part 1/4]

All cases of its script run, with its data, reference and limits; those that time a kernel are checked like the others,
and not timed. The tests need triton, which they import, and a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

from etap_backend.compat import flash_mla
from bench.qualify.theirs import DTYPES, Case, Suite, run_script

SUITE = Suite("FlashMLA", Path("tests/test_flash_mla_dense_decoding.py"), "FlashMLA's tests of dense decoding on ETAP")


def stand_in(call: Callable) -> types.ModuleType:
    """The module that FlashMLA's tests import, with this call."""
    module = types.ModuleType(flash_mla.MODULES[0])
    module.flash_mla_with_kvcache = call
    module.get_mla_metadata = flash_mla.get_mla_metadata
    return module


def load(checkout: Path, script: Path, call: Callable) -> types.ModuleType:
    """FlashMLA's script as a module, with `call` as its own."""
    run_script(checkout, script, {flash_mla.MODULES[0]: stand_in(call)})
    return importlib.import_module(script.stem)


def cases(options) -> list[Case]:
    """The cases that their script would run, none of them timed; torch's default type and device become theirs."""
    tests = load(options.checkout, SUITE.script, flash_mla.flash_mla_with_kvcache)
    found: list = []
    judge, tests.test_flash_mla = tests.test_flash_mla, found.append
    tests.main(DTYPES[options.dtype])
    untimed = [dataclasses.replace(case, test_performance=False) for case in found]
    masks = {True: "causal", False: "not causal"}
    return [Case(f"h_kv {case.h_kv}, {masks[case.is_causal]}", repr(case), partial(judge, case)) for case in untimed]


def test_theirs(case):
    case.run()

"""FlashMLA's own tests of its decode kernels, on etap_backend.compat.flash_mla: the suites `flashmla-*`.

All cases of FlashMLA's scripts run, in bfloat16 and float16 where the script takes both. Cases that time a kernel are
only checked. The sparse cases of 64 heads run once more with 8, 16 and 32.
"""

from __future__ import annotations

import dataclasses
import types
from functools import partial

import torch

from bench.qualify.suites import Case, Options, Report, load_script
from etap_backend.compat import flash_mla

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COPIED_HEADS, MORE_HEADS = 64, (8, 16, 32)


def load(options: Options, report: Report) -> types.ModuleType:
    """FlashMLA's script, with ETAP as its module flash_mla."""
    module = types.ModuleType("flash_mla")
    module.flash_mla_with_kvcache = report.counted(flash_mla.flash_mla_with_kvcache)
    module.get_mla_metadata = flash_mla.get_mla_metadata
    return load_script(options, {module.__name__: module})


def dense(options: Options, report: Report) -> None:
    tests = load(options, report)
    judge, cases = tests.test_flash_mla, []

    def run(case, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)  # the script's main does, for the data
        judge(case)

    for name, dtype in DTYPES.items():
        collected: list = []
        tests.test_flash_mla = collected.append
        tests.main(dtype)
        for case in collected:
            case = dataclasses.replace(case, test_performance=False)
            kind = f"{name}, h_kv {case.h_kv}, {'causal' if case.is_causal else 'not causal'}"
            cases.append(Case(kind, f"{name} {case!r}", partial(run, case, dtype)))
    report.run(cases, options)


def sparse(width: int, options: Options, report: Report) -> None:
    """The cases whose queries have `width` columns, and copies of them with fewer heads."""
    tests = load(options, report)
    raw = [dataclasses.replace(case, num_runs=0, check_correctness=True) for case in tests.gen_testcase()]
    raw = [case for case in raw if case.d_qk == width]
    raw += [dataclasses.replace(case, h_q=n) for n in MORE_HEADS for case in raw if case.h_q == COPIED_HEADS]
    collected: list = []
    judge, passes = (
        tests.test_flash_mla,
        tests.Result(*(f.name == "is_correct" for f in dataclasses.fields(tests.Result))),
    )
    tests.gen_testcase = lambda: raw
    tests.test_flash_mla = lambda case: collected.append(case) or passes
    tests.main()  # which sets torch's default dtype and device

    def run(case) -> None:
        assert judge(case).is_correct

    cases = [Case(f"{case.h_q} heads", repr(case), partial(run, case)) for case in collected]
    report.run(cases, options)


v32 = partial(sparse, 576)
v4 = partial(sparse, 512)

"""FlashMLA's own tests of its sparse decode kernel, on the sparse call.

    python -m pytest tests/qualify/flashmla_sparse.py --checkout FLASHMLA [--query-heads 16 ...] [--beside MODULE]

Run are the cases of one format, by default V3.2's rows of 656 bytes (queries of 576 columns): those with 64 and 128
heads as they are, and those of 64 once more with 8, 16 and 32. `--format MODEL1` takes DeepSeek-V4's, of 512 columns.
Cases that time a kernel are checked like the others, and not timed.

With `--beside flash_mla.flash_mla_interface` (or `vllm.third_party.flashmla.flash_mla_interface`), FlashMLA's own
kernel runs on the same tensors where it takes them, and both are held against float64: the relative RMSE of ours may be
1.05 times as large, over all cases of a number of heads. The tests need triton, which they import, and a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from etap_backend.compat import flash_mla
from etap_backend.reference import sparse_mla_decode_reference
from bench.qualify.flashmla_dense import load
from bench.qualify.theirs import Case, Errors, Suite

SCRIPT = Path("tests/test_flash_mla_sparse_decoding.py")
SUITE = Suite("FlashMLA", SCRIPT, "FlashMLA's tests of sparse decoding on the sparse call")
FORMATS = {"V3.2": 576, "MODEL1": 512}
"""Columns of a query, by the name that FlashMLA has for a format of the cache."""
THEIR_HEADS = (64, 128)
ALL_HEADS = (8, 16, 32, *THEIR_HEADS)
MOST_BESIDE_TOKENS = 300  # of a call that is held against float64


@dataclasses.dataclass
class Beside:
    """Another `flash_mla_with_kvcache` on the same tensors; ours is what the tests see."""

    module: types.ModuleType
    errors: Errors

    def __call__(self, q, k_cache, block_table, seq_lens, width, metadata, splits, softmax_scale, *rest, **named):
        call = (q, k_cache, None, None, width, metadata, None, softmax_scale)
        ours = flash_mla.flash_mla_with_kvcache(*call, *rest, **named)
        heads, tokens = q.shape[2], q.shape[0] * q.shape[1]
        if heads not in THEIR_HEADS or tokens > MOST_BESIDE_TOKENS:
            return ours
        call = (q, k_cache, None, None, width, self.module.get_mla_metadata()[0], None, softmax_scale)
        theirs = self.module.flash_mla_with_kvcache(*call, *rest, **named)
        truth = truth_of(**inspect.signature(flash_mla.flash_mla_with_kvcache).bind(*call, *rest, **named).arguments)
        self.errors.add(str(heads), ours[0].flatten(0, 1), theirs[0].flatten(0, 1), truth)
        return ours


def truth_of(q, k_cache, indices, softmax_scale, attn_sink=None, **more) -> torch.Tensor:
    """Float64 [b * s_q, h_q, 512] of a sparse call's arguments."""

    def of_tokens(lengths):
        return None if lengths is None else lengths[:, None].expand(q.shape[:2]).flatten()

    extra_indices = more.get("extra_indices_in_kvcache")
    out, _ = sparse_mla_decode_reference(
        q.flatten(0, 1),
        k_cache,
        indices.flatten(0, 1),
        softmax_scale,
        valid_counts=of_tokens(more.get("topk_length")),
        extra_kv_cache=more.get("extra_k_cache"),
        extra_indices=None if extra_indices is None else extra_indices.flatten(0, 1),
        extra_valid_counts=of_tokens(more.get("extra_topk_length")),
        sinks=attn_sink,
    )
    return out


def chosen(their_cases: list, columns: int, heads: tuple[int, ...]) -> list:
    """Their cases of a format, none of them timed, with these numbers of heads."""
    ours = [
        dataclasses.replace(case, num_runs=0, check_correctness=True) for case in their_cases if case.d_qk == columns
    ]
    more = [n for n in heads if n not in THEIR_HEADS]
    copies = [dataclasses.replace(case, h_q=n) for n in more for case in ours if case.h_q == min(THEIR_HEADS)]
    return [case for case in ours if case.h_q in heads] + copies


def cases(options) -> list[Case]:
    """What their script's `main` makes of the chosen cases, after it has set torch's default type and device."""
    if options.format not in FORMATS:
        raise pytest.UsageError(f"--format: wanted one of {', '.join(FORMATS)}, got {options.format}")
    call = flash_mla.flash_mla_with_kvcache
    if options.beside:
        call = Beside(importlib.import_module(options.beside), SUITE.errors)
    tests = load(options.checkout, SUITE.script, call)
    their_cases = chosen(tests.gen_testcase(), FORMATS[options.format], tuple(options.query_heads or ALL_HEADS))
    passes = tests.Result(*(field.name == "is_correct" for field in dataclasses.fields(tests.Result)))
    found: list = []
    judge = tests.test_flash_mla
    tests.gen_testcase = lambda: their_cases
    tests.test_flash_mla = lambda case: found.append(case) or passes
    tests.main()
    return [Case(f"{options.format}, {case.h_q} heads", repr(case), partial(right, judge, case)) for case in found]


def right(judge, case) -> None:
    assert judge(case).is_correct


def test_theirs(case):
    case.run()


def test_our_errors_are_no_larger():
    SUITE.must_be_no_worse()

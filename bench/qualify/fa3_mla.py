"""FlashAttention-3's own test of its KV cache, on ETAP, in the sizes of MLA.

    python -m pytest tests/qualify/fa3_mla.py --checkout FLASHATTENTION [--dtype fp16] [--part 1/4] [--beside MODULE]

Of FlashAttention's repository `hopper/test_flash_attn.py` and the two files beside it that it imports are used. Its
`test_flash_attn_kvcache` runs with its data, reference and limits, for all its lengths, page sizes, ragged queries,
batch indices and masks, each with three numbers of splits and with metadata made beforehand. Its list of head sizes
leaves MLA's out; 64 stands in its place, and 512 for values. What ETAP does not serve is left out: several KV heads,
padding on the left, windows, rotary and keys to append.

With `--beside vllm.vllm_flash_attn` that module's FlashAttention-3 runs on the same tensors, and both are held against
float64: the relative RMSE of ours may be 1.05 times as large, over all cases of a kind. Needs einops and a Hopper GPU.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from etap_backend.compat import flash_attn_interface as fa3
from etap_backend.limits import LATENT_DIM, ROPE_DIM
from bench.qualify.theirs import DTYPES, Case, Errors, Suite, run_script

SUITE = Suite(
    "FlashAttention",
    Path("hopper/test_flash_attn.py"),
    "FlashAttention-3's test of its KV cache on ETAP, 64 + 512 columns, one KV head",
)
NOT_SERVED = ("APPENDKV", "BACKWARD", "FP8", "LOCAL")
"""What their script leaves out of its lists when told to by a variable of the environment."""


class Beside:
    """Our call as theirs, counted; and beside it another one on the same tensors, if there is one."""

    def __init__(self, other: types.ModuleType | None, errors: Errors):
        """`other` has vLLM's `flash_attn_varlen_func`."""
        self._other, self._errors, self.calls = other, errors, 0

    def __call__(self, q, k_cache, v_cache, *rest, **named):
        self.calls += 1
        results = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, *rest, **named)
        if self._other and named["num_splits"] == 0 and named["scheduler_metadata"] is None:
            call = varlen_call(q, k_cache, v_cache, named)
            kind = "causal" if named["causal"] else "not causal"
            kind += ", ragged" if named["cu_seqlens_q"] is not None else ""
            theirs = self._other.flash_attn_varlen_func(**call)
            self._errors.add(kind, results[0].flatten(0, -3), theirs, truth_of(call))
        return results


def varlen_call(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, named: dict) -> dict:
    """A call of the test in vLLM's form: equal lengths are ragged ones, a cache without pages has one a request."""
    starts, table, rows = (named[name] for name in ("cu_seqlens_q", "page_table", "cache_batch_idx"))
    longest, qv = named["max_seqlen_q"], named["qv"]
    if starts is None:
        batch, longest = q.shape[:2]
        starts = torch.arange(0, (batch + 1) * longest, longest, dtype=torch.int32, device=q.device)
        q, qv = q.flatten(0, 1), qv.flatten(0, 1)
    if table is None:
        table = torch.arange(len(k_cache), dtype=torch.int32, device=q.device)[:, None]
    return {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "q_v": qv,
        "max_seqlen_q": longest,
        "cu_seqlens_q": starts,
        "max_seqlen_k": table.shape[1] * k_cache.shape[1],
        "seqused_k": named["cache_seqlens"],
        "block_table": table if rows is None else table[rows].contiguous(),
        "softmax_scale": (ROPE_DIM + LATENT_DIM) ** -0.5,
        "causal": named["causal"],
        "fa_version": 3,
    }


def truth_of(call: dict) -> torch.Tensor:
    """float64 [total_q, h, 512] of a call in vLLM's form."""
    queries = torch.cat([call["q_v"], call["q"]], dim=-1).double()
    starts, lengths = call["cu_seqlens_q"].tolist(), call["seqused_k"].tolist()
    outs = []
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        pages = call["block_table"][i].long()
        keys = torch.cat([call[name][pages].flatten(0, 2)[: lengths[i]] for name in ("v", "k")], dim=-1).double()
        scores = torch.einsum("qhd,kd->hqk", queries[first:last], keys) * call["softmax_scale"]
        if call["causal"]:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(len(keys) - last + first)
            scores.masked_fill_(~seen, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0)
        outs.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :LATENT_DIM]))
    return torch.cat(outs)


def load(checkout: Path, call: Callable) -> Any:
    """Their script as a module, with `call` as FlashAttention's, and values of 512 columns only."""
    os.environ |= {f"FLASH_ATTENTION_DISABLE_{what}": "TRUE" for what in NOT_SERVED}
    module = types.ModuleType(fa3.NAME)
    module.flash_attn_with_kvcache, module.get_scheduler_metadata = call, fa3.get_scheduler_metadata
    for name in "flash_attn_func", "flash_attn_varlen_func", "flash_attn_combine":  # of tests that do not run
        setattr(module, name, None)
    run_script(checkout, SUITE.script, {fa3.NAME: module})
    tests = importlib.import_module(SUITE.script.stem)
    tests.itertools = types.SimpleNamespace(product=product_with_our_values)
    # ETAP hands prompts over where it finds a FlashAttention-3; it would take its stand-in for one.
    sys.modules.update(dict.fromkeys(fa3.WITH_KVCACHE.modules))
    return tests


def product_with_our_values(*lists: list) -> list[tuple]:
    """Their `itertools.product`; of the widths of values, which are first in one, MLA's alone."""
    return [one for one in itertools.product(*lists) if LATENT_DIM not in lists[0] or one[0] == LATENT_DIM]


def arguments_of(test: Callable, dtype: torch.dtype) -> Iterator[dict]:
    """Arguments of the test as its own lists have them, with MLA's size and what is served."""
    ours = {"d": [ROPE_DIM], "mha_type": ["mqa"], "has_leftpad": [False], "dtype": [dtype]}
    lists = []
    for mark in test.pytestmark:
        names, values = mark.args
        together = names.split(",")
        values = ours.get(names, values)
        lists.append([dict(zip(together, value if len(together) > 1 else [value], strict=True)) for value in values])
    for parts in itertools.product(*lists):
        case = {name: value for part in parts for name, value in part.items()}
        if case["page_size"] is None or case["seqlen_k"] % case["page_size"] == 0:  # as the test itself skips
            yield case


def run(test: Callable, call: Beside, arguments: dict) -> None:
    """A case in which the test makes no call, or skips itself, is no pass."""
    before = call.calls
    try:
        test(**arguments)
    except pytest.skip.Exception as reason:
        pytest.fail(f"Skipped: {reason}")
    assert call.calls > before, "the test made no call"


def cases(options) -> list[Case]:
    """Their cases by page size and mask."""
    call = Beside(importlib.import_module(options.beside) if options.beside else None, SUITE.errors)
    test, found = load(options.checkout, call).test_flash_attn_kvcache, []
    for arguments in arguments_of(test, DTYPES[options.dtype]):
        kind = f"pages of {arguments['page_size']}" if arguments["page_size"] else "no pages"
        kind += ", causal" if arguments["causal"] else ", not causal"
        found.append(Case(kind, repr(arguments), partial(run, test, call, arguments)))
    return found


def test_theirs(case):
    case.run()


def test_our_errors_are_no_larger():
    SUITE.must_be_no_worse()

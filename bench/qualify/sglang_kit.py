"""SGLang's own tests of sparse attention, with ETAP as the backend.

    python -m pytest tests/qualify/sglang_kit.py [--output kit.json] [-k speculative]

Needs a Hopper GPU with nvcc, and SGLang with etap-backend beside it; no model and no checkout. The cases, layers,
references and limits are those of `sglang.test.kits.attention_unittest` in the installed package, which SGLang's own
test of this attention is made of; here they run with --attention-backend etap, with 4 query heads as there and with 16:

- eager: prompts, and decode with every layout of lists and pages that the kit has;
- graph: decode in a CUDA graph that was captured for other requests;
- speculative: verification of drafts, the extension of a draft model's cache, and of a bfloat16 cache SGLang's runner
  of EAGLE's drafts in a CUDA graph.

Each runs with both caches. A case is a failure if the kit says so, if it skips it, or if no call came to ETAP's kernel.
"""

import dataclasses
import types
import unittest
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit
from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import (
    run_dsa_sparse_cuda_graph_decode_case,
)
from sglang.test.kits.attention_unittest.runner_modes.speculative_draft_runner import (
    run_dsa_eagle_draft_cuda_graph_runner_case,
)

from etap_backend.sglang import sparse
from bench.qualify.theirs import Case
from support.sglang_layer import ONE_RANK

pytestmark = pytest.mark.gpu

BACKEND = "etap"
HEADS = (4, 16)
WIDE_TOP_K = 2048
OURS = {"dsa_prefill_backend": BACKEND, "dsa_decode_backend": BACKEND}
OTHER_LISTS = ({"index_pattern": "strided"}, {"index_pattern": "head_tail"}, {"loc_layout": "interleaved_pages"})

Run = Callable[[unittest.TestCase], None]


def kit_case(
    mode: ForwardMode, heads: int, prefixes: tuple[int, ...], new: tuple[int, ...] = ()
) -> kit.DSAAttentionCase:
    """One that SGLang's test adds to those of the kit."""
    name = f"{mode.name.lower()} after {prefixes}"
    shape = {"num_heads": heads, "num_kv_heads": 1, "page_size": kit.DSA_PAGE_SIZE}
    return kit.DSAAttentionCase(
        name=name, backend=BACKEND, forward_mode=mode, prefix_lens=prefixes, extend_lens=new, **shape
    )


def eager_cases(heads: int, fp8: bool) -> Iterator[tuple[str, Run]]:
    """Prompts and decode."""
    run = partial(kit.run_dsa_sparse_attention_case, **OURS, fp8_kv_cache=fp8)
    for given in kit.make_dsa_sparse_cases(BACKEND):
        yield given.name, lambda test, given=given: run(test, dataclasses.replace(given, num_heads=heads))
    for options in OTHER_LISTS:
        (what,) = options.values()
        long = kit_case(ForwardMode.DECODE, heads, (2048,))
        yield f"{long.name}, {what}", lambda test, long=long, options=options: run(test, long, **options)
    for wide in (kit_case(ForwardMode.DECODE, heads, (4096,)), kit_case(ForwardMode.EXTEND, heads, (4096,), (1,))):
        yield f"{wide.name}, top-k {WIDE_TOP_K}", lambda test, wide=wide: run(test, wide, index_topk=WIDE_TOP_K)


def graph_cases(heads: int, fp8: bool) -> Iterator[tuple[str, Run]]:
    run = partial(run_dsa_sparse_cuda_graph_decode_case, dsa_decode_backend=BACKEND, fp8_kv_cache=fp8)
    for prefixes in ((127, 128), (128,), (64, 128, 192)):
        one = kit_case(ForwardMode.DECODE, heads, prefixes)
        yield one.name, lambda test, one=one: run(test, one)


def speculative_cases(heads: int, fp8: bool) -> Iterator[tuple[str, Run]]:
    run = partial(kit.run_dsa_sparse_attention_case, **OURS, fp8_kv_cache=fp8)
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        for prefixes, new in (((128,), (3,)), ((64, 128, 300), (3, 3, 3))):
            one = kit_case(mode, heads, prefixes, new)
            yield one.name, lambda test, one=one: run(test, one)
    if not fp8:  # the kit's runner of drafts knows no other cache
        one = kit_case(ForwardMode.DECODE, heads, (128, 192))
        yield "EAGLE's drafts in a graph", lambda test: run_dsa_eagle_draft_cuda_graph_runner_case(test, one)


GROUPS = {"eager": eager_cases, "graph": graph_cases, "speculative": speculative_cases}


def cases(options) -> list[Case]:
    return [
        Case(f"{group}, {cache}", f"{group}, {cache}, {heads} heads, {name}", run)
        for group, cases_of in GROUPS.items()
        for cache in ("bfloat16", "fp8_e4m3")
        for heads in HEADS
        for name, run in cases_of(heads, cache == "fp8_e4m3")
    ]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """ETAP as SGLang's plugin, in a process without peers."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), get_parallel().override(**ONE_RANK):
        patch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")  # top-k's plan is the indexer's, which the kit leaves out
        load_plugins()
        yield


def must_call_us(case: Case, backend: types.ModuleType, monkeypatch) -> None:
    """Run a case. It fails where the kit skips it, or where no call came to the kernel of this module of ETAP's."""
    calls, kernel = [], backend.sparse_mla_decode
    monkeypatch.setattr(backend, "sparse_mla_decode", lambda *args, **named: calls.append(1) or kernel(*args, **named))
    try:
        case.run(unittest.TestCase())
    except unittest.SkipTest as reason:
        pytest.fail(f"the kit skips it: {reason}")
    assert calls, "no call came to ETAP's kernel"


def test_theirs(case, monkeypatch):
    must_call_us(case, sparse, monkeypatch)

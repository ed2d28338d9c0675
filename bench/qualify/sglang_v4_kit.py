"""SGLang's own tests of DeepSeek-V4's attention, with ETAP as the backend.

    python -m pytest tests/qualify/sglang_v4_kit.py [--output kit-v4.json] [-k speculative]

Needs a Hopper GPU with nvcc, and SGLang with etap-backend beside it; no model and no checkout. The cases, layers,
references and limits are those of `sglang.test.kits.attention_unittest` in the installed package, which SGLang's own
test of this attention is made of; here they run as with --attention-backend etap, with the 64 query heads of that test
and with the 8 of a rank:

- eager: prompts and decode, of layers with a window alone and of those that compress 4 or 128 tokens; prompts of these
  over the caches' pages and over gathered rows;
- graph: decode in a CUDA graph that was captured for other requests;
- speculative: verification of drafts, eagerly and in a graph, the extension of a draft model's cache, and SGLang's
  runner of EAGLE's drafts in a CUDA graph.

The kit leaves compressor and indexer out. A case is a failure if the kit says so, if it skips it, or if no call came to
ETAP's kernel.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit
from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import run_dsv4_cuda_graph_decode_case
from sglang.test.kits.attention_unittest.runner_modes.speculative_draft_runner import (
    run_dsv4_eagle_draft_cuda_graph_runner_case,
)
from sglang.test.kits.attention_unittest.runner_modes.speculative_target_verify_runner import (
    run_dsv4_eagle_verify_cuda_graph_case,
)

from etap_backend.sglang import v4, versions
from bench.qualify.sglang_kit import Run, must_call_us
from bench.qualify.theirs import Case
from support.sglang_layer import ONE_RANK

pytestmark = pytest.mark.gpu

HEADS = (8, 64)
RATIOS = (0, 4, 128)
DRAFTS = (3, 3)


def kit_case(
    mode: ForwardMode, heads: int, ratio: int, prefixes: tuple[int, ...], new: tuple[int, ...] = ()
) -> kit.DSV4AttentionCase:
    """One that SGLang's test adds to those of the kit."""
    name = f"{mode.name.lower()} after {prefixes}, ratio {ratio}"
    return kit.DSV4AttentionCase(
        name, versions.V4_NAME, mode, heads, kit.DSV4_PAGE_SIZE, prefixes, new, compress_ratio=ratio
    )


def case_of(run, case, what: str = "", **options) -> tuple[str, Run]:
    return f"{case.name}{what}", lambda test: run(test, case, **options)


def eager_cases(heads: int) -> Iterator[tuple[str, Run]]:
    """Prompts and decode."""
    for given in kit.make_dsv4_cases(versions.V4_NAME):
        yield case_of(kit.run_dsv4_attention_case, dataclasses.replace(given, num_heads=heads))
    for ratio, prefix in ((4, 64), (128, 128)):
        decode = kit_case(ForwardMode.DECODE, heads, ratio, (prefix,))
        prompt = kit_case(ForwardMode.EXTEND, heads, ratio, (prefix,), (16,))
        yield case_of(kit.run_dsv4_compress_attention_case, decode)
        for gathered in (False, True):
            what = ", gathered rows" if gathered else ", pages"
            yield case_of(kit.run_dsv4_compress_attention_case, prompt, what, sparse_prefill=gathered)


def graph_cases(heads: int) -> Iterator[tuple[str, Run]]:
    for ratio, prefixes in ((0, (64,)), (0, (32, 96)), (4, (64,)), (128, (128,))):
        one = kit_case(ForwardMode.DECODE, heads, ratio, prefixes)
        yield case_of(run_dsv4_cuda_graph_decode_case, one)


def speculative_cases(heads: int) -> Iterator[tuple[str, Run]]:
    in_graph = partial(run_dsv4_eagle_verify_cuda_graph_case, force_gpu_only_seq_lens=True)
    for ratio in RATIOS:
        one = kit_case(ForwardMode.TARGET_VERIFY, heads, ratio, (128, 160) if ratio == 128 else (64, 96), DRAFTS)
        yield case_of(kit.run_dsv4_target_verify_attention_case, one)
        yield case_of(in_graph, one, ", in a graph")
    extended = kit_case(ForwardMode.DRAFT_EXTEND_V2, heads, 0, (64, 96), (4, 4))
    for on_gpu_alone in (False, True):
        what = ", lengths on the GPU alone" if on_gpu_alone else ""
        options = {"force_gpu_only_seq_lens": on_gpu_alone}
        yield case_of(kit.run_dsv4_draft_extend_attention_case, extended, what, **options)
    drafts = kit_case(ForwardMode.DECODE, heads, 0, (32, 64))
    yield case_of(run_dsv4_eagle_draft_cuda_graph_runner_case, drafts, ", EAGLE's", force_gpu_only_seq_lens=True)


GROUPS = {"eager": eager_cases, "graph": graph_cases, "speculative": speculative_cases}


def cases(options) -> list[Case]:
    return [
        Case(group, f"{group}, {heads} heads, {name}", run)
        for group, cases_of in GROUPS.items()
        for heads in HEADS
        for name, run in cases_of(heads)
    ]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """ETAP as SGLang's plugin that was asked for, in a process without peers."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), get_parallel().override(**ONE_RANK):
        load_plugins()
        patch.setattr(versions, "v4_is_ours", lambda: True)
        yield


def test_theirs(case, monkeypatch):
    must_call_us(case, v4, monkeypatch)

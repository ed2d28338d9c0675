"""SGLang's own test kits of sparse and of DeepSeek-V4's attention, with ETAP as the backend: the suites `sglang-*`.

The cases, layers, references and limits are those of `sglang.test.kits.attention_unittest` in the installed package,
from which SGLang makes its own tests of this attention. They cover prompts and decode, decode in a CUDA graph that was
captured for other requests, and drafts: verification, the extension of a draft model's cache, EAGLE's drafts in a CUDA
graph. The kits leave out indexer and compressor. A case that the kit skips fails.

`sglang-layer` is not SGLang's: it runs a layer of DeepSeek-V3.2's attention on SGLang's pools, with random lists and
NaN in every row that no list names, and compares it with float64.
"""

from __future__ import annotations

import dataclasses
import unittest
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention, dsv4_attention
from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs
from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as drafts
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verification

from bench.qualify.suites import Case, Options, Report
from etap_backend.sglang import sparse as dsa_backend
from etap_backend.sglang import v4 as v4_backend
from etap_backend.sglang import versions
from support.sglang_layer import DRAFTS, ONE_RANK, STEPS, TOP_K, Problem, make_runner

DSA_HEADS, V4_HEADS = (4, 16), (8, 64)  # as in SGLang's own tests, and as on a rank
DSA_BACKENDS = {"dsa_prefill_backend": "etap", "dsa_decode_backend": "etap"}
DSA_LISTS = ({"index_pattern": "strided"}, {"index_pattern": "head_tail"}, {"loc_layout": "interleaved_pages"})
WIDE = {"index_topk": 2048}
ENVIRONMENT = {
    "SGLANG_OPT_USE_TOPK_V2": "0",  # its plan is the indexer's, which no case has
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": str(TOP_K),  # longer prompts are sparse
}
DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
DRAFT_EXTEND = ForwardMode.DRAFT_EXTEND_V2


def case_of(kind: str, run, case, **options) -> Case:
    def call() -> None:
        try:
            run(unittest.TestCase(), case, **options)
        except unittest.SkipTest as reason:
            raise AssertionError(f"the kit skips it: {reason}") from reason

    named = ", ".join(f"{name}={value}" for name, value in options.items() if name not in DSA_BACKENDS)
    return Case(kind, f"{kind}, {case.num_heads} heads, {case.name}, {named}", call)


def dsa_case(mode: ForwardMode, heads: int, prefixes: tuple[int, ...], new: tuple[int, ...] = ()):
    return dsa_attention.DSAAttentionCase(
        name=f"{mode.name.lower()} after {prefixes}",
        backend="etap",
        forward_mode=mode,
        num_heads=heads,
        num_kv_heads=1,
        page_size=dsa_attention.DSA_PAGE_SIZE,
        prefix_lens=prefixes,
        extend_lens=new,
    )


def dsa_cases(heads: int, fp8: bool) -> Iterator[Case]:
    cache = "fp8_e4m3" if fp8 else "bfloat16"
    eager = partial(case_of, run=dsa_attention.run_dsa_sparse_attention_case, fp8_kv_cache=fp8, **DSA_BACKENDS)
    for given in dsa_attention.make_dsa_sparse_cases("etap"):
        yield eager(f"eager, {cache}", case=dataclasses.replace(given, num_heads=heads))
    for options in DSA_LISTS:
        yield eager(f"eager, {cache}", case=dsa_case(DECODE, heads, (2048,)), **options)
    for wide in (dsa_case(DECODE, heads, (4096,)), dsa_case(EXTEND, heads, (4096,), (1,))):
        yield eager(f"eager, {cache}", case=wide, **WIDE)
    for prefixes in ((127, 128), (128,), (64, 128, 192)):
        run, case = graphs.run_dsa_sparse_cuda_graph_decode_case, dsa_case(DECODE, heads, prefixes)
        yield case_of(f"graph, {cache}", run, case, dsa_decode_backend="etap", fp8_kv_cache=fp8)
    for mode in (VERIFY, DRAFT_EXTEND):
        for prefixes, new in (((128,), (3,)), ((64, 128, 300), (3, 3, 3))):
            yield eager(f"speculative, {cache}", case=dsa_case(mode, heads, prefixes, new))
    if not fp8:  # the only cache that the kit's runner of drafts has
        run = drafts.run_dsa_eagle_draft_cuda_graph_runner_case
        yield case_of(f"speculative, {cache}", run, dsa_case(DECODE, heads, (128, 192)))


def v4_case(mode: ForwardMode, heads: int, ratio: int, prefixes: tuple[int, ...], new: tuple[int, ...] = ()):
    name = f"{mode.name.lower()} after {prefixes}, ratio {ratio}"
    page = dsv4_attention.DSV4_PAGE_SIZE
    shape = (name, versions.V4_NAME, mode, heads, page, prefixes, new)
    return dsv4_attention.DSV4AttentionCase(*shape, compress_ratio=ratio)


def v4_cases(heads: int) -> Iterator[Case]:
    make, kit = partial(v4_case, heads=heads), dsv4_attention
    for given in kit.make_dsv4_cases(versions.V4_NAME):
        yield case_of("eager", kit.run_dsv4_attention_case, dataclasses.replace(given, num_heads=heads))
    for ratio, prefix in ((4, 64), (128, 128)):
        run = kit.run_dsv4_compress_attention_case
        yield case_of("eager", run, make(DECODE, ratio=ratio, prefixes=(prefix,)))
        for gathered in (False, True):
            prompt = make(EXTEND, ratio=ratio, prefixes=(prefix,), new=(16,))
            yield case_of("eager", run, prompt, sparse_prefill=gathered)
    for ratio, prefixes in ((0, (64,)), (0, (32, 96)), (4, (64,)), (128, (128,))):
        yield case_of("graph", graphs.run_dsv4_cuda_graph_decode_case, make(DECODE, ratio=ratio, prefixes=prefixes))
    for ratio in (0, 4, 128):
        one = make(VERIFY, ratio=ratio, prefixes=(128, 160) if ratio == 128 else (64, 96), new=(3, 3))
        yield case_of("speculative", kit.run_dsv4_target_verify_attention_case, one)
        in_graph = verification.run_dsv4_eagle_verify_cuda_graph_case
        yield case_of("speculative in a graph", in_graph, one, force_gpu_only_seq_lens=True)
    for gpu_only in (False, True):
        run, extended = (
            kit.run_dsv4_draft_extend_attention_case,
            make(DRAFT_EXTEND, ratio=0, prefixes=(64, 96), new=(4, 4)),
        )
        yield case_of("speculative", run, extended, force_gpu_only_seq_lens=gpu_only)
    eagle, decode = drafts.run_dsv4_eagle_draft_cuda_graph_runner_case, make(DECODE, ratio=0, prefixes=(32, 64))
    yield case_of("speculative in a graph", eagle, decode, force_gpu_only_seq_lens=True)


def eager_layer(backend, runner, step: str) -> tuple[Problem, torch.Tensor]:
    problem = Problem(runner, *STEPS[step])
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    return problem, problem.attend(backend, batch)


def replayed_layer(backend, runner, step: str) -> tuple[Problem, torch.Tensor]:
    """The step in a CUDA graph that was captured for other lists and lengths."""
    mode, lengths, new = STEPS[step]
    eager_layer(backend, runner, step)  # compiles what SGLang compiles
    backend.init_cuda_graph_state(8, 8 * DRAFTS)
    captured = Problem(runner, mode, [DRAFTS] * len(lengths), new, seed=1)
    batch = captured.batch()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured.attend(backend, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.attend(backend, batch)
    problem = Problem(runner, mode, lengths, new, seed=2)
    captured.take(problem)
    backend.init_forward_metadata_out_graph(problem.batch())
    graph.replay()
    torch.cuda.synchronize()
    return problem, out


def layer_case(heads: int, fp8: bool, step: str, attend) -> Case:
    def call() -> None:
        runner = make_runner(heads, STEPS[step][0], fp8_kv_cache=fp8, device="cuda")
        problem, out = attend(ATTENTION_BACKENDS["etap"](runner), runner, step)
        problem.check(out)

    kind = f"{step}, {attend.__name__}, {'fp8_e4m3' if fp8 else 'bfloat16'}"
    return Case(kind, f"{kind}, {heads} heads", call)


def run(cases: list[Case], backend, options: Options, report: Report) -> None:
    """Run the cases in a process without peers, counting the kernel calls of ETAP's module `backend`."""
    with (
        torch.inference_mode(),
        get_parallel().override(**ONE_RANK),
        mock.patch.dict("os.environ", ENVIRONMENT),
        report.counting(backend, "sparse_mla_decode"),
    ):
        load_plugins()
        report.run(cases, options)


def sparse(options: Options, report: Report) -> None:
    cases = [case for fp8 in (False, True) for heads in DSA_HEADS for case in dsa_cases(heads, fp8)]
    run(cases, dsa_backend, options, report)


def layer(options: Options, report: Report) -> None:
    ways = [(step, way) for step in STEPS for way in (eager_layer, replayed_layer)]
    ways.remove(("prompts", replayed_layer))
    cases = [layer_case(heads, fp8, *way) for heads in (8, 16, 32) for fp8 in (False, True) for way in ways]
    run(cases, dsa_backend, options, report)


def v4(options: Options, report: Report) -> None:
    cases = [case for heads in V4_HEADS for case in v4_cases(heads)]
    with mock.patch.object(versions, "serves_v4", lambda: True):
        run(cases, v4_backend, options, report)

"""Sparse attention in SGLang: our backend beside float64, on SGLang's own pools, lists and batches.

    PYTHONPATH=tests python -m pytest -rA tests/qualify/sglang_sparse.py

Needs a Hopper GPU and SGLang with etap-backend beside it, and no model. One layer of DeepSeek-V3.2's attention runs on
SGLang's pools: decode, verification of drafts, the extension of a draft model's cache and prompts, with both caches,
eagerly and, but for prompts, in a CUDA graph that was captured for another step. The indexer's lists are random. Ours
may be off by twice what torch is in bfloat16. -rA prints the errors, those of SGLang's own kernels beside ours.
"""

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
if not torch.cuda.is_available():
    pytest.skip("SGLang's kernels load on a machine with a GPU", allow_module_level=True)

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from support.sglang_layer import DRAFTS, ONE_RANK, STEPS, TOLERANCE, TOP_K, Problem, make_runner  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """ETAP as SGLang's plugin, in a process without peers."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), get_parallel().override(**ONE_RANK):
        # Top-k's plan is the indexer's, and prompts of more tokens than the lists have entries are sparse.
        patch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")
        patch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", str(TOP_K))
        load_plugins()
        yield


def eager(backend, runner, step: str) -> tuple[Problem, torch.Tensor]:
    problem = Problem(runner, *STEPS[step])
    batch = problem.batch()
    backend.init_forward_metadata(batch)
    return problem, problem.attend(backend, batch)


def replayed(backend, runner, step: str) -> tuple[Problem, torch.Tensor]:
    """The step in a CUDA graph that was captured for other lists and lengths."""
    mode, lengths, new = STEPS[step]
    eager(backend, runner, step)
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


WAYS = {"eager": eager, "graph": replayed}


def sglangs_own(mode, fp8_cache: bool, heads: int):
    """SGLang's backend with the kernels that it chooses on Hopper, and its runner."""
    prefill, decode = ("flashmla_kv", "flashmla_kv") if fp8_cache else ("flashmla_sparse", "fa3")
    runner = make_runner(heads, mode, prefill, decode, fp8_kv_cache=fp8_cache, device="cuda")
    return ATTENTION_BACKENDS["dsa"](runner), runner


@pytest.mark.parametrize(
    "step, way", [(step, way) for step in STEPS for way in WAYS if (step, way) != ("prompts", "graph")]
)
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_a_step_is_as_exact_as_torch(heads, fp8_cache, step, way, record_property):
    mode = STEPS[step][0]
    runner = make_runner(heads, mode, fp8_kv_cache=fp8_cache, device="cuda")
    problem, out = WAYS[way](ATTENTION_BACKENDS["etap"](runner), runner, step)
    error, of_torch = map(float, problem.errors(out))
    record_property("error", error)
    record_property("torch_error", of_torch)
    print(f"relative error {error:.2e}, of torch in bfloat16 {of_torch:.2e}")
    assert error <= TOLERANCE * of_torch


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_sglangs_own_kernels_for_comparison(heads, fp8_cache, step, record_property):
    """How exact SGLang's own kernels are, reported and only held to finite outputs."""
    problem, out = eager(*sglangs_own(STEPS[step][0], fp8_cache, heads), step)
    error, of_torch = map(float, problem.errors(out))
    record_property("error", error)
    record_property("torch_error", of_torch)
    print(f"relative error {error:.2e}, of torch in bfloat16 {of_torch:.2e}")
    assert out.isfinite().all()

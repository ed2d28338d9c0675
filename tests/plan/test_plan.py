"""`etap plan` against published and measured figures, each with its source, and what must hold for every deployment.

WITHIN is the distance that a planner may have from a reading: 15%.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_screens import etap_plan, run, words_of

from bench.common import configs, results
from bench.kernels.rows import Document
from bench.e2e import results_file as e2e_file
from etap_backend.plan import step
from etap_backend.plan.alternatives import what_fits
from etap_backend.plan.inputs import CACHE_NAMES, LONGEST_REST, Deployment, Model, read_gpu, read_model
from etap_backend.plan.memory import RESERVE_BYTES, memory_of, parameters_of, weights_of
from etap_backend.plan.report import percent, verdict
from etap_backend.plan.step import Gain, make_plan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
WITHIN = 0.15
K = 1024
GPUS, MODELS = configs.shipped("hardware"), configs.shipped("models", ".json")
DENSE = [name for name in MODELS if not read_model(name).sparse]

R1, K2, K3 = (read_model(name) for name in ("deepseek-r1", "kimi-k2", "kimi-k3"))
H20, H20_141, H100, H200 = (read_gpu(name) for name in ("H20-96G", "H20-141G", "H100", "H200"))


def close(wanted: float):
    return pytest.approx(wanted, rel=WITHIN)


def on(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, **other)


def call_us(gpu, **deployment) -> tuple[float, float]:
    """Expected microseconds of one call, transposed and padded."""
    made = make_plan(R1, gpu, on(**deployment))
    return made.etap.call_us, made.peers[0].call_us


@pytest.mark.parametrize(
    "model, billions",
    [
        ("deepseek-r1", 671),
        ("deepseek-v3", 671),
        ("deepseek-v3.2", 671),
        ("glm-5-fp8", 744),
        ("kimi-k2", 1026),
        ("kimi-k3", 2800),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v4-flash", 284),
    ],
)
def test_parameters(model, billions):
    """Total parameters as the models' cards state them: 671B thrice, 744B, 1T (1.026e12 in its safetensors index),
    2.8T, 15.7B, 284B."""
    assert parameters_of(read_model(model)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_kimi_k3_reads_for_a_token_and_what_its_checkpoint_takes():
    """Its card: 104B activated parameters. Its checkpoint: 1.56 TB, experts in MXFP4 and all else in two bytes (the
    planner's absorbed copy is the engines', the vision tower's 0.4B are not in the planner)."""
    parts = [part for part in weights_of(K3, on(gpus=1, tp=1)) if part.name != "attention, absorbed copy"]
    chosen = K3.num_experts_per_tok / K3.n_routed_experts
    active = sum(part.parameters * (chosen if part.experts else 1) for part in parts if part.name != "embedding")
    assert active / 1e9 == pytest.approx(104, rel=0.01)
    assert sum(part.bytes_per_gpu for part in parts) / 1e12 == pytest.approx(1.56, rel=0.01)


@pytest.mark.parametrize(
    "model, billions, terabytes",
    [("deepseek-v3.2", 685, None), ("glm-5-fp8", 754, 0.750), ("glm-5.3-flash", 320, 0.3286)],
)
def test_parameters_with_the_layer_that_predicts(model, billions, terabytes):
    """With it, as Hugging Face counts: DeepSeek-V3.2 685B, GLM-5 754B, GLM-5.3-Flash 320B. GLM-5.1's FP8 checkpoint,
    of the same shapes, has 750 GB (sglang-jax PR 1111), GLM-5.3-Flash's 306 GiB (vllm PR 53906)."""
    parts = weights_of(read_model(model), on(gpus=1, tp=1, s_q=2))
    parts = [part for part in parts if part.name != "attention, absorbed copy"]
    assert sum(part.parameters for part in parts) / 1e9 == pytest.approx(billions, rel=0.01)
    if terabytes:
        assert sum(part.bytes_per_gpu for part in parts) / 1e12 == pytest.approx(terabytes, rel=0.01)


def test_kimi_k3_has_a_cache_in_24_of_93_layers_and_a_state_in_the_others():
    """Rows of 576 elements although nothing in them is rotated; the state as both engines shape it: float32 of heads x
    128 x 128, and bfloat16 of 3 tokens x 3 x heads x 128. Layers 48 to 93 have 13 of the caches."""
    assert (len(K3.attention_layers), K3.linear_layers, K3.cache_row) == (24, 69, 576)
    whole, halves = (memory_of(K3, H200, on(gpus=8 * pp, pp=pp)) for pp in (1, 2))
    assert whole.cache_per_token == 24 * 1152 and halves.cache_per_token == 13 * 1152
    assert whole.state_per_request == 69 * (12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2)
    assert halves.state_per_request == 35 * whole.state_per_request // 69
    made = make_plan(K3, H20_141, on(gpus=16, pp=2))
    assert step.query_rows(K3, on()) == 12 and made.etap.rows == 16 and made.peers[0].rows == 64
    assert made.etap.step_ms == pytest.approx(24 * made.etap.call_us / 1e3) and made.memory.fits
    assert not make_plan(K3, H20_141, on()).memory.tokens, "1.56 TB of weights on 1.2 TB"


def test_kimi_k2_has_8_heads_a_rank_and_little_room_on_one_node():
    """FP8 weights of 1026 G parameters on 8 GPUs of 141 GB; its own guide asks for 16 GPUs, with 128K contexts."""
    assert step.query_rows(K2, on()) == 8 and make_plan(K2, H200, on()).etap.rows == 8
    assert 128e9 <= memory_of(K2, H200, on()).weights <= 131e9
    assert not memory_of(K2, H200, on(1, 128 * K)).fits
    assert memory_of(K2, H200, on(1, 128 * K, gpus=16, pp=2)).fits


def test_weights_of_r1_on_eight_gpus():
    """84 to 86 GB of FP8 weights a GPU at TP8: the capacity that community reports of 8-GPU servers start from."""
    assert 84e9 <= memory_of(R1, H20, on()).weights <= 86e9


def test_cache_of_a_token():
    """1152 B x 61 layers = 70,272 B a token on every TP rank."""
    assert memory_of(R1, H20, on()).cache_per_token == 70272


def test_the_papers_point_does_not_fit_beside_fp8_weights():
    """16 x 64K on 8 x H20-96G: the cache alone takes 74 GB a GPU (arXiv 2506.01969 measures that shape)."""
    memory = memory_of(R1, H20, on(16, 64 * K))
    assert memory.cache_wanted == close(74e9) and not memory.fits
    fitting = {(found.layout, found.cache) for found in what_fits(R1, H20, on(16, 64 * K)) if found.fits}
    assert ("16 x H20-96G, pp 2", "bfloat16") in fitting and ("8 x H20-141G", "fp8") in fitting
    assert ("8 x H20-96G", "bfloat16") not in fitting


def test_capacity_of_h20_96g():
    """What R1 leaves on 8 x H20-96G: 6 to 11 GB a GPU = 90K to 150K tokens, with nearly all memory given (0.95)."""
    memory = memory_of(R1, H20, on(utilization=0.95))
    assert 90e3 <= memory.tokens <= 150e3
    assert 6e9 <= memory.tokens * memory.cache_per_token <= 11e9


def test_65536_tokens_in_fp8_fit_on_h20_96g():
    """sglang issue 8856: 8 x H20, TP8, FP8 KV cache, max-total-tokens 65536, served."""
    assert memory_of(R1, H20, on(16, 4 * K, cache="fp8")).fits


def test_capacity_of_h20_141g():
    """Roughly 600K tokens on 8 x H20-141G."""
    assert memory_of(R1, H20_141, on()).tokens == close(600e3)


def test_capacity_of_h200():
    """vLLM 0.26.0, TP8 on 8 x H200, R1's architecture in FP8: a KV cache of 674,597 tokens (its start-up log)."""
    assert memory_of(R1, H200, on()).tokens == close(674_597)


def test_flashmla_step_at_16k_on_h20():
    """16 x 16K, 61 layers: FlashMLA at the ETAP paper's 30 TFLOP/s takes 18.6 ms a step."""
    assert make_plan(R1, H20, on()).peers[0].step_ms == close(18.6)


def test_step_and_saving_where_attention_takes_30_percent():
    """README of FlashMLA-ETAP: attention is about 30% of a decode step at 16 x 16K. Then the step is 62 ms, and the
    swap saves about 11 ms of it, 18%."""
    made = make_plan(R1, H20, on(), attention_share=0.30)
    ours, padded = made.step_with(made.etap), made.step_with(made.peers[0])
    assert padded == close(62) and made.share == pytest.approx(0.30)
    assert padded - ours == close(11) and 1 - ours / padded == close(0.18)
    assert made.gain.lower == made.gain.upper == pytest.approx(padded / ours - 1), "a share that was read has no range"


@pytest.mark.parametrize("tokens, tflops", [(8 * K, 27), (16 * K, 30), (32 * K, 31), (64 * K, 32)])
def test_padded_kernel_on_h20_at_long_contexts(tokens, tflops):
    """FlashMLA's row of the ETAP paper (H20-96G, 16 heads, batch 16). Below 8K the paper's FlashMLA is slower still."""
    flops = 2 * 16 * 16 * tokens * (576 + 512)
    assert flops / call_us(H20, context=tokens)[1] / 1e6 == close(tflops)


@pytest.mark.parametrize("s_q, ms", [(1, 0.601), (2, 0.606), (3, 0.609), (4, 0.614), (5, 1.168)])
def test_padded_kernel_on_h20_over_query_tokens(s_q, ms):
    """FlashMLA issue 30, H20, 16 heads, 128 x 4K: flat to 64 rows, then twice."""
    assert call_us(H20, batch=128, context=4 * K, s_q=s_q)[1] / 1e3 == close(ms)


@pytest.mark.parametrize("s_q, ms", [(1, 0.151), (2, 0.247), (4, 0.493)])
def test_roofline_on_h20_over_query_tokens(s_q, ms):
    """The least time of the same calls at nominal rates (4.0 TB/s, 148 TFLOP/s), where no row is padding."""
    nominal = H20.model_copy(update={"sustained_bandwidth": H20.bandwidth, "sustained_bf16_flops": H20.bf16_flops})
    assert step.etap_attention(R1, nominal, on(128, 4 * K, s_q=s_q)).roofline_us / 1e3 == close(ms)


def test_flashmla_on_h100():
    """achatbot PR 123: FlashMLA on an H100, 16 heads, 128 x 4K: 0.215 ms."""
    assert call_us(H100, batch=128, context=4 * K)[1] == close(215)


@pytest.mark.parametrize(
    "gpu, memory, padded", [(H20, 121, 37), (H20_141, 145, 37), (H100, 101, 247), (H200, 145, 247)]
)
def test_roofs_at_16_rows(gpu, memory, padded):
    """TFLOP/s that 16 rows can reach by nominal bandwidth, and by nominal tensor rate when padded to 64."""
    assert gpu.bandwidth.value * 34816 / 1152 / 1e12 == pytest.approx(memory, abs=0.6)
    assert gpu.bf16_flops.value / 4 / 1e12 == pytest.approx(padded, abs=0.6)


@pytest.mark.parametrize("concurrency, tpot_ms", [(8, 12.8), (16, 17.2), (32, 25.6), (64, 34.6)])
def test_step_of_sglang_on_h200(concurrency, tpot_ms):
    """InferenceX PR 870: R1 in FP8, TP8 on 8 x H200, SGLang 0.5.7, 1K in and out. Two constants of the planner were
    fitted to these four and to the reading below, so this says that the form holds, not that it predicts."""
    made = make_plan(R1, H200, on(concurrency, 3 * K // 2))
    assert made.step_with(made.peers[0]) == close(tpot_ms)


def test_step_of_vllm_on_h200():
    """vLLM 0.26.0, TP8 on 8 x H200, R1's architecture, dummy FP8 weights, FLASHMLA, batch 1 at 2K: 10.06 ms."""
    made = make_plan(R1, H200, on(1, 2 * K))
    assert made.step_with(made.peers[0]) == close(10.06)


# Servers whose experts were drawn evenly, as the plan has it. Nothing was fitted to them. SGLang's were without its own
# all-reduce; a step of one request is 3 ms longer there than the plan's, which docs/plan.md says.
EVEN = [
    document
    for path in sorted(RESULTS.glob("e2e-decode-full*.json"))
    if (document := e2e_file.read(path)).draws_experts and document.layout.dcp == 1
    if (shape := configs.parse(Model, document.model_shape)).num_hidden_layers == 61 and not shape.sparse
]


def kernel_of(row: e2e_file.Measured) -> str | None:
    return {"etap": "etap", "flashmla": "FlashMLA"}.get(row.backend.lower())


def step_ms(document: e2e_file.Document, row: e2e_file.Measured) -> float:
    """As served: where prompts are cached and a chunk has one token, the time between two chunks. TPOT has in it what
    requests wait for the others' admission."""
    alone = not row.tokens_per_chunk or row.tokens_per_chunk.median < 1.05
    if row.prefill == "cached" and not document.draft_tokens and row.itl_ms and alone:
        return row.itl_ms.median
    return row.tpot_ms.median * (row.acceptance_length.median if row.acceptance_length else 1.0)


def planned(document: e2e_file.Document, row: e2e_file.Measured) -> tuple[Model, Deployment]:
    """What the planner is told of a reading."""
    layout, cache = document.layout, "fp8" if document.kv_dtype == "fp8" else "bfloat16"
    load = {"context": row.input + row.output // 2, "batch": row.concurrency, "s_q": 1 + document.draft_tokens}
    where = Deployment(document.gpus, layout.tp, layout.dp, layout.pp, cache=cache, **load)
    return configs.parse(Model, document.model_shape), where


EVEN_STEPS = [
    pytest.param(document, row, id=f"{document.title}, {row.backend}, {row.load_text}")
    for document in EVEN
    for row in document.measured()
    if kernel_of(row) in ("etap", "FlashMLA") and (document.engine == "vllm" or row.concurrency > 1)
]


@pytest.mark.parametrize("document, row", EVEN_STEPS)
def test_steps_at_full_depth(document, row):
    """Each H200 as one of eight ranks; FlashMLA as vLLM calls it where that was measured."""
    made = make_plan(planned(document, row)[0], H200, planned(document, row)[1])
    kernel = made.etap if kernel_of(row) == "etap" else made.peers[-1]
    assert made.step_with(kernel) == close(step_ms(document, row))


@pytest.mark.parametrize("document", EVEN, ids=lambda document: document.title)
def test_rest_of_a_step_with_experts_drawn_evenly(document):
    """The profiles' time beside attention; each backend's is the same but for the spread."""
    for row in (row for row in document.measured() if row.profile and row.profile.steps):
        model, where = planned(document, row)
        rest = (row.profile.kernels_ms - row.profile.attention_ms) / row.profile.steps
        assert step.rest_of_step_ms(model, H200, where) == close(rest)


def test_fewer_experts_take_less_and_an_even_choice_is_the_default():
    few, even, all_of_them = (
        step.rest_of_step_ms(R1, H200, on(experts=experts)) for experts in (20, 256 * (1 - (1 - 1 / 32) ** 16), 256)
    )
    assert few < even < all_of_them and even == pytest.approx(step.rest_of_step_ms(R1, H200, on()))


@pytest.mark.parametrize("experts", [0, 257])
def test_experts_that_the_model_has_not_are_refused(experts):
    with pytest.raises(ValueError, match=f"experts: wanted more than 0 and at most the model's 256, got {experts}"):
        make_plan(R1, H200, on(experts=experts))


def readings(name: str, kernel: str, least_us: float) -> list[tuple[int, int, int, float]]:
    """(Requests, tokens, query tokens, us) of a kernel's calls of at most 64 rows from `least_us` on."""
    rows = results.read(RESULTS / f"{name}.json", Document).rows
    even = [row for row in rows if row.length and row.dtype == "bfloat16" and row.heads * row.s_q <= 64]
    return [(row.batch, row.length, row.s_q, us) for row in even if (us := row.us(kernel)) and us > least_us]


FITTED = [
    pytest.param(name, field, file, call.kernel, id=f"{name}, {field}, {file}")
    for name in GPUS
    for field, call in read_gpu(name).calls.items()
    for file in call.results
]


@pytest.mark.parametrize("name, field, file, kernel", FITTED)
def test_expected_calls_are_as_measured(name, field, file, kernel):
    """Each call against the files of results/ that it was fitted to, from 50 us on: below, launch and merge decide, and
    the form is too simple. A derived one is that of the GPU that was measured, with that GPU's rates."""
    measured_on = "h20-96g" if file.endswith("h20-proxy") else "h200"
    gpu = read_gpu(measured_on)
    call = getattr(read_gpu(name), field)
    assert (call.fixed_us, call.factor) == (getattr(gpu, field).fixed_us, getattr(gpu, field).factor)
    timed = readings(file, kernel, least_us=50)
    assert len(timed) >= 4
    ours = partial(step.etap_attention, fp8_math=field == "etap_fp8_math")
    padded = partial(step.padded_attention, in_vllm=field == "padded_in_vllm")
    attention = ours if field.startswith("etap") else padded
    cache = "fp8" if field == "etap_fp8_math" else "bfloat16"
    for batch, context, s_q, us in timed:
        where = replace(on(batch, context, s_q=s_q), cache=cache)
        assert attention(R1, gpu, where).call_us == close(us), (batch, context, s_q)


@pytest.mark.parametrize("fp8_math, kernel", [(False, "etap"), (True, "etap-fp8-math")])
@pytest.mark.parametrize("name, gpu", [("targets-fp8", H200), ("targets-fp8-h20-proxy", H20)])
def test_expected_calls_with_an_fp8_cache_are_as_measured(name, gpu, fp8_math, kernel):
    """The same form, fitted to bfloat16 caches only, from 65 us on; below, 64 x 4K on the proxy is 15.3% off."""
    long = readings(name, kernel, least_us=65)
    assert len(long) >= 3
    for batch, context, _, us in long:
        where = replace(on(batch, context), cache="fp8")
        assert step.etap_attention(R1, gpu, where, fp8_math=fp8_math).call_us == close(us), (batch, context)


def test_flashmla_is_told_alone_and_as_vllm_calls_it():
    alone, in_vllm = (made := make_plan(R1, H200, on())).peers
    assert made.gain == made.gain_over(alone) and made.gain_over(in_vllm).call > made.gain.call > 1
    assert [peer.kernel for peer in make_plan(R1, H20, on()).peers] == ["FlashMLA alone"], "nobody measured it there"
    assert len(make_plan(R1, H200, on(cache="fp8")).peers) == 1, "it was fitted to bfloat16 caches"


def test_experts_are_spread_over_all_ranks_of_tensor_and_data_parallelism():
    """What is left of attention is on every data-parallel replica; 256 experts are on 16 ranks once."""
    parts = {part.name: part for part in weights_of(R1, on(gpus=16, tp=4, dp=4))}
    alone = {part.name: part for part in weights_of(R1, on(gpus=4, tp=4))}
    assert parts["experts"].bytes_per_gpu == pytest.approx(alone["experts"].bytes_per_gpu / 4)
    assert parts["attention, heads"].bytes_per_gpu == alone["attention, heads"].bytes_per_gpu
    experts = 58 * 256 * 3 * 7168 * 2048 / 16
    assert parts["experts"].parameters / parts["experts"].shards == experts


def test_a_gain_is_a_range_between_two_estimates_of_the_rest():
    """The longer rest is what 30% of attention at 16 x 16K on 8 x H20 leaves, the README of FlashMLA-ETAP has it."""
    made, of_share = make_plan(R1, H20_141, on()), make_plan(R1, H20_141, on(), attention_share=0.30)
    assert made.gain.lower < made.gain.upper and made.gain.lower == pytest.approx(of_share.gain.upper, rel=0.01)
    assert made.rest_ms * LONGEST_REST.value == pytest.approx(of_share.rest_ms, rel=0.01)
    assert f"{percent(made.gain)}% more tokens/s than with FlashMLA alone" in verdict(made, H20_141)


@pytest.mark.parametrize(
    "lower, upper, text",
    [(0.27, 0.441, "27 to 44"), (-0.004, -0.001, "0"), (-0.021, 0.001, "-2 to 0"), (0.014, 0.0141, "1")],
)
def test_a_gain_in_percent(lower, upper, text):
    assert percent(Gain(1.0, lower, upper)) == text


def test_where_nothing_is_gained_the_answer_is_to_leave_it_off():
    assert "Leave ETAP off here: it changes a step's tokens/s by" in words_of("--gpu", "H20-96G", "--dcp", "8")
    assert "Leave ETAP off" not in words_of()
    assert "If it fitted, with ETAP a step would give" in words_of("--context", "64K")


deployments = st.builds(
    Deployment,
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    cache=st.sampled_from(["bfloat16", "fp8"]),
    context=st.integers(1, 131072),
    batch=st.integers(1, 512),
    s_q=st.integers(1, 4),
).map(lambda d: replace(d, gpus=d.tp * d.dp * d.pp))
models, gpus = st.sampled_from(DENSE).map(read_model), st.sampled_from(GPUS).map(read_gpu)


@settings(deadline=None)  # files are read, on machines that others use too
@given(models, gpus, deployments, st.integers(1, 4096), st.integers(1, 64))
def test_more_work_never_takes_less(model, gpu, where, more_context, more_batch):
    before = make_plan(model, gpu, where)
    for bigger in (
        replace(where, context=where.context + more_context),
        replace(where, batch=where.batch + more_batch),
    ):
        after = make_plan(model, gpu, bigger)
        assert after.memory.tokens_wanted >= before.memory.tokens_wanted
        assert after.memory.tokens <= before.memory.tokens
        assert after.memory.tokens == before.memory.tokens or after.memory.state > before.memory.state
        assert after.etap.roofline_us >= before.etap.roofline_us
        assert after.peers[0].roofline_us >= before.peers[0].roofline_us
        assert after.step_with(after.etap) >= before.step_with(before.etap) * (1 - 1e-9)


@settings(deadline=None)  # files are read, on machines that others use too
@given(models, gpus, deployments)
def test_a_plan_is_consistent(model, gpu, where):
    made = make_plan(model, gpu, where)
    # The padded kernel multiplies an FP8 cache in FP8: with the same math the transposed one has no more to do.
    alike, padded = made.fp8_math or made.etap, made.peers[0]
    assert alike.rows <= padded.rows and alike.roofline_us <= padded.roofline_us * (1 + 1e-9)
    assert 0 < made.share < 1 and made.gain.lower <= made.gain.upper
    estimates = made.gain.lower, made.gain.upper
    upper = max(estimates, key=abs)
    assert made.step_with(made.fastest_peer) == pytest.approx(made.step_with(made.ours) * (1 + upper))
    assert made.memory.fits == (made.memory.cache_wanted <= made.memory.tokens * made.memory.cache_per_token)
    assert made.memory.weights + made.memory.tokens * made.memory.cache_per_token <= max(
        made.memory.usable, made.memory.weights
    )


@settings(deadline=None)  # files are read, on machines that others use too
@given(models, gpus, deployments)
def test_what_is_said_to_fit_fits(model, gpu, where):
    asked = what_fits(model, gpu, where)[0]
    if asked.most_requests:
        assert memory_of(model, gpu, replace(where, batch=asked.most_requests)).fits
    assert not memory_of(model, gpu, replace(where, batch=asked.most_requests + where.dp)).fits
    if asked.most_context:
        assert memory_of(model, gpu, replace(where, context=asked.most_context)).fits
    assert not memory_of(model, gpu, replace(where, context=asked.most_context + 64 * where.dcp)).fits


@settings(deadline=None)
@given(models, gpus, st.sampled_from([1, 2, 4, 8]))
def test_spreading_over_more_ranks_leaves_more_room(model, gpu, tp):
    one, two = (memory_of(model, gpu, on(gpus=n, tp=n)) for n in (tp, 2 * tp) if n <= 16)
    assert two.weights < one.weights and two.tokens >= one.tokens


def test_context_parallelism_divides_the_cache_and_gathers_the_heads():
    whole, spread = on(16, 64 * K), on(16, 64 * K, dcp=8)
    assert memory_of(R1, H20, whole).tokens_wanted == 8 * memory_of(R1, H20, spread).tokens_wanted
    assert (step.query_rows(R1, whole), step.query_rows(R1, spread)) == (16, 128)


def test_an_fp8_cache_takes_half_the_bytes_and_holds_twice_the_tokens():
    """576 B x 61 layers = 35,136 B a token. 8 x H200: 143,771 MiB x 0.92 - 85.4 GB - 5.6 GB = 47.7 GB of cache."""
    plain, halved = on(16, 16 * K), on(16, 16 * K, cache="fp8")
    memory, made = memory_of(R1, H200, plain), make_plan(R1, H200, halved)
    assert made.memory.cache_per_token == 576 * 61 == 35136 == memory.cache_per_token / 2
    left = H200.memory_bytes.value * 0.92 - memory.weights - RESERVE_BYTES.value
    assert made.memory.tokens == int(left / 35136 / 64) * 64 and memory.tokens == int(left / 70272 / 64) * 64
    assert made.bf16_tokens == memory.tokens
    assert made.memory.cache_wanted == 16 * 16 * K * 35136


@pytest.mark.parametrize("gpu", [H20, H200], ids=lambda gpu: gpu.name)
def test_roofline_of_an_fp8_cache(gpu):
    """16 rows, 16 x 16K: bytes 576 a token, operations 2 x 16 x (576 + 512) a token, in float16 at the bf16 rate, or
    in FP8 at the FP8 rate, of which WGMMA reaches the share that it reaches of the bf16 rate."""
    tokens = 16 * 16 * K
    made = make_plan(R1, gpu, on(cache="fp8"))
    share = gpu.sustained_bf16_flops.value / gpu.bf16_flops.value
    memory = tokens * 576 / gpu.sustained_bandwidth.value * 1e6
    in_float16 = tokens * 34816 / gpu.sustained_bf16_flops.value * 1e6
    in_fp8 = tokens * 34816 / (gpu.fp8_flops.value * share) * 1e6
    assert made.etap.roofline_us == pytest.approx(max(memory, in_float16))
    assert made.fp8_math.roofline_us == pytest.approx(max(memory, in_fp8))
    assert made.peers[0].roofline_us == pytest.approx(max(memory, 4 * in_fp8))
    assert made.in_bf16.roofline_us == pytest.approx(max(2 * memory, in_float16))


def test_an_h20_needs_fp8_math_for_what_an_fp8_cache_promises():
    """On an H20 float16 math takes longer than the memory (70.2 us, 39.6), FP8 math does not (35.1), nor an H200."""
    made = make_plan(R1, H20, on(cache="fp8"))
    assert made.etap.roofline_us == pytest.approx(70.2, abs=0.1) and made.etap.bound == "tensor cores"
    assert made.fp8_math.roofline_us == pytest.approx(39.6, abs=0.1)
    assert made.fp8_math.bound == "memory" and made.in_bf16.bound == "memory"
    assert made.in_bf16.roofline_us / made.etap.roofline_us == pytest.approx(1.13, abs=0.01)
    assert make_plan(R1, H200, on(cache="fp8")).etap.bound == "memory"


def test_next_token_prediction_brings_a_layer():
    plain, predicting = (memory_of(R1, H200, on(s_q=s_q)) for s_q in (1, 2))
    assert predicting.cache_per_token == plain.cache_per_token / 61 * 62
    assert predicting.weights == pytest.approx(plain.weights / 61 * 62, rel=0.02)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gpus": 4}, "gpus: wanted tp x dp x pp = 8, got 4"),
        ({"batch": 0}, "batch: wanted at least 1 and at most 2147483648, got 0"),
        ({"cache": "int4"}, "cache: wanted one of bfloat16, fp8, got int4"),
        ({"tp": 3, "gpus": 3}, "tp: wanted a divisor of 128 heads, got 3"),
        ({"dcp": 3}, "dcp: wanted a divisor of tp = 8, got 3"),
        ({"utilization": 1.5}, "utilization: wanted more than 0 and at most 1, got 1.5"),
        ({"pp": 62, "gpus": 496}, "pp: wanted at most 61 layers, got 62"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        make_plan(R1, H20, on(**change))


def config(tmp_path: Path, **changes) -> str:
    """DeepSeek-R1's config.json with changes."""
    whole = json.loads((configs.FOLDER / "models" / "deepseek-r1.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | changes))
    return str(tmp_path)


def blocks(size) -> dict:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}


def packed(form: str | None) -> dict:
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": form}}


def linear(full_attention: list[int]) -> dict:
    sizes = {"num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4}
    return {"linear_attn_config": sizes | {"full_attn_layers": full_attention}}


@pytest.mark.parametrize(
    "changes, words",
    [
        (blocks(5), "quantization_config.weight_block_size: Input should be a valid tuple, got 5"),
        (blocks([0, 128]), "quantization_config.weight_block_size.0: Input should be greater than 0, got 0"),
        (blocks([128]), "quantization_config.weight_block_size.1: Field required"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method: .*'fp8' .*got 'awq'"),
        (packed("pack-quantized"), "quantization_config.format: .*'mxfp4-pack-quantized', got 'pack-quantized'"),
        (packed(None), "quantization_config: .*wanted format mxfp4-pack-quantized beside quant_method"),
        (linear([4, 62]), "full_attn_layers: wanted different numbers of at most num_hidden_layers = 61, got"),
        (linear([4, 4]), "full_attn_layers: wanted different numbers of at most num_hidden_layers = 61, got"),
        (linear([]), "linear_attn_config.full_attn_layers: .*at least 1 item"),
        ({"num_experts_per_tok": 512}, "num_experts_per_tok: wanted at most n_routed_experts = 256, got 512"),
        ({"num_experts_per_tok": None}, "wanted num_experts_per_tok and moe_intermediate_size beside n_routed_experts"),
        ({"num_nextn_predict_layers": -61}, "num_nextn_predict_layers: .*greater than or equal to 0, got -61"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: .*greater than or equal to 0, got -1"),
        ({"hidden_size": 10**400}, "hidden_size: Input should be less than or equal to 2147483648"),
        ({"kv_lora_rank": None}, "kv_lora_rank: Input should be a valid integer, got None"),
        ({"index_topk": 2048}, "wanted index_n_heads, index_head_dim and q_lora_rank beside index_topk"),
        ({"layer_types": ["full_attention"] * 60}, "layer_types: wanted as many as num_hidden_layers = 61, got 60"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        read_model(config(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kv_lora_rank": 256}, "model: wanted one that ETAP runs: head_dim 320 is not supported: wanted 576"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "v_head_dim 448 is not supported: wanted 512"),
    ],
)
def test_a_model_that_etap_refuses_has_no_plan(tmp_path, changes, words):
    model = read_model(config(tmp_path, **changes))
    with pytest.raises(ValueError, match=words):
        make_plan(model, H20, on())


def test_sparse_attention_with_no_tokens_is_dense(tmp_path):
    assert make_plan(read_model(config(tmp_path, index_topk=0)), H20, on()).etap == make_plan(R1, H20, on()).etap


def test_the_configurations_for_two_ranks_of_a_context_gain_as_they_ship():
    """It is FP8 math that gains there, which both switch on."""
    made = make_plan(R1, H20, on(cache="fp8", dcp=2, utilization=0.95))
    assert made.memory.fits and made.ours is made.fp8_math and made.gain.lower > 0.01
    assert made.step_with(made.etap) >= made.step_with(made.fastest_peer) * 0.99
    name = "deepseek-r1-8xh20-96g-dcp2-fp8-cache.yaml"
    shipped = {engine: (configs.FOLDER / engine / name).read_text().splitlines() for engine in ("vllm", "sglang")}
    assert "  etap_fp8_math: true" in shipped["vllm"] and "attention-backend: etap_fp8_math" in shipped["sglang"]


@pytest.mark.parametrize("value", ["inf", "nan", "-1.0", "0.0", "1e300", "1e-300"])
@pytest.mark.parametrize("field", ["memory_bytes", "bandwidth", "sustained_bf16_flops"])
def test_a_gpu_without_bounds_is_refused(tmp_path, field, value):
    whole = (configs.FOLDER / "hardware" / "h200.toml").read_text()
    lines = [
        f'{field} = {{ value = {value}, status = "given", source = "x" }}' if line.startswith(f"{field} =") else line
        for line in whole.splitlines()
    ]
    (tmp_path / "gpu.toml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"gpu.toml: {field}\.value: "):
        read_gpu(str(tmp_path / "gpu.toml"))


def test_files_that_make_no_sense_are_refused(tmp_path):
    (tmp_path / "gpu.toml").write_text(
        'name = "x"\nbandwidth = { value = -1, status = "guessed", source = "" }\ncost = 3'
    )
    with pytest.raises(ValueError, match=r"gpu.toml: memory_bytes: .*bandwidth.status: .*cost: "):
        read_gpu(str(tmp_path / "gpu.toml"))
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    with pytest.raises(ValueError, match=r"config.json: .*kv_lora_rank: Field required"):
        read_model(str(tmp_path))
    with pytest.raises(ValueError, match="gpu: wanted a file or one of h100, .*, got A100"):
        read_gpu("A100")


@pytest.mark.parametrize("name", GPUS)
def test_every_number_of_a_gpu_says_what_it_is(name):
    gpu = read_gpu(name)
    assert gpu.name.lower() == name
    for figure in (*gpu.figures.values(), *gpu.calls.values()):
        assert figure.status in ("measured", "nominal", "derived") and figure.source


@pytest.mark.parametrize("name", GPUS)
def test_results_that_a_call_was_fitted_to_are_there(name):
    for field, call in read_gpu(name).calls.items():
        assert bool(call.kernel) == bool(call.results), field
        assert all((RESULTS / f"{file}.json").is_file() for file in call.results), field


def test_the_screen_says_that_the_papers_point_does_not_fit_and_what_does():
    arguments = ("deepseek-r1", "--gpu", "H20-96G", "--context", "64K", "--batch", "16")
    text = words_of(*arguments)
    assert "16 x 64K does not fit: its KV cache is 1,048,576 tokens = 73.7 GB per GPU, 3.4 GB are left" in text
    assert re.search(r"8 x H20-96G 0 3,008 - 1 6,080 - .*16 x H20-96G, pp 2 19 79,040 \d+ to \d+ ", text)
    assert "TensorRT-LLM issue 3977" not in text
    sources = words_of(*arguments, "--sources")
    assert sources.startswith(text) and "TensorRT-LLM issue 3977" in sources
    assert "measured" in sources and "nominal" in sources and "derived" in sources
    assert re.search(r"etap of results/[\w-]+.json", sources)


@pytest.mark.parametrize("layout", [(), ("--count", "16", "--pp", "2"), ("--dcp", "8"), ("--context", "64K")])
@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", DENSE)
def test_the_answer_fits_one_screen(model, gpu, cache, layout):
    lines = etap_plan(model, "--gpu", gpu, "--cache", cache, *layout, columns=80).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_what_fits_says_what_etap_gains_there():
    """On 96 GB only dcp 4 and 8 hold 16 x 16K on one node: 64 rows and more, of which no row is padding."""
    rows = {(row.layout, row.cache): row for row in what_fits(R1, H20, on())}
    asked, spread, larger = (
        rows[layout, "bfloat16"] for layout in ("8 x H20-96G", "8 x H20-96G, dcp 8", "8 x H20-141G")
    )
    assert asked.gain.call == pytest.approx(3.1, abs=0.05) and not asked.fits
    assert spread.fits and spread.gain.upper <= 0 and larger.fits and larger.gain.upper > 0.3
    fp8 = rows["8 x H20-96G", "fp8"].gain
    assert fp8.fp8_math and 2.3 < fp8.call < 2.7, "FlashMLA multiplies in FP8 too"
    text = words_of("--gpu", "H20-96G")
    assert re.search(
        r"8 x H20-96G, dcp 4 11 12,032 - 23 24,320 -1\* 8 x H20-96G, dcp 8 23 24,064 0 47 48,640 -1\*", text
    )
    assert "* with FP8 math" in text
    assert "no padding that ETAP could save" in words_of("--gpu", "H20-96G", "--dcp", "8")


def test_only_where_no_row_is_padding_there_is_none_to_save():
    """An H20 takes 80 rows in five groups of 16, an H200 in two tiles of 64, as FlashMLA does."""
    said = "Both compute 128 query rows: there is no padding that ETAP could save."
    assert "no padding" not in words_of("--gpu", "H20-141G", "--s-q", "5")
    assert said in words_of("--gpu", "H200", "--s-q", "5") and said in words_of("--gpu", "H20-141G", "--s-q", "8")


def test_a_measured_share_is_that_of_what_was_asked():
    plain, given_share = (what_fits(R1, H20, on(), share) for share in (None, 0.3))
    assert given_share[0].gain.upper < plain[0].gain.upper and given_share[1:] == plain[1:]
    document = json.loads(etap_plan("--attention-share", "0.3", "--json"))
    assert [one["rest_status"] for one in document["what_fits"]][:2] == ["given", "derived"]
    text = words_of("--attention-share", "0.3")
    assert "The share is of what was asked; other gains are estimates." in text and "is given" in text
    assert "The share is of" not in words_of()


def examples() -> list[str]:
    return re.findall(r"^etap plan ?(.*?)(?: +#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("arguments", ["", *examples()])
def test_the_examples_of_the_readme_fit(arguments):
    assert " fits: its KV cache is" in words_of(*shlex.split(arguments))


def test_json_has_what_the_screen_has():
    document = json.loads(etap_plan("kimi-k2", "--gpu", "H200", "--count", "16", "--tp", "8", "--pp", "2", "--json"))
    assert document["deployment"]["pp"] == 2 and document["memory"]["fits"] is True
    kernels, made = document["attention"], document["step"]
    assert kernels["FlashMLA alone"]["step_with_ms"] > kernels["ETAP"]["step_with_ms"] > made["rest_ms"] > 0
    assert made["gain_over"]["FlashMLA in vLLM"]["upper"] > made["gain"]["upper"] > made["gain"]["lower"]
    assert document["gpu"]["sustained_bandwidth"]["status"] == "measured"
    assert document["assumptions"]["layer_us"]["source"]
    assert document["what_fits"][0]["gain"] == document["step"]["gain"]


def test_json_has_no_infinity_where_nothing_fits():
    text = etap_plan("kimi-k2", "--gpu", "H100", "--cache", "fp8", "--json")
    assert "Infinity" not in text and "NaN" not in text
    made = json.loads(text)
    assert made["memory"]["tokens"] == made["bf16_tokens"] == 0
    assert "The weights leave no room for a KV cache on 8 x H100." in words_of("kimi-k2", "--gpu", "H100")


def test_the_screen_shows_what_an_fp8_cache_changes():
    arguments = ("deepseek-r1", "--gpu", "H200", "--context", "64K")
    text = words_of(*arguments, "--kv-dtype", "fp8")
    assert "tokens of 35,136 B, 2.00x the 678,784 of bf16." in text
    assert "ETAP, FP8 math" in text and "ETAP, bf16 cache" in text
    assert "per call," in text and "from 65 us on within 15%" in words_of(*arguments, "--sources")
    for name in ("fp8", "fp8_e4m3"):
        assert words_of(*arguments, "--cache", name) == text
    plain = words_of(*arguments)
    assert "ETAP, FP8 math" not in plain and "ETAP measured memory" in plain
    for name in ("auto", "bf16", "bfloat16"):
        assert words_of(*arguments, "--cache", name) == plain
    document = json.loads(etap_plan(*arguments, "--kv-dtype", "fp8", "--json"))
    assert document["memory"]["tokens"] / document["bf16_tokens"] == pytest.approx(2, abs=1e-3)
    assert document["attention"]["ETAP, FP8 math"]["bound"] == "memory"
    assert json.loads(etap_plan(*arguments, "--json"))["bf16_tokens"] is None


NUMBER = re.compile(r"[\d,.]+x?\*?")


@pytest.mark.parametrize("model", ["deepseek-r1", "deepseek-v3.2"])
def test_no_number_is_shortened_on_a_narrow_screen(model):
    """At 60 columns and at 20, and where nobody says how wide the screen is."""
    wide, said = (etap_plan(model, "--gpu", "H200", columns=columns) for columns in (200, 60))
    assert "\N{HORIZONTAL ELLIPSIS}" not in said + etap_plan(model, "--gpu", "H200", columns=20)
    assert NUMBER.findall(said) == NUMBER.findall(wide)


@pytest.mark.parametrize(
    "name, shipped", [("deepseek-ai/DeepSeek-R1", "deepseek-r1"), ("zai-org/GLM-5-FP8", "glm-5-fp8")]
)
def test_a_models_name_on_the_hub_is_known(name, shipped):
    assert read_model(name) == read_model(shipped)


def test_a_million_tokens_can_be_asked_for():
    made = json.loads(etap_plan("--gpu", "H200", "--context", "1M", "--batch", "1", "--cache", "fp8", "--json"))
    assert made["deployment"]["context"] == 2**20


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--gpu", "A100"], "--gpu: wanted a file or one of h100, .*, got A100"),
        (["--context", "64Q"], "--context: wanted a number of tokens such as 4096, 4K or 1M, got '64Q'"),
        (["--context", "9" * 5000], "--context: "),
        (["--context", "9" * 400], "--context: wanted at least 1 and at most 2147483648, got 9"),
        (["--batch", "1" + "0" * 400], "--batch: wanted at least 1 and at most 2147483648, got 1"),
        (["--tp", "0"], "--tp: wanted at least 1 and at most 2147483648, got 0"),
        (["--dp", "0"], "--dp: wanted at least 1"),
        (["--count", "-8"], "--count: wanted at least 1"),
        (["--count", "7"], "--count: wanted a divisor of 128 heads, got 7"),
        (["--count", "14", "--dp", "2"], "--count / .--dp x --pp.: wanted a divisor of 128 heads, got 7"),
        (["--count", "8", "--dp", "3"], "--count: wanted a multiple of --dp x --pp = 3, got 8"),
        (["--tp", "7", "--count", "7"], "--tp: wanted a divisor of 128 heads, got 7"),
        (["--tp", "4"], "--count: wanted tp x dp x pp = 4, got 8"),
        (["--s-q", "0"], "--s-q: wanted at least 1"),
        (["--cache", "fp8_e5m2"], f"--kv-dtype: wanted one of {', '.join(CACHE_NAMES)}, got fp8_e5m2"),
        (["--attention-share", "1e-320"], "--attention-share: wanted 0.001 to 0.999, got"),
        (["--attention-share", "nan"], "--attention-share: wanted 0.001 to 0.999, got nan"),
        (["--utilization", "nan"], "--utilization: wanted more than 0 and at most 1, got nan"),
        (["--kernels", "sparse.json"], "--kernels: wanted none for dense attention, got sparse.json"),
        (["no-model"], "model: wanted a file or one of deepseek-r1, .*, got no-model"),
        (["no-one/no-model"], "model: wanted a file or one of deepseek-r1, .*, got no-one/no-model"),
        (["./no-model"], "model: wanted a file that exists, got ./no-model$"),
        (["no/model/config.json"], "model: wanted a file that exists, got no/model/config.json$"),
        (["--gpu", "mine.toml"], "--gpu: wanted a file that exists, got mine.toml$"),
        ([__file__], "model: wanted a config.json, got .*test_plan.py, which is no JSON file: "),
    ],
)
def test_the_command_refuses_what_it_cannot_plan(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert re.search(f"^etap plan: {words}", " ".join(result.stderr.split()))

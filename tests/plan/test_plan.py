"""`etap plan` for dense models: published and measured figures with their sources, and what holds for every deployment.

A plan may be 15% off a reading (WITHIN).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etap_backend import cli
from etap_backend.config_list import FOLDER
from etap_backend.plan import files, step
from etap_backend.plan.alternatives import make_plan, what_fits
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import LONGEST_REST, Call, Figure, read_gpu
from etap_backend.plan.memory import RESERVE_BYTES, memory_of, parameters_of, weights_of
from etap_backend.plan.model import read_model
from etap_backend.plan.report import percent, verdict
from etap_backend.plan.shared import MERGE_US, predict
from etap_backend.plan.step import Gain

WITHIN = 0.15
K = 1024
GPUS = files.shipped("hardware")
DENSE = [name for name in files.shipped("models") if not read_model(name).sparse]
R1, K2, K3 = (read_model(name) for name in ("deepseek-r1", "kimi-k2", "kimi-k3"))
H20, H20_141, H100, H200 = (read_gpu(name) for name in ("H20-96G", "H20-141G", "H100", "H200"))


def close(wanted: float):
    return pytest.approx(wanted, rel=WITHIN)


def on(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, **other)


def flashmla(made):
    """The plan's FlashMLA."""
    return next(peer for peer in made.peers if peer.kernel == "FlashMLA")


def call_us(gpu, **deployment) -> tuple[float, float]:
    """Expected microseconds of one call of ETAP and of FlashMLA."""
    made = make_plan(R1, gpu, on(**deployment))
    return made.etap.call_us, flashmla(made).call_us


@pytest.fixture
def etap_plan(capsys):
    """Run `etap plan` with these words; gives its output with single spaces."""

    def run(*words: str, status: int = 0) -> str:
        assert cli.main(["plan", *words]) == status
        captured = capsys.readouterr()
        assert not (captured.out and captured.err)
        return captured.out if "--json" in words else " ".join((captured.out + captured.err).split())

    return run


# Weights and memory


@pytest.mark.parametrize(
    "model, billions",
    [
        ("deepseek-r1", 671),
        ("deepseek-v3.2", 671),
        ("glm-5-fp8", 744),
        ("kimi-k2", 1026),
        ("kimi-k3", 2800),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v4-flash", 284),
        ("kimi-linear", 49.1),
        ("mistral-large-3", 673),  # 675 with its vision encoder of 2.5
    ],
)
def test_parameters(model, billions):
    """As the models' cards state them."""
    assert parameters_of(read_model(model)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    "model, billions, terabytes, cached", [("kimi-k2-thinking", 1026, 0.594, 61), ("ling-3.0-flash", 127, 0.254, 7)]
)
def test_checkpoints(model, billions, terabytes, cached):
    """Kimi-K2-Thinking's experts have 4 bits and a scale per 32; 7 of Ling's 42 layers have a KV cache."""
    read = read_model(model)
    parts = [one for one in weights_of(read, on(gpus=1, tp=1, s_q=2)) if one.name != "attention, absorbed copy"]
    assert sum(part.parameters for part in parts) / 1e9 == pytest.approx(billions, rel=0.01)
    assert sum(part.bytes_per_gpu for part in parts) / 1e12 == pytest.approx(terabytes, rel=0.01)
    assert len(read.attention_layers) == cached and memory_of(read, H200, on()).cache_per_token == cached * 1152


@pytest.mark.parametrize(
    "how, left_out, attention, expert",
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, ["self_attn"], 2.0, 0.5 + 2.5 / 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, None, 0.5 + 2 / 128, 0.5 + 2 / 128),
        ({"quant_method": "gptq_marlin", "bits": 8, "group_size": -1}, None, 1 + 2 / 4096, 1 + 2 / 4096),
    ],
)
def test_bytes_of_packed_weights(tmp_path, how, left_out, attention, expert):
    quantization = how | {"modules_to_not_convert": left_out}
    model = read_model(changed(tmp_path, quantization_config=quantization))
    assert (model.attention_bytes, model.expert_bytes) == (pytest.approx(attention), pytest.approx(expert))
    fewer = make_plan(model, H200, on()).rest_ms, make_plan(R1, H200, on()).rest_ms
    assert how["bits"] == 8 or fewer[0] < fewer[1], "a step reads fewer bytes"


@pytest.mark.parametrize(
    "name, shipped",
    [("ZAI-org/glm-5", "glm-5-fp8"), ("GLM-5.2", "glm-5.2"), ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5")],
)
def test_models_have_their_hubs_names_in_any_case(name, shipped):
    assert read_model(name) == read_model(shipped) and read_gpu("h20-3E") == H20_141


def test_every_model_says_where_its_configuration_is_published():
    for name in files.shipped("models"):
        source = json.loads((FOLDER / f"models/{name}.json").read_text())["source"]
        assert re.match(r"https://huggingface[.]co/[\w.-]+/[\w.-]+/blob/main/(config|params)[.]json", source), name


def test_modules_left_out_of_fp8_keep_two_bytes():
    """Mistral-Large-3 keeps its latent projections in bfloat16, on every rank."""
    large, parts = read_model("mistral-large-3"), weights_of(read_model("mistral-large-3"), on())
    each = {part.name: part.bytes_each for part in parts}
    assert each["attention, latent projections"] == 2.0 and each["experts"] == large.attention_bytes < 1.01


def test_the_outer_quantization_counts_where_the_text_models_is_null(tmp_path):
    whole = json.loads((FOLDER / "models/deepseek-r1.json").read_text())
    outside = {
        "quantization_config": whole["quantization_config"],
        "text_config": whole | {"quantization_config": None},
    }
    (tmp_path / "config.json").write_text(json.dumps(outside))
    assert read_model(str(tmp_path)) == R1


def test_kimi_k3s_checkpoint():
    """Its card: 104B activated parameters, 1.56 TB with experts in MXFP4 and everything else in two bytes."""
    parts = [part for part in weights_of(K3, on(gpus=1, tp=1)) if part.name != "attention, absorbed copy"]
    chosen = K3.num_experts_per_tok / K3.n_routed_experts
    active = sum(part.parameters * (chosen if part.experts else 1) for part in parts if part.name != "embedding")
    assert active / 1e9 == pytest.approx(104, rel=0.01)
    assert sum(part.bytes_per_gpu for part in parts) / 1e12 == pytest.approx(1.56, rel=0.01)


def test_kimi_k3_has_a_cache_in_24_of_93_layers_and_a_state_in_the_others():
    """The state as both engines shape it: float32 heads x 128 x 128, and bfloat16 3 tokens x 3 x heads x 128."""
    assert (len(K3.attention_layers), K3.linear_layers, K3.cache_row) == (24, 69, 576)
    whole, halves = (memory_of(K3, H200, on(gpus=8 * pp, pp=pp)) for pp in (1, 2))
    assert whole.cache_per_token == 24 * 1152 and halves.cache_per_token == 13 * 1152
    assert whole.state_per_request == 69 * (12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2)
    assert halves.state_per_request == 35 * whole.state_per_request // 69
    assert not make_plan(K3, H20_141, on()).memory.tokens, "1.56 TB of weights on 1.2 TB"


def test_kimi_k2_has_8_heads_per_rank_and_little_room_on_one_node():
    """Its guide asks for 16 GPUs of 141 GB with contexts of 128K."""
    assert step.query_rows(K2, on()) == 8 and make_plan(K2, H200, on()).etap.rows == 8
    assert 128e9 <= memory_of(K2, H200, on()).weights <= 131e9
    assert not memory_of(K2, H200, on(1, 128 * K)).fits
    assert memory_of(K2, H200, on(1, 128 * K, gpus=16, pp=2)).fits


@pytest.mark.parametrize(
    "gpu, utilization, tokens",
    [
        (H20, 0.95, 105e3),  # community reports of 8 x H20-96G with nearly all memory: 90K to 150K
        (H20_141, 0.92, 600e3),  # 8 x H20-141G
        (H200, 0.92, 674_597),  # vLLM 0.26.0's log on 8 x H200
    ],
)
def test_tokens_beside_r1(gpu, utilization, tokens):
    memory = memory_of(R1, gpu, on(utilization=utilization))
    assert memory.cache_per_token == 70272 and 84e9 <= memory.weights <= 86e9
    assert memory.tokens == close(tokens)


def test_the_papers_point_does_not_fit_beside_fp8_weights():
    """16 x 64K on 8 x H20-96G: the cache alone takes 74 GB per GPU (arXiv 2506.01969 measures that shape)."""
    memory = memory_of(R1, H20, on(16, 64 * K))
    assert memory.cache_wanted == close(74e9) and not memory.fits
    fitting = {(found.layout, found.cache) for found in what_fits(R1, H20, on(16, 64 * K)) if found.fits}
    assert ("16 x H20-96G, pp 2", "bfloat16") in fitting and ("8 x H20-141G", "fp8") in fitting
    assert ("8 x H20-96G", "bfloat16") not in fitting


def test_experts_are_spread_over_all_ranks_of_tensor_and_data_parallelism():
    parts = {part.name: part for part in weights_of(R1, on(gpus=16, tp=4, dp=4))}
    undivided = {part.name: part for part in weights_of(R1, on(gpus=4, tp=4))}
    assert parts["experts"].bytes_per_gpu == pytest.approx(undivided["experts"].bytes_per_gpu / 4)
    assert parts["attention, heads"].bytes_per_gpu == undivided["attention, heads"].bytes_per_gpu
    assert parts["experts"].parameters / parts["experts"].shards == 58 * 256 * 3 * 7168 * 2048 / 16


def test_context_parallelism_divides_the_cache_and_gathers_the_heads():
    whole, spread = on(16, 64 * K), on(16, 64 * K, dcp=8)
    assert memory_of(R1, H20, whole).tokens_wanted == 8 * memory_of(R1, H20, spread).tokens_wanted
    assert (step.query_rows(R1, whole), step.query_rows(R1, spread)) == (16, 128)


def test_an_fp8_cache_holds_twice_the_tokens():
    plain, made = memory_of(R1, H200, on()), make_plan(R1, H200, on(cache="fp8"))
    assert made.memory.cache_per_token == 576 * 61 == plain.cache_per_token / 2
    left = H200.memory_bytes.value * 0.92 - plain.weights - RESERVE_BYTES
    assert made.memory.tokens == int(left / 35136 / 64) * 64 and made.bf16_tokens == plain.tokens


def test_next_token_prediction_brings_a_layer():
    plain, predicting = (memory_of(R1, H200, on(s_q=s_q)) for s_q in (1, 2))
    assert predicting.cache_per_token == plain.cache_per_token / 61 * 62
    assert predicting.weights == pytest.approx(plain.weights / 61 * 62, rel=0.02)


# Calls and steps

# Requests, thousands of tokens and query tokens, ETAP's and FlashMLA's microseconds; H20s': the proxy's.
CALLS = [
    (H200, 16, 16, 1, 71.4, 89.4),
    (H200, 16, 64, 1, 273.2, 305.0),
    (H200, 128, 4, 1, 136.8, 153.8),
    (H20_141, 16, 16, 1, 86.8, 298.1),
    (H20_141, 16, 64, 1, 315.8, 1130.5),
    (H20_141, 128, 4, 1, 167.3, 589.5),
    (H20_141, 16, 16, 2, 153.5, None),
    (H20_141, 16, 16, 4, 306.5, None),
    (H20_141, 16, 64, 4, 1173.1, None),
]


@pytest.mark.parametrize("gpu, batch, context, s_q, etap, flashmla", CALLS)
def test_calls_are_as_measured(gpu, batch, context, s_q, etap, flashmla):
    expected = call_us(gpu, batch=batch, context=context * K, s_q=s_q)
    assert expected[0] == close(etap) and (flashmla is None or expected[1] == close(flashmla))


@pytest.mark.parametrize("gpu, batch, us, fp8_math_us", [(H20_141, 16, 348.3, 189.8), (H20_141, 32, 683.6, 369.0)])
def test_calls_on_an_fp8_cache_are_as_measured(gpu, batch, us, fp8_math_us):
    made = make_plan(R1, gpu, on(batch, 64 * K, cache="fp8"))
    assert made.etap.call_us == close(us) and made.fp8_math.call_us == close(fp8_math_us)


@pytest.mark.parametrize("s_q, flashmla_us, fp8_math_us", [(1, 182.0, 56.1), (4, 186.0, 177.6), (8, 357.9, 335.2)])
def test_drafts_on_an_fp8_cache_are_as_measured(s_q, flashmla_us, fp8_math_us):
    """The H20 proxy, 16 x 16K: with FP8 math ETAP is never behind FlashMLA, whatever the drafts."""
    made = make_plan(R1, H20_141, on(cache="fp8", s_q=s_q))
    assert flashmla(made).call_us == close(flashmla_us) and made.fp8_math.call_us == close(fp8_math_us)
    assert made.best is made.fp8_math and made.gain.call > 1


@pytest.mark.parametrize("s_q, ms", [(1, 0.601), (2, 0.606), (4, 0.614), (5, 1.168)])
def test_padded_kernel_on_h20_over_query_tokens(s_q, ms):
    """FlashMLA issue 30, H20, 16 heads, 128 x 4K: flat to 64 rows, then twice."""
    assert call_us(H20, batch=128, context=4 * K, s_q=s_q)[1] / 1e3 == close(ms)


def test_flashmla_on_h100():
    """achatbot PR 123: FlashMLA on an H100, 16 heads, 128 x 4K: 0.215 ms."""
    assert call_us(H100, batch=128, context=4 * K)[1] == close(215)


@pytest.mark.parametrize("gpu", [H20, H200], ids=lambda gpu: gpu.name)
def test_roofline_of_an_fp8_cache(gpu):
    """16 rows: 576 bytes and 2 x 16 x (576 + 512) operations per token, in float16 or in FP8."""
    tokens, made = 16 * 16 * K, make_plan(R1, gpu, on(cache="fp8"))
    memory = tokens * 576 / gpu.sustained_bandwidth.value * 1e6
    in_float16 = tokens * 34816 / gpu.sustained_bf16_flops.value * 1e6
    in_fp8 = in_float16 * gpu.bf16_flops.value / gpu.fp8_flops.value
    assert made.etap.roofline_us == pytest.approx(max(memory, in_float16))
    assert made.fp8_math.roofline_us == pytest.approx(max(memory, in_fp8))
    assert flashmla(made).roofline_us == pytest.approx(max(memory, 4 * in_fp8))
    assert made.in_bf16.roofline_us == pytest.approx(max(2 * memory, in_float16))


def test_step_where_attention_takes_30_percent():
    """README of FlashMLA-ETAP: about 30% of a step at 16 x 16K; the step is 62 ms, and ETAP saves 11 ms of it."""
    made = make_plan(R1, H20, on(), attention_share=0.30)
    etap, padded = made.step_with(made.etap), made.step_with(flashmla(made))
    assert flashmla(made).step_ms == close(18.6), "FlashMLA at the paper's 30 TFLOP/s"
    assert padded == close(62) and made.share == pytest.approx(0.30) and padded - etap == close(11)
    assert made.gain.lower == made.gain.upper == pytest.approx(padded / etap - 1), "a measured share has no range"


@pytest.mark.parametrize("concurrency, tpot_ms", [(8, 12.8), (16, 17.2), (32, 25.6), (64, 34.6)])
def test_step_of_sglang_on_h200(concurrency, tpot_ms):
    """InferenceX PR 870: R1 in FP8, TP8 on 8 x H200, SGLang 0.5.7, 1K in and out. The planner was fitted to these."""
    made = make_plan(R1, H200, on(concurrency, 3 * K // 2))
    assert made.step_with(flashmla(made)) == close(tpot_ms)


RANKS_OF_EIGHT = replace(R1, num_attention_heads=64, intermediate_size=9216, moe_intermediate_size=1024)


@pytest.mark.parametrize(
    "batch, context, etap_ms, flashmla_ms",
    [(16, 16 * K, 22.58, 23.84), (32, 16 * K, 32.48, 33.65), (128, 2 * K, 37.29, 38.77), (8, 64 * K, 22.99, 24.24)],
)
def test_steps_at_full_depth(batch, context, etap_ms, flashmla_ms):
    """R1 on 4 x H200 as four ranks of eight, SGLang, experts drawn evenly. Nothing was fitted to it."""
    made = make_plan(RANKS_OF_EIGHT, H200, on(batch, context + 128, gpus=4, tp=4))
    assert made.step_with(made.etap) == close(etap_ms) and made.step_with(flashmla(made)) == close(flashmla_ms)


def test_a_gain_is_a_range_between_two_estimates_of_the_rest():
    made, of_share = make_plan(R1, H20_141, on()), make_plan(R1, H20_141, on(), attention_share=0.30)
    assert made.gain.lower < made.gain.upper and made.gain.lower == pytest.approx(of_share.gain.upper, rel=0.01)
    assert made.rest_ms * LONGEST_REST.value == pytest.approx(of_share.rest_ms, rel=0.01)
    assert f"{percent(made.gain)}% more tokens/s than with FlashMLA" in verdict(made, H20_141)
    assert {peer.kernel for peer in make_plan(R1, H200, on()).peers} == {"FlashMLA", "FA3", "FlashInfer"}


@pytest.mark.parametrize("lower, upper, text", [(0.27, 0.441, "27 to 44"), (-0.004, -0.001, "0"), (0.014, 0.0141, "1")])
def test_a_gain_in_percent(lower, upper, text):
    assert percent(Gain(1.0, lower, upper)) == text


def test_the_configuration_for_two_ranks_of_a_context_gains_as_it_ships():
    """FP8 math is what gains there; both engines' files switch it on."""
    made = make_plan(R1, H20, on(cache="fp8", dcp=2, utilization=0.95))
    assert made.memory.fits and made.best is made.fp8_math and made.gain.lower > 0.01
    name = "deepseek-r1-8xh20-96g-dcp2-fp8-cache.yaml"
    shipped = {engine: (FOLDER / engine / name).read_text().splitlines() for engine in ("vllm", "sglang")}
    assert "  etap_fp8_math: true" in shipped["vllm"] and "attention-backend: etap_fp8_math" in shipped["sglang"]


# Every deployment

deployments = st.builds(
    Deployment,
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    dcp=st.sampled_from([1, 2, 4, 8]),
    cache=st.sampled_from(["bfloat16", "fp8"]),
    context=st.integers(1, 131072),
    batch=st.integers(1, 512),
    s_q=st.integers(1, 4),
).map(lambda where: replace(where, gpus=where.tp * where.dp * where.pp, dcp=min(where.dcp, where.tp)))
models, gpus = st.sampled_from(DENSE).map(read_model), st.sampled_from(GPUS).map(read_gpu)


@settings(deadline=None, max_examples=50)
@given(models, gpus, deployments, st.integers(1, 4096), st.integers(1, 64))
def test_more_work_never_takes_less(model, gpu, where, more_context, more_batch):
    before = make_plan(model, gpu, where)
    bigger_ones = replace(where, context=where.context + more_context), replace(where, batch=where.batch + more_batch)
    for after in (make_plan(model, gpu, bigger) for bigger in bigger_ones):
        assert after.memory.tokens_wanted >= before.memory.tokens_wanted
        assert after.memory.tokens <= before.memory.tokens
        assert after.etap.roofline_us >= before.etap.roofline_us
        assert after.step_with(after.etap) >= before.step_with(before.etap) * (1 - 1e-9)


@settings(deadline=None, max_examples=50)
@given(models, gpus, deployments)
def test_a_plan_is_consistent(model, gpu, where):
    made = make_plan(model, gpu, where)
    # The padded kernel multiplies an FP8 cache in FP8; with the same math ETAP has no more to do.
    alike, padded = made.fp8_math or made.etap, flashmla(made)
    assert alike.rows <= padded.rows and alike.roofline_us <= padded.roofline_us * (1 + 1e-9)
    assert 0 < made.share < 1 and made.gain.lower <= made.gain.upper
    upper = max(made.gain.lower, made.gain.upper, key=abs)
    assert made.step_with(made.fastest_peer) == pytest.approx(made.step_with(made.best) * (1 + upper))
    used = made.memory.weights + made.memory.tokens * made.memory.cache_per_token
    assert used <= max(made.memory.usable, made.memory.weights)


@settings(deadline=None, max_examples=50)
@given(models, gpus, deployments)
def test_what_is_said_to_fit_fits(model, gpu, where):
    asked = what_fits(model, gpu, where)[0]
    if asked.most_requests:
        assert memory_of(model, gpu, replace(where, batch=asked.most_requests)).fits
    assert not memory_of(model, gpu, replace(where, batch=asked.most_requests + where.dp)).fits
    if asked.most_context:
        assert memory_of(model, gpu, replace(where, context=asked.most_context)).fits
    assert not memory_of(model, gpu, replace(where, context=asked.most_context + 64 * where.dcp)).fits


# Refusals


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"gpus": 4}, "gpus"),
        ({"batch": 0}, "batch"),
        ({"cache": "int4"}, "cache"),
        ({"tp": 3, "gpus": 3}, "tp"),
        ({"dcp": 3}, "dcp"),
        ({"utilization": 1.5}, "utilization"),
        ({"pp": 62, "gpus": 496}, "pp"),
    ],
)
def test_an_impossible_deployment_is_refused(change, argument):
    with pytest.raises(ValueError, match=f"^{argument}: wanted .*, got "):
        make_plan(R1, H20, on(**change))


def changed(tmp_path: Path, shipped: str = "deepseek-r1", **changes) -> str:
    """A folder with a shipped config.json and changes to it."""
    whole = json.loads((FOLDER / "models" / f"{shipped}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | changes))
    return str(tmp_path)


def fp8(size) -> dict:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}


def linear(full_attention: list[int]) -> dict:
    sizes = {"num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4}
    return {"linear_attn_config": sizes | {"full_attn_layers": full_attention}}


@pytest.mark.parametrize(
    "changes, key",
    [
        (fp8(5), "quantization_config.weight_block_size"),
        (fp8([0, 128]), "quantization_config.weight_block_size.0"),
        (fp8([128]), "quantization_config.weight_block_size"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3, "group_size": 128}}, "quantization_config.bits"),
        ({"quantization_config": {"quant_method": "awq"}}, "bits"),
        ({"model_type": "longcat_flash"}, "model_type"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "format"),
        ({"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["re:*proj"]}}, "left_out"),
        (linear([4, 62]), "linear_attn_config.full_attn_layers"),
        (linear([4, 4]), "linear_attn_config.full_attn_layers"),
        (linear([]), "linear_attn_config.full_attn_layers"),
        ({"num_experts_per_tok": 512}, "num_experts_per_tok"),
        ({"num_experts_per_tok": None}, "n_routed_experts"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"hidden_size": "7168"}, "hidden_size"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"index_topk": 2048}, "index_topk"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"layer_types": ["full_attention"] * 60}, "layer_types"),
    ],
)
def test_a_wrong_config_is_refused_by_key(tmp_path, changes, key):
    with pytest.raises(ValueError, match=rf"^model: .*config.json: {re.escape(key)}: wanted "):
        read_model(changed(tmp_path, **changes))


@pytest.mark.parametrize("changes", [{"kv_lora_rank": 256}, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}])
def test_a_model_that_etap_refuses_has_no_plan(tmp_path, changes):
    with pytest.raises(ValueError, match="^model: wanted one that ETAP runs: .* is not supported"):
        make_plan(read_model(changed(tmp_path, **changes)), H20, on())


@pytest.mark.parametrize("depth", [900, 960, 985, 10**5])
def test_deeply_nested_json_is_refused(tmp_path, depth):
    path = tmp_path / "nested.json"
    path.write_text(f'{{"hidden_size": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(ValueError, match=r"^model: wanted a JSON file|^model: .*nested.json: hidden_size: wanted "):
        read_model(str(path))


@pytest.fixture
def not_root():
    """Root may read everything."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    yield
    os.seteuid(user)


def test_a_path_below_a_closed_folder_is_refused(tmp_path, not_root):
    folder = tmp_path / "closed"
    if os.access(tmp_path, os.W_OK, effective_ids=True):
        folder.mkdir(mode=0)
    for read, argument in (read_model, "model"), (read_gpu, "gpu"):
        with pytest.raises(ValueError, match=f"^{argument}: wanted a file that exists and can be read"):
            read(f"{folder}/config.json")


def test_a_wrong_gpu_file_is_refused_by_key(tmp_path):
    whole, path = json.loads((FOLDER / "hardware/h200.json").read_text()), tmp_path / "gpu.json"
    for value in (float("inf"), float("nan"), -1, 0, 1e300, "fast"):
        path.write_text(json.dumps(whole | {"bandwidth": {"value": value, "status": "given", "source": "x"}}))
        with pytest.raises(ValueError, match=r"^gpu: .*gpu.json: bandwidth\.value: wanted "):
            read_gpu(str(path))
    for change, key in (
        ({"cost": 3}, "cost"),
        ({"sms": None}, "sms"),
        ({"calls": [{"kernel": "etap", "kind": "fp8"}]}, "calls.0.rows"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=rf"^gpu: .*gpu.json: {key}: wanted "):
            read_gpu(str(path))


@pytest.mark.parametrize("name", GPUS)
def test_every_number_of_a_gpu_says_what_it_is(name):
    gpu = read_gpu(name)
    assert gpu.name.lower() == name
    known = [one for one in (*vars(gpu).values(), *gpu.calls) if isinstance(one, (Figure, Call))]
    assert len(known) >= 7 and bool(gpu.calls) != bool(gpu.calls_like)
    assert all(one.status in ("measured", "nominal", "derived") and one.source for one in known)


# The command


def test_the_screen_says_what_does_not_fit_and_what_does(etap_plan, monkeypatch):
    text = etap_plan("deepseek-ai/DeepSeek-R1", "--gpu", "H20-96G", "--context", "64K")
    assert "16 x 64K does not fit: its KV cache is 1,048,576 tokens = 73.7 GB per GPU, 3.4 GB are left" in text
    assert re.search(r"8 x H20-96G 0 3,008 - 1 6,080 - .*16 x H20-96G, pp 2 19 79,040 \d+ to \d+ ", text)
    assert "The weights leave no room for a KV cache on 8 x H100." in etap_plan("kimi-k2", "--gpu", "H100")
    assert "Leave ETAP off here" in etap_plan("--gpu", "H20-141G", "--s-q", "4")
    padded = etap_plan("--gpu", "H20-96G", "--dcp", "8")
    assert "Both compute 128 query rows: there is no padding that ETAP could save." in padded
    monkeypatch.setenv("COLUMNS", "20")
    narrow = etap_plan("deepseek-ai/DeepSeek-R1", "--gpu", "H20-96G", "--context", "64K")
    assert narrow == text, "no number is cut on a narrow screen"


def test_a_measured_share_belongs_to_what_was_asked(etap_plan):
    plain, measured = (what_fits(R1, H20, on(), share) for share in (None, 0.3))
    assert measured[0].gain.upper < plain[0].gain.upper and measured[1:] == plain[1:]
    assert "The share is of what was asked; other gains are estimates." in etap_plan("--attention-share", "0.3")


def test_the_engines_names_of_a_cache_are_known(etap_plan):
    fp8_cache, plain = (etap_plan("--gpu", "H200", "--kv-dtype", name) for name in ("fp8", "auto"))
    assert "tokens of 35,136 B, 2.00x the 678,784 of bf16." in fp8_cache and "ETAP, FP8 math" not in plain
    assert etap_plan("--gpu", "H200", "--cache", "fp8_e4m3") == fp8_cache
    assert all(etap_plan("--gpu", "H200", "--cache", name) == plain for name in ("bf16", "bfloat16"))


def test_drafts_are_planned_beside_each_other(etap_plan):
    """Each row is the plan of so many drafts, and a star is at the most tokens per second of each side."""
    words = ("--kv-dtype", "fp8", "--drafts", "--acceptance", "0.8")
    drafting = json.loads(etap_plan(*words, "--json"))["drafting"]
    assert [row["drafts"] for row in drafting["rows"]] == list(range(8)) and drafting["source"] == "given"
    third, made = drafting["rows"][2], make_plan(R1, H20_141, on(cache="fp8", s_q=3))
    assert third["tokens_per_step"] == pytest.approx(1 + 0.8 + 0.64) and third["fits"]
    assert third["etap"]["step_ms"] == pytest.approx(made.step_with(made.best))
    assert third["peer"]["kernel"] == "FlashMLA" and third["gain"]["upper"] == pytest.approx(made.gain.upper)
    assert third["etap"]["tokens_per_s"] == pytest.approx(16e3 * 2.44 / third["etap"]["step_ms"])
    for side in ("etap", "peer"):
        most = max(drafting["rows"], key=lambda row: row[side]["tokens_per_s"])
        assert drafting["best"][side] == most["drafts"] > 0
    assert "accepted with 0.71 where those before it are (3.20 tokens per step with 7 drafts" in etap_plan("--drafts")
    assert "drafts cost nothing to make here" in etap_plan("kimi-k2", "--gpu", "H200", "--count", "16", "--drafts")


@pytest.mark.parametrize(
    "cache, fp8_math, batch, common, read_us, from_l2_us",
    [
        ("bfloat16", False, 64, 16 * K, 96, (139, 153)),
        ("bfloat16", False, 100, 16 * K, 144, (239, 243)),
        ("bfloat16", False, 300, 8 * K, 277, (334, 369)),
        ("fp8", True, 64, 16 * K, 80, (102, 107)),
        ("fp8", True, 100, 16 * K, 116, (158, 160)),
        ("fp8", True, 64, 64 * K, 209, (346, 369)),
    ],
)
def test_shared_prefixes_are_within_a_quarter_of_two_calls_on_an_h200(
    cache, fp8_math, batch, common, read_us, from_l2_us
):
    """Read with today's kernels at commit f26c4cd, without the merge, for 1K own tokens of each request."""
    where = on(batch, common + K, cache=cache)
    found = predict(R1, H200, where, made := make_plan(R1, H200, where), common)
    assert (made.best is made.fp8_math) == fp8_math
    assert found.once_us - MERGE_US == pytest.approx(read_us, rel=0.25)
    least, most = found.from_l2_us
    assert 0.9 * least <= from_l2_us[0] and from_l2_us[1] <= 1.1 * most and most < found.apart_us


@pytest.mark.parametrize("model, batch, common", [(R1, 16, 16 * K), (R1, 64, 4 * K), (K3, 64, 16 * K)])
def test_where_two_calls_read_no_gain_there_is_none(model, batch, common):
    """Nor for 12 heads, of which no number fills 64 rows."""
    where = on(batch, common + K)
    assert predict(model, H200, where, make_plan(model, H200, where), common).once_us is None


def test_on_an_h20_pairs_of_8_heads_share_and_16_heads_do_not(etap_plan):
    where = on(64, 17 * K)
    found = predict(K2, H20_141, where, make_plan(K2, H20_141, where), 16 * K)
    assert 1.5 < found.apart_us / found.once_us < 1.8 and not found.from_l2_us
    words = ("--batch", "64", "--context", "17K", "--shared-prefix", "16K")
    assert "ETAP_SHARED_PREFIX=1 has no effect here: " in etap_plan(*words)
    assert "Predicted from two calls and a merge" in etap_plan("kimi-k2", *words)


def test_json_has_what_the_screen_has(etap_plan):
    text = etap_plan("kimi-k2", "--gpu", "H200", "--count", "16", "--tp", "8", "--pp", "2", "--json")
    document = json.loads(text)
    assert document["deployment"]["pp"] == 2 and document["memory"]["fits"] is True
    kernels, made = document["attention"], document["step"]
    assert kernels["FlashMLA"]["step_with_ms"] > kernels["ETAP"]["step_with_ms"] > made["rest_ms"] > 0
    assert made["gain_over"]["FlashMLA"]["upper"] > made["gain"]["upper"] > made["gain"]["lower"]
    assert document["what_fits"][0]["gain"] == made["gain"]
    nothing = etap_plan("kimi-k2", "--gpu", "H100", "--cache", "fp8", "--context", "1M", "--json")
    assert json.loads(nothing)["memory"]["tokens"] == 0 and "Infinity" not in nothing and "NaN" not in nothing


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--gpu", "A100"], "--gpu: wanted a file or one of h100, .*, got A100"),
        (["--gpu", "mine.json"], "--gpu: wanted a file that exists and can be read, got mine.json$"),
        (["--context", "64Q"], "--context: wanted a number of tokens such as 4096, 4K or 1M, got '64Q'"),
        (["--context", "9" * 5000], "--context: wanted"),
        (["--batch", "1" + "0" * 400], "--batch: wanted"),
        (["--tp", "0"], "--tp: wanted"),
        (["--dp", "0"], "--dp: wanted"),
        (["--count", "-8"], "--count: wanted"),
        (["--count", "7"], "--count: wanted a divisor of 128 heads, got 7"),
        (["--count", "14", "--dp", "2"], "--count / .--dp x --pp.: wanted a divisor of 128 heads, got 7"),
        (["--count", "8", "--dp", "3"], "--count: wanted a multiple of --dp x --pp = 3, got 8"),
        (["--tp", "4"], "--count: wanted tp x dp x pp = 4, got 8"),
        (["--s-q", "0"], "--s-q: wanted"),
        (["--s-q", str(2**31 - 1)], "--s-q x heads: wanted 1 to"),
        (["--cache", "fp8_e5m2"], "--kv-dtype: wanted .*, got fp8_e5m2"),
        (["--drafts", "--acceptance", "1.5"], "--acceptance: wanted 0 to 1, got 1.5"),
        (["--drafts", "--attention-share", "0.3"], "--attention-share: wanted none beside --drafts, got 0.3"),
        (["--attention-share", "nan"], "--attention-share: wanted"),
        (["--utilization", "nan"], "--utilization: wanted"),
        (["--shared-prefix", "a"], "--shared-prefix: wanted a number of tokens such as 4096, 4K or 1M, got 'a'"),
        (["--shared-prefix", "16K"], "--shared-prefix: wanted .* fewer tokens than the context's 16384, got 16384"),
        (["deepseek-v3.2", "--shared-prefix", "1K"], "--shared-prefix: wanted a dense model, .*, got 1024"),
        (["no-one/no-model"], "model: wanted a file or one of deepseek-r1, .*, got no-one/no-model"),
        (["./no-model"], "model: wanted a file that exists and can be read, got ./no-model$"),
        (["meituan-longcat/LongCat-Flash-Chat"], "model: wanted one that the plan knows, .*: LongCat-Flash has"),
        (["x" * 5000], "model: wanted a file or one of .*, got x{200}[.]{3}$"),
        (["--gpu", "/" + "x" * 5000], "--gpu: wanted a file that exists and can be read, got /x"),
        ([__file__], "model: wanted a JSON file, got .*test_plan.py"),
    ],
)
def test_the_command_refuses_in_one_line_with_the_flag(etap_plan, arguments, words):
    assert re.search(f"^etap plan: {words}", etap_plan(*arguments, status=2))

"""`etap plan` against published and measured figures, each with its source, and what must hold for every deployment.

WITHIN is the distance that a planner may have from a reading: 15%.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from etap_backend import configs, estimate, plan
from etap_backend.cli import app
from etap_backend.plan import Deployment, make_plan, memory_of, read_gpu, read_model

RESULTS = Path(__file__).parent.parent / "results"
WITHIN = 0.15
K = 1024
GPUS, MODELS = configs.shipped("hardware"), configs.shipped("models", ".json")

R1 = read_model("deepseek-r1")
H20, H20_141, H100, H200 = (read_gpu(name) for name in ("H20-96G", "H20-141G", "H100", "H200"))


def close(wanted: float):
    return pytest.approx(wanted, rel=WITHIN)


def on(batch: int = 16, context: int = 16 * K, **other) -> Deployment:
    return Deployment(batch=batch, context=context, **other)


def call_us(gpu, **deployment) -> tuple[float, float]:
    """Expected microseconds of one call, transposed and padded."""
    made = make_plan(R1, gpu, on(**deployment))
    return made.etap.call_us, made.padded.call_us


@pytest.mark.parametrize(
    "model, billions", [("deepseek-r1", 671), ("deepseek-v3", 671), ("kimi-k2", 1026), ("deepseek-v2-lite", 15.7)]
)
def test_parameters(model, billions):
    """Total parameters as the models' cards state them: 671B, 671B, 1T (1.026e12 in its safetensors index), 15.7B."""
    assert plan.parameters_of(read_model(model)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_weights_of_r1_on_eight_gpus():
    """84 to 86 GB of FP8 weights a GPU at TP8: the capacity that community reports of 8-GPU servers start from."""
    assert 84e9 <= memory_of(R1, H20, on()).weights <= 86e9


def test_cache_of_a_token():
    """1152 B x 61 layers = 70,272 B a token on every TP rank."""
    assert memory_of(R1, H20, on()).cache_a_token == 70272


def test_the_papers_point_does_not_fit_beside_fp8_weights():
    """16 x 64K on 8 x H20-96G: the cache alone takes 74 GB a GPU (arXiv 2506.01969 measures that shape)."""
    memory = memory_of(R1, H20, on(16, 64 * K))
    assert memory.cache_wanted == close(74e9) and not memory.fits
    fitting = {found.change for found in plan.what_fits(R1, H20, on(16, 64 * K)) if found.fits}
    assert "16 x H20-96G, pp 2" in fitting and "8 x H20-141G, FP8 cache" in fitting
    assert "8 x H20-96G" not in fitting


def test_capacity_of_h20_96g():
    """What R1 leaves on 8 x H20-96G: 6 to 11 GB a GPU = 90K to 150K tokens, with nearly all memory given (0.95)."""
    memory = memory_of(R1, H20, on(utilization=0.95))
    assert 90e3 <= memory.tokens <= 150e3
    assert 6e9 <= memory.tokens * memory.cache_a_token <= 11e9


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
    assert make_plan(R1, H20, on()).padded.step_ms == close(18.6)


def test_step_and_saving_where_attention_takes_30_percent():
    """README of FlashMLA-ETAP: attention is about 30% of a decode step at 16 x 16K. Then the step is 62 ms, and the
    swap saves about 11 ms of it, 18%."""
    made = make_plan(R1, H20, on(), attention_share=0.30)
    assert made.padded_step_ms == close(62) and made.share == pytest.approx(0.30)
    assert made.padded_step_ms - made.step_ms == close(11)
    assert 1 - made.step_ms / made.padded_step_ms == close(0.18)


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
    assert plan.etap_attention(R1, nominal, on(128, 4 * K, s_q=s_q)).roofline_us / 1e3 == close(ms)


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
    assert make_plan(R1, H200, on(concurrency, 3 * K // 2)).padded_step_ms == close(tpot_ms)


def test_step_of_vllm_on_h200():
    """vLLM 0.26.0, TP8 on 8 x H200, R1's architecture, dummy FP8 weights, FLASHMLA, batch 1 at 2K: 10.06 ms."""
    assert make_plan(R1, H200, on(1, 2 * K)).padded_step_ms == close(10.06)


FULL_DEPTH = json.loads((RESULTS / "e2e-decode-full-vllm.json").read_text())
SERVERS = estimate.servers_of(FULL_DEPTH, "h20-96g")


def as_served(backend: str, batch: int, context: int) -> tuple[float, dict, Deployment]:
    """A step of that reading, its row, and its deployment with as many experts as it read."""
    shape = backend, batch, context
    row = next(row for row in FULL_DEPTH["rows"] if (row["backend"], row["concurrency"], row["input"]) == shape)
    where, _ = SERVERS.deployments(FULL_DEPTH, row)
    experts = estimate.experts_read(FULL_DEPTH, row, SERVERS) if batch > 1 else None
    return row["itl_ms"]["median"], row, replace(where, experts=experts)


@pytest.mark.parametrize("batch, context", [(1, 2 * K), (16, 2 * K), (16, 16 * K)])
def test_step_of_vllm_with_etap_at_full_depth(batch, context):
    """vLLM 0.26.0, 61 layers on 4 x H200, each as one of eight ranks: results/e2e-decode-full-vllm.json. Nothing was
    fitted to it. Points of other batches are not here: how many experts their dummy tokens chose was not read."""
    step, _, where = as_served("ETAP", batch, context)
    assert make_plan(SERVERS.model_here, H200, where).step_ms == close(step)


@pytest.mark.parametrize("backend", ["ETAP", "FLASHMLA", "FLASH_ATTN_MLA"])
def test_rest_of_a_step_at_full_depth(backend):
    """The same at 16 x 16K, with the time that the profile has for attention: FLASHMLA as vLLM calls it takes 113 us a
    layer there, where the planner's padded kernel, fitted to FlashMLA alone, has 84."""
    step, row, where = as_served(backend, 16, 16 * K)
    attention = row["profile"]["attention_ms"] / row["profile"]["steps"]
    assert plan.rest_of_step_ms(SERVERS.model_here, H200, where) + attention == close(step)


def test_fewer_experts_take_less_and_an_even_choice_is_the_default():
    few, even, all_of_them = (
        plan.rest_of_step_ms(R1, H200, on(experts=experts)) for experts in (20, 256 * (1 - (1 - 1 / 32) ** 16), 256)
    )
    assert few < even < all_of_them and even == pytest.approx(plan.rest_of_step_ms(R1, H200, on()))


@pytest.mark.parametrize("experts", [0, 257])
def test_experts_that_the_model_has_not_are_refused(experts):
    with pytest.raises(ValueError, match=f"experts: wanted more than 0 and at most the model's 256, got {experts}"):
        make_plan(R1, H200, on(experts=experts))


def readings(name: str, least_us: float):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    even = [row for row in rows if row["length"] and row["dtype"] == "bfloat16" and row["heads"] * row["s_q"] <= 64]
    return [row for row in even if row["results"]["etap"]["us"] > least_us]


@pytest.mark.parametrize("name, gpu", [("targets", H200), ("targets-h20-proxy", H20), ("mtp-h20-proxy", H20)])
def test_expected_calls_are_as_measured(name, gpu):
    """The expected time of a call against the files of results/ that it was fitted to, from 50 us on: below, launch and
    merge decide, and the form is too simple. The H20's own bandwidth and tensor rate are a little below the proxy's."""
    rows = readings(name, least_us=50)
    assert len(rows) >= 4
    for row in rows:
        etap, _ = call_us(gpu, batch=row["batch"], context=row["length"], s_q=row["s_q"])
        assert etap == close(row["results"]["etap"]["us"]), row["label"]


@pytest.mark.parametrize("fp8_math, kernel", [(False, "etap"), (True, "etap-fp8-math")])
@pytest.mark.parametrize("name, gpu", [("targets-fp8", H200), ("targets-fp8-h20-proxy", H20)])
def test_expected_calls_with_an_fp8_cache_are_as_measured(name, gpu, fp8_math, kernel):
    """The same form, fitted to bfloat16 caches only, from 65 us on; below, 64 x 4K on the proxy is 15.3% off."""
    timed = [(row, row["results"][kernel]["us"]) for row in readings(name, least_us=0)]
    long = [(row, us) for row, us in timed if us > 65]
    assert len(long) >= 3
    for row, us in long:
        where = replace(on(row["batch"], row["length"]), cache="fp8")
        assert plan.etap_attention(R1, gpu, where, fp8_math=fp8_math).call_us == close(us), row["label"]


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
models, gpus = st.sampled_from(MODELS).map(read_model), st.sampled_from(GPUS).map(read_gpu)


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
        assert after.memory.tokens == before.memory.tokens
        assert after.etap.roofline_us >= before.etap.roofline_us
        assert after.padded.roofline_us >= before.padded.roofline_us
        assert after.step_ms >= before.step_ms * (1 - 1e-9)


@settings(deadline=None)  # files are read, on machines that others use too
@given(models, gpus, deployments)
def test_a_plan_is_consistent(model, gpu, where):
    made = make_plan(model, gpu, where)
    # The padded kernel multiplies an FP8 cache in FP8: with the same math the transposed one has no more to do.
    alike = made.beside_bf16.fp8_math if made.beside_bf16 else made.etap
    assert alike.rows <= made.padded.rows and alike.roofline_us <= made.padded.roofline_us * (1 + 1e-9)
    assert 0 < made.share < 1
    assert made.padded_step_ms == pytest.approx(made.step_ms * (1 + made.gain))
    assert made.memory.fits == (made.memory.cache_wanted <= made.memory.tokens * made.memory.cache_a_token)
    assert made.memory.weights + made.memory.tokens * made.memory.cache_a_token <= max(
        made.memory.usable, made.memory.weights
    )


@settings(deadline=None)  # files are read, on machines that others use too
@given(models, gpus, deployments)
def test_what_is_said_to_fit_fits(model, gpu, where):
    asked = plan.what_fits(model, gpu, where)[0]
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
    assert (plan.query_rows(R1, whole), plan.query_rows(R1, spread)) == (16, 128)


def test_an_fp8_cache_takes_half_the_bytes_and_holds_twice_the_tokens():
    """576 B x 61 layers = 35,136 B a token. 8 x H200: 143,771 MiB x 0.92 - 85.4 GB - 5.6 GB = 47.7 GB of cache."""
    plain, halved = on(16, 16 * K), on(16, 16 * K, cache="fp8")
    memory, made = memory_of(R1, H200, plain), make_plan(R1, H200, halved)
    assert made.memory.cache_a_token == 576 * 61 == 35136 == memory.cache_a_token / 2
    left = H200.memory_bytes.value * 0.92 - memory.weights - plan.RESERVE_BYTES.value
    assert made.memory.tokens == int(left / 35136 / 64) * 64 and memory.tokens == int(left / 70272 / 64) * 64
    assert made.beside_bf16.tokens == memory.tokens
    assert made.beside_bf16.capacity_gain == pytest.approx(2, abs=1e-3)
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
    assert made.beside_bf16.fp8_math.roofline_us == pytest.approx(max(memory, in_fp8))
    assert made.padded.roofline_us == pytest.approx(max(memory, 4 * in_fp8))
    assert made.beside_bf16.bf16.roofline_us == pytest.approx(max(2 * memory, in_float16))


def test_an_h20_needs_fp8_math_for_what_an_fp8_cache_promises():
    """On an H20 float16 math takes longer than the memory (70.2 us, 39.6), FP8 math does not (35.1), nor an H200."""
    made = make_plan(R1, H20, on(cache="fp8"))
    assert made.etap.roofline_us == pytest.approx(70.2, abs=0.1) and made.etap.bound == "tensor cores"
    assert made.beside_bf16.fp8_math.roofline_us == pytest.approx(39.6, abs=0.1)
    assert made.beside_bf16.fp8_math.bound == "memory" and made.beside_bf16.bf16.bound == "memory"
    assert made.beside_bf16.bf16.roofline_us / made.etap.roofline_us == pytest.approx(1.13, abs=0.01)
    assert make_plan(R1, H200, on(cache="fp8")).etap.bound == "memory"


def test_next_token_prediction_brings_a_layer():
    plain, predicting = (memory_of(R1, H200, on(s_q=s_q)) for s_q in (1, 2))
    assert predicting.cache_a_token == plain.cache_a_token / 61 * 62
    assert predicting.weights == pytest.approx(plain.weights / 61 * 62, rel=0.02)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gpus": 4}, "gpus: wanted tp x dp x pp = 8, got 4"),
        ({"batch": 0}, "batch: wanted at least 1, got 0"),
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


def test_files_that_make_no_sense_are_refused(tmp_path):
    (tmp_path / "gpu.toml").write_text(
        'name = "x"\nbandwidth = { value = -1, status = "guessed", source = "" }\ncost = 3'
    )
    with pytest.raises(ValueError, match=r"gpu.toml: memory_bytes: .*bandwidth.status: .*cost: "):
        read_gpu(str(tmp_path / "gpu.toml"))
    (tmp_path / "config.json").write_text('{"hidden_size": 4096}')
    with pytest.raises(ValueError, match=r"config.json: .*kv_lora_rank: Field required"):
        read_model(str(tmp_path))
    with pytest.raises(ValueError, match="hardware: wanted a file or one of h100, .*, got A100"):
        read_gpu("A100")


@pytest.mark.parametrize("name", GPUS)
def test_every_number_of_a_gpu_says_what_it_is(name):
    gpu = read_gpu(name)
    assert gpu.name.lower() == name
    for field in type(gpu).model_fields:
        if field != "name":
            assert getattr(gpu, field).status in ("measured", "nominal", "derived") and getattr(gpu, field).source


def etap_plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_screen_says_that_the_papers_point_does_not_fit_and_what_does():
    text = " ".join(etap_plan("deepseek-r1", "--gpu", "H20-96G", "--context", "64K", "--batch", "16").split())
    assert "The cache of 16 x 65536 does not fit beside the weights: it takes 73.7 GB a GPU" in text
    assert "16 x H20-96G, pp 2 │ fits" in text and "8 x H20-141G, FP8 cache" in text
    assert "measured" in text and "nominal" in text and "derived" in text and "TensorRT-LLM issue 3977" in text


def test_json_has_what_the_screen_has():
    document = json.loads(etap_plan("kimi-k2", "--gpu", "H200", "--count", "16", "--tp", "8", "--pp", "2", "--json"))
    assert document["deployment"]["pp"] == 2 and document["memory"]["fits"] is True
    assert document["step"]["padded_ms"] > document["step"]["etap_ms"] > 0
    assert document["gpu"]["sustained_bandwidth"]["status"] == "measured"
    assert document["assumptions"]["layer_us"]["source"]


def test_the_screen_shows_what_an_fp8_cache_changes():
    arguments = ("deepseek-r1", "--gpu", "H200", "--context", "64K")
    text = " ".join(etap_plan(*arguments, "--kv-dtype", "fp8").split())
    assert "KV cache, a token │ 35,136 B" in text and "(FP8 holds 2.00x)" in text
    assert "ETAP, FP8 math" in text and "ETAP, bfloat16 cache" in text
    assert "Against its own bfloat16 cache: 1." in text and "with FP8 ones were within 15%" in text
    assert " ".join(etap_plan(*arguments, "--cache", "fp8").split()) == text
    assert "expected times derived" in text and "expected times measured" in etap_plan(*arguments)
    assert "FP8 math" not in etap_plan(*arguments)
    document = json.loads(etap_plan(*arguments, "--kv-dtype", "fp8", "--json"))
    assert document["beside_bf16"]["capacity_gain"] == pytest.approx(2, abs=1e-3)
    assert document["beside_bf16"]["fp8_math"]["bound"] == "memory"
    assert json.loads(etap_plan(*arguments, "--json"))["beside_bf16"] is None


@pytest.mark.parametrize("arguments, words", [(["--gpu", "A100"], "hardware"), (["--context", "64Q"], "64Q")])
def test_the_command_refuses_what_it_cannot_plan(arguments, words):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2 and words in result.stderr

"""vLLM's own MLA layer with an FP8 KV cache, on CPU tensors: values, scales, queries and options.

The reference is attention in float64 over the cache's elements times the scale. Writing the cache needs a GPU.
"""

import pickle

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from etap_backend.vllm import impl, log
from etap_backend.vllm.policy import wants_fp8_math
from support.vllm_layer import (
    BLOCK,
    FP8,
    HEADS,
    KV_SCALE,
    LATENT,
    LENGTHS,
    ROPE,
    SCALE,
    SPECULATIVE,
    Problem,
    assert_as_exact_as_torch,
    decode,
    make_builder,
)

FP8_MATH = {"additional_config": {"etap_fp8_math": True}}

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_workspaces")


@pytest.fixture
def make_fp8(make_layer):
    """Makes a layer with an FP8 cache of this scale, and its builder."""

    def both(scale=KV_SCALE, cache="fp8", **arguments):
        layer, config = make_layer(kv_cache_dtype=cache, **arguments)
        set_scale(layer, scale)
        return layer, make_builder(layer, config)

    return both


def set_scale(layer, scale):
    layer._k_scale.fill_(scale)
    layer._k_scale_float = scale


def relative_rmse(out, exact):
    return ((out.double() - exact).pow(2).mean() / exact.pow(2).mean()).sqrt().item()


@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("lengths, s_q, arguments", [
    (LENGTHS, 1, {}),
    ([2048], 1, {}),
    ([70, 129, 4], 4, SPECULATIVE),
    ([300, 3], 2, SPECULATIVE),
    ([700, 300], 37, {}),
    ([2048], 128, SPECULATIVE),
], ids=str)  # fmt: skip
def test_layer_decodes_as_exactly_as_torch(make_fp8, cache, lengths, s_q, arguments):
    layer, builder = make_fp8(cache=cache, **arguments)
    problem = Problem(lengths, s_q, kv_scale=KV_SCALE)
    step = builder.build(0, problem.common_metadata())
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


def test_a_scale_that_vllm_sets_later_is_used(make_fp8):
    """The kernel reads it on the device, at the address that CUDA graphs hold."""
    layer, builder = make_fp8(1.0)
    problem = Problem([129, 70], 1, kv_scale=0.7)
    step = builder.build(0, problem.common_metadata())
    before = decode(layer, problem, step)
    set_scale(layer, 0.7)
    after = decode(layer, problem, step)
    assert not torch.equal(before, after)
    assert_as_exact_as_torch(after, problem, layer.kv_b_proj.weight)


def recorded(layer, problem, step, monkeypatch):
    """What one decode gives to the kernels: keywords, and q."""
    calls, given = [], []
    mla_decode, forward_mqa = impl.mla_decode, layer.impl.forward_mqa
    monkeypatch.setattr(
        impl,
        "mla_decode",
        lambda q, cache, *rest, **more: calls.append(more | {"q": q}) or mla_decode(q, cache, *rest, **more),
    )
    monkeypatch.setattr(layer.impl, "forward_mqa", lambda q, *rest: given.append(q) or forward_mqa(q, *rest))
    out = decode(layer, problem, step)
    return calls[0], given[0], out


def test_queries_and_scale_reach_the_kernel_as_they_are(make_fp8, monkeypatch):
    """bfloat16 queries, without a copy; the scale as a tensor on the device."""
    layer, builder = make_fp8()
    assert layer.impl.supports_quant_query_input is False
    problem = Problem(LENGTHS, 1, kv_scale=KV_SCALE)
    call, given, _ = recorded(layer, problem, builder.build(0, problem.common_metadata()), monkeypatch)
    for vllms, passed_on in zip(given, (call["q"], call["q_rope"]), strict=True):
        assert passed_on.dtype == torch.bfloat16 and passed_on.data_ptr() == vllms.data_ptr()
    assert call["kv_scale"].data_ptr() == layer._k_scale.data_ptr() and call["kv_scale"].dtype == torch.float32
    assert not call["fp8_math"]


@pytest.mark.parametrize(
    "s_q, arguments", [(1, {}), (4, SPECULATIVE), (20, {})], ids=["decode", "speculative", "short prompts"]
)
def test_fp8_math_is_as_exact_as_its_types_allow(make_fp8, s_q, arguments):
    """At most twice the error of attention in float64 with queries and probabilities rounded to e4m3.

    A query is scaled to e4m3's range by its largest element, probabilities by the largest one of a row.
    """
    layer, builder = make_fp8(**arguments, **FP8_MATH)
    assert layer.impl.supports_quant_query_input is False
    problem = Problem([300, 129], s_q, kv_scale=KV_SCALE)
    random = torch.Generator().manual_seed(7)
    q = torch.randn(problem.tokens, HEADS, LATENT + ROPE, generator=random).bfloat16()
    step = builder.build(0, problem.common_metadata())
    out, lse = layer.impl.forward_mqa(q, problem.cache.view(FP8), step, layer)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    exact, rounded = (attention_of(q, problem, round_to) for round_to in (torch.float64, FP8))
    error, allowed = (relative_rmse(value, exact[0]) for value in (out, rounded[0]))
    assert allowed / 2 <= error <= 2 * allowed, "less than half: the math was not FP8"
    assert (lse - exact[1]).abs().max() <= 2 * (rounded[1] - exact[1]).abs().max()


def attention_of(q, problem, round_to):
    """Output and log-sum-exp of attention in float64 in the latent space, queries and probabilities rounded."""
    largest = q.double().abs().amax(-1, keepdim=True) / 256
    q = (q.double() / largest).to(round_to).double() * largest
    out, lse = [], []
    rows_of_q = iter(q)
    for rows, query_len in zip(problem.kv, problem.query_lens, strict=True):
        for later in reversed(range(query_len)):
            keys = rows[: len(rows) - later]
            scores = next(rows_of_q) @ keys.T * SCALE
            p = (256 * (scores - scores.amax(-1, keepdim=True)).exp()).to(round_to).double()
            out.append(p @ keys[:, :LATENT] / p.sum(-1, keepdim=True))
            lse.append(scores.logsumexp(-1))
    return torch.stack(out), torch.stack(lse)


@pytest.mark.parametrize("value", [1, "true", "yes", None])
def test_fp8_math_is_on_or_off(make_layer, value):
    for cache in ("fp8", "auto"):
        with pytest.raises(ValueError, match=f"additional_config: etap_fp8_math: .*got {value!r}"):
            make_layer(kv_cache_dtype=cache, additional_config={"etap_fp8_math": value})


def test_a_mistyped_option_is_refused_and_other_plugins_options_are_not(make_layer):
    with pytest.raises(ValueError, match="additional_config: .*got etap_fp8_mat"):
        make_layer(additional_config={"etap_fp8_mat": True})
    make_layer(additional_config={"gdn_prefill_backend": "triton"})


@pytest.mark.parametrize("flags", [["--additional-config", '{"etap_fp8_math": true}'],
                                   ["--additional-config.etap_fp8_math", "true"]], ids=len)  # fmt: skip
def test_all_ranks_get_the_flag_with_the_configuration(model_directory, flags):
    """vLLM pickles it for its workers; their environment has no effect."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    command = ["--model", str(model_directory), "--attention-backend", "ETAP", "--skip-tokenizer-init", *flags]
    config = EngineArgs.from_cli_args(parser.parse_args(command)).create_engine_config()
    assert wants_fp8_math(pickle.loads(pickle.dumps(config)))


def test_fp8_math_is_for_fp8_caches(make):
    layer, builder = make(**FP8_MATH)
    problem = Problem(LENGTHS, 1)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


def test_a_layer_may_be_left_out_of_fp8(make_fp8):
    """`--kv-cache-dtype-skip-layers 0`: this layer's cache stays bfloat16."""
    layer, builder = make_fp8(kv_cache_dtype_skip_layers=["0"])
    assert layer.kv_cache_dtype == "auto"
    problem = Problem(LENGTHS, 1)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize("options, math", [({}, "float16"), (FP8_MATH, "FP8 (e4m3)")])
def test_the_log_names_cache_and_math(make_fp8, monkeypatch, options, math):
    lines = []
    # Real code logs it once per process, perhaps in an earlier test.
    monkeypatch.setattr(log.logger, "info_once", lines.append)
    make_fp8(**options)
    assert lines[0] == f"ETAP decodes: KV cache FP8 (e4m3), math {math}"


def test_schedules_and_pages_are_for_fp8_rows(make_fp8):
    _, builder = make_fp8()
    assert all(schedule.fp8_cache for schedule in builder.schedules)
    assert builder.kv_cache_spec.page_size_bytes == BLOCK * (LATENT + ROPE)

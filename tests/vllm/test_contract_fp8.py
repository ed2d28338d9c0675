"""vLLM's own MLA layer with an FP8 KV cache around our backend, on CPU tensors: values, scales, queries and refusals.

The truth is attention on what the cache's bytes stand for. Writing the cache and prefill, which reads it, need a GPU.
"""

import pickle

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker import workspace

from etap_backend.vllm import impl, log
from etap_backend.vllm.policy import wants_fp8_math
from support.vllm_layer import (
    BLOCK,
    CPU,
    FP8,
    HEADS,
    KV_SCALE,
    LATENT,
    LENGTHS,
    NAME,
    NOPE,
    ROPE,
    SCALE,
    SPECULATIVE,
    VALUE,
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


@pytest.mark.parametrize("scale", [1.0, 0.02, 7.0])
def test_values_are_what_is_stored_times_the_scale(make_fp8, scale):
    layer, builder = make_fp8(scale)
    problem = Problem([129, 70], 1, kv_scale=scale)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


def test_a_scale_that_vllm_sets_later_counts(make_fp8):
    """vLLM 0.26's --calculate-kv-scales writes it in the first step, after CUDA graphs have taken its address."""
    layer, builder = make_fp8(1.0)
    problem = Problem([129, 70], 1, kv_scale=0.7)
    step = builder.build(0, problem.common_metadata())
    before = decode(layer, problem, step)
    if hasattr(layer, "calc_kv_scales"):
        layer.calc_kv_scales(problem.q, torch.full((3, LATENT), 0.7 * layer.k_range.item()), torch.ones(3, ROPE))
    else:
        set_scale(layer, 0.7)
    assert layer._k_scale.item() == pytest.approx(0.7)
    after = decode(layer, problem, step)
    assert not torch.equal(before, after)
    assert_as_exact_as_torch(after, problem, layer.kv_b_proj.weight)


def test_the_cache_takes_half_the_bytes(make, make_fp8):
    _, builder = make_fp8()
    assert builder.kv_cache_spec.block_size == BLOCK
    assert builder.kv_cache_spec.page_size_bytes == BLOCK * (LATENT + ROPE)


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
    """bfloat16 queries, without a copy; the scale's tensor, so that nothing waits for its value."""
    layer, builder = make_fp8()
    assert layer.impl.supports_quant_query_input is False
    problem = Problem(LENGTHS, 1, kv_scale=KV_SCALE)
    call, given, _ = recorded(layer, problem, builder.build(0, problem.common_metadata()), monkeypatch)
    for theirs, ours in zip(given, (call["q"], call["q_rope"]), strict=True):
        assert ours.dtype == torch.bfloat16 and ours.data_ptr() == theirs.data_ptr()
    assert call["kv_scale"].data_ptr() == layer._k_scale.data_ptr() and call["kv_scale"].dtype == torch.float32
    assert not call["fp8_math"]


@pytest.mark.parametrize(
    "s_q, arguments", [(1, {}), (4, SPECULATIVE), (20, {})], ids=["decode", "speculative", "short prompts"]
)
def test_fp8_math_is_as_exact_as_its_types_allow(make_fp8, s_q, arguments):
    """At most twice the error of attention in float64 that rounds to e4m3 what the kernel does: queries, probabilities.

    Queries are rounded after their largest element was scaled to e4m3's range, probabilities from 1 downwards.
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
    assert allowed / 2 <= error <= 2 * allowed, "half of it must be there, or the math was another one"
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
        with pytest.raises(ValueError, match=f"additional_config: etap_fp8_math: wanted true or false, got {value!r}"):
            make_layer(kv_cache_dtype=cache, additional_config={"etap_fp8_math": value})


def test_a_mistyped_option_is_refused_and_those_of_others_are_not(make_layer):
    with pytest.raises(ValueError, match="additional_config: wanted etap_fp8_math at most, got etap_fp8_mat"):
        make_layer(additional_config={"etap_fp8_mat": True})
    make_layer(additional_config={"gdn_prefill_backend": "triton"})


@pytest.mark.parametrize("flags", [["--additional-config", '{"etap_fp8_math": true}'],
                                   ["--additional-config.etap_fp8_math", "true"]], ids=len)  # fmt: skip
def test_all_ranks_get_the_flag_with_the_configuration(model_directory, flags):
    """What vLLM pickles for its workers has it, and their environment has no part in it."""
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
    # Real code says it once a process, and an earlier test may have been the one.
    monkeypatch.setattr(log.logger, "info_once", lines.append)
    make_fp8(**options)
    assert lines[0] == f"ETAP decodes: KV cache FP8 (e4m3), math {math}"


def test_batch_padded_for_a_cuda_graph_gives_zeros_for_the_padding(make_fp8):
    layer, builder = make_fp8(**SPECULATIVE)
    problem = Problem([70, 129, 0, 0], 4, kv_scale=KV_SCALE)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)
    assert not out[8:].any()


def test_cache_blocks_may_lie_apart(make_fp8):
    layer, builder = make_fp8()
    problem = Problem([300, 129], 1, kv_scale=KV_SCALE)
    apart = torch.full((len(problem.cache), 3, BLOCK, LATENT + ROPE), 0x7F, dtype=torch.uint8)
    apart[:, 1] = problem.cache
    problem.cache = apart[:, 1]
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize("heads", [8, 128])
def test_other_numbers_of_heads(make_fp8, heads):
    layer, builder = make_fp8(heads=heads)
    assert all(buffers.fp8_cache for buffers in builder.schedules), "which says how rows lie on an H20"
    problem = Problem([70, 200], 1, heads=heads, kv_scale=KV_SCALE)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


def test_batch_invariance_gives_a_request_the_same_bits_in_any_company(make_fp8, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, builder = make_fp8()
    problem = Problem([2300, 64, 129], 1, kv_scale=KV_SCALE)
    together = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert builder.schedules[0].fixed_pieces > 1
    for requests in ([0], [2, 0], [1, 2]):
        part = Problem([problem.lengths[request] for request in requests], 1)
        part.q, part.cache, part.block_table = problem.q[requests], problem.cache, problem.block_table[requests]
        assert torch.equal(decode(layer, part, builder.build(0, part.common_metadata())), together[requests])


def test_a_prefix_that_requests_share_is_read_by_each(make_fp8):
    layer, builder = make_fp8()
    problem = Problem([192, 192, 70], 1, kv_scale=KV_SCALE)
    problem.kv[1][:128] = problem.kv[0][:128]
    problem.block_table[1, :2] = problem.block_table[0, :2]
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize(
    "arguments, s_q", [({}, 1), (SPECULATIVE, 4), ({}, 128)], ids=["decode", "speculative", "short prompts"]
)
def test_workspace_is_claimed_while_vllm_measures_memory(make_fp8, arguments, s_q):
    layer, builder = make_fp8(**arguments)
    q = torch.zeros(4, HEADS, NOPE + ROPE, dtype=torch.bfloat16)
    layer.forward_impl(q, q, q, torch.empty(0), None, output=torch.zeros(4, HEADS * VALUE, dtype=torch.bfloat16))
    workspace.lock_workspace()
    again = type(builder)(builder.kv_cache_spec, [NAME], builder.vllm_config, CPU)
    problem = Problem([70, 129], s_q, kv_scale=KV_SCALE)
    decode(layer, problem, again.build(0, problem.common_metadata()))

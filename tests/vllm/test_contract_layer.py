"""vLLM's own MLA layer, metadata builder and workspace manager around our backend, on CPU tensors.

The reference executor stands in for the kernels; writing the cache, prefill, real CUDA graphs and memory need a GPU and
are not tested here.
"""

import pytest
import torch
from layer_cases import (
    BLOCK,
    CPU,
    HEADS,
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
    empty_share,
    make_builder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker import workspace

from etap_backend.vllm import impl
from etap_backend.vllm.metadata import claim_workspace

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_workspaces")


@pytest.mark.parametrize("lengths, s_q, arguments", [
    (LENGTHS, 1, {}),
    ([2048], 1, {}),
    ([70, 129, 4], 4, SPECULATIVE),
    ([70, 129, 1], 1, SPECULATIVE),
    ([300, 3], 2, SPECULATIVE),
], ids=str)  # fmt: skip
def test_layer_decodes_as_exactly_as_torch(make, lengths, s_q, arguments):
    layer, builder = make(**arguments)
    problem = Problem(lengths, s_q)
    step = builder.build(0, problem.common_metadata())
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (len(lengths), problem.tokens, 0)
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


def test_block_size_and_page_bytes(make):
    layer, builder = make()
    assert builder.kv_cache_spec.block_size == BLOCK
    assert builder.kv_cache_spec.page_size_bytes == BLOCK * (LATENT + ROPE) * 2


def test_batch_padded_for_a_cuda_graph_gives_zeros_for_the_padding(make):
    layer, builder = make(**SPECULATIVE)
    problem = Problem([70, 129, 0, 0], 4)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)
    assert not out[8:].any()


def test_query_reaches_the_kernel_without_a_copy(make, monkeypatch):
    layer, builder = make()
    problem = Problem(LENGTHS, 1)
    given, passed = [], []
    forward_mqa, mla_decode = layer.impl.forward_mqa, impl.mla_decode
    monkeypatch.setattr(layer.impl, "forward_mqa", lambda q, *rest: given.append(q) or forward_mqa(q, *rest))
    monkeypatch.setattr(
        impl, "mla_decode", lambda q, *rest, **more: passed.append((q, more["q_rope"])) or mla_decode(q, *rest, **more)
    )
    decode(layer, problem, builder.build(0, problem.common_metadata()))
    for theirs, ours in zip(given[0], passed[0], strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
        assert (ours.stride(0), *ours.stride()[2:]) == theirs.stride()
    assert passed[0][1].data_ptr() == problem.q[..., NOPE:].data_ptr()


def test_query_in_one_tensor_gives_the_same(make):
    layer, builder = make()
    problem = Problem(LENGTHS, 1)
    step = builder.build(0, problem.common_metadata())
    q = torch.randn(3, HEADS, LATENT + ROPE).bfloat16()
    whole = layer.impl.forward_mqa(q, problem.cache, step, layer)
    split = layer.impl.forward_mqa(q.split([LATENT, ROPE], dim=-1), problem.cache, step, layer)
    assert [tuple(part.shape) for part in whole] == [(3, HEADS, LATENT), (3, HEADS)]
    assert whole[0].is_contiguous() and whole[1].is_contiguous() and whole[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def test_shares_of_a_context_merge_by_natural_log_sum_exp(make):
    """What vLLM does with decode context parallelism: each rank's output weighs exp(lse), an empty share nothing."""
    layer, builder = make()
    assert layer.impl.can_return_lse_for_decode and layer.impl.supports_dcp and layer.impl.lse_base_on_e
    q = torch.randn(1, HEADS, LATENT + ROPE).bfloat16()
    problem = Problem([192], 1)
    whole, whole_lse = layer.impl.forward_mqa(q, problem.cache, builder.build(0, problem.common_metadata()), layer)
    parts = []
    for share in (problem.kv[0][:64], problem.kv[0][64:], problem.kv[0][:0]):
        problem.lengths = [len(share)]
        problem.cache[problem.block_table[0, : len(share) // BLOCK]] = share.view(-1, BLOCK, LATENT + ROPE)
        step = builder.build(0, problem.common_metadata() if len(share) else empty_share(problem))
        parts.append(layer.impl.forward_mqa(q, problem.cache, step, layer))
    lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in parts]), dim=0)
    merged = sum(out.float() * (part_lse - lse).exp()[..., None] for out, part_lse in parts)
    assert parts[2][1].isneginf().all() and not parts[2][0].any()
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, whole.float(), rtol=2e-2, atol=2e-2)


def test_prompts_stay_with_vllms_prefill(make):
    _, builder = make(**SPECULATIVE)
    assert builder.reorder_batch_threshold == 4
    problem = Problem([70, 129], 1)
    step = builder.build(0, problem.common_metadata(prefill_lengths=[40, 9]))
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (2, 2, 2)
    assert step.decode.seq_lens.tolist() == [70, 129]
    assert (step.decode.schedule.batch, step.decode.schedule.s_q) == (2, 1)


def test_without_speculation_only_single_tokens_are_decodes(make):
    _, builder = make()
    assert builder.reorder_batch_threshold == 1
    step = builder.build(0, Problem([70], 1).common_metadata(prefill_lengths=[2]))
    assert (step.num_decodes, step.num_prefills) == (1, 1)


def test_uneven_query_lengths_are_refused(make):
    _, builder = make(**SPECULATIVE)
    common = Problem([70, 129], 2).common_metadata()
    common.num_actual_tokens = 3
    with pytest.raises(ValueError, match="num_decode_tokens: wanted the same number"):
        builder.build(0, common)


@pytest.mark.parametrize("s_q, arguments", [(1, {}), (4, SPECULATIVE)], ids=["decode", "speculative"])
def test_metadata_captured_in_a_cuda_graph_serves_later_steps(make, s_q, arguments):
    """A graph keeps addresses and host values of the capture; later steps only rebuild and overwrite the inputs."""
    layer, builder = make(**arguments)
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    common = Problem([4, 4, 4], s_q).common_metadata()
    captured = builder.build_for_cudagraph_capture(common)
    schedule = captured.decode.schedule
    kept = (schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions)
    later = Problem([700, 129, 64], s_q)
    blocks = torch.zeros(3, 11, dtype=torch.int32)
    blocks[:, : later.block_table.shape[1]] = later.block_table
    common.seq_lens.copy_(torch.tensor(later.lengths))
    captured.decode.block_table = blocks
    rebuilt = builder.build(0, common)
    assert rebuilt.decode.schedule is schedule
    assert (schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions) == kept
    assert captured.decode.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert_as_exact_as_torch(decode(layer, later, captured), later, layer.kv_b_proj.weight)


def test_draft_steps_plan_again_from_the_advanced_lengths(make):
    layer, builder = make()
    assert builder.supports_draft_decode_metadata_update
    problem = Problem([640, 129], 1)
    common = problem.common_metadata()
    common.seq_lens.copy_(torch.tensor([1, 1]))
    step = builder.build(0, common)
    common.seq_lens.copy_(torch.tensor(problem.lengths))
    builder.update_draft_decode_metadata(step)
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize("arguments, s_q", [({}, 1), (SPECULATIVE, 4)], ids=["decode", "speculative"])
def test_workspace_is_claimed_while_vllm_measures_memory(make_layer, arguments, s_q):
    """After the profile run, in which there is no metadata, no decode may ask for more."""
    layer, config = make_layer(**arguments)
    output = torch.zeros(4, HEADS * VALUE, dtype=torch.bfloat16)
    q = torch.zeros(4, HEADS, NOPE + ROPE, dtype=torch.bfloat16)
    layer.forward_impl(q, q, q, torch.empty(0), None, output=output)
    workspace.lock_workspace()
    builder = make_builder(layer, config)
    assert builder.schedule.num_sms == current_platform.num_compute_units()
    problem = Problem([70, 129], s_q)
    decode(layer, problem, builder.build(0, problem.common_metadata()))
    with pytest.raises(AssertionError, match="Workspace is locked"):
        claim_workspace(builder.schedule.workspace.numel() + 1)


def test_micro_batches_share_neither_schedule_nor_workspace(make, monkeypatch):
    layer, first = make()
    second = type(first)(first.kv_cache_spec, [NAME], first.vllm_config, CPU)
    problems = [Problem([700, 129], 1, seed=2), Problem([64, 300], 1, seed=3)]
    steps = [builder.build(0, p.common_metadata()) for builder, p in zip((first, second), problems, strict=True)]
    for micro_batch, (problem, step) in enumerate(zip(problems, steps, strict=True)):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda current=micro_batch: current)
        assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)
    a, b = (step.decode.schedule for step in steps)
    for name in ("work_ranges", "split_offsets", "workspace"):
        assert getattr(a, name).data_ptr() != getattr(b, name).data_ptr(), name


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"logits_soft_cap": 30.0}, "logits_soft_cap is not supported"),
        ({"sliding_window": 128}, "sliding_window is not supported"),
        ({"attn_type": "encoder_only"}, "attn_type: wanted decoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2 is not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype fp8_ds_mla is not supported"),
        ({"head_size": 320}, "head_dim 320 is not supported"),
        ({"kv_lora_rank": 256}, "v_head_dim 256 is not supported"),
    ],
    ids=str,
)
def test_implementation_refuses(make, changes, reason):
    layer, _ = make()
    arguments = {
        "num_heads": HEADS, "head_size": LATENT + ROPE, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": 512, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "qk_head_dim": NOPE + ROPE, "v_head_dim": VALUE, "kv_b_proj": layer.kv_b_proj,
    }  # fmt: skip
    type(layer.impl)(**arguments)
    with pytest.raises(NotImplementedError, match=f"ETAP: {reason}"):
        type(layer.impl)(**(arguments | changes))

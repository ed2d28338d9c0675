"""vLLM's own MLA layer, metadata builder and workspace manager around ETAP's backend, on CPU tensors.

The library's CPU functions stand in for the kernels. Writing the cache, prefill, real CUDA graphs and memory need a GPU
and are not tested here.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker import workspace

from etap_backend.short_prompts import MAX_RUNS, SHORT_PROMPT_TOKENS
from etap_backend.vllm import impl, log
from etap_backend.vllm.metadata import claim_workspace
from etap_backend.vllm.policy import Policy
from etap_backend.vllm.step_cuts import cut, longest_decode
from support.vllm_layer import (
    CACHES,
    CPU,
    HEADS,
    LATENT,
    LENGTHS,
    NAME,
    NOPE,
    ROPE,
    SPECULATIVE,
    VALUE,
    Problem,
    assert_as_exact_as_torch,
    decode,
    implementation_arguments,
    make_builder,
)

H200_SMS = 132

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


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths, s_q, arguments, invariant", [
    ([70, 129, 1, 16], 1, {}, "0"),
    ([2048], 1, {}, "0"),
    ([70, 129, 1], 1, {"heads": 128}, "0"),
    ([700, 300], 37, {}, "0"),  # short prompts
    ([700, 129, 300, 64], [1, 4, 37, 37], SPECULATIVE, "0"),
    ([70, 33, 300, 5, 17, 2000], [4, 1, 4, 2, 1, 3], SPECULATIVE, "0"),  # token by token
    ([2000, 64, 129], [4, 1, 3], SPECULATIVE, "1"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("block", [16, 32])
def test_blocks_of_other_sizes(make, monkeypatch, block, lengths, s_q, arguments, invariant, cache):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    layer, builder = make(block_size=block, kv_cache_dtype=cache, **arguments)
    layer._k_scale.fill_(CACHES[cache] or 1.0)
    assert builder.kv_cache_spec.block_size == builder.page_size == block
    problem = Problem(lengths, s_q, heads=arguments.get("heads", HEADS), kv_scale=CACHES[cache], block=block)
    step = builder.build(0, problem.common_metadata())
    assert (step.num_decodes, step.num_prefills) == (len(lengths), 0)
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


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
    for vllms, passed_on in zip(given[0], passed[0], strict=True):
        assert passed_on.data_ptr() == vllms.data_ptr()
        assert (passed_on.stride(0), *passed_on.stride()[2:]) == vllms.stride()
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


@pytest.mark.parametrize("lengths, s_q", [
    ([700, 300], 37),
    ([2048], 128),
    ([1999, 128, 129], 128),
    ([64, 2, 65], 2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("arguments", [{}, SPECULATIVE], ids=["plain", "speculative"])
def test_short_prompts_are_decodes_as_exact_as_torch(make, lengths, s_q, arguments):
    """Over a cached prefix, or over none where the length is s_q; each sees the prefix, and its own tokens causally."""
    layer, builder = make(**arguments)
    assert type(builder).reorder_batch_threshold == builder.reorder_batch_threshold == SHORT_PROMPT_TOKENS == 128
    problem = Problem(lengths, s_q)
    step = builder.build(0, problem.common_metadata())
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (len(lengths), problem.tokens, 0)
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize("context", [0, 200])
@pytest.mark.parametrize("s_q, others", [(1, [137]), ([1, 37], [1000, 37]), (37, [136]), (37, [500, 37])], ids=str)
def test_decode_and_prefill_share_a_step(make, monkeypatch, context, s_q, others):
    """Everything before the first long prompt is decoded; vLLM's prefill, which needs a GPU, gets all other tokens."""
    layer, builder = make()
    problem = Problem([700, 130], s_q)
    step = builder.build(0, problem.common_metadata(others, context))
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (2, problem.tokens, len(others))
    q = torch.cat([problem.q, torch.randn(sum(others), *problem.q.shape[1:]).bfloat16()])
    prefilled = []

    def forward_mha(q, *arguments, output, **more):
        prefilled.append(q)
        output.fill_(7)

    monkeypatch.setattr(layer.impl, "forward_mha", forward_mha)
    output = torch.full((len(q), HEADS * VALUE), float("nan"), dtype=torch.bfloat16)
    unused = torch.empty(len(q), 0)
    layer.forward_impl(q, unused, unused, problem.cache, step, output=output)
    assert_as_exact_as_torch(output[: problem.tokens], problem, layer.kv_b_proj.weight)
    assert torch.equal(prefilled[0], q[problem.tokens :]) and (output[problem.tokens :] == 7).all()


@pytest.mark.parametrize("heads, tokens", [(8, 128), (16, 128), (24, 85), (32, 64), (64, 32), (128, 16)])
def test_more_heads_take_shorter_prompts(make, heads, tokens):
    """At most 2048 rows per request."""
    layer, builder = make(heads=heads)
    assert builder.reorder_batch_threshold == builder.schedules[0].max_s_q == tokens
    problem = Problem([300, tokens], tokens, heads=heads)
    step = builder.build(0, problem.common_metadata())
    assert step.num_decode_tokens == 2 * tokens
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)
    longer = builder.build(0, Problem([tokens + 1], tokens + 1, heads=heads).common_metadata())
    assert (longer.num_decodes, longer.num_prefills) == (0, 1)


def starts_of(query_lens):
    return np.array([0, *itertools.accumulate(query_lens)], dtype=np.int32)


@pytest.mark.parametrize("query_lens, tokens, wanted", [
    ([1, 1, 1], 3, [1, 1, 1]),
    ([2, 2], 4, [2, 2]),
    ([1, 1, 0, 0], 4, [1, 1, 1, 1]),  # a graph's padding: rows of the queries, but no tokens
    ([2, 2, 0, 0], 8, [2, 2, 2, 2]),
    ([2, 2, 0, 0], 4, [2, 2]),  # not four requests of one token
    ([4, 0], 4, [4]),
    ([0, 0], 2, [1, 1]),
    ([1, 3], 4, [1, 3]),  # not two of two
    ([3, 1, 2], 6, [3, 1, 2]),
    ([3, 1], 8, [3, 1]),  # rows of no request
    ([3, 3], 8, [3, 3]),
], ids=str)  # fmt: skip
def test_requests_are_told_from_their_own_query_lengths(query_lens, tokens, wanted):
    runs = cut(starts_of(query_lens), tokens, verified=4)
    assert [run.s_q for run in runs for _ in range(run.requests.start, run.requests.stop)] == wanted
    assert [run.tokens.stop - run.tokens.start for run in runs] == [
        run.s_q * (run.requests.stop - run.requests.start) for run in runs
    ]


@pytest.mark.parametrize("query_lens, tokens", [([1, 3], 3), ([0, 1], 2), ([2, 0, 1], 3)], ids=str)
def test_more_tokens_than_rows_and_gaps_are_refused(query_lens, tokens):
    with pytest.raises(ValueError, match=f"query_start_loc_cpu: wanted requests of {tokens} query tokens at most"):
        cut(starts_of(query_lens), tokens, verified=4)


@pytest.mark.parametrize("query_lens, verified, wanted, longest", [
    ([1, 1, 1], 1, [(3, 1)], 128),
    ([1, 1, 37, 37, 12], 1, [(2, 1), (2, 37), (1, 12)], 128),
    ([1, 4, 37, 90], 4, [(1, 1), (1, 4), (1, 37), (1, 90)], 128),
    ([1, 5, 6, 7, 90], 1, [(1, 1), (1, 5), (1, 6), (1, 7)], 89),  # the fifth run is left to prefill
    ([1, 5, 90, 7, 6], 1, [(1, 1), (1, 5)], 89),
    ([90, 5, 80, 7, 6], 1, [], 89),
    ([1, 5, 6, 7, 129, 8], 1, [(1, 1), (1, 5), (1, 6), (1, 7)], 128),
    ([4, 1, 4, 4, 1, 3], 4, [(6, 0)], 128),  # drafts of any number: one call
    ([4, 1, 4, 4, 1, 37, 37], 4, [(5, 0), (2, 37)], 128),
    ([4, 1, 4, 1, 4, 37, 38, 39, 40], 4, [(5, 0), (1, 37), (1, 38), (1, 39)], 39),
    ([4, 4, 0, 0], 4, [(2, 4)], 128),
    ([4, 1, 4, 1, 4, 2, 37, 0], 4, [(6, 0), (1, 37)], 128),
], ids=str)  # fmt: skip
def test_a_step_is_cut_into_few_runs(query_lens, verified, wanted, longest):
    starts = starts_of(query_lens)
    assert longest_decode(cut(starts, starts[-1], verified), 128) == longest
    decoded = starts_of(list(itertools.takewhile(lambda n: n <= longest, query_lens)))
    runs = cut(decoded, decoded[-1], verified) if len(decoded) > 1 else []
    assert [(run.requests.stop - run.requests.start, run.s_q) for run in runs] == wanted
    assert len(runs) <= MAX_RUNS
    tokens = [0, *itertools.accumulate(query_lens)]
    for run in runs:
        assert (run.tokens.start, run.tokens.stop) == (tokens[run.requests.start], tokens[run.requests.stop])


@pytest.mark.parametrize("query_lens, arguments, early_loads", [
    ([1, 1, 37], {}, [True, False]),
    ([1, 128, 37, 2], {}, [True, False, False, False]),
    ([37, 90], {}, [False, False]),
    ([4, 4, 1, 37], SPECULATIVE, [True, True, False]),
    ([1, 4, 1, 4, 2], SPECULATIVE, [False]),  # a token each
    ([4, 1, 4, 1, 4, 37, 5], SPECULATIVE, [False, False, False]),
], ids=str)  # fmt: skip
def test_requests_of_different_query_lengths_are_decodes(make, query_lens, arguments, early_loads):
    """Short prompts beside decodes, and drafts of different numbers, as with FLASH_ATTN_MLA."""
    layer, builder = make(**arguments)
    lengths = [700, 129, 300, 64, 1000, 65, 200][: len(query_lens)]
    problem = Problem([max(*pair) for pair in zip(lengths, query_lens, strict=True)], query_lens)
    step = builder.build(0, problem.common_metadata())
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (len(lengths), problem.tokens, 0)
    assert [call.early_loads for call in step.decode.calls] == early_loads
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


def test_what_few_calls_cannot_decode_is_prefilled(make):
    _, builder = make()
    problem = Problem([700, 129, 300, 64], [1, 1, 5, 6])
    step = builder.build(0, problem.common_metadata(prefill_lengths=[7, 8, 9]))
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (5, 20, 2)
    assert [call.schedule.s_q for call in step.decode.calls] == [1, 5, 6, 7]
    assert [call.early_loads for call in step.decode.calls] == [
        True,
        False,
        False,
        False,
    ]  # as decodes, not short prompts
    assert builder.reorder_batch_threshold == SHORT_PROMPT_TOKENS
    assert builder.build(0, Problem([200], 128).common_metadata()).num_decodes == 1


def test_calls_of_a_step_share_no_schedule(make):
    """All are planned before the first layer runs."""
    _, builder = make()
    runs = builder.build(0, Problem([700, 129, 300, 64], [1, 2, 3, 4]).common_metadata()).decode.calls
    for name in ("work_ranges", "split_offsets"):
        assert len({getattr(run.schedule, name).data_ptr() for run in runs}) == len(runs) == MAX_RUNS, name


def test_rows_of_no_request_are_zeros(make):
    """Rows that pad a step need not belong to requests that pad it."""
    layer, builder = make(**SPECULATIVE)
    problem = Problem([70, 129, 64], [4, 1, 3])
    common = problem.common_metadata()
    common.num_actual_tokens += 5
    step = builder.build(0, common)
    assert (step.num_decode_tokens, step.decode.num_tokens) == (13, 8)
    q = torch.randn(13, HEADS, LATENT + ROPE).bfloat16()
    out, lse = layer.impl.forward_mqa(q, problem.cache, step, layer)
    assert out[:8].all() and lse[:8].isfinite().all()
    assert not out[8:].any() and lse[8:].isneginf().all()


def test_a_workspace_that_vllm_replaces_is_not_used_again(make):
    """Until its graphs are captured vLLM may give the workspace's memory to others between any two calls."""
    layer, builder = make()
    problem = Problem([2000, 129], 1)
    step = builder.build(0, problem.common_metadata())
    decode(layer, problem, step)
    before = claim_workspace(builder.schedules[0].max_workspace_floats)
    claim_workspace(2 * before.numel())
    before.fill_(torch.nan)
    out = decode(layer, problem, step)
    assert before.isnan().all()
    assert_as_exact_as_torch(out, problem, layer.kv_b_proj.weight)


@pytest.mark.parametrize("s_q, arguments", [(1, {}), (4, SPECULATIVE)], ids=["decode", "speculative"])
def test_metadata_captured_in_a_cuda_graph_serves_later_steps(make, s_q, arguments):
    """A graph keeps addresses and host values of the capture; later steps only rebuild and overwrite the inputs."""
    layer, builder = make(**arguments)
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    common = Problem([4, 4, 4], s_q).common_metadata()
    captured = builder.build_for_cudagraph_capture(common)
    schedule = captured.decode.calls[0].schedule
    captured_plan = (schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions)
    later = Problem([700, 129, 64], s_q)
    blocks = torch.zeros(3, 11, dtype=torch.int32)
    blocks[:, : later.block_table.shape[1]] = later.block_table
    common.seq_lens.copy_(torch.tensor(later.lengths))
    captured.decode.calls = [dataclasses.replace(captured.decode.calls[0], block_table=blocks)]
    schedule = builder.build(0, common).decode.calls[0].schedule
    assert (schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr(), schedule.partitions) == captured_plan
    assert captured.decode.calls[0].seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert_as_exact_as_torch(decode(layer, later, captured), later, layer.kv_b_proj.weight)


@pytest.mark.parametrize("s_q, arguments", [(1, {}), (4, SPECULATIVE)], ids=["decode", "speculative"])
def test_a_graph_is_right_after_a_step_of_short_prompts(make_layer, s_q, arguments):
    """The prompts' step is not in a graph, and plans for more rows and another batch in the same buffers."""
    layer, config = make_layer(**arguments)
    layer.impl.reserve_workspace()
    workspace.lock_workspace()
    builder = make_builder(layer, config)
    later = Problem([700, 129, 64], s_q)
    common = later.common_metadata()
    captured = builder.build_for_cudagraph_capture(common)

    def planned(step):
        schedule = step.decode.calls[0].schedule
        addresses = schedule.work_ranges.data_ptr(), schedule.split_offsets.data_ptr()
        return addresses, (schedule.batch, schedule.s_q, schedule.partitions)

    prompts = Problem([2048, 1800], 128, seed=3)
    between = builder.build(0, prompts.common_metadata())
    out = decode(layer, prompts, between)
    assert_as_exact_as_torch(out, prompts, layer.kv_b_proj.weight)
    assert planned(between)[0] == planned(captured)[0] and planned(between)[1] != planned(captured)[1]
    assert planned(builder.build(0, common)) == planned(captured)
    assert_as_exact_as_torch(decode(layer, later, captured), later, layer.kv_b_proj.weight)


@pytest.mark.parametrize("s_q, arguments, invariant", [
    (1, {}, "0"),
    (1, SPECULATIVE, "1"),
    ([4, 2, 1], SPECULATIVE, "1"),  # token by token
], ids=["decode", "batch invariant", "token by token"])  # fmt: skip
def test_draft_steps_plan_again_from_the_advanced_lengths(make, monkeypatch, s_q, arguments, invariant):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    layer, builder = make(**arguments)
    assert builder.supports_draft_decode_metadata_update
    problem = Problem([640, 129, 5], s_q)
    common = problem.common_metadata()
    common.seq_lens.copy_(torch.tensor([4, 4, 4]))
    step = builder.build(0, common)
    common.seq_lens.copy_(torch.tensor(problem.lengths))
    builder.update_draft_decode_metadata(step)
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)


def test_one_token_per_request_is_decoded_with_vllms_own_table_and_lengths(make, monkeypatch):
    """A draft model's many steps fill no buffers."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    _, builder = make(**SPECULATIVE)
    common = Problem(LENGTHS, 1).common_metadata()
    decode_metadata = builder.build(0, common).decode
    (call,) = decode_metadata.calls
    assert decode_metadata.refill is None and (call.schedule.batch, call.schedule.s_q) == (3, 1)
    assert call.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert call.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    decode_metadata = builder.build(0, Problem([70, 129, 4], [1, 1, 2]).common_metadata()).decode
    (call,) = decode_metadata.calls
    assert decode_metadata.refill is not None and (call.schedule.batch, call.schedule.s_q) == (4, 1)


@pytest.mark.parametrize("arguments, s_q", [
    ({}, 1),
    ({}, 128),
    (SPECULATIVE, 4),
    (SPECULATIVE, 128),
    ({"heads": 8}, 128),
    ({"heads": 128}, 16),
], ids=str)  # fmt: skip
def test_workspace_is_claimed_while_vllm_measures_memory(make_layer, arguments, s_q):
    """After the profile run, in which there is no metadata, no decode may ask for more."""
    layer, config = make_layer(**arguments)
    heads = arguments.get("heads", HEADS)
    output = torch.zeros(4, heads * VALUE, dtype=torch.bfloat16)
    q = torch.zeros(4, heads, NOPE + ROPE, dtype=torch.bfloat16)
    layer.forward_impl(q, q, q, torch.empty(0), None, output=output)
    workspace.lock_workspace()
    builder = make_builder(layer, config)
    assert builder.schedules[0].num_sms == current_platform.num_compute_units()
    problem = Problem([700, 129], s_q, heads=heads)
    step = builder.build(0, problem.common_metadata())
    assert step.num_decode_tokens == problem.tokens
    assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)
    with pytest.raises(AssertionError, match="Workspace is locked"):
        claim_workspace(builder.schedules[0].max_workspace_floats + 1)


@pytest.mark.parametrize("heads", [8, 16, 32, 128])
@pytest.mark.parametrize("arguments", [{}, SPECULATIVE], ids=["plain", "speculative"])
def test_workspace_does_not_grow_with_the_batch(engine_config, heads, arguments):
    sizes = set()
    for requests in (1, 1024):
        config = engine_config(attention_backend="ETAP", max_num_seqs=requests, **arguments)
        sizes.add(4 * Policy.of(config, heads).workspace_floats(H200_SMS))
    assert len(sizes) == 1 and sizes.pop() < 64e6


def test_micro_batches_share_neither_schedule_nor_workspace(make, monkeypatch):
    layer, first = make()
    second = type(first)(first.kv_cache_spec, [NAME], first.vllm_config, CPU)
    problems = [Problem([700, 129], 1, seed=2), Problem([64, 300], 1, seed=3)]
    steps = [builder.build(0, p.common_metadata()) for builder, p in zip((first, second), problems, strict=True)]
    for micro_batch, (problem, step) in enumerate(zip(problems, steps, strict=True)):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda current=micro_batch: current)
        assert_as_exact_as_torch(decode(layer, problem, step), problem, layer.kv_b_proj.weight)
    a, b = (step.decode.calls[0].schedule for step in steps)
    for name in ("work_ranges", "split_offsets"):
        assert getattr(a, name).data_ptr() != getattr(b, name).data_ptr(), name
    claimed = []
    for micro_batch in range(2):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda current=micro_batch: current)
        claimed.append(claim_workspace(first.schedules[0].max_workspace_floats))
    assert claimed[0].data_ptr() != claimed[1].data_ptr()


@pytest.mark.parametrize("arguments, rows", [
    ({"block_size": 16, "heads": 32}, None),
    ({"heads": 128}, None),
    ({"block_size": 16, "heads": 64}, 64),
    ({"block_size": 32, **SPECULATIVE}, 64),
], ids=str)  # fmt: skip
def test_the_log_warns_of_small_blocks_for_many_rows(make, monkeypatch, arguments, rows):
    lines = []
    monkeypatch.setattr(log.logger, "warning_once", lines.append)
    make(**arguments)
    assert len(lines) == bool(rows)
    assert not rows or f"pages of {arguments['block_size']} tokens with {rows} query rows" in lines[0]


@pytest.mark.parametrize("changes, name", [
    ({"logits_soft_cap": 30.0}, "logits_soft_cap"), ({"sliding_window": 128}, "sliding_window"),
    ({"attn_type": "encoder_only"}, "attn_type"), ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
    ({"head_size": 320}, "head_dim"), ({"kv_lora_rank": 256}, "v_head_dim"),
], ids=str)  # fmt: skip
def test_the_implementation_refuses_by_name(make, changes, name):
    layer, _ = make()
    arguments = implementation_arguments(layer)
    type(layer.impl)(**arguments)
    with pytest.raises(NotImplementedError, match=f"ETAP: {name}"):
        type(layer.impl)(**(arguments | changes))

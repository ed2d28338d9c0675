"""Modes of vLLM with ETAP: CUDA graphs, caching, batch invariance, micro-batches, context parallelism, drafts.

On CPU tensors, with the library's CPU functions as kernels; graphs are not captured, weights not loaded.
"""

import re

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
from vllm.v1.attention import selector
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.worker import workspace

from etap_backend import DecodeSchedule
from etap_backend.vllm import impl, log, metadata
from etap_backend.vllm.metadata import claim_workspace
from etap_backend.vllm.policy import Policy
from etap_backend.vllm.sparse import ETAPSparseBackend
from support.cases import stacked_from
from support.vllm_layer import (
    BLOCK,
    CACHES,
    CPU,
    DCP_CONFIGURATIONS,
    DCP_STEPS,
    HEADS,
    LATENT,
    NAME,
    ROPE,
    SPECULATIVE,
    Problem,
    assert_as_exact_as_torch,
    decode,
    get_kv_cache_config_from_groups,
    make_builder,
)

ONE_DRAFT = {"speculative_config": SPECULATIVE["speculative_config"] | {"num_speculative_tokens": 1}}

pytestmark = pytest.mark.usefixtures("one_rank", "fresh_workspaces")


def weight_of(layer):
    return layer.kv_b_proj.weight


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("arguments, s_q", [({}, 1), (SPECULATIVE, 4)], ids=["decode", "speculative"])
def test_cuda_graph_mode_stays_what_was_asked(make, mode, arguments, s_q):
    _, builder = make(compilation_config={"cudagraph_mode": mode}, **arguments)
    compilation = builder.vllm_config.compilation_config
    support = type(builder)._cudagraph_support
    resolved = compilation.resolve_cudagraph_mode_and_sizes(support, "ETAPBackend", uniform_decode_query_len=s_q)
    assert resolved == CUDAGraphMode[mode]


@pytest.mark.parametrize("arguments, s_q, invariant", [
    ({}, 1, "0"),
    ({"block_size": 16}, 1, "0"),
    (SPECULATIVE, 4, "0"),
    (SPECULATIVE, 4, "1"),
], ids=["decode", "blocks of 16", "speculative", "token by token"])  # fmt: skip
def test_padding_of_a_graph_stays_zero_step_after_step(make, monkeypatch, arguments, s_q, invariant):
    """The same buffers serve a full batch and then a smaller one, padded to the size of the captured one."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    layer, builder = make(**arguments)
    for lengths in ([200, 300, 65, 70], [200, 0, 0, 0], [0, 0, 0, 0]):
        problem = Problem(lengths if any(lengths) else [1, 0, 0, 0], s_q, block=builder.page_size)
        common = problem.common_metadata()
        if not any(lengths):
            common.seq_lens.zero_()
            problem.lengths, problem.kv = lengths, [rows[:0] for rows in problem.kv]
        out = decode(layer, problem, builder.build(0, common))
        assert not out[sum(map(bool, lengths)) * s_q :].any()
        if any(lengths):
            assert_as_exact_as_torch(out, problem, weight_of(layer))


@pytest.mark.parametrize("block, shared", [(64, 128), (16, 144)], ids=str)
def test_a_prefix_that_requests_share_is_read_by_each(make, block, shared):
    """Prefix caching: two requests' block tables name the same blocks, and their own behind them."""
    layer, builder = make(block_size=block)
    problem = Problem([192, 192, 70], 1, block=block)
    problem.kv[1][:shared] = problem.kv[0][:shared]
    problem.block_table[1, : shared // block] = problem.block_table[0, : shared // block]
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, weight_of(layer))


@pytest.fixture
def shared_prefix(monkeypatch):
    """On an H200, however little a step shares."""
    monkeypatch.setenv("ETAP_SHARED_PREFIX", "1")
    for module in (impl, metadata):
        monkeypatch.setattr(module, "num_compute_units", lambda *_: H200_SMS)
    with stacked_from(0):
        yield


H200_SMS = 132
COMMON, SHARING = 1024, [1100, 1340, 1025, 1200, 1090, 1030, 129]


def sharing(lengths, s_q, **options):
    """A step whose requests begin with the first one's COMMON tokens, in its blocks."""
    problem = Problem(lengths, s_q, **options)
    for request, rows in enumerate(problem.kv[1:], 1):
        blocks = min(COMMON, len(rows)) // problem.block
        rows[: blocks * problem.block] = problem.kv[0][: blocks * problem.block]
        problem.block_table[request, :blocks] = problem.block_table[0, :blocks]
    return problem


def stacks(step):
    """Groups of requests whose common tiles the step's call reads once."""
    (call,) = step.decode.calls
    return 0 if call.schedule.shared is None else int(call.schedule.shared[-1, 0])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths, s_q, arguments, block", [
    (SHARING, 1, {}, BLOCK),
    (SHARING, 1, {"heads": 8}, 16),
    (SHARING, 2, ONE_DRAFT, BLOCK),
    (SHARING, [4, 1, 4, 2, 1, 3, 2], SPECULATIVE, BLOCK),  # token by token
], ids=str)  # fmt: skip
def test_a_shared_prefix_is_read_once(make, shared_prefix, cache, lengths, s_q, arguments, block):
    layer, builder = make(block_size=block, kv_cache_dtype=cache, **arguments)
    layer._k_scale.fill_(CACHES[cache] or 1.0)
    options = {"heads": arguments.get("heads", HEADS), "kv_scale": CACHES[cache], "block": block}
    for problem, shares in ((sharing(lengths, s_q, **options), True), (Problem(lengths, 1, **options), False)):
        step = builder.build(0, problem.common_metadata())
        assert (stacks(step) > 0) == shares
        assert_as_exact_as_torch(decode(layer, problem, step), problem, weight_of(layer))


@pytest.mark.parametrize("replay", ["build", "update_draft_decode_metadata"])
def test_a_graph_reads_what_later_steps_share(make, shared_prefix, replay):
    """It keeps the captured table's address, whose contents a plan outside of the graph, or inside, reads anew."""
    layer, builder = make()
    later = sharing(SHARING, 1)
    common = later.common_metadata()
    lengths, table = common.seq_lens.clone(), common.block_table_tensor.clone()
    common.seq_lens.fill_(4)
    common.block_table_tensor.zero_()
    captured = builder.build_for_cudagraph_capture(common)
    assert captured.decode.calls[0].block_table.data_ptr() == common.block_table_tensor.data_ptr()
    common.seq_lens.copy_(lengths)
    common.block_table_tensor.copy_(table)
    if replay == "build":
        assert builder.build(0, common).decode.calls[0].schedule == captured.decode.calls[0].schedule
    else:
        builder.update_draft_decode_metadata(captured)
    assert stacks(captured) > 0
    assert_as_exact_as_torch(decode(layer, later, captured), later, weight_of(layer))


@pytest.mark.parametrize("lengths, s_q, arguments", [
    ([70, 129, 300], [1, 37, 37], {}),
    (SHARING, [4, 1, 4, 2, 1, 3, 2], SPECULATIVE),
], ids=["short prompts", "token by token"])  # fmt: skip
def test_plans_are_made_of_the_tables_that_calls_read(make, monkeypatch, lengths, s_q, arguments):
    _, builder = make(block_size=16, **arguments)
    given, build = [], DecodeSchedule.build
    monkeypatch.setattr(DecodeSchedule, "build", lambda *of, **more: given.append(more) or build(*of, **more))
    step = builder.build(0, Problem(lengths, s_q, block=16).common_metadata())
    builder.update_draft_decode_metadata(step)
    tables = [call.block_table for call in step.decode.calls] * 2
    assert [more["page_size"] for more in given] == [16] * len(tables)
    for more, table in zip(given, tables, strict=True):
        found = more["block_table"]
        assert (found.data_ptr(), found.shape, found.stride()) == (table.data_ptr(), table.shape, table.stride())


def test_the_workspace_of_shared_prefixes_is_reserved_and_the_log_names_them(make_layer, monkeypatch, shared_prefix):
    lines, floats = [], {}
    monkeypatch.setattr(log.logger, "info_once", lines.append)
    for value in ("", "1"):
        monkeypatch.setenv("ETAP_SHARED_PREFIX", value)
        layer, config = make_layer(max_num_seqs=256)
        floats[value] = Policy.of(config, HEADS).workspace_floats(H200_SMS)
        assert ("shared prefixes read once" in lines[-1]) == bool(value)
    assert floats["1"] > floats[""]
    layer.impl.reserve_workspace()
    workspace.lock_workspace()
    builder, problem = make_builder(layer, config), sharing(SHARING, 1)
    assert builder.schedules[0].max_workspace_floats == floats["1"]
    step = builder.build(0, problem.common_metadata())
    assert stacks(step) > 0
    assert_as_exact_as_torch(decode(layer, problem, step), problem, weight_of(layer))


def test_shared_prefixes_are_refused_by_name(select_parallel, make_layer, monkeypatch, shared_prefix):
    selector._cached_get_attn_backend.cache_clear()  # which knows nothing of the configuration
    with pytest.raises(ValueError, match="ETAP_SHARED_PREFIX=1 is not supported with drafts in micro-batches"):
        make_layer(enable_dbo=True, all2all_backend="deepep_low_latency", **SPECULATIVE)
    most = r"max_num_seqs x \(1 \+ drafts\) 4100, wanted at most 4096"
    with pytest.raises(ValueError, match=f"ETAP_SHARED_PREFIX=1 is not supported with {most}"):
        make_layer(max_num_seqs=4100, max_num_batched_tokens=8192)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="ETAP_SHARED_PREFIX=1 is not supported with VLLM_BATCH_INVARIANT=1"):
        select_parallel()
    monkeypatch.setenv("ETAP_SHARED_PREFIX", "yes")
    with pytest.raises(ValueError, match="ETAP_SHARED_PREFIX: wanted 0 or 1, got 'yes'"):
        select_parallel()


def test_lengths_on_the_host_may_be_behind(make):
    """Asynchronous scheduling: the host has upper bounds only, the device has the truth."""
    layer, builder = make(async_scheduling=True)
    problem = Problem([70, 129], 1)
    common = problem.common_metadata()
    common.seq_lens_cpu_upper_bound += 17
    common.max_seq_len += 17
    out = decode(layer, problem, builder.build(0, common))
    assert_as_exact_as_torch(out, problem, weight_of(layer))


@pytest.mark.parametrize("lengths, s_q, arguments", [
    ([700, 129], 1, {}),
    ([70, 33, 300, 5, 17, 2000], [4, 1, 4, 2, 1, 3], SPECULATIVE),  # token by token
], ids=["decode", "drafts of different numbers"])  # fmt: skip
def test_buffers_may_lose_their_contents_between_steps(make, lengths, s_q, arguments):
    """Sleep mode frees what vLLM allocated with the KV cache, ETAP's buffers included, and loses the contents."""
    layer, builder = make(enable_sleep_mode=True, **arguments)
    problem = Problem(lengths, s_q)
    owners = [*builder.schedules, *filter(None, [builder._token_requests])]
    buffers = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    for contents in (2**31 - 1, -7):
        for buffer in buffers:
            buffer.fill_(contents)
        claim_workspace(builder.schedules[0].max_workspace_floats).fill_(torch.nan)
        out = decode(layer, problem, builder.build(0, problem.common_metadata()))
        assert_as_exact_as_torch(out, problem, weight_of(layer))


LAYERS = ["model.layers.1.self_attn.attn", NAME, "model.layers.2.self_attn.attn"]
"""Layers whose rows of a block lie side by side."""


def blocks_of_all_layers(layer, config, blocks, monkeypatch):
    """The caches that vLLM allocates in the layout that puts blocks first, and all layers into each."""
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.worker.utils import allocate_kv_cache

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    spec = layer.get_kv_cache_spec(config)
    supported = [each.name for each in get_supported_kv_cache_layouts([layer.get_attn_backend()])]
    layout = resolve_kv_cache_layout(config, [supported], [spec])
    memory = len(LAYERS) * blocks * spec.page_size_bytes
    kv_cache_config = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(LAYERS, spec)], memory)
    caches = allocate_kv_cache(kv_cache_config, CPU, layout, [BLOCK])
    return {name: cache.squeeze(1) for name, cache in caches.items()}


def test_layers_of_a_block_may_lie_side_by_side(make, monkeypatch):
    """In vLLM's own allocation for KV connectors, which move a block of all layers at once."""
    layer, builder = make()
    problem = Problem([300, 129], 1)
    caches = blocks_of_all_layers(layer, builder.vllm_config, len(problem.cache), monkeypatch)
    for name in LAYERS:
        caches[name].copy_(problem.cache if name == NAME else torch.nan)
    problem.cache = caches[NAME]
    row = LATENT + ROPE
    assert problem.cache.stride() == (len(LAYERS) * BLOCK * row, row, 1)
    out = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert_as_exact_as_torch(out, problem, weight_of(layer))


def test_nixl_joins_servers_whose_backends_have_one_name(make):
    """Prefill and decode compare a hash at their handshake; sparse attention's name is that of vLLM's own backend."""
    _, builder = make()
    config = builder.vllm_config
    (backend,) = get_current_attn_backends(config)
    hashes = [compute_nixl_compatibility_hash(config, name) for name in (backend.get_name(), "ETAP", "FLASH_ATTN_MLA")]
    assert hashes[0] == hashes[1] != hashes[2]
    assert ETAPSparseBackend.get_name() == FlashMLASparseBackend.get_name() == "FLASHMLA_SPARSE"


@pytest.fixture
def batch_invariant(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def test_batch_invariance_gives_a_request_the_same_bits_whatever_the_batch(make, batch_invariant):
    layer, builder = make()
    problem = Problem([2300, 64, 129, 1100], 1)
    together = decode(layer, problem, builder.build(0, problem.common_metadata()))
    assert builder.schedules[0].fixed_splits > 1
    offsets = builder.schedules[0].split_offsets[:5].tolist()
    assert offsets == [0, 3, 3, 3, 5], "37 and 18 tiles are cut, short requests not"
    for requests in ([0], [3, 0], [1, 2, 3]):
        part = Problem([problem.lengths[request] for request in requests], 1)
        part.q, part.cache = problem.q[requests], problem.cache
        part.block_table = problem.block_table[requests]
        common = part.common_metadata()
        assert torch.equal(decode(layer, part, builder.build(0, common)), together[requests])


def test_without_batch_invariance_the_batch_matters(make):
    layer, builder = make()
    problem = Problem([2300, 6000, 6000, 6000], 1)
    together = decode(layer, problem, builder.build(0, problem.common_metadata()))
    single = Problem([2300], 1)
    single.q, single.cache, single.block_table = problem.q[:1], problem.cache, problem.block_table[:1]
    assert not torch.equal(decode(layer, single, builder.build(0, single.common_metadata())), together[:1])


def test_batch_invariance_keeps_the_prefix_cache_and_its_workspace_is_reserved(make_layer, batch_invariant):
    layer, config = make_layer(enable_prefix_caching=True)
    assert layer.get_attn_backend().supports_batch_invariance()
    assert config.cache_config.enable_prefix_caching
    q = torch.zeros(4, HEADS, 192, dtype=torch.bfloat16)
    layer.forward_impl(q, q, q, torch.empty(0), None, output=torch.zeros(4, HEADS * 128, dtype=torch.bfloat16))
    workspace.lock_workspace()
    assert make_builder(layer, config).schedules[0].fixed_splits > 1


def test_batch_invariance_verifies_drafts_with_the_same_bits_whatever_the_batch(make, batch_invariant):
    """Each token is a request of its own: the numbers of drafts have no effect, the request's own neither."""
    layer, builder = make(**SPECULATIVE)
    lengths, query_lens = [2000, 64, 129, 1100, 5, 70], [4, 1, 3, 4, 1, 2]
    problem = Problem(lengths, query_lens)
    step = builder.build(0, problem.common_metadata())
    assert (step.num_decodes, len(step.decode.calls)) == (6, 1)
    together = decode(layer, problem, step)
    assert_as_exact_as_torch(together, problem, weight_of(layer))
    for requests in ([0], [3, 0], [2, 5, 1]):
        part = Problem([lengths[i] for i in requests], [query_lens[i] for i in requests])
        rows = torch.cat([torch.arange(problem.tokens).split(query_lens)[i] for i in requests])
        part.q, part.cache, part.block_table = problem.q[rows], problem.cache, problem.block_table[requests]
        assert torch.equal(decode(layer, part, builder.build(0, part.common_metadata())), together[rows])
    last = Problem([2000], 1)
    last.q, last.cache, last.block_table = problem.q[3:4], problem.cache, problem.block_table[:1]
    assert torch.equal(decode(layer, last, builder.build(0, last.common_metadata())), together[3:4])


@pytest.mark.parametrize("arguments, tokens", [({}, 1), (SPECULATIVE, 4)], ids=["plain", "speculative"])
def test_batch_invariance_leaves_short_prompts_to_prefill(make, batch_invariant, arguments, tokens):
    """Whether a prompt counts as a decode would depend on the other prompts' lengths."""
    layer, builder = make(**arguments)
    assert (builder.reorder_batch_threshold, builder.schedules[0].max_s_q) == (tokens, 1)
    for others in ([], [37], [40, 7]):
        step = builder.build(0, Problem([37], 37).common_metadata(others))
        assert (step.num_decodes, step.num_prefills) == (0, 1 + len(others))


@pytest.mark.parametrize("arguments, tokens", [({}, 1), (SPECULATIVE, 4)], ids=["plain", "speculative"])
def test_micro_batches_leave_short_prompts_to_prefill(make, arguments, tokens):
    """A prompt may hit blocks that another one of the step is writing, and vLLM separates what it counts as decodes."""
    _, builder = make(enable_dbo=True, all2all_backend="deepep_low_latency", **arguments)
    assert builder.vllm_config.parallel_config.use_ubatching
    assert builder.reorder_batch_threshold == builder.schedules[0].max_s_q == tokens
    assert builder.schedules[0].any_batch == (tokens > 1)


@pytest.mark.parametrize("drafts_of", [None, [(1, 8, 3), (9, 1024, 1)]], ids=["the same", "changing"])
def test_plans_are_alike_for_all_batches_where_the_number_of_drafts_changes(make, drafts_of):
    """The draft model's graph may be one for more requests than the target's step."""
    drafts = SPECULATIVE["speculative_config"] | {"num_speculative_tokens_per_batch_size": drafts_of}
    _, builder = make(speculative_config=drafts)
    assert all(buffers.any_batch == (drafts_of is not None) for buffers in builder.schedules)


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks):
    """Output and weight per configuration and step, for each of two ranks that share every context."""
    return on_two_ranks("dcp_rank")


@pytest.mark.parametrize("step", DCP_STEPS)
@pytest.mark.parametrize("configuration", DCP_CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_decode_context_parallelism_on_two_ranks_is_the_whole_attention(two_ranks, rank, configuration, step):
    """With drafts too. A rank that has no token of a request gets its heads' result from the other rank."""
    out, weight = two_ranks[rank][(*configuration, step)]
    cache = configuration[0]
    everyone = Problem(*DCP_STEPS[step], heads=2 * HEADS, kv_scale=CACHES[cache])
    share = Problem(*DCP_STEPS[step])
    share.q, share.kv = everyone.q[:, rank * HEADS : (rank + 1) * HEADS], everyone.kv
    assert_as_exact_as_torch(out, share, weight)


def test_only_one_rank_warns_of_a_newer_version(two_ranks):
    counts = [len(re.findall(r"vLLM 0\.99\.0 has all names", rank["log"])) for rank in two_ranks]
    assert counts == [1, 0]


def set_parallel(config, **sizes):
    """Set sizes of context parallelism without having the ranks."""
    for name, size in sizes.items():
        object.__setattr__(config.parallel_config, f"{name}_context_parallel_size", size)


@pytest.fixture
def select_parallel(engine_config):
    """Selects for a layer with these sizes of context parallelism; `model` changes the model's configuration."""

    def call(model=None, **sizes):
        config = engine_config(attention_backend="ETAP", hf_overrides=model or {})
        set_parallel(config, **sizes)
        selector._cached_get_attn_backend.cache_clear()
        with set_current_vllm_config(config):
            layer = {"head_size": LATENT + ROPE, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True}
            return selector.get_attn_backend(**layer, use_sparse=bool(model), num_heads=HEADS)

    yield call
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("model", [{}, {"index_topk": 128}], ids=["dense", "sparse"])
def test_prefill_context_parallelism_is_selected_but_not_with_that_of_decode(select_parallel, model):
    assert select_parallel(model, prefill=2).supports_pcp()
    with pytest.raises(ValueError, match="prefill context parallelism with decode context parallelism"):
        select_parallel(model, prefill=2, decode=2)


def test_with_prefill_context_parallelism_decodes_are_etaps_and_prompts_vllms(make_layer):
    """Each rank has the whole cache and decodes what vLLM gives it; vLLM divides all prompts, short ones too."""
    layer, config = make_layer(**SPECULATIVE)
    set_parallel(config, prefill=2)
    builder = make_builder(layer, config)
    assert builder.use_pcp and builder.reorder_batch_threshold == 4
    problem = Problem([700, 129], [4, 1])
    common = problem.common_metadata(prefill_lengths=[3, 37])
    common.is_prefilling = torch.tensor([False, False, True, True])
    step = builder.build(0, common)
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (2, 5, 2)
    common = problem.common_metadata()
    common.is_prefilling = torch.tensor([False, False])
    assert_as_exact_as_torch(decode(layer, problem, builder.build(0, common)), problem, weight_of(layer))


@pytest.mark.parametrize("host, device", [([2, 2, 2], [4, 1, 1]), ([3, 3, 3, 2], [4, 4, 2, 1])], ids=str)
def test_with_adaptive_verification_only_the_device_knows_the_query_lengths(make_layer, host, device):
    """The host divides the drafts evenly; only the sums agree."""
    layer, config = make_layer(**SPECULATIVE)
    config.speculative_config.enable_adaptive_verification = True
    assert layer.get_attn_backend().supports_device_cpu_query_lens_mismatch()
    builder = make_builder(layer, config)
    problem = Problem([700, 129, 64, 4][: len(device)], device)
    common = problem.common_metadata()
    common.query_start_loc_cpu = torch.tensor([0, *host]).cumsum(0).int()
    common.max_query_len = max(host)
    assert_as_exact_as_torch(decode(layer, problem, builder.build(0, common)), problem, weight_of(layer))


@pytest.mark.parametrize("padded", [0, 2])
def test_tokens_of_a_non_causal_draft_see_each_other(make_layer, padded):
    """DSpark: vLLM builds such steps for layers with this attribute; lengths advance without a new build."""
    layer, config = make_layer(**SPECULATIVE)
    assert layer.get_attn_backend().supports_non_causal()
    layer.non_causal_multi_token_decode = True
    builder = make_builder(layer, config)
    problem = Problem([700, 129, *[0] * padded], [4] * (2 + padded))
    common = problem.common_metadata()
    common.causal = False
    lengths = common.seq_lens.clone()
    common.seq_lens.fill_(4)
    step = builder.build(0, common)
    common.seq_lens.copy_(lengths)
    builder.update_draft_decode_metadata(step)
    out = decode(layer, problem, step)
    as_single = Problem([700, 129], [4] * 2)
    as_single.kv = [rows for rows in problem.kv[:2] for _ in range(4)]
    as_single.q, as_single.query_lens, as_single.tokens = problem.q[:8], [1] * 8, 8
    assert_as_exact_as_torch(out[:8], as_single, weight_of(layer))
    assert not out[8:].any()
    later = Problem([700, 129], 4).common_metadata()
    assert builder.build(0, later).decode.calls[0].schedule.s_q == 4, "causal again"

"""SGLang's pools, step metadata and attention of DeepSeek-V4 and V4.1 around our backend, on CPU tensors.

The runner is the one of SGLang's own tests of that attention, on one of 8 ranks. The reference executor stands in for
the kernels, and Triton's interpreter runs SGLang's: what fills the window's lists and those of the layers that compress
128 tokens, gathers a prompt's rows and merges its lists. What needs a GPU is not run: what SGLang plans for its indexer
and compressor, whose lists are written here as the indexer leaves them, and the writers of the caches. Real CUDA graphs
are not tested here.
"""

import inspect
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import attention_registry, deepseek_v4_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend
from sglang.srt.layers.attention.dsv4 import sparse_prefill_utils
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

from etap_backend import sparse_workspace_floats
from etap_backend.reference import relative_rmse, sparse_mla_decode_reference
from etap_backend.sglang import v4, versions
from etap_backend.sglang.v4 import ETAPV4Backend

load_plugins()

ALL_HEADS, RANKS, PADDED_HEADS = 64, 8, 64
HEADS = ALL_HEADS // RANKS
PAGE, WINDOW, CONTEXT, WIDTH = 256, 128, 1024, 512
# V4.1's, in an SGLang that has it.
LOW_RATIOS = [1, 2] if "low_ratios" in deepseek_v4_backend.DSV4AttnMetadata.__dataclass_fields__ else []
RATIOS = [0, 4, 128, *LOW_RATIOS]  # of the layers, by number
TOP_K = 512
SPARSE_PREFILL = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
H20_SMS = 78  # of the pretended GPU
DRAFTS = 4
PAGES = ((3, 1, 4), (2,))  # of each request, in the order of its tokens
STEPS = {
    "decode": (ForwardMode.DECODE, (699, 39), (1, 1)),
    "drafts": (ForwardMode.TARGET_VERIFY, (510, 125), (DRAFTS, DRAFTS)),
    "prompts": (ForwardMode.EXTEND, (0, 130), (300, 9)),
}
"""A step's mode, of its two requests what is cached, and their query tokens."""
TOLERANCE = 2.0  # times the error of torch in bfloat16


def slot_of(request, position, **unused):
    return PAGES[request][position // PAGE] * PAGE + position % PAGE


def combined(
    topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base, window_size, compress_ratio, topk,
    out_indices=None, out_lens=None,
):  # fmt: skip
    """What 0.5.17's kernel does, whose loop Triton's interpreter cannot run: a prompt's lists of gathered rows."""
    width = sparse_prefill_utils.combined_topk_width(topk, window_size)
    indices = topk_indices.new_full((len(topk_indices), width), -1) if out_indices is None else out_indices
    lens = topk_indices.new_zeros(len(topk_indices)) if out_lens is None else out_lens
    for request, end in enumerate(query_start_loc[1:].tolist()):
        start, length = int(query_start_loc[request]), int(seq_lens[request])
        for token in range(start, end):
            position = length - end + token
            named = min((position + 1) // compress_ratio, topk)
            window = torch.arange(max(0, position - window_size + 1), position + 1).int()
            rows = (
                topk_indices[token, :named] + compressed_base[request],
                window + swa_base[request] - (length - gather_lens[request]),
            )
            lens[token] = named + len(window)
            indices[token, : named + len(window)] = torch.cat(rows)
    return indices, lens


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Leaves out what SGLang plans for its indexer and compressor."""
    monkeypatch.setenv(SPARSE_PREFILL, "1")  # SGLang turns it off in a process that asked for context parallelism
    if "query_pos" not in inspect.signature(sparse_prefill_utils.combine_topk_swa_indices).parameters:
        monkeypatch.setattr(sparse_prefill_utils, "combine_topk_swa_indices", combined)
    monkeypatch.setattr(DeepseekV4AttnBackend, "init_forward_metadata_indexer", lambda *args, **options: None)
    monkeypatch.setattr(deepseek_v4_backend, "create_paged_compressor_data", lambda *args, **options: None)
    monkeypatch.setattr(kit, "_token_loc", slot_of)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *data, pin_memory=False, **options: tensor(*data, **options))
    # As SGLang's server makes its pool; the runner of 0.5.17's tests has half of that.
    pool = kit.DeepSeekV4TokenToKVPool
    monkeypatch.setattr(kit, "DeepSeekV4TokenToKVPool", lambda **sizes: pool(**sizes | {"swa_page_size": PAGE}))


@pytest.fixture(autouse=True)
def parallel():
    with ExitStack() as stack:
        stack.enter_context(get_parallel().override(tp_size=RANKS, attn_tp_size=RANKS, moe_tp_size=RANKS))
        yield


def make_runner(mode=ForwardMode.DECODE, before=(1, 1), new=(1, 1), decode_backend="etap", v41=False, **changes):
    """SGLang's runner for tests, its case, and the arguments that ETAP's resolution leaves."""
    case = kit.DSV4AttentionCase("etap", "dsv4", mode, ALL_HEADS, PAGE, before, () if mode.is_decode() else new)
    config = kit.TinyDSV4ModelConfig(num_heads=ALL_HEADS, context_len=CONTEXT, compression_ratios=RATIOS)
    config.hf_config.model_type = "deepseek_v41" if v41 else "deepseek_v4"
    runner = kit.MockDSV4ModelRunner(
        case=case, model_config=config, dtype=torch.bfloat16, device="cpu", max_context_len=CONTEXT,
        swa_size=8 * PAGE, compression_ratios=RATIOS,
    )  # fmt: skip
    get_context().override("etap's tests", dsa_decode_backend=decode_backend)
    vars(runner).update(changes)
    return runner, case


def make_backend(runner):
    """Through SGLang's registry of backends."""
    backend = ATTENTION_BACKENDS["dsv4"](runner)
    backend._swa_interleaved = False  # SGLang sets it where there is CUDA, and V4.1's layers ask
    return backend


def packed(rows):
    """Rows [n, 512] in the 584 bytes of the cache: 576 of data, and 8 of scales."""
    groups = rows[:, : WIDTH - 64].float().unflatten(1, (7, 64))
    powers = (groups.abs().amax(dim=2) / 448).log2().ceil().clamp(min=-22)
    elements = (groups / torch.exp2(powers)[..., None]).to(torch.float8_e4m3fn).flatten(1)
    scales = torch.cat([(powers + 127).to(torch.uint8), torch.zeros(len(rows), 1, dtype=torch.uint8)], dim=1)
    return torch.cat([elements.view(torch.uint8), rows[:, WIDTH - 64 :].contiguous().view(torch.uint8)], dim=1), scales


def store(buffer, page_size, slots, rows):
    """Fill a cache [pages, bytes] with NaN, and these slots with rows: data first, scales behind all of a page's."""
    data, scales = packed(rows)
    pages = buffer.view(torch.uint8).fill_(0xFF)
    page, place = slots // page_size, slots % page_size
    pages[page[:, None], place[:, None] * 576 + torch.arange(576)] = data
    pages[page[:, None], page_size * 576 + place[:, None] * 8 + torch.arange(8)] = scales


class Problem:
    """Two requests with their caches of all layers, and the queries of a step.

    Every row that no query token may attend to is NaN, and so are the heads that pad the queries.
    """

    def __init__(self, step, padded=True, v41=False):
        self.mode, self.before, self.new = STEPS[step]
        self.runner, self.case = make_runner(self.mode, self.before, self.new, v41=v41)
        self.random = torch.Generator().manual_seed(0)
        self.lengths = [old + new for old, new in zip(self.before, self.new, strict=True)]
        spans = list(zip(self.before, self.lengths, strict=True))
        self.seen = [(request, p) for request, span in enumerate(spans) for p in range(*span)]
        self.tokens, pool = len(self.seen), self.runner.token_to_kv_pool
        self.q = torch.full((self.tokens, PADDED_HEADS if padded else HEADS, WIDTH), float("nan")).bfloat16()
        self.q[:, :HEADS] = self.normal(self.tokens, HEADS, WIDTH)
        self.sinks = torch.zeros(self.q.shape[1])
        self.sinks[:HEADS] = torch.randn(HEADS, generator=self.random)
        slots = [[slot_of(r, p) for p in range(length)] for r, length in enumerate(self.lengths)]
        self.caches, self.slots = {}, {0: slots}
        for layer, ratio in enumerate(RATIOS):
            # An entry is where the last of its tokens is, in units of so many tokens.
            self.slots[ratio] = [part[ratio - 1 :: ratio] for part in slots] if ratio else slots
            if ratio:
                self.slots[ratio] = [[slot // ratio for slot in part] for part in self.slots[ratio]]
            buffer = pool.get_extra_key_buffer(layer) if ratio else None
            for cache, of in ((pool.get_swa_key_buffer_radix(layer), 0), (buffer, ratio)):
                if cache is not None:
                    named = torch.tensor(sum(self.slots[of], []))
                    page_size = PAGE // max(1, of)
                    store(cache, page_size, named, self.normal(len(named), WIDTH))
                    whole = cache.view(torch.uint8)[:, : page_size * 584]
                    self.caches[layer, of] = whole.unflatten(1, (page_size, 584))

    def normal(self, *size):
        return torch.randn(size, generator=self.random).bfloat16()

    def entries(self, ratio):
        """Of each query token the entries of its request that it attends to: all, or as many as the indexer chooses."""
        counts = [(p + 1) // ratio for _, p in self.seen]
        if ratio == 128:
            return [torch.arange(count) for count in counts]
        random = torch.Generator().manual_seed(ratio)
        return [torch.randperm(count, generator=random)[:TOP_K] for count in counts]

    def plan(self, backend):
        """SGLang's metadata of the step, and the lists that its indexer would have left."""
        batch = kit._make_forward_batch(self.case, self.runner, max_context_len=CONTEXT, device="cpu")
        if self.mode.is_target_verify():
            batch.seq_lens = torch.tensor(self.before, dtype=torch.int32)
            batch.seq_lens_cpu = batch.seq_lens.clone()
            batch.spec_info = SimpleNamespace(draft_token_num=DRAFTS, ragged_verify_layout=None)
        backend.init_forward_metadata(batch)
        metadata = backend.forward_metadata.core_attn_metadata
        for ratio in (4, *LOW_RATIOS):
            pages, raw = (getattr(metadata, f"c{ratio}_sparse_{what}_indices") for what in ("page", "raw"))
            for row, ((request, _), chosen) in enumerate(zip(self.seen, self.entries(ratio), strict=True)):
                pages[row, : len(chosen)] = torch.tensor(self.slots[ratio][request]).int()[chosen]
                if raw is not None:
                    raw[row, : len(chosen)] = chosen.int()
        return batch

    def attend(self, backend, batch, layer, **changes):
        """One layer, as SGLang's model calls it: [tokens, heads of q, 512]."""
        radix = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, num_kv_heads=1, layer_id=layer, v_head_dim=WIDTH)
        q = changes.pop("q", self.q)
        return backend.forward(
            q=q, k=q, v=q, layer=radix, forward_batch=batch, compress_ratio=RATIOS[layer], attn_sink=self.sinks,
            save_kv_cache=False, **changes,
        )  # fmt: skip

    def exact(self, layer, dtype=torch.float64):
        """What a layer should give, from positions alone: [tokens, heads, 512]."""
        window = [[self.slots[0][r][j] for j in range(max(0, p - WINDOW + 1), p + 1)] for r, p in self.seen]
        ratio = RATIOS[layer]
        more = {}
        if ratio:
            chosen = zip(self.seen, self.entries(ratio), strict=True)
            extra = [[self.slots[ratio][r][entry] for entry in entries.tolist()] for (r, _), entries in chosen]
            more = {"extra_kv_cache": self.caches[layer, ratio], "extra_indices": as_lists(extra)}
        call = (self.q[:, :HEADS], self.caches[layer, 0], as_lists(window), WIDTH**-0.5)
        return sparse_mla_decode_reference(*call, sinks=self.sinks, dtype=dtype, **more)[0]

    def check(self, out, layer):
        """At most twice the error that the same attention has when torch computes it in bfloat16."""
        truth = self.exact(layer)
        assert truth.isfinite().all() and truth.abs().max() > 0.1
        assert out.dtype == torch.bfloat16 and out.shape == self.q.shape
        error = relative_rmse(out[:, :HEADS], truth)
        of_torch = relative_rmse(self.exact(layer, torch.bfloat16), truth)
        assert error <= TOLERANCE * of_torch, (error, of_torch)


def as_lists(rows):
    lists = torch.full((len(rows), max(1, *map(len, rows))), -1, dtype=torch.int32)
    for entries, named in zip(lists, rows, strict=True):
        entries[: len(named)] = torch.tensor(named, dtype=torch.int32)
    return lists


@pytest.fixture
def our_calls(calls_of):
    return calls_of(v4)


@pytest.mark.parametrize("layer", range(len(RATIOS)), ids=[f"ratio {ratio}" for ratio in RATIOS])
@pytest.mark.parametrize("step", STEPS)
def test_a_layer_is_one_call_as_exact_as_torch(our_calls, step, layer):
    problem = Problem(step, v41=RATIOS[layer] in LOW_RATIOS)
    backend = make_backend(problem.runner)
    assert type(backend) is ETAPV4Backend
    problem.check(problem.attend(backend, problem.plan(backend), layer), layer)
    (call,) = our_calls
    assert call["q"].shape == (problem.tokens, HEADS, WIDTH), "no head that pads is computed"
    assert call["q"].data_ptr() == problem.q.data_ptr()
    assert ("extra_kv_cache" in call) == (step != "prompts" and layer > 0)
    if step != "prompts":
        strides = {0: 149760, 1: 149760, 2: 74880, 4: 37440, 128: 1728}
        assert call["kv_cache"].shape[1:] == (256, 1, 584) and call["kv_cache"].stride(0) == strides[0]
        if layer:
            extra = call["extra_kv_cache"]
            assert extra.shape[1:] == (PAGE // RATIOS[layer], 1, 584) and extra.stride(0) == strides[RATIOS[layer]]


@pytest.mark.parametrize("layer", range(3))
def test_prompts_read_the_caches_pages_where_sglang_gathers_no_rows(our_calls, monkeypatch, layer):
    monkeypatch.setenv(SPARSE_PREFILL, "0")
    problem = Problem("prompts")
    backend = make_backend(problem.runner)
    problem.check(problem.attend(backend, problem.plan(backend), layer), layer)
    assert [call["kv_cache"].shape[1:] for call in our_calls] == [(PAGE, 1, 584)]


def test_a_request_without_a_complete_entry_has_one_that_names_no_row(our_calls):
    """SGLang's lists have one entry at least, and say -1."""
    problem = Problem("decode")
    backend = make_backend(problem.runner)
    problem.check(problem.attend(backend, problem.plan(backend), 2), 2)
    (call,) = our_calls
    assert call["extra_valid_counts"].tolist() == [700 // 128, 1] and call["extra_indices"][1, 0] == -1


def test_a_rank_with_all_of_its_heads_pads_none():
    problem = Problem("decode", padded=False)
    backend = make_backend(problem.runner)
    problem.check(problem.attend(backend, problem.plan(backend), 1), 1)


@pytest.mark.parametrize("rows", [1, 3], ids=["fewer queries", "more queries"])
def test_lists_are_cut_or_filled_to_the_queries(rows):
    """As SGLang does where ranks pad their batches to one size, or where a graph has more rows than a batch."""
    problem = Problem("decode")
    backend = make_backend(problem.runner)
    batch, q = problem.plan(backend), torch.cat([problem.q, problem.q])[:rows]
    # A list that SGLang fills up names row 0, which may hold anything finite.
    problem.caches[1, 0][0].zero_()
    out = problem.attend(backend, batch, 1, q=q)
    assert out.shape == q.shape
    assert relative_rmse(out[:2, :HEADS], problem.exact(1)[: len(out[:2])]) < 0.01


def test_the_output_is_viewed_by_groups_of_heads():
    """What the layer does with its own heads of the output."""
    problem = Problem("decode")
    backend = make_backend(problem.runner)
    out = problem.attend(backend, problem.plan(backend), 0)[:, :HEADS]
    assert out.view(problem.tokens, 1, -1).shape == (problem.tokens, 1, HEADS * WIDTH)


def test_flashmla_stays_as_it_was_for_others():
    problem = Problem("prompts")
    backend = make_backend(problem.runner)
    module = versions.flash_mla()
    before = module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd
    problem.attend(backend, problem.plan(backend), 0)
    assert (module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd) == before


def test_another_kernel_of_sglangs_is_no_silent_way_out(monkeypatch):
    problem = Problem("decode")
    backend = make_backend(problem.runner)
    batch = problem.plan(backend)
    monkeypatch.setattr(DeepseekV4AttnBackend, "forward", lambda self, q, *args, **options: q)
    with pytest.raises(RuntimeError, match="attention backend etap: SGLang attended with another kernel"):
        problem.attend(backend, batch, 0)


def ours_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == v4.__name__]


def test_the_log_says_that_etap_decodes(caplog):
    runner, _ = make_runner()
    with caplog.at_level("INFO", logger=v4.__name__):
        backend = ATTENTION_BACKENDS["dsv4"](runner)
    assert ours_of(caplog) == [
        "Attention backend etap: DeepSeek-V4, decode and prefill, 8 heads unpadded, KV cache fp8_ds_mla"
    ]
    assert backend.workspace.numel() == sparse_workspace_floats(HEADS, H20_SMS)


@pytest.fixture
def make_factory(monkeypatch):
    """Makes SGLang's factory of draft backends."""

    def make(decode_backend="etap"):
        runner, _ = make_runner(ForwardMode.TARGET_VERIFY, new=(DRAFTS, DRAFTS), decode_backend=decode_backend)
        factory = DraftBackendFactory.__new__(DraftBackendFactory)
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps = runner, 1, DRAFTS - 1
        factory.server_args, factory.draft_attn_backend = runner.server_args, "dsv4"
        factory.seed_dsa_topk_from_draft_extend, factory.qsa_profile = False, None
        runner.is_draft_worker, runner.draft_attention_backend = True, "dsv4"
        # Wrappers for models with convolutions; they read configurations that a runner for tests lacks.
        for wrapper in ("attn_backend_wrapper_for_draft_decode", "attn_backend_wrapper_for_draft_extend"):
            if hasattr(attention_registry, wrapper):
                monkeypatch.setattr(attention_registry, wrapper, lambda runner, backend: backend)
        return factory

    return make


def test_a_draft_models_steps_and_its_extension_are_ours(make_factory, caplog):
    factory = make_factory()
    with caplog.at_level("INFO", logger=v4.__name__):
        steps = factory.create_decode_backend()
    assert not ours_of(caplog)
    assert isinstance(steps, DeepseekV4MultiStepBackend)
    assert [type(backend) for backend in steps.attn_backends] == [ETAPV4Backend] * (DRAFTS - 1)
    assert [backend.speculative_step_id for backend in steps.attn_backends] == [0, 1, 2]
    assert len({backend.workspace.data_ptr() for backend in steps.attn_backends}) == 1
    assert type(factory.create_draft_extend_backend()) is ETAPV4Backend


def test_without_the_users_wish_all_are_sglangs(make_factory):
    runner, _ = make_runner(decode_backend=None)
    assert type(ATTENTION_BACKENDS["dsv4"](runner)) is DeepseekV4AttnBackend
    factory = make_factory(decode_backend=None)
    steps = factory.create_decode_backend()
    assert type(steps) is DeepseekV4MultiStepBackend
    assert {type(backend) for backend in steps.attn_backends} == {DeepseekV4AttnBackend}
    assert type(factory.create_draft_extend_backend()) is DeepseekV4AttnBackend


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": torch.float16}, "dtype float16 is not supported: wanted bfloat16"),
], ids=str)  # fmt: skip
def test_refuses(changes, reason):
    runner, _ = make_runner(**changes)
    with pytest.raises(ValueError, match=f"attention backend etap: {reason}"):
        ATTENTION_BACKENDS["dsv4"](runner)


def test_refuses_rows_of_other_formats(monkeypatch):
    runner, _ = make_runner()
    monkeypatch.setattr(versions, "v4_row_bytes", lambda pool: 528)
    with pytest.raises(ValueError, match="attention backend etap: cache rows of 528 bytes are not supported: wanted"):
        ATTENTION_BACKENDS["dsv4"](runner)

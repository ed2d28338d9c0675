"""SGLang's pools, step metadata and attention of DeepSeek-V4 and V4.1 around ETAP's backend, on CPU tensors.

The runner is the one of SGLang's own tests of that attention, on one of 8 ranks. The reference executor stands in for
the kernels, and Triton's interpreter runs SGLang's: what fills the window's lists and those of the layers that compress
128 tokens, gathers a prompt's rows and merges its lists. What needs a GPU is not run: what SGLang plans for its indexer
and compressor, whose lists are written here as the indexer leaves them, and the writers of the caches. Real CUDA graphs
are not tested here.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.layers.attention.dsv4 import indexer
from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

from etap_backend import sparse_workspace_floats
from etap_backend.reference import relative_rmse, sparse_mla_decode_reference
from etap_backend.sglang import flash_mla, v4
from etap_backend.sglang.v4 import ETAPV4Backend
from support.sglang_layer import DRAFTS, draft_factory

load_plugins()

ALL_HEADS, RANKS, PADDED_HEADS = 64, 8, 64
HEADS = ALL_HEADS // RANKS
PAGE, WINDOW, CONTEXT, WIDTH = 256, 128, 1024, 512
LOW_RATIOS = [1, 2]  # V4.1's
RATIOS = [0, 4, 128, *LOW_RATIOS]  # of the layers, by number
TOP_K = 512
SPARSE_PREFILL = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
H20_SMS = 78  # of the pretended GPU
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


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Leaves out what SGLang plans for its indexer and compressor."""
    monkeypatch.setenv(SPARSE_PREFILL, "1")  # SGLang turns it off in a process that asked for context parallelism
    monkeypatch.setattr(DeepseekV4AttnBackend, "init_forward_metadata_indexer", lambda *args, **options: None)
    monkeypatch.setattr(deepseek_v4_backend, "create_paged_compressor_data", lambda *args, **options: None)
    monkeypatch.setattr(kit, "_token_loc", slot_of)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *data, pin_memory=False, **options: tensor(*data, **options))
    with get_parallel().override(tp_size=RANKS, attn_tp_size=RANKS, moe_tp_size=RANKS):
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
def calls(calls_of):
    return calls_of(v4)


@pytest.mark.parametrize("layer", range(len(RATIOS)), ids=[f"ratio {ratio}" for ratio in RATIOS])
@pytest.mark.parametrize("step", STEPS)
def test_a_layer_is_one_call_as_exact_as_torch(calls, step, layer):
    problem = Problem(step, v41=RATIOS[layer] in LOW_RATIOS)
    backend = make_backend(problem.runner)
    assert type(backend) is ETAPV4Backend
    problem.check(problem.attend(backend, problem.plan(backend), layer), layer)
    (call,) = calls
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
def test_prompts_read_the_caches_pages_where_sglang_gathers_no_rows(calls, monkeypatch, layer):
    monkeypatch.setenv(SPARSE_PREFILL, "0")
    problem = Problem("prompts")
    backend = make_backend(problem.runner)
    problem.check(problem.attend(backend, problem.plan(backend), layer), layer)
    assert [call["kv_cache"].shape[1:] for call in calls] == [(PAGE, 1, 584)]


def test_a_request_without_a_complete_entry_has_one_that_names_no_row(calls):
    """SGLang's lists have one entry at least, and say -1."""
    problem = Problem("decode")
    backend = make_backend(problem.runner)
    problem.check(problem.attend(backend, problem.plan(backend), 2), 2)
    (call,) = calls
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


def test_flashmla_stays_sglangs_for_others():
    """Outside of ETAP's layers, in another thread while one attends, and for a backend beside it."""
    problem, asked = Problem("prompts"), []
    backend = make_backend(problem.runner)
    module = flash_mla.module()
    installed = [getattr(module, name) for name in flash_mla.FUNCTIONS]
    assert [function.__wrapped__ for function in installed] != installed

    def ask():
        for function in (module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd):
            with pytest.raises(TypeError, match="missing .* required positional"):  # SGLang's, which needs arguments
                function()
            asked.append(function)

    def attend_beside_another_thread(*args, **kwargs):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return DeepseekV4AttnBackend.forward(backend, *args, **kwargs)

    ask()
    batch = problem.plan(backend)
    calls = {"flash_mla_with_kvcache": backend._attend_to_pages, "flash_mla_sparse_fwd": backend._attend_to_rows}
    radix = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, num_kv_heads=1, layer_id=0, v_head_dim=WIDTH)
    given = {"compress_ratio": 0, "attn_sink": problem.sinks, "save_kv_cache": False}
    flash_mla.replaced(calls, attend_beside_another_thread, problem.q, problem.q, problem.q, radix, batch, **given)
    ask()
    assert backend._calls == 1 and asked == installed * 3
    make_backend(problem.runner)
    assert [getattr(module, name) for name in flash_mla.FUNCTIONS] == installed, "one dispatcher in a process"


def test_another_kernel_of_sglangs_is_no_silent_way_out(monkeypatch):
    problem = Problem("decode")
    backend = make_backend(problem.runner)
    batch = problem.plan(backend)
    monkeypatch.setattr(DeepseekV4AttnBackend, "forward", lambda self, q, *args, **options: q)
    with pytest.raises(RuntimeError, match="SGLang attended with another kernel"):
        problem.attend(backend, batch, 0)


def logged_by(caplog):
    return [record.getMessage() for record in caplog.records if record.name == v4.__name__]


def test_the_log_says_that_etap_decodes(caplog):
    runner, _ = make_runner()
    with caplog.at_level("INFO", logger=v4.__name__):
        backend = ATTENTION_BACKENDS["dsv4"](runner)
    assert logged_by(caplog) == [
        "Attention backend etap: DeepSeek-V4, decode and prefill, 8 heads unpadded, KV cache fp8_ds_mla, top-k by etap"
    ]
    assert backend.workspace.numel() == sparse_workspace_floats(HEADS, H20_SMS)


@pytest.fixture
def make_factory(monkeypatch):
    """Makes SGLang's factory of draft backends."""

    def make(decode_backend="etap"):
        runner, _ = make_runner(ForwardMode.TARGET_VERIFY, new=(DRAFTS, DRAFTS), decode_backend=decode_backend)
        return draft_factory(runner, monkeypatch, "dsv4")

    return make


def test_a_draft_models_steps_and_its_extension_are_ours(make_factory, caplog):
    factory = make_factory()
    with caplog.at_level("INFO", logger=v4.__name__):
        steps = factory.create_decode_backend()
    assert not logged_by(caplog)
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


def refuses(runner, argument):
    with pytest.raises(ValueError, match=f"attention backend etap: .*{argument}"):
        ATTENTION_BACKENDS["dsv4"](runner)


def test_refuses_other_types_rows_of_other_formats_and_prefill_in_fp8(monkeypatch):
    refuses(make_runner(dtype=torch.float16)[0], "dtype float16")
    runner, _ = make_runner()
    with monkeypatch.context() as patch:
        patch.setattr(runner.token_to_kv_pool, "get_swa_key_bytes_per_token", lambda: 528)
        refuses(runner, "rows of 528 bytes")
    monkeypatch.setenv("SGLANG_DSV4_Q8KV8_PREFILL", "1")
    refuses(runner, "SGLANG_DSV4_Q8KV8_PREFILL")


ENTRY_PAGES = 16  # of the compressed cache, 64 entries each
INDEX_STEPS = {"decode": [1000, 0], "drafts": [TOP_K - 1, TOP_K, TOP_K + 1, 1024, 1, 600, 601, 602], "prompts": None}


class Indexed:
    """A step of the indexer with drawn logits in the place of DeepGEMM's, and the rows that a stable sort gives."""

    def __init__(self, step, monkeypatch):
        monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")  # no plan of DeepGEMM's
        problem, random = Problem(step), torch.Generator().manual_seed(1)
        self.backend, rows = make_backend(problem.runner), problem.tokens
        self.batch = problem.plan(self.backend)
        lengths = torch.tensor(INDEX_STEPS[step] or range(rows), dtype=torch.int32)
        table = torch.randperm(rows * ENTRY_PAGES, generator=random).view(rows, ENTRY_PAGES).int()
        self.core = self.backend.forward_metadata.core_metadata
        self.core.c4_sparse_page_indices = torch.full((rows, TOP_K), 7, dtype=torch.int32)
        self.backend.forward_metadata.indexer_metadata = PagedIndexerMetadata(
            page_size=PAGE, compressed_page_size=64, page_table=table, compressed_seq_lens=lengths, use_topk_v2=False
        )
        self.logits = torch.full((rows, ENTRY_PAGES * 64), torch.inf)
        self.positions, self.rows = torch.full((2, rows, TOP_K), -1)
        for row, length in enumerate(lengths.tolist()):
            self.logits[row, :length] = torch.randint(-3, 4, (length,), generator=random) * -0.25  # with 0 and -0
            chosen = self.logits[row, :length].sort(descending=True, stable=True).indices[:TOP_K].sort().values
            self.positions[row, : len(chosen)] = chosen
            self.rows[row, : len(chosen)] = table[row, chosen // 64] * 64 + chosen % 64
        monkeypatch.setattr(indexer, "fp8_paged_mqa_logits_torch", lambda *_: self.logits)
        self.sglangs = []
        assert getattr(indexer, flash_mla.TOP_K).__wrapped__.__module__ == "sglang.kernels.ops.attention.dsv4.topk"
        sglangs = flash_mla._dispatcher(flash_mla.TOP_K, lambda *given: self.sglangs.append(given))
        monkeypatch.setattr(indexer, flash_mla.TOP_K, sglangs)

    def run(self):
        """SGLang's own indexer, called as the layer's calls it."""
        rows = len(self.logits)
        query = torch.zeros(rows, ALL_HEADS, 128), torch.zeros(rows, ALL_HEADS, 1)
        self.backend._forward_prepare_normal = lambda **_: query
        pages = torch.zeros(1, 64 * 132, dtype=torch.uint8)
        self.backend.token_to_kv_pool.get_index_k_with_scale_buffer = lambda layer_id: pages
        layer = SimpleNamespace(layer_id=1, use_fp4_indexer=False, index_topk=TOP_K, alt_streams=None)
        x = torch.zeros(rows, 8)
        indexer.C4Indexer.forward(layer, x=x, q_lora=x, forward_batch=self.batch, attn_backend=self.backend)
        return self.core.c4_sparse_page_indices.long()


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("step", ["decode", "drafts"])
def test_sglangs_indexer_gets_the_rows_of_a_stable_sort(monkeypatch, step, records):
    indexed = Indexed(step, monkeypatch)
    raw = indexed.core.c4_sparse_raw_indices = (
        torch.zeros_like(indexed.core.c4_sparse_page_indices) if records else None
    )
    assert torch.equal(indexed.run(), indexed.rows) and not indexed.sglangs
    assert raw is None or torch.equal(raw.long(), indexed.positions)


def test_sglang_selects_for_prompts(monkeypatch):
    indexed = Indexed("prompts", monkeypatch)
    assert (indexed.run() == 7).all()
    (given,) = indexed.sglangs
    assert given[0] is indexed.logits


@pytest.mark.parametrize("environment, v41, kernel, reason", [
    ({"ETAP_TOP_K": "0"}, False, None, "ETAP_TOP_K=0"),
    ({}, True, None, "DeepSeek-V4.1's candidate blocks"),
    ({}, False, "torch", "dsa_topk_backend torch"),
    ({"SGLANG_OPT_USE_TOPK_V2": "0"}, False, None, "SGLANG_OPT_USE_TOPK_V2=0"),
])  # fmt: skip
def test_what_is_sglangs_is_named(monkeypatch, caplog, environment, v41, kernel, reason):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if kernel:
        monkeypatch.setattr(DSATopKBackend, "resolve", lambda runner: DSATopKBackend(kernel))
    runner, _ = make_runner(v41=v41)
    with caplog.at_level("INFO", logger=v4.__name__):
        backend = ATTENTION_BACKENDS["dsv4"](runner)
    assert logged_by(caplog)[0].endswith(f", top-k by SGLang, {reason}")
    replaced = []
    monkeypatch.setattr(flash_mla, "replaced", lambda calls, *_, **__: replaced.append(calls))
    backend.forward_c4_indexer(forward_batch=SimpleNamespace(forward_mode=ForwardMode.DECODE))
    assert replaced == [{}]

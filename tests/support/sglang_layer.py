"""Steps of sparse attention on SGLang's own pools, and their right results; shared by its contract and GPU tests."""

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods.dsa_attention import (
    DSAAttentionCase,
    DSAMockModelRunner,
    TinyDSAModelConfig,
)

from etap_backend.reference import relative_rmse, sparse_mla_decode_reference

HEADS, LATENT, ROPE, PAGE = 16, 512, 64, 64
FP8 = torch.float8_e4m3fn
TOP_K = 128  # as in SGLang's own tests of this attention
CONTEXT = 1024
SCALE = 0.1147  # not 1/sqrt of anything: the layer's own, as after YaRN
DRAFTS = 4
NOTHING = -1
STEPS = {
    "decode": (ForwardMode.DECODE, [70, 700, 129, 1], 1),
    "drafts": (ForwardMode.TARGET_VERIFY, [70, 700, 129, 4], DRAFTS),
    "draft extension": (ForwardMode.DRAFT_EXTEND_V2, [70, 700, 129], DRAFTS),
    "prompts": (ForwardMode.EXTEND, [70, 700, 129], [1, 12, 20]),
}
"""A step's mode, the lengths of its requests, and their query tokens."""
TOLERANCE = 2.0  # times the error of torch in bfloat16
ONE_RANK = {"attn_tp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0, "dcp_enabled": False}


def make_runner(heads=HEADS, mode=ForwardMode.DECODE, prefill="etap", decode="etap", dtype=torch.bfloat16, **options):
    """SGLang's runner for tests, with the arguments that ETAP's resolution leaves."""
    requests, device = options.pop("requests", 4), options.pop("device", "cpu")
    drafts = () if mode.is_decode() else (DRAFTS,) * requests
    case = DSAAttentionCase(
        name="etap",
        backend="etap",
        forward_mode=mode,
        num_heads=heads,
        num_kv_heads=1,
        page_size=PAGE,
        prefix_lens=(1,) * requests,
        extend_lens=drafts,
    )
    latent, rope = options.pop("kv_lora_rank", LATENT), options.pop("rope", ROPE)
    of_model = options.pop("of_model", {})
    config = TinyDSAModelConfig(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent + rope,
        hidden_size=64,
        context_len=CONTEXT,
        qk_nope_head_dim=latent,
        qk_rope_head_dim=rope,
        kv_lora_rank=latent,
        index_topk=TOP_K,
    )
    vars(config.hf_config).update(of_model)
    return DSAMockModelRunner(
        case=case,
        model_config=config,
        dtype=dtype,
        device=device,
        max_context_len=CONTEXT,
        head_dim=latent + rope,
        dsa_prefill_backend=prefill,
        dsa_decode_backend=decode,
        **options,
    )


class Problem:
    """Requests with their cache; the last tokens of each come with the step's queries.

    A token's list has rows of the cache that the token sees, as many as it may, in no order. Every row that no list
    names is NaN.
    """

    sinks = None

    def __init__(self, runner, mode, lengths, new, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.runner, self.mode, self.lengths, self.device = runner, mode, lengths, runner.device
        self.new = [new] * len(lengths) if isinstance(new, int) else new
        self.tokens, heads = sum(self.new), runner.model_config.num_attention_heads
        self.rope = runner.model_config.qk_rope_head_dim
        # As the model hands them over: the latent part out of a product with the heads in front, the rope part strided.
        self.q = self.normal(heads, self.tokens, LATENT).transpose(0, 1)
        self.q_rope = self.normal(self.tokens, heads, 128 + self.rope)[..., 128:]
        pages = CONTEXT // PAGE
        order = 1 + torch.randperm(len(lengths) * pages, generator=self.random)
        self.slots = (order[:, None] * PAGE + torch.arange(PAGE)).view(len(lengths), -1)
        # Not the first rows of the pool: a batch may hold any requests of it.
        table = runner.req_to_token_pool.req_to_token
        self.requests = torch.arange(table.shape[0], device=self.device)[-len(lengths) :]
        table[self.requests] = self.slots.int().to(self.device)
        self.cache = runner.token_to_kv_pool.get_key_buffer(0)
        self.cache.view(torch.uint8).fill_(0xFF)
        rows = self.normal(sum(lengths), 1, LATENT + self.rope)
        slots = torch.cat([part[:length] for part, length in zip(self.slots, lengths, strict=True)]).to(self.device)
        ends = torch.tensor(lengths).cumsum(0)
        is_new = torch.cat([torch.arange(end - tail, end) for end, tail in zip(ends, self.new, strict=True)])
        self.new_rows, self.new_slots = rows[is_new], slots[is_new]
        self.cache.view(torch.uint8)[slots] = pack(rows, self.cache.dtype).view(torch.uint8)
        self.cache.view(torch.uint8)[self.new_slots] = 0xFF
        self.lists = self.random_lists().to(self.device)

    def normal(self, *size):
        """Random numbers, the same on every device."""
        return torch.randn(size, generator=self.random).bfloat16().to(self.device)

    def seen(self):
        """Tokens of its request that each token sees, itself included."""
        spans = [range(length - new + 1, length + 1) for length, new in zip(self.lengths, self.new, strict=True)]
        return torch.tensor([count for span in spans for count in span], dtype=torch.int32)

    def random_lists(self):
        """For each token rows of the cache that it sees, as SGLang's fused top-k writes them."""
        lists = torch.full((self.tokens, TOP_K), NOTHING, dtype=torch.int32)
        owners = [request for request, new in enumerate(self.new) for _ in range(new)]
        for entries, owner, seen in zip(lists, owners, self.seen().tolist(), strict=True):
            named = torch.randperm(seen, generator=self.random)[:TOP_K]
            entries[: len(named)] = self.slots[owner, named].int()
        return lists

    def batch(self, **fields):
        """SGLang's batch; on the host it has lengths for prompts only."""
        before = [length - new for length, new in zip(self.lengths, self.new, strict=True)]
        seq_lens = torch.tensor(before if self.mode.is_target_verify() else self.lengths)
        of_prompts = {
            "extend_seq_lens": torch.tensor(self.new, device=self.device),
            "extend_prefix_lens": torch.tensor(before, device=self.device),
            "extend_seq_lens_cpu": self.new,
            "extend_prefix_lens_cpu": before,
            "extend_num_tokens": self.tokens,
            "seq_lens_cpu": seq_lens,
            "seq_lens_sum": sum(self.lengths),
        }
        without = {"seq_lens_cpu": None, "seq_lens_sum": None}
        extends = self.mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND_V2)
        return ForwardBatch(
            forward_mode=self.mode,
            batch_size=len(self.lengths),
            input_ids=torch.zeros(self.tokens, dtype=torch.int64, device=self.device),
            req_pool_indices=self.requests,
            seq_lens=seq_lens.to(self.device),
            out_cache_loc=self.new_slots,
            positions=(self.seen() - 1).to(self.device),
            **(of_prompts if extends else without) | fields,
        )

    def attend(self, backend, batch, lists=None):
        """One layer, called as SGLang's MLA models call it: [tokens, heads, 512]."""
        k, k_rope = self.new_rows.split([LATENT, self.rope], dim=-1)
        sinks = {} if self.sinks is None else {"attn_sink": self.sinks}
        lists = self.lists if lists is None else lists
        with forward_context(ForwardContext(attn_backend=backend)):
            layer = make_layer(self.q.shape[1], self.rope)
            out = layer(self.q, k, k, batch, q_rope=self.q_rope, k_rope=k_rope, topk_indices=lists, **sinks)
        return out.view(self.tokens, -1, LATENT)

    def run(self, backend):
        """Plan a step, run a layer of it, and check that."""
        batch = self.batch()
        backend.init_forward_metadata(batch)
        self.check(self.attend(backend, batch))

    def errors(self, out):
        """Relative errors against float64 of this output, and of the same attention by torch in bfloat16."""
        problem = (torch.cat([self.q, self.q_rope], dim=-1), self.cache, self.lists)
        options = {"softmax_scale": SCALE, "sinks": self.sinks}
        exact, _ = sparse_mla_decode_reference(*problem, **options)
        plain, _ = sparse_mla_decode_reference(*problem, **options, dtype=torch.bfloat16)
        assert out.dtype == torch.bfloat16 and exact.abs().max() > 0.1
        return relative_rmse(out, exact), relative_rmse(plain, exact)

    def check(self, out):
        """At most twice the error that the same attention has when torch computes it in bfloat16."""
        error, of_torch = self.errors(out)
        assert error <= TOLERANCE * of_torch, (error, of_torch)

    def take(self, other):
        """What a CUDA graph reads gets another step's values."""
        for name in ("q", "q_rope", "lists", "new_rows", "new_slots"):
            getattr(self, name).copy_(getattr(other, name))


def pack(rows, dtype):
    """Rows as the pool holds them: as they are, or of 656 or 528 bytes with a scale for each 128 columns."""
    if dtype == rows.dtype:
        return rows
    latent, rope = rows.split([LATENT, rows.shape[-1] - LATENT], dim=-1)
    groups = latent.float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(dim=-1, keepdim=True) / 448
    parts = (groups / scales).to(dtype).flatten(-2), scales.squeeze(-1), rope
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1).view(dtype)


def make_layer(heads=HEADS, rope=ROPE, layer_id=0):
    """SGLang's attention layer over latent rows."""
    return RadixAttention(heads, LATENT + rope, SCALE, num_kv_heads=1, layer_id=layer_id, v_head_dim=LATENT)


class DraftRunner:
    """What SGLang's factory of draft backends asks of the draft model's runner, beside what a runner has."""

    hybrid_gdn_config = kimi_linear_config = mamba2_config = mambaish_config = None

    def __init__(self, runner, name="etap"):
        self.__dict__.update(vars(runner))
        self.use_mla_backend, self.is_draft_worker, self.draft_attention_backend = True, True, name


def draft_factory(runner, monkeypatch, name="etap", topk=1, reuses_lists=False):
    """SGLang's factory of a draft model's backends.

    Wrappers for models with convolutions are left out: they read configurations that a runner for tests lacks.
    """
    factory = DraftBackendFactory(DraftRunner(runner, name), topk, DRAFTS - 1, reuses_lists)
    for wrapper in ("attn_backend_wrapper_for_draft_decode", "attn_backend_wrapper_for_draft_extend"):
        monkeypatch.setattr(attention_registry, wrapper, lambda runner, backend: backend)
    return factory


def forbid_host_reads(monkeypatch):
    """Fails the test where a tensor is read back to the host."""
    for name in ("item", "tolist", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *arguments, _name=name: pytest.fail(f"{_name} was called"))

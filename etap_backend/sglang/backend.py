"""SGLang's attention backend for dense MLA: what each step plans, and what each layer runs.

It holds a backend of SGLang, which serves prefill except for short prompts.
"""

import copy
import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
from sglang.srt.layers.attention.flashmla_backend import (
    FlashMLABackend,
    FlashMLAMultiStepDraftBackend,
    create_flashmla_kv_indices_triton,
    get_num_kv_index_blocks_flashmla,
    maybe_create_verify_mask,
)
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from etap_backend import DecodeSchedule, engine_contract, mla_decode, why_unsupported
from etap_backend.decode_call import DecodeCall
from etap_backend.sglang import arguments, model_support, versions
from etap_backend.sglang.gathered_prefill import GatheredPrefill
from etap_backend.sglang.policy import Policy
from etap_backend.sglang.prompts import prompt_runs
from etap_backend.sglang.versions import refuse
from etap_backend.short_prompts import MAX_RUNS, Run, short_prompt_tokens

_logger = logging.getLogger(__name__)


def _check(model_runner, policy: Policy) -> None:
    """Raise ValueError where the kernels cannot run this model or these arguments; the text says why."""
    if not model_runner.use_mla_backend:
        refuse("the model's attention is not MLA (a draft model has --speculative-draft-attention-backend)")
    config, algorithm = model_runner.model_config, get_spec().speculative_algorithm
    if model_runner.is_draft_worker and algorithm in arguments.BLOCK_ALGORITHMS:
        refuse(f"a draft model of {algorithm} attends without a mask: wanted another backend for it")
    widths = {"head_dim": config.kv_lora_rank + config.qk_rope_head_dim, "v_head_dim": config.kv_lora_rank}
    policy.check(model_runner, why_unsupported, **widths, kv_cache_dtype=model_runner.kv_cache_dtype)
    refuse(arguments.why_not_page_size(model_runner.page_size))


def _make_prefill(model_runner, policy: Policy) -> AttentionBackend:
    """SGLang's prefill backend; `model_support` routes batches for it.

    FlashAttention 3, SGLang's default on Hopper, takes queries in two tensors only, and knows no decode context
    parallelism; there it is FlashInfer.
    """
    if versions.scales_queries(model_runner.model_config) or policy.ranks > 1:
        return FlashInferMLAAttnBackend(model_runner)
    fp8_cache = model_runner.kv_cache_dtype != model_runner.dtype
    return (GatheredPrefill if fp8_cache else FlashAttentionBackend)(model_runner)


@FlashMLABackend.register  # SGLang captures CUDA graphs of draft extension for the classes that it knows
class ETAPBackend(AttentionBackend):
    """MLA attention with ETAP's kernels for decoding, verification of drafts, draft extension and short prompts.

    Attributes:
        prefill: SGLang's backend for longer prompts; None in a draft model's decode steps.
        forward_metadata: the DecodeCalls of a step; None where `prefill` serves it.
    """

    prefill: Any
    forward_metadata: Any

    # Plans read lengths on the device; batches of prefill have them on the host anyway.
    needs_cpu_seq_lens: bool = False
    # Buffers hold the requests of the pool, as FlashInfer's do.
    extend_dummy_seqs_capped_by_req_pool: bool = True

    def __init__(self, model_runner, skip_prefill: bool = False, *, fp8_math: bool = False):
        """Allocate what every step needs.

        Args:
            model_runner: SGLang's.
            skip_prefill: whether only a draft model's decode steps reach this backend.
            fp8_math: whether to multiply an FP8 cache in FP8; without effect on other caches.

        Raises:
            ValueError: the kernels cannot run this model or these arguments; the text says why.
        """
        self.policy = policy = Policy.of(model_runner)
        _check(model_runner, policy)
        super().__init__()
        # Attributes that SGLang reads.
        self.device, self.page_size = model_runner.device, model_runner.page_size
        self.req_to_token_pool, self.token_to_kv_pool = model_runner.req_to_token_pool, model_runner.token_to_kv_pool
        self.kv_index_translator = getattr(model_runner, "kv_index_translator", None)
        self.max_context_len, self.data_type = model_runner.model_config.context_len, model_runner.kv_cache_dtype
        self.skip_prefill, self.is_draft_runner = skip_prefill, model_runner.is_draft_worker
        self.num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.forward_metadata, self._verify_mask = None, None
        if versions.scales_queries(model_runner.model_config):
            model_support.register_scaled_queries()
        self.prefill = None if skip_prefill else _make_prefill(model_runner, policy)
        fp8_cache = self.data_type != model_runner.dtype
        self._fp8_math = fp8_cache and fp8_math
        self._allocate(1 if skip_prefill else policy.verified, fp8_cache)
        if not skip_prefill:
            types = engine_contract.types_text(model_runner.dtype, fp8_cache, self._fp8_math, policy.shared_prefix)
            _logger.info("Attention backend %s: %s", versions.NAME, types)
            if slow := engine_contract.small_pages_text(self.page_size, policy.num_heads * policy.verified):
                _logger.warning("Attention backend %s: %s", versions.NAME, slow)

    def _allocate(self, s_q: int, fp8_cache: bool) -> None:
        """Make the buffers of a step's plan, with `s_q` query tokens per request in every call but a prompt's.

        The calls of a step are planned before the first layer, each in its own buffers. All share a workspace.
        """
        policy, workspace = self.policy, None
        # The prefill backend serves all prompts where they must not depend on each other.
        prompts = MAX_RUNS if self.prefill is not None and not policy.deterministic else 0
        made = []
        for most in (*[short_prompt_tokens(policy.num_heads)] * prompts, s_q):
            schedule = DecodeSchedule(
                policy.max_requests,
                policy.num_heads,
                max_s_q=most,
                device=self.device,
                workspace=workspace,
                batch_invariant=policy.deterministic,
                fp8_cache=fp8_cache,
                fp8_math=self._fp8_math,
                shared_prefix=policy.shared_prefix and not self.skip_prefill,
            )
            workspace = schedule.workspace
            made.append(schedule)
        *self._prompt_schedules, self.schedule = made
        pages = -(-self.req_to_token.shape[1] // self.page_size)
        self._block_table = torch.zeros(policy.max_requests, pages, dtype=torch.int32, device=self.device)
        self._seq_lens = torch.zeros(policy.max_requests, dtype=torch.int32, device=self.device)

    @property
    def verify_mask(self):
        """The mask of a tree of drafts. SGLang fills it; nothing reads it, because drafts are a chain."""
        return self._verify_mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a CUDA graph's batch."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, block_kv_indices: Tensor | None = None) -> None:
        """Prepare for CUDA graphs of up to max_bs requests, which read the same buffers as eager steps.

        Raises:
            ValueError: max_bs exceeds the request pool.
        """
        if max_bs > (most := self.policy.max_requests):
            wanted = f"wanted at most {most} requests in a CUDA graph, those that the request pool holds"
            refuse(f"max_bs: {wanted}, got {max_bs}")
        if self.num_draft_tokens:
            self._verify_mask = maybe_create_verify_mask(
                is_draft_runner=self.is_draft_runner,
                skip_prefill=self.skip_prefill,
                max_bs=max_bs,
                max_context_len=self.max_context_len,
                num_draft_tokens=self.num_draft_tokens,
                device=self.device,
                is_read=False,
            )

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan a step that runs without a CUDA graph."""
        mode = forward_batch.forward_mode
        if mode.is_draft_extend_v2():
            # Lengths include the verified tokens only, and the queries are a whole window.
            whole_window = forward_batch.seq_lens - forward_batch.extend_seq_lens + self.num_draft_tokens
            self._plan_alike(forward_batch, whole_window, 0, self.num_draft_tokens)
        elif mode.is_decode_or_idle() or mode.is_target_verify():
            self.init_forward_metadata_out_graph(forward_batch)
        elif runs := self._prompt_runs(forward_batch):
            self._plan(forward_batch, forward_batch.seq_lens, 0, zip(runs, self._prompt_schedules, strict=False))
        else:
            self.forward_metadata = None
            self.prefill.init_forward_metadata(forward_batch)

    def init_mha_chunk_metadata(self, forward_batch, *args, **kwargs) -> None:
        """Plan a prompt whose keys and values SGLang makes in chunks; FlashAttention 3 needs no such plan."""
        if isinstance(self.prefill, FlashInferMLAAttnBackend):
            self.prefill.init_mha_chunk_metadata(forward_batch, *args, **kwargs)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Plan a step ahead of the CUDA graph that runs it, or of its capture."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
        elif mode.is_target_verify():
            if getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None:
                wanted = "wanted equally many drafts per request (SGLANG_RAGGED_VERIFY_MODE=static)"
                refuse(f"ragged verification is not supported: {wanted}")
            self._plan_alike(forward_batch, forward_batch.seq_lens, self.num_draft_tokens, self.num_draft_tokens)
        elif mode.is_draft_extend_v2():
            self._plan_alike(forward_batch, forward_batch.seq_lens, 0, self.num_draft_tokens)
        elif mode.is_decode():
            self._plan_alike(forward_batch, forward_batch.seq_lens, 0, 1)
        else:
            refuse(f"no full CUDA graph of {mode.name} is supported")

    def _prompt_runs(self, forward_batch) -> list[Run]:
        """The calls that decode a step of short prompts, which the model routes to the latent rows; else none."""
        runs = prompt_runs(forward_batch, self.policy.num_heads)
        rows = self.policy.num_heads * max((run.s_q for run in runs), default=0)
        # For many rows SGLang's prefill gathers small pages faster than these kernels; it would copy an FP8 cache.
        slow = engine_contract.small_pages_text(self.page_size, rows) and not self.schedule.fp8_cache
        return [] if slow else runs

    def _plan_alike(self, forward_batch, seq_lens: Tensor, new_tokens: int, s_q: int) -> None:
        """`_plan` for one call, in which each request has s_q query tokens."""
        requests = forward_batch.batch_size
        run = Run(slice(0, requests), slice(0, requests * s_q), s_q)
        # The kernel before this one may have written the layer's new rows, which alone are read late.
        self._plan(forward_batch, seq_lens, new_tokens, [(run, self.schedule)], early_loads=True)

    def _plan(
        self,
        forward_batch,
        seq_lens: Tensor,
        new_tokens: int,
        calls: Iterable[tuple[Run, DecodeSchedule]],
        early_loads: bool = False,
    ) -> None:
        """Fill block table, lengths and the calls' schedules on the device.

        Args:
            forward_batch: SGLang's, with batch_size and req_pool_indices.
            seq_lens: int64 [>= batch_size], tokens of each request.
            new_tokens: tokens that each request has beyond seq_lens.
            calls: runs that cover all requests, with the buffers of their plans.
            early_loads: as in `mla_decode`.
        """
        requests = forward_batch.batch_size
        if requests > (most := self.policy.max_requests):
            refuse(f"wanted at most {most} requests in a step, those that the request pool holds, got {requests}")
        lengths, table = self._seq_lens[:requests], self._block_table[:requests]
        torch.add(seq_lens[:requests], new_tokens, out=lengths)
        self._fill_table(forward_batch.req_pool_indices, lengths, table)
        self.forward_metadata = []
        for run, schedule in calls:
            seen, pages = lengths[run.requests], table[run.requests]
            planned = schedule.build(seen, run.s_q, block_table=pages, page_size=self.page_size)
            self.forward_metadata.append(DecodeCall(run.tokens, pages, seen, planned, early_loads))

    def _fill_table(self, req_pool_indices: Tensor, lengths: Tensor, table: Tensor) -> None:
        """Write the block table; under decode context parallelism also turn the lengths into this rank's."""
        if self.policy.ranks > 1:
            versions.fill_rank_share(self, req_pool_indices, lengths, table)
            return
        blocks = get_num_kv_index_blocks_flashmla(table.shape[1], self.page_size)
        strides = (self.req_to_token.stride(0), table.stride(0))
        fill = create_flashmla_kv_indices_triton[(len(table), blocks)]
        fill(self.req_to_token, req_pool_indices, lengths, None, table, *strides, PAGED_SIZE=self.page_size)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer,
        forward_batch,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write this step's rows of the KV cache and decode.

        Args:
            q: [tokens, heads, 512], or [tokens, heads, 576] when q_rope is None; any strides between its rows.
            k: [tokens, 1, 512], or [tokens, 1, 576] when k_rope is None; None when the rows are written already.
            v: the latent part of k.
            layer: SGLang's RadixAttention.
            forward_batch: SGLang's.
            save_kv_cache: whether to write the rows.
            q_rope: [tokens, heads, 64].
            k_rope: [tokens, 1, 64].

        Returns:
            [tokens, heads * 512]; under decode context parallelism with float32 [tokens, heads] log-sum-exp, base e.
        """
        if layer.logit_cap:
            refuse(f"logit_cap {layer.logit_cap} is not supported")
        if k is not None and save_kv_cache:
            self._write_rows(layer, forward_batch, k, v, k_rope)
        heads, width = layer.tp_q_head_num, layer.head_dim if q_rope is None else layer.v_head_dim
        q = q.view(-1, heads, width)
        if q_rope is not None:
            q_rope = q_rope.view(-1, heads, layer.head_dim - layer.v_head_dim)
        out, lse = versions.captured_output(forward_batch), q.new_empty(len(q), heads, dtype=torch.float32)
        out = q.new_empty(len(q), heads, layer.v_head_dim) if out is None else out.view(len(q), heads, layer.v_head_dim)
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).unflatten(0, (-1, self.page_size))
        # An FP8 cache has no scale: the pool casts rows as they are, and prefill reads them so. Neither uses
        # layer.k_scale, which a checkpoint may set.
        for call in self.forward_metadata:
            mla_decode(
                call.rows(q),
                cache,
                call.block_table,
                call.seq_lens,
                call.schedule,
                softmax_scale=layer.scaling,
                q_rope=None if q_rope is None else call.rows(q_rope),
                fp8_math=self._fp8_math,
                out=call.rows(out),
                lse=call.rows(lse),
                early_loads=call.early_loads,
            )
        if len(out) > call.tokens.stop:  # ranks pad steps to one size after planning
            out[call.tokens.stop :] = 0
        return (out.flatten(1), lse) if self.policy.ranks > 1 else out.flatten(1)

    def _write_rows(self, layer, forward_batch, k: Tensor, v: Tensor | None, k_rope: Tensor | None) -> None:
        location = KVWriteLoc.for_batch(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, location, k, k_rope)

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs: int | None) -> None:
        """Do nothing: a verification that SGLang plans beside the drafting does not depend on the drafts."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **parts):
        """As `forward_decode` for drafts, draft extension and short prompts; else as `prefill` does."""
        forward = self.prefill.forward_extend if self.forward_metadata is None else self.forward_decode
        return forward(q, k, v, layer, forward_batch, save_kv_cache, **parts)


class ETAPMultiStepDraftBackend(FlashMLAMultiStepDraftBackend):
    """The draft model's decode steps, planned together before the first one.

    In step i a request has i + 1 more tokens than the batch says: its drafts so far. All steps share the last one's
    block table, which includes their pages, and its schedule, which fits slightly shorter contexts too, without shared
    prefixes. Each step has its own lengths.
    """

    def __init__(self, model_runner, topk: int, speculative_num_steps: int, *, fp8_math: bool = False):
        """Make a backend for each step but the last, which needs no attention.

        Raises:
            ValueError: topk is not 1, or the kernels cannot run the draft model; the text says why.
        """
        if topk != 1:
            refuse(f"topk: wanted 1, a chain of drafts, got {topk}")
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends: list[ETAPBackend] = []
        if (steps := speculative_num_steps - 1) > 0:
            planner = ETAPBackend(model_runner, skip_prefill=True, fp8_math=fp8_math)
            # The steps run one after another in the same buffers, each with its own plan.
            self.attn_backends = [*(copy.copy(planner) for _ in range(steps - 1)), planner]
            self._new_tokens = torch.arange(1, steps + 1, dtype=torch.int32, device=planner.device)[:, None]
            self._seq_lens = planner._seq_lens.new_zeros(steps, planner.policy.max_requests)
            planner._seq_lens = self._seq_lens[-1]

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan all steps; the batch has the lengths before them."""
        self._plan(forward_batch, 0 if forward_batch.forward_mode.is_idle() else forward_batch.batch_size)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Plan all steps before their CUDA graph or its capture; an idle rank's graph has requests too."""
        self._plan(forward_batch, forward_batch.batch_size)

    def _plan(self, forward_batch, requests: int) -> None:
        plans: list[list[DecodeCall] | None] = [None] * len(self.attn_backends)
        if plans and requests:
            planner, before = self.attn_backends[-1], forward_batch.seq_lens
            planner._plan_alike(forward_batch, before, len(plans), 1)
            (last,) = planner.forward_metadata
            lengths = self._seq_lens[:, :requests]
            torch.add(before[:requests], self._new_tokens[:-1], out=lengths[:-1])
            plans = [
                [DecodeCall(last.tokens, last.block_table, seq_lens, last.schedule, last.early_loads)]
                for seq_lens in lengths.unbind()
            ]
        for backend, plan in zip(self.attn_backends, plans, strict=True):
            backend.forward_metadata = plan

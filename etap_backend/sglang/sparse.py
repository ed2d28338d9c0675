"""Sparse attention (DeepSeek-V3.2, GLM-5): SGLang's own backend with another kernel.

The layer's indexer writes for each query token which rows of the cache it attends to. Whether tokens are decoded,
verify drafts or are a prompt's makes no difference then: one call takes them all, with nothing planned ahead. What
SGLang plans for its indexer, what it computes densely and how it writes the cache stays as it is.
"""

import logging

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DeepseekSparseAttnMultiStepBackend
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.utils import get_device_core_count
from torch import Tensor

from etap_backend import engine_contract, sparse_mla_decode, sparse_workspace_floats
from etap_backend.limits import SPARSE_FP8, dtype_name, why_unsupported_sparse
from etap_backend.sglang import arguments, versions

_logger = logging.getLogger(__name__)

_KERNEL = "fa3"
"""Whose calls are ours: of SGLang's kernels the one that takes both parts of the queries where they are, rows of the
cache and how many of them are valid."""

_PADDED_HEADS = 64
"""SGLang's kernels for prefill on Hopper compute a multiple of so many heads."""


def _why_unsupported(model_runner) -> str | None:
    config, spec, parallel = model_runner.model_config, get_spec(), get_parallel()
    if parallel.attn_dcp_size > 1 and versions.share_of_lists() is None:
        return "decode context parallelism (dcp_size) is not supported with sparse attention by this SGLang"
    on_gpu = torch.device(model_runner.device).type == "cuda"
    fp8_cache = model_runner.token_to_kv_pool.dsa_kv_cache_store_fp8
    reason = why_unsupported_sparse(
        dtype=model_runner.dtype,
        num_heads=config.num_attention_heads // parallel.attn_tp_size * parallel.attn_dcp_size,
        head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
        v_head_dim=config.kv_lora_rank,
        page_size=model_runner.page_size,
        kv_cache_dtype=SPARSE_FP8 if fp8_cache else model_runner.kv_cache_dtype,
        compute_capability=torch.cuda.get_device_capability() if on_gpu else None,
    )
    reason = reason or arguments.why_unsupported_speculation(
        spec.speculative_algorithm, spec.speculative_eagle_topk, parallel.attn_dcp_size, sparse=True
    )
    return reason or engine_contract.why_no_library()


class ETAPSparseBackend(DeepseekSparseAttnBackend):
    """Sparse MLA attention with ETAP's kernels for all tokens, or for all but a prompt's."""

    def __init__(
        self,
        model_runner,
        skip_prefill: bool = False,
        speculative_step_id: int = 0,
        topk: int = 0,
        speculative_num_steps: int = 0,
        seed_dsa_topk_from_draft_extend: bool = False,
        *,
        workspace: Tensor | None = None,
    ):
        """Allocate what every step needs.

        Args:
            model_runner: SGLang's.
            skip_prefill, speculative_step_id, topk, speculative_num_steps, seed_dsa_topk_from_draft_extend: of the base
                class.
            workspace: another backend's, to share among those that run one after another.

        Raises:
            ValueError: the kernels cannot run this model or these arguments; the text says why.
        """
        if reason := _why_unsupported(model_runner):
            raise ValueError(f"attention backend {versions.NAME}: {reason}")
        super().__init__(
            model_runner,
            skip_prefill=skip_prefill,
            speculative_step_id=speculative_step_id,
            topk=topk,
            speculative_num_steps=speculative_num_steps,
            seed_dsa_topk_from_draft_extend=seed_dsa_topk_from_draft_extend,
        )
        versions.register_model_support()
        # SGLang has it for dense attention only, and goes by the name, which stands for both here.
        get_context().override("etap_backend", disable_chunked_prefix_cache=True)
        self.dsa_decode_impl = _KERNEL
        parallel = get_parallel()
        # A rank attends to its share of a token's rows with the heads of all ranks, in every step.
        self._share_of_lists = versions.share_of_lists() if parallel.attn_dcp_size > 1 else None
        if self.dsa_prefill_impl == versions.NAME:
            # Where nothing is padded and no log-sum-exp is asked for, SGLang's choice.
            ours = self.num_q_heads % _PADDED_HEADS != 0 or self._share_of_lists is not None
            self.dsa_prefill_impl = _KERNEL if ours else "flashmla_auto"
            self.enable_auto_select_prefill_impl = not ours
        self._num_sms = get_device_core_count()
        if workspace is None:
            floats = sparse_workspace_floats(self.num_q_heads * parallel.attn_dcp_size, self._num_sms)
            workspace = torch.empty(floats, dtype=torch.float32, device=self.device)
        self.workspace = workspace
        if not speculative_num_steps:
            cache = SPARSE_FP8 if self.dsa_kv_cache_store_fp8 else dtype_name(model_runner.kv_cache_dtype)
            prefill = versions.NAME if self.dsa_prefill_impl == _KERNEL else self.dsa_prefill_impl
            text = "Attention backend %s: sparse attention, KV cache %s, prefill by %s"
            _logger.info(text, versions.NAME, cache, prefill)

    @engine_contract.override
    def _forward_fa3(
        self,
        q_rope: Tensor,
        kv_cache: Tensor,
        v_head_dim: int,
        q_nope: Tensor,
        page_table: Tensor,
        cache_seqlens: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        sm_scale: float,
        logit_cap: float,
        page_size: int,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the rows of the cache that each token's list names.

        Args:
            q_rope: [tokens, heads, 64], any strides between its rows; width 0 in a model without rope.
            kv_cache: bfloat16 [slots, 1, 576], or an FP8 cache's bytes [slots, 1, 656]; 512 and 528 without rope.
            v_head_dim: 512.
            q_nope: [tokens, heads, 512], any strides between its rows.
            page_table: int32 [tokens, top_k], rows of the cache; entries that are no row count as not there.
            cache_seqlens: int32 [>= tokens], how many entries of each list count; of fewer tokens, all do.
            sm_scale: factor of the scores before softmax.
            logit_cap: 0.
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, page_size: that each token is a request, and each row a page.

        Returns:
            bfloat16 [tokens, heads, 512]; under decode context parallelism of the rank's rows, with float32
            [tokens, heads] log-sum-exp, base e.
        """
        if logit_cap:
            raise ValueError(f"attention backend {versions.NAME}: logit_cap {logit_cap} is not supported")
        tokens = q_nope.shape[0]
        # Where ranks pad their batches to one size there may be counts for more tokens, or for fewer.
        counts = cache_seqlens[:tokens] if cache_seqlens.shape[0] >= tokens else None
        if self._share_of_lists is not None:
            parallel = get_parallel()
            page_table, counts = self._share_of_lists(page_table, parallel.attn_dcp_size, parallel.attn_dcp_rank)
        out, lse = sparse_mla_decode(
            q_nope,
            kv_cache,
            page_table,
            softmax_scale=sm_scale,
            q_rope=q_rope if q_rope.shape[-1] else None,
            valid_counts=counts,
            workspace=self.workspace,
            num_sms=self._num_sms,
        )
        return out if self._share_of_lists is None else (out, lse)


class ETAPSparseMultiStepDraftBackend(DeepseekSparseAttnMultiStepBackend):
    """The steps in which a draft model makes its chain of tokens, as SGLang plans them."""

    def __init__(
        self, model_runner, topk: int, speculative_num_steps: int, seed_dsa_topk_from_draft_extend: bool = False
    ):
        """Make a backend for each step but the last, which needs no attention.

        Raises:
            ValueError: the kernels cannot run the draft model; the text says why.
        """
        super().__init__(model_runner, topk, speculative_num_steps, seed_dsa_topk_from_draft_extend)
        workspace = None
        # In place of those that the base class made, which hold no memory to speak of.
        for step in range(len(self.attn_backends)):
            backend = ETAPSparseBackend(
                model_runner,
                speculative_step_id=step,
                topk=topk,
                speculative_num_steps=speculative_num_steps,
                seed_dsa_topk_from_draft_extend=seed_dsa_topk_from_draft_extend,
                workspace=workspace,
            )
            workspace = backend.workspace
            self.attn_backends[step] = backend

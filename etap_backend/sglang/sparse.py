"""Sparse attention (DeepSeek-V3.2, GLM-5): SGLang's own backend with another kernel.

The layer's indexer lists for each query token the rows of the cache that it attends to. One call takes all tokens,
whether they are decoded, verify drafts or belong to a prompt, and nothing is planned ahead. The rest is SGLang's: the
indexer except for its top-k in decodes, the plans, dense attention for short prompts and the writing of the cache.
"""

import logging

from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_dcp
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DeepseekSparseAttnMultiStepBackend
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.utils import get_device_core_count
from torch import Tensor

from etap_backend import engine_contract, sparse_mla_decode, sparse_top_k
from etap_backend.limits import SPARSE_FP8, dtype_name, why_unsupported_sparse
from etap_backend.sglang import versions
from etap_backend.sglang.policy import Policy, backends_of_steps

_logger = logging.getLogger(__name__)

_KERNEL = "fa3"
"""The kernel of SGLang that ETAP stands in for: it takes queries in two tensors, rows of the cache and their counts."""

_KERNEL_WITH_SINKS = "flashmla_sparse"
"""The kernel that SGLang hands attention sinks to."""

_PADDED_HEADS = 64
"""SGLang's prefill kernels on Hopper compute a multiple of this many heads."""


class ETAPIndexerMetadata(DSAIndexerMetadata):
    """What the indexer knows of a step, with ETAP's top-k in decodes, verification and drafts."""

    def topk_transform(self, logits: Tensor, topk: int, ks: Tensor | None = None, **of_prompts) -> Tensor:
        """The cache rows of each token's largest logits, float32 [tokens, width], and -1 behind: int32 [tokens, topk].

        SGLang's own top-k selects for prompts, whose logits begin at ks.
        """
        plan, lengths = self.attn_metadata, self.get_seqlens_expanded()
        paged = self.topk_transform_method == TopkTransformMethod.PAGED and ks is None and not of_prompts
        # SGLang has the same condition for its fused kernel.
        if not paged or not len(logits) == len(lengths) == len(plan.real_page_table):
            return super().topk_transform(logits, topk, ks=ks, **of_prompts)
        pages = {"block_table": plan.real_page_table, "page_size": plan.page_size}
        return sparse_top_k(logits, lengths, topk, **pages, early_lengths=True)


class ETAPSparseBackend(DeepseekSparseAttnBackend):
    """Sparse MLA attention with ETAP's kernels for all tokens, or for all but a prompt's."""

    def __init__(self, model_runner, *, workspace: Tensor | None = None, **options):
        """Allocate what every step needs; backends that run one after another may share a workspace.

        Raises:
            ValueError: the kernels cannot run this model or these arguments; the text says why.
        """
        policy, config, pool = Policy.of(model_runner), model_runner.model_config, model_runner.token_to_kv_pool
        cache = SPARSE_FP8 if pool.dsa_kv_cache_store_fp8 else dtype_name(model_runner.kv_cache_dtype)
        widths = {"head_dim": config.kv_lora_rank + config.qk_rope_head_dim, "v_head_dim": config.kv_lora_rank}
        policy.check(model_runner, why_unsupported_sparse, **widths, kv_cache_dtype=cache)
        super().__init__(model_runner, **options)
        # SGLang allows the chunked prefix cache by name; it is for dense attention, and the name stands for both here.
        get_context().override("etap_backend", disable_chunked_prefix_cache=True)
        self._has_sinks = versions.has_sinks(config)
        self.dsa_decode_impl = kernel = _KERNEL_WITH_SINKS if self._has_sinks else _KERNEL
        self._ranks = policy.ranks
        prefill = self.dsa_prefill_impl
        if prefill == versions.NAME:
            prefills = self._prefills()
            prefill = prefill if prefills else "flashmla_auto"
            self.dsa_prefill_impl = kernel if prefills else prefill
            self.enable_auto_select_prefill_impl = not prefills
        self._num_sms = get_device_core_count()
        self.workspace = policy.sparse_workspace(self._num_sms, self.device) if workspace is None else workspace
        modes = {
            "decode context parallelism": self._ranks > 1,
            "a KV cache in host memory (HiSparse)": self.hisparse_coordinator is not None,
            "pools of keys (index_kpool)": self.dsa_index_kpool != 1,
            "lists of positions (SGLANG_DSA_FUSE_TOPK=0 or IndexShare of prefill servers)": not self.use_fused_topk,
            f"dsa_topk_backend {self.dsa_topk_backend.value}": not self.dsa_topk_backend.is_sgl_kernel(),
        }
        self._why_own_top_k = engine_contract.why_engines_top_k(self.dsa_index_topk, modes)
        if not options.get("speculative_num_steps"):
            text = "Attention backend %s: sparse attention, KV cache %s, prefill by %s, top-k by %s"
            selects = versions.ENGINE.selects(self._why_own_top_k) + engine_contract.no_shared_prefix_text()
            _logger.info(text, versions.NAME, cache, prefill, selects)

    def get_indexer_metadata(self, layer_id: int, forward_batch):
        """SGLang's, with ETAP's top-k where that selects."""
        of_step = super().get_indexer_metadata(layer_id, forward_batch)
        return of_step if self._why_own_top_k else ETAPIndexerMetadata(**vars(of_step))

    def _prefills(self) -> bool:
        """Whether ETAP serves prompts where the user chose no kernel.

        SGLang's choice does where it pads no heads and needs no log-sum-exp; it reads neither HiSparse's hot buffer
        nor lists with a tail, and takes no sinks.
        """
        pads_heads = self.num_q_heads % _PADDED_HEADS != 0
        has_tail = self.dsa_index_kpool != 1
        return self._has_sinks or pads_heads or has_tail or self._ranks > 1 or self.hisparse_coordinator is not None

    @engine_contract.override
    def _forward_fa3(
        self, q_rope, kv_cache, q_nope, page_table, cache_seqlens, sm_scale: float, logit_cap: float, **unused
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the rows of the cache that each token's list names.

        Args:
            q_rope: [tokens, heads, 64], any strides between its rows; width 0 in a model without rope.
            kv_cache: bfloat16 [slots, 1, 576], or an FP8 cache's bytes [slots, 1, 656]; 512 and 528 without rope.
            q_nope: [tokens, heads, 512], any strides between its rows.
            page_table: int32 [tokens, top_k], rows of the cache; entries outside of it are ignored.
            cache_seqlens: int32 [>= tokens], valid entries of each list; with fewer counts than tokens, all are valid.
            sm_scale: factor of the scores before softmax.
            logit_cap: 0, no cap.
            unused: FlashAttention's plan, in which each token is a request and each row a page.

        Returns:
            bfloat16 [tokens, heads, 512]; under decode context parallelism over the rank's rows, with float32
            [tokens, heads] log-sum-exp, base e.
        """
        if logit_cap:
            versions.refuse(f"logit_cap {logit_cap} is not supported")
        out, lse = self._attend(q_nope, q_rope, kv_cache, page_table, cache_seqlens, sm_scale)
        return (out, lse) if self._ranks > 1 else out

    @engine_contract.override
    def _forward_flashmla_sparse(self, *, q_all, kv_cache, page_table_1, sm_scale: float, **others) -> Tensor:
        """As `_forward_fa3` where the model has attention sinks, float32 [heads]; else SGLang's kernel for prompts."""
        if not self._has_sinks:
            inputs = {"q_all": q_all, "kv_cache": kv_cache, "page_table_1": page_table_1, "sm_scale": sm_scale}
            return super()._forward_flashmla_sparse(**inputs, **others)
        counts, sinks = others["topk_length"], others["attn_sink"]
        return self._attend(q_all, None, kv_cache, page_table_1, counts, sm_scale, sinks)[0]

    def _attend(self, q, q_rope, kv_cache, lists, counts, scale: float, sinks=None) -> tuple[Tensor, Tensor]:
        tokens = q.shape[0]
        # Where ranks pad their batches to one size, there may be counts for more tokens or for fewer.
        counts = counts[:tokens] if counts.shape[0] >= tokens else None
        if self._ranks > 1:  # this rank's rows, for the heads of all ranks
            parallel = get_parallel()
            lists, counts = transform_index_page_table_dcp(lists, parallel.attn_dcp_size, parallel.attn_dcp_rank)
        return sparse_mla_decode(
            q,
            kv_cache,
            lists,
            softmax_scale=scale,
            q_rope=q_rope if q_rope is not None and q_rope.shape[-1] else None,
            valid_counts=counts,
            sinks=sinks,
            workspace=self.workspace,
            num_sms=self._num_sms,
        )


class ETAPSparseMultiStepDraftBackend(DeepseekSparseAttnMultiStepBackend):
    """The draft model's decode steps, as SGLang plans them."""

    def __init__(self, model_runner, topk: int, speculative_num_steps: int, **options):
        """Make a backend for each step but the last, which needs no attention.

        Raises:
            ValueError: the kernels cannot run the draft model; the text says why.
        """
        super().__init__(model_runner, topk, speculative_num_steps, **options)
        options |= {"topk": topk, "speculative_num_steps": speculative_num_steps}
        # These replace the base class's, which hold little memory.
        self.attn_backends[:] = backends_of_steps(ETAPSparseBackend, len(self.attn_backends), model_runner, **options)

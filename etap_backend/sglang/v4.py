"""DeepSeek-V4: SGLang's own backend, with ETAP's kernels in the place of FlashMLA's.

SGLang plans a step, writes both caches and lists the rows that each query token attends to.

- Decoding, verification of drafts and draft extension read the caches' own pages: one call for the window and the
  layer's compressed entries.
- Prompts read rows that SGLang has gathered in bfloat16.
- SGLang pads a rank's query heads to 64 or 128 with uninitialized memory. The kernels read and write the rank's own
  heads only; the layer slices the others off.
"""

import logging

from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend
from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import use_dsv4_q8kv8_sparse_prefill
from sglang.srt.utils import get_device_core_count
from torch import Tensor

from etap_backend import engine_contract, sparse_mla_decode, sparse_top_k
from etap_backend.limits import SPARSE_FP8, V4_ROW_BYTES, why_unsupported_sparse
from etap_backend.sglang import flash_mla, versions
from etap_backend.sglang.policy import Policy, backends_of_steps
from etap_backend.sglang.versions import refuse

_logger = logging.getLogger(__name__)


def _check(model_runner, policy: Policy) -> None:
    """Raise ValueError where the kernels cannot run this model or these arguments; the text says why."""
    config = model_runner.model_config
    widths = {"head_dim": config.head_dim, "v_head_dim": config.v_head_dim}
    policy.check(model_runner, why_unsupported_sparse, **widths, kv_cache_dtype=SPARSE_FP8)
    row_bytes = model_runner.token_to_kv_pool.get_swa_key_bytes_per_token()
    if row_bytes != V4_ROW_BYTES:
        refuse(f"cache rows of {row_bytes} bytes are not supported: wanted {V4_ROW_BYTES}")
    if use_dsv4_q8kv8_sparse_prefill():  # asks the environment; `arguments` refuses the argument
        refuse("prefill in FP8 (SGLANG_DSV4_Q8KV8_PREFILL) is not supported: wanted it unset")


def _select(logits, lengths, page_table, rows, page_size: int, plan, positions=None) -> None:
    """As SGLang's fused top-k. It may have filled up the lengths right before the logits: they are not early."""
    sparse_top_k(logits, lengths, rows.shape[1], block_table=page_table, page_size=page_size, out=rows)
    if positions is not None:
        sparse_top_k(logits, lengths, positions.shape[1], out=positions)


class ETAPV4Backend(DeepseekV4AttnBackend):
    """Attention of DeepSeek-V4's layers with ETAP's kernels, for decoding, drafts and prompts."""

    def __init__(self, model_runner, *, workspace: Tensor | None = None, **options):
        """Allocate what every step needs; backends that run one after another may share a workspace.

        Raises:
            ValueError: the kernels cannot run this model or these arguments; the text says why.
        """
        policy = Policy.of(model_runner)
        _check(model_runner, policy)
        flash_mla.install()
        super().__init__(model_runner, **options)
        self._flash_mla_with_kvcache = self._attend_to_pages  # which 0.5.23 calls; 0.5.22 imports the function
        self._heads, self._num_sms, self._calls = policy.num_heads, get_device_core_count(), 0
        self.workspace = policy.sparse_workspace(self._num_sms, self.device) if workspace is None else workspace
        modes = {
            "DeepSeek-V4.1's candidate blocks": self.is_dsv41,
            f"dsa_topk_backend {self.dsa_topk_backend.value}": not self.dsa_topk_backend.is_sgl_kernel(),
            "SGLANG_OPT_USE_TOPK_V2=0": not self.dsa_topk_backend.should_use_topk_v2(),
        }
        self._why_own_top_k = engine_contract.why_engines_top_k(self.index_topk, modes)
        if not options.get("speculative_num_steps"):
            text = "Attention backend %s: DeepSeek-V4, decode and prefill, %d heads unpadded, KV cache %s, top-k by %s"
            selects = versions.ENGINE.selects(self._why_own_top_k) + engine_contract.no_shared_prefix_text()
            _logger.info(text, versions.NAME, self._heads, SPARSE_FP8, selects)

    def forward_c4_indexer(self, *args, forward_batch, **options) -> None:
        """SGLang's, with ETAP's top-k for all but prompts where that selects."""
        own = self._why_own_top_k or forward_batch.forward_mode.is_extend_without_speculative()
        calls = {} if own else {flash_mla.TOP_K: _select}
        flash_mla.replaced(calls, super().forward_c4_indexer, *args, forward_batch=forward_batch, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer, forward_batch, *args, **kwargs) -> Tensor:
        """Attend as the base class does, with ETAP's kernels in the place of FlashMLA's.

        Returns:
            bfloat16 [tokens, heads of q, 512]; only the rank's own heads, the first ones, are written.

        Raises:
            RuntimeError: SGLang attended with another kernel.
        """
        before = self._calls
        calls = {"flash_mla_with_kvcache": self._attend_to_pages, "flash_mla_sparse_fwd": self._attend_to_rows}
        out = flash_mla.replaced(calls, super().forward, q, k, v, layer, forward_batch, *args, **kwargs)
        if self._calls == before and not forward_batch.forward_mode.is_idle():
            raise RuntimeError(f"attention backend {versions.NAME}: SGLang attended with another kernel")
        return out

    def _attend_to_pages(
        self, *, q, k_cache, softmax_scale: float, indices, topk_length, attn_sink, extra_k_cache,
        extra_indices_in_kvcache, extra_topk_length, **unused,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend to rows of the window and of the layer's compressed entries, as FlashMLA does.

        Args:
            q: bfloat16 [tokens, 1, heads, 512].
            k_cache, extra_k_cache: bytes [pages, page_size, 1, 584]; the second one may be None.
            softmax_scale: factor of the scores before softmax.
            indices, extra_indices_in_kvcache: int32 [tokens, 1, entries], rows of a cache; -1 is none.
            topk_length, extra_topk_length: int32 [tokens], valid entries of each list.
            attn_sink: float32 [>= heads].
            unused: FlashMLA's plan, and constants.

        Returns:
            bfloat16 [tokens, 1, heads, 512], and no log-sum-exp.
        """
        extra = {}
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            extra = {
                "extra_kv_cache": extra_k_cache,
                "extra_indices": extra_indices_in_kvcache.squeeze(1),
                "extra_valid_counts": extra_topk_length,
            }
        out = self._attend(q.squeeze(1), k_cache, indices, topk_length, softmax_scale, attn_sink, **extra)
        return out.unsqueeze(1), None

    def _attend_to_rows(
        self, *, q, kv, indices, sm_scale: float, attn_sink, topk_length, **unused
    ) -> tuple[Tensor, None, None]:
        """As above for gathered rows `kv`, bfloat16 [rows, 1, 512], and q [tokens, heads, 512]."""
        return self._attend(q, kv, indices, topk_length, sm_scale, attn_sink), None, None

    def _attend(self, q: Tensor, cache: Tensor, indices: Tensor, counts, scale: float, sinks, **extra) -> Tensor:
        self._calls += 1
        out = q.new_empty(q.shape)
        sparse_mla_decode(
            q[:, : self._heads],
            cache,
            indices.squeeze(1),
            softmax_scale=scale,
            valid_counts=counts,
            sinks=sinks,
            workspace=self.workspace,
            num_sms=self._num_sms,
            out=out[:, : self._heads],
            **extra,
        )
        return out


class ETAPV4MultiStepDraftBackend(DeepseekV4MultiStepBackend):
    """The draft model's decode steps, as SGLang plans them."""

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        """Make a backend for each step.

        Raises:
            ValueError: the kernels cannot run the draft model; the text says why.
        """
        super().__init__(model_runner, topk, speculative_num_steps)
        # These replace the base class's, which hold little memory.
        options = {"topk": topk, "speculative_num_steps": speculative_num_steps}
        self.attn_backends[:] = backends_of_steps(ETAPV4Backend, len(self.attn_backends), model_runner, **options)

"""DeepSeek-V4: SGLang's own backend of it, whose calls of FlashMLA are ours.

SGLang plans a step, writes both caches and makes the lists of rows that each query token attends to. What is decoded,
verifies drafts or extends a draft model's cache reads the caches' own pages, in one call of the window and of the
layer's compressed entries; a prompt reads rows that SGLang has gathered in bfloat16. SGLang pads the query heads of a
rank to 64 or 128 with memory that nothing writes; the kernels take the rank's own heads out of that, and leave the
others of the output as they are, since the layer slices them off.
"""

import contextlib
import logging

from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend
from sglang.srt.utils import get_device_core_count
from torch import Tensor

from etap_backend import sparse_mla_decode
from etap_backend.limits import SPARSE_FP8, V4_ROW_BYTES, why_unsupported_sparse
from etap_backend.sglang import versions
from etap_backend.sglang.policy import Policy, backends_of_steps
from etap_backend.sglang.versions import refuse

_logger = logging.getLogger(__name__)


def _check(model_runner, policy: Policy) -> None:
    """Raise ValueError where the kernels cannot run this model or these arguments; the text says why."""
    config = model_runner.model_config
    widths = {"head_dim": config.head_dim, "v_head_dim": config.v_head_dim}
    policy.check(model_runner, why_unsupported_sparse, **widths, kv_cache_dtype=SPARSE_FP8)
    row_bytes = versions.v4_row_bytes(model_runner.token_to_kv_pool)
    if row_bytes != V4_ROW_BYTES:
        refuse(f"cache rows of {row_bytes} bytes are not supported: wanted {V4_ROW_BYTES}")
    # Since 0.5.19 or later an environment variable may choose prefill in FP8, beside an argument.
    in_fp8 = getattr(deepseek_v4_backend, "use_dsv4_q8kv8_sparse_prefill", None)
    if in_fp8 is not None and in_fp8():
        refuse("prefill in FP8 (SGLANG_DSV4_Q8KV8_PREFILL) is not supported: wanted it unset")


@contextlib.contextmanager
def _replaced(module, **functions):
    """Give a module other functions by these names, for the time of one call."""
    before = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)


class ETAPV4Backend(DeepseekV4AttnBackend):
    """Attention of DeepSeek-V4's layers with ETAP's kernels, for decoding, drafts and prompts."""

    def __init__(self, model_runner, *, workspace: Tensor | None = None, **options):
        """Allocate what every step needs.

        Args:
            model_runner: SGLang's.
            workspace: another backend's, to share among those that run one after another.
            options: the base class's.

        Raises:
            ValueError: the kernels cannot run this model or these arguments; the text says why.
        """
        policy = Policy.of(model_runner)
        _check(model_runner, policy)
        super().__init__(model_runner, **options)
        self._flash_mla = versions.flash_mla()
        # What SGLang binds when it makes the backend, where it does not import it in each call.
        self._flash_mla_with_kvcache = self._attend_to_pages
        self._heads, self._num_sms, self._calls = policy.num_heads, get_device_core_count(), 0
        self.workspace = policy.sparse_workspace(self._num_sms, self.device) if workspace is None else workspace
        if not options.get("speculative_num_steps"):
            text = "Attention backend %s: DeepSeek-V4, decode and prefill, %d heads unpadded, KV cache %s"
            _logger.info(text, versions.NAME, self._heads, SPARSE_FP8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer, forward_batch, *args, **kwargs) -> Tensor:
        """Attend as the base class does, with our calls in the place of FlashMLA's.

        Returns:
            bfloat16 [tokens, heads of q, 512], of which the rank's own heads, the first ones, are written.

        Raises:
            RuntimeError: SGLang attended without one of our calls.
        """
        calls = self._calls
        ours = {"flash_mla_with_kvcache": self._attend_to_pages, "flash_mla_sparse_fwd": self._attend_to_rows}
        with _replaced(self._flash_mla, **ours):
            out = super().forward(q, k, v, layer, forward_batch, *args, **kwargs)
        if self._calls == calls and not forward_batch.forward_mode.is_idle():
            raise RuntimeError(f"attention backend {versions.NAME}: SGLang attended with another kernel")
        return out

    def _attend_to_pages(
        self, *, q, k_cache, softmax_scale: float, indices, topk_length, attn_sink, extra_k_cache,
        extra_indices_in_kvcache, extra_topk_length, **of_flash_mla,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend to rows of the window and of the layer's compressed entries, as FlashMLA does.

        Args:
            q: bfloat16 [tokens, 1, heads, 512].
            k_cache, extra_k_cache: bytes [pages, page_size, 1, 584]; no second one, None.
            softmax_scale: factor of the scores before softmax.
            indices, extra_indices_in_kvcache: int32 [tokens, 1, entries], rows of a cache; -1 is none.
            topk_length, extra_topk_length: int32 [tokens], how many entries of each list count.
            attn_sink: float32 [>= heads].
            of_flash_mla: its plan, which is not needed, and constants.

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
        self, *, q, kv, indices, sm_scale: float, attn_sink, topk_length, **of_flash_mla
    ) -> tuple[Tensor, None, None]:
        """Attend to gathered rows, bfloat16 [rows, 1, 512]; otherwise as above, but for q: [tokens, heads, 512]."""
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
    """The steps in which a draft model makes its chain of tokens, as SGLang plans them."""

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        """Make a backend for each step.

        Raises:
            ValueError: the kernels cannot run the draft model; the text says why.
        """
        super().__init__(model_runner, topk, speculative_num_steps)
        # In place of those that the base class made, which hold no memory to speak of.
        options = {"topk": topk, "speculative_num_steps": speculative_num_steps}
        self.attn_backends[:] = backends_of_steps(ETAPV4Backend, len(self.attn_backends), model_runner, **options)

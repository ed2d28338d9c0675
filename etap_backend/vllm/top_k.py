"""The selection of a sparse model's indexer in decodes, by `sparse_top_k`.

Reason: vLLM's operator hands a step's logits to what a function of its module returns. There is no place for another
kernel, and an operator of our own would have to be among those at which vLLM splits its graphs.
Versions: all. Goes when a plugin can add a kernel for `--sparse-indexer-topk-backend`.
"""

import functools

from vllm.config import VllmConfig
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk
from vllm.model_executor.layers.sparse_attn_indexer import get_indexer_topk

from etap_backend import engine_contract, sparse_top_k
from etap_backend.vllm.log import logger
from etap_backend.vllm.versions import ENGINE, uses_hisparse


class ETAPTopK(SparseIndexerTopk):
    """`sparse_top_k` where the user named no kernel."""

    def forward(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len) -> None:
        """Write the positions of each row's largest logits, float32 [rows, width], to int32 topk_indices [rows, k].

        seq_lens, int32 [requests, next_n] or [requests, 1] for the last token, is older than the logits' kernel.
        """
        if self._backend == "auto":
            sparse_top_k(logits, seq_lens.view(-1), topk_tokens, out=topk_indices, early_lengths=True)
        else:
            super().forward(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)


_get_etaps = functools.cache(ETAPTopK)


def install(config: VllmConfig) -> None:
    """Let ETAP select in all indexers of the process, or vLLM where it has to; the log says which, and why.

    vLLM has one function for all layers: the last one made decides.
    """
    model, kernel = config.model_config.hf_text_config, config.kernel_config.sparse_indexer_topk_backend
    candidates = getattr(model, "candidate_source_layer_id", None)
    pools = model.model_type.startswith("glm5_next")  # its indexer takes the function from elsewhere
    modes = {
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "a KV cache in host memory (HiSparse)": uses_hisparse(config),
        "candidate blocks (DeepSeek-V4.1)": candidates is not None and candidates >= 0,
        "pools of keys (index_kpool)": (getattr(model, "index_kpool", 1) or 1) > 1 or pools,
        f"--sparse-indexer-topk-backend {kernel}": kernel != "auto",
    }
    reason = engine_contract.why_engines_top_k(model.index_topk, modes)
    reason = reason or ENGINE.why_lacking(engine_contract.misfits(ETAPTopK))
    sparse_attn_indexer.get_indexer_topk = get_indexer_topk if reason else _get_etaps
    logger.info_once(f"Top-k of the indexer: {ENGINE.selects(reason)}", scope="global")

"""Prefill from an FP8 cache of dense attention: SGLang's FlashAttention 3 over rows in the model's type."""

from itertools import accumulate
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

from etap_backend.sglang import versions


class GatheredPrefill(FlashAttentionBackend):
    """FlashAttention 3 in the model's type; SGLang's own multiplies keys in e4m3 and converts a layer's whole pool.

    Here the batch's pages are copied, one request behind the other; or the pool, where that has fewer.
    """

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.kv_cache_dtype, self.kv_cache_dtype_str = model_runner.dtype, "auto"  # what attention is given
        self._pool = self.token_to_kv_pool
        self.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: self._rows.pop())

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan a step of prompts, whose lengths are on the host, too."""
        super().init_forward_metadata(forward_batch)
        lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        pages = [-(-(before + new) // self.page_size) for before, new in lengths]
        self._pages, table = None, self.forward_metadata.page_table
        if 0 < sum(pages) * self.page_size < self._pool.size:
            self._pages = torch.cat([row[:count] for row, count in zip(table, pages, strict=True)])
            # Behind a request's last page the table names pages that its length keeps from being read.
            begin = torch.tensor([0, *accumulate(pages[:-1])], dtype=torch.int32).to(table.device, non_blocking=True)
            columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
            self.forward_metadata.page_table = (begin[:, None] + columns).clamp_(max=sum(pages) - 1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **parts):
        if k is not None and save_kv_cache:
            self._pool.set_mla_kv_buffer(layer, versions.write_location(forward_batch), k, parts["k_rope"])
        if forward_batch.attn_attend_prefix_cache is None:  # else keys and values are made of the rows
            rows = self._pool.get_key_buffer(layer.layer_id)
            if self._pages is not None:
                paged = rows.view(torch.uint8).unflatten(0, (-1, self.page_size))
                rows = paged.index_select(0, self._pages).flatten(0, 1).view(rows.dtype)
            self._rows = [rows.to(q.dtype)]  # to be read once, and not kept: they are as large as the contexts
        return super().forward_extend(q, k, v, layer, forward_batch, False, **parts)

"""Prefill from an FP8 cache of dense attention: SGLang's FlashAttention 3 over rows in the model's type."""

from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor


class LayerRows:
    """One layer's rows, [rows, 1, 576] in the model's type, where FlashAttentionBackend reads its pool."""

    def __init__(self):
        self.rows: Tensor | None = None

    def get_key_buffer(self, layer_id: int) -> Tensor | None:
        """As the pool's."""
        return self.rows


class GatheredPrefill(FlashAttentionBackend):
    """FlashAttention 3 in the model's type; SGLang's own multiplies keys in e4m3 and converts a layer's whole pool.

    It copies the pages of the batch, one request behind the other, or the whole pool where that has fewer pages.
    """

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.kv_cache_dtype, self.kv_cache_dtype_str = model_runner.dtype, "auto"  # what attention is given
        self._pool: Any = self.token_to_kv_pool
        self.token_to_kv_pool = LayerRows()

    def init_forward_metadata(self, forward_batch) -> None:
        """Plan a step of prompts, whose lengths are on the host too."""
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
        """Write the step's rows, and attend to a copy of the layer's rows or to keys that SGLang made of them."""
        if k is not None and save_kv_cache:
            self._pool.set_mla_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, parts["k_rope"])
        if forward_batch.attn_attend_prefix_cache is None:  # else keys and values are made of the rows
            self.token_to_kv_pool.rows = self._rows_of(layer.layer_id, q.dtype)
        try:
            return super().forward_extend(q, k, v, layer, forward_batch, False, **parts)
        finally:
            self.token_to_kv_pool.rows = None  # they are as large as the contexts

    def _rows_of(self, layer_id: int, dtype: torch.dtype) -> Tensor:
        rows = self._pool.get_key_buffer(layer_id)
        if self._pages is not None:
            paged = rows.view(torch.uint8).unflatten(0, (-1, self.page_size))
            rows = paged.index_select(0, self._pages).flatten(0, 1).view(rows.dtype)
        return rows.to(dtype)

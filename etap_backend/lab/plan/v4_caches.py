"""What DeepSeek-V4's caches take in an engine, in one pipeline stage of one rank; every rank holds the same.

vLLM 0.33 has one pool of blocks. A block of 256 tokens holds, side by side, a page of each layer's compressed entries
and of its indexer's keys; other blocks hold pages of windows, or of the compressors' partial sums, which a request
needs for its last tokens only. vLLM 0.26 makes blocks 3 to 4% larger. SGLang 0.5.23 has a pool for each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from etap_backend.limits import LATENT_DIM, SCALE_DIM, V4_ROW_BYTES

BLOCK_TOKENS, WINDOW_ROWS = 256, 64
KEY_BYTES = SCALE_DIM + 4  # an indexer's key in FP8, and its scale
SUM_BYTES, KEY_SUM_BYTES = 2 * 4 * LATENT_DIM, 2 * 4 * SCALE_DIM  # a token's key and gate in float32; CSA has two
CSA_RING, HCA_RING = 8, 128  # tokens whose sums are kept
BATCHES, BATCH_TOKENS = 2, 8192  # prompts' tokens in flight: vLLM's scheduling ahead, and its --max-num-batched-tokens
SWA_FULL_TOKENS_RATIO = 0.1  # SGLang's default for this model


def page_bytes(rows: int, row_bytes: int) -> int:
    """Of a page, padded to data rows of 576 bytes."""
    return -(-rows * row_bytes // 576) * 576


PAGES = {
    "window": page_bytes(WINDOW_ROWS, V4_ROW_BYTES),
    "csa": page_bytes(BLOCK_TOKENS // 4, V4_ROW_BYTES),
    "hca": page_bytes(BLOCK_TOKENS // 128, V4_ROW_BYTES),
    "index_keys": page_bytes(BLOCK_TOKENS // 4, KEY_BYTES),
    "csa_sums": page_bytes(4, 2 * SUM_BYTES) + page_bytes(4, 2 * KEY_SUM_BYTES),
    "hca_sums": page_bytes(8, SUM_BYTES),
}
"""Bytes in one layer."""


@dataclass(frozen=True)
class V4Caches:
    """Of so many layers: all have a window, `csa` and `hca` of them compressed entries too."""

    layers: int
    csa: int
    hca: int
    window: int  # tokens
    pages: ClassVar[dict[str, int]] = PAGES

    @property
    def _beside(self) -> list[tuple[int, int, int, int]]:
        """What is not in the blocks of entries: into how many groups of layers vLLM divides each kind, so that least is
        lost where all have one size; bytes of a group's block; tokens that a request needs; tokens of a page."""
        kinds = [(self.layers, "window", self.window, WINDOW_ROWS)]
        kinds += [(self.csa, "csa_sums", CSA_RING, 4), (self.hca, "hca_sums", HCA_RING, 8)]
        counts = [count for count, *_ in kinds]
        size = min(range(max(1, self.csa), max(counts) + 1), key=lambda size: (sum(-n % size for n in counts), -size))
        return [(-(-n // size), min(n, size) * PAGES[page], window, rows) for n, page, window, rows in kinds]

    @property
    def block_bytes(self) -> int:
        """What the largest group puts into one."""
        entries = self.csa * (PAGES["csa"] + PAGES["index_keys"]) + self.hca * PAGES["hca"]
        return max(entries, *(block for _, block, *_ in self._beside))

    def blocks(self, in_flight: int) -> int:
        """Most that a request needs beside those of its entries, while so many of its tokens are computed."""
        return sum(groups * (-(-(window - 1 + in_flight) // rows) + 1) for groups, _, window, rows in self._beside)

    @property
    def blocks_of_prompts(self) -> int:
        """While prompts are computed, without which vLLM does not start."""
        return self.blocks(BATCHES * BATCH_TOKENS)

    @property
    def sglang_token_bytes(self) -> float:
        """Of each token in SGLang's pools: entries and keys, and a share of the windows and of CSA's sums."""
        window = self.layers * page_bytes(BLOCK_TOKENS, V4_ROW_BYTES)
        window += self.csa * CSA_RING * 2 * (SUM_BYTES + KEY_SUM_BYTES)
        entries = self.csa * (PAGES["csa"] + BLOCK_TOKENS // 4 * KEY_BYTES) + self.hca * PAGES["hca"]
        return (SWA_FULL_TOKENS_RATIO * window + entries) / BLOCK_TOKENS

    @property
    def sglang_request_bytes(self) -> int:
        """Of each request that may run: HCA's sums."""
        return self.hca * HCA_RING * SUM_BYTES

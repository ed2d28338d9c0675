"""What the caches of DeepSeek-V4 and of V4.1 take in an engine, in one pipeline stage of one rank; every rank holds the
same.

vLLM 0.33 has one pool of blocks. A block of 256 tokens, of V4.1's 64, holds, side by side, a page of each layer's
compressed entries and of its indexer's keys; other blocks hold pages of windows, or of the compressors' partial sums,
which a request needs for its last tokens only. vLLM 0.26 makes blocks 3 to 4% larger. SGLang 0.5.23 has a pool for each
kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from etap_backend.limits import LATENT_DIM, SCALE_DIM, V4_ROW_BYTES

SGLANG_PAGE_TOKENS = 256
KEY_BYTES = SCALE_DIM + 4  # an indexer's key in FP8, and its scale
FP4_KEY_BYTES = SCALE_DIM // 2 + SCALE_DIM // 32  # in FP4, as SGLang keeps V4.1's
SUM_BYTES, KEY_SUM_BYTES = 2 * 4 * LATENT_DIM, 2 * 4 * SCALE_DIM  # a token's key and gate in float32; CSA has two
BATCHES, BATCH_TOKENS = 2, 8192  # prompts' tokens in flight: vLLM's scheduling ahead, and its --max-num-batched-tokens
SWA_FULL_TOKENS_RATIO = 0.1  # SGLang's default for DeepSeek-V4


def page_bytes(rows: int, row_bytes: int = V4_ROW_BYTES) -> int:
    """Of a page, padded to data rows of 576 bytes."""
    return -(-rows * row_bytes // 576) * 576


@dataclass(frozen=True)
class Kept:
    """What a request needs of vLLM's blocks for its last tokens only: `groups` of layers, each with blocks of its own
    and of `rows` tokens, that hold a window of so many."""

    groups: int
    window: int
    rows: int

    def blocks(self, in_flight: int) -> int:
        """Most that there are while so many tokens are computed."""
        return self.groups * (-(-(self.window - 1 + in_flight) // self.rows) + 1)


@dataclass(frozen=True)
class _Caches:
    """Of so many layers with a window each."""

    layers: int
    window: int  # tokens
    block_tokens: ClassVar[int]
    window_rows: ClassVar[int]  # of a window's page, in vLLM
    pages: ClassVar[dict[str, int]]
    rings: ClassVar[int] = 0  # blocks of a request that do not grow with its tokens in flight

    @property
    def kept(self) -> tuple[Kept, ...]:
        raise NotImplementedError

    def blocks(self, in_flight: int) -> int:
        """Most that a request needs beside those of its entries, while so many of its tokens are computed."""
        return self.rings + sum(kept.blocks(in_flight) for kept in self.kept)

    @property
    def blocks_of_prompts(self) -> int:
        """While prompts are computed, without which vLLM does not start."""
        return self.blocks(BATCHES * BATCH_TOKENS)

    @property
    def sglang_window_bytes(self) -> float:
        """Of each token in SGLang's pool of windows."""
        return self.layers * page_bytes(SGLANG_PAGE_TOKENS) / SGLANG_PAGE_TOKENS


CSA_RING, HCA_RING = 8, 128  # tokens whose sums are kept


@dataclass(frozen=True)
class V4Caches(_Caches):
    """DeepSeek-V4's: `csa` and `hca` of the layers have compressed entries too."""

    csa: int
    hca: int
    block_tokens: ClassVar[int] = 256
    window_rows: ClassVar[int] = 64
    pages: ClassVar[dict[str, int]] = {
        "window": page_bytes(window_rows),
        "csa": page_bytes(block_tokens // 4),
        "hca": page_bytes(block_tokens // 128),
        "index_keys": page_bytes(block_tokens // 4, KEY_BYTES),
        "csa_sums": page_bytes(4, 2 * SUM_BYTES) + page_bytes(4, 2 * KEY_SUM_BYTES),
        "hca_sums": page_bytes(8, SUM_BYTES),
    }

    @property
    def _groups(self) -> list[tuple[int, int, Kept]]:
        """What is not in the blocks of entries: layers of each kind, bytes of one's page, and into how many groups
        vLLM divides the layers, so that least is lost where all groups have one size."""
        kinds = [(self.layers, "window", self.window, self.window_rows), (self.csa, "csa_sums", CSA_RING, 4)]
        kinds += [(self.hca, "hca_sums", HCA_RING, 8)]
        counts = [count for count, *_ in kinds]
        size = min(range(max(1, self.csa), max(counts) + 1), key=lambda size: (sum(-n % size for n in counts), -size))
        return [(min(n, size), self.pages[page], Kept(-(-n // size), *kept)) for n, page, *kept in kinds]

    @property
    def kept(self) -> tuple[Kept, ...]:
        return tuple(kept for *_, kept in self._groups)

    @property
    def keys_bytes(self) -> int:
        """Of a block's index keys."""
        return self.csa * self.pages["index_keys"]

    @property
    def block_bytes(self) -> int:
        """What the largest group puts into one."""
        entries = self.csa * self.pages["csa"] + self.keys_bytes + self.hca * self.pages["hca"]
        return max(entries, *(layers * page for layers, page, _ in self._groups))

    @property
    def sglang_token_bytes(self) -> float:
        """Of each token in SGLang's pools: entries and keys, and a share of windows and of CSA's sums."""
        sums = self.csa * CSA_RING * 2 * (SUM_BYTES + KEY_SUM_BYTES) / SGLANG_PAGE_TOKENS
        entries = self.csa * (self.pages["csa"] + SGLANG_PAGE_TOKENS // 4 * KEY_BYTES) + self.hca * self.pages["hca"]
        return SWA_FULL_TOKENS_RATIO * (self.sglang_window_bytes + sums) + entries / SGLANG_PAGE_TOKENS

    @property
    def sglang_request_bytes(self) -> int:
        """Of each request that may run: HCA's sums."""
        return self.hca * HCA_RING * SUM_BYTES


EVICTION_TOKENS, KEPT_PREFIXES = 128, 4  # SGLang drops windows after so many tokens, and keeps so many a request


@dataclass(frozen=True)
class V41Caches(_Caches):
    """DeepSeek-V4.1's: `half` of the layers have entries of two tokens, `whole` of one, with an indexer's keys each;
    the others read these."""

    half: int
    whole: int
    block_tokens: ClassVar[int] = 64
    window_rows: ClassVar[int] = 32
    pages: ClassVar[dict[str, int]] = {
        "window": page_bytes(window_rows),
        "half": page_bytes(block_tokens // 2),
        "whole": page_bytes(block_tokens),
        "half_keys": page_bytes(block_tokens // 2, KEY_BYTES),
        "whole_keys": page_bytes(block_tokens, KEY_BYTES),
        "sums": 8 * SUM_BYTES,  # a ring of the last tokens'
    }
    rings: ClassVar[int] = 1

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Windows, of as many layers in a group as a block of entries has room for."""
        layers = max(1, self.block_bytes // self.pages["window"])
        return (Kept(-(-self.layers // layers), self.window, self.window_rows),)

    @property
    def keys_bytes(self) -> int:
        """Of a block's index keys."""
        return self.half * self.pages["half_keys"] + self.whole * self.pages["whole_keys"]

    @property
    def block_bytes(self) -> int:
        entries = self.half * self.pages["half"] + self.whole * self.pages["whole"] + self.keys_bytes
        return max(entries, self.pages["sums"])

    @property
    def sglang_token_bytes(self) -> float:
        """Of each token in SGLang's pools: entries and keys."""
        entries = self.half * page_bytes(SGLANG_PAGE_TOKENS // 2) + self.whole * page_bytes(SGLANG_PAGE_TOKENS)
        return entries / SGLANG_PAGE_TOKENS + (self.half / 2 + self.whole) * FP4_KEY_BYTES

    @property
    def sglang_request_bytes(self) -> int:
        """Of each of --max-running-requests: windows of its last tokens and of four prefixes that are kept, in whole
        pages, and sums of the two tokens of an entry."""
        tokens = self.window + SGLANG_PAGE_TOKENS
        tokens += EVICTION_TOKENS + SGLANG_PAGE_TOKENS + KEPT_PREFIXES * tokens
        return int(tokens * self.sglang_window_bytes) + self.half * 2 * SUM_BYTES

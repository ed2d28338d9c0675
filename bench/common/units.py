"""Writes numbers of tokens: 16384 tokens are 16K in tables and plots."""

from __future__ import annotations


def in_k(tokens: int) -> str:
    """16K for 16384; a number that is no multiple of 1024 unchanged."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def load_text(requests: int, given: int, made: int, prefill: str, prefix: int = 0) -> str:
    """Concurrent requests, prompt and output tokens, and the kind of prefill: "16 x 16K/256, cached"; with a shared
    prefix "1 x 16K+256/2, served"."""
    tokens = f"{in_k(prefix)}+{in_k(given - prefix)}" if prefix else in_k(given)
    return f"{requests} x {tokens}/{in_k(made)}, {prefill}"

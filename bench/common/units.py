"""Writes and reads numbers of tokens: 16384 tokens are 16K in commands, tables and plots."""

from __future__ import annotations

SCALES = {"k": 1024, "m": 1024**2}
MAX_DIGITS = 4000


def parse_tokens(text: str, argument: str = "") -> int:
    """A number of tokens, such as 4096, 4K or 1M. Raises ValueError for anything else, and for less than one."""
    number, scale = (text[:-1], SCALES[text[-1].lower()]) if text[-1:].lower() in SCALES else (text, 1)
    # isdecimal alone accepts digits of other scripts; int refuses thousands of digits.
    if not (number.isascii() and number.isdecimal()) or len(number) > MAX_DIGITS or int(number) < 1:
        raise ValueError(f"{argument}wanted a number of tokens such as 4096, 4K or 1M, got {text[:60]!r}")
    return int(number) * scale


def in_k(tokens: int) -> str:
    """16K for 16384; a number that is no multiple of 1024 unchanged."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def load_text(requests: int, given: int, made: int, prefill: str, prefix: int = 0) -> str:
    """Concurrent requests, prompt and output tokens, and the kind of prefill: "16 x 16K/256, cached"; with a shared
    prefix "1 x 16K+256/2, served"."""
    tokens = f"{in_k(prefix)}+{in_k(given - prefix)}" if prefix else in_k(given)
    return f"{requests} x {tokens}/{in_k(made)}, {prefill}"

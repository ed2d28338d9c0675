"""How lengths and loads are written: 16384 tokens are 16K, on command lines, in tables and on axes alike."""

from __future__ import annotations

SCALES = {"k": 1024, "m": 1024**2}
MOST_DIGITS = 4000


def parse_tokens(text: str, argument: str = "") -> int:
    """A number of tokens, such as 4096, 4K or 1M. Raises ValueError for anything else, and for less than one."""
    number, scale = (text[:-1], SCALES[text[-1].lower()]) if text[-1:].lower() in SCALES else (text, 1)
    # isdecimal alone lets digits of other scripts through, and int refuses thousands of them.
    if not (number.isascii() and number.isdecimal()) or len(number) > MOST_DIGITS or int(number) < 1:
        raise ValueError(f"{argument}wanted a number of tokens such as 4096, 4K or 1M, got {text[:60]!r}")
    return int(number) * scale


def in_k(tokens: int) -> str:
    """16K for 16384; a number that is no multiple of 1024 as it is."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def load_text(requests: int, given: int, made: int, prefill: str, prefix: int = 0) -> str:
    """Requests at a time, tokens given and made, what becomes of prefill (served, cached): "16 x 16K/256, cached"; with
    a prefix that prompts have in common "1 x 16K+256/2, served"."""
    tokens = f"{in_k(prefix)}+{in_k(given - prefix)}" if prefix else in_k(given)
    return f"{requests} x {tokens}/{in_k(made)}, {prefill}"

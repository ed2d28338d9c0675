"""What the plugins for the serving engines share."""

import importlib.metadata
import os
import re
from dataclasses import dataclass

import torch

from etap_backend._library import library

FP8_MATH_VARIABLE = "ETAP_FP8_MATH"
"""Set to 1, an FP8 cache is multiplied as it is, by queries rounded to e4m3; otherwise as float16, exactly."""


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, three at least: (0, 33, 0) of 0.33.0rc1+cu130; with them versions compare."""
    numbers = [int(number) for number in re.match(r"[\d.]*\d", version)[0].split(".")]
    return (*numbers, *[0] * (3 - len(numbers)))


@dataclass(frozen=True)
class Versions:
    """The versions of an engine from `oldest` on, `end` and later ones excluded."""

    oldest: str
    end: str

    def __contains__(self, version: str) -> bool:
        return release(self.oldest) <= release(version) < release(self.end)

    def __str__(self) -> str:
        return f">={self.oldest},<{self.end}"


def why_unsupported_version(engine: str, package: str, name: str, supported: Versions) -> str | None:
    """Say why the installed version of an engine cannot run ETAP, or None when it can.

    Args:
        engine: the engine's name, for the text.
        package: its distribution on the package index.
        name: ETAP's name in that engine.
        supported: the versions that can.
    """
    found = importlib.metadata.version(package)
    if found in supported:
        return None
    return f"the attention backend {name} supports {engine} {supported}, this is {engine} {found}"


def why_no_library() -> str | None:
    """Say why the compiled library cannot be loaded, or None when it can; engines drop the text of an ImportError."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None


def wants_fp8_math() -> bool:
    """What the environment variable ETAP_FP8_MATH says; raises ValueError unless it is 1, 0, empty or unset."""
    value = os.environ.get(FP8_MATH_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{FP8_MATH_VARIABLE}: wanted 0 or 1, got {value!r}")
    return value == "1"


def types_text(dtype: torch.dtype, fp8_cache: bool, fp8_math: bool) -> str:
    """What the engines' logs say of the types of the KV cache and of the math on it; `dtype` is the model's."""
    model, fp8 = str(dtype).removeprefix("torch."), "FP8 (e4m3)"
    math = fp8 if fp8_math else "float16" if fp8_cache else model
    return f"KV cache {fp8 if fp8_cache else model}, math {math}"

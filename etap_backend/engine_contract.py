"""What the plugins for the serving engines share: what they need of an engine, and what they say in its log."""

import importlib.metadata
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from etap_backend._library import library
from etap_backend.limits import TILE_TOKENS, dtype_name

CHEAP_PAGE_ROWS = 32
"""Most query rows of the kernels to which pages smaller than a tile cost little."""
AUTO_VARIABLE = "ETAP_AUTO"
"""1 makes ETAP an engine's first choice for what it serves, where no attention backend is named."""


def is_first_choice() -> bool:
    """What AUTO_VARIABLE says: 1 is on, 0 and no value are off. Raises ValueError for another value."""
    value = os.environ.get(AUTO_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{AUTO_VARIABLE}: wanted 0 or 1, got {value!r}")
    return value == "1"


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, three at least: (0, 33, 0) of 0.33.0rc1+cu130; with them versions compare."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    return (*numbers, *[0] * (3 - len(numbers)))


def override(method):
    """Mark a method of ours that the engine calls by a private name: without it `misfits` takes it for our own."""
    method.__override__ = True
    return method


def lacking(classes: Callable[[], Iterable[type]], of_some: Iterable[str] = ()) -> list[str]:
    """What the engine has not of what our classes need, by name.

    Args:
        classes: imports and returns them; what their modules import of the engine may be gone.
        of_some: as of `misfits`.
    """
    try:
        found = list(classes())
    except Exception as error:  # the engine's modules run, and may fail in any way
        return [f"{type(error).__name__}: {error}".splitlines()[0]]
    return [name for cls in found for name in misfits(cls, of_some)]


def misfits(ours: type, of_some: Iterable[str] = ()) -> list[str]:
    """What of the engine's class, which ours derives from, methods and attributes of ours do not fit, by name.

    Ours are those of the class and of this package's classes that stand before the engine's among its bases.

    A public one of ours that the base lacks would never be asked for, unless only some versions ask for it; one whose
    parameters ours does not take could not be called.
    """
    bases = inspect.getmro(ours)[1:]
    of_us = list(itertools.takewhile(lambda cls: cls.__module__.startswith("etap_backend."), bases))
    base = bases[len(of_us)]
    found = []
    for name, value in itertools.chain.from_iterable(vars(cls).items() for cls in (ours, *of_us)):
        target = f"{base.__module__}:{base.__qualname__}.{name}"
        if name.startswith("__"):
            continue
        if not hasattr(base, name):
            own = name.startswith("_") and not hasattr(value, "__override__")
            found += [] if own or name in of_some else [target]
        elif inspect.isroutine(value):
            mine, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (ours, base))
            more = ", ".join(key for key, one in theirs.items() if key not in mine and one.kind is not one.VAR_KEYWORD)
            takes_all = any(one.kind is one.VAR_KEYWORD for one in mine.values())
            found += [f"{target}: new parameters {more}"] if more and not takes_all else []
    return found


@dataclass(frozen=True)
class Engine:
    """A serving engine, its package, the backend's name in it, and the two ends of the versions that were tested."""

    name: str
    package: str
    backend: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.name} {self.oldest} to {self.newest}"

    @property
    def version(self) -> str:
        """The one that is installed."""
        return importlib.metadata.version(self.package)

    @property
    def is_tested(self) -> bool:
        """Whether the installed version is one of those that were tested, or between them."""
        return release(self.oldest) <= release(self.version) <= release(self.newest)

    def why_too_old(self) -> str | None:
        """Say why the installed version cannot run ETAP, or None when it may."""
        if release(self.version) >= release(self.oldest):
            return None
        return f"{self.backend} needs {self.name} {self.oldest} or newer, this is {self.name} {self.version}"

    def why_lacking(self, lacking: Iterable[str]) -> str | None:
        """Say that this is missing, or None when nothing is."""
        what = "; ".join(dict.fromkeys(lacking))  # a module may be lacked several times
        return f"{self.name} {self.version} lacks what {self.backend} uses: {what}" if what else None

    def why_untested(self) -> str | None:
        """Say that the installed version, which lacks nothing as far as seen, was not tested, or None when it was."""
        if self.is_tested:
            return None
        return f"{self.name} {self.version} has all names that {self.backend} uses, but the tests of it ran in {self}"


def why_no_library() -> str | None:
    """Say why the compiled library cannot be loaded, or None when it can; engines drop the text of an ImportError."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None


def small_pages_text(page_size: int, rows: int) -> str | None:
    """What an engine's log says where small pages may cost much, or None; `rows` are heads * tokens of a request."""
    if page_size % TILE_TOKENS == 0 or rows <= CHEAP_PAGE_ROWS:
        return None
    found = f"pages of {page_size} tokens with {rows} query rows (heads * tokens) for each request"
    return f"{found}: with more than {CHEAP_PAGE_ROWS}, decoding may take much longer than with pages of {TILE_TOKENS}"


def types_text(dtype: torch.dtype, fp8_cache: bool, fp8_math: bool) -> str:
    """What the engines' logs say of the types of the KV cache and of the math on it; `dtype` is the model's."""
    model, fp8 = dtype_name(dtype), "FP8 (e4m3)"
    math = fp8 if fp8_math else "float16" if fp8_cache else model
    return f"KV cache {fp8 if fp8_cache else model}, math {math}"

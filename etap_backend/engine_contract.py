"""What both engines' plugins share: checks of the engine's version and classes, and texts for its log."""

import importlib.metadata
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from etap_backend._library import library
from etap_backend.limits import SELECTED, TILE_TOKENS, dtype_name

CHEAP_PAGE_ROWS = 32
"""Most query rows with which pages smaller than a tile cost little."""
AUTO_VARIABLE = "ETAP_AUTO"
"""1 makes ETAP an engine's first choice for models that it serves, where no attention backend is named."""
SHARED_PREFIX_VARIABLE = "ETAP_SHARED_PREFIX"
"""1 reads pages that requests of dense models begin with once for several of them. Ranks may differ in it."""
TOP_K_VARIABLE = "ETAP_TOP_K"
"""0 leaves to the engine which tokens a sparse model's indexer selects."""
FLAGS = {AUTO_VARIABLE: "0", SHARED_PREFIX_VARIABLE: "0", TOP_K_VARIABLE: "1"}
"""The environment variables that both plugins read, with what an empty one or none means."""


def shares_prefixes() -> bool:
    """Whether SHARED_PREFIX_VARIABLE is 1. Raises ValueError as `is_on`."""
    return is_on(SHARED_PREFIX_VARIABLE)


def is_on(variable: str) -> bool:
    """Whether one of FLAGS is 1. Raises ValueError for another value than 0 and 1."""
    value = os.environ.get(variable) or FLAGS[variable]  # compose files leave a variable empty
    if value not in ("0", "1"):
        raise ValueError(f"{variable}: wanted 0 or 1, got {value!r}")
    return value == "1"


def why_engines_top_k(k: int, modes: dict[str, bool]) -> str | None:
    """Say why not ETAP but the engine selects an indexer's k tokens, or None; raises as `is_on`.

    `modes` are those in which the engine has to, by name, and whether they are on.
    """
    reasons = {f"{TOP_K_VARIABLE}=0": not is_on(TOP_K_VARIABLE), f"index_topk {k}": k not in SELECTED}
    return next((reason for reason, holds in (reasons | modes).items() if holds), None)


def release(version: str) -> tuple[int, ...]:
    """A version's numbers, at least three, for comparing versions: (0, 33, 0) for 0.33.0rc1+cu130."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    return (*numbers, *[0] * (3 - len(numbers)))


def override(method):
    """Mark a method that the engine calls by a private name; `misfits` ignores other private methods."""
    method.__override__ = True
    return method


def lacking(classes: Callable[[], Iterable[type]], optional: Iterable[str] = ()) -> list[str]:
    """Names of what the plugin's classes use and the engine lacks.

    Args:
        classes: imports and returns the classes; their modules' imports from the engine may fail.
        optional: as in `misfits`.
    """
    try:
        found = list(classes())
    except Exception as error:  # the engine's modules run code, which may fail in any way
        text = next(filter(None, map(str.strip, str(error).splitlines())), "")  # sgl_kernel's begins with an empty line
        return [f"{type(error).__name__}: {text}"]
    return [name for cls in found for name in misfits(cls, optional)]


def misfits(cls: type, optional: Iterable[str] = ()) -> list[str]:
    """Names of the plugin's overrides that the engine's base class lacks or calls differently.

    The plugin's classes are `cls` and this package's classes before the engine's first one among its bases. A public
    name that the base lacks would never be called; `optional` lists names that only some versions have. An override
    that does not take the base's parameters could not be called.
    """
    bases = inspect.getmro(cls)[1:]
    mixins = list(itertools.takewhile(lambda base: base.__module__.startswith("etap_backend."), bases))
    engine = bases[len(mixins)]
    found = []
    for name, value in itertools.chain.from_iterable(vars(one).items() for one in (cls, *mixins)):
        target = f"{engine.__module__}:{engine.__qualname__}.{name}"
        if name.startswith("__"):
            continue
        if not hasattr(engine, name):
            private = name.startswith("_") and not hasattr(value, "__override__")
            found += [] if private or name in optional else [target]
        elif inspect.isroutine(value):
            taken, given = (inspect.signature(getattr(one, name)).parameters for one in (cls, engine))
            more = ", ".join(key for key, one in given.items() if key not in taken and one.kind is not one.VAR_KEYWORD)
            takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
            found += [f"{target}: new parameters {more}"] if more and not takes_all else []
    return found


@dataclass(frozen=True)
class Engine:
    """A serving engine, its package, ETAP's name in it, and the two supported releases."""

    name: str
    package: str
    backend: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.name} {self.oldest} and {self.newest}"

    @property
    def version(self) -> str:
        """The installed version."""
        return importlib.metadata.version(self.package)

    @property
    def is_tested(self) -> bool:
        """Whether the installed version is a supported release, or between the two."""
        return release(self.oldest) <= release(self.version) <= release(self.newest)

    def why_too_old(self) -> str | None:
        """The reason why the installed version cannot run ETAP, or None when it may."""
        if release(self.version) >= release(self.oldest):
            return None
        return f"{self.backend} supports {self}, this is {self.name} {self.version}"

    def selects(self, why_not: str | None) -> str:
        """Whose top-k selects, for the log: the engine's for this reason, or ETAP's."""
        return f"{self.name}, {why_not}" if why_not else self.backend

    def why_lacking(self, lacking: Iterable[str]) -> str | None:
        """A sentence that names what the engine lacks, or None when it lacks nothing."""
        what = "; ".join(dict.fromkeys(lacking))  # several modules may lack the same name
        return f"{self.name} {self.version} lacks what {self.backend} uses: {what}" if what else None

    def why_untested(self) -> str | None:
        """A sentence for the log when the installed version is newer than the tested ones, else None."""
        if self.is_tested:
            return None
        uses = f"{self.name} {self.version} has all names that {self.backend} uses"
        return f"{uses}, but was not tested: {self.backend} supports {self}"


def why_no_library() -> str | None:
    """The reason why the compiled library does not load, or None; engines drop the text of an ImportError."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None


def small_pages_text(page_size: int, rows: int) -> str | None:
    """A warning for the log where small pages may be slow, or None; `rows` are heads * query tokens per request."""
    if page_size % TILE_TOKENS == 0 or rows <= CHEAP_PAGE_ROWS:
        return None
    found = f"pages of {page_size} tokens with {rows} query rows (heads * tokens) per request"
    return f"{found}: with more than {CHEAP_PAGE_ROWS}, decoding may take much longer than with pages of {TILE_TOKENS}"


def no_shared_prefix_text() -> str:
    """The end of a line of the log on sparse attention, where a token has a list of its own."""
    return f"; {SHARED_PREFIX_VARIABLE}=1 has no effect on it" if shares_prefixes() else ""


def types_text(dtype: torch.dtype, fp8_cache: bool, fp8_math: bool, shared_prefix: bool) -> str:
    """KV cache, math and whether shared prefixes are read once, for the engines' logs; `dtype` is the model's."""
    model, fp8 = dtype_name(dtype), "FP8 (e4m3)"
    math = fp8 if fp8_math else "float16" if fp8_cache else model
    return f"KV cache {fp8 if fp8_cache else model}, math {math}" + ", shared prefixes read once" * shared_prefix

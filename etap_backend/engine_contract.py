"""What the plugins for the serving engines share: what they need of an engine, and what they say in its log."""

import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from etap_backend._library import library
from etap_backend.limits import TILE_TOKENS, dtype_name

CHEAP_PAGE_ROWS = 32
"""Most query rows of the kernels to which pages smaller than a tile cost little."""


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, three at least: (0, 33, 0) of 0.33.0rc1+cu130; with them versions compare."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    return (*numbers, *[0] * (3 - len(numbers)))


@dataclass(frozen=True)
class Use:
    """Something of an engine that a plugin uses; looking for it imports the engine's module.

    Attributes:
        target: `module`, `module:name` or `module:Class.name`.
        has: its attributes that are used, fields and members among them, in one text; of `new|old` one is enough.
        positional: arguments it is called with by position, `self` among them; None where it is not called so.
        keywords: those it is called with by name, in one text; `**` at its end stands for more, from the engine itself.
    """

    target: str
    has: str = ""
    positional: int | None = None
    keywords: str = ""

    def lacking(self) -> list[str]:
        """What of it is not there, by name."""
        try:
            found = pkgutil.resolve_name(self.target)
        except AttributeError:
            return [self.target]
        except Exception as error:  # the engine's module runs, and may fail in any way
            return [f"{self.target.partition(':')[0]} ({type(error).__name__}: {error})".splitlines()[0]]
        lacking = [f"{self.target}.{names}" for names in self.has.split() if not _has(found, names.split("|"))]
        if self.positional is not None or self.keywords:
            signature = inspect.signature(getattr(found, "fn", found))  # a Triton kernel keeps its function there
            names = self.keywords.split()
            bind = signature.bind_partial if names[-1:] == ["**"] else signature.bind
            try:
                bind(*[None] * (self.positional or 0), **dict.fromkeys(name for name in names if name != "**"))
            except TypeError as error:
                lacking.append(f"{self.target}: {error}")
        return lacking


def _has(found: object, names: list[str]) -> bool:
    """Whether an object has one of these attributes, or its instances, if it is a class: fields, or used by methods."""
    known = {name for name in names if hasattr(found, name)}
    for owner in inspect.getmro(found) if inspect.isclass(found) else ():
        known |= getattr(owner, "__dataclass_fields__", {}).keys()
        functions = (getattr(value, "__func__", value) for value in vars(owner).values())  # __new__ is a static method
        for function in filter(inspect.isfunction, functions):
            known |= set(inspect.unwrap(function).__code__.co_names)
    return not known.isdisjoint(names)


def misfits(ours: type, of_some: Iterable[str] = ()) -> list[str]:
    """What of the engine's class, which ours derives from, our methods and attributes do not fit, by name.

    A public one of ours that the base lacks would never be asked for, unless only some versions ask for it; one whose
    parameters ours does not take could not be called.
    """
    base = inspect.getmro(ours)[1]
    found = []
    for name, value in vars(ours).items():
        target = f"{base.__module__}:{base.__qualname__}.{name}"
        if name.startswith("__"):
            continue
        if not hasattr(base, name):
            found += [] if name.startswith("_") or name in of_some else [target]
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
        """Say that the installed version, which lacks nothing, was not tested, or None when it was."""
        if self.is_tested:
            return None
        return f"{self.name} {self.version} has all that {self.backend} uses, but the tests of it ran in {self}"


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

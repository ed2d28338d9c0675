"""Several builds of ETAP's library in one process, each called by this checkout's Python package.

A CUDA graph keeps what it recorded, so the package needs a build only while graphs are recorded: `active` points
ETAP_LIBRARY at it and clears what the package caches of a library. A build whose compiled functions take other
arguments has another ABI version and is refused. Compare such a build by running the same grid in its own checkout and
in this one, in turns on one card.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from etap_backend import _library


@dataclass(frozen=True)
class Build:
    """A library by the name of its column."""

    name: str
    path: Path

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have etap_backend call this library until the block ends."""
        with mock.patch.dict(os.environ, {_library.PATH_VARIABLE: str(self.path)}):
            _forget_library()
            try:
                yield
            finally:
                _forget_library()


def _forget_library() -> None:
    """Clear the package's caches: the library, its functions, and what they said of shapes."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "etap_backend":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


_LOADED: list[object] = []
"""Modules of all builds, until the process ends: unloading one would take its kernels out of recorded graphs."""


def load(texts: list[str]) -> list[Build]:
    """The builds that NAME=PATH means, each loaded once.

    Raises:
        ValueError: a text is something else, two have one name, or this package cannot call one; the text names
            --library and the reason.
    """
    builds = []
    for text in texts:
        name, _, where = text.partition("=")
        path = Path(where).expanduser()
        if not name or not path.is_file() or name in [build.name for build in builds]:
            raise ValueError(f"--library: wanted NAME=PATH of a libetap_backend.so, a name once, got {text}")
        builds.append(Build(name, path.resolve()))
    for build in builds:
        with build.active():
            try:
                _LOADED.append(_library.library())
            except ImportError as error:
                raise ValueError(f"--library {build.name}: {error}") from error
    return builds

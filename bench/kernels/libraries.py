"""Several builds of our own in one process, each called by the Python of its own source tree.

A torch operator's name is global and a package's imports are absolute, so a second package needs another name: it is a
copy of the tree's files with the package's name changed in them. Two libraries that take other arguments, whose
operators have other schemas, then stand side by side, and their calls take turns replay by replay.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from etap_backend import _library
from bench.common import configs, provenance
from bench.kernels.rows import Library

LIBRARY = Path("lib") / "libetap_backend.so"


@dataclass(frozen=True)
class Build:
    """A name, the package folder whose Python calls the library, and the library."""

    name: str
    package: Path
    library: Path


def parse(text: str) -> Build:
    """NAME=PATH, PATH being the folder of a package with lib/libetap_backend.so in it, or a library for this package.

    Raises ValueError, naming --library, when it is neither.
    """
    name, equals, where = text.partition("=")
    if not equals or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"--library: wanted NAME=PATH, NAME of letters, digits, dots and dashes, got {text}")
    path = Path(where).expanduser()
    whole = (path / "_library.py").is_file()
    package, library = (path, path / LIBRARY) if whole else (configs.PACKAGE, path)
    if not library.is_file():
        raise ValueError(f"--library: wanted a folder etap_backend with {LIBRARY} in it, or a library, got {where}")
    return Build(name, package.resolve(), library.resolve())


def load(build: Build, folder: Path) -> ModuleType:
    """The build's `lab.bench.kernels`, imported from a renamed copy of its package in `folder`.

    Raises ValueError, naming --library, when package and library do not belong together.
    """
    alias = "etap_backend_" + re.sub(r"\W", "_", build.name)
    for source in build.package.rglob("*.py"):
        copy = folder / alias / source.relative_to(build.package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Its own variable besides, which nobody sets: a copy has its library beside it.
        text = re.sub(r"\betap_backend\b", alias, source.read_text())
        copy.write_text(text.replace(_library.PATH_VARIABLE, f"{_library.PATH_VARIABLE}_OF_{alias.upper()}"))
    (folder / alias / LIBRARY).parent.mkdir(exist_ok=True)
    shutil.copy(build.library, folder / alias / LIBRARY)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        importlib.import_module(f"{alias}._library").library()
        return importlib.import_module(f"{alias}.lab.bench.kernels")
    except ImportError as error:
        raise ValueError(f"--library {build.name}: {error}") from error


def described(build: Build) -> Library:
    """What a results file says of a build; the commit of one that this package calls is that of the run."""
    own = build.package == configs.PACKAGE.resolve()
    return Library(
        package=provenance.as_from_here(str(build.package)),
        sha256=provenance.sha256(build.library) or provenance.UNKNOWN,
        commit=provenance.commit() if own else provenance.commit_of(build.package),
    )

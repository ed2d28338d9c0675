"""The wheel's version: the package's, and behind it which build this is, so that no two builds have the same one.

scikit-build-core asks it for the dynamic field `version` (pyproject.toml).
"""

import hashlib
import re
import subprocess
from pathlib import Path

SOURCES = ("csrc", "etap_backend", "configs", "pyproject.toml")
"""All that a wheel is made of."""
VERSION = re.compile(r'^(?:__version__ = "|Version: )([^"\n]+)', re.MULTILINE)


def dynamic_metadata(field: str, settings: dict) -> str:
    """The version of what is built in the current folder.

    A release is built from a clean checkout of the commit whose tag is `v` and its version. Any other build has the
    commit behind its version, or where there is none that says it all, a hash of the sources.
    """
    if Path("PKG-INFO").is_file():  # a source distribution has its version
        return VERSION.search(Path("PKG-INFO").read_text())[1]
    version = VERSION.search(Path("etap_backend/__init__.py").read_text())[1]
    commit = _git("rev-parse", "--short=9", "HEAD")
    if not commit or _git("status", "--porcelain", "--", *SOURCES) != "":
        return f"{version}+s{_hash_of_sources()}"
    return version if f"v{version}" in (_git("tag", "--points-at", "HEAD") or "").split() else f"{version}+g{commit}"


def _git(*words: str) -> str | None:
    """What git says of the checkout; None where there is no git, or this is no checkout."""
    try:
        run = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _hash_of_sources() -> str:
    files = [Path(name) for name in SOURCES]
    files = sorted(file for top in files for file in (top.rglob("*") if top.is_dir() else [top]))
    digest = hashlib.sha256()
    for file in files:
        if file.is_file() and not {"lib", "__pycache__"} & set(file.parts):
            digest.update(f"{file}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:9]

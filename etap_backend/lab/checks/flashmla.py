"""What the runs of FlashMLA's own test scripts share; nothing of its repository is copied.

The scripts import `flash_mla`, which is ETAP's then. They import triton, and need a Hopper GPU.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import typer

from etap_backend import _library
from etap_backend.compat import flash_mla
from etap_backend.lab.provenance import commit_of, provenance, sha256
from etap_backend.lab.results import must_be_writable


def begin(program: str, what: str, checkout: Path, script: Path, output: Path, *, whose: str = "FlashMLA") -> dict:
    """The head of a results file; refuses a folder without the script, and a file that cannot be written."""
    if not (checkout / script).is_file():
        raise typer.BadParameter(f"checkout: wanted {whose}'s repository with {script}, got {checkout}")
    try:
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    about = provenance(program, packages=("etap-backend", "torch", "apache-tvm-ffi"), library=_library.library_path())
    return {
        "what": what,
        **about.model_dump(mode="json"),
        f"{whose.lower()}_commit": commit_of(checkout) if (checkout / ".git").exists() else None,
        "script_sha256": sha256(checkout / script),
    }


def stand_in(call: Callable) -> types.ModuleType:
    """The module that the tests import as flash_mla, with this call."""
    module = types.ModuleType(flash_mla.NAMES[0])
    module.flash_mla_with_kvcache = call
    module.get_mla_metadata = flash_mla.get_mla_metadata
    return module


def load(checkout: Path, script: Path, call: Callable) -> types.ModuleType:
    """Their script as a module, with `call` as FlashMLA's."""
    sys.modules[flash_mla.NAMES[0]] = stand_in(call)
    sys.path.insert(0, str(checkout / script.parent))
    return importlib.import_module(script.stem)

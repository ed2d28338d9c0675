"""MLA decode attention for Hopper GPUs, with the context on WGMMA's M.

Importing this package needs no GPU and does not touch CUDA. Its names are loaded when they are first asked for: a
command line that only prints a help text, and a server process that never decodes, need not wait for torch.
"""

import importlib

__version__ = "0.1.0"

_MODULES = {
    "BuiltSchedule": "etap_backend.schedule",
    "DecodeSchedule": "etap_backend.schedule",
    "mla_decode": "etap_backend.dense",
    "sparse_mla_decode": "etap_backend.sparse",
    "sparse_workspace_floats": "etap_backend.sparse",
    "why_unsupported": "etap_backend.limits",
    "why_unsupported_sparse": "etap_backend.limits",
}

__all__ = ["__version__", "reference", *_MODULES]


def __getattr__(name: str) -> object:
    if name == "reference":
        return importlib.import_module("etap_backend.reference")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

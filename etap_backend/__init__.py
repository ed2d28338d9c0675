"""MLA decode attention for Hopper GPUs, with the context on WGMMA's M.

Importing this package needs no GPU and does not touch CUDA. Its names load on first use, so that a help text and a
server process that never decodes do not wait for torch.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"
with contextlib.suppress(ImportError):  # a source tree was not built
    __version__ = importlib.import_module("etap_backend._build").VERSION

__all__ = [
    "BuiltSchedule",
    "DecodeSchedule",
    "__version__",
    "mla_decode",
    "reference",
    "sparse_mla_decode",
    "sparse_top_k",
    "sparse_workspace_floats",
    "why_unsupported",
    "why_unsupported_sparse",
]

_MODULES = {
    "BuiltSchedule": "etap_backend.schedule",
    "DecodeSchedule": "etap_backend.schedule",
    "mla_decode": "etap_backend.dense",
    "sparse_mla_decode": "etap_backend.sparse",
    "sparse_top_k": "etap_backend.top_k",
    "sparse_workspace_floats": "etap_backend.sparse",
    "why_unsupported": "etap_backend.limits",
    "why_unsupported_sparse": "etap_backend.limits",
}

if TYPE_CHECKING:
    from etap_backend import reference
    from etap_backend.dense import mla_decode
    from etap_backend.limits import why_unsupported, why_unsupported_sparse
    from etap_backend.schedule import BuiltSchedule, DecodeSchedule
    from etap_backend.sparse import sparse_mla_decode, sparse_workspace_floats
    from etap_backend.top_k import sparse_top_k
else:

    def __getattr__(name: str) -> object:
        if name == "reference":
            return importlib.import_module("etap_backend.reference")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

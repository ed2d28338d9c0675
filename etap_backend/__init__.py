"""MLA decode attention for Hopper GPUs, with the context on WGMMA's M.

Importing this package needs no GPU and does not touch CUDA.
"""

from etap_backend import reference
from etap_backend.ops import mla_decode
from etap_backend.schedule import BuiltSchedule, DecodeSchedule
from etap_backend.support import why_unsupported

__version__ = "0.1.0"

__all__ = ["BuiltSchedule", "DecodeSchedule", "__version__", "mla_decode", "reference", "why_unsupported"]

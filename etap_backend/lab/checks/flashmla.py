"""What the runs of FlashMLA's own test scripts share; nothing of its repository is copied.

The scripts import `flash_mla`, which is ETAP's then. They import triton, and need a Hopper GPU.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

from etap_backend.compat import flash_mla


def stand_in(call: Callable) -> types.ModuleType:
    """The module that the tests import as flash_mla, with this call."""
    module = types.ModuleType(flash_mla.MODULES[0])
    module.flash_mla_with_kvcache = call
    module.get_mla_metadata = flash_mla.get_mla_metadata
    return module


def load(checkout: Path, script: Path, call: Callable) -> types.ModuleType:
    """Their script as a module, with `call` as FlashMLA's."""
    sys.modules[flash_mla.MODULES[0]] = stand_in(call)
    sys.path.insert(0, str(checkout / script.parent))
    return importlib.import_module(script.stem)

"""Where vLLM chooses the attention layer of DeepSeek-V4 and V4.1: ETAP is one of its choices.

These models ask no registry of backends. Each has a function that maps the selected backend to a class, and what it
does not know to FlashMLA. All layers are made through it, those of draft models too.

Reason: the models' modules are imported late, and by processes that serve them only, so that the function is replaced
when its module has been imported. Versions: all. Goes when vLLM asks the registry for these layers.
"""

import functools
import importlib
import importlib.machinery
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType

from etap_backend import engine_contract
from etap_backend.vllm import auto
from etap_backend.vllm.log import logger
from etap_backend.vllm.versions import ENGINE, NAME

MODULES = ("vllm.models.deepseek_v4.nvidia.model", "vllm.models.deepseek_v41.nvidia.model")
FUNCTION = "_select_dsv4_attn_cls"
THEIRS = "DeepseekV4FlashMLAAttention"
MARK = "_etap_layer"
"""Attribute of ETAP's layers."""


class _Finder(MetaPathFinder):
    """Finds those modules as Python would, to be extended as soon as they have run."""

    def find_spec(self, fullname, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in MODULES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            extend(module)

        spec.loader.exec_module = execute_and_extend
        return spec


def watch() -> None:
    """Extend the modules that are imported, and the others when they are. May be called any number of times."""
    for name in filter(sys.modules.__contains__, MODULES):
        extend(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _missing(module: ModuleType) -> list[str]:
    """What a model's module has not of what is used here, by name."""
    return [f"{module.__name__}:{name}" for name in (FUNCTION, THEIRS) if not hasattr(module, name)]


def why_no_layers() -> str | None:
    """Say why no layer of DeepSeek-V4 can be ETAP's in this vLLM, whatever the GPU, or None."""
    # Imported here: it imports what serves a model.
    from etap_backend.vllm import deepseek_v4

    module = importlib.import_module(MODULES[0])
    return ENGINE.why_lacking(_missing(module) or deepseek_v4.lacking(getattr(module, THEIRS)))


def _is_wanted(vllm_config) -> bool:
    """Whether the layers of a configuration's model are to be ETAP's because ETAP was named.

    A draft model may come without the backend that was named for its target, and has that of the target's layers then,
    which are known by its configuration.
    """
    backend = vllm_config.attention_config.backend
    if backend is not None:
        return backend.name == NAME
    return any(hasattr(layer, MARK) for layer in vllm_config.compilation_config.static_forward_context.values())


def extend(module: ModuleType) -> None:
    """Let a model's module choose ETAP's layer where ETAP is selected, and do as before where it is not."""
    if lacking := _missing(module):
        logger.warning("%s; whatever is selected, it does not decode with %s", ENGINE.why_lacking(lacking), NAME)
        return
    theirs = getattr(module, FUNCTION)
    if hasattr(theirs, "etap"):
        return

    @functools.wraps(theirs)
    def select(vllm_config):
        preferred = vllm_config.attention_config.backend is None and engine_contract.is_first_choice()
        if not (preferred or _is_wanted(vllm_config)):
            return theirs(vllm_config)
        try:
            # Imported here: it imports what serves a model, and what of vLLM it imports may be gone.
            from etap_backend.vllm import deepseek_v4

            return deepseek_v4.attention_class(getattr(module, THEIRS), vllm_config)
        except (ImportError, NotImplementedError) as refusal:
            if preferred:
                auto.say_why_not("DeepSeek-V4", str(refusal))
                return theirs(vllm_config)
            instead = f"Without --attention-backend {NAME} vLLM serves it with its own kernels"
            raise NotImplementedError(f"{NAME}: DeepSeek-V4: {refusal}. {instead}") from refusal

    setattr(select, "etap", True)  # noqa: B010
    setattr(module, FUNCTION, select)

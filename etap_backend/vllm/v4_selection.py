"""Selects ETAP's attention layer in DeepSeek-V4 and V4.1.

These models ask no registry of backends. A function in each model's module maps the selected backend to the class of an
attention layer, an unknown backend to FlashMLA's. All layers are made through it, those of draft models too.

Reason: vLLM has no hook there, so the function is replaced as soon as its module exists. Importing the modules at
registration would take 10 s in every process. vLLM's registry of models imports a model when a process loads it: the
registry's entries of these models become `ExtendedModel`s, which replace the function then.
Versions: all. Goes when vLLM asks the selected backend for the class of these layers.
"""

import functools
import importlib
import sys
from types import ModuleType

from torch import nn
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

from etap_backend import engine_contract
from etap_backend.vllm import auto
from etap_backend.vllm.log import logger
from etap_backend.vllm.versions import ENGINE, NAME

PACKAGES = ("vllm.models.deepseek_v4", "vllm.models.deepseek_v41")
FUNCTION = "_select_dsv4_attn_cls"
VLLM_LAYER = "DeepseekV4FlashMLAAttention"
LAYER_MARK = "_etap_layer"
"""Attribute of ETAP's layers."""


class ExtendedModel(_LazyRegisteredModel):
    """vLLM's entry of a DeepSeek-V4 model, whose module can select ETAP's layer once the model is loaded."""

    def load_model_cls(self) -> type[nn.Module]:
        """Import the model, as vLLM's entry does, and extend its module."""
        model = super().load_model_cls()
        extend(_module(self.module_name))
        return model


def register_models() -> None:
    """Let each process that loads one of these models select ETAP's layer. May be called any number of times."""
    for architecture, entry in list(ModelRegistry.models.items()):
        if type(entry) is _LazyRegisteredModel and entry.module_name in PACKAGES:
            ModelRegistry.models[architecture] = ExtendedModel(entry.module_name, entry.class_name)


def _module(package: str) -> ModuleType:
    """The module of an imported model that has the function; an empty one where it is elsewhere."""
    name = f"{package}.nvidia.model"
    return sys.modules.get(name, ModuleType(name))


def _missing(module: ModuleType) -> list[str]:
    """The names used here that a model's module lacks."""
    return [f"{module.__name__}:{name}" for name in (FUNCTION, VLLM_LAYER) if not hasattr(module, name)]


def why_no_layers() -> str | None:
    """Say why this vLLM cannot run ETAP's layers of DeepSeek-V4, whatever the GPU, or None. Imports the model."""
    # Imported here: it imports what serves a model.
    from etap_backend.vllm import deepseek_v4

    importlib.import_module(PACKAGES[0])
    module = _module(PACKAGES[0])
    return ENGINE.why_lacking(_missing(module) or deepseek_v4.lacking(getattr(module, VLLM_LAYER)))


def _is_selected(vllm_config) -> bool:
    """Whether the user selected ETAP for a configuration's model.

    A draft model's configuration may lack the backend that was selected for its target. It follows the target then,
    whose layers the configuration knows.
    """
    backend = vllm_config.attention_config.backend
    if backend is not None:
        return backend.name == NAME
    return any(hasattr(layer, LAYER_MARK) for layer in vllm_config.compilation_config.static_forward_context.values())


def extend(module: ModuleType) -> None:
    """Let a model's module choose ETAP's layer where ETAP is selected, and vLLM's as before where it is not."""
    if missing := _missing(module):
        logger.warning("%s; DeepSeek-V4 never decodes with %s here", ENGINE.why_lacking(missing), NAME)
        return
    vllm_select = getattr(module, FUNCTION)
    if hasattr(vllm_select, "etap"):
        return

    @functools.wraps(vllm_select)
    def select(vllm_config):
        preferred = vllm_config.attention_config.backend is None and engine_contract.is_on(
            engine_contract.AUTO_VARIABLE
        )
        if not (preferred or _is_selected(vllm_config)):
            return vllm_select(vllm_config)
        try:
            # Imported here: it imports what serves a model, and this vLLM may lack some of it.
            from etap_backend.vllm import deepseek_v4

            return deepseek_v4.attention_class(getattr(module, VLLM_LAYER), vllm_config)
        except (ImportError, NotImplementedError) as refusal:
            if preferred:
                auto.log_fallback("DeepSeek-V4", str(refusal))
                return vllm_select(vllm_config)
            instead = f"Without --attention-backend {NAME} vLLM serves it with its own kernels"
            raise NotImplementedError(f"{NAME}: DeepSeek-V4: {refusal}. {instead}") from refusal

    setattr(select, "etap", True)  # noqa: B010
    setattr(module, FUNCTION, select)

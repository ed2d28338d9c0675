"""What vLLM finds when ETAP is selected: a backend, or in a vLLM that cannot run it, the refusal.

vLLM asks for the class once for each layer, with its configuration set, before it says whether the layer's attention is
sparse; and a class answers for one of both. It builds sparse layers where the model's configuration has index_topk.
"""

import functools
import pkgutil
from typing import ClassVar

from vllm.logger import init_logger

from etap_backend import engine_contract
from etap_backend.vllm.versions import ENGINE, HOOKS_OF_SOME

_BACKENDS = {False: "etap_backend.vllm.backend:ETAPBackend", True: "etap_backend.vllm.sparse:ETAPSparseBackend"}
"""By whether the model's attention is sparse."""
# vLLM gives its handler and level to loggers below "vllm" only.
_logger = init_logger(f"vllm.{__name__}")


def _classes(sparse: bool) -> tuple[type, ...]:
    backend = pkgutil.resolve_name(_BACKENDS[sparse])
    return backend, backend.get_impl_cls(), backend.get_builder_cls()


@functools.cache
def why_not(sparse: bool) -> str | None:
    """Say why vLLM cannot run ETAP with models of sparse attention, or with those of dense, or None when it can."""
    if reason := why_not(False) if sparse else ENGINE.why_too_old():
        return reason
    return ENGINE.why_lacking(engine_contract.lacking(functools.partial(_classes, sparse), HOOKS_OF_SOME))


class RefusedBackend:
    """Stands for a backend that cannot run, until vLLM's own selection has reported the reason."""

    sparse: ClassVar[bool] = False

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str | None]:
        """vLLM's question to a selected backend: the reasons against it."""
        return [why_not(cls.sparse)]


class RefusedSparseBackend(RefusedBackend):
    """The same for models of sparse attention, which more is needed for."""

    sparse: ClassVar[bool] = True


def backend_class() -> type:
    """The class for the model whose configuration is set."""
    if why_not(False):
        return RefusedBackend
    if untested := ENGINE.why_untested():
        _logger.warning_once(untested, scope="global")  # of all ranks the first one says it
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    sparse = bool(config and config.model_config and hasattr(config.model_config.hf_text_config, "index_topk"))
    return RefusedSparseBackend if why_not(sparse) else pkgutil.resolve_name(_BACKENDS[sparse])

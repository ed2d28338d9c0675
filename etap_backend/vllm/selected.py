"""What vLLM finds when ETAP is selected: a backend, or in a vLLM that cannot run it, the refusal."""

import functools
import pkgutil
from dataclasses import dataclass

from etap_backend import engine_contract
from etap_backend.vllm.log import logger
from etap_backend.vllm.versions import ENGINE, HOOKS_OF_SOME

_DENSE, _SPARSE = "etap_backend.vllm.backend:ETAPBackend", "etap_backend.vllm.sparse:ETAPSparseBackend"


@functools.cache
def why_not(sparse: bool) -> str | None:
    """Say why vLLM cannot run ETAP with models of sparse attention, or with those of dense, or None when it can."""
    if reason := why_not(False) if sparse else ENGINE.why_too_old():
        return reason

    def classes() -> tuple[type, ...]:
        backend = pkgutil.resolve_name(_SPARSE if sparse else _DENSE)
        return backend, backend.get_impl_cls(), backend.get_builder_cls()

    return ENGINE.why_lacking(engine_contract.lacking(classes, HOOKS_OF_SOME))


@dataclass(frozen=True)
class Refusal:
    """Stands for a backend that cannot run, until vLLM's own selection has reported the reason."""

    reason: str

    def validate_configuration(self, *_, **__) -> list[str]:
        """vLLM's question to a selected backend: the reasons against it."""
        return [self.reason]


def backend_class() -> type | Refusal:
    """The class for the model whose configuration is set.

    vLLM asks once for each layer, before it says whether the layer's attention is sparse; and a class answers for one
    of both. It builds sparse layers where the model's configuration has index_topk.
    """
    sparse, reason = False, why_not(False)
    if reason is None:
        if untested := ENGINE.why_untested():
            logger.warning_once(untested, scope="global")  # of all ranks the first one says it
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        sparse = bool(config and config.model_config and hasattr(config.model_config.hf_text_config, "index_topk"))
        reason = why_not(sparse)
    if reason:
        return Refusal(reason)
    return pkgutil.resolve_name(_SPARSE if sparse else _DENSE)

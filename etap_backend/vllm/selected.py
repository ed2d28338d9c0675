"""What vLLM finds when the user selects ETAP: a backend, or in a vLLM that lacks what it uses, the refusal.

It asks for `Backend` once for each layer, with its configuration set, before it says whether the layer's attention is
sparse; and a class answers for one of both. It builds sparse layers where the model's configuration has index_topk.
"""

import functools
import pkgutil

from vllm.logger import init_logger

from etap_backend import engine_contract
from etap_backend.vllm.versions import ENGINE, HOOKS_OF_SOME, SPARSE_USES, USES

_DENSE = "etap_backend.vllm.backend:ETAPBackend"
_SPARSE = "etap_backend.vllm.sparse:ETAPSparseBackend"


def _why_lacking(backend: str, uses: tuple[engine_contract.Use, ...]) -> str | None:
    """Say what a backend uses and vLLM lacks, or None when nothing is lacking."""
    if lacking := ENGINE.why_lacking(name for use in uses for name in use.lacking()):
        return lacking
    found = pkgutil.resolve_name(backend)
    classes = (found, found.get_impl_cls(), found.get_builder_cls())
    return ENGINE.why_lacking(name for cls in classes for name in engine_contract.misfits(cls, HOOKS_OF_SOME))


def _backend_or_refusal(backend: str, why_not: str | None) -> type:
    """The class, or what stands for it until vLLM's own selection has reported the reason."""
    if why_not is None:
        return pkgutil.resolve_name(backend)

    class Refusal:
        @classmethod
        def validate_configuration(cls, *args, **kwargs) -> list[str]:
            """vLLM's question to a selected backend: the reasons against it."""
            return [why_not]

    return Refusal


@functools.cache
def why_not_sparse() -> str | None:
    """Say why vLLM cannot run ETAP with models of sparse attention, or None when it can."""
    return reason or _why_lacking(_SPARSE, SPARSE_USES)


@functools.cache
def _sparse() -> type:
    return _backend_or_refusal(_SPARSE, why_not_sparse())


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if reason is None:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config and config.model_config and hasattr(config.model_config.hf_text_config, "index_topk"):
            return _sparse()
    return _backend_or_refusal(_DENSE, reason)


reason = ENGINE.why_too_old() or _why_lacking(_DENSE, USES)
"""Why vLLM cannot run ETAP at all; None when it can, with models of dense attention at least."""

if reason is None and (untested := ENGINE.why_untested()):
    # Of all ranks the first one says it. vLLM gives its handler and level to loggers below "vllm" only.
    init_logger(f"vllm.{__name__}").warning_once(untested, scope="global")

"""vLLM plugin: `vllm serve MODEL --attention-backend ETAP`.

vLLM calls `register` through the entry point `etap` of the group `vllm.general_plugins`, in every process it starts.
ETAP becomes a member of vLLM's enumeration of attention backends.
"""

import copyreg
import functools
import pkgutil
from dataclasses import dataclass
from enum import Enum

from etap_backend import engine_contract
from etap_backend.vllm import auto
from etap_backend.vllm.log import logger
from etap_backend.vllm.versions import ENGINE, NAME, NEW_HOOKS

_BACKEND_PATH = "etap_backend.vllm.backend.ETAPBackend"
# With a colon: without it, `resolve_name` reports a failed import as a missing attribute.
_DENSE, _SPARSE = "etap_backend.vllm.backend:ETAPBackend", "etap_backend.vllm.sparse:ETAPSparseBackend"


def register() -> None:
    """Make ETAP known to vLLM. May be called any number of times; touches no CUDA.

    In a vLLM that is too old, or has another registry, it only warns: a start with another backend goes on.

    Raises ValueError for an invalid value of ETAP_AUTO.
    """
    preferred = engine_contract.is_on(engine_contract.AUTO_VARIABLE)
    try:
        if (reason := ENGINE.why_too_old()) is None:
            _register(preferred)
    except Exception as error:  # vLLM's registries may have changed in any way
        reason = f"{ENGINE.name} lacks what {NAME} uses: {type(error).__name__}: {error}"
    if reason:
        logger.warning("%s; other attention backends are not affected", reason)


def _register(preferred: bool) -> None:
    # Imported here: it imports vLLM's registry of models, which may be another one.
    from etap_backend.vllm import v4_selection

    member = backend_member()
    v4_selection.register_models()
    if preferred:
        auto.prefer(member)


def backend_member() -> Enum:
    """The member ETAP of vLLM's enumeration of attention backends, registered if it is not yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, _BACKEND_PATH)
        # The class depends on the model: vLLM asks the member for it once per layer.
        AttentionBackendEnum[NAME].get_class = backend_class
        _make_picklable(AttentionBackendEnum)
    return AttentionBackendEnum[NAME]


def _make_picklable(enum: type[Enum]) -> None:
    """Let a spawned process unpickle the member ETAP.

    Reason: the engine core and the workers unpickle their configuration before they load plugins. A member pickles as
    its class and value, and the value is unknown there: "... is not a valid AttentionBackendEnum". A reducer that
    names `backend_member` makes unpickling import this module and register.
    Versions: all. Goes when vLLM loads plugins first, or gives registered members a reducer of its own.
    """
    previous = copyreg.dispatch_table.get(enum)  # perhaps another plugin's, for its own member

    def reduce(member: Enum) -> "str | tuple":
        if member.name == NAME:
            return backend_member, ()
        return previous(member) if previous else member.__reduce_ex__(2)

    copyreg.pickle(enum, reduce)


@functools.cache
def why_not(sparse: bool) -> str | None:
    """Say why this vLLM cannot run ETAP for models of sparse (or dense) attention, or None when it can."""
    if reason := why_not(False) if sparse else ENGINE.why_too_old():
        return reason

    def classes() -> tuple[type, ...]:
        backend = pkgutil.resolve_name(_SPARSE if sparse else _DENSE)
        return backend, backend.get_impl_cls(), backend.get_builder_cls()

    return ENGINE.why_lacking(engine_contract.lacking(classes, NEW_HOOKS))


@dataclass(frozen=True)
class Refusal:
    """Takes the place of a backend that cannot run, so that vLLM's own selection reports the reason."""

    reason: str

    def validate_configuration(self, *_, **__) -> list[str]:
        """The reasons against the backend, as vLLM asks a selected one."""
        return [self.reason]


def backend_class() -> type | Refusal:
    """The backend's class for the model of the current configuration.

    vLLM asks before it says whether a layer's attention is sparse, and one class serves either kind. Layers are sparse
    where the model's configuration has index_topk.
    """
    sparse, reason = False, why_not(False)
    if reason is None:
        if untested := ENGINE.why_untested():
            logger.warning_once(untested, scope="global")  # on one rank only
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        sparse = bool(config and config.model_config and hasattr(config.model_config.hf_text_config, "index_topk"))
        reason = why_not(sparse)
    if reason:
        return Refusal(reason)
    return pkgutil.resolve_name(_SPARSE if sparse else _DENSE)

"""Where vLLM knows attention backends by name: ETAP becomes a member of its enumeration, in every process."""

import copyreg
from enum import Enum

from etap_backend import engine_contract
from etap_backend.vllm import auto, selected, v4_selection
from etap_backend.vllm.log import logger
from etap_backend.vllm.versions import ENGINE, NAME

_BACKEND_PATH = "etap_backend.vllm.backend.ETAPBackend"


def register() -> None:
    """Register ETAP. Where vLLM's registry is another one this only warns: a start with another backend goes on.

    Raises ValueError for a value of ETAP_AUTO that is none.
    """
    preferred = engine_contract.is_first_choice()
    try:
        member = backend_member()
        v4_selection.watch()
        if preferred:
            auto.prefer(member)
    except Exception as error:  # nothing is known of that registry
        reason = ENGINE.why_too_old() or ENGINE.why_lacking([f"{type(error).__name__}: {error}"])
        logger.warning("%s; other attention backends are not affected", reason)


def backend_member() -> Enum:
    """The member ETAP of vLLM's enumeration of attention backends, added when it is not there yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if NAME not in AttentionBackendEnum.__members__:
        _add_member(AttentionBackendEnum)
        # The class depends on the model: vLLM asks the member for it once for each layer.
        AttentionBackendEnum[NAME].get_class = selected.backend_class
        _make_picklable(AttentionBackendEnum)
        logger.info("Attention backend %s registered", NAME)
    return AttentionBackendEnum[NAME]


def _add_member(enum: type[Enum]) -> None:
    """Add the member ETAP with the backend's path as its value.

    Reason: `register_backend` takes the name of a new backend since vLLM 0.32; before, it only replaces existing
    members. The steps are those that 0.32 takes.
    Versions: below 0.32. Goes when 0.32 is the oldest one supported.
    """
    if hasattr(enum, "register"):
        from vllm.v1.attention.backends.registry import register_backend

        register_backend(NAME, _BACKEND_PATH)
        return
    member = object.__new__(enum)
    member._name_, member._value_ = NAME, _BACKEND_PATH
    setattr(enum, NAME, member)
    enum._member_map_[NAME] = enum._value2member_map_[_BACKEND_PATH] = member
    enum._member_names_.append(NAME)


def _make_picklable(enum: type[Enum]) -> None:
    """Let a spawned process unpickle the member ETAP.

    Reason: the engine core and the workers get their configuration by pickle before they load any plugin. An
    enumeration member pickles as its class and value, and there the value is not known yet: "... is not a valid
    AttentionBackendEnum". A reducer that names `backend_member` makes unpickling import this module and register.
    Versions: all. Goes when vLLM loads plugins first, or gives added members a reducer of its own.
    """
    # Another plugin may cure its own member in the same way.
    previous = copyreg.dispatch_table.get(enum)

    def reduce(member: Enum) -> "str | tuple":
        if member.name == NAME:
            return backend_member, ()
        return previous(member) if previous else member.__reduce_ex__(2)

    copyreg.pickle(enum, reduce)

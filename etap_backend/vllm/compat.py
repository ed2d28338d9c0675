"""Differences between vLLM versions, each with its reason, the versions and when it can go."""

import contextlib
import copyreg
import importlib.metadata
import logging
from enum import Enum

from etap_backend import plugins

NAME = "ETAP"
SUPPORTED_VERSIONS = plugins.Versions("0.26.0", "0.34")

_BACKEND_PATH = "etap_backend.vllm.backend.SelectedBackend"
_REFUSAL_PATH = f"{__name__}.UnsupportedVersion"

# vLLM gives its handler and level to loggers below "vllm" only.
_logger = logging.getLogger(f"vllm.{__name__}")


def why_unsupported_version() -> str | None:
    """Say why the installed vLLM cannot run ETAP, or None when it can."""
    return plugins.why_unsupported_version("vLLM", "vllm", NAME, SUPPORTED_VERSIONS)


class UnsupportedVersion:
    """What the name ETAP stands for in a vLLM outside the supported range: vLLM's own selection reports the reason."""

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """vLLM's question to a selected backend: the reasons against it."""
        reason = why_unsupported_version()
        return [reason] if reason else []


def register() -> None:
    """Register ETAP. In an unsupported vLLM this only warns, so that a start with another backend goes on."""
    reason = why_unsupported_version()
    if reason is None:
        backend_member()
        return
    _logger.warning("%s; other attention backends are not affected", reason)
    # Nothing is known about that version's registry. Without a member the name is simply an unknown one.
    with contextlib.suppress(Exception):
        backend_member()


def backend_member() -> Enum:
    """The member ETAP of vLLM's enumeration of attention backends, added when it is not there yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if NAME not in AttentionBackendEnum.__members__:
        path = _BACKEND_PATH if why_unsupported_version() is None else _REFUSAL_PATH
        _add_member(AttentionBackendEnum, path)
        _make_picklable(AttentionBackendEnum)
        _logger.info("Attention backend %s registered", NAME)
    return AttentionBackendEnum[NAME]


def _add_member(enum: type[Enum], path: str) -> None:
    """Add the member ETAP with the class path as its value.

    Reason: `register_backend` takes the name of a new backend since vLLM 0.32 (vllm#41091); before, it only replaces
    existing members. The steps are those that 0.32 takes.
    Versions: below 0.32. Goes when 0.32 is the oldest one supported.
    """
    if hasattr(enum, "register"):
        from vllm.v1.attention.backends.registry import register_backend

        register_backend(NAME, path)
        return
    member = object.__new__(enum)
    member._name_ = NAME
    member._value_ = path
    setattr(enum, NAME, member)
    enum._member_map_[NAME] = member
    enum._value2member_map_[path] = member
    enum._member_names_.append(NAME)


def _make_picklable(enum: type[Enum]) -> None:
    """Let a spawned process unpickle the member ETAP.

    Reason: the engine core and the workers get their configuration by pickle before they load any plugin. An
    enumeration member pickles as its class and value, and there the value is not known yet: "... is not a valid
    AttentionBackendEnum". A reducer that names `rebuild_member` makes unpickling import this module and register.
    Versions: all. Goes when vLLM loads plugins first, or gives added members a reducer of its own.
    """
    # Another plugin may cure its own member in the same way.
    previous = copyreg.dispatch_table.get(enum)

    def reduce(member: Enum) -> "str | tuple":
        if member.name == NAME:
            return rebuild_member, ()
        return previous(member) if previous else member.__reduce_ex__(2)

    copyreg.pickle(enum, reduce)


def rebuild_member() -> Enum:
    """What a pickled member ETAP becomes: the member of the process that unpickles it."""
    return backend_member()


def reserves_in_profile_run() -> bool:
    """Whether vLLM calls `reserve_workspace` of the implementation while it measures the memory that a model needs.

    Reason: the hook exists since 0.33. Before, an implementation claims its workspace when it is constructed, which is
    ahead of the measurement too. Where the hook exists, construction is too early: there the manager allocates from a
    pool of its own, and not inside that of the weights.
    Versions: below 0.33. Goes when 0.33 is the oldest one supported.
    """
    from vllm.v1.attention.backend import MLAAttentionImpl

    return hasattr(MLAAttentionImpl, "reserve_workspace")


def max_decode_query_len(vllm_config) -> int:
    """Query tokens of a request that is decoded: 1, more with speculative decoding.

    Reason: this rule is a function since 0.31. Before, it is inside `AttentionMetadataBuilder`, which is constructed
    when memory has been measured.
    Versions: below 0.31. Goes when 0.31 is the oldest one supported.
    """
    from vllm.v1.attention import backend

    if hasattr(backend, "max_decode_query_len"):
        return backend.max_decode_query_len(vllm_config)
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return 1
    return 1 + (2 if speculative.parallel_drafting else 1) * speculative.num_speculative_tokens


def pads_tokens_of_no_request(vllm_config) -> bool:
    """Whether a step of prompts, however short, may come with tokens that belong to none of its requests.

    Reason: beside breakable CUDA graphs the V2 model runner pads the tokens of a step, and its requests too only where
    it decodes. In a step of short prompts of one length those tokens are none's, but counted as decodes'.
    Versions: 0.26; 0.33 pads for full graphs alone. Goes when 0.33 is the oldest one supported.
    """
    import vllm.envs as envs

    padded = plugins.release(importlib.metadata.version("vllm")) < (0, 33, 0)
    return padded and envs.VLLM_USE_BREAKABLE_CUDAGRAPH and vllm_config.use_v2_model_runner

"""Where SGLang knows attention backends by name.

SGLang asks a backend for little and decides much by comparing names with lists. Each function here names the list or
the function of SGLang that it extends, and what would happen without.
"""

import functools
import inspect
import logging
import logging.handlers
import pkgutil

from etap_backend import engine_contract
from etap_backend.limits import TILE_TOKENS
from etap_backend.sglang import arguments, versions
from etap_backend.sglang.versions import DRAFT_HOOK, ENGINE, FP8_MATH_NAME, NAME, NAMES, PAGE_HOOK, SPARSE_HOOK, V4_NAME

_logger = logging.getLogger(__name__)

LISTS = (
    "add_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
)
"""Functions that extend the choices of `--attention-backend` and its kin, and the names that may be deterministic and
keep the radix cache then (without: refused)."""
PREFIX_LIST = "add_chunked_prefix_cache_attention_backend"
"""The one for the backends that may use the chunked prefix cache (without: it is off)."""
NEEDED = (
    PAGE_HOOK,
    DRAFT_HOOK,
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    *(f"sglang.srt.server_args.{name}" for name in (*LISTS, PREFIX_LIST)),
)
"""What is extended or called to enter the names: where one is gone they stay unknown."""
V4_HOOKS = (versions.V4_DRAFT_HOOK, versions.V4_STEPS_HOOK)
"""What is hooked for DeepSeek-V4 besides: where one is gone, that model is refused."""
OF_SOME = ("init_mha_chunk_metadata", "extend_dummy_seqs_capped_by_req_pool")
"""What SGLang asks of a backend where it has it, and of its own classes only some versions have."""


class Unavailable(RuntimeError):
    """ETAP is not registered in this SGLang, for the reason in the text."""


def register() -> None:
    """Register ETAP, or say in one line of the log why not; other attention backends are then not affected.

    SGLang swallows what a plugin raises, and then refuses the name as an invalid choice.
    """
    try:
        if reason := why_unregistered():
            _logger.warning("etap-backend: %s; other attention backends are not affected", reason)
        else:
            _register_names()
    except Exception as error:
        text = "etap-backend: the attention backend %s is not available: %s: %s"
        _logger.error(text, NAME, type(error).__name__, error)
        raise


def _register_names() -> None:
    """Enter ETAP where SGLang looks while it reads its arguments and makes its backends."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    for name in LISTS:
        getattr(server_args, name)(list(NAMES))
    if hasattr(server_args, "add_draft_attention_backend_choices"):
        server_args.add_draft_attention_backend_choices(list(NAMES))
    HookRegistry.register(PAGE_HOOK, resolve_arguments, HookType.AFTER)
    if _is_there(SPARSE_HOOK):
        HookRegistry.register(SPARSE_HOOK, arguments.resolve_sparse_kernels, HookType.AFTER)
    if _is_there(versions.HISPARSE_LIST):
        for kernels in pkgutil.resolve_name(versions.HISPARSE_LIST).values():
            kernels.add(NAME)
    HookRegistry.register(DRAFT_HOOK, offer_draft_backend, HookType.BEFORE)
    versions.hook_choice(choose_by_default)
    if V4_NAME in ATTENTION_BACKENDS and all(map(_is_there, V4_HOOKS)):
        register_attention_backend(V4_NAME)(functools.partial(make_v4_backend, ATTENTION_BACKENDS[V4_NAME]))
        for hook, make in zip(V4_HOOKS, (make_v4_draft_backend, make_v4_steps_backend), strict=True):
            HookRegistry.register(hook, make, HookType.AROUND)
    for name in NAMES:
        getattr(server_args, PREFIX_LIST)(name)
        register_attention_backend(name)(functools.partial(make_backend, fp8_math=name == FP8_MATH_NAME))
    _logger.info("Attention backends %s registered", " and ".join(NAMES))


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def why_unregistered() -> str | None:
    """Say by name why ETAP is not registered in the installed SGLang, or None when it is."""
    return ENGINE.why_too_old() or ENGINE.why_lacking(name for name in NEEDED if not _is_there(name))


def _classes(sparse: bool = False, v4: bool = False) -> tuple[type, type]:
    """The backend, and that of a draft model's steps; importing them imports SGLang's backends and models."""
    if v4:
        from etap_backend.sglang.v4 import ETAPV4Backend, ETAPV4MultiStepDraftBackend

        return ETAPV4Backend, ETAPV4MultiStepDraftBackend
    if sparse:
        from etap_backend.sglang.sparse import ETAPSparseBackend, ETAPSparseMultiStepDraftBackend

        return ETAPSparseBackend, ETAPSparseMultiStepDraftBackend
    from etap_backend.sglang.backend import ETAPBackend, ETAPMultiStepDraftBackend

    return ETAPBackend, ETAPMultiStepDraftBackend


def why_unusable(sparse: bool = False) -> str | None:
    """Say by name what a backend lacks in the installed SGLang, or None; imports SGLang's backends and models.

    Args:
        sparse: whether for sparse attention, what it needs besides, or for dense attention.
    """
    if sparse and not _is_there(SPARSE_HOOK):
        return ENGINE.why_lacking([SPARSE_HOOK])

    def classes() -> tuple[type, type]:
        versions.register_model_support()
        return _classes(sparse)

    return ENGINE.why_lacking(engine_contract.lacking(classes, OF_SOME))


def why_no_v4() -> str | None:
    """Say by name what DeepSeek-V4's backend lacks in the installed SGLang, or None; imports SGLang's.

    A factory or a hook that is not ours would leave the target or its drafts to SGLang's kernels.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    missing = _unhooked(*V4_HOOKS)
    if getattr(ATTENTION_BACKENDS.get(V4_NAME), "func", None) is not make_v4_backend:
        missing.append(f"attention backend {V4_NAME}")
    if missing:
        return ENGINE.why_lacking(missing)

    def classes() -> tuple[type, type]:
        functions = versions.flash_mla()
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
            getattr(functions, name)
        return _classes(v4=True)

    return ENGINE.why_lacking(engine_contract.lacking(classes))


def _unhooked(*hooks: str) -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [hook for hook in hooks if hook not in HookRegistry._patched]


def resolve_arguments(declared: dict, view) -> dict | None:
    """Look for what ETAP uses and resolve its arguments, where it was chosen, before any weight is loaded.

    Runs after `_mla_backend_page_constraints`, which sets the page size of the backends that SGLang knows; without, it
    would be 1.
    """
    chosen = (*arguments.names_of_model(view), view.speculative_draft_attention_backend)
    name = next((name for name in (*chosen, versions.name_given(view)) if name in NAMES), None)
    if name is None:
        return None
    v4 = versions.is_v4(versions.model_config(view))
    if not v4 and name not in chosen:
        return None  # another model for which SGLang takes a backend of its own
    if reason := _why_not(view, name):
        raise ValueError(f"--attention-backend {name}: {reason}")
    if untested := ENGINE.why_untested():
        _say(logging.WARNING, untested)
    if v4:
        # SGLang renames the backend, and asks of this kernel in other models only: it tells all ranks what was named.
        return declared | {"dsa_decode_backend": NAME}
    return declared if declared.get("page_size", view.page_size) else declared | {"page_size": TILE_TOKENS}


def _why_not(view, name: str) -> str | None:
    model = versions.model_config(view)
    if versions.is_v4(model):
        lacking = why_no_v4()
    else:
        lacking = why_unusable() or (why_unusable(sparse=True) if versions.is_sparse(model) else None)
    return lacking or arguments.why_not(view, name)


def choose_by_default(server_args) -> None:
    """Choose ETAP where the user wants it by default, named no attention backend, and nothing keeps it from serving.

    Runs before SGLang chooses backends for some models. One line of the log says what becomes of the wish.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    if not engine_contract.is_first_choice() or any(arguments.names_of_model(server_args)):
        return
    view = versions.if_chosen(server_args)
    reason = arguments.why_not_unasked(view) or _why_not(view, NAME)
    if reason is None:
        versions.choose(server_args)
    chosen = f"SGLang's own attention backend: {reason}" if reason else NAME
    _say(logging.INFO, f"{engine_contract.AUTO_VARIABLE}: {chosen}")


@functools.cache  # SGLang may resolve its arguments again
def _say(level: int, text: str) -> None:
    _logger.log(level, "etap-backend: %s", text)


def make_backend(model_runner, fp8_math: bool):
    """SGLang's factory of the backend that `--attention-backend` names."""
    sparse = versions.is_sparse(model_runner.model_config)
    backend, _ = _classes(sparse)
    return backend(model_runner) if sparse else backend(model_runner, fp8_math=fp8_math)


def make_v4_backend(sglangs, model_runner):
    """SGLang's factory of the backend `dsv4`: ours where the user named ETAP, else what SGLang's own makes."""
    return _classes(v4=True)[0](model_runner) if versions.v4_is_ours() else sglangs(model_runner)


def make_v4_draft_backend(sglangs, factory):
    """Around SGLang's maker of the backend that extends the cache of DeepSeek-V4's draft model."""
    if not versions.v4_is_ours():
        return sglangs(factory)
    backend, _ = _classes(v4=True)
    return _answer(factory, V4_NAME, backend(factory.draft_model_runner))


def make_v4_steps_backend(sglangs, factory):
    """Around SGLang's maker of the backend of the steps in which DeepSeek-V4's draft model makes tokens."""
    if not versions.v4_is_ours():
        return sglangs(factory)
    _, steps = _classes(v4=True)
    return _answer(factory, V4_NAME, steps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps))


def _answer(factory, name: str, backend):
    """As the draft's factory has it: since 0.5.18 with the backend's name, when it got an option of this name."""
    named = "stamps_children" in inspect.signature(type(factory)._create_backend).parameters
    return (name, backend) if named else backend


def offer_draft_backend(factory, backend_name: str, backend_map: dict, error_template: str, **options) -> None:
    """Add ETAP to the backends that a draft model may have; runs before `DraftBackendFactory._create_backend`.

    Without, SGLang says "EAGLE is not supported in decode attention backend etap". The factory calls it twice, for the
    steps of drafting and for the draft's extension by the verified tokens, with a table for each.
    """
    of_steps = backend_map.get("flashmla") == factory._create_flashmla_decode_backend

    def create(name: str):
        runner = factory.draft_model_runner
        sparse = versions.is_sparse(runner.model_config)
        single, steps = _classes(sparse)
        options = {"fp8_math": name == FP8_MATH_NAME}
        if sparse:
            options = {"seed_dsa_topk_from_draft_extend": factory.seed_dsa_topk_from_draft_extend}
        many = (factory.topk, factory.speculative_num_steps) if of_steps else ()
        return _answer(factory, name, (steps if of_steps else single)(runner, *many, **options))

    backend_map |= {name: functools.partial(create, name) for name in NAMES}


def check_plugin() -> None:
    """Load SGLang's plugins as its server does, and raise Unavailable with what it swallowed, if ETAP is missing."""
    from sglang.srt import plugins as loader
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    swallowed = logging.handlers.BufferingHandler(capacity=1000)
    swallowed.setLevel(logging.ERROR)
    logging.getLogger("sglang.srt.plugins").addHandler(swallowed)
    loader.load_plugins()
    reason = why_unregistered()
    if reason is None and NAME not in ATTENTION_BACKENDS:
        reason = f"no attention backend {NAME}"
    elif reason is None and (missing := _unhooked(PAGE_HOOK, DRAFT_HOOK)):
        reason = f"{', '.join(missing)} not hooked"
    if reason:
        raise Unavailable("; ".join([reason, *map(_line_of, swallowed.buffer)]))
    if reason := why_unusable():
        raise Unavailable(reason)


def _line_of(record: logging.LogRecord) -> str:
    """The message and the exception behind it."""
    cause = record.exc_info[1] if record.exc_info else None
    return record.getMessage() + (f": {type(cause).__name__}: {cause}" if cause else "")

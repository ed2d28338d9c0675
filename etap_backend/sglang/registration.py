"""Registration of ETAP in SGLang.

SGLang asks a backend for little, and decides much by comparing names with lists. Each constant names a list or function
of SGLang that is extended here, and says what would happen without.
"""

import functools
import logging
import logging.handlers
import pkgutil

from etap_backend import engine_contract
from etap_backend.limits import TILE_TOKENS
from etap_backend.sglang import arguments, flash_mla, versions
from etap_backend.sglang.versions import DRAFT_HOOK, ENGINE, FP8_MATH_NAME, NAME, NAMES, PAGE_HOOK, SPARSE_HOOK, V4_NAME

_logger = logging.getLogger(__name__)

LISTS = (
    "add_attention_backend_choices",
    "add_draft_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
)
"""Functions of SGLang that extend the choices of `--attention-backend` and similar arguments, and the backends that may
be deterministic and keep the radix cache then (without: refused)."""
PREFIX_LIST = "add_chunked_prefix_cache_attention_backend"
"""The function for backends that may use the chunked prefix cache (without: it is off)."""
NEEDED = (
    PAGE_HOOK,
    DRAFT_HOOK,
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    *(f"sglang.srt.server_args.{name}" for name in (*LISTS, PREFIX_LIST)),
)
"""Where one of these is missing, the names stay unknown."""
V4_HOOKS = (versions.V4_DRAFT_HOOK, versions.V4_STEPS_HOOK)
"""Where one of these is missing, DeepSeek-V4 is refused."""
OPTIONAL_HOOKS = ("init_mha_chunk_metadata",)
"""Methods that SGLang calls where a backend has them, and that its base class lacks."""


class Unavailable(RuntimeError):
    """ETAP is not registered in this SGLang, for the reason in the text."""


def register() -> None:
    """Register ETAP, or say in one line of the log why not; other attention backends are not affected.

    SGLang swallows a plugin's exceptions, and then refuses the name as an invalid choice.
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
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    for name in LISTS:
        getattr(server_args, name)(list(NAMES))
    register_resolution_hook("handle_model_specific_adjustments")(choose_by_default)
    HookRegistry.register(PAGE_HOOK, resolve_arguments, HookType.AFTER)
    HookRegistry.register(DRAFT_HOOK, offer_draft_backend, HookType.BEFORE)
    if _is_there(SPARSE_HOOK):
        HookRegistry.register(SPARSE_HOOK, arguments.resolve_sparse_kernels, HookType.AFTER)
    if _is_there(versions.HISPARSE_LIST):
        for kernels in pkgutil.resolve_name(versions.HISPARSE_LIST).values():
            kernels.add(NAME)
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
    """The backend, and the backend of a draft model's decode steps; imports SGLang's backends and models."""
    if v4:
        from etap_backend.sglang.v4 import ETAPV4Backend, ETAPV4MultiStepDraftBackend

        return ETAPV4Backend, ETAPV4MultiStepDraftBackend
    from etap_backend.sglang import model_support

    model_support.register()
    if sparse:
        from etap_backend.sglang.sparse import ETAPSparseBackend, ETAPSparseMultiStepDraftBackend

        return ETAPSparseBackend, ETAPSparseMultiStepDraftBackend
    from etap_backend.sglang.backend import ETAPBackend, ETAPMultiStepDraftBackend

    return ETAPBackend, ETAPMultiStepDraftBackend


def why_unusable(sparse: bool = False) -> str | None:
    """Say by name what a backend lacks in the installed SGLang, or None; imports SGLang's backends and models.

    Args:
        sparse: whether to ask for sparse or for dense attention.
    """
    if sparse and not _is_there(SPARSE_HOOK):
        return ENGINE.why_lacking([SPARSE_HOOK])
    return ENGINE.why_lacking(engine_contract.lacking(lambda: _classes(sparse), OPTIONAL_HOOKS))


def why_no_v4() -> str | None:
    """Say by name what DeepSeek-V4's backend lacks in the installed SGLang, or None; imports SGLang's.

    Where another plugin replaced a factory or a hook failed, SGLang's kernels would run the target or its drafts.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    missing = versions.unhooked(V4_HOOKS)
    if getattr(ATTENTION_BACKENDS.get(V4_NAME), "func", None) is not make_v4_backend:
        missing.append(f"attention backend {V4_NAME}")
    if missing:
        return ENGINE.why_lacking(missing)

    def classes() -> tuple[type, type]:
        for owner, name in flash_mla.targets():
            getattr(owner, name)
        return _classes(v4=True)

    return ENGINE.why_lacking(engine_contract.lacking(classes))


def resolve_arguments(declared: dict, view) -> dict | None:
    """Check that this SGLang and these arguments suit ETAP, where it was chosen, and resolve its arguments.

    Runs after `_mla_backend_page_constraints`, which sets the page size of the backends that SGLang knows (without: 1).

    Raises:
        ValueError: ETAP was chosen and cannot serve; the text says why.
    """
    chosen = (*arguments.model_backends(view), view.speculative_draft_attention_backend)
    name = next((name for name in (*chosen, versions.name_given(view)) if name in NAMES), None)
    if name is None:
        return None
    v4 = versions.is_v4(versions.model_config(view))
    if not v4 and name not in chosen:
        return None  # SGLang chose another backend for this model
    if reason := _why_not(view, name):
        raise ValueError(f"--attention-backend {name}: {reason}")
    if untested := ENGINE.why_untested():
        _log_once(logging.WARNING, untested)
    if v4:
        # SGLang renames the backend. This argument, which it reads for other models only, tells all ranks.
        return declared | {"dsa_decode_backend": NAME}
    return declared if declared.get("page_size", view.page_size) else declared | {"page_size": TILE_TOKENS}


def _why_not(view, name: str) -> str | None:
    model = versions.model_config(view)
    if versions.is_v4(model):
        lacking = why_no_v4()
    else:
        lacking = why_unusable() or (why_unusable(sparse=True) if versions.is_sparse(model) else None)
    return lacking or arguments.why_not(view, name)


def choose_by_default(server_args, previous) -> None:
    """Choose ETAP where ETAP_AUTO is 1, no attention backend is named, and nothing keeps ETAP from serving.

    Runs before `previous`, in which SGLang chooses backends for some models. One line of the log tells the choice.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    if engine_contract.is_on(engine_contract.AUTO_VARIABLE) and not any(arguments.model_backends(server_args)):
        view = versions.if_chosen(server_args)
        reason = arguments.why_not_default(view) or _why_not(view, NAME)
        if reason is None:
            versions.choose(server_args)
        chosen = f"SGLang's own attention backend: {reason}" if reason else NAME
        _log_once(logging.INFO, f"{engine_contract.AUTO_VARIABLE}: {chosen}")
    previous(server_args)


@functools.cache  # SGLang may resolve its arguments again
def _log_once(level: int, text: str) -> None:
    _logger.log(level, "etap-backend: %s", text)


def make_backend(model_runner, fp8_math: bool):
    """SGLang's factory of the backend that `--attention-backend` names."""
    sparse = versions.is_sparse(model_runner.model_config)
    backend, _ = _classes(sparse)
    return backend(model_runner) if sparse else backend(model_runner, fp8_math=fp8_math)


def make_v4_backend(make_sglangs, model_runner):
    """SGLang's factory of the backend `dsv4`: ETAP's where the user named ETAP, else what `make_sglangs` makes."""
    return _classes(v4=True)[0](model_runner) if versions.serves_v4() else make_sglangs(model_runner)


def make_v4_draft_backend(make_sglangs, factory):
    """Around SGLang's maker of the backend that extends the cache of DeepSeek-V4's draft model."""
    if not versions.serves_v4():
        return make_sglangs(factory)
    return V4_NAME, _classes(v4=True)[0](factory.draft_model_runner)


def make_v4_steps_backend(make_sglangs, factory):
    """Around SGLang's maker of the backend for the decode steps of DeepSeek-V4's draft model."""
    if not versions.serves_v4():
        return make_sglangs(factory)
    return V4_NAME, _classes(v4=True)[1](factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def offer_draft_backend(factory, backend_name: str, backend_map: dict, error_template: str, **options) -> None:
    """Add ETAP to the backends that a draft model may have; runs before `DraftBackendFactory._create_backend`.

    Without, SGLang says "EAGLE is not supported in decode attention backend etap". The factory calls it for the decode
    steps, whose backend has one child per step (`stamps_children`), and for the draft extension.
    """
    has_steps = options.get("stamps_children", False)

    def create(name: str):
        runner, options = factory.draft_model_runner, {"fp8_math": name == FP8_MATH_NAME}
        if sparse := versions.is_sparse(runner.model_config):
            options = {"seed_dsa_topk_from_draft_extend": factory.seed_dsa_topk_from_draft_extend}
        single, steps = _classes(sparse)
        if has_steps:
            return name, steps(runner, factory.topk, factory.speculative_num_steps, **options)
        return name, single(runner, **options)

    backend_map |= {name: functools.partial(create, name) for name in NAMES}


def check_plugin() -> None:
    """Load SGLang's plugins as its server does.

    Raises:
        Unavailable: ETAP is missing; the text has the reason, and what SGLang logged and swallowed.
    """
    from sglang.srt import plugins as loader
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    swallowed = logging.handlers.BufferingHandler(capacity=1000)
    swallowed.setLevel(logging.ERROR)
    logging.getLogger("sglang.srt.plugins").addHandler(swallowed)
    loader.load_plugins()
    reason = why_unregistered()
    if reason is None and NAME not in ATTENTION_BACKENDS:
        reason = f"no attention backend {NAME}"
    elif reason is None and (missing := versions.unhooked((PAGE_HOOK, DRAFT_HOOK))):
        reason = f"{', '.join(missing)} not hooked"
    if reason:
        raise Unavailable("; ".join([reason, *map(_line_of, swallowed.buffer)]))
    if reason := why_unusable():
        raise Unavailable(reason)


def _line_of(record: logging.LogRecord) -> str:
    """The message, and the exception behind it."""
    cause = record.exc_info[1] if record.exc_info else None
    return record.getMessage() + (f": {type(cause).__name__}: {cause}" if cause else "")

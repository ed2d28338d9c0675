"""Where SGLang knows attention backends by name, and what differs between its versions.

SGLang asks a backend for little and decides much by comparing names with lists. Each function here names the list or
the function of SGLang that it extends, and what would happen without.
"""

import inspect
import logging

import torch
from packaging.specifiers import SpecifierSet

from etap_backend import plugins
from etap_backend.support import TILE_TOKENS, why_unsupported

NAME = "etap"
SUPPORTED_VERSIONS = SpecifierSet(">=0.5.17,<0.5.24", prereleases=True)
SPECULATIVE_ALGORITHMS = (None, "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
"""Those whose drafts are a chain when topk is 1; the others may verify a tree, whose mask the kernels do not take."""

PAGES_PER_PROGRAM = 64  # of a block table, filled by one Triton program

_DTYPES = {"half": torch.float16, "float16": torch.float16, "float": torch.float32, "float32": torch.float32}
_CACHE_DTYPES = {"bf16": "bfloat16"}
_PAGE_HOOK = "sglang.srt.arg_groups.overrides._mla_backend_page_constraints"
_DRAFT_HOOK = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"

_logger = logging.getLogger(__name__)


class Unavailable(RuntimeError):
    """ETAP is not registered in this SGLang, for the reason in the text."""


def why_unsupported_version() -> str | None:
    """Say why the installed SGLang cannot run ETAP, or None when it can."""
    return plugins.why_unsupported_version("SGLang", "sglang", NAME, SUPPORTED_VERSIONS)


def register() -> None:
    """Register ETAP, or say in one line of the log why not; other attention backends are then not affected.

    SGLang swallows what a plugin raises, and then refuses the name as an invalid choice.
    """
    try:
        if reason := why_unsupported_version():
            _logger.warning("etap-backend: %s; other attention backends are not affected", reason)
            return
        _register_names()
    except Exception as error:
        text = "etap-backend: the attention backend %s is not available: %s: %s"
        _logger.error(text, NAME, type(error).__name__, error)
        raise


def _register_names() -> None:
    """Enter ETAP where SGLang looks while it reads its arguments and makes its backends.

    The lists are the choices of `--attention-backend` and its kin, those of the draft's backend where it has a list of
    its own, and the backends that may use the chunked prefix cache (without: it is off).
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    server_args.add_attention_backend_choices([NAME])
    if hasattr(server_args, "add_draft_attention_backend_choices"):
        server_args.add_draft_attention_backend_choices([NAME])
    server_args.add_chunked_prefix_cache_attention_backend(NAME)
    HookRegistry.register(_PAGE_HOOK, resolve_arguments, HookType.AFTER)
    HookRegistry.register(_DRAFT_HOOK, offer_draft_backend, HookType.BEFORE)
    register_attention_backend(NAME)(make_backend)
    _logger.info("Attention backend %s registered", NAME)


def make_backend(model_runner):
    """SGLang's factory of the backend that `--attention-backend etap` names."""
    from etap_backend.sglang.backend import ETAPBackend

    return ETAPBackend(model_runner)


def resolve_arguments(declared: dict, view) -> dict | None:
    """Refuse arguments that ETAP cannot serve, before any weight is loaded, and set a page size of 64 where it is free.

    Runs after `_mla_backend_page_constraints`, which does the latter for the backends that SGLang knows; without, the
    page size would be 1.
    """
    chosen = (view.attention_backend, view.decode_attention_backend, view.prefill_attention_backend)
    if NAME not in (*chosen, view.speculative_draft_attention_backend):
        return None
    page_size = declared.get("page_size", view.page_size)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    reason = why_unsupported(
        dtype=_DTYPES.get(view.dtype, torch.bfloat16),
        page_size=TILE_TOKENS if page_size is None else page_size,
        kv_cache_dtype=_cache_dtype(view.kv_cache_dtype, view.dtype),
        compute_capability=capability,
    )
    reason = reason or why_unsupported_speculation(
        view.speculative_algorithm, view.speculative_eagle_topk, view.dcp_size
    )
    if reason is None and NAME in chosen and not _uses_mla(view):
        reason = "the model's attention is not MLA"
    if reason := reason or plugins.why_no_library():
        raise ValueError(f"--attention-backend {NAME}: {reason}")
    if page_size is None:
        return declared | {"page_size": TILE_TOKENS}
    return None


def _cache_dtype(name: str, dtype: str) -> str:
    """The KV cache's type by the name that `why_unsupported` reads; auto where it may follow the model's type."""
    if name == "auto" or dtype == "auto":
        return "auto" if name in ("auto", *_CACHE_DTYPES, *_CACHE_DTYPES.values()) else name
    return _CACHE_DTYPES.get(name, name)


def why_unsupported_speculation(algorithm: str | None, topk: int | None, dcp_size: int) -> str | None:
    """Say why this speculative decoding cannot run, or None when it can."""
    if algorithm not in SPECULATIVE_ALGORITHMS:
        names = ", ".join(filter(None, SPECULATIVE_ALGORITHMS))
        return f"speculative algorithm {algorithm} is not supported: wanted one of {names}"
    if algorithm is not None and topk not in (None, 1):
        return f"speculative_eagle_topk {topk} is not supported: wanted 1, a chain of drafts"
    if algorithm is not None and dcp_size > 1:
        return f"speculative decoding with decode context parallelism (dcp_size {dcp_size}) is not supported"
    return None


def _uses_mla(view) -> bool:
    """Whether SGLang runs this model's attention as MLA.

    Reason: a method of the arguments became a function when they were taken apart.
    Versions: below 0.5.19. Goes when 0.5.19 is the oldest one supported.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import use_mla_backend
    except ImportError:
        return view.use_mla_backend()
    return use_mla_backend(view)


def offer_draft_backend(factory, backend_name: str, backend_map: dict, error_template: str, **options) -> None:
    """Add ETAP to the backends that a draft model may have; runs before `DraftBackendFactory._create_backend`.

    Without, SGLang says "EAGLE is not supported in decode attention backend etap". The factory calls it twice, for the
    steps of drafting and for the draft's extension by the verified tokens, with a table for each.
    """
    decodes = backend_map.get("flashmla") == factory._create_flashmla_decode_backend
    # Since 0.5.18 an entry of the table answers with the backend's name too, and this option exists.
    named = "stamps_children" in inspect.signature(type(factory)._create_backend).parameters

    def create():
        from etap_backend.sglang.backend import ETAPBackend, ETAPMultiStepDraftBackend

        runner = factory.draft_model_runner
        if decodes:
            backend = ETAPMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        else:
            backend = ETAPBackend(runner)
        return (NAME, backend) if named else backend

    backend_map[NAME] = create


def register_model_support() -> None:
    """Enter ETAP where SGLang's MLA models look; here and not in `register`, because it imports those models.

    They route prefill as with FlashMLA (without: Triton's routes), hand over the latent and the rope part of queries
    and keys apart (without: concatenated, a copy of each for every layer), and under decode context parallelism take
    our log-sum-exp as a natural one (without: base 2).
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    handler.AttentionBackendRegistry.register(NAME, handler.handle_attention_flashmla)
    if NAME in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        return
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
    # It is public since 0.5.18.
    public = "is_mla_dcp_lse_base_on_e"
    function = public if hasattr(forward_mla, public) else f"_{public}"
    known = getattr(forward_mla, function)
    setattr(forward_mla, function, lambda attention_backend: attention_backend == NAME or known(attention_backend))


def write_location(forward_batch):
    """Where the pool shall write this batch's rows.

    Reason: the pool took the bare slots, and later an object made from the batch.
    Versions: below 0.5.22. Goes when 0.5.22 is the oldest one supported.
    """
    from sglang.srt.mem_cache import memory_pool

    make = getattr(getattr(memory_pool, "KVWriteLoc", None), "for_batch", None)
    return make(forward_batch) if make else forward_batch.out_cache_loc


def fill_rank_share(backend, req_pool_indices, lengths, table) -> None:
    """Turn lengths and block table into those of this rank under decode context parallelism.

    Token t of a request lies on rank t % ranks, there in the row of its slot // ranks.

    Reason: the kernel that fills the table got a table of the unified memory pool, which ETAP does not serve.
    Versions: below 0.5.20. Goes when 0.5.20 is the oldest one supported.
    """
    from sglang.kernels.ops.attention.dcp_kernels import create_mla_kv_page_table_for_dcp as fill
    from sglang.srt.layers.dcp.layout import get_dcp_lens
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    lengths.copy_(get_dcp_lens(lengths, parallel.attn_dcp_size, parallel.attn_dcp_rank))
    no_unified_pool = {"v2p_ptr": None, "HAS_V2P": False} if "HAS_V2P" in fill.arg_names else {}
    fill[(len(lengths), -(-table.shape[1] // PAGES_PER_PROGRAM))](
        backend.req_to_token,
        req_pool_indices,
        lengths,
        table,
        req_to_token_stride=backend.req_to_token.stride(0),
        block_table_stride=table.stride(0),
        PHYSICAL_PAGE_SIZE=backend.page_size,
        DCP_SIZE=parallel.attn_dcp_size,
        DCP_RANK=parallel.attn_dcp_rank,
        PAGES_PER_BLOCK=PAGES_PER_PROGRAM,
        **no_unified_pool,
    )


class _Errors(logging.Handler):
    """Keeps what SGLang's plugin loader reports as an error."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of the record and the exception behind it."""
        cause = record.exc_info[1] if record.exc_info else None
        self.texts.append(record.getMessage() + (f": {type(cause).__name__}: {cause}" if cause else ""))


def check_plugin() -> None:
    """Load SGLang's plugins as its server does, and raise Unavailable with what it swallowed, if ETAP is missing."""
    from sglang.srt import plugins as loader
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    errors = _Errors()
    logging.getLogger("sglang.srt.plugins").addHandler(errors)
    loader.load_plugins()
    if reason := why_unsupported_version():
        raise Unavailable(reason)
    missing = [hook for hook in (_PAGE_HOOK, _DRAFT_HOOK) if hook not in HookRegistry._patched]
    if NAME in ATTENTION_BACKENDS and not missing:
        return
    what = f"{', '.join(missing)} not hooked" if NAME in ATTENTION_BACKENDS else f"no attention backend {NAME}"
    raise Unavailable("; ".join([what, *errors.texts]))

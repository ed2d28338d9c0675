"""Where SGLang's MLA models look up attention backends by name; importing it imports those models.

Each function extends one list or hooks one function. All go when SGLang asks the backend instead of its name.
"""

import functools

from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from sglang.srt.models.deepseek_common import utils
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import dflash_utils

from etap_backend.sglang.prompts import prompt_runs
from etap_backend.sglang.versions import NAMES


@functools.cache  # once in a process
def register() -> None:
    """Enter ETAP everywhere; the models then run as the functions below say."""
    register_routes()
    register_split_queries()
    register_natural_lse()
    register_maskless_drafts()


def register_routes() -> None:
    """Route a model's batches as the kernels that run them need it.

    Reason: a name that SGLang does not know gets Triton's routes.
    Versions: all, through SGLang's registry. Goes never.
    """
    for name in NAMES:
        handler.AttentionBackendRegistry.register(name, route)


def route(attn, forward_batch) -> AttnForwardMethod:
    """How a layer computes this batch.

    - Sparse attention: as with SGLang's sparse backend.
    - Short prompts: from the latent rows, which the decode kernels read.
    - Prompts under decode context parallelism: as with FlashInfer, which runs them.
    - Other prompts: as with FlashAttention 3, which runs them.
    """
    if getattr(attn, "use_dsa", False):
        return handler.handle_attention_dsa(attn, forward_batch)
    if prompt_runs(forward_batch, attn.num_local_heads):
        return AttnForwardMethod.MLA
    if get_parallel().attn_dcp_size > 1:
        return handler.handle_attention_flashmla(attn, forward_batch)
    return handler.handle_attention_fa3(attn, forward_batch)


def register_split_queries() -> None:
    """Have the latent and the rope part of queries and keys handed over as two tensors.

    Reason: SGLang concatenates them for other names, a copy in every layer.
    Versions: 0.5.22 and 0.5.23. Goes when a backend can ask for two tensors.
    """
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.extend(NAMES)


def register_natural_lse() -> None:
    """Have the log-sum-exp taken as a natural logarithm under decode context parallelism.

    Reason: SGLang merges the outputs of other names by base 2.
    Versions: 0.5.22 and 0.5.23. Goes when a backend can tell its base.
    """
    known = forward_mla.is_mla_dcp_lse_base_on_e
    forward_mla.is_mla_dcp_lse_base_on_e = lambda attention_backend: (
        attention_backend in NAMES or known(attention_backend)
    )


def register_maskless_drafts() -> None:
    """Have DFLASH make no mask for the verification of drafts, which are a chain.

    Reason: for classes that SGLang does not list it makes one in every step, as large as all contexts times the drafts.
    Versions: 0.5.22 and 0.5.23. Goes when a backend can tell that it reads no mask.
    """
    classes = {"ETAPBackend", "ETAPSparseBackend"}
    dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= classes


def register_scaled_queries() -> None:
    """Change the routes of a model that scales its queries by position: latent rows only, queries in one tensor.

    Reason: SGLang scales neither queries in two tensors, nor those for keys that it makes of the latent rows.
    Versions: 0.5.22 and 0.5.23. Goes when it scales them.
    """
    register()
    parts = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    parts[:] = [name for name in parts if name not in NAMES]
    for name in NAMES:
        handler.AttentionBackendRegistry.register(name, lambda attn, forward_batch: AttnForwardMethod.MLA)

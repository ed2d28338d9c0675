"""`ETAP_AUTO=1`: where no attention backend is named, vLLM prefers ETAP for everything that ETAP serves.

The rest is decoded by vLLM's own choice, and one line of the log gives the reason.
"""

import functools
from typing import Any

from etap_backend.engine_contract import AUTO_VARIABLE
from etap_backend.vllm.log import logger


def log_fallback(attention: str, reason: str) -> None:
    """Log, once per process and on one rank only, that vLLM's own choice decodes."""
    logger.info_once("%s=1 has no effect on %s: %s", AUTO_VARIABLE, attention, reason, scope="global")


def prefer(member: Any) -> None:
    """Put ETAP, a member of vLLM's enumeration, before vLLM's own choices. May be called any number of times.

    Reason: vLLM's order of choices is a list inside a function of its platform.
    Versions: all. Goes when a plugin can add to that order.
    """
    from vllm.platforms import cuda, current_platform

    if not current_platform.is_cuda():
        return log_fallback("this platform", "it is not CUDA")
    platform = cuda.CudaPlatformBase
    vllm_choices = platform.get_valid_backends.__func__
    if hasattr(vllm_choices, "etap"):
        return None

    @functools.wraps(vllm_choices)
    def get_valid_backends(cls, device_capability, attn_selector_config, num_heads=None):
        valid, refused = vllm_choices(cls, device_capability, attn_selector_config, num_heads)
        backend = member.get_class()
        reasons = backend.validate_configuration(device_capability=device_capability, **attn_selector_config._asdict())
        if reasons:
            log_fallback(f"attention of head size {attn_selector_config.head_size}", "; ".join(reasons))
        else:
            valid.append(cuda._BackendCandidate(backend, member, -1))  # the lowest number wins; vLLM's begin at 0
        return valid, refused

    setattr(get_valid_backends, "etap", True)  # noqa: B010
    platform.get_valid_backends = classmethod(get_valid_backends)
    return None

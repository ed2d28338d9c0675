"""`ETAP_AUTO=1`: where no attention backend is named, ETAP is vLLM's first choice for what it serves.

What it does not serve is decoded as without the variable, and one line of the log says why.
"""

import functools
from typing import Any

from etap_backend.engine_contract import AUTO_VARIABLE
from etap_backend.vllm.log import logger


def say_why_not(attention: str, reason: str) -> None:
    """Log, once in a process and of all ranks by the first, that vLLM's own choice decodes."""
    logger.info_once("%s=1 has no effect on %s: %s", AUTO_VARIABLE, attention, reason, scope="global")


def prefer(member: Any) -> None:
    """Put ETAP, a member of vLLM's enumeration, before what vLLM tries by itself. May be called any number of times.

    Reason: that order is a list inside a function of vLLM's platform. Versions: all. Goes when a plugin can add to it.
    """
    from vllm.platforms import cuda, current_platform

    if not current_platform.is_cuda():
        return say_why_not("this platform", "it is not CUDA")
    platform = cuda.CudaPlatformBase
    theirs = platform.get_valid_backends.__func__
    if hasattr(theirs, "etap"):
        return None

    @functools.wraps(theirs)
    def get_valid_backends(cls, device_capability, attn_selector_config, num_heads=None):
        valid, refused = theirs(cls, device_capability, attn_selector_config, num_heads)
        backend = member.get_class()
        asked = {"device_capability": device_capability, **attn_selector_config._asdict()}
        if reasons := backend.validate_configuration(**asked):
            say_why_not(f"attention of head size {attn_selector_config.head_size}", "; ".join(reasons))
        else:
            valid.append(cuda._BackendCandidate(backend, member, -1))  # vLLM's own begin at 0
        return valid, refused

    setattr(get_valid_backends, "etap", True)  # noqa: B010
    platform.get_valid_backends = classmethod(get_valid_backends)
    return None

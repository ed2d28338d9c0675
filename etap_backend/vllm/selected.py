"""What vLLM imports when the user selects ETAP: the backend, or in a vLLM that lacks what it uses, the refusal."""

from vllm.logger import init_logger

from etap_backend import plugins
from etap_backend.vllm.compat import ENGINE, HOOKS_OF_SOME, USES


class Refusal:
    """Stands for the backend until vLLM's own selection has reported the reason."""

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """vLLM's question to a selected backend: the reasons against it."""
        return [reason]


reason = ENGINE.why_too_old() or ENGINE.why_lacking(name for use in USES for name in use.lacking())
if reason is None:
    from etap_backend.vllm.backend import ETAPBackend

    classes = (ETAPBackend, ETAPBackend.get_impl_cls(), ETAPBackend.get_builder_cls())
    reason = ENGINE.why_lacking(name for cls in classes for name in plugins.misfits(cls, HOOKS_OF_SOME))

if reason:
    ETAPBackend = Refusal
elif untested := ENGINE.why_untested():
    # Of all ranks the first one says it. vLLM gives its handler and level to loggers below "vllm" only.
    init_logger(f"vllm.{__name__}").warning_once(untested, scope="global")

"""vLLM plugin: `vllm serve MODEL --attention-backend ETAP`.

vLLM calls `register` through the entry point `etap` of group `vllm.general_plugins`, in every process that it starts.
"""


def register() -> None:
    """Make the attention backend name ETAP known to vLLM. May be called any number of times; touches no CUDA."""
    # Imported here: vLLM loads its plugins in processes that never select a backend.
    from etap_backend.vllm import registration

    registration.register()

"""SGLang plugin: `python -m sglang.launch_server --model-path MODEL --attention-backend etap`.

SGLang calls `register` through the entry point `etap` of group `sglang.srt.plugins`, in every process that it starts.
"""


def register() -> None:
    """Register the attention backend etap in SGLang. May be called any number of times; touches no CUDA."""
    # Imported here: the command line and the tests import this package where SGLang is not installed.
    from etap_backend.sglang import registration

    registration.register()

"""Entry points of the contract tests' own plugins: a Hopper that only answers questions, and the negative control."""

import os

WITHOUT_REDUCER = "ETAP_CONTRACT_WITHOUT_REDUCER"
WITNESS = "ETAP_CONTRACT_WITNESS"


def witness() -> None:
    """Where the environment asks for it, tell which process unpickles something of ours; every Python calls this."""
    if os.environ.get(WITNESS) != "1":
        return
    import sys

    def hook(event, arguments):
        if event == "pickle.find_class" and str(arguments[0]).startswith("etap_backend"):
            os.write(2, f"witness {os.getpid()}: unpickles {'.'.join(arguments)}\n".encode())

    sys.addaudithook(hook)


def platform() -> str:
    """vLLM's platform: its own CUDA platform, with the answers of an H20 in place of queries to a driver."""
    return "fake_hopper_platform.FakeHopper"


def remove_reducer() -> None:
    """Where the environment asks for it, take back what lets a spawned process unpickle the backend's name."""
    if os.environ.get(WITHOUT_REDUCER) != "1":
        return
    import copyreg

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from etap_backend.vllm.registration import register

    register()
    del copyreg.dispatch_table[AttentionBackendEnum]

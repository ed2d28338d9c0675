"""The command line `etap`: doctor, configs, demo and plan.

Nothing heavy is imported before it is known which command runs; importing torch takes seconds.
"""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator

from etap_backend import __version__

USAGE_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE  # a shell's status of a program whose reader went away
REQUIREMENTS = {
    "torch": "etap-backend",
    "tvm_ffi": "etap-backend",
    "vllm": "etap-backend[vllm]",
    "sglang": "etap-backend[sglang]",
}
"""What brings a module that was not found."""
COMMANDS = {
    "doctor": "etap_backend.doctor",
    "configs": "etap_backend.config_list",
    "demo": "etap_backend.demo",
    "plan": "etap_backend.plan.command",
}
"""The module whose `run` takes the options and returns the exit status."""
MOVED = ("bench", "check", "e2e", "e2e-report", "record", "report")
"""Commands that left the package."""
MAX_SEED = 2**64 - 1
MAX_HEADS = 128  # of a model with MLA on one GPU


def _integer(least: int, most: int) -> Callable[[str], int]:
    """The type of an option whose value lies in least..most."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise argparse.ArgumentTypeError(f"wanted an integer from {least} to {most}, got {shown}")
        return value

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etap", description="MLA decode attention for Hopper GPUs: check the installation, try it, size servers."
    )
    parser.add_argument("--version", action="version", version=f"etap-backend {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    text = "check GPU, driver, compiled library and engines; exits with 1 when decoding cannot work"
    commands.add_parser("doctor", help="say what is wrong, and what to do", description=text)
    text = "list the configurations of vLLM and SGLang that come with the package"
    commands.add_parser("configs", help="where the servers' configurations lie", description=text)
    text = "decode one ragged batch through schedule, kernel and combine, and compare it with float64"
    demo = commands.add_parser("demo", help="decode one batch, and compare it with float64", description=text)
    demo.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto takes a Hopper GPU where there is one"
    )
    heads = "query heads; DeepSeek-R1 on 8 GPUs has 16 on each (default: %(default)s)"
    demo.add_argument("--heads", type=_integer(1, MAX_HEADS), default=16, help=heads)
    seed = "seed of lengths, queries and cache (default: %(default)s)"
    demo.add_argument("--seed", type=_integer(0, MAX_SEED), default=0, help=seed)
    _add_plan(commands)
    return parser


def _add_plan(commands) -> None:
    text = "say what fits on these GPUs, how long decode attention takes there, and what ETAP gains"
    plan = commands.add_parser("plan", help="what fits on which GPUs, and what ETAP gains there", description=text)
    model = "a shipped model's name, its name on the hub, a config.json or its folder (default: %(default)s)"
    plan.add_argument("model", nargs="?", default="deepseek-r1", help=model)
    for flag, kind, default, text in (
        ("gpu", str, "H20-141G", "a shipped GPU's name, or a file like those of configs/hardware"),
        ("count", int, 8, "GPUs"),
        ("tp", int, None, "tensor parallel; all GPUs that dp and pp leave when not given"),
        ("dp", int, 1, "data parallel attention"),
        ("pp", int, 1, "pipeline parallel"),
        ("dcp", int, 1, "decode context parallel"),
        ("context", str, "16K", "tokens of each request, such as 65536, 64K or 1M"),
        ("batch", int, 16, "requests that decode at the same time"),
        ("s-q", int, 1, "query tokens per step: 1 + draft tokens of multi-token prediction"),
        ("utilization", float, 0.92, "share of the memory that the engine may take"),
        ("attention-share", float, None, "measured share of a padded kernel in a step, instead of the estimate"),
    ):
        shown = "" if default is None else " (default: %(default)s)"
        plan.add_argument(f"--{flag}", type=kind, default=default, help=text + shown)
    text = "type of the KV cache: auto, bfloat16, bf16, fp8, fp8_e4m3 (default: %(default)s)"
    plan.add_argument("--kv-dtype", "--cache", default="auto", help=text)
    text = "0 to 7 draft tokens beside each other: steps, tokens per second, and the best number"
    plan.add_argument("--drafts", action="store_true", help=text)
    text = "for --drafts: the share of drafts accepted where those before them are (default: a published one)"
    plan.add_argument("--acceptance", type=float, default=None, help=text)
    text = "tokens that all requests begin with, such as 16K: a call and a step with ETAP_SHARED_PREFIX=1, predicted"
    plan.add_argument("--shared-prefix", default=None, help=text)
    plan.add_argument("--json", action="store_true", help="print everything as JSON")


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process silently: an exception inside an import may be printed or swallowed."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # a shell's background job has another handler
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _run(words: list[str]) -> int:
    if not words:
        _parser().print_help(sys.stderr)
        return USAGE_ERROR
    if words[0] in MOVED:
        print(f"etap {words[0]} left the package: run `python -m bench` in a checkout of its sources", file=sys.stderr)
        return USAGE_ERROR
    options = _parser().parse_args(words)
    # torch warns in every program without numpy; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    with _ending_at_once():
        try:
            command = importlib.import_module(COMMANDS[options.command])
        except (ImportError, OSError) as error:  # libraries of an installed torch may be missing
            broken = next((name for name in ("torch", "tvm_ffi") if name not in sys.modules), None)
            if broken is None or getattr(error, "name", None) == broken:
                raise
            print(f"etap {options.command}: {broken} is installed and does not load: {error}", file=sys.stderr)
            return USAGE_ERROR
        return command.run(options)


def main(words: list[str] | None = None) -> int:
    """Run `etap` with these words, by default the process's own, and return its exit status.

    Raises SystemExit where argparse does: for --help, --version and words that it refuses.
    """
    words = sys.argv[1:] if words is None else words
    for name in "stdout", "stderr":
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # an error of the output belongs here, not after the end
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in REQUIREMENTS:
            raise
        lacking = f"etap {words[0]} needs {error.name}, which is not installed"
        print(f"{lacking}: pip install '{REQUIREMENTS[error.name]}'", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python would write the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return NO_READER
        print(f"etap: the output cannot be written: {error.strerror}", file=sys.stderr)
        return os.EX_IOERR


if __name__ == "__main__":
    sys.exit(main())

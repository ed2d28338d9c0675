"""The command line `etap`: `doctor`, `configs` and `demo` need what decoding needs, every other one the extra `lab`.

Nothing is imported before it is known which command runs; an import of torch takes seconds.
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
from dataclasses import dataclass

from etap_backend import __version__

USAGE_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE  # as a shell reports it of programs that end when nobody reads them any more
LAB_MODULES = (
    "httpx", "matplotlib", "numpy", "prometheus_client", "psutil", "pydantic", "pynvml", "rich", "tomli", "typer"
)  # fmt: skip
"""What the extra `lab` installs, as it is imported."""
PRODUCT_MODULES = ("torch", "tvm_ffi")
ENGINES = ("sglang", "vllm")
OWN = {"doctor": "etap_backend.doctor", "configs": "etap_backend.config_list"}
"""The product's commands without options, and what runs them."""
MAX_SEED = 2**64 - 1
MAX_HEADS = 128  # what a model with MLA has when one GPU runs all of them


@dataclass(frozen=True)
class Program:
    """A command of the laboratory: a function whose arguments typer reads."""

    module: str
    function: str
    summary: str


def _check(name: str, summary: str) -> Program:
    return Program(f"bench.checks.{name}", "main", summary)


LAB = {
    "bench": Program("bench.kernels.command", "bench", "measure the kernels beside others"),
    "record": Program("bench.kernels.record", "main", "measure a group of published results again"),
    "report": Program("bench.kernels.report", "main", "tables and plots of benchmark results"),
    "plan": Program("etap_backend.plan.command", "plan", "what fits on which GPUs, and what ETAP gains there"),
    "e2e": Program("bench.e2e.command", "e2e", "serve a model with ETAP and other backends, and compare"),
    "e2e-report": Program("bench.e2e.report", "main", "tables and plots of e2e results"),
}
CHECKS = {
    "answers": _check("answers", "what a model answers with ETAP and with other attention backends"),
    "soak": _check("soak", "a server under minutes of mixed load"),
}


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
        prog="etap",
        description="MLA decode attention for Hopper GPUs: check the installation, try it, measure it.",
        epilog="All but doctor, configs and demo need the extra lab: pip install 'etap-backend[lab]'.",
    )
    parser.add_argument("--version", action="version", version=f"etap-backend {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    text = "check GPU, driver, compiled library and engines; exits with 1 when decoding cannot work"
    commands.add_parser("doctor", help="say what is wrong, and what to do", description=text)
    text = "list the configurations of vLLM and SGLang that come with the package, each with what it is for"
    commands.add_parser("configs", help="where the servers' configurations lie", description=text)
    text = "decode one ragged batch through schedule, kernel and combination, and compare it with float64"
    demo = commands.add_parser("demo", help="decode one batch, and compare it with float64", description=text)
    demo.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto takes the GPU where it is a Hopper one"
    )
    heads = "query heads, DeepSeek-R1 on 8 GPUs has 16 on each (default: %(default)s)"
    demo.add_argument("--heads", type=_integer(1, MAX_HEADS), default=16, help=heads)
    seed = "seed of lengths, queries and cache (default: %(default)s)"
    demo.add_argument("--seed", type=_integer(0, MAX_SEED), default=0, help=seed)
    for name, program in LAB.items():
        commands.add_parser(name, help=program.summary)
    check = commands.add_parser("check", help="check a server's answers, or soak it")
    checks = check.add_subparsers(dest="check", metavar="CHECK", required=True)
    for name, program in CHECKS.items():
        checks.add_parser(name, help=program.summary)
    return parser


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without a word: an exception inside an import may be printed, or swallowed."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # else somebody wants it otherwise, such as a shell's background job
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _hand_over(name: str, program: Program, words: list[str]) -> None:
    """Let a program of the laboratory read its own words; it ends with SystemExit."""
    with _ending_at_once():
        typer = importlib.import_module("typer")
        function = getattr(importlib.import_module(program.module), program.function)
    command = typer.Typer(add_completion=False)
    command.command()(function)
    command(args=words, prog_name=f"etap {name}")


def _run(words: list[str]) -> int:
    match words:  # the words of a laboratory's program are its own business
        case []:
            _parser().print_help(sys.stderr)
            return USAGE_ERROR
        case [name, *rest] if name in LAB:
            _hand_over(name, LAB[name], rest)
        case ["check", name, *rest] if name in CHECKS:
            _hand_over(f"check {name}", CHECKS[name], rest)
    options = _parser().parse_args(words)
    # torch says in every program that there is no numpy; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    with _ending_at_once():
        if options.command in OWN:
            return importlib.import_module(OWN[options.command]).run()
        demo = importlib.import_module("etap_backend.demo")
        return demo.run(options.device, options.heads, options.seed)


def _what_to_install(module: str | None) -> str | None:
    """The requirement that brings a module that was not found; None for a part of a package that is there."""
    if module in LAB_MODULES:
        return "etap-backend[lab]"
    if module in ENGINES:
        return f"etap-backend[{module}]"
    return "etap-backend" if module in PRODUCT_MODULES else None


def main(words: list[str] | None = None) -> int:
    """Run `etap` with these words, by default the process's own, and return its exit status.

    Raises SystemExit where argparse and typer do: for --help, --version and words that they refuse, and at the end of
    a program of the laboratory.
    """
    words = sys.argv[1:] if words is None else words
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # an error of the output shall come here, and not after the end
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if not (requirement := _what_to_install(error.name)):
            raise
        command = " ".join(words[: 2 if words[0] == "check" else 1])
        what = f"etap {command} needs {error.name}, which is not installed"
        print(f"{what}: pip install '{requirement}'", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python would write at its end what is left, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return NO_READER
        print(f"etap: the output cannot be written: {error.strerror}", file=sys.stderr)
        return os.EX_IOERR

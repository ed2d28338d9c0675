"""The commands of bench: `python -m bench NAME ...`; `python -m bench NAME --help` lists a command's options."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "kernels": "bench.kernels.command:main",
    "report": "bench.report:main",
    "top-k": "bench.kernels.top_k:main",
    "release": "bench.release:main",
    "answers": "bench.servers.answers:main",
    "soak": "bench.servers.soak:main",
    "serve": "bench.servers.serve:main",
    "suites": "bench.qualify.suites:main",
    "random-cases": "bench.qualify.random_cases:main",
    "sanitize": "bench.qualify.sanitize:main",
    "same-instructions": "bench.qualify.same_instructions:main",
}
"""Each command's module, and the function whose parameters typer reads from the command line."""


def main() -> int:
    """Run the command that the first word names with the other words; gives the exit status of a usage error."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        print(f"usage: python -m bench {{{','.join(COMMANDS)}}} ...; NAME --help lists a command's options")
        return 0 if name in ("-h", "--help") else 2
    import typer  # after the name is known: --help needs no requirements

    module, function = COMMANDS[name].split(":")
    command = typer.Typer(add_completion=False)
    command.command()(getattr(importlib.import_module(module), function))
    sys.argv = [f"python -m bench {name}", *rest]  # the provenance of a result shows it
    command(prog_name=sys.argv[0])  # ends with SystemExit
    return 0


if __name__ == "__main__":
    sys.exit(main())

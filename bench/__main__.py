"""The commands of bench: `python -m bench NAME ...`; `python -m bench NAME --help` lists a command's options."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "kernels": "bench.kernels.command:main",
    "report": "bench.kernels.report:main",
    "answers": "bench.servers.answers:main",
    "soak": "bench.servers.soak:main",
    "serve": "bench.servers.serve:main",
    "suites": "bench.qualify.suites:main",
    "random-cases": "bench.qualify.random_cases:main",
    "sanitize": "bench.qualify.sanitize:main",
    "same-instructions": "bench.qualify.same_instructions:main",
}
"""Each command's module, and the function whose parameters typer reads from the command line."""
USAGE_ERROR = 2


def main(words: list[str]) -> int:
    """Run the command that the first word names with the other words; gives the exit status of a usage error."""
    name, *rest = words or ["--help"]
    if name not in COMMANDS:
        asked = name in ("-h", "--help")
        usage = f"usage: python -m bench {{{','.join(COMMANDS)}}} ..."
        if asked:
            print(f"{usage}\n\npython -m bench NAME --help lists the options of a command.")
            return 0
        print(f"{usage}\nbench: wanted one of these commands, got {name}", file=sys.stderr)
        return USAGE_ERROR
    import typer  # after the name is known: --help needs no requirements

    module, function = COMMANDS[name].split(":")
    command = typer.Typer(add_completion=False)
    command.command()(getattr(importlib.import_module(module), function))
    command(args=rest, prog_name=f"python -m bench {name}")  # ends with SystemExit
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

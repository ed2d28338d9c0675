"""Runs a module as the main program again and again, with other arguments, in one process.

    python rerun.py MODULE REPLY_FD

An engine's load generator imports for many seconds and then measures for two. Each line of standard input is a JSON
list of arguments; the answer on REPLY_FD is one JSON line, null when the module ended well, otherwise what went wrong.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback


def run(module: str, arguments: list[str]) -> str | None:
    """What went wrong, or None."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return None if end.code in (None, 0) else f"exit code {end.code}"
    except Exception as error:  # whatever a load generator raises is its answer, and the next one may do better
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    module, reply = sys.argv[1], int(sys.argv[2])
    with os.fdopen(reply, "w") as answers:
        for line in sys.stdin:
            problem = run(module, json.loads(line))
            sys.stdout.flush()
            print(json.dumps(problem), file=answers, flush=True)


if __name__ == "__main__":
    main()

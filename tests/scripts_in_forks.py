"""Small programs that each need a Python of their own with large modules: forks of a process that imported them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT_SECONDS = 900

# Reads paths of scripts and writes the exit status of each; a script's output and errors lie beside it.
PARENT = """
import os, sys, traceback
statuses = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
{imports}
for path in map(str.strip, sys.stdin):
    child = os.fork()
    if not child:
        for stream, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(path + "." + end, os.O_CREAT | os.O_WRONLY), stream)
        status = 1
        try:
            with open(path) as script:
                exec(compile(script.read(), path, "exec"), {{"__name__": "__main__"}})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], file=statuses, flush=True)
"""

ENDED, RAISED = "0\n", "256\n"
Run = Callable[..., tuple[str, str]]


@contextmanager
def runner(imports: str, folder: Path) -> Iterator[Run]:
    """Gives a function that runs a script in a process that ran `imports` alone, and returns its output and errors.

    Scripts lie and run in `folder`. One that takes longer than SCRIPT_SECONDS, or fails and may not, fails the test.
    """
    command = [sys.executable, "-c", PARENT.format(imports=imports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as parent:
        count = 0

        def run(script: str, may_fail: bool = False) -> tuple[str, str]:
            nonlocal count
            count += 1
            path = folder / f"{count}.py"
            path.write_text(f"import signal; signal.alarm({SCRIPT_SECONDS})\n{script}")
            parent.stdin.write(f"{path}\n")
            parent.stdin.flush()
            status = parent.stdout.readline()
            written = [path.with_name(f"{path.name}.{end}") for end in ("out", "err")]
            output, errors = (file.read_text() if file.exists() else "" for file in written)
            assert status == ENDED or (may_fail and status == RAISED), f"{status!r}: {output}{errors}"
            return output, errors

        yield run
        parent.stdin.close()

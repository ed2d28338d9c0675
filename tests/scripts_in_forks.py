"""Small programs that each need a Python of their own with large modules: forks of a process that imported them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SCRIPT_SECONDS = 900

# Reads lines of scripts' paths, runs those of a line at the same time, and writes their exit statuses. A script's
# output and errors lie beside it.
PARENT = """
import os, sys, traceback
statuses = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
{imports}
def start(path):
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
    return child
for line in sys.stdin:
    children = list(map(start, line.rstrip("\\n").split("\\t")))
    print(*(os.waitpid(child, 0)[1] for child in children), file=statuses, flush=True)
"""

ENDED, RAISED = "0", "256"
Run = Callable[..., tuple[str, str]]
RunAll = Callable[..., list[tuple[str, str]]]


@contextmanager
def runner_of_several(imports: str, folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[RunAll]:
    """Gives a function that runs scripts at the same time, each in a process that ran `imports` alone; it returns their
    outputs and errors.

    Scripts lie and run in `folder`. One that takes longer than SCRIPT_SECONDS, or fails and may not, fails the test.
    """
    command = [sys.executable, "-c", PARENT.format(imports=imports)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, cwd=folder, env=environment) as parent:
        count = 0

        def run(*scripts: str, may_fail: bool = False) -> list[tuple[str, str]]:
            nonlocal count
            paths = [folder / f"{count + number}.py" for number in range(len(scripts))]
            count += len(scripts)
            for path, script in zip(paths, scripts, strict=True):
                path.write_text(f"import signal; signal.alarm({SCRIPT_SECONDS})\n{script}")
            parent.stdin.write("\t".join(map(str, paths)) + "\n")
            parent.stdin.flush()
            statuses = parent.stdout.readline().split()
            files = [[path.with_name(f"{path.name}.{end}") for end in ("out", "err")] for path in paths]
            written = [tuple(file.read_text() if file.exists() else "" for file in pair) for pair in files]
            allowed = {ENDED, RAISED} if may_fail else {ENDED}
            ends = "\n".join(text[-3000:] for pair in written for text in pair)
            assert len(statuses) == len(paths) and set(statuses) <= allowed, f"{statuses}: {ends}"
            return written

        yield run
        parent.stdin.close()


@contextmanager
def runner(imports: str, folder: Path) -> Iterator[Run]:
    """The same for one script at a time."""
    with runner_of_several(imports, folder) as run:
        yield lambda script, may_fail=False: run(script, may_fail=may_fail)[0]

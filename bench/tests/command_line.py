"""`etap` as a test calls it: in this process, so that what it calls can be replaced."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from etap_backend import cli


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def etap(*words: object) -> Result:
    """Run `etap WORDS` on a screen of 200 columns without colours."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ, COLUMNS="200", NO_COLOR="1"):
        try:
            exit_code = cli.main([str(word) for word in words])
        except SystemExit as end:
            exit_code = end.code or 0
    return Result(exit_code, out.getvalue(), err.getvalue())

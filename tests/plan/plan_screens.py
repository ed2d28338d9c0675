"""What `etap plan` shows, for the tests of dense and of sparse models."""

import typer
from typer.testing import CliRunner

from etap_backend.plan.command import plan

APP = typer.Typer(add_completion=False)
APP.command()(plan)


def run(*arguments: str, columns: int = 200):
    return CliRunner().invoke(APP, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def etap_plan(*arguments: str, columns: int = 200) -> str:
    result = run(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


def words_of(*arguments: str) -> str:
    return " ".join(etap_plan(*arguments).split())

"""Finds the configuration files by name, and reads each as a checked object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from etap_backend.config_list import FOLDER as PACKAGE_CONFIGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDERS = {"grids": Path(__file__).parents[1] / "configs" / "grids", "models": PACKAGE_CONFIGS / "models"}
Content = TypeVar("Content", bound=BaseModel)
MAX_PROBLEMS, MAX_TEXT = 12, 60  # listed by one error; characters of a wrong value


class Strict(BaseModel):
    """Immutable content of a file; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def shipped(kind: str, suffix: str = ".toml") -> list[str]:
    """Names of the files in the folder of a kind."""
    return sorted(path.stem for path in FOLDERS[kind].glob(f"*{suffix}"))


def find(kind: str, name: str, suffix: str = ".toml") -> Path:
    """The file that `name` means: an existing path, or a shipped file's name in any case of letters, with or without
    an organisation before it (deepseek-ai/DeepSeek-R1).

    Args:
        kind: a key of FOLDERS.

    Raises:
        ValueError: there is no such file; the text lists the shipped ones.
    """
    if (path := Path(name)).is_file():
        return path
    if (path := FOLDERS[kind] / f"{path.name.lower()}{suffix}").is_file():
        return path
    raise ValueError(f"{kind[:-1]}: wanted a file or one of {', '.join(shipped(kind, suffix))}, got {name}")


def read_toml_table(path: Path) -> dict:
    """The file's content. Raises ValueError, naming the file, when it is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse(kind: type[Content], data: object, path: Path) -> Content:
    """`data` of a file as a `kind`. Raises ValueError that names the file and the first wrong keys with what was wanted
    and what came."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(map(_problem, error.errors()[:MAX_PROBLEMS]))}") from error


def _problem(error: dict) -> str:
    text, got = f"{'.'.join(map(str, error['loc'])) or 'file'}: {error['msg']}", repr(error["input"])
    return text if error["type"] == "missing" else f"{text}, got {got[:MAX_TEXT]}"

"""The configuration files that are part of the product, and how one becomes an object that was checked."""

from __future__ import annotations

import re
import reprlib
import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from etap_backend.config_list import FOLDER

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).parents[1]


class Strict(BaseModel):
    """Data of a file: a key that nobody reads is an error, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


CALLED = {"bench": "grid", "e2e": "scenario", "hardware": "gpu", "models": "model", "record": "names"}
"""The arguments that name a file of each folder."""
Content = TypeVar("Content", bound=BaseModel)
HUB = r"^\w[\w-]*/(?=[^/]+$)"  # an organisation before a model's name
MOST_PROBLEMS = 12  # that an error tells
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 60
SHORT.maxlist = SHORT.maxdict = 3


def shipped(kind: str, suffix: str = ".toml") -> list[str]:
    """Names of the files of configs/`kind`."""
    return sorted(path.stem for path in (FOLDER / kind).glob(f"*{suffix}"))


def find(kind: str, name: str, suffix: str = ".toml") -> Path:
    """The file that `name` means: a path that exists, or the name of a file of configs/`kind` in any case of letters,
    with an organisation before it as a hub has, such as deepseek-ai/DeepSeek-R1, or without.

    Raises ValueError when it means neither: for a path that says so, for a name that lists what there is.
    """
    if (path := Path(name)).is_file():
        return path
    if (path := FOLDER / kind / f"{re.sub(HUB, '', name).lower()}{suffix}").is_file():
        return path
    if name.endswith(suffix) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{CALLED[kind]}: wanted a file that exists, got {name}")
    raise ValueError(f"{CALLED[kind]}: wanted a file or one of {', '.join(shipped(kind, suffix))}, got {name}")


def read_toml_table(path: Path) -> dict:
    """The file's content. Raises ValueError, naming the file, when it is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_toml(path: Path, kind: type[Content]) -> Content:
    """The file's content as a `kind`. Raises ValueError, naming file and key, when it is not one."""
    return parse(kind, read_toml_table(path), path)


def parse(kind: type[Content], data: object, path: Path | None = None) -> Content:
    """`data`, of a file if one is named, as a `kind`. Raises ValueError with what was wanted and what came for the
    first keys that are wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = [_problem(one) for one in error.errors()]
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        said = "; ".join(problems[:MOST_PROBLEMS] + more)
        raise ValueError(f"{path}: {said}" if path else said) from error


def _problem(error: dict) -> str:
    what = f"{'.'.join(map(str, error['loc'])) or 'file'}: {error['msg']}"
    return what if error["type"] == "missing" else f"{what}, got {SHORT.repr(error['input'])}"

"""Reads and writes results files: JSON with one line per field, and per row."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from bench.common import configs

FOLDER = Path(__file__).parents[2] / "results"


def text_of(document: dict | BaseModel) -> str:
    """The text of a results file: a line per field, and per item of a field that is a list of objects."""
    content = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
    fields = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        else:
            text = json.dumps(value)
        fields.append(f"{json.dumps(key)}: {text}")
    return "{\n " + ",\n ".join(fields) + "\n}\n"


def write(document: dict | BaseModel, path: Path) -> None:
    """Replace the file atomically: an interrupted run leaves no half of one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text_of(document))
    part.replace(path)


def must_be_writable(path: Path, argument: str = "--output") -> None:
    """Make the file's folder. Raises ValueError, naming the argument, when the file could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        part = path.with_name(f"{path.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise ValueError(f"{argument}: wanted a file that can be written, got {path}: {error}") from error


def must_be_new(path: Path) -> None:
    """Raises ValueError when a default output file exists."""
    if path.exists():
        raise ValueError(
            f"--output: wanted a file's name, got none, and {path} exists: name another, or it to replace it"
        )


def read_json(path: Path) -> object:
    """The file's content. Raises ValueError, naming the file, when it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path, kind: type[configs.Content]) -> configs.Content:
    """The file's content as a `kind`. Raises ValueError, naming file and key, when it is not one."""
    return configs.parse(kind, read_json(path), path)

"""Reads and writes results files: JSON with one line per field, and per row."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def write(document: dict, path: Path) -> None:
    """Replace the file atomically: an interrupted run leaves no half of one."""
    fields = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        fields.append(f"{json.dumps(key)}: {text}")
    part = path.with_name(f"{path.name}.part")
    part.write_text("{\n " + ",\n ".join(fields) + "\n}\n")
    part.replace(path)


def must_be_writable(path: Path) -> None:
    """Make the file's folder. Raises ValueError, naming --output, when the file could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        part = path.with_name(f"{path.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise ValueError(f"--output: wanted a file that can be written, got {path}: {error}") from error


def check_output(path: Path | None) -> None:
    """Refuse an --output that could not be written as typer refuses arguments; None is no file."""
    try:
        if path is not None:
            must_be_writable(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def must_be_new(path: Path) -> None:
    """Raises ValueError when a default output file exists."""
    if path.exists():
        raise ValueError(f"--output: wanted a name, since {path} exists; name it to replace it")


def read_json(path: Path) -> object:
    """The file's content. Raises ValueError, naming the file, when it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error

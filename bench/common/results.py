"""Results files, and the places of a page that their tables go to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from bench.common import configs

FOLDER = Path(__file__).parents[2] / "results"
PLACE = re.compile(
    r"(?P<begin><!-- (?P<kind>[\w-]+) (?P<name>[\w.-]+)(?P<may_lack>\??)(?:: (?P<rows>[^\n]*?))? -->\n)"
    r"(?P<body>.*?)(?P<end><!-- /(?P=kind) -->)",
    re.DOTALL,
)


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
    """Replace the file in one step, so that a run cut short never leaves half of one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text_of(document))
    part.replace(path)


def must_be_writable(path: Path, argument: str = "--output") -> None:
    """Make the folder of a results file. Raises ValueError, naming the argument, when the file could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        part = path.with_name(f"{path.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise ValueError(f"{argument}: wanted a file that can be written, got {path}: {error}") from error


def must_be_new(path: Path, more: str = "") -> None:
    """Raises ValueError when there is a file where nobody asked to write; `more` is what else can be done with it."""
    if path.exists():
        what = f"--output: wanted a file's name, got none, and {path} exists"
        raise ValueError(f"{what}: name another, or this one to replace it{more}")


def read_json(path: Path) -> object:
    """The file's content. Raises ValueError, naming the file, when it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path, kind: type[configs.Content]) -> configs.Content:
    """The file's content as a `kind`. Raises ValueError, naming file and key, when it is not one."""
    return parse(path, read_json(path), kind)


def parse(path: Path, content: object, kind: type[configs.Content]) -> configs.Content:
    """What was read from a file, as a `kind`. Raises ValueError, naming file and key, when it is not one."""
    named = kind.model_fields.get("kind") if isinstance(content, dict) else None
    if named and (got := content.get("kind")) != named.default:  # most of its keys would be wrong
        wanted = f"wanted a results file of kind {named.default!r}"
        raise ValueError(f"{path}: {wanted}, got {configs.SHORT.repr(got)}")
    return configs.parse(kind, content, path)


@dataclass(frozen=True)
class Place:
    """What stands between `<!-- KIND NAME -->` and `<!-- /KIND -->` of a page: a table made from results/NAME.json.

    `<!-- KIND NAME: ROW; ROW -->` is the place of these rows only, each named by its first column, and
    `<!-- KIND NAME? -->` one whose file need not be there.
    """

    kind: str
    name: str
    rows: tuple[str, ...]
    body: str
    may_lack: bool = False


def places(text: str) -> list[Place]:
    """The places of a page, in their order."""
    return [_place(match) for match in PLACE.finditer(text)]


def filled(text: str, table: Callable[[Place], str]) -> str:
    """The page with what `table` gives in each of its places."""

    def whole(match: re.Match) -> str:
        body = table(_place(match))
        return match["begin"] + (f"{body}\n" if body else "") + match["end"]

    return PLACE.sub(whole, text)


def _place(match: re.Match) -> Place:
    rows = tuple(part.strip() for part in (match["rows"] or "").split(";") if part.strip())
    return Place(match["kind"], match["name"], rows, match["body"].removesuffix("\n"), bool(match["may_lack"]))

"""Markdown tables that a screen shows as well, and the line that says where figures come from."""

from __future__ import annotations


def table(lines: list[list[str]]) -> str:
    """Titles and rows as a Markdown table with aligned columns: numbers to the right, words to the left."""
    columns = list(zip(*lines, strict=True))
    formats, rules = [], []
    for column in columns:
        width, right = max(map(len, column)), all(cell[:1].isdigit() or cell in ("-", "void") for cell in column[1:])
        formats.append(f"{{:{'>' if right else '<'}{width}}}")
        rules.append(f"{'-' * (width + 1)}:" if right else f":{'-' * (width + 1)}")
    row = f"| {' | '.join(formats)} |"
    return "\n".join([row.format(*lines[0]), f"|{'|'.join(rules)}|", *(row.format(*line) for line in lines[1:])])


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def provenance_line(document: dict) -> str:
    """GPU, driver, clocks, versions, commit, date and command of a results file."""
    parts = [document.get("gpu", "unknown GPU")]
    parts += [f"driver {document['driver']}"] if "driver" in document else []
    parts += document.get("clocks", [])
    parts += [f"{name} {version}" for name, version in document.get("versions", {}).items()]
    parts += [f"commit {document.get('commit', 'unknown')}", document.get("date", "no date")]
    return f"{', '.join(parts)}; `{document.get('command', 'no command')}`"

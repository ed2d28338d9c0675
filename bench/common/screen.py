"""Tables on a screen."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(console: Console, table: Table) -> None:
    """As wide as its numbers need: a screen may break a line, and never shortens a number."""
    width, needed = console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(width, needed)
    console.print(table, crop=False)
    console.width = width

"""Decode speed of a server: the time of a step as the difference between a long and a short batch.

Both have the same prompts, whose prefill is cached; the difference, divided by the number of steps between them, has
neither prefill nor the client in it.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import typer
from rich.table import Table

from etap_backend.lab.checks.agreement import PROMPT_TOKENS
from etap_backend.lab.serving import client
from etap_backend.lab.serving.client import Deadline
from etap_backend.lab.serving.servers import Served

SHORT, LONG = 32, 288  # output tokens of the two batches whose difference is timed


@dataclass(frozen=True)
class Shape:
    """A decode batch."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


def parse_shape(text: str) -> Shape:
    matched = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not matched:
        raise typer.BadParameter(f"wanted BATCHxCONTEXT such as 16x16384, got {text!r}")
    return Shape(int(matched[1]), int(matched[2]))


@dataclass(frozen=True)
class Turns(Shape):
    """Prompts that come at once, each with new tokens after a cached context of its own."""

    tokens: int

    def __str__(self) -> str:
        return f"{super().__str__()}+{self.tokens}"


def parse_turns(text: str) -> Turns:
    matched = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if not matched:
        raise typer.BadParameter(f"wanted BATCHxCONTEXT+TOKENS such as 1x16384+64, got {text!r}")
    return Turns(*map(int, matched.groups()))


def spread(readings: list[float]) -> dict:
    return {"median": statistics.median(readings), "min": min(readings), "max": max(readings), "readings": readings}


@dataclass(frozen=True)
class Timer:
    """Times batches of one server."""

    served: Served
    deadline: Deadline

    def seconds(self, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """Wall time until every prompt, all in flight at once, has its new tokens."""
        engine = self.served.engine
        bodies = [engine.body(prompt, new_tokens) for prompt in prompts]
        return client.seconds_for(self.served.url + engine.path, bodies, self.deadline.left(300, "requests"))

    def time_per_token(self, shape: Shape, repeats: int) -> dict:
        """Milliseconds for one decode step of the whole batch, repeated."""
        # By context alone, so that a smaller batch of the same context finds its prompts in the prefix cache.
        rng = random.Random(shape.context)
        prompts = [rng.choices(PROMPT_TOKENS, k=shape.context) for _ in range(shape.batch)]
        self.seconds(prompts, SHORT)
        seconds = [(self.seconds(prompts, LONG), self.seconds(prompts, SHORT)) for _ in range(repeats)]
        readings = [(long - short) / (LONG - SHORT) * 1000 for long, short in seconds]
        return {
            "shape": str(shape),
            "tpot_ms": spread(readings),
            "tokens_per_second": shape.batch / statistics.median(readings) * 1000,
        }

    def time_to_first_token(self, turns: Turns, repeats: int) -> dict:
        """Milliseconds until all have their first token, with other new tokens each time; the client's are in it."""
        rng = random.Random(turns.context)
        prefixes = [rng.choices(PROMPT_TOKENS, k=turns.context) for _ in range(turns.batch)]
        self.seconds(prefixes, 1)

        def reading() -> float:
            return 1000 * self.seconds([prefix + rng.choices(PROMPT_TOKENS, k=turns.tokens) for prefix in prefixes], 1)

        reading()
        return {"turns": str(turns), "ttft_ms": spread([reading() for _ in range(repeats)])}


def speed_table(document: dict) -> Table:
    table = Table("decode", "backend", "median ms a token", "min", "max", "tokens/s")
    for name, values in document["servers"].items():
        for row in values.get("decode", []):
            milliseconds = (f"{row['tpot_ms'][key]:.3f}" for key in ("median", "min", "max"))
            table.add_row(row["shape"], name, *milliseconds, f"{row['tokens_per_second']:.0f}")
    return table


def turns_table(document: dict) -> Table:
    table = Table("next turns", "backend", "median ms to the first token", "min", "max")
    for name, values in document["servers"].items():
        for row in values.get("turns", []):
            table.add_row(row["turns"], name, *(f"{row['ttft_ms'][key]:.2f}" for key in ("median", "min", "max")))
    return table

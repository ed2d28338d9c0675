"""Scenarios of `serve`: models, points and the engines' flags, from bench/configs/scenarios.toml or a file like it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from bench.common import configs
from bench.common.configs import Strict
from bench.common.units import load_text
from bench.servers.engines import PAGE_TOKENS, Load, Serving

SCENARIOS = Path(__file__).parents[1] / "configs" / "scenarios.toml"
MARGIN_TOKENS = 64  # beyond input and output, for requests that the tokenizer lengthens


class Point(Strict):
    """Requests of one length at one or several concurrencies.

    With `prefill = "served"` prompts are new to the server. With "cached" they are sent once before, so that a reading
    has no prefill. With a `prefix` all prompts of a reading begin with the same tokens.
    """

    input: int = Field(gt=0)
    prefix: int = Field(default=0, ge=0)
    output: int = Field(gt=1)
    concurrency: list[int] = Field(min_length=1)
    prefill: Literal["served", "cached"] = "served"
    waves: int = Field(default=1, ge=1)  # prompts = waves x concurrency

    @model_validator(mode="after")
    def _prefix_is_shorter(self) -> Point:
        if self.prefix >= self.input:
            raise ValueError(f"prefix: wanted fewer tokens than the input's {self.input}, got {self.prefix}")
        return self


class EngineScenario(Strict):
    """What one engine's servers get."""

    backends: list[str] = Field(min_length=1)
    flags: list[str] = []
    environment: dict[str, str] = {}


class Scenario(Strict):
    """A model, its points and servers. Dummy and seeded models are configurations of configs/models; `rank_of` gives
    each GPU the work of one of so many tensor-parallel ranks (0: as it is); `plugins` are those of bench.models."""

    model: str
    weights: Literal["auto", "dummy", "seeded"] = "dummy"
    gpus: int = Field(gt=0)
    rank_of: int = Field(default=0, ge=0)
    layers: int | None = Field(default=None, gt=0)
    changes: dict[str, Any] = {}  # of config.json
    plugins: list[str] = []
    draft_tokens: int = Field(default=0, ge=0)
    acceptance: float | None = Field(default=None, ge=1)
    environment: dict[str, str] = {}
    point_seconds: float = Field(default=300, gt=0)
    points: list[Point] = Field(min_length=1)
    vllm: EngineScenario | None = None
    sglang: EngineScenario | None = None

    def of(self, engine: str) -> EngineScenario:
        """Raises ValueError where the scenario is not for this engine."""
        if (found := getattr(self, engine)) is None:
            raise ValueError(f"--engine: wanted a scenario with a table [{engine}], got one without")
        return found

    def serving(self, model: str, cases: list[Case]) -> Serving:
        batches = tuple(sorted({case.load.concurrency for case in cases}))
        return Serving(
            model,
            self.weights,
            max_requests=max(batches),
            max_context=max(case.load.input + case.load.output for case in cases) + MARGIN_TOKENS + self.draft_tokens,
            batches=batches,
            draft_tokens=self.draft_tokens,
            acceptance=None if self.weights == "auto" else self.acceptance,
        )


def read_scenario(name: str) -> Scenario:
    """A shipped scenario by name, or a TOML file with one, which may be `like` a shipped one.

    Raises ValueError, naming scenario and key, when it is not one.
    """
    path = Path(name) if name.endswith(".toml") else None
    return configs.parse(Scenario, _inherited(configs.read_toml_table(path) if path else {"like": name}), Path(name))


def _inherited(content: dict) -> dict:
    """The table with the keys of the one that it is `like`; of tables key by key."""
    if (base := content.pop("like", None)) is None:
        return content
    shipped = configs.read_toml_table(SCENARIOS)
    if base not in shipped:
        raise ValueError(f"scenario: wanted a TOML file or one of {', '.join(shipped)}, got {base}")
    return _merged(_inherited(shipped[base]), content)


def _merged(base: dict, more: dict) -> dict:
    both = {key: _merged(base[key], more[key]) for key in more if isinstance(base.get(key), dict)}
    return base | more | both


@dataclass(frozen=True)
class Case:
    """A point at one concurrency."""

    load: Load
    prefill: str

    @property
    def tokens(self) -> int:
        """Cache that its requests need at the same time; of a common prefix its whole pages once."""
        prompts = self.load.prompts if self.prefill == "cached" else self.load.concurrency
        common = self.load.prefix // PAGE_TOKENS
        pages = -(-(self.load.input + self.load.output) // PAGE_TOKENS)
        return (common + prompts * (pages - common)) * PAGE_TOKENS

    @property
    def text(self) -> str:
        return load_text(self.load.concurrency, self.load.input, self.load.output, self.prefill, self.load.prefix)

    def in_cache_after(self, other: Case) -> bool:
        """Whether `other` left these prompts in the prefix cache: of equal seeds fewer and shorter prompts begin as
        more and longer ones."""
        both = self.prefill == other.prefill == "cached"
        return both and self.load.input <= other.load.input and self.load.prompts <= other.load.prompts

    def cached_as_wanted(self, share: float) -> bool:
        """Whether this share of the prompts' tokens is right for the prefix cache to have had: nearly all, the common
        prefix, or nothing."""
        if self.load.prefix:
            return share >= 0.9 * (1 - 1 / self.load.prompts) * self.load.prefix / self.load.input
        if self.prefill == "served":
            return share <= 0.05  # a common first page
        return share >= 0.95 * (1 - 2 * PAGE_TOKENS / self.load.input)  # the last page is computed again


def cases_of(points: list[Point], only: list[str]) -> list[Case]:
    """One case per concurrency of the points with one of these texts. Raises ValueError when none has one."""
    found = [
        Case(Load(point.input, point.prefix, point.output, one, point.waves * one), point.prefill)
        for point in points
        for one in point.concurrency
    ]
    if chosen := [case for case in found if not only or any(text in case.text for text in only)]:
        return chosen
    raise ValueError(f"--only: wanted a part of one of {'; '.join(case.text for case in found)}, got {only}")

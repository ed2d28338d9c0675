"""What `etap e2e` is asked for: a file of configs/e2e, its points, and the order in which backends take their turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from bench.common import configs
from bench.common.configs import Strict
from bench.e2e.results_file import Shape
from bench.serving.engines import PAGE_TOKENS, Load
from bench.common.units import in_k


class Point(Strict):
    """Requests of one length, at one or several concurrencies.

    `prefill = "served"` is serving as it is: prompts are new, and prefill of some requests runs between the decode
    steps of others. With "cached" the same prompts are sent once before, so that their cache is there already and a
    reading is decode alone: what is long about a long context is then paid once for all readings. With a `prefix` all
    prompts of a reading begin with the same so many tokens, which are computed for the first of them.
    """

    input: int = Field(gt=0)
    prefix: int = Field(default=0, ge=0)
    output: int = Field(gt=1)
    concurrency: list[int] = Field(min_length=1)
    prefill: Literal["served", "cached"] = "served"
    waves: int = Field(default=1, ge=1)  # prompts = waves x concurrency
    repeats: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _has_tokens_behind_its_prefix(self) -> Point:
        if self.prefix >= self.input:
            raise ValueError(f"prefix: wanted fewer tokens than the input's {self.input}, got {self.prefix}")
        return self


class EngineScenario(Strict):
    """What only one engine understands."""

    backends: list[str] = Field(min_length=1)
    flags: list[str] = []
    environment: dict[str, str] = {}


class Scenario(Strict):
    """A file of configs/e2e."""

    title: str
    model: str  # a name of configs/models is served with dummy weights, anything else with its own
    gpus: int = Field(gt=0)
    pipeline_parallel: int = Field(default=1, ge=1)
    data_parallel: int = Field(default=1, ge=1)
    decode_context_parallel: int = Field(default=1, ge=1)
    draft_tokens: int = Field(default=0, ge=0)
    acceptance: float | None = Field(default=None, ge=1)
    kv_dtype: Literal["same", "fp8"] = "same"  # of the KV cache: the model's type or e4m3
    environment: dict[str, str] = {}
    ready_seconds: float = Field(default=600, gt=0)
    point_seconds: float = Field(default=300, gt=0)
    points: list[Point] = Field(min_length=1)
    vllm: EngineScenario | None = None
    sglang: EngineScenario | None = None

    @property
    def tensor_parallel(self) -> int:
        """Raises ValueError when the GPUs do not divide."""
        over = self.pipeline_parallel * self.data_parallel
        if self.gpus % over:
            raise ValueError(f"gpus: wanted a multiple of pipeline x data parallel = {over}, got {self.gpus}")
        ranks, shares = self.gpus // over, self.decode_context_parallel
        if ranks % shares:
            raise ValueError(f"decode_context_parallel: wanted a divisor of tensor parallel {ranks}, got {shares}")
        return ranks


def read_scenario(name: str) -> Scenario:
    """A shipped scenario by name, or a file. `like = "other"` takes over what that scenario has and this has not;
    of tables key by key. Raises ValueError, naming file and key, when it is not one."""
    path = configs.find("e2e", name)
    return configs.parse(Scenario, _with_inherited(configs.read_toml_table(path)), path)


def _with_inherited(content: dict) -> dict:
    if (base := content.pop("like", None)) is None:
        return content
    inherited = _with_inherited(configs.read_toml_table(configs.find("e2e", base)))
    tables = {
        key: value | content[key] for key, value in inherited.items() if isinstance(value, dict) and key in content
    }
    return inherited | content | tables


@dataclass(frozen=True)
class Case:
    """One row of the result for one backend."""

    input: int
    output: int
    concurrency: int
    prefill: str
    waves: int
    repeats: int
    prefix: int = 0

    @property
    def load(self) -> Load:
        prompts = self.waves * self.concurrency
        return Load(self.input, self.output, self.concurrency, prompts, prefix=self.prefix)

    @property
    def tokens(self) -> int:
        """Cache that its requests need at the same time."""
        prompts = self.load.prompts if self.prefill == "cached" else self.concurrency
        return prompts * -(-(self.input + self.output) // PAGE_TOKENS) * PAGE_TOKENS

    def in_cache_after(self, other: Case) -> bool:
        """Whether `other` left this case's prompts in the prefix cache: the load generators give fewer and shorter
        prompts of one seed the same beginnings."""
        both_cached = self.prefill == other.prefill == "cached"
        return both_cached and self.input <= other.input and self.load.prompts <= other.load.prompts

    def describe(self) -> dict:
        return {key: getattr(self, key) for key in ("input", "prefix", "output", "concurrency", "prefill", "waves")}

    def same_as(self, row: Shape) -> bool:
        return all(getattr(row, key) == value for key, value in self.describe().items())


def cases_of(points: list[Point]) -> list[Case]:
    return [
        Case(point.input, point.output, concurrency, point.prefill, point.waves, point.repeats, point.prefix)
        for point in points
        for concurrency in point.concurrency
    ]


@dataclass(frozen=True)
class Turn:
    """One server of a backend: the `number`-th of at most `of`, which share the readings."""

    backend: str
    number: int = 1
    of: int = 1

    def readings(self, case: Case) -> int:
        """How many a case has after it."""
        return -(-case.repeats * self.number // self.of)


def turns_of(backends: list[str], times: int) -> list[Turn]:
    """The backends in this order, `times` over. One that is named twice has two turns in each, and one that is named
    less often than another has fewer readings: every server takes as many."""
    order = backends * times
    most = max(map(order.count, order))
    return [Turn(backend, order[: place + 1].count(backend), most) for place, backend in enumerate(order)]


def chosen(points: list[Point], context: list[int] | None, concurrency: list[int] | None) -> list[Point]:
    """The points of the wanted input lengths and concurrencies. Raises ValueError when none is left."""
    kept = []
    for point in points:
        wanted = [number for number in point.concurrency if not concurrency or number in concurrency]
        if wanted and (not context or point.input in context):
            kept.append(point.model_copy(update={"concurrency": wanted}))
    if not kept:
        raise ValueError("--context, --concurrency: no point of the scenario has these")
    return kept


def parse_variables(pairs: list[str]) -> dict[str, str]:
    """{name: value} of NAME=VALUE texts. Raises ValueError when one is no such text."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (name, equals, _) in zip(pairs, split, strict=True):
        if not (name and equals):
            raise ValueError(f"--env: wanted NAME=VALUE, got {pair!r}")
    return {name: value for name, _, value in split}


def parse_profile(text: str | None, cases: list[Case]) -> tuple[int, int] | None:
    """(concurrency, input) of a text such as 16x16K. Raises ValueError when the cases have no such point."""
    if text is None:
        return None
    for case in cases:
        requests, _, tokens = text.partition("x")
        if requests == str(case.concurrency) and tokens.upper() in (in_k(case.input), str(case.input)):
            return case.concurrency, case.input
    raise ValueError(f"--profile: wanted a point of this run, such as 16x16K, got {text}")

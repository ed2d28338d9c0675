"""The model that is served: its own weights, or a shipped configuration with weights that the engine makes up."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import configs
from bench.e2e.scenario import Case, Scenario
from bench.serving import dummy_model
from bench.serving.engines import Serving

MARGIN_TOKENS = 64  # beyond input and output, for a request that the tokenizer made a little longer


@dataclass(frozen=True)
class Prepared:
    """A model folder, its configuration where it can be read, and whether its weights are made up."""

    model: str
    config: dict | None
    dummy: bool
    what: str

    def write(self) -> None:
        """Write the folder, where the weights are made up. Raises ValueError without the package tokenizers."""
        if self.dummy:
            dummy_model.write(Path(self.model), self.config)


def _shipped_config(name: str) -> dict:
    """Raises ValueError for one that has more than text: its images would want a processor besides the tokenizer."""
    config = json.loads(configs.find("models", name, ".json").read_text())
    if "text_config" in config:
        raise ValueError(f"--model: wanted a model of text alone for dummy weights, got {name}")
    return config


def prepare_model(name: str, changes: dict[str, Any], rank_of: int | None, tp: int, folder: Path) -> Prepared:
    """A shipped configuration becomes a folder for dummy weights, once it is written; anything else is served as it is.

    Raises ValueError when changes are wanted of a model that has its own weights, or of keys that it has not.
    """
    if name.lower() not in configs.shipped("models", ".json"):
        if changes or rank_of:
            raise ValueError(f"--set, --layers, --rank-of: wanted a model of configs/models, got {name}")
        path, config = Path(name) / "config.json", None
        with suppress(OSError):
            config = json.loads(path.read_text())
        return Prepared(name, config, False, "its own weights")
    whole = _shipped_config(name)
    if unknown := set(changes) - set(whole):
        raise ValueError(f"--set: wanted keys of {name}'s config.json, got {', '.join(sorted(unknown))}")
    config = whole | changes
    if config.get("quantization_config", whole) is None:
        del config["quantization_config"]  # the engines take its presence for a wish
    if rank_of:
        config = dummy_model.of_one_rank(config, rank_of, tp)
    kind = "FP8 in blocks" if config.get("quantization_config") else "bfloat16"
    what = f"dummy weights, {kind}, {config['num_hidden_layers']} of {whole['num_hidden_layers']} layers"
    if rank_of:
        what += f", each GPU with the heads and widths of one of {rank_of} tensor-parallel ranks"
    said = ("num_hidden_layers", "quantization_config")
    if others := [f"{key} {value} (of {whole[key]})" for key, value in changes.items() if key not in said]:
        what += "; " + ", ".join(others)
    return Prepared(str(folder), config, True, what)


def must_divide_heads(config: dict | None, tp: int) -> None:
    """Raises ValueError when the ranks do not divide the heads, as far as a configuration tells them."""
    whole = config or {}
    heads = (whole.get("text_config") or whole).get("num_attention_heads", tp)
    if isinstance(heads, int) and heads % tp:
        raise ValueError(f"--gpus: wanted tensor parallel ranks that divide the model's {heads} heads, got {tp}")


def serving_of(scenario: Scenario, prepared: Prepared, cases: list[Case]) -> Serving:
    """How the model is served. Raises ValueError when it cannot be on so many GPUs."""
    must_divide_heads(prepared.config, scenario.tensor_parallel)
    longest = max(case.input + case.output for case in cases) + MARGIN_TOKENS + scenario.draft_tokens
    return Serving(
        prepared.model,
        prepared.dummy,
        tp=scenario.tensor_parallel,
        pp=scenario.pipeline_parallel,
        dp=scenario.data_parallel,
        dcp=scenario.decode_context_parallel,
        max_context=longest,
        batches=tuple(sorted({case.concurrency for case in cases})),
        draft_tokens=scenario.draft_tokens,
        acceptance=scenario.acceptance if prepared.dummy else None,
        fp8_cache=scenario.kv_dtype == "fp8",
    )


def parse_changes(pairs: list[str], layers: int | None) -> dict[str, Any]:
    """{key: value} of KEY=VALUE texts. Raises ValueError when one is not such a text with a value in JSON."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            changes[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"--set: wanted KEY=VALUE with a JSON value, got {pair!r}") from error
        if not equals:
            raise ValueError(f"--set: wanted KEY=VALUE, got {pair!r}")
    return changes | ({"num_hidden_layers": layers} if layers else {})

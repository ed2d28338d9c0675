"""docs/recipes.md and README's table of gains: a row is what `etap plan` answers, and every file named is shipped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.common import configs
from etap_backend.plan.alternatives import plan_of
from etap_backend.plan.inputs import Deployment, read_gpu, read_model
from etap_backend.plan.memory import memory_of
from etap_backend.plan.report import percent
from bench.common.units import parse_tokens

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "recipes.md").read_text()
README = (ROOT / "README.md").read_text()
ON_FROM = 5  # percent of the upper estimate
SERVER = re.compile(r"(\d+) x ([\w-]+)(?:, utilization ([\d.]+))?(?:, (dcp|pp) (\d))?")


def rows() -> list:
    found = []
    for section in TEXT.split("\n## ")[1:]:
        model = re.match(r".*: `([\w.-]+)`\n", section)[1]
        for line in re.findall(r"^\| (\d+ x .*) \|$", section, re.MULTILINE):
            found.append(pytest.param(model, *line.split(" | "), id=f"{model}, {line.replace(' | ', ', ')}"))
    return found


@pytest.mark.parametrize("model, server, requests, cache, tokens, gain, advice", rows())
def test_a_row_is_what_the_plan_answers(model, server, requests, cache, tokens, gain, advice):
    count, gpu, utilization, kind, ranks = SERVER.fullmatch(server).groups()
    spread = {kind: int(ranks)} if kind else {}
    gpus = int(count)
    spread |= {"gpus": gpus, "tp": gpus // spread.get("pp", 1), "utilization": float(utilization or 0.92)}
    batch, context = requests.split(" x ")
    on = Deployment(batch=int(batch), context=parse_tokens(context), cache=cache, **spread)
    made = plan_of(read_model(model), read_gpu(gpu), on, None, None)
    assert made.memory.fits and tokens == f"{made.memory.tokens:,}"
    assert made.etap.call.results and gain == f"{percent(made.gain)}%"
    assert advice == ("on" if round(100 * made.gain.upper) >= ON_FROM else "off")


SETTINGS = {
    "": {},
    "(16 do not fit)": {},
    "at utilization 0.95": {"utilization": 0.95},
    ", FP8 cache and math": {"cache": "fp8"},
    ", MTP with one draft token": {"s_q": 2},
    ", MTP with three": {"s_q": 4},
}
"""What README says behind a size."""


def readme_rows() -> list:
    found, server = [], ""
    for named, sizes, gains, advice in re.findall(
        r"^\| (.*?) ?\| (\d+ x .*) \| (.*)% \| (.*) \|$", README, re.MULTILINE
    ):
        server = named or server
        for size, gain in zip(sizes.split("; "), gains.split("; "), strict=True):
            found.append(pytest.param(server, size, f"{gain}%", advice, id=f"{server}, {size}"))
    return found


@pytest.mark.parametrize("server, size, gain, advice", readme_rows())
def test_a_row_of_readme_is_what_the_plan_answers_for_deepseek_r1(server, size, gain, advice):
    gpus, gpu = re.match(r"(\d+) x ([\w-]+)", server).groups()
    batch, context, setting = re.fullmatch(r"(\d+) x (\w+)(.*)", size).groups()
    layout = {"gpus": int(gpus), "tp": 8, "pp": int(gpus) // 8}
    on = Deployment(batch=int(batch), context=parse_tokens(context), **layout, **SETTINGS[setting.strip()])
    made = plan_of(read_model("deepseek-r1"), read_gpu(gpu), on, None, None)
    assert made.memory.fits and gain == f"{percent(made.gain)}%"
    assert advice == ("turn it on" if round(100 * made.gain.upper) >= ON_FROM else "leave it off")
    fewer = {"batch": 16} if "16 do not fit" in size else {"gpus": 8, "pp": 1} if "8 lack" in server else {}
    assert fewer == {} or not memory_of(read_model("deepseek-r1"), read_gpu(gpu), replace(on, **fewer)).fits


def test_readme_has_so_many_rows():
    assert len(readme_rows()) == 12


def test_every_model_on_every_server_is_there():
    models = {row.values[0] for row in rows()}
    assert models == {
        "deepseek-r1", "kimi-k2", "kimi-k3", "deepseek-v3.2", "glm-5-fp8", "deepseek-v4-flash", "deepseek-v4-pro",
        "deepseek-v4.1-flash",
    }  # fmt: skip


def test_every_file_that_is_named_is_shipped_for_both_engines():
    names = set(re.findall(r"`([\w.-]+-8xh20-[\w-]+)`", TEXT))
    shipped = [{path.stem for path in (configs.FOLDER / engine).glob("*.yaml")} for engine in ("vllm", "sglang")]
    assert len(names) >= 8 and all(names <= files for files in shipped)

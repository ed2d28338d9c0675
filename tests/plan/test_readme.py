"""README's table of gains is what `etap plan` answers."""

from pathlib import Path

import pytest

from etap_backend.plan.alternatives import make_plan
from etap_backend.plan.deployment import Deployment
from etap_backend.plan.gpu import read_gpu
from etap_backend.plan.model import read_model
from etap_backend.plan.report import percent

README = (Path(__file__).parents[2] / "README.md").read_text()
ON_FROM = 5  # percent of the upper estimate, below which README says to leave ETAP off
SMALL = {"context": 4096, "utilization": 0.95}
TABLE = {  # H20-141G's, H20-96G's and H200's cells: model, drafts, what else they are asked
    "6 to 10% | 6 to 11% | 5 to 6%": ("deepseek-v3.2", 0, {"cache": "fp8"}, SMALL),
    "11 to 17% | does not fit | 7 to 8%": ("deepseek-v3.2", 3, {"cache": "fp8"}, SMALL),
    "8 to 14% | does not fit | 6 to 7%": ("glm-5-fp8", 0, {"cache": "fp8"}, {}),
    "15 to 25% | does not fit | 8 to 10%": ("glm-5-fp8", 3, {"cache": "fp8"}, {}),
    "10 to 16% | 9 to 14% | 5%": ("deepseek-v4-flash", 0, {"cache": "fp8", "batch": 64, "context": 65536}, {}),
    "21 to 31% | 19 to 28% | 13 to 14%": ("deepseek-v4-flash", 3, {"cache": "fp8", "batch": 64, "context": 65536}, {}),
    "27 to 44% | 9 to 15% | 2%, leave it off": ("deepseek-r1", 0, {}, SMALL | {"context": 5120}),
    "12 to 19% | does not fit | 1%, leave it off": ("deepseek-r1", 1, {}, SMALL | {"context": 5120}),
    "13 to 22% | does not fit | 2%, leave it off": ("deepseek-r1", 0, {"cache": "fp8"}, {}),
}


def cell(model: str, gpu: str, **asked) -> str:
    made = make_plan(read_model(model), read_gpu(gpu), Deployment(**asked))
    if not made.memory.fits:
        return "does not fit"
    return f"{percent(made.gain)}%" + ("" if round(100 * made.gain.upper) >= ON_FROM else ", leave it off")


@pytest.mark.parametrize("cells", TABLE)
def test_a_row_is_what_the_plan_answers(cells):
    model, drafts, asked, on_96_gb = TABLE[cells]
    asked = asked | {"s_q": 1 + drafts}
    found = (
        cell(model, "H20-141G", **asked), cell(model, "H20-96G", **asked | on_96_gb), cell(model, "H200", **asked)
    )  # fmt: skip
    assert " | ".join(found) == cells and f"| {drafts} | {cells} |" in README

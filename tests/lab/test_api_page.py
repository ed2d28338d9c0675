"""The page of the public calls that is made from their docstrings."""

import pytest
import torch

import etap_backend
from etap_backend.lab import api_page


def call(q: torch.Tensor, *, scale: float = 1.0, out: torch.Tensor | None = None) -> None:
    """Do one thing.

    In a paragraph: of its own.

    Args:
        q: queries [tokens, heads],
            any strides.
        scale: factor.

    Raises:
        ValueError: q is not as described.

    Afterwards: text again.
    """


def test_a_docstrings_sections_are_lists_and_its_text_stays():
    assert api_page.markdown(call.__doc__).splitlines() == [
        "Do one thing.",
        "",
        "In a paragraph: of its own.",
        "",
        "**Args**",
        "",
        "- `q`: queries [tokens, heads], any strides.",
        "- `scale`: factor.",
        "",
        "**Raises**",
        "",
        "- `ValueError`: q is not as described.",
        "",
        "Afterwards: text again.",
    ]


def test_a_signature_keeps_its_star_and_breaks_where_it_is_long(monkeypatch):
    one_line = "call(q: torch.Tensor, *, scale: float = 1.0, out: torch.Tensor | None = None)"
    assert api_page.signature("call", call) == f"```text\n{one_line}\n```"
    monkeypatch.setattr(api_page, "WIDEST", 40)
    broken = "call(\n    q: torch.Tensor,\n    *,\n    scale: float = 1.0,\n    out: torch.Tensor | None = None,\n)"
    assert api_page.signature("call", call) == f"```text\n{broken}\n```"


def test_a_method_is_shown_as_it_is_called():
    (build,) = (text for text in api_page.entries("Plan", etap_backend.DecodeSchedule) if "Plan.build\n" in text)
    assert "Plan.build(seq_lens: torch.Tensor, s_q: int = 1) ->" in build


@pytest.mark.parametrize("name", [name for name in etap_backend.__all__ if name not in ("__version__", "reference")])
def test_every_public_name_is_on_the_page(name):
    assert f"\n### {name}\n" in api_page.page()

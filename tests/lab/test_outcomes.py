"""What pages say of the results files of every check."""

import pytest

from etap_backend.lab import outcomes, results

ABOUT = {"what": "a check", "gpu": "NVIDIA H200", "date": "2026-11-21T23:29:44+00:00", "commit": "5dea719"}
PAIR = {"backend": "ETAP", "mode": "plain", "other": "FLASHMLA", "other_mode": "plain", "prompts": 256}
COUNTS = {"wanted": 3, "passed": 3, "skipped": 0}


@pytest.mark.parametrize(
    "content, said",
    [
        ({"outcome": "812 passed"}, "812 passed"),
        (
            {"servers": {}, "pairs": [PAIR | {"equal": 255}, PAIR | {"equal": 256}], "failures": []},
            "equal answers: ETAP plain and FLASHMLA plain 511 of 512",
        ),
        (
            {"servers": {}, "agreement": {"ETAP plain, few": {"equal_answers": 90, "requests": 96}}},
            "log-probabilities agree; equal answers: ETAP plain, few: 90 of 96",
        ),
        (
            {
                "requests": {"served": 15612, "aborted": 0},
                "counters": {"drafts": 5, "x": None},
                "seconds": 602,
            },
            "602 s: 15,612 served, 5 drafts",
        ),
        ({"ran_etap_and_passed": 28, "of": 28}, "ETAP ran and passed in 28 of 28"),
        ({"cases": {"causal": COUNTS}, "failed": 0, "versions": {}, "driver": "5"}, "3 of 3 cases pass, none is wrong"),
        ({"cases": 3000, "wanted": 3000, "wrong": 0, "seed": 7}, "3,000 of 3,000 cases, 0 wrong, seed 7"),
        (
            {"outcome": "x", "failures": ["250 of 256 equal"], "complete": False},
            "**failed**: 250 of 256 equal; **cut short**; x",
        ),
    ],
)
def test_every_check_says_what_came_out(tmp_path, content, said):
    results.write(ABOUT | {"versions": {"vllm": "0.26.0"}} | content, tmp_path / "a.json")
    what, outcome, seen = outcomes.read(tmp_path / "a.json")
    assert (what, outcome) == ("a check", said)
    assert seen.startswith("NVIDIA H200, ") and seen.endswith("commit 5dea719, 2026-11-21")


@pytest.mark.parametrize("content", [ABOUT, ABOUT | {"commit": ""}, {}, []])
def test_a_file_of_no_check_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(results.text_of(content) if isinstance(content, dict) else "[]")
    with pytest.raises(ValueError, match=r"a\.json: wanted "):
        outcomes.read(tmp_path / "a.json")

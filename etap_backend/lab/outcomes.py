"""What a page says of a check's results file: what was checked, what came out, and where it was seen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from etap_backend.lab import results, suites

WANTED = ("what", "gpu", "date", "commit")


def read(path: Path) -> tuple[str, str, str]:
    """The three of a file. Raises ValueError when it is no check's."""
    content = results.read_json(path)
    if missing := [key for key in WANTED if not isinstance(content, dict) or not content.get(key)]:
        raise ValueError(f"{path}: wanted what every check's result says, got none of {', '.join(missing)}")
    versions = content.get("versions", {})
    packages = [f"{name} {versions[name]}" for name in ("vllm", "sglang") if versions.get(name)]
    seen = ", ".join([content["gpu"], *packages, f"commit {content['commit']}", content["date"][:10]])
    wrong = [f"**failed**: {one}" for one in content.get("failures") or [] if isinstance(one, str)]
    wrong += ["**cut short**"] if content.get("complete") is False else []
    return content["what"], "; ".join([*wrong, _outcome(path, content)]), seen


def _outcome(path: Path, content: dict) -> str:
    match content:
        case {"outcome": str(said)}:
            return said
        case {"servers": _, "pairs": [*pairs]}:
            return _answers(pairs)
        case {"servers": _, "agreement": {**agreement}}:
            found = [f"{case}: {one['equal_answers']} of {one['requests']}" for case, one in agreement.items()]
            return f"log-probabilities agree; equal answers: {'; '.join(found)}"
        case {"requests": {**requests}, "counters": {**counters}, "seconds": seconds}:
            counts = [f"{number:,.0f} {kind}" for kind, number in (requests | counters).items() if number]
            return f"{seconds:.0f} s: {', '.join(counts)}".replace("_", " ")
        case {"ran_etap_and_passed": int(ran), "of": int(every)}:
            return f"ETAP ran and passed in {ran} of {every}"
        case {"cases": dict(), "failed": _}:
            return suites.sentence(content).partition(" (")[0]
        case {"cases": int(cases), "wanted": int(wanted), "wrong": int(wrong), "seed": seed}:
            return f"{cases:,} of {wanted:,} cases, {wrong} wrong, seed {seed}"
    raise ValueError(f"{path}: wanted the outcome of a check, got a file without one")


def _answers(pairs: list[dict]) -> str:
    """How many answers of every two backends, over all stages, are equal."""
    equal, every = Counter(), Counter()
    for pair in pairs:
        key = f"{pair['backend']} {pair['mode']} and {pair['other']} {pair['other_mode']}"
        equal[key] += pair["equal"]
        every[key] += pair["prompts"]
    return "equal answers: " + "; ".join(f"{key} {equal[key]} of {every[key]}" for key in every)

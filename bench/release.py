"""`python -m bench release VERSION --part PART`: a part of a release's measurements, into results/VERSION.

What is there and complete is skipped, and no run begins after --seconds, so the same command is repeated until nothing
is left. The page results/VERSION/README.md is written anew each time.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.report import text_of

TRAINED, V4 = "build/models/trained", "build/models/v4"
MODELS = {TRAINED: "bench.models.train", V4: "bench.models.v4"}
KERNELS = {name: f"kernels {name} --behind" for name in ("targets", "targets-fp8", "short", "sparse", "v4")}
KERNELS |= {name: f"kernels {name}" for name in ("heads", "mtp", "pages", "paper", "shared", "sparse-prefill")}
KERNELS |= {"heads-fp8": "kernels heads --kv-dtype fp8", "top-k": "top-k"}
KERNELS |= {name: f"kernels {name} --no-validate --replays 5 --skip triton" for name in ("wide", "wide-64")}
PROXY = ("targets", "targets-fp8", "heads-fp8", "mtp", "paper", "sparse", "v4")
CHECKS = {"random-cases": "random-cases --count 3000 --seed 1", "sanitize": "sanitize"}
CHECKS |= {"random-sparse-cases": "random-cases --count 3000 --seed 1 --sparse"}
CHECKS |= {f"flashmla-{name}": f"suites flashmla-{name} --checkout FlashMLA" for name in ("dense", "sparse", "v4")}


def servers(engine: str, v4_flags: str) -> dict[str, str]:
    """What runs beside one engine; `v4_flags` are for servers of DeepSeek-V4."""
    found = {f"answers-{engine}": f"answers {TRAINED} --engine {engine} --modes plain,mtp"}
    found |= {f"answers-v4-{engine}": f"answers {V4} --engine {engine} --seeded -- {v4_flags}"}
    found |= {f"soak-{engine}": f"soak {TRAINED} --engine {engine} --mode mtp --seconds 400"}
    scenarios = ("decode-short", "decode-sparse", "mtp", "prefill")
    return found | {f"serve-{name}-{engine}": f"serve {name} --engine {engine}" for name in scenarios}


PARTS = {
    "kernels": KERNELS,
    "proxy": {f"{name}-h20-proxy": f"{KERNELS[name]} --h20-proxy" for name in PROXY},
    "checks": CHECKS,
    "vllm": servers("vllm", "--kv-cache-dtype fp8 --block-size 256"),
    "sglang": servers("sglang", ""),
}
"""By part: names of the results files, and the commands that make them."""


def done(path: Path) -> bool:
    """Whether a run has written its file to the end."""
    found = json.loads(path.read_text()) if path.exists() else {"complete": False}
    return found.get("complete", True) and not found.get("stopped")


def main(
    version: Annotated[str, typer.Argument(help="Folder in results.")],
    part: Annotated[str, typer.Option(help=f"One of {', '.join(PARTS)}.")],
    seconds: Annotated[float, typer.Option(help="No run begins later.")] = 1e9,
) -> None:
    """Run what is missing of a release's measurements; exit with 1 when something failed or is left."""
    if part not in PARTS:
        raise typer.BadParameter(f"--part: wanted one of {', '.join(PARTS)}, got {part}")
    files = {name: Path("results", version, f"{name}.json") for name in PARTS[part]}
    end, failed = time.monotonic() + seconds, []
    for name, words in PARTS[part].items():
        if done(files[name]) or time.monotonic() > end:
            continue
        for model in (model for model in MODELS if model in words and not Path(model, "config.json").exists()):
            subprocess.run([sys.executable, "-m", MODELS[model], model], check=True)
        command, mark, flags = words.partition(" -- ")
        run = ["-m", "bench", *command.split(), "--output", str(files[name]), *f"{mark}{flags}".split()]
        typer.echo(shlex.join(["python", *run]))
        failed += [name] if subprocess.run([sys.executable, *run]).returncode else []
    if there := sorted(Path("results", version).glob("*.json")):
        Path("results", version, "README.md").write_text(text_of(there, page=True))
    left = [name for name, path in files.items() if not done(path)]
    typer.echo(f"{part}: failed: {', '.join(failed) or 'none'}; left: {', '.join(left) or 'none'}")
    raise typer.Exit(bool(failed or left))

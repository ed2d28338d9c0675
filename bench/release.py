"""`python -m bench release VERSION --part PART`: a part of a release's measurements, into results/VERSION.

What is there and complete is skipped, and no run begins after --seconds, so the same command is repeated until nothing
is left; with two GPUs one command takes --share 1/2, the other 2/2. The page results/VERSION/README.md is written anew
each time.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from bench.models import dummy, v4
from bench.report import text_of

MODELS = {"r1": "deepseek-r1", "v3.2": "deepseek-v3.2", "glm-5": "glm-5-fp8"}
"""Models of four layers, one of eight ranks' heads and bfloat16 weights, for answers and soak; and DeepSeek-V4."""
FOLDER = Path("build/models")
KERNELS = {name: f"kernels {name} --behind" for name in ("targets", "targets-fp8", "short", "sparse", "v4")}
KERNELS |= {name: f"kernels {name}" for name in ("heads", "mtp", "shared", "sparse-prefill")}
KERNELS |= {"heads-fp8": "kernels heads --kv-dtype fp8", "top-k": "top-k --skip FlashInfer"}  # which compiles for long
KERNELS |= {name: f"kernels {name} --no-validate --replays 5 --skip triton" for name in ("wide", "wide-64")}
PROXY = {name: KERNELS[name] for name in ("targets", "targets-fp8", "heads-fp8", "mtp", "sparse", "v4")}
PROXY |= {"paper": "kernels paper"}
CHECKS = {"random-cases": "random-cases --count 3000 --seed 1", "sanitize": "sanitize"}
CHECKS |= {"random-sparse-cases": "random-cases --count 3000 --seed 1 --sparse"}
CHECKS |= {f"flashmla-{name}": f"suites flashmla-{name} --checkout FlashMLA" for name in ("dense", "sparse")}
CHECKS |= {f"flashmla-v4-{n}": f"suites flashmla-v4 --checkout FlashMLA --part {n}/4" for n in range(1, 5)}


STEPS = {"decode-short --only 16K": 22, "shared-prefix": 9, "decode-sparse --only 16K": 12, "mtp --only 16K": 6}
"""Scenarios of servers that run together, and for the cache of each so many gigabytes, or 50,000 tokens for each."""


class Options(NamedTuple):
    """Of answers, of DeepSeek-V4 besides, of soaks, and of steps, which get bytes and tokens of a cache."""

    answers: str
    v4: str
    soaks: str
    steps: str


def servers(engine: str, own: str, peer: str, sparse: str, options: Options) -> dict[str, str]:
    """What runs beside one engine: its names for ETAP and its own backends."""
    in_fp8, top_k, shared = f"{own}+fp8", f"{own}+fp8+engine_top_k", f"{own}+shared"
    answers = {"r1": f"r1 --modes plain,mtp --backends {peer},{own},{shared}", "v4": "v4"}
    answers |= {"v3.2": f"v3.2 --backends {sparse}+fp8,{in_fp8},{top_k}"}
    answers |= {"glm-5": f"glm-5 --backends {sparse}+fp8,{in_fp8}"}
    soaks = {"": "r1 --mode mtp --seconds 400", "-shared": f"r1 --backend {shared} --seconds 600"}
    soaks |= {f"-{model}": f"{model} --backend {in_fp8} --seconds 180" for model in ("v3.2", "glm-5")}
    soaks |= {"-v4": "v4 --seconds 180"}
    backends = {"shared-prefix": (shared, own, peer), "decode-sparse": (in_fp8, top_k, f"{sparse}+fp8")}
    found = {}
    for name, words in answers.items():
        found[f"answers-{name}-{engine}"] = f"answers {FOLDER}/{words} --engine {engine} --seeded{options.answers}"
    for scenario, size in STEPS.items():
        name = scenario.split()[0]
        named = " ".join(f"--backend {one}" for one in backends.get(name, (own, peer)))
        run = f"serve {scenario} --engine {engine} --together {named}{options.steps}"
        found[f"serve-{name}-{engine}"] = run.format(bytes=size * 10**9, tokens=size * 50_000)
    for name, words in soaks.items():
        found[f"soak{name}-{engine}"] = f"soak {FOLDER}/{words} --engine {engine} --seeded{options.soaks}"
    return found | {name: found[name] + options.v4 for name in found if "-v4-" in name}


VLLM = " -- --kv-cache-memory-bytes 6000000000"
ON_VLLM = Options(
    answers=f" --parallel 3{VLLM} --gpu-memory-utilization 0.2",
    v4=' --kv-cache-dtype fp8 --block-size 256 --kernel-config {"enable_jit_warmup":false}',
    soaks=VLLM,
    steps=" --flag=--kv-cache-memory-bytes={bytes} --flag=--gpu-memory-utilization=0.2",
)
TOP_K = "serve top-k --engine vllm --turns 1 --backend ETAP+fp8 --backend ETAP+fp8+engine_top_k"
SGLANG = "--mm-feature-transport cpu --sampling-backend pytorch --cuda-graph-backend-prefill disabled"
ON_SGLANG = Options(
    answers=f" --parallel 3 -- {SGLANG} --cuda-graph-max-bs-decode 96 --mem-fraction-static 0.7"
    " --max-total-tokens 400000",
    v4=" --fp8-gemm-backend triton --swa-full-tokens-ratio 1",  # so that prompts asked again are found
    soaks=f" --memory-share 0.7 -- {SGLANG} --cuda-graph-bs-decode 4 16 64 256",
    steps="".join(f" --flag={word}" for word in f"{SGLANG} --mem-fraction-static 0.75".split())
    + " --flag=--max-total-tokens={tokens}",
)
PARTS = {
    "kernels": KERNELS,
    "proxy": {f"{name}-h20-proxy": f"{command} --h20-proxy" for name, command in PROXY.items()},
    "checks": CHECKS,
    "vllm": servers("vllm", "ETAP", "FLASHMLA", "FLASHMLA_SPARSE", ON_VLLM) | {"serve-top-k-vllm": TOP_K},
    "sglang": servers("sglang", "etap", "flashmla", "dsa", ON_SGLANG),
}
"""By part: names of the results files, and the commands that make them."""


def make_model(folder: Path) -> None:
    """Write one of FOLDER."""
    if folder.name == "v4":
        v4.main(folder)
    else:
        changes = {"num_hidden_layers": 4, "quantization_config": {}, "max_position_embeddings": v4.CONTEXT}
        dummy.write(folder, dummy.changed(MODELS[folder.name], changes, 8))


def done(path: Path) -> bool:
    """Whether a run has written its file to the end."""
    found = json.loads(path.read_text()) if path.exists() else {"complete": False}
    return found.get("complete", True) and not found.get("stopped")


def main(
    version: Annotated[str, typer.Argument(help="Folder in results.")],
    part: Annotated[str, typer.Option(help=f"One of {', '.join(PARTS)}.")],
    seconds: Annotated[float, typer.Option(help="No run begins later.")] = 1e9,
    share: Annotated[str, typer.Option(help="Of the part's runs, 1/2 or 2/2 beside another GPU.")] = "1/1",
    peers: Annotated[Path | None, typer.Option(help="Part proxy: a file of kernels that are built for it.")] = None,
) -> None:
    """Run what is missing of a release's measurements; exit with 1 when something failed or is left."""
    if part not in PARTS:
        raise typer.BadParameter(f"--part: wanted one of {', '.join(PARTS)}, got {part}")
    if bool(peers) != (part == "proxy"):
        raise typer.BadParameter(f"--peers: wanted with the part proxy and with no other, got {peers} with {part}")
    if not (found := re.fullmatch(r"([1-9])/([1-9])", share)) or int(found[1]) > int(found[2]):
        raise typer.BadParameter(f"--share: wanted 1/2, 2/2 or the like, got {share}")
    begin, step = int(found[1]) - 1, int(found[2])
    files = {name: Path("results", version, f"{name}.json") for name in list(PARTS[part])[begin::step]}
    end, failed = time.monotonic() + seconds, []
    for name in files:
        if done(files[name]) or time.monotonic() > end:
            continue
        command, mark, flags = PARTS[part][name].partition(" -- ")
        for model in (Path(word) for word in command.split() if Path(word).parent == FOLDER):
            if not (model / "config.json").exists():
                make_model(model)
        more = ["--peers", str(peers)] if peers else []
        run = ["-m", "bench", *command.split(), *more, "--output", str(files[name]), *f"{mark}{flags}".split()]
        typer.echo(shlex.join(["python", *run]))
        failed += [name] if subprocess.run([sys.executable, *run]).returncode else []
    if there := sorted(Path("results", version).glob("*.json")):
        Path("results", version, "README.md").write_text(text_of(there, page=True))
    left = [name for name, path in files.items() if not done(path)]
    typer.echo(f"{part}: failed: {', '.join(failed) or 'none'}; left: {', '.join(left) or 'none'}")
    raise typer.Exit(bool(failed or left))

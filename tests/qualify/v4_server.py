"""vLLM with DeepSeek-V4's layers on one GPU: answers and steps with ETAP beside vLLM's own attention.

    PYTHONPATH=tests python -m qualify.v4_server --output v4-server.json [--steps 2]

Needs a Hopper GPU and vLLM with etap-backend beside it, and no network. The model is V4-Flash as one of 8 ranks has it
(8 query heads), of eight layers: two with a window alone, three CSA, three HCA. Its experts are fewer and narrower, its
weights seeded. Each engine answers mixed requests together, again over its prefix cache, a few at a time, and long ones
behind another beginning; log-probabilities must agree as those of `etap check answers` must. With --steps N engines
take so many turns, in which steps of decode are timed over prompts that are cached, the host's speed beside them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etap_backend import _library
from etap_backend.lab import configs
from etap_backend.lab.checks.agreement import (
    CONTEXT,
    FEW,
    LONG_PROMPT,
    PROMPT_TOKENS,
    MixedRequests,
    Request,
    make_requests,
    make_turns,
    with_another_beginning,
)
from etap_backend.lab.checks.asked import ASKED, PACKAGES
from etap_backend.lab.e2e.turns import host_ms
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, read_json, write
from etap_backend.lab.serving.client import Failed
from etap_backend.lab.serving.engines import Answer
from etap_backend.lab.serving.lifecycle import Process, tail
from qualify import seeded_weights

BACKENDS = ("FLASHMLA_SPARSE", "ETAP")  # the reference first
LAYERS = {"num_hidden_layers": 8, "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128], "num_hash_layers": 0}
RANK = {"num_attention_heads": 8, "o_groups": 1}
SMALLER = {"n_routed_experts": 64, "moe_intermediate_size": 256, "expert_dtype": "fp8", "vocab_size": 16384}
REQUESTS = 48
POINTS = ((1, 4096), (16, 4096), (64, 4096))  # requests x tokens of their prompts
SHORT, LONG = 8, 136  # new tokens of two readings, whose difference is steps of decode alone
PROOF = "ETAP decodes: DeepSeek-V4's sparse attention"


def write_model(folder: Path) -> Path:
    config = json.loads(configs.find("models", "deepseek-v4-flash", ".json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    changed = config | LAYERS | RANK | SMALLER | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


class Served:
    """vLLM in this process."""

    def __init__(self, backend: str, model: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine has this process's load format
        from vllm import LLM

        seeded_weights.register()
        begin = time.monotonic()
        self.llm = LLM(
            model=str(model),
            load_format=seeded_weights.LOAD_FORMAT,
            attention_backend=backend,
            kv_cache_dtype="fp8",
            block_size=256,
            max_model_len=CONTEXT,
            max_num_seqs=max(count for count, _ in POINTS),
            cudagraph_capture_sizes=[count for count, _ in POINTS],  # no others: starts are short
            gpu_memory_utilization=0.35,
            kv_cache_memory_bytes=8 << 30,
            skip_tokenizer_init=True,
            enable_flashinfer_autotune=False,
            logits_processors=["etap_backend.lab.checks.forced_tokens:ForcedTokens"],
        )
        self.ready_seconds = time.monotonic() - begin

    def ask(self, requests: list[Request], at_once: int, salt: str) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        replies = []
        for first in range(0, len(requests), at_once):
            some = requests[first : first + at_once]
            prompts = [TokensPrompt(prompt_token_ids=one.prompt, cache_salt=salt) for one in some]
            sampling = [
                SamplingParams(
                    temperature=0,
                    max_tokens=one.new_tokens,
                    ignore_eos=True,
                    logprobs=2,
                    detokenize=False,
                    extra_args=one.path and {"forced_tokens": one.path},
                )
                for one in some
            ]
            replies += [reply.outputs[0] for reply in self.llm.generate(prompts, sampling, use_tqdm=False)]
        return [_answer(list(reply.token_ids), reply.logprobs) for reply in replies]

    def step_ms(self, requests: list[Request]) -> float:
        seconds = []
        for tokens in (SHORT, LONG):
            begin = time.perf_counter()
            self.ask([Request(one.prompt, tokens) for one in requests], len(requests), "steps")
            seconds.append(time.perf_counter() - begin)
        return (seconds[1] - seconds[0]) / (LONG - SHORT) * 1e3


def _answer(tokens: list[int], steps: list[dict]) -> Answer:
    best = [sorted((one.logprob for one in step.values()), reverse=True) for step in steps]
    logprobs = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
    return Answer(tokens, logprobs, [values[0] - values[1] for values in best])


def answers(served: Served) -> dict[str, list[dict]]:
    """By stage, what the engine answers."""
    requests = make_requests(REQUESTS)
    long = [i for i, one in enumerate(requests) if len(one.prompt) >= LONG_PROMPT and one.forced is not None]
    stages = {stage: served.ask(requests, REQUESTS, "together") for stage in ("together", "again")}
    stages |= {"few": served.ask(requests, FEW, "few"), "turns": served.ask(make_turns(), 1, "turns")}
    stages["control"] = served.ask([with_another_beginning(requests[i]) for i in long], REQUESTS, "control")
    stages["before control"] = [stages["together"][i] for i in long]
    return {stage: [asdict(answer) for answer in given] for stage, given in stages.items()}


def steps(served: Served) -> dict[str, dict]:
    """By point, three readings in milliseconds, and what the host took for a plain loop before and after them."""
    draw, found = random.Random(1), {}
    for count, length in POINTS:
        requests = [Request(draw.choices(PROMPT_TOKENS, k=length), 1) for _ in range(count)]
        served.ask(requests, count, "steps")  # prompts come into the prefix cache
        host = host_ms()
        found[f"{count} x {length}"] = {
            "ms": [served.step_ms(requests) for _ in range(3)],
            "host_ms": [host, host_ms()],
        }
    return found


def serve(backend: str, part: str, folder: Path) -> None:
    """What one process does: serve, and write what was asked for."""
    served = Served(backend, write_model(folder / f"model-{backend}"))
    made = {"answers": answers, "steps": steps}[part.split("-")[0]](served)
    write({"ready_seconds": round(served.ready_seconds, 1), "found": made}, folder / f"{backend}-{part}.json")


def judged(folder: Path) -> tuple[dict, list[str]]:
    """What `etap check answers` would say of these answers, and what speaks against ETAP's."""
    records = {}
    for backend in BACKENDS:
        found = read_json(folder / f"{backend}-answers.json")
        stages = {stage: {"requests": [Answer(**one) for one in made]} for stage, made in found.pop("found").items()}
        records[backend, "plain"] = found | {"stages": stages}
    return MixedRequests(str(folder), REQUESTS).judged(records, list(BACKENDS), ASKED["vllm"])


def medians(turns: dict[str, list[dict]]) -> str:
    """What a step of each point took, ours first."""
    reference, ours = BACKENDS
    said = ""
    for point in next(iter(turns[ours]), {}):
        times = {name: statistics.median(ms for turn in turns[name] for ms in turn[point]["ms"]) for name in BACKENDS}
        said += f"; a step of {point}: {times[ours]:.2f} ms, {reference} {times[reference]:.2f}"
    return said


def run(parts: list[tuple[str, str]], output: Path, limit: float) -> None:
    """Processes that serve at the same time, but for those that have left their file. Raises Failed where one fails."""
    folder = output.with_suffix("")
    left = [name for name in parts if not (folder / f"{'-'.join(name)}.json").is_file()]
    command = [sys.executable, "-m", __spec__.name, "--output", str(output), "--serve"]
    running = [Process([*command, backend, "--part", part], folder / f"{backend}-{part}.log") for backend, part in left]
    deadline = time.monotonic() + limit
    try:
        while any(process.ended() is None for process in running) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in running:
            if process.ended() != 0:
                raise Failed(f"an engine failed, or took over {limit:g} s:\n{tail(process.log)}")
    finally:
        for process in running:
            process.end()


def compare(output: Path, turns: int, parallel: bool, limit: float) -> tuple[dict, list[str]]:
    """The document's own part, and what speaks against ETAP. Raises Failed where an engine fails."""
    folder = output.with_suffix("")
    answering = [(backend, "answers") for backend in BACKENDS]
    for parts in [answering] if parallel else [[one] for one in answering]:
        run(parts, output, limit)
    if PROOF not in (log := folder / "ETAP-answers.log").read_text():
        raise Failed(f"the log does not say {PROOF!r}:\n{tail(log)}")
    for turn in range(turns):
        for backend in BACKENDS:
            run([(backend, f"steps-{turn}")], output, limit)
    found, failures = judged(folder)
    timed = {name: [read_json(folder / f"{name}-steps-{n}.json")["found"] for n in range(turns)] for name in BACKENDS}
    return found | {"outcome": found["outcome"] + medians(timed), "steps": timed, "failures": failures}, failures


def main(
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("v4-server.json"),
    turns: Annotated[int, typer.Option("--steps", min=0, help="Turns in which steps are timed.")] = 0,
    parallel: Annotated[bool, typer.Option("--parallel", help="Both engines answer at a time.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds for one engine.")] = 600,
    backend: Annotated[str, typer.Option("--serve", hidden=True)] = "",
    part: Annotated[str, typer.Option(hidden=True)] = "answers",
) -> None:
    """Compare answers and steps; exit with 1 when answers differ by more than allowed."""
    if backend:
        return serve(backend, part, output.with_suffix(""))
    must_be_writable(output)
    about = provenance("python -m qualify.v4_server", packages=("vllm", *PACKAGES), library=_library.library_path())
    try:
        found, failures = compare(output, turns, parallel, limit)
    except Failed as failure:
        sys.exit(str(failure))
    document = {"what": "vLLM serves DeepSeek-V4's layers with ETAP beside its own attention", **about.model_dump()}
    write(document | found, output)
    print(found["outcome"], *failures, sep="\n")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)

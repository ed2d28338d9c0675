"""vLLM with DeepSeek-V4's layers on one GPU: answers and steps with ETAP beside vLLM's own attention.

    PYTHONPATH=tests python -m bench.qualify.v4_server --output v4-server.json [--drafts 1] [--steps 2] [--layers 24] [--v41]

Needs a Hopper GPU and vLLM with etap-backend beside it, and no network. The model is V4-Flash as one of 8 ranks has it
(8 query heads), of its first eight layers: two with a window alone, three CSA, three HCA. Its experts are fewer and
narrower, its weights seeded. With --v41 they are V4.1's, in vLLM 0.33: two with a window alone, three that read the
entries of pairs which the first of them keeps, and three of tokens; it has no tables of word groups, no vision tower,
FP8 in V4's blocks, and no drafts.

Each engine answers mixed requests together, again over its prefix cache, a few at a time, and long ones behind another
beginning; log-probabilities must agree as those of `etap check answers` must. With --drafts N each answers once more,
greedily, with N tokens drafted by the model's MTP layer. With --steps N engines take so many turns without drafts, in
which steps of decode are timed, the host's speed beside them. A run goes on with the engines' files that it finds
beside its output: another model, vLLM or library wants another output.

With --write-model FOLDER it leaves that folder with the model for `etap check answers` and `etap check soak`, in vLLM
under `qualify.seeded_weights`, in SGLang under `qualify.seeded_sglang`, and does nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from etap_backend import _library
from bench.common import configs
from bench.checks.agreement import (
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
from bench.checks.asked import ASKED, PACKAGES
from bench.e2e.turns import host_ms
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, read_json, write
from bench.serving import dummy_model
from bench.serving.client import Failed
from bench.serving.engines import FORCED_TOKENS, Answer, takes_processors
from bench.serving.lifecycle import Process, tail
from bench.qualify import seeded_weights

BACKENDS = ("FLASHMLA_SPARSE", "ETAP")  # the reference first
LAYERS = 8
RANK = {"num_attention_heads": 8, "o_groups": 1}
SMALLER = {"n_routed_experts": 64, "moe_intermediate_size": 256, "expert_dtype": "fp8", "vocab_size": 16384}
MODES = {"answers": "plain", "drafts": "mtp"}  # what engines are asked for, by its file
REQUESTS = 48
POINTS = ((1, 4096), (16, 4096), (64, 4096))  # requests x tokens of their prompts
STEPS = 128  # in which all requests decode, at least
PROMPT_TOKENS_A_STEP = 1024  # vLLM takes more of them
PROOF = "ETAP decodes: DeepSeek-V4's sparse attention"
V4_ARGUMENTS = {"block_size": 256}
V41_ARGUMENTS = {"block_size": 64, "language_model_only": True}


def shipped(name: str) -> dict:
    return json.loads(configs.find("models", name, ".json").read_text())


def model_config(layers: int, drafts: int) -> dict:
    config, mtp = shipped("deepseek-v4-flash"), int(drafts > 0)
    config |= RANK | SMALLER | {"num_hidden_layers": layers, "num_hash_layers": 0, "num_nextn_predict_layers": mtp}
    config["compress_ratios"] = config["compress_ratios"][:layers] + [0] * mtp
    return config


def v41_config(layers: int) -> dict:
    """Half of the layers behind the windows read pairs, the others tokens, which their first one keeps and chooses."""
    config, pairs = shipped("deepseek-v4.1-flash"), (layers - 2) // 2
    sources = [2, 2 + pairs]
    text = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [0, 0] + [2] * pairs + [1] * (layers - 2 - pairs),
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources,
        "candidate_source_layer_id": sources[-1],
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    of_v4 = {"quantization_config": shipped("deepseek-v4-flash")["quantization_config"]}
    return config | of_v4 | {"text_config": config["text_config"] | RANK | SMALLER | text}


def write_model(folder: Path, layers: int = LAYERS, drafts: int = 0, v41: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(v41_config(layers) if v41 else model_config(layers, drafts)))
    return folder


def write_checked_model(folder: Path, layers: int, drafts: int) -> None:
    """The same with a tokenizer, which the checks want."""
    dummy_model.write(folder, model_config(layers, drafts) | {"max_position_embeddings": CONTEXT})


def forcing(request: Request) -> dict:
    """SamplingParams' keywords by which vLLM gives a request the tokens that it names."""
    if request.forced is None:
        return {}
    if takes_processors():
        return {"extra_args": {"forced_tokens": request.path}}
    return {"allowed_token_ids": [request.forced]}


class Served:
    """vLLM in this process."""

    def __init__(self, backend: str, model: Path, layers: int = LAYERS, drafts: int = 0, v41: bool = False) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine has this process's load format
        from vllm import LLM

        seeded_weights.register()
        self.drafts = drafts
        begin = time.monotonic()
        self.llm = LLM(
            model=str(model),
            load_format=seeded_weights.LOAD_FORMAT,
            attention_backend=backend,
            kv_cache_dtype="fp8",
            **(V41_ARGUMENTS if v41 else V4_ARGUMENTS),
            max_model_len=CONTEXT,
            max_num_seqs=max(count for count, _ in POINTS),
            cudagraph_capture_sizes=[count * (1 + drafts) for count, _ in POINTS],  # no others: starts are short
            gpu_memory_utilization=0.35,
            kv_cache_memory_bytes=layers << 30,
            skip_tokenizer_init=True,
            enable_flashinfer_autotune=False,
            speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
            disable_log_stats=not drafts,
            logits_processors=[FORCED_TOKENS] if takes_processors() and not drafts else None,
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
                    **forcing(one),
                )
                for one in some
            ]
            replies += [reply.outputs[0] for reply in self.llm.generate(prompts, sampling, use_tqdm=False)]
        made = [_answer(list(reply.token_ids), reply.logprobs) for reply in replies]
        for one, answer in zip(requests, made, strict=True):
            if one.forced is not None and answer.tokens != one.path:
                raise Failed(f"wanted the tokens {one.path}, got {answer.tokens}")
        return made

    def step_ms(self, requests: list[Request]) -> float:
        """Of the steps in which all requests decode: behind the last prompt, before the first end."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine, ends = self.llm.llm_engine, []
        for number, one in enumerate(requests):
            sampling = SamplingParams(temperature=0, max_tokens=one.new_tokens, ignore_eos=True, detokenize=False)
            engine.add_request(f"step-{number}", TokensPrompt(prompt_token_ids=one.prompt), sampling)
        while engine.has_unfinished_requests():
            if len(engine.step()) == len(requests):
                ends.append(time.perf_counter())
        if len(ends) < STEPS:
            raise Failed(f"wanted {STEPS} steps in which {len(requests)} requests decode, got {len(ends)}")
        return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e3

    def about(self) -> dict:
        """What it took to be ready, and whose attention layers the model's and the draft's are."""
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.items()
        attention = Counter(type(layer).__name__ for name, layer in layers if name.endswith(".attn"))
        return {"ready_seconds": round(self.ready_seconds, 1), "attention": attention}

    def about_drafts(self) -> dict:
        """Tokens that were drafted so far, and those that the model accepted. Raises Failed where none was drafted."""
        names = {"proposed": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}
        metrics = self.llm.get_metrics()
        found = {key: sum(one.value for one in metrics if one.name == name) for key, name in names.items()}
        if not found["proposed"]:
            raise Failed("no token was drafted")
        return found


def _answer(tokens: list[int], steps: list[dict]) -> Answer:
    best = [sorted((one.logprob for one in step.values()), reverse=True) for step in steps]
    logprobs = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
    return Answer(tokens, logprobs, [values[0] - values[1] for values in best])


def answers(served: Served) -> dict:
    """By stage, what the engine answers. With drafts 0.26 forces none, so that all are greedy, without a control."""
    requests, turns = make_requests(REQUESTS), make_turns()
    if served.drafts:
        requests, turns = ([replace(one, forced=None) for one in made] for made in (requests, turns))
    stages = {stage: served.ask(requests, REQUESTS, "together") for stage in ("together", "again")}
    stages |= {"few": served.ask(requests, FEW, "few"), "turns": served.ask(turns, 1, "turns")}
    if not served.drafts:
        long = [i for i, one in enumerate(requests) if len(one.prompt) >= LONG_PROMPT and one.forced is not None]
        stages["control"] = served.ask([with_another_beginning(requests[i]) for i in long], REQUESTS, "control")
        stages["before control"] = [stages["together"][i] for i in long]
    return {stage: [asdict(answer) for answer in given] for stage, given in stages.items()}


def steps(served: Served) -> dict:
    """By point, three readings in milliseconds, and what the host took for a plain loop before and after them."""
    draw, found = random.Random(1), {}
    for count, length in POINTS:
        tokens = count * length // PROMPT_TOKENS_A_STEP + STEPS
        requests = [Request(draw.choices(PROMPT_TOKENS, k=length), tokens) for _ in range(count)]
        host = host_ms()
        found[f"{count} x {length}"] = {
            "ms": [served.step_ms(requests) for _ in range(3)],
            "host_ms": [host, host_ms()],
        }
    return found


def serve(backend: str, part: str, folder: Path, layers: int, drafts: int, v41: bool) -> None:
    """What one process does: serve, and write what was asked for."""
    drafts = drafts if part == "drafts" else 0
    model = write_model(folder / f"model-{backend}-{part}", layers, drafts, v41)
    served = Served(backend, model, layers, drafts, v41)
    found = answers(served) if part in MODES else steps(served)
    of_drafts = {"drafts": served.about_drafts()} if drafts else {}
    write(served.about() | of_drafts | {"found": found}, folder / f"{backend}-{part}.json")


def judged(folder: Path, parts: list[str]) -> tuple[dict, list[str]]:
    """What `etap check answers` would say of these answers, and what speaks against ETAP's."""
    records = {}
    for part in parts:
        for backend in BACKENDS:
            about = read_json(folder / f"{backend}-{part}.json")
            found = about.pop("found")
            stages = {stage: {"requests": [Answer(**one) for one in made]} for stage, made in found.items()}
            records[backend, MODES[part]] = about | {"stages": stages}
    document, failures = MixedRequests(str(folder), REQUESTS).judged(records, list(BACKENDS), ASKED["vllm"])
    for name, one in document["servers"].items():
        if "drafts" in one:
            document["outcome"] += "; {}: {accepted} of {proposed} drafts accepted".format(name, **one["drafts"])
    return document, failures


def medians(turns: dict[str, list[dict]]) -> str:
    """What a step of each point took, ours first."""
    reference, ours = BACKENDS
    said = ""
    for point in next(iter(turns[ours]), {}):
        times = {name: statistics.median(ms for turn in turns[name] for ms in turn[point]["ms"]) for name in BACKENDS}
        said += f"; a step of {point}: {times[ours]:.2f} ms, {reference} {times[reference]:.2f}"
    return said


def run(parts: list[tuple[str, str]], output: Path, limit: float, options: Sequence[str] = ()) -> None:
    """Processes that serve at the same time, but for those that have left their file. Raises Failed where one fails."""
    folder = output.with_suffix("")
    left = [name for name in parts if not (folder / f"{'-'.join(name)}.json").is_file()]
    command = [sys.executable, "-m", __spec__.name, "--output", str(output), *options, "--serve"]
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


def answered(start: Callable, folder: Path, parts: list[str], parallel: bool) -> tuple[dict, list[str]]:
    """What the document says of answers, and what speaks against ETAP's. Raises Failed where an engine fails."""
    for part in parts:
        pairs = [(backend, part) for backend in BACKENDS]
        for at_once in [pairs] if parallel else [[one] for one in pairs]:
            start(at_once)
        if PROOF not in (log := folder / f"ETAP-{part}.log").read_text():
            raise Failed(f"the log does not say {PROOF!r}:\n{tail(log)}")
    return judged(folder, parts) if parts else ({"outcome": "no answers"}, [])


def timed(start: Callable, folder: Path, turns: int) -> dict[str, list[dict]]:
    """By backend, the steps of each turn. Raises Failed where an engine fails."""
    for turn in range(turns):
        for backend in BACKENDS:
            start([(backend, f"steps-{turn}")])
    return {name: [read_json(folder / f"{name}-steps-{n}.json")["found"] for n in range(turns)] for name in BACKENDS}


def main(
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("v4-server.json"),
    layers: Annotated[int, typer.Option(min=4, max=43, help="The model's first layers.")] = LAYERS,
    drafts: Annotated[int, typer.Option(min=0, help="Tokens that MTP drafts in answers besides.")] = 0,
    turns: Annotated[int, typer.Option("--steps", min=0, help="Turns in which steps are timed.")] = 0,
    asked: Annotated[bool, typer.Option("--answers/--no-answers", help="Whether answers are compared.")] = True,
    model: Annotated[Path | None, typer.Option("--write-model", help="Only write the model, to this folder.")] = None,
    parallel: Annotated[bool, typer.Option("--parallel", help="Both engines answer at a time.")] = False,
    v41: Annotated[bool, typer.Option("--v41", help="DeepSeek-V4.1's layers, without drafts.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds for one engine.")] = 600,
    backend: Annotated[str, typer.Option("--serve", hidden=True)] = "",
    part: Annotated[str, typer.Option(hidden=True)] = "answers",
) -> None:
    """Compare answers and steps; exit with 1 when answers differ by more than allowed."""
    folder = output.with_suffix("")
    if v41 and (drafts or model):
        raise typer.BadParameter("--v41: wanted neither --drafts nor --write-model beside it")
    if model:
        return write_checked_model(model, layers, drafts)
    if backend:
        return serve(backend, part, folder, layers, drafts, v41)
    must_be_writable(output)
    about = provenance("python -m bench.qualify.v4_server", packages=("vllm", *PACKAGES), library=_library.library_path())
    options = ["--layers", str(layers), "--drafts", str(drafts), *["--v41"] * v41]
    start = functools.partial(run, output=output, limit=limit, options=options)
    parts = ["answers"] + ["drafts"] * (drafts > 0) if asked else []
    try:
        found, failures = answered(start, folder, parts, parallel)
        of_steps = timed(start, folder, turns)
    except Failed as failure:
        sys.exit(str(failure))
    whose = "DeepSeek-V4.1" if v41 else "DeepSeek-V4"
    document = {"what": f"vLLM serves {whose}'s layers with ETAP beside its own attention", **about.model_dump()}
    found["outcome"] += medians(of_steps)
    write(document | {"layers": layers} | found | {"steps": of_steps, "failures": failures}, output)
    print(found["outcome"], *failures, sep="\n")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)

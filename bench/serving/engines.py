"""What the laboratory knows of the two engines: how each is started, asked and loaded, and what its replies, its log
and its metrics mean."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

FORCED_TOKENS = "bench.checks.forced_tokens:ForcedTokens"
SERVED_NAME = "served"
SEED = 0
PAGE_TOKENS = 64


@dataclass(frozen=True)
class Serving:
    """What a server is started for, in no engine's words.

    Attributes:
        model: folder or name of the model.
        dummy: its weights are made up by the engine.
        tp, pp, dp: tensor, pipeline and data parallelism.
        dcp: decode context parallelism, over how many of the tp ranks a request's tokens are spread.
        max_context: longest request in tokens, output included; None for the model's.
        batches: numbers of concurrent requests, for which CUDA graphs are captured; none for the engine's choice.
        max_requests: most requests at a time; None for the largest of `batches`.
        draft_tokens: tokens that are drafted a step, 0 without.
        drafter: who drafts: the model's own layer for multi-token prediction, or its text so far (vLLM only).
        acceptance: draft tokens that are taken as accepted a step, plus one; None to let the weights decide.
        fp8_cache: the KV cache is in e4m3; else in the model's type.
    """

    model: str
    dummy: bool = False
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    max_context: int | None = None
    batches: tuple[int, ...] = ()
    draft_tokens: int = 0
    acceptance: float | None = None
    fp8_cache: bool = False
    max_requests: int | None = None
    drafter: Literal["mtp", "ngram"] = "mtp"

    @property
    def most_requests(self) -> int:
        return self.max_requests or max(self.batches)


@dataclass(frozen=True)
class Load:
    """A load generator's run: `prompts` of `input` random tokens, of one seed the same, `concurrency` at a time. All
    begin with the same `prefix` tokens."""

    input: int
    output: int
    concurrency: int
    prompts: int
    seed: int = SEED
    prefix: int = 0


@dataclass(frozen=True)
class Answer:
    """The tokens of one completion; for each its log-probability, and how far the best token is from the second."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class Engine:
    """One serving engine."""

    name: str
    package: str
    ours: str
    fp8_math: tuple[str, list[str]]
    """Name and flags of ours that multiplies an FP8 cache as it is."""
    load_module: str
    path: str
    """Where completions are asked for."""
    kv_tokens: str  # a number, or two whose product is meant
    page_size: str
    full_graphs: str | None = None
    """What the log has where decode runs in full CUDA graphs; None where an engine does not say when it is ready."""
    cached: tuple[str, str]
    """Samples of /metrics: prompt tokens that the prefix cache had, and all."""
    running: str
    """The sample that counts requests in the running batch."""
    counters: dict[str, str]
    """Further samples, by what they count."""
    memory_share: str
    """The flag for the share of the GPU's memory that the server may take."""
    eager: str
    """The flag for no CUDA graphs."""
    uncached: str
    """The flag for no prefix cache."""

    parts_are_new: bool
    """Whether a part of a stream has what is new alone; else it repeats all that came before."""

    # Each engine has besides:
    #   server(python, serving, backend, port, flags)  the command that starts it
    #   load(serving, load, port, result)              arguments of its load generator
    #   small_cache(tokens)      flags for a KV cache of so many tokens on each rank
    #   body(prompt, tokens, temperature, logprobs, forced, salt)  a request for exactly so many tokens behind a prompt
    #       of token ids. `logprobs`: also those of so many best tokens at each step. `forced`: the answer's tokens (see
    #       takes_processors). Another `salt` finds nothing in the prefix cache. SGLang takes neither of the two.
    #   answer(reply)            what a reply with log-probabilities of at least two tokens says
    #   logprobs_in(reply)       all log-probabilities in a reply, or in one part of a stream
    #   tokens_in(reply, before) tokens so far, after a reply or one more part of a stream
    #   in_use(backend, log)     whether the server's log says that this attention backend runs

    def environment(self, serving: Serving) -> dict[str, str]:
        """Variables that this engine needs for what it is started for."""
        return {}

    def page_tokens(self, log: str) -> int:
        """Tokens of a page, in wholes of which the prefix cache finds a prompt."""
        found = re.search(self.page_size, log)  # of models that have a size of their own
        return int(found[1]) if found else PAGE_TOKENS

    def cache_tokens(self, log: str) -> int | None:
        """Tokens that the KV cache holds, as the server's log has it."""
        found = re.search(self.kv_tokens, log)
        return int(math.prod(float(factor.replace(",", "")) for factor in found.groups("1"))) if found else None

    def in_full_graphs(self, log: str) -> bool | None:
        return None if self.full_graphs is None else re.search(self.full_graphs, log) is not None

    def cached_and_asked(self, metrics: dict[str, float]) -> tuple[float, float] | None:
        """Prompt tokens found in the prefix cache so far and all prompt tokens, from the samples of /metrics."""
        found, asked = (metrics.get(name) for name in self.cached)
        return None if found is None or asked is None else (found, asked)


def _given(flag: str, *values: object) -> list[str]:
    """The flag with its values, nothing where there are none."""
    return [flag, *map(str, values)] if all(values) and values else []


def _gaps(steps: Sequence[Sequence[float]]) -> list[float]:
    best = [sorted(step, reverse=True)[:2] for step in steps]
    return [first - second for first, second in best]


def takes_processors() -> bool:
    """Whether vLLM here takes FORCED_TOKENS. The V2 model runner keeps to `allowed_token_ids`, which V1 mixes up."""
    places = getattr(find_spec("vllm"), "submodule_search_locations", ())
    return not any(any(Path(place, "v1/worker/gpu/sample").glob("logits_processor*")) for place in places)


class Vllm(Engine):
    name = package = "vllm"
    ours = "ETAP"
    fp8_math = (ours, ["--additional-config", json.dumps({"etap_fp8_math": True})])
    load_module = "vllm.entrypoints.cli.main"
    path = "/v1/completions"
    kv_tokens = r"(?:GPU KV cache size|HiSparse steady-state .* for ([\d,]+) tokens per request): ([\d.,]+)"
    page_size = r"Setting attention block size to (\d+) tokens"
    full_graphs = r"Capturing CUDA graphs \((decode, )?FULL\)"
    cached = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    running = "vllm:num_requests_running"
    counters = {
        "preempted": "vllm:num_preemptions_total",
        "prefix tokens found": "vllm:prefix_cache_hits_total",
        "drafts": "vllm:spec_decode_num_draft_tokens_total",
        "drafts accepted": "vllm:spec_decode_num_accepted_tokens_total",
    }
    memory_share = "--gpu-memory-utilization"
    eager = "--enforce-eager"
    uncached = "--no-enable-prefix-caching"
    parts_are_new = True

    def server(self, python: str, serving: Serving, backend: str, port: int, flags: list[str]) -> list[str]:
        command = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", serving.model, "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--attention-backend", backend, "--seed", str(SEED)),
            *("--tensor-parallel-size", str(serving.tp), "--pipeline-parallel-size", str(serving.pp)),
            *("--data-parallel-size", str(serving.dp), "--max-num-seqs", str(serving.most_requests)),
        ]
        # A step verifies all drafted tokens. Graphs for no other numbers of rows: starts are short.
        sizes = sorted({batch * (1 + serving.draft_tokens) for batch in serving.batches})
        command += _given("--decode-context-parallel-size", serving.dcp > 1 and serving.dcp)
        command += _given("--max-model-len", serving.max_context) + _given("--cudagraph-capture-sizes", *sizes)
        command += ["--load-format", "dummy" if serving.dummy else "auto", "--disable-uvicorn-access-log"]
        command += _given("--speculative-config", serving.draft_tokens and json.dumps(self._drafts(serving)))
        return [*command, *_given("--kv-cache-dtype", serving.fp8_cache and "fp8"), *flags]

    def _drafts(self, serving: Serving) -> dict:
        drafts = {"method": serving.drafter, "num_speculative_tokens": serving.draft_tokens}
        if serving.drafter == "ngram":
            drafts["prompt_lookup_max"] = 4
        if serving.acceptance is not None:
            drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": serving.acceptance}
        return drafts

    def small_cache(self, tokens: int) -> list[str]:
        return ["--block-size", str(PAGE_TOKENS), "--num-gpu-blocks-override", str(tokens // PAGE_TOKENS)]

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        return [
            *("bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", SERVED_NAME, "--tokenizer", serving.model, "--dataset-name", "random"),
            *("--random-input-len", str(load.input - load.prefix), "--random-prefix-len", str(load.prefix)),
            *("--random-output-len", str(load.output), "--seed", str(load.seed)),
            *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency), "--ignore-eos"),
            *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--temperature", "0"),
            *("--save-result", "--save-detailed", "--result-dir", str(result.parent)),
            *("--result-filename", result.name),
        ]

    def body(self, prompt, tokens, *, temperature=0, logprobs=0, forced=None, salt=None) -> dict:
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": temperature}
        body |= {"ignore_eos": True}
        if logprobs:
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        if forced is not None:
            allowed = {"allowed_token_ids": sorted(set(forced))}  # answers repeat a token
            body |= {"vllm_xargs": {"forced_tokens": list(forced)}} if takes_processors() else allowed
        return body | ({} if salt is None else {"cache_salt": salt})

    def _logprobs(self, reply: dict) -> dict:
        return (reply["choices"][0].get("logprobs") if reply["choices"] else None) or {}

    def answer(self, reply: dict) -> Answer:
        found = self._logprobs(reply)
        tokens = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
        return Answer(tokens, found["token_logprobs"], _gaps([step.values() for step in found["top_logprobs"]]))

    def logprobs_in(self, reply: dict) -> list[float | None]:
        found = self._logprobs(reply)
        best = [value for step in found.get("top_logprobs") or () for value in step.values()]
        return [*(found.get("token_logprobs") or ()), *best]

    def tokens_in(self, reply: dict, before: int = 0) -> int:
        return before + len(self._logprobs(reply).get("tokens") or ())

    def in_use(self, backend: str, log: str) -> bool:
        if "Resolved architecture: DeepseekV4" in log:  # its layers choose for themselves, and only ETAP's say so
            return (f"{self.ours} decodes: DeepSeek-V4" in log) == (backend.upper() == self.ours)
        return f"Using AttentionBackendEnum.{backend.upper()} backend" in log


class Sglang(Engine):
    name = package = "sglang"
    ours = "etap"
    fp8_math = ("etap_fp8_math", [])
    load_module = "sglang.benchmark.serving"
    path = "/generate"
    kv_tokens = r"max_total_num_tokens=(\d+)"
    page_size = r"[Ss]etting page[_ ]size to (\d+)"
    cached = ("sglang:cached_tokens_total", "sglang:prompt_tokens_total")
    running = "sglang:num_running_reqs"
    counters = {"preempted": "sglang:num_retracted_requests_total", "prefix tokens found": "sglang:cached_tokens_total"}
    memory_share = "--mem-fraction-static"
    eager = "--disable-cuda-graph"
    uncached = "--disable-radix-cache"
    parts_are_new = False

    def server(self, python: str, serving: Serving, backend: str, port: int, flags: list[str]) -> list[str]:
        command = [
            *(python, "-m", "sglang.launch_server", "--model-path", serving.model, "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--attention-backend", backend),
            *("--page-size", str(PAGE_TOKENS), "--tp-size", str(serving.tp), "--pp-size", str(serving.pp)),
            *("--dp-size", str(serving.dp), "--max-running-requests", str(serving.most_requests)),
        ]
        command += _given("--dcp-size", serving.dcp > 1 and serving.dcp)
        command += _given("--context-length", serving.max_context)
        command += _given("--cuda-graph-bs-decode", *sorted(set(serving.batches)))
        command += [
            *("--load-format", "dummy" if serving.dummy else "auto", "--skip-server-warmup", "--enable-metrics"),
            *("--random-seed", str(SEED)),
        ]
        if serving.draft_tokens:
            command += [
                # Also called NEXTN, but not for DeepSeek-V4.
                *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(serving.draft_tokens)),
                *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(serving.draft_tokens + 1)),
            ]
        return [*command, *_given("--kv-cache-dtype", serving.fp8_cache and "fp8_e4m3"), *flags]

    def small_cache(self, tokens: int) -> list[str]:
        return ["--max-total-tokens", str(tokens)]

    def environment(self, serving: Serving) -> dict[str, str]:
        if serving.draft_tokens and serving.acceptance is not None:
            return {"SGLANG_SIMULATE_ACC_LEN": str(serving.acceptance)}
        return {}

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        dataset = {"dataset-name": "random-ids", "random-input-len": load.input, "random-output-len": load.output}
        if load.prefix:
            lengths = {"system-prompt-len": load.prefix, "question-len": load.input - load.prefix}
            lengths |= {"num-groups": 1, "prompts-per-group": load.prompts, "output-len": load.output}
            dataset = {"dataset-name": "generated-shared-prefix"} | {f"gsp-{key}": of for key, of in lengths.items()}
        return [
            *("--backend", "sglang", "--host", "127.0.0.1", "--port", str(port), "--model", SERVED_NAME),
            *("--tokenizer", serving.model, "--tokenize-prompt", "--random-range-ratio", "1"),
            *(word for key, value in dataset.items() for word in (f"--{key}", str(value))),
            *("--seed", str(load.seed), "--num-prompts", str(load.prompts)),
            *("--max-concurrency", str(load.concurrency), "--warmup-requests", "0", "--disable-tqdm"),
            *("--ready-check-timeout-sec", "0", "--output-file", str(result)),
        ]

    def body(self, prompt, tokens, *, temperature=0, logprobs=0, forced=None, salt=None) -> dict:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return body | ({"return_logprob": True, "top_logprobs_num": logprobs} if logprobs else {})

    def answer(self, reply: dict) -> Answer:
        about = reply["meta_info"]
        logprobs = [logprob for logprob, *_ in about["output_token_logprobs"]]
        tokens = [token for _, token, *_ in about["output_token_logprobs"]]
        return Answer(tokens, logprobs, _gaps([[one[0] for one in step] for step in about["output_top_logprobs"]]))

    def logprobs_in(self, reply: dict) -> list[float | None]:
        about = reply.get("meta_info", {})
        best = [one[0] for step in about.get("output_top_logprobs") or () for one in step or ()]
        return [*(one[0] for one in about.get("output_token_logprobs") or ()), *best]

    def tokens_in(self, reply: dict, before: int = 0) -> int:
        return reply.get("meta_info", {}).get("completion_tokens", before)

    def in_use(self, backend: str, log: str) -> bool:
        if "Use dsv4 attention backend" in log:  # whatever is named, and only ETAP says that it runs instead
            return (f"Attention backend {self.ours}: DeepSeek-V4" in log) == (backend == self.ours)
        # 0.5.17 logs its arguments as a record, 0.5.23 as a dictionary.
        return re.search(rf"\battention_backend(=|': )'{re.escape(backend)}'", log) is not None


ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Vllm(), Sglang())}


def cache_lines(log: str) -> list[str]:
    """What a server's log says of the KV cache: its type, the math on it, how many tokens fit."""
    said = r"GPU (?:\+ host )?KV cache size: [\d,]+ tokens|KV Cache (?:is allocated|VA upper bound).*"
    ours = r"(?:ETAP decodes|Attention backend etap): (?:sparse attention, )?KV cache .*"
    return list(dict.fromkeys(re.findall(f"{said}|{ours}", log)))


def read_result(path: Path, prompts: int) -> dict:
    """What one run of a load generator measured, in milliseconds and tokens a second.

    Raises ValueError when it is incomplete: a run in which requests failed is no measurement.
    """
    raw = json.loads(path.read_text().splitlines()[-1])  # SGLang appends lines, vLLM writes one
    if raw["completed"] != prompts:
        raise ValueError(f"wanted {prompts} requests answered, got {raw['completed']}")
    keys = [f"{what}_{time}_ms" for time in ("ttft", "tpot") for what in ("mean", "median", "p99")]
    keys += ["median_itl_ms", "duration", "output_throughput", "total_input_tokens"]
    reading = {key: raw[key] for key in keys if key in raw}
    reading["total_output_tokens"] = raw["total_output_tokens"]
    if "itls" in raw:  # vLLM's, one for each chunk of a stream after the first
        chunks = sum(len(of_request) + 1 for of_request in raw["itls"])
        reading["tokens_per_chunk"] = raw["total_output_tokens"] / chunks
    acceptance = raw.get("spec_decode_acceptance_length") or raw.get("accept_length")
    return reading | ({"acceptance_length": acceptance} if acceptance else {})

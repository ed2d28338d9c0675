"""The two engines: commands, requests, replies, logs and metrics."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from etap_backend.engine_contract import SHARED_PREFIX_VARIABLE, TOP_K_VARIABLE
from etap_backend.limits import SPARSE_FP8

SERVED_NAME = "served"
SEED = 0
PAGE_TOKENS = 64
DRAFT_TOKENS = 3
MODES = ("plain", "mtp")  # without drafts, and with those of the model's MTP layer
WORDS = ("math", "eager", "shared", "engine_top_k")  # of a variant's name
NAME = re.compile(r"(?P<backend>\w+)(?P<words>(?:\+\w+)*)(?:@(?P<kind>tp|dcp)(?P<ranks>[1-9]\d*))?")


def must_be_modes(modes: list[str]) -> None:
    """Raises ValueError for an unknown one."""
    if not set(modes) <= set(MODES):
        raise ValueError(f"--modes: wanted some of {', '.join(MODES)}, got {', '.join(modes)}")


@dataclass(frozen=True)
class Variant:
    """An attention backend with its KV cache and GPUs, by name BACKEND[+CACHE][+WORD]...[@tpN|@dcpN].

    ETAP+fp8 has an FP8 cache, ETAP+fp8+math multiplies it in FP8, ETAP+eager runs without CUDA graphs, ETAP+shared
    reads shared prefixes once, ETAP+engine_top_k leaves the choice of rows to the engine, ETAP@tp2 runs on two
    tensor-parallel GPUs, ETAP@dcp2 on two with decode context parallelism.
    """

    backend: str
    cache: str = "auto"
    fp8_math: bool = False
    eager: bool = False
    tp: int = 1
    dcp: int = 1
    shared: bool = False
    engine_top_k: bool = False

    @classmethod
    def parse(cls, name: str, tp: int = 1) -> Variant:
        """The variant of this name, on `tp` GPUs unless it says otherwise. Raises ValueError for another name."""
        found = NAME.fullmatch(name)
        words = found["words"].split("+")[1:] if found else []
        caches = [word for word in words if word not in WORDS]
        if not found or len(caches) > 1:
            raise ValueError(f"--backend: wanted BACKEND[+CACHE][+{'][+'.join(WORDS)}][@tpN or @dcpN], got {name!r}")
        ranks = int(found["ranks"] or tp)
        dcp = ranks if found["kind"] == "dcp" else 1
        math_, eager, shared, engine_top_k = (word in words for word in WORDS)
        return cls(found["backend"], (caches or ["auto"])[0], math_, eager, ranks, dcp, shared, engine_top_k)

    @property
    def is_etap(self) -> bool:
        return self.backend.upper() == "ETAP"

    @property
    def environment(self) -> dict[str, str]:
        shared = {SHARED_PREFIX_VARIABLE: "1"} if self.shared else {}
        return shared | ({TOP_K_VARIABLE: "0"} if self.engine_top_k else {})

    def proof(self, config: dict) -> str:
        """What ETAP logs with this cache and math for a model of this configuration; "" for other backends."""
        if not self.is_etap or is_v4(config):
            return ""
        if is_sparse(config):
            return f"sparse attention, KV cache {'bfloat16' if self.cache == 'auto' else SPARSE_FP8}"
        math_type = "FP8 (e4m3)" if self.fp8_math else "float16"
        types = [] if self.cache == "auto" else [f"KV cache FP8 (e4m3), math {math_type}"]
        return ", ".join([*types, *(["shared prefixes read once"] if self.shared else [])])


@dataclass(frozen=True)
class Serving:
    """What a server is started for.

    Attributes:
        model: folder or name.
        weights: "auto" loads them, "dummy" are the engine's random ones, "seeded" those of bench.models.seeded.
        max_requests: most requests at a time.
        max_context: longest request in tokens, output included; None for the model's limit.
        batches: request counts with CUDA graphs; empty for the engine's choice.
        draft_tokens: tokens drafted per step and request.
        acceptance: accepted tokens per step, drafts plus one, if simulated; None lets the weights decide.
    """

    model: str
    weights: Literal["auto", "dummy", "seeded"] = "auto"
    max_requests: int = 256
    max_context: int | None = None
    batches: tuple[int, ...] = ()
    draft_tokens: int = 0
    acceptance: float | None = None

    def drafting(self, mode: str) -> Serving:
        """With DRAFT_TOKENS per step of the model's own MTP layer in the mode `mtp`."""
        return self if mode == "plain" else replace(self, draft_tokens=DRAFT_TOKENS)


@dataclass(frozen=True)
class Load:
    """A run of a load generator: `prompts` of `input` random tokens, the first `prefix` of them common to all,
    `concurrency` at a time. Equal seeds give equal prompts."""

    input: int
    prefix: int
    output: int
    concurrency: int
    prompts: int
    seed: int = SEED


@dataclass(frozen=True)
class Answer:
    """The tokens of one completion; for each its log-probability and the gap between the best two tokens, in nats."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class Engine:
    """What both engines share.

    Attributes of each: `backends`, `sparse` and `v4` are compared by default for dense, sparse and DeepSeek-V4 models,
    the reference first; `forces` whether a request can name the token of every step,
    `parts_are_new` whether parts of a stream have only new tokens; `cached` (found, all), `running` and `counters` are
    samples of /metrics.
    """

    name: str
    cache_size: str
    page_size: str
    cached: tuple[str, str]

    def environment(self, serving: Serving) -> dict[str, str]:
        """Variables for a server."""
        return {}

    def page_tokens(self, log: str) -> int:
        found = re.search(self.page_size, log)
        return int(found[1]) if found else PAGE_TOKENS

    def cache_tokens(self, log: str) -> int | None:
        found = re.search(self.cache_size, log)
        return int(found[1].replace(",", "")) if found else None

    def cached_and_asked(self, metrics: dict[str, float]) -> tuple[float, float]:
        """Prompt tokens that the prefix cache had so far, and all; NaN where /metrics does not say."""
        found, asked = (metrics.get(name, math.nan) for name in self.cached)
        return found, asked

    def steps(self, reply: dict) -> tuple[list, list, list]:
        """Of a reply or one part of a stream: tokens, their log-probabilities, those of the best tokens per step."""
        raise NotImplementedError

    def answer(self, reply: dict) -> Answer:
        """The answer in a reply with log-probabilities."""
        tokens, logprobs, steps = self.steps(reply)
        best = [sorted(step, reverse=True)[:2] for step in steps]
        return Answer(tokens, logprobs, [first - second for first, second in best])

    def logprobs_in(self, reply: dict) -> list[float | None]:
        """All log-probabilities in a reply or in one part of a stream."""
        _, logprobs, steps = self.steps(reply)
        return [*logprobs, *(value for step in steps for value in step)]


def _flag(name: str, *values: object) -> list[str]:
    """The flag with its values, nothing if a value is missing."""
    return [name, *map(str, values)] if values and all(values) else []


class Vllm(Engine):
    name = "vllm"
    etap = "ETAP"
    backends = ("FLASHMLA", "ETAP", "TRITON_MLA")
    sparse = ("FLASH_ATTN_MLA_SPARSE", "ETAP", "FLASHMLA_SPARSE")
    v4 = ("FLASHMLA_SPARSE", "ETAP")
    forces = True
    load_module = "vllm.entrypoints.cli.main"
    path = "/v1/completions"
    cache_size = r"GPU KV cache size: ([\d,]+)"
    page_size = r"Setting attention block size to (\d+) tokens"
    cached = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    running = "vllm:num_requests_running"
    counters = {
        "preempted": "vllm:num_preemptions_total",
        "prefix tokens found": "vllm:prefix_cache_hits_total",
        "drafts accepted": "vllm:spec_decode_num_accepted_tokens_total",
    }
    memory_flag = "--gpu-memory-utilization"
    parts_are_new = True

    def server(self, python: str, serving: Serving, variant: Variant, port: int, flags: list[str]) -> list[str]:
        """The command that starts a server."""
        # A step verifies all drafted tokens; a graph more costs time at the start.
        sizes = sorted({batch * (1 + serving.draft_tokens) for batch in serving.batches})
        drafts = {"method": "mtp", "num_speculative_tokens": serving.draft_tokens}
        if serving.acceptance is not None:
            drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": serving.acceptance}
        return [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", serving.model, "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--attention-backend", variant.backend, "--seed", str(SEED)),
            *("--tensor-parallel-size", str(variant.tp), "--max-num-seqs", str(serving.max_requests)),
            *("--load-format", serving.weights, "--disable-uvicorn-access-log", "--kv-cache-dtype", variant.cache),
            *_flag("--decode-context-parallel-size", variant.dcp > 1 and variant.dcp),
            *_flag("--max-model-len", serving.max_context),
            *_flag("--cudagraph-capture-sizes", *sizes),
            *_flag("--speculative-config", serving.draft_tokens and json.dumps(drafts)),
            *_flag("--additional-config", variant.fp8_math and json.dumps({"etap_fp8_math": True})),
            *(["--enforce-eager"] if variant.eager else []),
            *flags,
        ]

    def small_cache(self, tokens: int) -> list[str]:
        """Flags for a KV cache of so many tokens."""
        return ["--block-size", str(PAGE_TOKENS), "--num-gpu-blocks-override", str(tokens // PAGE_TOKENS)]

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        """Arguments of the load generator, which writes `result`."""
        return [
            *("bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", SERVED_NAME, "--tokenizer", serving.model, "--dataset-name", "random"),
            *("--random-input-len", str(load.input - load.prefix), "--random-prefix-len", str(load.prefix)),
            *("--random-output-len", str(load.output), "--seed", str(load.seed)),
            *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency), "--ignore-eos"),
            *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--temperature", "0"),
            *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
        ]

    def body(self, prompt, tokens, *, temperature=0.0, logprobs=0, forced=None, salt=None) -> dict:
        """A request for exactly so many tokens behind a prompt of token ids, with log-probabilities of so many best
        tokens per step. `forced` is the token of every step; requests with another `salt` share no prefix cache."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": temperature}
        body |= {"ignore_eos": True}
        body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True} if logprobs else {}
        body |= {} if forced is None else {"allowed_token_ids": [forced]}
        return body | ({} if salt is None else {"cache_salt": salt})

    def steps(self, reply: dict) -> tuple[list, list, list]:
        found = (reply["choices"][0].get("logprobs") if reply["choices"] else None) or {}
        tokens = [int(token.removeprefix("token_id:")) for token in found.get("tokens") or ()]
        best = [list(step.values()) for step in found.get("top_logprobs") or ()]
        return tokens, found.get("token_logprobs") or [], best

    def tokens_in(self, reply: dict, before: int = 0) -> int:
        """Tokens so far, after a reply or one more part of a stream."""
        return before + len(self.steps(reply)[0])

    def in_use(self, variant: Variant, log: str) -> bool:
        """Whether the log says that this attention backend runs."""
        if "Resolved architecture: DeepseekV4" in log:  # only ETAP's layers name themselves
            return (f"{self.etap} decodes: DeepSeek-V4" in log) == variant.is_etap
        return f"Using AttentionBackendEnum.{variant.backend.upper()} backend" in log

    def in_graphs(self, log: str) -> bool | None:
        """Whether decode runs in CUDA graphs; None where the log does not say."""
        return re.search(r"Capturing CUDA graphs \((decode, )?FULL\)", log) is not None


class Sglang(Engine):
    name = "sglang"
    etap = "etap"
    backends = ("flashmla", "etap", "triton")
    sparse = ("dsa", "etap")
    v4 = ("dsv4", "etap")
    forces = False
    load_module = "sglang.benchmark.serving"
    path = "/generate"
    cache_size = r"max_total_num_tokens=(\d+)"
    page_size = r"[Ss]etting page[_ ]size to (\d+)"
    cached = ("sglang:cached_tokens_total", "sglang:prompt_tokens_total")
    running = "sglang:num_running_reqs"
    counters = {"preempted": "sglang:num_retracted_requests_total", "prefix tokens found": "sglang:cached_tokens_total"}
    memory_flag = "--mem-fraction-static"
    parts_are_new = False

    def server(self, python: str, serving: Serving, variant: Variant, port: int, flags: list[str]) -> list[str]:
        steps = serving.draft_tokens
        drafts = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)]
        drafts += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
        return [
            *(python, "-m", "sglang.launch_server", "--model-path", serving.model, "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--random-seed", str(SEED), "--page-size", str(PAGE_TOKENS)),
            *("--attention-backend", "etap_fp8_math" if variant.fp8_math else variant.backend),
            *("--tp-size", str(variant.tp), "--max-running-requests", str(serving.max_requests)),
            *("--load-format", "auto" if serving.weights == "auto" else "dummy"),  # a plugin replaces dummy by seeded
            *("--skip-server-warmup", "--enable-metrics"),
            *("--kv-cache-dtype", "fp8_e4m3" if variant.cache == "fp8" else variant.cache),
            *_flag("--dcp-size", variant.dcp > 1 and variant.dcp),
            *_flag("--context-length", serving.max_context),
            *_flag("--cuda-graph-bs-decode", *sorted(set(serving.batches))),
            *(drafts if steps else []),
            *(["--disable-cuda-graph"] if variant.eager else []),
            *flags,
        ]

    def small_cache(self, tokens: int) -> list[str]:
        return ["--max-total-tokens", str(tokens)]

    def environment(self, serving: Serving) -> dict[str, str]:
        found = {} if serving.acceptance is None else {"SGLANG_SIMULATE_ACC_LEN": str(serving.acceptance)}
        # Without a checkpoint SGLang takes the experts of DeepSeek-V4 for FP4.
        return found | ({"SGLANG_DSV4_FP4_EXPERTS": "0"} if serving.weights == "seeded" else {})

    def load(self, serving: Serving, load: Load, port: int, result: Path) -> list[str]:
        data = {"dataset-name": "random-ids", "random-input-len": load.input, "random-output-len": load.output}
        if load.prefix:
            data = {"dataset-name": "generated-shared-prefix", "gsp-system-prompt-len": load.prefix}
            data |= {"gsp-question-len": load.input - load.prefix, "gsp-output-len": load.output}
            data |= {"gsp-num-groups": 1, "gsp-prompts-per-group": load.prompts}
        return [
            *("--backend", "sglang", "--host", "127.0.0.1", "--port", str(port), "--model", SERVED_NAME),
            *("--tokenizer", serving.model, "--tokenize-prompt", "--random-range-ratio", "1"),
            *(word for key, value in data.items() for word in (f"--{key}", str(value))),
            *("--seed", str(load.seed), "--num-prompts", str(load.prompts)),
            *("--max-concurrency", str(load.concurrency), "--warmup-requests", "0", "--disable-tqdm"),
            *("--ready-check-timeout-sec", "0", "--output-file", str(result)),
        ]

    def body(self, prompt, tokens, *, temperature=0.0, logprobs=0, forced=None, salt=None) -> dict:
        """As vLLM's; SGLang takes neither forced tokens nor salts."""
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return body | ({"return_logprob": True, "top_logprobs_num": logprobs} if logprobs else {})

    def steps(self, reply: dict) -> tuple[list, list, list]:
        about = reply.get("meta_info", {})
        chosen = about.get("output_token_logprobs") or []
        best = [[one[0] for one in step or ()] for step in about.get("output_top_logprobs") or ()]
        return [one[1] for one in chosen], [one[0] for one in chosen], best

    def tokens_in(self, reply: dict, before: int = 0) -> int:
        return reply.get("meta_info", {}).get("completion_tokens", before)

    def in_use(self, variant: Variant, log: str) -> bool:
        if "Use dsv4 attention backend" in log:  # whatever the flag says; only ETAP names itself
            return (f"Attention backend {self.etap}: DeepSeek-V4" in log) == variant.is_etap
        name = "etap_fp8_math" if variant.fp8_math else variant.backend
        return re.search(rf"\battention_backend(=|': )'{re.escape(name)}'", log) is not None

    def in_graphs(self, log: str) -> bool | None:
        steps = re.findall(r"Decode batch.*cuda graph: (True|False)", log)
        return "True" in steps if steps else None


ENGINES: dict[str, Vllm | Sglang] = {engine.name: engine for engine in (Vllm(), Sglang())}


def configuration(model: str | Path) -> dict:
    """The model's config.json, of a multimodal model its text's; {} where there is no such file."""
    path = Path(model) / "config.json"
    config: dict = json.loads(path.read_text()) if path.is_file() else {}
    return config.get("text_config") or config


def is_sparse(config: dict) -> bool:
    return "index_topk" in config


def is_v4(config: dict) -> bool:
    """Whether the layers are DeepSeek-V4's or V4.1's."""
    return "compress_ratios" in config


def cache_lines(log: str) -> list[str]:
    """What a log says of the KV cache: type, math, size."""
    engines = r"GPU (?:\+ host )?KV cache size: [\d,]+ tokens|KV Cache (?:is allocated|VA upper bound).*"
    etap = r"(?:ETAP decodes|Attention backend etap): (?:sparse attention, )?KV cache .*"
    return list(dict.fromkeys(re.findall(f"{engines}|{etap}", log)))


def read_result(path: Path, prompts: int) -> dict:
    """What a load generator measured: milliseconds and tokens per second.

    Raises ValueError when requests failed: such a run measures nothing.
    """
    raw = json.loads(path.read_text().splitlines()[-1])  # SGLang appends lines
    if raw["completed"] != prompts:
        raise ValueError(f"wanted {prompts} requests answered, got {raw['completed']}")
    found = {f"{name}_ms": raw.get(f"median_{name}_ms") for name in ("ttft", "tpot", "itl")}
    found |= {"tokens_per_second": raw["output_throughput"], "duration": raw.get("duration")}
    return found | {"acceptance_length": raw.get("spec_decode_acceptance_length") or raw.get("accept_length")}

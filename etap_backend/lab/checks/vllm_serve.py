"""Serves one model with ETAP and with another attention backend of vLLM, and compares answers and decode speed.

    python tests/vllm/serve_check.py MODEL --output serve.json [-- flags for vllm serve]

Needs a Hopper GPU, vLLM and etap-backend installed beside it. MODEL is any MLA model that vLLM serves. Where there are
no weights, a folder with config and tokenizer is enough with `-- --load-format seeded` (see seeded_weights.py).

Three servers run one after another: ETAP and the reference with full CUDA graphs, then ETAP with --enforce-eager.

Answers. Concurrent requests of mixed length go to both servers. Every second one is forced along a given path (a
bias lifts one token above all, the log-probabilities are those without the bias), so that all its steps compare;
the others decode greedily and compare up to the first step at which the backends choose differently. Two yardsticks
come from the reference's server:

- noise: the same requests again, few at a time. Batches of other sizes take other GEMM and split-KV kernels, and each
  rounding to bfloat16 that turns out differently spreads through the layers. That is no fault, and no attention kernel
  can be told apart below it.
- control: the forced requests again with the first three quarters of their prompts replaced. If that moved nothing,
  attention would not matter here and agreement would prove nothing.

With --kv-cache-dtype fp8 all three have an FP8 cache. FLASHMLA then rounds queries and probabilities to e4m3, as ETAP
does with ETAP_FP8_MATH=1, so noise is no bound to differences from it; it is one to those between ETAP and TRITON_MLA,
which do not. What each log says of the cache's type and of the tokens that fit is kept.

Next turns. Prompts of 2 to 300 tokens over a cached prefix, one at a time, so that each is a step of its own: up to 128
tokens go through the backends' decode kernels, more through vLLM's prefill. They are compared as the other answers are,
and timed up to the first token.

Speed. A time per output token is the difference between a long and a short batch of the same prompts, whose prefill
is cached, divided by the number of steps between them: neither prefill nor the client is in it.
"""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ETAP = "ETAP"
PLUGIN_GROUP = "vllm.general_plugins"
PROMPT_TOKENS = range(1000, 4000)  # in the vocabulary of every model, and no special token of any
EDGE_LENGTHS = (10, 63, 64, 65, 127, 128, 129, 4000)  # around one and two pages of the KV cache
FEW = 8  # concurrency of the second reading
TURN_TOKENS = (0, 2, 3, 4, 17, 37, 63, 64, 100, 127, 128, 129, 300)  # new tokens of turns; the first fill the cache
TURN_PREFIX = 2048  # tokens before them: whole blocks, so that all are cached and no more
SHORT, LONG = 32, 288  # output tokens of the two batches whose difference is timed
MOST_BIAS = 100  # that vLLM takes; log-probabilities are those before it
IMPOSSIBLE = -9000.0  # vLLM reports minus infinity as -9999

KEEPS_QUERIES = "TRITON_MLA"  # over an FP8 cache, where others round them to e4m3

NOISE_FACTOR = 3  # rounding of two kernels against rounding of one kernel at two batch sizes
CONTROL_MEDIAN = 1 / 50  # of the control's median, where batching changes next to nothing
CONTROL_REQUEST = 1 / 8  # of the control's median, for the median of a single request, which scatters more
MOST_REQUEST = 1 / 2  # of the control's median, for a single request where the noise's own scatter allows more
REQUEST_STEPS = 8  # fewer steps have no median to speak of
TIE_NOISE, TIE_CONTROL = 15, 1 / 10  # two tokens this close may change places: in noise medians, of the control's

console = Console(width=120)


class CheckError(Exception):
    """Something that the check wants and did not get."""


@dataclass(frozen=True)
class Request:
    """One completion: token ids, how many tokens to add, and the token forced at each step (None: greedy)."""

    prompt: list[int]
    new_tokens: int
    forced: int | None = None


@dataclass(frozen=True)
class Answer:
    """The tokens of one completion; for each its log-probability and how far the best token is from the second."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@dataclass
class Agreement:
    """Absolute differences of the chosen tokens' log-probabilities, by request, and the gaps of the steps that part."""

    differences: list[list[float]]
    parted: list[float] = field(default_factory=list)

    def request_medians(self) -> dict[int, float]:
        """By index, of the requests with steps enough."""
        return {i: statistics.median(steps) for i, steps in enumerate(self.differences) if len(steps) >= REQUEST_STEPS}

    def median(self) -> float:
        return statistics.median([value for request in self.differences for value in request])

    def summary(self) -> dict:
        values = sorted(value for request in self.differences for value in request)
        return {
            "steps": len(values),
            "median": statistics.median(values),
            "p99": values[math.ceil(0.99 * len(values)) - 1],
            "max": values[-1],
            "largest_median_of_a_request": max(statistics.median(request) for request in self.differences if request),
            "largest_median_of_a_judged_request": max(self.request_medians().values(), default=None),
            "parted": len(self.parted),
            "largest_gap_parted": max(self.parted, default=None),
        }


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 10 to 4000 tokens, as many short as long ones, with 16 to 64 new tokens; every second one forced."""
    rng = random.Random(seed)
    lengths = [round(10 * 400 ** rng.random()) for _ in range(count)]
    lengths[: len(EDGE_LENGTHS)] = EDGE_LENGTHS[:count]
    return [
        Request(
            prompt=rng.choices(PROMPT_TOKENS, k=length),
            new_tokens=rng.randint(16, 64),
            forced=rng.choice(PROMPT_TOKENS) if index % 2 else None,
        )
        for index, length in enumerate(lengths)
    ]


def make_turns(seed: int = 2) -> list[Request]:
    """What two users go on with by turns after prefixes of their own: one's answers are forced, the other's greedy."""
    rng = random.Random(seed)
    prefixes = [rng.choices(PROMPT_TOKENS, k=TURN_PREFIX) for _ in range(2)]
    return [
        Request(
            prompt=prefix + rng.choices(PROMPT_TOKENS, k=tokens),
            new_tokens=16,
            forced=rng.choice(PROMPT_TOKENS) if index else None,
        )
        for tokens in TURN_TOKENS
        for index, prefix in enumerate(prefixes)
    ]


def with_another_beginning(request: Request, seed: int = 1) -> Request:
    """The request with the first three quarters of its prompt replaced."""
    rng = random.Random(seed)
    replaced = len(request.prompt) * 3 // 4
    return Request(
        rng.choices(PROMPT_TOKENS, k=replaced) + request.prompt[replaced:], request.new_tokens, request.forced
    )


def parse_answer(choice: dict, request: Request) -> Answer:
    """The answer in one choice of /v1/completions. Raises CheckError unless it is complete, finite and as forced."""
    logprobs = choice["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    values = logprobs["token_logprobs"]
    if len(tokens) != request.new_tokens:
        raise CheckError(f"wanted {request.new_tokens} tokens, got {len(tokens)}")
    if request.forced is not None and set(tokens) != {request.forced}:
        raise CheckError(f"wanted token {request.forced} only, got {sorted(set(tokens))}")
    best = [sorted(step.values(), reverse=True)[:2] for step in logprobs["top_logprobs"]]
    for value in (*values, *(value for step in best for value in step)):
        if not IMPOSSIBLE < value < 1e-3:
            raise CheckError(f"wanted finite log-probabilities, got {value}")
    return Answer(tokens, values, [first - second for first, second in best])


def agreement(answers: Sequence[Answer], reference: Sequence[Answer]) -> Agreement:
    """Compare the steps before which both answers are the same."""
    result = Agreement([])
    for ours, theirs in zip(answers, reference, strict=True):
        pairs = zip(ours.tokens, theirs.tokens, strict=True)
        same = next((step for step, (a, b) in enumerate(pairs) if a != b), len(theirs.tokens))
        logprobs = zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True)
        result.differences.append([abs(a - b) for a, b in logprobs])
        if same < len(theirs.tokens):
            result.parted.append(theirs.gaps[same])
    return result


def objections(ours: Agreement, noise: Agreement, control: Agreement, *, eager: bool = False) -> list[str]:
    """What speaks against our answers. Eager mode rounds elsewhere than compiled code, so noise is no bound to it.

    Nothing is held against a request that the reference does with itself: another token where its best two are as
    close; a median up to NOISE_FACTOR times as large, unless that is half of what another context does.
    """
    scale = control.median()
    allowed_median = scale * CONTROL_REQUEST if eager else max(NOISE_FACTOR * noise.median(), CONTROL_MEDIAN * scale)
    # A model that hardly needs its context has a small control, and an eighth of it may lie within the scatter of
    # single requests: 0.0091 and 0.0079 where the reference's noisiest, short ones counted, were at 0.0085 and 0.0080.
    noisiest = max(noise.request_medians().values(), default=0.0)
    allowed_request = max(CONTROL_REQUEST * scale, min(NOISE_FACTOR * noisiest, MOST_REQUEST * scale))
    allowed_gap = max(TIE_NOISE * noise.median(), TIE_CONTROL * scale, *noise.parted)
    found = []
    if not noise.median() < scale * CONTROL_REQUEST:
        found.append(f"the check is blind: noise has median {noise.median():.4f}, another context only {scale:.4f}")
    if not ours.median() <= allowed_median:
        found.append(f"median difference {ours.median():.4f}, allowed {allowed_median:.4f}")
    medians = ours.request_medians().items()
    if wrong := [f"{index}: {median:.4f}" for index, median in medians if not median <= allowed_request]:
        found.append(f"{len(wrong)} requests with a median over {allowed_request:.4f}: {', '.join(wrong[:8])}")
    if wrong := [f"{gap:.4f}" for gap in ours.parted if not gap <= allowed_gap]:
        found.append(
            f"{len(wrong)} requests with another token, the reference's best two over {allowed_gap:.4f} apart: "
            f"{', '.join(wrong[:8])}"
        )
    return found


@dataclass
class Deadline:
    """The end of all waiting."""

    at: float

    def left(self, most: float, what: str) -> float:
        """Seconds that `what` may take, at most `most`. Raises CheckError when there are none."""
        seconds = min(most, self.at - time.monotonic())
        if seconds <= 0:
            raise CheckError(f"no time left for {what}")
        return seconds


@dataclass(frozen=True)
class Server:
    """A running `vllm serve`."""

    url: str
    log: Path

    def wait(self, process: subprocess.Popen, deadline: Deadline, most: float) -> None:
        """Until /health answers. Raises CheckError with the end of the log when the server ends or takes too long."""
        seconds = deadline.left(most, "the start of a server")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if process.poll() is not None:
                raise CheckError(f"server ended with {process.returncode}:\n{self.tail()}")
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{self.url}/health", None, 5),
            ):
                return
            time.sleep(0.5)
        raise CheckError(f"server not ready after {seconds:.0f} s:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def check_log(self, backend: str, eager: bool) -> None:
        """Raise CheckError unless the log says that this backend runs, with the CUDA graphs wanted."""
        text = self.log.read_text(errors="replace")
        if f"Using AttentionBackendEnum.{backend} backend." not in text:
            raise CheckError(f"the log does not say that {backend} is in use:\n{self.tail()}")
        full_graphs = re.search(r"Capturing CUDA graphs \((decode, )?FULL\)", text) is not None
        if full_graphs == eager:
            raise CheckError(f"full CUDA graphs: wanted {not eager}, the log says {full_graphs}")


@contextlib.contextmanager
def serving(command: list[str], log: Path, environment: dict[str, str], ready: float, deadline: Deadline):
    """A server that is ready. When the block ends, for whatever reason, its whole process group does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = used_memory()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        server.wait(process, deadline, ready)
        yield server
    finally:
        end_group(process)
        wait_for_memory(before)


def end_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def nvidia_smi(query: str) -> str | None:
    """What nvidia-smi says of the first visible GPU; None where it cannot be asked."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None


def used_memory() -> int | None:
    used = nvidia_smi("memory.used")
    return int(used) if used and used.isdigit() else None


def wait_for_memory(before: int | None) -> None:
    """Until the GPU has the memory back that the server had; the driver takes a moment after the process."""
    end = time.monotonic() + 20
    while before is not None and (used_memory() or 0) > before + 2048 and time.monotonic() < end:
        time.sleep(0.5)


def cache_lines(log: str) -> list[str]:
    """What a server's log, vLLM's or SGLang's, says of the KV cache: its type, the math on it, how many tokens fit."""
    said = r"GPU KV cache size: [\d,]+ tokens|KV Cache (?:is allocated|VA upper bound).*"
    ours = r"(?:ETAP decodes|Attention backend etap): KV cache .*"
    return list(dict.fromkeys(re.findall(f"{said}|{ours}", log)))


def rounds_queries(cache: str, reference: str) -> bool:
    """Whether ETAP or its reference rounds queries and probabilities to e4m3, which differs more than noise."""
    fp8_math = os.environ.get("ETAP_FP8_MATH") == "1"
    return cache.startswith("fp8") and (fp8_math or reference != KEEPS_QUERIES)


def requests_running(metrics: str) -> int:
    """Requests in the running batch, from the text of /metrics; 0 where it does not say."""
    found = re.search(r"^vllm:num_requests_running(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


class Client:
    """Completions from one server."""

    def __init__(self, server: Server, deadline: Deadline):
        self.url = server.url
        self.deadline = deadline
        self.most_running = 0

    def _run(self, bodies: list[dict], concurrency: int, *, watch: bool = False) -> list[dict]:
        return asyncio.run(self._post_all(bodies, concurrency, watch))

    async def _watch(self, session) -> None:
        """Keep the most requests that the server says it has in one batch."""
        while True:
            async with session.get(f"{self.url}/metrics") as response:
                self.most_running = max(self.most_running, requests_running(await response.text()))
            await asyncio.sleep(0.1)

    async def _post_all(self, bodies: list[dict], concurrency: int, watch: bool) -> list[dict]:
        # Imported here: it comes with vLLM, and what needs no server is tested without.
        import aiohttp

        gate = asyncio.Semaphore(concurrency)
        timeout = aiohttp.ClientTimeout(total=self.deadline.left(150, "requests"))

        async def post(session, body: dict) -> dict:
            async with gate, session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise CheckError(f"wanted status 200, got {response.status}: {(await response.text())[:500]}")
                return (await response.json())["choices"][0]

        # One connection for each request: they must be in flight at the same time.
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                watcher = asyncio.create_task(self._watch(session)) if watch else None
                answers = await asyncio.gather(*(post(session, body) for body in bodies))
                if watcher and not watcher.cancel():
                    watcher.result()
                return answers
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise CheckError(f"wanted {len(bodies)} answers within {timeout.total:.0f} s, got {error!r}") from error

    def answers(self, requests: Sequence[Request], concurrency: int, salt: str) -> list[Answer]:
        """Answers to all requests, `concurrency` at a time. Another salt finds nothing in the prefix cache."""
        bodies = [
            {
                "model": "check",
                "prompt": request.prompt,
                "max_tokens": request.new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 5,
                "return_tokens_as_token_ids": True,
                "cache_salt": salt,
            }
            # No allowed_token_ids: vLLM 0.26 gives one request the other's when it swaps two in its batch.
            | ({} if request.forced is None else {"logit_bias": {str(request.forced): MOST_BIAS}})
            for request in requests
        ]
        choices = self._run(bodies, concurrency, watch=True)
        return [parse_answer(choice, request) for choice, request in zip(choices, requests, strict=True)]

    def decode_seconds(self, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """Wall time until every prompt, all in flight at once, has its new tokens."""
        common = {"model": "check", "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        bodies = [{"prompt": prompt} | common for prompt in prompts]
        start = time.monotonic()
        self._run(bodies, len(bodies))
        return time.monotonic() - start


@dataclass(frozen=True)
class Shape:
    """A decode batch."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


def parse_shape(text: str) -> Shape:
    matched = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not matched:
        raise typer.BadParameter(f"wanted BATCHxCONTEXT such as 16x16384, got {text!r}")
    return Shape(int(matched[1]), int(matched[2]))


def spread(readings: list[float]) -> dict:
    return {
        "median": statistics.median(readings),
        "min": min(readings),
        "max": max(readings),
        "readings": readings,
    }


def time_per_token(client: Client, shape: Shape, repeats: int) -> dict:
    """Milliseconds for one decode step of the whole batch, repeated."""
    # By context alone, so that a smaller batch of the same context finds its prompts in the prefix cache.
    rng = random.Random(shape.context)
    prompts = [rng.choices(PROMPT_TOKENS, k=shape.context) for _ in range(shape.batch)]
    client.decode_seconds(prompts, SHORT)
    seconds = [(client.decode_seconds(prompts, LONG), client.decode_seconds(prompts, SHORT)) for _ in range(repeats)]
    readings = [(long - short) / (LONG - SHORT) * 1000 for long, short in seconds]
    return {
        "shape": str(shape),
        "tpot_ms": spread(readings),
        "tokens_per_second": shape.batch / statistics.median(readings) * 1000,
    }


@dataclass(frozen=True)
class Turns(Shape):
    """Prompts that come at once, each with new tokens after a cached context of its own."""

    tokens: int

    def __str__(self) -> str:
        return f"{super().__str__()}+{self.tokens}"


def parse_turns(text: str) -> Turns:
    matched = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if not matched:
        raise typer.BadParameter(f"wanted BATCHxCONTEXT+TOKENS such as 1x16384+64, got {text!r}")
    return Turns(*map(int, matched.groups()))


def time_to_first_token(client: Client, turns: Turns, repeats: int) -> dict:
    """Milliseconds until all have their first token, with other new tokens each time; the client's are in it."""
    rng = random.Random(turns.context)
    prefixes = [rng.choices(PROMPT_TOKENS, k=turns.context) for _ in range(turns.batch)]
    client.decode_seconds(prefixes, 1)

    def reading() -> float:
        prompts = [prefix + rng.choices(PROMPT_TOKENS, k=turns.tokens) for prefix in prefixes]
        return client.decode_seconds(prompts, 1) * 1000

    reading()
    readings = [reading() for _ in range(repeats)]
    return {"turns": str(turns), "ttft_ms": spread(readings)}


def make_command(
    model: str, backend: str, cache: str, max_model_len: int, max_num_seqs: int, flags: list[str]
) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "check"),
        *("--attention-backend", backend, "--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)),
        *("--seed", "0", "--disable-uvicorn-access-log", "--kv-cache-dtype", cache),
        *flags,
    ]


@contextlib.contextmanager
def loader_plugin() -> Iterator[dict[str, str]]:
    """Environment in which vLLM also finds the load format `seeded`, as a plugin that exists while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        distribution = Path(folder) / "etap_serve_check-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: etap-serve-check\nVersion: 0\n")
        entry_points = f"[{PLUGIN_GROUP}]\netap_serve_check = seeded_weights:register\n"
        (distribution / "entry_points.txt").write_text(entry_points)
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join([folder, str(Path(__file__).resolve().parent), *filter(None, inherited)])
        yield os.environ | {"PYTHONPATH": path}


def provenance(note: str) -> dict:
    """What a figure is worth nothing without."""
    name, driver, memory = (nvidia_smi("name,driver_version,memory.total") or "unknown, unknown, unknown").split(", ")
    commit = os.environ.get("ETAP_COMMIT")
    if not commit:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    library = os.environ.get("ETAP_LIBRARY")
    packages = ("etap-backend", "vllm", "torch", "apache-tvm-ffi", "triton")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": name,
        "gpu_memory_mib": memory,
        "driver": driver,
        "python": sys.version.split()[0],
        "versions": {package: version_of(package) for package in packages},
        "commit": commit or "unknown",
        "library_sha256": hashlib.sha256(Path(library).read_bytes()).hexdigest() if library else None,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "note": note,
    }


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@dataclass
class Check:
    """One run of the whole check; `document` is what is written, also when it ends half way."""

    model: str
    reference: str
    shapes: list[Shape]
    turns: list[Turns]
    repeats: int
    requests: list[Request]
    cache: str
    flags: list[str]
    folder: Path
    output: Path
    ready: float
    deadline: Deadline
    environment: dict[str, str]
    document: dict
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    yardsticks: tuple[Agreement, Agreement] | None = None

    @contextlib.contextmanager
    def server(self, name: str, backend: str, *, eager: bool = False) -> Iterator[Client]:
        contexts = [shape.context for shape in self.shapes] + [turns.context + turns.tokens for turns in self.turns]
        longest = max([4096, *contexts]) + 1024
        flags = [*self.flags, *(["--enforce-eager"] if eager else [])]
        command = make_command(self.model, backend, self.cache, longest, len(self.requests), flags)
        record = self.document["servers"].setdefault(name, {"command": shlex.join(["python", *command[1:]])})
        console.print(f"[bold]{name}[/]: {record['command']}")
        start = time.monotonic()
        with serving(command, self.folder / f"{name}.log", self.environment, self.ready, self.deadline) as server:
            record["seconds_to_ready"] = time.monotonic() - start
            console.print(f"{name}: ready after {record['seconds_to_ready']:.0f} s")
            server.check_log(backend, eager)
            record["cache"] = cache_lines(server.log.read_text(errors="replace"))
            console.print(f"{name}: {'; '.join(record['cache'])}", highlight=False)
            yield Client(server, self.deadline)
        record["seconds"] = time.monotonic() - start
        self.write()

    def write(self) -> None:
        self.output.write_text(json.dumps(self.document, indent=1) + "\n")

    def graphs(self, backend: str) -> None:
        """Answers, the same few at a time, another context, and speed, with full CUDA graphs."""
        forced = [i for i, r in enumerate(self.requests) if r.forced is not None and len(r.prompt) >= 128]
        name = backend.lower()
        with self.server(name, backend) as client:
            together = client.answers(self.requests, len(self.requests), "together")
            few = client.answers(self.requests, FEW, "few")
            changed = [with_another_beginning(self.requests[index]) for index in forced]
            other = client.answers(changed, len(changed), "control")
            turns = client.answers(make_turns(), 1, "turns")
            self.answers |= {backend: together, f"{backend} few": few, f"{backend} turns": turns}
            noise, control = agreement(few, together), agreement(other, [together[index] for index in forced])
            self.document["servers"][name] |= {
                "requests": len(self.requests),
                "most_running_at_once": client.most_running,
                "noise": noise.summary(),
                "control": control.summary(),
            }
            if backend == self.reference:
                self.yardsticks = noise, control
            self.write()
            for shape in self.shapes:
                speed = self.document["servers"][name].setdefault("decode", [])
                speed.append(time_per_token(client, shape, self.repeats))
                self.write()
            for turns in self.turns:
                speed = self.document["servers"][name].setdefault("turns", [])
                speed.append(time_to_first_token(client, turns, self.repeats))
                self.write()

    def eager(self) -> None:
        """A few of the same requests without CUDA graphs and compilation."""
        few = self.requests[:24]
        with self.server("etap-eager", ETAP, eager=True) as client:
            self.answers["eager"] = client.answers(few, len(few), "together")
            self.answers["eager turns"] = client.answers(make_turns(), 1, "turns")

    def judge(self) -> list[str]:
        """Compare what has been answered; the reasons to fail."""
        cases = {
            "graphs": (ETAP, False, self.reference, self.requests),
            "graphs, few at a time": (f"{ETAP} few", False, self.reference, self.requests),
            "graphs, next turns": (f"{ETAP} turns", False, f"{self.reference} turns", make_turns()),
            "eager": ("eager", True, self.reference, self.requests),
            "eager, next turns": ("eager turns", True, f"{self.reference} turns", make_turns()),
        }
        found = []
        for case, (key, eager, reference, requests) in cases.items():
            if key not in self.answers:
                found.append(f"{case}: no answers")
                continue
            result = agreement(self.answers[key], self.answers[reference][: len(self.answers[key])])
            loose = eager or rounds_queries(self.cache, self.reference)
            against = objections(result, *self.yardsticks, eager=loose)
            found += [f"{case}: {objection}" for objection in against]
            self.document["agreement"][case] = result.summary() | {
                "objections": against,
                "requests": [
                    {"prompt": len(request.prompt), "forced": request.forced is not None, "steps": len(values)}
                    | ({"median": statistics.median(values), "max": max(values)} if values else {})
                    for request, values in zip(requests, result.differences, strict=False)
                ],
            }
        return found

    def run(self) -> list[str]:
        """All stages; the reasons to fail, none when all is well."""
        failures = []
        stages = {
            ETAP: lambda: self.graphs(ETAP),
            self.reference: lambda: self.graphs(self.reference),
            "eager": self.eager,
        }
        for name, stage in stages.items():
            try:
                stage()
            except CheckError as error:
                failures.append(f"{name}: {error}")
                console.print(failures[-1], style="red", markup=False)
        if self.yardsticks:
            failures += self.judge()
        return failures


def speed_table(document: dict) -> Table:
    table = Table("decode", "backend", "median ms a token", "min", "max", "tokens/s")
    for name, values in document["servers"].items():
        for row in values.get("decode", []):
            milliseconds = (f"{row['tpot_ms'][key]:.3f}" for key in ("median", "min", "max"))
            table.add_row(row["shape"], name, *milliseconds, f"{row['tokens_per_second']:.0f}")
    return table


def turns_table(document: dict) -> Table:
    table = Table("next turns", "backend", "median ms to the first token", "min", "max")
    for name, values in document["servers"].items():
        for row in values.get("turns", []):
            milliseconds = (f"{row['ttft_ms'][key]:.2f}" for key in ("median", "min", "max"))
            table.add_row(row["turns"], name, *milliseconds)
    return table


def print_tables(document: dict) -> None:
    answers = Table("answers", "steps", "median", "p99", "max", "worst request", "parted", "at a gap of at most")
    readings = {
        f"{name}: {kind}": values[kind]
        for name, values in document["servers"].items()
        for kind in ("noise", "control")
        if kind in values
    }
    for name, row in (readings | {f"ETAP, {case}": row for case, row in document["agreement"].items()}).items():
        gap = row["largest_gap_parted"]
        numbers = (row[key] for key in ("median", "p99", "max", "largest_median_of_a_request"))
        answers.add_row(
            name,
            str(row["steps"]),
            *(f"{number:.4f}" for number in numbers),
            str(row["parted"]),
            "" if gap is None else f"{gap:.3f}",
        )
    console.print("Absolute differences of the chosen tokens' log-probabilities (nats)", answers)
    console.print(speed_table(document))
    console.print(turns_table(document))


def main(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for vllm serve, after --.")] = None,
    output: Annotated[Path, typer.Option(help="JSON file to write; the servers' logs go beside it.")] = Path(
        "serve.json"
    ),
    reference: Annotated[str, typer.Option(help="Attention backend to compare with.")] = "FLASHMLA",
    decode: Annotated[str, typer.Option(help="Batches to time, BATCHxCONTEXT.")] = "16x16384,1x16384,64x4096",
    turns: Annotated[str, typer.Option(help="Next turns to time, BATCHxCONTEXT+TOKENS.")] = (
        "1x4096+64,1x16384+16,1x16384+128,8x16384+64"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each batch.")] = 7,
    kv_cache_dtype: Annotated[str, typer.Option(help="Type of every server's KV cache, such as fp8.")] = "auto",
    requests: Annotated[int, typer.Option(min=32, help="Concurrent requests.")] = 96,
    ready: Annotated[float, typer.Option(help="Seconds until a server must be ready.")] = 300,
    limit: Annotated[float, typer.Option(help="Seconds for everything.")] = 1800,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
) -> None:
    """Compare ETAP with another attention backend of vLLM on this GPU; exit with 1 when the answers disagree."""
    shapes = [parse_shape(text) for text in decode.split(",")]
    next_turns = [parse_turns(text) for text in turns.split(",")]
    if "etap" not in importlib.metadata.entry_points(group=PLUGIN_GROUP).names:
        raise typer.BadParameter("etap-backend is not installed beside vLLM: no plugin named etap")
    output.parent.mkdir(parents=True, exist_ok=True)
    # A terminated check must still end its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    document = {"what": "vLLM serve check"} | provenance(note) | {"servers": {}, "agreement": {}, "failures": []}
    with loader_plugin() as environment:
        check = Check(
            model,
            reference.upper(),
            shapes,
            next_turns,
            repeats,
            make_requests(requests),
            kv_cache_dtype,
            serve_flags or [],
            output.parent,
            output,
            ready,
            Deadline(time.monotonic() + limit),
            environment,
            document,
        )
        try:
            document["failures"] = check.run()
        except BaseException as error:
            document["failures"].append(f"{type(error).__name__}: {error}")
            raise
        finally:
            check.write()
    print_tables(document)
    for failure in document["failures"]:
        console.print(f"FAILED {failure}", style="red", markup=False)
    console.print("failed" if document["failures"] else "all answers agree")
    raise typer.Exit(bool(document["failures"]))


if __name__ == "__main__":
    typer.run(main)

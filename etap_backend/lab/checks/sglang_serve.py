"""Serves one model with ETAP and with other attention backends of SGLang, and compares answers and decode speed.

    python tests/sglang/serve_check.py MODEL --output serve-sglang.json [--speculative] [--kv-cache-dtype fp8_e4m3]
        [-- flags for launch_server]

Needs a Hopper GPU, SGLang and etap-backend installed beside it; no network. MODEL is a folder with a checkpoint of an
MLA model, such as tests/answers/train_model.py makes. Of a folder without weights only the speed means anything
(`--speed-only -- --load-format dummy`).

One server runs for each backend, then ETAP without CUDA graphs. Each answers the same concurrent greedy requests of 10
to 4000 prompt tokens; prompts longer than a chunk are prefilled in several. They compare up to the first step at which
two backends choose differently. Two yardsticks come from the first other backend's server:

- noise: the same requests again, few at a time, which takes other kernels and so rounds elsewhere;
- control: the first token's log-probability after the first three quarters of the prompt were replaced. If that moved
  nothing, attention would not matter here and agreement would prove nothing.

Every server then answers all requests once more from its radix cache: the answers are compared too, and the prompts
must have been found there. With --speculative the model's own MTP layer drafts three tokens and the target verifies
them; then some must have been accepted.

With --kv-cache-dtype fp8_e4m3 every server has an FP8 cache. The others then round queries and probabilities to e4m3
too, and ETAP does not unless ETAP_FP8_MATH is 1, so noise is no bound to their difference. What each log says of the
cache's type and of the tokens that fit is kept.

Speed: the time of a step is the difference between a long and a short batch of the same prompts, whose prefill is
cached, divided by the tokens between them. With --speculative a step makes several tokens.
"""

import asyncio
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# What these two checks share: requests, agreement and its limits, processes. The engine's name is in none of it.
from etap_backend.lab.checks.vllm_serve import (  # noqa: E402
    FEW,
    Agreement,
    Answer,
    CheckError,
    Deadline,
    Request,
    Server,
    Shape,
    agreement,
    cache_lines,
    make_requests,
    objections,
    parse_shape,
    provenance,
    serving,
    speed_table,
    time_per_token,
    version_of,
    with_another_beginning,
)

ETAP = "etap"
EAGER = "etap-eager"
PAGE_TOKENS = 64
CHUNK_TOKENS = 2048
PACKAGES = ("sglang", "sglang-kernel", "flashinfer-python")
SPECULATIVE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)

console = Console(width=120)


def parse_answer(result: dict, request: Request) -> Answer:
    """The answer in one result of /generate. Raises CheckError unless it is complete and finite."""
    meta = result["meta_info"]
    logprobs = [float(logprob) for logprob, *_ in meta["output_token_logprobs"]]
    tokens = [int(token) for _, token, *_ in meta["output_token_logprobs"]]
    if len(tokens) != request.new_tokens:
        raise CheckError(f"wanted {request.new_tokens} tokens, got {len(tokens)}")
    best = [sorted((float(logprob) for logprob, *_ in step), reverse=True)[:2] for step in meta["output_top_logprobs"]]
    for value in (*logprobs, *(value for step in best for value in step)):
        if not -math.inf < value < 1e-3:
            raise CheckError(f"wanted finite log-probabilities, got {value}")
    return Answer(tokens, logprobs, [first - second for first, second in best])


def first_token_moved(result: dict, answer: Answer) -> float:
    """How far the log-probability of an answer's first token is from what another context gives it."""
    ((logprob, token, *_),) = result["meta_info"]["output_token_ids_logprobs"][0]
    if token != answer.tokens[0]:
        raise CheckError(f"wanted the log-probability of token {answer.tokens[0]}, got that of {token}")
    return abs(float(logprob) - answer.logprobs[0])


def check_log(text: str, backend: str, eager: bool) -> None:
    """Raise CheckError unless the log says that this backend decodes, with CUDA graphs as wanted."""
    if not re.search(rf"\battention_backend'?[=:] ?'{backend}'", text):
        raise CheckError(f"the log does not say that {backend} was asked for")
    graphs = re.findall(r"Decode batch.*cuda graph: (True|False)", text)
    if not graphs or (("True" in graphs) == eager):
        raise CheckError(f"CUDA graphs: wanted {not eager}, the log says {sorted(set(graphs))}")


def most_running(text: str) -> int:
    """The most requests that the server had in one decode batch, from its log."""
    return max(map(int, re.findall(r"Decode batch.*#running-req: (\d+)", text)), default=0)


@dataclass
class Client:
    """Requests to one server."""

    server: Server
    deadline: Deadline

    def generate(self, bodies: list[dict], concurrency: int) -> list[dict]:
        return asyncio.run(self._post_all(bodies, concurrency))

    async def _post_all(self, bodies: list[dict], concurrency: int) -> list[dict]:
        # Imported here: it comes with SGLang, and what needs no server is tested without.
        import aiohttp

        gate = asyncio.Semaphore(concurrency)
        timeout = aiohttp.ClientTimeout(total=self.deadline.left(300, "requests"))

        async def post(session, body: dict) -> dict:
            async with gate, session.post(f"{self.server.url}/generate", json=body) as response:
                if response.status != 200:
                    raise CheckError(f"wanted status 200, got {response.status}: {(await response.text())[:500]}")
                return await response.json()

        # One connection for each request: they must be in flight at the same time.
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                return await asyncio.gather(*(post(session, body) for body in bodies))
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise CheckError(f"wanted {len(bodies)} answers within {timeout.total:.0f} s, got {error!r}") from error

    def results(self, requests: Sequence[Request], concurrency: int, tokens: Sequence[int] = ()) -> list[dict]:
        """Results for all requests; `tokens` asks besides for the log-probability of one token for each."""
        bodies = [body(request.prompt, request.new_tokens) | _with_logprobs() for request in requests]
        for one, token in zip(bodies, tokens, strict=False):
            one["token_ids_logprob"] = [token]
        return self.generate(bodies, concurrency)

    def forget(self) -> None:
        """Empty the radix cache."""
        request = urllib.request.Request(f"{self.server.url}/flush_cache", method="POST")
        with urllib.request.urlopen(request, None, 60):
            pass

    def decode_seconds(self, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """Wall time until every prompt, all in flight at once, has its new tokens."""
        start = time.monotonic()
        self.generate([body(prompt, new_tokens) for prompt in prompts], len(prompts))
        return time.monotonic() - start


def body(prompt: list[int], new_tokens: int) -> dict:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }


def _with_logprobs() -> dict:
    return {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}


@dataclass
class Check:
    """One run of the whole check; `document` is what is written, also when it ends half way."""

    model: str
    backends: list[str]
    shapes: list[Shape]
    repeats: int
    requests: list[Request]
    cache: str
    flags: list[str]
    speculative: bool
    output: Path
    ready: float
    deadline: Deadline
    document: dict
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    yardsticks: tuple[Agreement, Agreement] | None = None

    @contextmanager
    def server(self, name: str, backend: str) -> Iterator[Client]:
        eager = name == EAGER
        longest = max([4096, *(shape.context for shape in self.shapes)]) + 1024
        running = max([len(self.requests), *(shape.batch for shape in self.shapes)])
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, "--attention-backend", backend),
            *("--page-size", str(PAGE_TOKENS), "--context-length", str(longest), "--skip-tokenizer-init"),
            *("--max-running-requests", str(running), "--chunked-prefill-size", str(CHUNK_TOKENS)),
            *("--random-seed", "0", "--skip-server-warmup", "--decode-log-interval", "1"),
            *("--kv-cache-dtype", self.cache),
            *(SPECULATIVE if self.speculative else ()),
            *(("--disable-cuda-graph",) if eager else ()),
            *self.flags,
        ]
        record = self.document["servers"].setdefault(name, {"command": shlex.join(["python", *command[1:]])})
        console.print(f"[bold]{name}[/]: {record['command']}", highlight=False)
        log = self.output.with_name(f"{self.output.stem}-{name}.log")
        start = time.monotonic()
        with serving(command, log, dict(os.environ), self.ready, self.deadline) as server:
            record["seconds_to_ready"] = time.monotonic() - start
            record["cache"] = cache_lines(log.read_text(errors="replace"))
            console.print(f"{name}: {'; '.join(record['cache'])}", highlight=False)
            yield Client(server, self.deadline)
            text = log.read_text(errors="replace")
            check_log(text, backend, eager)
            record["most_running_at_once"] = most_running(text)
        self.write()

    def write(self) -> None:
        self.output.write_text(json.dumps(self.document, indent=1) + "\n")

    def run(self) -> list[str]:
        """All servers; the reasons to fail, none when all is well."""
        failures = []
        for name in [*self.backends, *([EAGER] if ETAP in self.backends and self.requests else [])]:
            try:
                with self.server(name, ETAP if name == EAGER else name) as client:
                    if self.requests:
                        failures += [f"{name}: {reason}" for reason in self.ask(name, client)]
                    for shape in self.shapes if name != EAGER else ():
                        speed = self.document["servers"][name].setdefault("decode", [])
                        speed.append(time_per_token(client, shape, self.repeats))
                        self.write()
            except CheckError as error:
                failures.append(f"{name}: {error}")
                console.print(failures[-1], style="red", markup=False)
        return failures + self.judge()

    def ask(self, name: str, client: Client) -> list[str]:
        """Answers new and from the radix cache, the yardsticks where they are still missing; what speaks against it."""
        record = self.document["servers"][name]
        results = client.results(self.requests, len(self.requests))
        self.answers[name] = self.parse(results)
        again = client.results(self.requests, len(self.requests))
        self.answers[f"{name} from the radix cache"] = self.parse(again)
        # The last page of a prompt is computed again, and so is one that only just fills a page.
        wanted = sum(max(0, (len(request.prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS) for request in self.requests)
        record["tokens_cached"] = sum(result["meta_info"]["cached_tokens"] for result in again)
        record["tokens_cached_wanted"] = wanted
        found = []
        if record["tokens_cached"] < 0.9 * wanted:
            found.append(f"radix cache: wanted {wanted} tokens of the prompts, got {record['tokens_cached']}")
        if self.speculative:
            verified = sum(result["meta_info"].get("spec_verify_ct", 0) for result in results)
            made = sum(request.new_tokens for request in self.requests)
            record["tokens_a_verification"] = made / verified if verified else 0.0
            if record["tokens_a_verification"] <= 1.0:
                found.append(f"speculation: wanted more than 1 token a verification, got {made} in {verified}")
        if self.yardsticks is None and name not in (ETAP, EAGER):
            self.yardsticks = self.measure_yardsticks(name, client)
        return found

    def parse(self, results: list[dict]) -> list[Answer]:
        return [parse_answer(result, request) for result, request in zip(results, self.requests, strict=True)]

    def measure_yardsticks(self, name: str, client: Client) -> tuple[Agreement, Agreement]:
        """Noise and control of this backend's answers."""
        client.forget()
        noise = agreement(self.parse(client.results(self.requests, FEW)), self.answers[name])
        pairs = [pair for pair in zip(self.requests, self.answers[name], strict=True) if len(pair[0].prompt) >= 128]
        changed = [replace(with_another_beginning(request), new_tokens=1) for request, _ in pairs]
        results = client.results(changed, len(changed), [answer.tokens[0] for _, answer in pairs])
        moved = [first_token_moved(result, answer) for result, (_, answer) in zip(results, pairs, strict=True)]
        control = Agreement([[value] for value in moved])
        self.document["yardsticks"] = {"backend": name, "noise": noise.summary(), "control": control.summary()}
        return noise, control

    def judge(self) -> list[str]:
        """Compare all answers with those of the backend that the yardsticks come from; the reasons to fail."""
        if not self.requests:
            return []
        if self.yardsticks is None:
            return ["no other backend answered, so there is nothing to compare with"]
        reference = self.document["yardsticks"]["backend"]
        found = []
        for name, answers in self.answers.items():
            if name != reference:
                result = agreement(answers, self.answers[reference])
                loose = name.startswith(EAGER) or self.cache.startswith("fp8")
                against = objections(result, *self.yardsticks, eager=loose)
                pairs = zip(answers, self.answers[reference], strict=True)
                equal = sum(ours.tokens == theirs.tokens for ours, theirs in pairs)
                summary = {"equal_answers": equal, "requests": len(answers)} | result.summary()
                self.document["agreement"][name] = summary | {"objections": against}
                found += [f"{name}: {reason}" for reason in against if name.startswith(ETAP)]
        return found


def print_tables(document: dict) -> None:
    answers = Table("answers", "equal", "steps", "median", "p99", "max")
    for name, row in document["agreement"].items():
        numbers = (f"{row[key]:.4f}" for key in ("median", "p99", "max"))
        answers.add_row(name, f"{row['equal_answers']} of {row['requests']}", str(row["steps"]), *numbers)
    console.print("Absolute differences of the chosen tokens' log-probabilities (nats)", answers)
    console.print(speed_table(document))


def main(
    model: Annotated[str, typer.Argument(help="Model folder.")],
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for launch_server, after --.")] = None,
    output: Annotated[Path, typer.Option(help="JSON file to write; the servers' logs go beside it.")] = Path(
        "serve-sglang.json"
    ),
    backends: Annotated[str, typer.Option(help="Attention backends, in turn.")] = "etap,flashmla,fa3",
    decode: Annotated[str, typer.Option(help="Batches to time, BATCHxCONTEXT; empty: none.")] = (
        "16x16384,1x16384,64x4096"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each batch.")] = 5,
    requests: Annotated[int, typer.Option(min=32, help="Concurrent requests.")] = 96,
    kv_cache_dtype: Annotated[str, typer.Option(help="Type of every server's KV cache, such as fp8_e4m3.")] = "auto",
    speculative: Annotated[bool, typer.Option(help="The model's own MTP layer drafts three tokens.")] = False,
    speed_only: Annotated[bool, typer.Option(help="No answers: for made-up weights.")] = False,
    ready: Annotated[float, typer.Option(help="Seconds until a server must be ready.")] = 300,
    limit: Annotated[float, typer.Option(help="Seconds for everything.")] = 1800,
    note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
) -> None:
    """Compare ETAP with other attention backends of SGLang on this GPU; exit with 1 when the answers disagree."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # A terminated check must still end its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    document = {"what": "SGLang serve check"} | provenance(note)
    document["versions"] |= {package: version_of(package) for package in PACKAGES}
    document |= {"speculative": speculative, "servers": {}, "yardsticks": None, "agreement": {}, "failures": []}
    check = Check(
        model,
        backends.split(","),
        [parse_shape(text) for text in decode.split(",") if text],
        repeats,
        [] if speed_only else [replace(request, forced=None) for request in make_requests(requests)],
        kv_cache_dtype,
        serve_flags or [],
        speculative,
        output,
        ready,
        Deadline(time.monotonic() + limit),
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
    console.print("failed" if document["failures"] else "all answers agree" if check.requests else "timed")
    raise typer.Exit(bool(document["failures"]))


if __name__ == "__main__":
    typer.run(main)

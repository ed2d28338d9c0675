"""Serves one model with ETAP and with other attention backends of SGLang, and compares answers and decode speed.

    python -m etap_backend.lab.checks.sglang_serve MODEL --output serve-sglang.json [--speculative]
        [--kv-cache-dtype fp8_e4m3] [-- flags for launch_server]

Needs a Hopper GPU, SGLang and etap-backend installed beside it; no network. MODEL is a folder with a checkpoint of an
MLA model, such as train_model.py makes. Of a folder without weights only the speed means anything (`--speed-only --
--load-format dummy`).

One server runs for each backend, then ETAP without CUDA graphs. Each answers the same concurrent greedy requests of 10
to 4000 prompt tokens; prompts longer than a chunk are prefilled in several. How answers are judged, and by which
yardsticks: agreement.py. Both come from the first other backend's server; the control is the first token's
log-probability behind another beginning.

Every server then answers all requests once more from its radix cache: the answers are compared too, and the prompts
must have been found there. With --speculative the model's own MTP layer drafts three tokens and the target verifies
them; then some must have been accepted.

With --kv-cache-dtype fp8_e4m3 every server has an FP8 cache. The others then round queries and probabilities to e4m3
too, ETAP only as etap_fp8_math, so noise is no bound to their difference. What each log says of the cache's type and of
the tokens that fit is kept.

Speed: speed.py. With --speculative a step makes several tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend import _library
from etap_backend.lab.checks.agreement import (
    Agreement,
    Request,
    agreement,
    answer_in,
    make_requests,
    objections,
    with_another_beginning,
)
from etap_backend.lab.checks.speed import Shape, Timer, parse_shape, speed_table
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, write
from etap_backend.lab.serving import client
from etap_backend.lab.serving.client import Deadline, Failed
from etap_backend.lab.serving.engines import ENGINES, PAGE_TOKENS, Answer, Serving
from etap_backend.lab.serving.servers import Served, served
from etap_backend.lab.stopping import stopping

SGLANG = ENGINES["sglang"]
ETAP = SGLANG.ours
EAGER = "etap-eager"
FEW = 8  # concurrency of the second reading
CHUNK_TOKENS = 2048
DRAFT_TOKENS = 3
PROGRAM = "python -m etap_backend.lab.checks.sglang_serve"
PACKAGES = ("etap-backend", "sglang", "sglang-kernel", "flashinfer-python", "torch", "apache-tvm-ffi", "triton")

console = Console(width=120)


def first_token_moved(result: dict, answer: Answer) -> float:
    """How far the log-probability of an answer's first token is from what another context gives it."""
    ((logprob, token, *_),) = result["meta_info"]["output_token_ids_logprobs"][0]
    if token != answer.tokens[0]:
        raise Failed(f"wanted the log-probability of token {answer.tokens[0]}, got that of {token}")
    return abs(float(logprob) - answer.logprobs[0])


def must_have_graphs(log: str, eager: bool) -> None:
    """Raise Failed unless the log says that decode ran with CUDA graphs as wanted."""
    graphs = re.findall(r"Decode batch.*cuda graph: (True|False)", log)
    if not graphs or (("True" in graphs) == eager):
        raise Failed(f"CUDA graphs: wanted {not eager}, the log says {sorted(set(graphs))}")


def most_running(text: str) -> int:
    """The most requests that the server had in one decode batch, from its log."""
    return max(map(int, re.findall(r"Decode batch.*#running-req: (\d+)", text)), default=0)


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
    def server(self, name: str, backend: str) -> Iterator[Served]:
        eager = name == EAGER
        serving = Serving(
            self.model,
            max_context=max([4096, *(shape.context for shape in self.shapes)]) + 1024,
            max_requests=max([len(self.requests), *(shape.batch for shape in self.shapes)]),
            draft_tokens=DRAFT_TOKENS if self.speculative else 0,
        )
        flags = [
            *("--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK_TOKENS), "--decode-log-interval", "1"),
            *("--kv-cache-dtype", self.cache, *((SGLANG.eager,) if eager else ()), *self.flags),
        ]
        record = self.document["servers"].setdefault(name, {})
        log = self.output.with_name(f"{self.output.stem}-{name}.log")
        seconds = self.deadline.left(self.ready, "the start of a server")
        console.print(f"[bold]{name}[/]: starting, log in {log}")
        with served(SGLANG, serving, backend, flags, log=log, seconds=seconds, about=record) as server:
            console.print(f"{name}: ready after {record['seconds_to_ready']} s, {'; '.join(record['cache'])}")
            yield server
            must_have_graphs(server.text(), eager)
            record["most_running_at_once"] = most_running(server.text())
        self.write()

    def write(self) -> None:
        write(self.document, self.output)

    def run(self) -> list[str]:
        """All servers; the reasons to fail, none when all is well."""
        failures = []
        for name in [*self.backends, *([EAGER] if ETAP in self.backends and self.requests else [])]:
            try:
                with self.server(name, ETAP if name == EAGER else name) as server:
                    if self.requests:
                        failures += [f"{name}: {reason}" for reason in self.ask(name, server)]
                    for shape in self.shapes if name != EAGER else ():
                        timed = Timer(server, self.deadline).time_per_token(shape, self.repeats)
                        server.about.setdefault("decode", []).append(timed)
                        self.write()
            except Failed as error:
                failures.append(f"{name}: {error}")
                console.print(failures[-1], style="red", markup=False)
        return failures + self.judge()

    def replies(
        self, server: Served, requests: Sequence[Request], concurrency: int, tokens: Sequence[int] = ()
    ) -> list[dict]:
        """Replies to all requests; `tokens` asks besides for the log-probability of one token for each."""
        bodies = [SGLANG.body(request.prompt, request.new_tokens, logprobs=2) for request in requests]
        for body, token in zip(bodies, tokens, strict=False):
            body["token_ids_logprob"] = [token]
        return server.ask(bodies, concurrency, self.deadline.left(300, "requests"))

    def ask(self, name: str, server: Served) -> list[str]:
        """Answers new and from the radix cache, the yardsticks where they are still missing; what speaks against it."""
        record = server.about
        results = self.replies(server, self.requests, len(self.requests))
        self.answers[name] = self.parse(results)
        again = self.replies(server, self.requests, len(self.requests))
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
        if self.yardsticks is None and not name.startswith(ETAP):
            self.yardsticks = self.measure_yardsticks(name, server)
        return found

    def parse(self, replies: list[dict]) -> list[Answer]:
        pairs = zip(replies, self.requests, strict=True)
        return [answer_in(SGLANG, reply, request.new_tokens) for reply, request in pairs]

    def measure_yardsticks(self, name: str, server: Served) -> tuple[Agreement, Agreement]:
        """Noise and control of this backend's answers."""
        client.post(f"{server.url}/flush_cache")
        noise = agreement(self.parse(self.replies(server, self.requests, FEW)), self.answers[name])
        pairs = [pair for pair in zip(self.requests, self.answers[name], strict=True) if len(pair[0].prompt) >= 128]
        changed = [replace(with_another_beginning(request), new_tokens=1) for request, _ in pairs]
        results = self.replies(server, changed, len(changed), [answer.tokens[0] for _, answer in pairs])
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
    try:
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    about = provenance(PROGRAM, packages=PACKAGES, library=_library.library_path(), note=note)
    document = {"what": "SGLang serve check"} | about.model_dump() | {"speculative": speculative, "servers": {}}
    document |= {"yardsticks": None, "agreement": {}, "failures": []}
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
    with stopping(None):
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

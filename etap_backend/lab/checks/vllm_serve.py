"""Serves one model with ETAP and with another attention backend of vLLM, and compares answers and decode speed.

    python -m etap_backend.lab.checks.vllm_serve MODEL --output serve.json [-- flags for vllm serve]

Needs a Hopper GPU, vLLM and etap-backend installed beside it. MODEL is any MLA model that vLLM serves. Where there are
no weights, a folder with config and tokenizer is enough with `-- --load-format seeded` (see seeded_weights.py).

Three servers run one after another: ETAP and the reference with full CUDA graphs, then ETAP with --enforce-eager.

Answers. Concurrent requests of mixed length go to both servers. Every second one is forced along a given path (a
bias lifts one token above all, the log-probabilities are those without the bias), so that all its steps compare;
the others decode greedily. How they are judged, and by which yardsticks: agreement.py; the control is the forced
requests behind another beginning.

With --kv-cache-dtype fp8 all three have an FP8 cache. FLASHMLA then rounds queries and probabilities to e4m3, as ETAP
does with --fp8-math, so noise is no bound to differences from it; it is one to those between ETAP and TRITON_MLA,
which do not. What each log says of the cache's type and of the tokens that fit is kept.

Next turns. Prompts of 2 to 300 tokens over a cached prefix, one at a time, so that each is a step of its own: up to 128
tokens go through the backends' decode kernels, more through vLLM's prefill. They are compared as the other answers are,
and timed up to the first token. Speed: speed.py.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend import _library
from etap_backend.lab.checks.agreement import (
    PROMPT_TOKENS,
    Agreement,
    Request,
    agreement,
    answer_in,
    make_requests,
    objections,
    with_another_beginning,
)
from etap_backend.lab.checks.speed import Shape, Timer, Turns, parse_shape, parse_turns, speed_table, turns_table
from etap_backend.lab.provenance import provenance
from etap_backend.lab.results import must_be_writable, write
from etap_backend.lab.serving import client
from etap_backend.lab.serving.client import Deadline, Failed
from etap_backend.lab.serving.engines import ENGINES, Answer, Serving
from etap_backend.lab.serving.servers import Served, served
from etap_backend.lab.stopping import stopping

VLLM = ENGINES["vllm"]
ETAP = VLLM.ours
PROGRAM = "python -m etap_backend.lab.checks.vllm_serve"
PACKAGES = ("etap-backend", "vllm", "torch", "apache-tvm-ffi", "triton")
PLUGIN_GROUP = "vllm.general_plugins"
FEW = 8  # concurrency of the second reading
TURN_TOKENS = (0, 2, 3, 4, 17, 37, 63, 64, 100, 127, 128, 129, 300)  # new tokens of turns; the first fill the cache
TURN_PREFIX = 2048  # tokens before them: whole blocks, so that all are cached and no more
MOST_BIAS = 100  # that vLLM takes; log-probabilities are those before it
KEEPS_QUERIES = "TRITON_MLA"  # over an FP8 cache, where others round them to e4m3

console = Console(width=120)


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


def rounds_queries(cache: str, reference: str, fp8_math: bool) -> bool:
    """Whether ETAP or its reference rounds queries and probabilities to e4m3, which differs more than noise."""
    return cache.startswith("fp8") and (fp8_math or reference != KEEPS_QUERIES)


@contextlib.contextmanager
def loader_plugin() -> Iterator[dict[str, str]]:
    """Environment in which vLLM also finds the load format `seeded`, as a plugin that exists while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        distribution = Path(folder) / "etap_serve_check-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: etap-serve-check\nVersion: 0\n")
        entry_points = f"[{PLUGIN_GROUP}]\netap_serve_check = etap_backend.lab.checks.seeded_weights:register\n"
        (distribution / "entry_points.txt").write_text(entry_points)
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        yield {"PYTHONPATH": os.pathsep.join([folder, *filter(None, inherited)])}


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
    fp8_math: bool
    flags: list[str]
    output: Path
    ready: float
    deadline: Deadline
    environment: dict[str, str]
    document: dict
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    yardsticks: tuple[Agreement, Agreement] | None = None

    @contextlib.contextmanager
    def server(self, name: str, backend: str, *, eager: bool = False) -> Iterator[Served]:
        contexts = [shape.context for shape in self.shapes] + [turns.context + turns.tokens for turns in self.turns]
        serving = Serving(self.model, max_context=max([4096, *contexts]) + 1024, max_requests=len(self.requests))
        flags = ["--kv-cache-dtype", self.cache, *self.flags, *([VLLM.eager] if eager else [])]
        record = self.document["servers"].setdefault(name, {})
        log, seconds = self.output.parent / f"{name}.log", self.deadline.left(self.ready, "the start of a server")
        console.print(f"[bold]{name}[/]: starting, log in {log}")
        with served(
            VLLM, serving, backend, flags, log=log, seconds=seconds, about=record, environment=self.environment
        ) as server:
            if VLLM.in_full_graphs(server.text()) == eager:
                raise Failed(f"full CUDA graphs: wanted {not eager}, the log says {eager}")
            console.print(f"{name}: ready after {record['seconds_to_ready']} s, {'; '.join(record['cache'])}")
            yield server
        self.write()

    def ask(self, server: Served, requests: Sequence[Request], concurrency: int, salt: str) -> list[Answer]:
        """Answers to all requests, `concurrency` at a time; another salt finds nothing in the prefix cache."""
        bodies = [
            VLLM.body(request.prompt, request.new_tokens, logprobs=5, salt=salt)
            # No allowed_token_ids: vLLM 0.26 gives one request the other's when it swaps two in its batch.
            | ({} if request.forced is None else {"logit_bias": {str(request.forced): MOST_BIAS}})
            for request in requests
        ]
        replies = server.ask(bodies, concurrency, self.deadline.left(150, "requests"))
        return [
            answer_in(VLLM, reply, r.new_tokens, None if r.forced is None else [r.forced] * r.new_tokens)
            for reply, r in zip(replies, requests, strict=True)
        ]

    def write(self) -> None:
        write(self.document, self.output)

    def graphs(self, backend: str) -> None:
        """Answers, the same few at a time, another context, and speed, with full CUDA graphs."""
        forced = [i for i, r in enumerate(self.requests) if r.forced is not None and len(r.prompt) >= 128]
        name = backend.lower()
        with self.server(name, backend) as server:
            with client.watching(server.url, VLLM.running) as most_running:
                together = self.ask(server, self.requests, len(self.requests), "together")
            few = self.ask(server, self.requests, FEW, "few")
            changed = [with_another_beginning(self.requests[index]) for index in forced]
            other = self.ask(server, changed, len(changed), "control")
            turns = self.ask(server, make_turns(), 1, "turns")
            self.answers |= {backend: together, f"{backend} few": few, f"{backend} turns": turns}
            noise, control = agreement(few, together), agreement(other, [together[index] for index in forced])
            server.about |= {
                "requests": len(self.requests),
                "most_running_at_once": most_running(),
                "noise": noise.summary(),
                "control": control.summary(),
            }
            if backend == self.reference:
                self.yardsticks = noise, control
            self.write()
            timer = Timer(server, self.deadline)
            for key, measure, shapes in (
                ("decode", timer.time_per_token, self.shapes),
                ("turns", timer.time_to_first_token, self.turns),
            ):
                for shape in shapes:
                    server.about.setdefault(key, []).append(measure(shape, self.repeats))
                    self.write()

    def eager(self) -> None:
        """A few of the same requests without CUDA graphs and compilation."""
        few = self.requests[:24]
        with self.server("etap-eager", ETAP, eager=True) as server:
            self.answers["eager"] = self.ask(server, few, len(few), "together")
            self.answers["eager turns"] = self.ask(server, make_turns(), 1, "turns")

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
            loose = eager or rounds_queries(self.cache, self.reference, self.fp8_math)
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
            except Failed as error:
                failures.append(f"{name}: {error}")
                console.print(failures[-1], style="red", markup=False)
        if self.yardsticks:
            failures += self.judge()
        return failures


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
    fp8_math: Annotated[bool, typer.Option("--fp8-math", help="ETAP multiplies an FP8 cache as it is.")] = False,
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
    try:
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    about = provenance(PROGRAM, packages=PACKAGES, library=_library.library_path(), note=note)
    document = {"what": "vLLM serve check"} | about.model_dump() | {"servers": {}, "agreement": {}, "failures": []}
    with stopping(None), loader_plugin() as environment:
        check = Check(
            model,
            reference.upper(),
            shapes,
            next_turns,
            repeats,
            make_requests(requests),
            kv_cache_dtype,
            fp8_math,
            [*(VLLM.fp8_math[1] if fp8_math else ()), *(serve_flags or [])],
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

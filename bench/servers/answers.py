"""Compares what a model answers with ETAP and with an engine's own attention backends.

    python -m bench answers MODEL --engine vllm [--modes plain,mtp] [--seeded] [-- flags for every server]
    python -m bench answers MODEL --backends FLASHMLA,ETAP+fp8,ETAP+fp8+math,ETAP@dcp2

Needs a Hopper GPU and the engine with etap-backend beside it. MODEL is any MLA model, a folder or a name; with --seeded
a folder without weights gets those of bench.models.seeded. One server per backend and mode (who drafts) answers

- together: concurrent requests of mixed length; again: the same ones over the prefix cache; few: a few at a time;
- turns: 0 to 300 new tokens behind a cached prefix, one request at a time, so that each step is the turn's own;
- common: concurrent requests behind one beginning, of dense models (in sparse ones rounding changes what is chosen);
- control: long requests behind another beginning.

ETAP must agree with the first backend within the limits of agreement.py. The exit status is 1 when anything fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench import report
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, write
from bench.common.stopping import Stopped, stopping
from bench.models.plugins import plugins
from bench.servers import client
from bench.servers.agreement import (
    Agreement,
    Request,
    agreement,
    answer_in,
    make_common,
    make_requests,
    make_turns,
    moved,
    objections,
    rounds_elsewhere,
    with_another_beginning,
)
from bench.servers.client import Failed
from bench.servers.engines import (
    ENGINES,
    Answer,
    Serving,
    Sglang,
    Variant,
    Vllm,
    configuration,
    is_sparse,
    is_v4,
    must_be_modes,
)
from bench.servers.processes import Server, end_all, served

CONTEXT = 4096 + 1024
FEW = 8  # requests at a time
LONG_PROMPT = 128  # tokens of a prompt whose beginning matters
CHUNK_TOKENS = 2048  # prefilled per step in SGLang, so that longer prompts take several
CACHED_SHARE = 0.9  # of the whole pages of prompts asked again, that the prefix cache must have
STAGES = {"together": "together", "again": "again", "few": "together", "turns": "turns", "common": "common"}
"""Stages that must agree, and the reference's stage with which."""


@dataclass
class Questions:
    """Everything that one server is asked in one mode."""

    server: Server
    mode: str
    variant: Variant
    count: int
    dense: bool
    seeded: bool  # such weights draft, but what they draft is hardly ever accepted
    stages: dict[str, list[Answer]] = field(default_factory=dict)

    @property
    def engine(self) -> Vllm | Sglang:
        return self.server.engine

    def ask(self) -> dict[str, list[Answer]]:
        """Answers by stage. Raises Failed where a stage did not run as it should."""
        forces = self.engine.forces and self.mode == "plain"
        requests, turns = make_requests(self.count, forces), make_turns(forces)
        replies = self.replies(requests, self.count, "together")
        if self.mode != "plain" and self.engine.name == "sglang":
            self._must_accept_drafts(requests, replies)
        self.stages["together"] = self._answers(requests, replies)
        before = self._found()
        self.stages["again"] = self._answers(requests, self.replies(requests, self.count, "together"))
        self._must_have_found(requests, self._found() - before)
        if self.engine.name == "sglang":
            with client.new_client() as http:
                client.ask(http, f"{self.server.url}/flush_cache", None, 60)
        self.stages["few"] = self._answers(requests, self.replies(requests, FEW, "few"))
        self._control(requests, forces)
        self.stages["turns"] = self._answers(turns, self.replies(turns, 1, "turns"))
        if self.dense:
            common = make_common(forces)
            self.replies(common[:1], 1, "common")  # so that all others find the beginning
            self.stages["common"] = self._answers(common, self.replies(common, len(common), "common"))
        graphs = self.engine.in_graphs(self.server.log())
        if self.mode == "plain" and graphs is not (not self.variant.eager):
            raise Failed(f"CUDA graphs: wanted {not self.variant.eager}, the log says {graphs}")
        return self.stages

    def replies(self, requests: Sequence[Request], concurrency: int, salt: str, **more: list) -> list[dict]:
        """Another salt finds nothing in the prefix cache, where the engine has salts."""
        bodies = [self.engine.body(r.prompt, r.new_tokens, logprobs=2, forced=r.forced, salt=salt) for r in requests]
        for name, values in more.items():
            bodies = [body | {name: value} for body, value in zip(bodies, values, strict=True)]
        return self.server.ask(bodies, concurrency)

    def _answers(self, requests: Sequence[Request], replies: list[dict]) -> list[Answer]:
        pairs = zip(requests, replies, strict=True)
        return [answer_in(self.engine, reply, request.new_tokens, request.forced) for request, reply in pairs]

    def _control(self, requests: list[Request], forces: bool) -> None:
        """Long requests behind another beginning: forced ones, or in SGLang the first token of greedy ones."""
        if not forces and self.engine.name != "sglang":
            return
        pairs = zip(requests, self.stages["together"], strict=True)
        long = [(r, a) for r, a in pairs if len(r.prompt) >= LONG_PROMPT and (r.forced is not None or not forces)]
        before = [answer for _, answer in long]
        changed = [
            replace(r, prompt=with_another_beginning(r), new_tokens=r.new_tokens if forces else 1) for r, _ in long
        ]
        if forces:
            after = self._answers(changed, self.replies(changed, len(changed), "control"))
        else:
            tokens = [answer.tokens[:1] for answer in before]
            replies = self.replies(changed, len(changed), "control", token_ids_logprob=tokens)
            after = [first_token_moved(reply, answer) for reply, answer in zip(replies, before, strict=True)]
        self.stages |= {"control": after, "before control": before}

    def _found(self) -> float:
        return self.server.metrics().get(self.engine.counters["prefix tokens found"], 0.0)

    def _must_have_found(self, requests: list[Request], found: float) -> None:
        """Raise Failed unless the prefix cache, if any, had nearly all whole pages of prompts that were just asked."""
        page = self.engine.page_tokens(self.server.log())  # the last page is computed again
        wanted = sum((len(request.prompt) - 1) // page * page for request in requests)
        self.server.about.update(tokens_cached=found, tokens_cached_wanted=wanted)
        off = {"--no-enable-prefix-caching", "--disable-radix-cache"} & set(self.server.about["command"].split())
        if found < CACHED_SHARE * wanted and not off:
            raise Failed(f"prefix cache: wanted {wanted} tokens of the prompts, got {found:.0f}")

    def _must_accept_drafts(self, requests: list[Request], replies: list[dict]) -> None:
        verified = sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies)
        made = sum(request.new_tokens for request in requests)
        self.server.about["tokens_per_verification"] = made / verified if verified else 0.0
        if not verified or (made <= verified and not self.seeded):
            raise Failed(f"drafts: wanted more than 1 token per verification, got {made} in {verified}")


def first_token_moved(reply: dict, answer: Answer) -> Answer:
    """An answer's first token with the log-probability that another context gives it in SGLang."""
    ((logprob, token, *_),) = reply["meta_info"]["output_token_ids_logprobs"][0]
    if token != answer.tokens[0]:
        raise Failed(f"wanted the log-probability of token {answer.tokens[0]}, got that of {token}")
    return Answer([token], [float(logprob)], [0.0])


Records = dict[tuple[str, str], dict[str, list[Answer]]]
"""Answers by stage of each (backend, mode)."""


def judged(records: Records, reference: str) -> tuple[dict, list[str]]:
    """What a results file says of all servers' answers, and the failures."""
    document, failures = {"yardsticks": {}, "agreement": {}}, []
    for mode in dict.fromkeys(mode for _, mode in records):
        own = records.get((reference, mode))
        yardstick = next((one for one in (own, records.get((reference, "plain"))) if one and "control" in one), None)
        if not own or not yardstick:
            failures.append(f"{mode}: {reference} did not answer, so there is nothing to compare with")
            continue
        control = moved(yardstick["control"], yardstick["before control"])
        noise = agreement(own["few"], own["together"])
        yardsticks = {"noise": noise, "control": control, "prefix cache": agreement(own["again"], own["together"])}
        document["yardsticks"] |= {f"{mode}, {name}": one.summary() for name, one in yardsticks.items()}
        for backend in (name for name, of in records if of == mode and name != reference):
            variant, other = Variant.parse(backend), Variant.parse(reference)
            for stage, one in compared(records[backend, mode], own).items():
                texts = objections(one, noise, control, loose=rounds_elsewhere(variant, other))
                document["agreement"][f"{backend} {mode}, {stage}"] = one.summary() | {"objections": texts}
                failures += [f"{backend} {mode}, {stage}: {text}" for text in texts if variant.is_etap]
    return document, failures


def compared(record: dict[str, list[Answer]], reference: dict[str, list[Answer]]) -> dict[str, Agreement]:
    return {stage: agreement(record[stage], reference[other]) for stage, other in STAGES.items() if stage in record}


@dataclass
class Run:
    """All servers of one comparison."""

    engine: Vllm | Sglang
    serving: Serving
    flags: list[str]
    folder: Path  # for logs
    requests: int
    dense: bool
    about: dict[str, dict] = field(default_factory=dict)  # servers

    def serve(self, backend: str, mode: str) -> dict[str, list[Answer]]:
        """One server's answers by stage. Raises Failed."""
        variant, serving, flags = Variant.parse(backend), self.serving.drafting(mode), self.flags
        if self.engine.name == "sglang":
            own = ["--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK_TOKENS), "--decode-log-interval", "1"]
            flags = [*own, *flags]
        environment = {} if variant.tp == 1 else {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        log = self.folder / f"{backend}-{mode}.log"
        typer.echo(f"{backend} {mode}: starting, log in {log}")
        with (
            plugins(["seeded"] if serving.weights == "seeded" else []) as more,
            served(self.engine, serving, variant, flags, log=log, environment=environment | more) as server,
        ):
            seeded = serving.weights == "seeded"
            stages = Questions(server, mode, variant, self.requests, self.dense, seeded).ask()
            self.about[f"{backend} {mode}"] = server.about | {"counters": server.counters()}
            return stages

    def all(self, backends: list[str], modes: list[str], parallel: int) -> tuple[Records, list[str]]:
        """Every server's answers, and what failed."""
        every = [(name, mode) for mode in modes for name in backends]
        every = [(name, mode) for name, mode in every if mode == "plain" or Variant.parse(name).dcp == 1]
        records, failures = {}, []
        with ThreadPoolExecutor(parallel) as pool:
            asked = {key: pool.submit(self.serve, *key) for key in every}  # engines refuse drafts with dcp
            for key, answers in asked.items():
                try:
                    records[key] = answers.result()
                except Failed as error:
                    failures.append(f"{' '.join(key)}: {error}")
                except Stopped:
                    pool.shutdown(wait=False, cancel_futures=True)
                    end_all()
                    raise
        return records, failures


def finish(document: dict, output: Path, text: str) -> None:
    """Write the results file, print the text and the verdict, and end with the exit status."""
    write(document, output)
    typer.echo(f"{text}\n{'failed' if document['failures'] else 'passed'}")
    raise typer.Exit(bool(document["failures"]))


def main(
    model: Annotated[str, typer.Argument(help="Folder or name of any MLA model.")],
    serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for every server, after --.")] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose servers.")] = "vllm",
    output: Annotated[Path, typer.Option(help="JSON file to write; logs go beside it.")] = Path("answers.json"),
    backends: Annotated[str, typer.Option(help="The reference first; default: the engine's.")] = "",
    modes: Annotated[str, typer.Option(help="Of plain, mtp.")] = "plain",
    requests: Annotated[int, typer.Option(min=32, help="Concurrent requests of mixed length.")] = 96,
    parallel: Annotated[int, typer.Option(min=1, help="Servers at a time; flags divide the memory.")] = 1,
    seeded: Annotated[bool, typer.Option("--seeded", help="With weights of bench.models.seeded.")] = False,
    note: Annotated[str, typer.Option(help="Put into the output.")] = "",
) -> None:
    """Compare the answers of attention backends; exit with 1 when they differ by more than allowed."""
    of, config = ENGINES[engine], configuration(model)
    own = of.v4 if is_v4(config) else of.sparse if is_sparse(config) else of.backends
    names = backends.split(",") if backends else [*own, f"{of.etap}+eager"]
    try:
        must_be_modes(modes.split(","))
        for name in names:
            Variant.parse(name)
        must_be_writable(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    about = provenance("python -m bench answers", note)
    serving = Serving(model, "seeded" if seeded else "auto", max_requests=requests, max_context=CONTEXT)
    dense = not (is_v4(config) or is_sparse(config))
    run = Run(of, serving, serve_flags or [], output.with_suffix(""), requests, dense)
    with stopping():
        records, failures = run.all(names, modes.split(","), parallel)
    found, against = judged(records, names[0])
    document = {"what": f"answers, {engine}", **about, "servers": run.about}
    document |= found | {"failures": failures + against}
    finish(document, output, report.answers(output.stem, document))


if __name__ == "__main__":
    typer.run(main)

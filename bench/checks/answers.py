"""Compares what a model answers with ETAP and with an engine's other attention backends.

    etap check answers MODEL --engine vllm --output answers.json [-- flags for every server]
    etap check answers MODEL --engine vllm --output answers-fp8.json --kv-cache-dtype fp8
    etap check answers MODEL --engine sglang --output answers-two-gpus.json --layouts tp2,dcp2 --modes plain,mtp

Needs a Hopper GPU and the engine with etap-backend beside it, and no network. MODEL is any MLA model, a folder or a
name. For each backend and mode (plain; mtp: the model's own MTP layer proposes tokens; ngram: the prompt does, vLLM
only) one server runs and answers requests of mixed length greedily. ETAP without CUDA graphs is one more backend, and
answers agree as far as noise allows that the reference's own server shows (agreement.py).

--backends names BACKEND[+CACHE][+math][+eager][@LAYOUT], the reference first: ETAP+fp8+math reads an FP8 cache with FP8
math, ETAP@dcp2 runs on two GPUs. By default they are the engine's dense ones, or of a model with sparse attention its
sparse ones. With --kv-cache-dtype every server has that type of cache. With --layouts there are servers of ETAP on
several GPUs besides: tp2 is tensor parallelism of two ranks, dcp2 the same with decode context parallelism of two, in
which nothing is drafted. They get the flags and variables of --scenario, which keep NVLink multicast and compilers out
of a start.

Servers that a --work folder has answers of are not started again, so a run may be continued. With --parallel several
run at once on the GPU; vLLM then needs --kv-cache-memory-bytes, because it takes what others allocate for its own.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from etap_backend import _library
from bench.common import gpus
from bench.checks.agreement import MixedRequests
from bench.checks.asked import (
    ASKED,
    PACKAGES,
    Asked,
    Variant,
    checked,
    configuration,
    is_sparse,
    is_v4,
    on_gpus,
)
from bench.e2e.scenario import Scenario, read_scenario
from bench.common.provenance import provenance
from bench.common.results import must_be_writable, read_json, write
from bench.serving import client
from bench.serving.client import Deadline, Failed
from bench.serving.engines import Answer
from bench.serving.lifecycle import end_all
from bench.serving.servers import served
from bench.common.stopping import Stopped, stopping

console = Console(width=120)


@dataclass
class Run:
    """All servers of one comparison."""

    asked: Asked
    questions: MixedRequests  # or others that are asked and judged as these are
    sparse: bool
    work: Path
    backends: list[str]
    modes: list[str]
    extra: list[str]
    ready: float
    deadline: Deadline
    scenario: Scenario
    records: dict[tuple[str, str], Future] = field(default_factory=dict)

    def serve(self, backend: str, mode: str) -> dict:
        """Start a server, ask everything, and keep it in the work folder."""
        variant, engine, record = Variant.parse(backend), self.asked.engine, {}
        name, flags = variant.asked_of(engine)
        flags = [*self.questions.flags(self.asked, variant, mode), *flags, *self.extra]
        several, variables = getattr(self.scenario, engine.name), {}
        if not variant.one_gpu:
            flags, variables = [*several.flags, *flags], {**self.scenario.environment, **several.environment}
        log, begin = self.work / f"{backend}-{mode}.log", time.monotonic()
        console.print(f"[bold]{backend} {mode}[/]: starting, log in {log}")
        with served(
            engine,
            self.questions.serving(self.asked, variant, mode),
            name,
            flags,
            log=log,
            seconds=self.deadline.left(self.ready, "the start of a server"),
            about=record,
            environment=variables,
        ) as server:
            server.must_say(variant.proof(self.sparse))
            of_reference = self.records[self.backends[0], mode]
            own = of_reference is self.records[backend, mode]
            reference = None if own else lambda: of_reference.result()["stages"]
            stages = self.questions.ask(server, self.asked, mode, reference, self.deadline)
            roomy = mode in self.asked.roomy
            told = {name: sample for name, sample in engine.counters.items() if name != "preempted" or not roomy}
            record["counters"] = client.counted(server.metrics(), told)
        record["seconds"] = round(time.monotonic() - begin, 1)
        raw = {s: {k: [asdict(a) for a in answers] for k, answers in kinds.items()} for s, kinds in stages.items()}
        write(record | {"stages": raw}, self.file(backend, mode))
        return record | {"stages": stages}

    def file(self, backend: str, mode: str) -> Path:
        return self.work / f"{backend}-{mode}.json"

    def load(self, backend: str, mode: str) -> dict | None:
        """What an earlier server answered."""
        if not self.file(backend, mode).exists():
            return None
        record = read_json(self.file(backend, mode))
        for kinds in record["stages"].values():
            kinds |= {kind: [Answer(**answer) for answer in answers] for kind, answers in kinds.items()}
        return record

    def all(self, parallel: int) -> tuple[dict[tuple[str, str], dict], list[str]]:
        """Every server's record, and what failed; those that are not there yet are run, the reference first."""
        found, failures = {}, []
        every = [(backend, mode) for mode in self.modes for backend in self.backends]
        with ThreadPoolExecutor(parallel) as pool:
            for key in every:
                if key[1] == "plain" or Variant.parse(key[0]).dcp == 1:  # SGLang refuses drafts there with ETAP
                    self.records[key] = pool.submit(lambda key: self.load(*key) or self.serve(*key), key)
            try:
                for key, record in self.records.items():
                    try:
                        found[key] = record.result()
                    except Failed as error:
                        failures.append(f"{' '.join(key)}: {error}")
            except Stopped:
                pool.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise
        return found, failures


def chosen_backends(
    questions: MixedRequests, asked: Asked, own: Sequence[str], names: str, cache: str, layouts: str
) -> list[str]:
    """The backends of a run, the reference first. Raises ValueError when they are none, or want more GPUs.

    Args:
        own: the model's, where none are named.
    """
    backends = questions.backends(asked, names.split(",") if names else list(own), cache, named=bool(names))
    backends = on_gpus(backends, layouts.split(",")) if layouts else backends
    wanted = max(Variant.parse(name).tp for name in backends)
    if wanted > 1 and (there := len(gpus.gpus())) < wanted:
        raise ValueError(f"--layouts: wanted {wanted} GPUs, this machine shows {there}")
    return backends


def table_of(rows: list[dict]) -> Table:
    """Of rows with one and the same keys, or some more: numbers in five digits, of a list the last."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "objections"))
    table = Table(*columns)
    for row in rows:
        last = (v[-1] if isinstance(v, list) and v else v for v in (row.get(key, "") for key in columns))
        table.add_row(*(f"{v:.5g}" if isinstance(v, float) else "" if v in (None, []) else str(v) for v in last))
    return table


def command(program: str, questions_of: type[MixedRequests], default: int, option: object) -> Callable[..., None]:
    """The program that asks these questions; how many or how large they are is this option's to say."""

    def main(
        model: Annotated[str, typer.Argument(help="Folder or name of any MLA model.")],
        serve_flags: Annotated[list[str] | None, typer.Argument(help="Flags for every server, after --.")] = None,
        engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
        output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("answers.json"),
        work: Annotated[
            Path | None, typer.Option(help="Folder for answers and logs; default: beside the output.")
        ] = None,
        backends: Annotated[str, typer.Option(help="The reference first; default: the engine's.")] = "",
        modes: Annotated[str, typer.Option(help="Of plain, mtp, ngram.")] = questions_of.modes,
        size: Annotated[int, option] = default,
        kv_cache_dtype: Annotated[str, typer.Option(help="Compare with this cache, such as fp8_e4m3.")] = "",
        layouts: Annotated[str, typer.Option(help="ETAP on several GPUs besides, such as tp2,dcp2.")] = "",
        scenario: Annotated[
            str, typer.Option(help="Whose flags and environment variables servers on several GPUs get.")
        ] = "decode-plain",
        parallel: Annotated[int, typer.Option(min=1, help="Servers at a time.")] = 1,
        ready: Annotated[float, typer.Option(help="Seconds until a server must be ready.")] = 300,
        limit: Annotated[float, typer.Option(help="Seconds for everything.")] = 1800,
        note: Annotated[str, typer.Option(help="Put into the output: anything unusual about this installation.")] = "",
    ) -> None:
        """Compare the answers of attention backends; exit with 1 when they differ by more than allowed."""
        if engine not in ASKED:
            raise typer.BadParameter(f"--engine: wanted one of {', '.join(ASKED)}, got {engine}")
        asked, folder, wanted = ASKED[engine], Path(model), modes.split(",")
        if wrong := [mode for mode in wanted if mode not in asked.modes]:
            raise typer.BadParameter(f"--modes: wanted some of {', '.join(asked.modes)}, got {', '.join(wrong)}")
        work = work or output.with_suffix("")
        try:
            questions = questions_of(model, size)
            config = configuration(folder) if (folder / "config.json").is_file() else {}
            v4 = is_v4(config)
            sparse = is_sparse(config) and not v4  # V4's line proves it by itself
            own = asked.v4 if v4 else asked.sparse if sparse else asked.backends
            chosen = chosen_backends(questions, asked, own, backends, kv_cache_dtype, layouts)
            several = read_scenario(scenario)
            if getattr(several, engine) is None:
                raise ValueError(f"--scenario: wanted one with a table [{engine}], got {scenario}")
            must_be_writable(output)
            work.mkdir(parents=True, exist_ok=True)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
        deadline = Deadline(time.monotonic() + limit)
        run = Run(asked, questions, sparse, work, chosen, wanted, serve_flags or [], ready, deadline, several)
        about = provenance(program, packages=(engine, *PACKAGES), library=_library.library_path(), note=note)
        with stopping(None):
            records, failures = run.all(parallel)
        found, against = questions.judged(records, chosen, asked)
        document = (
            {"what": checked(questions.what, engine, v4)}
            | about.model_dump()
            | questions.about
            | found
            | {"failures": failures + against}
        )
        write(document, output)
        for name, server in document["servers"].items():
            console.print(f"{name}: {'; '.join(server['cache'])}", highlight=False)
        console.print(*(table_of(rows) for rows in questions.rows(document)))
        for failure in document["failures"]:
            console.print(f"FAILED {failure}", style="red", markup=False)
        console.print("failed" if document["failures"] else "the answers agree")
        raise typer.Exit(bool(document["failures"]))

    return main


REQUESTS = typer.Option("--requests", min=32, help="Concurrent requests of mixed length.")
main = command("python -m bench.checks.answers", MixedRequests, 96, REQUESTS)

if __name__ == "__main__":
    typer.run(main)

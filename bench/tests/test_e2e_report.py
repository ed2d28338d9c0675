"""Rows and tables of `etap e2e`: old files too, readings at equal host speed, several runs in one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from bench.e2e import report
from bench.e2e import results_file as rows
from bench.e2e.results_file import Document, Measured, Profile, Reading, Skipped

RESULTS = Path(__file__).parents[2] / "results"
ABOUT = {
    "kind": "e2e",
    "title": "DeepSeek-R1, decode",
    "engine": "vllm",
    "gpu": "NVIDIA H200",
    "gpus": 8,
    "layout": {"tp": 8, "pp": 1, "dp": 1},
    "driver": "580.1",
    "versions": {"vllm": "0.26.0"},
    "commit": "abc",
    "date": "2026-01-01",
    "command": "etap e2e decode",
    "model": "deepseek-r1",
    "model_shape": None,
    "weights": "dummy weights, FP8 in blocks, 61 of 61 layers",
    "dummy": True,
    "draft_tokens": 0,
    "acceptance": None,
    "method": report.METHOD,
    "complete": True,
}


def a_load(backend: str, concurrency: int, length: int = 16384) -> dict:
    return {"backend": backend, "input": length, "output": 128, "concurrency": concurrency, "prefill": "cached"}


def a_row(backend: str, concurrency: int, tpot: float, **other) -> Measured:
    reading = Reading(median_tpot_ms=tpot, median_ttft_ms=50.0, output_throughput=concurrency / tpot * 1e3)
    slower = reading.model_copy(update={"median_tpot_ms": tpot * 1.1})
    return Measured(**a_load(backend, concurrency), readings=[reading, slower, reading], **other)


def of_rows(*found, **changes) -> Document:
    return Document(**{**ABOUT, "rows": list(found), **changes})


@pytest.fixture
def document() -> Document:
    found = [a_row("FLASHMLA", 1, 12.0), a_row("FLASHMLA", 16, 20.0), a_row("FA", 16, 21.0)]
    found += [a_row("ETAP", 1, 10.0), a_row("ETAP", 16, 16.0)]
    found.append(Skipped(**a_load("ETAP", 16, 65536), reason="needs a cache"))
    servers = {"ETAP": {"seconds_to_ready": 90.0, "cache_tokens": 674597, "full_cuda_graphs": False}}
    return of_rows(*found, servers=servers)


def changed(document: Document, **changes) -> Document:
    return document.model_copy(update=changes)


def without_null(content):
    if isinstance(content, dict):
        return {key: without_null(value) for key, value in content.items() if value is not None}
    return [without_null(value) for value in content] if isinstance(content, list) else content


@pytest.mark.parametrize("path", sorted(RESULTS.glob("e2e-*.json")), ids=lambda path: path.stem)
def test_the_files_that_there_are_can_be_read_and_lose_nothing(path):
    old, read = without_null(json.loads(path.read_text())), rows.read(path)
    assert len(read.rows) == len(old["rows"]) > 0
    for new, row in zip(read.model_dump(mode="json")["rows"], old["rows"], strict=True):
        row.pop("tokens_per_second_per_gpu", None)
        assert row.items() <= new.items()
    again = Document.model_validate_json(read.model_dump_json())
    assert again == read, "a file of the new form is read as it was written"
    assert report.markdown(read)


@pytest.mark.parametrize(
    "content, words",
    [
        ("[]", "Input should be a valid dictionary"),
        ("{", "Expecting property name"),
        ('{"kind": "e2e", "rows": [], "results": 3}', "title: Field required"),
        ('{"rows": [], "results": 3}', "wanted a results file of kind 'e2e', got None"),
        (
            json.dumps({**ABOUT, "rows": [{"state": "measured", "backend": "ETAP"}]}),
            r"rows\.0\.measured\.input: Field required",
        ),
        (json.dumps({**ABOUT, "rows": [3]}), r"rows\.0"),
    ],
)
def test_other_json_is_refused_with_its_name(tmp_path, content, words):
    (path := tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=rf"(?s)other\.json: .*{words}"):
        rows.read(path)
    asked = invoke(str(path))
    assert asked.exit_code == 2 and "other.json" in asked.output and "Traceback" not in asked.output


def invoke(*arguments: str):
    main = typer.Typer()
    main.command()(report.main)
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "300"})


def test_tables_compare_with_the_best_peer_and_say_that_weights_are_dummy(document, tmp_path):
    text = report.markdown(document)
    lines = [line for line in text.splitlines() if "16 x 16K/128, cached" in line]
    assert "| ETAP | 16.00 (16.00 to 17.60) | - |" in lines[0], "ours comes first"
    assert "| FLASHMLA | 20.00 (20.00 to 22.00) | 1.250 |" in lines[1] and lines[1].endswith("| 3 |")
    assert "| FA | 21.00 (21.00 to 23.10) | 1.312 |" in lines[2] and len(lines) == 3
    assert "cache too small" in text and text.endswith(
        "; dummy weights, FP8 in blocks, 61 of 61 layers, experts as dummy weights choose them."
    )
    assert "FP8 KV cache" not in text and "Stopped" not in text
    cut = report.markdown(changed(document, complete=False, stopped="by SIGINT"))
    assert cut.endswith("Stopped by SIGINT; what is missing was not measured.")
    in_fp8 = report.markdown(changed(document, kv_dtype="fp8", draft_tokens=1))
    assert "; FP8 KV cache; 1 draft tokens, driver" in in_fp8
    screen = tmp_path / "screen.txt"
    with screen.open("w") as file:
        report.print_document(changed(document, complete=False, stopped="by SIGINT"), Console(width=220, file=file))
    assert "1.250" in screen.read_text() and "stopped by SIGINT; --resume goes on" in screen.read_text()
    whole = " ".join(screen.read_text().split())
    assert "61 of 61 layers. Dummy weights: times are" in whole and report.METHOD in whole
    assert "KV cache of 674,597 tokens, decode not in full CUDA graphs" in screen.read_text()


def test_no_number_is_shortened_on_a_narrow_screen(document, tmp_path):
    screens = []
    for width in (60, 220):
        with (screen := tmp_path / str(width)).open("w") as file:
            report.print_document(document, Console(width=width, file=file))
        screens.append(sorted(re.findall(r"\d+\.\d+", screen.read_text())))
    assert screens[0] == screens[1] and "\N{HORIZONTAL ELLIPSIS}" not in (tmp_path / "60").read_text()


def at_host(row: Measured, *hosts: float) -> Measured:
    """The row with these hosts' times; a reading's is the slower of the two around it."""
    pairs = zip(row.readings, hosts, strict=True)
    return changed(row, readings=[changed(reading, host_ms=(host - 1, host)) for reading, host in pairs])


def test_only_readings_of_equal_host_speed_are_compared():
    ours, theirs, slow = a_row("ETAP", 16, 16.0), a_row("FLASHMLA", 16, 20.0), a_row("FA", 16, 21.0)
    document = of_rows(at_host(ours, 40, 65, 43), at_host(theirs, 41, 42, 44), at_host(slow, 60, 62, 64))
    compared = rows.at_equal_host_speed(document)
    assert [len(row.readings) for row in compared.rows] == [2, 3, 3]
    assert [(row.left_out, row.at_other_host) for row in compared.rows] == [(1, None), (None, None), (None, True)]
    assert compared.rows[0].tpot_ms == rows.spread([16.0]), "without the reading of the slow host"
    assert rows.at_equal_host_speed(compared) == compared
    lines = [line for line in report.markdown(document).splitlines() if "16 x 16K" in line]
    assert lines[0].endswith("| 40.0 to 43.0 | 2, 1 left out |") and "| 1.250 |" in lines[1]
    assert "| FA | 21.00 (21.00 to 23.10) | - |" in lines[2] and lines[2].endswith("| 3, at another host speed |")
    assert document.rows[0].tpot_ms.max == pytest.approx(17.6), "what was measured stays as it is"


@given(st.lists(st.lists(st.floats(10, 100), min_size=1, max_size=4), min_size=1, max_size=4))
def test_readings_that_are_compared_have_hosts_within_the_tolerance(hosts):
    reading = Reading(median_tpot_ms=1.0, median_ttft_ms=1.0, output_throughput=1.0)
    found = [
        Measured(**a_load(name, 1), readings=[changed(reading, host_ms=(host, host)) for host in of_row])
        for name, of_row in zip("abcd", hosts, strict=False)
    ]
    compared = rows.at_equal_host_speed(of_rows(*found)).rows
    kept = [reading.host for row in compared if not row.at_other_host for reading in row.readings]
    assert kept and max(kept) <= min(kept) * (1 + rows.HOST_TOLERANCE) * (1 + 1e-9)
    assert [len(row.readings) + (row.left_out or 0) for row in compared] == [len(of_row) for of_row in hosts]


def test_a_short_table_has_the_time_between_tokens_and_marks_other_hosts():
    ours, theirs = a_row("ETAP", 16, 16.0), a_row("FLASHMLA", 16, 20.0)
    found = [at_host(with_itl(ours, 15.5), 40, 40, 43), at_host(with_itl(theirs, 19.25), 60, 62, 64)]
    document = of_rows(with_itl(a_row("FLASHMLA", 1, 12.0), 11.5), *found)
    lines = report.markdown(document, ("1 x 16K", "16 x 16K")).splitlines()
    assert lines[0] == "| requests x tokens | ETAP | FLASHMLA |"
    assert lines[2:4] == ["| 1 x 16K | - | 11.50 |", r"| 16 x 16K | 15.50 | 19.25\* |"]
    assert "8 x NVIDIA H200, driver 580.1; vllm 0.26.0; commit abc; dummy" in lines[-1] and "other host" in lines[-1]
    assert "other host" not in report.markdown(document, ("1 x 16K",))
    with pytest.raises(ValueError, match="rows: wanted some of 1 x 16K, 16 x 16K, got 2 x 16K"):
        report.markdown(document, ("2 x 16K",))


def with_itl(row: Measured, ms: float) -> Measured:
    return changed(row, readings=[changed(reading, median_itl_ms=ms) for reading in row.readings])


def test_page_and_screen_say_whether_experts_were_drawn(document):
    assert "choose much the same experts" in report.provenance(document)
    drawn = changed(document, environment={rows.EVEN_ROUTING: "uniform_random"})
    said = report.provenance(drawn)
    assert "experts are drawn, all equally likely" in said and "much the same" not in said
    assert report.markdown(drawn).endswith(", experts drawn.")
    own = changed(drawn, dummy=False)
    assert "Dummy" not in report.provenance(own) and "experts" not in report.markdown(own)


def test_a_note_stands_beside_the_command_and_not_in_it(document):
    noted = changed(document, command="etap e2e decode --note 'A host of one'\"'\"'s own.' --gpus 8", note="A host.")
    said = report.markdown(noted)
    assert "`etap e2e decode --gpus 8`" in said and said.endswith(" A host.") and "one's" not in said


def test_of_one_reading_there_is_no_range(document):
    (row,) = (row for row in document.rows if row.backend == "FA")
    alone = changed(row, readings=[changed(row.readings[0], host_ms=(9.0, 10.0))])
    (line,) = (line for line in report.markdown(of_rows(alone)).splitlines() if "| FA |" in line)
    assert line.startswith("| 16 x 16K/128, cached | FA | 21.00 | - |") and line.endswith("| 10.0 | 1 |")


def test_readings_from_before_hosts_were_timed_stay(document):
    compared = rows.at_equal_host_speed(document)
    assert sorted(map(str, compared.rows)) == sorted(map(str, document.rows))
    assert "host ms" not in report.columns_of(document)


def test_the_share_that_a_profile_found_is_in_the_table(document):
    places = ((3, 9.876, Profile(attention_share=0.234)), (0, 8.888, Profile(error="no trace")))
    for place, step, profile in places:
        readings = [changed(reading, median_itl_ms=step) for reading in document.rows[place].readings]
        document.rows[place] = changed(document.rows[place], readings=readings, profile=profile)
    document.rows.append(Measured(**a_load("FA", 16, 65536)))
    head, _, *lines = report.markdown(document).splitlines()
    titles = head.split(" | ")
    cells = [line.split(" | ") for line in lines if line.startswith("| ")]
    backends = [line[1] for line in cells]
    assert backends == ["ETAP", "FLASHMLA", "ETAP", "FLASHMLA", "FA", "ETAP"], "no row without a time"
    shares = [line[titles.index("attention's share, profiled")] for line in cells]
    assert shares == ["23.4%", "-", "-", "-", "-", "-"]
    steps = [line[titles.index("ITL ms")] for line in cells]
    assert steps[:3] == ["9.88 (9.88 to 9.88)", "8.89 (8.89 to 8.89)", "-"]
    assert [line[titles.index("ITL / ETAP's")] for line in cells][:3] == ["-", "0.900", "-"]


def test_the_plot_is_drawn(document, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib, of the extra 'lab'")
    (path := tmp_path / "e2e.json").write_text(document.model_dump_json())
    assert invoke(str(path), "--plots", str(tmp_path / "plots")).exit_code == 0
    assert (tmp_path / "plots/e2e.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_says_which_row_is_of_which_run(document):
    runs = [rows.RunOf(date="2026-01-01", commit=name, library_sha256=None, command=f"etap e2e {name}", note=note)
            for name, note in (("old", "old machine."), ("new", ""))]  # fmt: skip
    found = [*document.rows, a_row("ETAP", 64, 15.0).model_copy(update={"run": 1})]
    made = changed(document, rows=found, runs=runs, complete=False, stopped="by SIGINT")
    text = report.markdown(made)
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if "16K/128, cached" in line]
    assert {line[0].partition("/")[0]: line[-1] for line in lines} == {"1 x 16K": "1", "16 x 16K": "1", "64 x 16K": "2"}
    assert "run 1: commit old; 2026-01-01; `etap e2e old`; run 2: commit new; " in text
    assert text.endswith(" old machine. Stopped by SIGINT; what is missing was not measured.")
    of_new = report.markdown(changed(made, rows=found[-1:]))
    assert "commit old" not in of_new and "run 2: commit new" in of_new

"""The tables of README.md and docs/: filled from results files, every difference and omission found, and the results'
ages told."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import typer
from bench_documents import document_of
from typer.testing import CliRunner

from etap_backend.lab import ages, provenance, results, tables
from etap_backend.lab.bench import plots
from etap_backend.lab.bench.grids import Workload
from etap_backend.lab.bench.rows import Measured, dumped, row_of

RESULTS = Path(__file__).parents[2] / "results"
README = """a
<!-- bench targets: 1 x 1K; 16 x 16K -->
<!-- /bench -->
b ![picture](results/targets-latency.png)
"""
DOC = """<!-- bench targets -->
old
<!-- /bench -->
<!-- summary wide -->
<!-- /summary -->
<!-- ratios targets -->
<!-- /ratios -->
<!-- claims all -->
<!-- /claims -->
"""
SOAK = {"what": "soak, vllm", "outcome": "passed: 15 requests", "gpu": "NVIDIA H200", "date": "2026-11-21T23:29:44"}
SOAK |= {"commit": "5dea719", "versions": {"vllm": "0.26.0"}}


def a_document(grid: str, shapes: list[tuple[int, int]]):
    times = {"etap": 1.0, "FlashMLA": 2.0, "FA3": 1.5, "FlashInfer": 1.25}
    rows = [
        row_of(
            Workload((tokens,) * requests).shape,
            calls=4,
            rotated_bytes=0,
            floor_us=5.0,
            results={
                name: Measured(us=factor * (requests * tokens / 500 + 8), iqr_us=0.1, replays=21, relative_rmse=1.7e-3)
                for name, factor in times.items()
            },
        )
        for requests, tokens in shapes
    ]
    return document_of(grid, title="MLA decode", rows=rows)


def git(root: Path, *words: str) -> str:
    command = [
        "git",
        "-C",
        str(root),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
        *words,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path) -> Path:
    """A source tree with two results of its only commit, and a check's."""
    root = tmp_path / "tree"
    for folder in ("docs", "results", "csrc", "etap_backend/lab"):
        (root / folder).mkdir(parents=True)
    (root / "csrc" / "kernel.cu").write_text("a\n" * 10)
    (root / "etap_backend" / "lab" / "bench.py").write_text("a\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "a")
    commit = git(root, "rev-parse", "--short", "HEAD")
    shapes = [(1, 1024), (16, 512), (16, 4096), (16, 16384)]
    for name in ("targets", "wide"):
        document = a_document(name, shapes).model_copy(update={"commit": commit})
        results.write(dumped(document), root / "results" / f"{name}.json")
    results.write(SOAK | {"commit": commit}, root / "results" / "soak.json")
    (root / "README.md").write_text(README)
    (root / "docs" / "results.md").write_text(DOC)
    return root


def run(root: Path, *arguments: str):
    app = typer.Typer(add_completion=False)
    app.command()(tables.main)
    return CliRunner().invoke(app, ["--root", str(root), *arguments])


def test_all_places_are_filled_and_then_nothing_differs(root):
    assert tables.complaints(root)
    result = run(root)
    assert result.exit_code == 0, result.output
    made = ["results/targets-latency.png", "README.md", "docs/results.md"]
    made += [f"docs/tables/{name}.md" for name in ("targets", "wide", "README")]
    assert result.stdout.splitlines() == [f"filled {name}" for name in made]
    readme, doc = (root / "README.md").read_text(), (root / "docs" / "results.md").read_text()
    assert (
        readme.count("\n| 1") == 2 and "| 16 x 16K | 5.0 | **532.3** |" in readme and readme.startswith("a\n<!-- bench")
    )
    assert "old" not in doc and "| query rows |" in doc
    assert "- best peer / etap, up to 32 heads, 4 shapes: 1.25 to 1.25, median 1.25; below 0.98 at none." in doc
    assert (
        "| soak, vllm ([file](../results/soak.json)) | passed: 15 requests | NVIDIA H200, vllm 0.26.0, commit " in doc
    )
    whole = (root / "docs" / "tables" / "targets.md").read_text()
    assert whole.startswith("# MLA decode\n") and "| 16 x 512 | 16 | 1 |" in whole and "`etap bench targets`" in whole
    assert tables.complaints(root) == [] and run(root).stdout == "" and run(root, "--check").exit_code == 0


def test_a_figure_that_is_not_its_files_is_found(root):
    run(root)
    page = root / "docs" / "results.md"
    page.write_text(page.read_text().replace("| 16 x 4K | 16 | 1 | 5.0 |", "| 16 x 4K | 16 | 1 | 4.9 |"))
    result = run(root, "--check")
    said = "docs/results.md: it is not what results/ gives: python -m etap_backend.lab.tables\n"
    assert result.exit_code == 1 and result.stderr == said
    run(root)
    path = root / "results" / "targets.json"
    results.write(results.read_json(path) | {"date": "2027-01-01T00:00:00+00:00"}, path)
    wrong = tables.complaints(root)
    assert [text.split(":")[0] for text in wrong[:2]] == ["docs/results.md", "docs/tables/targets.md"], "whole tables"
    assert wrong[2:] == ["results/targets-latency.png: it is not drawn from the result as it is"]
    run(root)
    assert tables.complaints(root) == []


def test_a_page_without_a_result_goes_and_a_result_without_a_page_is_found(root):
    run(root)
    (root / "results" / "wide.json").unlink()
    (root / "docs" / "results.md").write_text("no claims here\n")
    assert tables.complaints(root) == [
        "docs/tables/README.md: it is not what results/ gives: python -m etap_backend.lab.tables",
        "docs/tables/wide.md: it has no result",
        "results/soak.json: no page shows it",
    ]
    assert "deleted docs/tables/wide.md" in run(root).stdout
    (root / "README.md").write_text("[gone](results/gone.json)\n")
    assert "README.md: no results/gone.json" in tables.complaints(root)
    assert "results/targets-latency.png: no page shows it" in tables.complaints(root)


def test_a_place_whose_file_need_not_be_there_says_so_until_it_is(root):
    page = root / "docs" / "z.md"
    page.write_text("<!-- bench later? -->\n<!-- /bench -->\n")
    assert run(root).exit_code == 0
    assert page.read_text() == f"<!-- bench later? -->\n{tables.NOT_YET}\n<!-- /bench -->\n"
    assert tables.complaints(root) == []
    (root / "results" / "later.json").write_text((root / "results" / "targets.json").read_text())
    assert run(root).exit_code == 0 and "| 16 x 4K |" in page.read_text() and tables.complaints(root) == []


@pytest.mark.parametrize(
    "place, words",
    [
        ("<!-- bench nowhere -->\n<!-- /bench -->", "<!-- bench nowhere -->: .*nowhere.json"),
        ("<!-- bench soak -->\n<!-- /bench -->", "<!-- bench soak -->: .*soak.json: "),
        ("<!-- bench targets: 9 x 9K -->\n<!-- /bench -->", "rows: wanted some of 1 x 1K, .*, got 9 x 9K"),
        ("<!-- chart targets -->\n<!-- /chart -->", "<!-- chart targets -->: wanted one of bench, summary, ratios,"),
    ],
)
def test_a_place_that_nothing_belongs_in_is_named_and_left_as_it_is(root, place, words):
    page = root / "docs" / "z.md"
    page.write_text(f"{place}\n")
    result = run(root)
    assert result.exit_code == 1 and page.read_text() == f"{place}\n"
    assert re.search(f"^docs/z.md: .*{words}", result.stderr)
    assert "filled docs/results.md" in result.stdout and len(tables.complaints(root)) == 1


def test_rows_of_a_place_are_told_apart_by_words_of_their_labels(root):
    page = root / "docs" / "z.md"
    page.write_text("<!-- bench targets: 16 x 4K, 6 heads -->\n<!-- /bench -->\n")
    assert "got 16 x 4K, 6 heads" in run(root).stderr, "16 heads are not 6"
    page.write_text("<!-- bench targets: 16 x 4K, 16 heads; 1 x 1K, s_q 1 -->\n<!-- /bench -->\n")
    assert run(root).exit_code == 0 and page.read_text().count("\n| 1") == 2


# Ages


def test_beside_each_result_stands_how_many_lines_changed_since(root, monkeypatch):
    run(root)
    monkeypatch.setattr(ages, "LIMIT", 7)
    (root / "csrc" / "kernel.cu").write_text("a\n" * 10 + "b\n" * 3)
    (root / "etap_backend" / "lab" / "bench.py").write_text("b\n" * 99)
    (root / "etap_backend" / "dense.py").write_text("new\n" * 4)
    git(root, "add", ".")
    result = run(root, "--check")
    commit = git(root, "rev-parse", "--short", "HEAD")
    changed = {"soak": 7, "targets": 3, "wide": 3}  # a call's times depend on kernels only
    lines = [f"results/{name}.json: {count} lines changed since {commit}" for name, count in changed.items()]
    assert result.exit_code == 0 and result.stdout.splitlines() == lines
    (root / "csrc" / "kernel.cu").write_text("a\n" * 10 + "b\n" * 4)
    result = run(root, "--check")
    said = f"results/soak.json: 8 lines changed since {commit}, at most 7 may: measure again, or delete it"
    assert result.exit_code == 1 and result.stderr.splitlines() == [said]


def test_a_commit_that_leaves_the_kernels_instructions_ages_nothing_by_them(root):
    def commit(said: str) -> None:
        git(root, "add", ".")
        git(root, "commit", "-qm", said)

    run(root)
    first = git(root, "rev-parse", "--short", "HEAD")
    kernel, product = root / "csrc" / "kernel.cu", root / "etap_backend" / "dense.py"
    kernel.write_text("a\n" * 3)
    commit("changes three lines")
    kernel.write_text("moved\n" * 50)
    product.write_text("new\n" * 4)
    commit(f"moves them\n\n{ages.SAME}")
    before = ages.changed_lines(root, first, ages.SOURCES), ages.changed_lines(root, first, ages.SOURCES_OF["bench"])
    kernel.write_text("moved\n" * 50 + "more\n")
    commit(f"says in passing that {ages.SAME}")
    after = ages.changed_lines(root, first, ages.SOURCES), ages.changed_lines(root, first, ages.SOURCES_OF["bench"])
    assert after == (before[0] + 1, before[1] + 1) and before[0] - before[1] == 4 and 3 <= before[1] < 20


@pytest.mark.parametrize(
    "content, kind, ageing",
    [
        ({"kind": "bench", "versions": {"vllm": "0.26.0"}}, "bench", {"common", "decode_call"}),
        ({"kind": "bench-sparse"}, "bench-sparse", {"common", "sparse_call"}),
        (
            {"kind": "e2e", "versions": {"sglang": "0.5.23"}},
            "sglang",
            {"common", "decode_call", "sparse_call", "sglang"},
        ),
        (
            {"versions": {"sglang": ""}, "model_shape": {"num_hidden_layers": 61}},
            "sglang dense",
            {"common", "decode_call", "sglang"},
        ),
        (
            {"versions": {"vllm": ""}, "model_shape": {"index_topk": 2048}},
            "vllm",
            {"common", "decode_call", "sparse_call", "vllm"},
        ),
        ({"versions": {"vllm": "0.33.0"}}, "vllm", {"common", "decode_call", "sparse_call", "vllm"}),
        (
            {"what": "soak, DeepSeek-V4", "versions": {"vllm": ""}},
            "vllm DeepSeek-V4",
            {"common", "sparse_call", "vllm"},
        ),
        ({"what": "cases of the sparse call"}, "calls sparse call", {"common", "sparse_call", "compat"}),
        ({"versions": {"torch": "2.14.0"}}, "calls", {"common", "decode_call", "sparse_call", "compat"}),
        ({}, "calls", {"common", "decode_call", "sparse_call", "compat"}),
    ],
)
def test_a_result_ages_by_what_it_depends_on(root, content, kind, ageing):
    run(root)
    first = git(root, "rev-parse", "--short", "HEAD")
    found = set()
    kernels = ("common/common.cuh", "api/decode_call.h", "api/sparse_call.h")
    python = (f"{part}/{part}.py" for part in ("compat", "sglang", "vllm", "lab"))
    for name in (*(f"csrc/{file}" for file in kernels), *(f"etap_backend/{file}" for file in python)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a line\n")
        git(root, "add", ".")
        if ages.age_of(root, first, in_history=True, kind=ages.kind_of(content)).lines:
            found.add(path.stem)
        git(root, "rm", "-qf", str(path))
    assert ages.kind_of(content) == kind and found == ageing


@pytest.mark.parametrize(
    "commit, words",
    [
        (None, "wanted the commit that it was made with, got None"),
        ("unknown", "wanted the commit that it was made with, got unknown"),
        ("{commit}-dirty", "wanted a commit, of a tree without changes, got {commit}-dirty"),
        ("0123456", "commit 0123456 is not in this history"),
    ],
)
def test_a_result_names_a_commit_of_this_history_and_no_tree_with_changes(root, commit, words):
    run(root)
    own = git(root, "rev-parse", "--short", "HEAD")
    path = root / "results" / "wide.json"
    results.write(results.read_json(path) | {"commit": commit and commit.format(commit=own)}, path)
    assert f"results/wide.json: {words.format(commit=own)}\n" in run(root, "--check").stderr


def test_without_a_history_the_check_says_so_and_still_looks_at_the_rest(root, tmp_path):
    run(root)
    path = root / "results" / "wide.json"
    results.write(results.read_json(path) | {"commit": "0123456"}, path)
    run(root)
    git(root, "add", ".")
    git(root, "commit", "-qm", "b")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{root}", str(shallow))
    result = run(shallow, "--check")
    assert result.exit_code == 0 and "this clone is shallow" in result.stderr and "age not checked" in result.stdout
    (root / ".git").rename(tmp_path / "elsewhere")
    result = run(root, "--check")
    assert result.exit_code == 0 and "this source tree is no git checkout" in result.stderr
    results.write(results.read_json(path) | {"commit": "0123456-dirty"}, path)
    assert run(root, "--check").exit_code == 1


def test_a_tree_with_changes_is_never_told_as_its_commit(root, monkeypatch):
    monkeypatch.delenv("ETAP_COMMIT", raising=False)
    git(root, "add", ".")
    git(root, "commit", "-qm", "b")
    clean = provenance.commit_of(root)
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (root / "csrc" / "kernel.cu").write_text("other\n")
    assert provenance.commit_of(root) == f"{clean}-dirty"
    assert provenance.commit_of(root.parent) == provenance.UNKNOWN


# Files


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    results.write({"whole": 1}, path)
    written = Path.write_text

    def cut(self, text, *rest):
        written(self, text[: len(text) // 2], *rest)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="no space left"):
        results.write({"other": 2}, path)
    assert results.read_json(path) == {"whole": 1}


def test_a_results_file_has_a_line_per_field_and_per_row(tmp_path):
    content = {"a": [1, 2], "rows": [{"x": [1]}, {"y": None}], "none": [], "text": "é"}
    results.write(content, tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == content and len(text.splitlines()) == 9


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_result_names_a_path_of_its_machine(path):
    assert re.findall(r"(?<![\w.:/-])/(?:tmp|root|home|work|opt|mnt|usr)/[^\s\"']*", path.read_text()) == []


def test_paths_are_recorded_as_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert provenance.as_from_here(f"serve model {tmp_path}/traces/1 /elsewhere") == "serve model traces/1 /elsewhere"


def test_every_picture_of_the_pages_is_drawn_from_a_result():
    for result, kind, _ in plots.PICTURES.values():
        assert kind in plots.KINDS and (RESULTS / f"{result}.json").is_file()


ABOUT = {"what": "a check", "gpu": "NVIDIA H200", "date": "2026-11-21T23:29:44+00:00", "commit": "5dea719"}


@pytest.mark.parametrize(
    "content, said",
    [
        ({"outcome": "812 passed"}, "812 passed"),
        (
            {"outcome": "x", "failures": ["250 of 256 equal"], "complete": False},
            "**failed**: 250 of 256 equal; **cut short**; x",
        ),
        ({"outcome": "x", "failures": [{"case": "1"}], "complete": True}, "x"),
    ],
)
def test_every_check_says_what_came_out(tmp_path, content, said):
    results.write(ABOUT | {"versions": {"vllm": "0.26.0"}} | content, tmp_path / "a.json")
    seen = "NVIDIA H200, vllm 0.26.0, commit 5dea719, 2026-11-21"
    assert tables.claims(tmp_path).splitlines()[2:] == [f"| a check ([file](../results/a.json)) | {said} | {seen} |"]


def test_checks_that_belong_together_share_a_file(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([ABOUT | {"outcome": "x"}, ABOUT | {"outcome": "y"}]))
    said = [line.split(" | ")[1] for line in tables.claims(tmp_path).splitlines()[2:]]
    assert said == ["x", "y"]


@pytest.mark.parametrize("content", [ABOUT, ABOUT | {"outcome": "x", "commit": ""}, {}, [], [ABOUT]])
def test_a_file_of_no_check_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"a\.json: wanted "):
        tables.claims(tmp_path)

"""What all of the laboratory shares: lengths, stopping, provenance, results files, and the places of a page."""

from __future__ import annotations

import os
import signal
import sys

import pynvml
import pytest
from pydantic import BaseModel

from bench.common import gpus, provenance, results, units
from bench.common.stopping import Stopped, stopping


@pytest.mark.parametrize("text, tokens", [("1", 1), ("4096", 4096), ("4K", 4096), ("4k", 4096), ("1M", 1048576)])
def test_tokens_can_be_given_in_k_and_m(text, tokens):
    assert units.parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "0", "0K", "-1", "1.5", "4KB", "64Q", "1e3", "²", "٤"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ValueError, match="wanted a number of tokens such as 4096, 4K or 1M, got"):
        units.parse_tokens(text)


def test_lengths_are_written_in_k_where_they_are_whole():
    assert [units.in_k(tokens) for tokens in (0, 512, 1024, 1000, 65536)] == ["0", "512", "1K", "1000", "64K"]
    assert units.load_text(16, 16384, 256, "cached") == "16 x 16K/256, cached"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_and_the_handler_comes_back(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"by {number.name}"), stopping(None) as check:
        check()
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_time_limit_stops_a_run():
    with pytest.raises(Stopped, match="time limit of 0 s"), stopping(0) as check:
        check()


class FakeDriver:
    """NVML with two GPUs of 1000 MiB, `used` MiB in use, and processes (pid, MiB) on each."""

    def __init__(self, monkeypatch):
        self.used, self.processes, self.started = [1, 9000], [[], []], 0
        for name in [name for name in dir(self) if name.startswith("nvml")]:
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self):
        self.started += 1

    def nvmlShutdown(self):
        self.started -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return ["GPU-0", "GPU-1"].index(uuid)

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetName(self, handle):
        return f"Fake {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        class Info:
            total, used = 1000 << 20, self.used[handle] << 20

        return Info

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700000

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        if kind == pynvml.NVML_CLOCK_MEM:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 1980

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        class Running:
            def __init__(self, pid, mib):
                self.pid, self.usedGpuMemory = pid, mib and mib << 20

        return [Running(*pair) for pair in self.processes[handle]]


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeDriver(monkeypatch)
    yield fake
    assert fake.started == 0, "NVML was left open"


@pytest.mark.parametrize(
    "visible, names, used",
    [
        (None, ["Fake 0", "Fake 1"], 9001),
        ("1", ["Fake 1"], 9000),
        ("1,0", ["Fake 1", "Fake 0"], 9001),
        ("GPU-0", ["Fake 0"], 1),
        ("0,7,1", ["Fake 0"], 1),
        ("", [], None),
    ],
)
def test_only_visible_gpus_are_asked(driver, monkeypatch, visible, names, used):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in gpus.gpus()] == names and gpus.used_mib() == used
    assert gpus.count() == 2


def test_memory_of_processes_is_that_on_all_gpus_and_unknown_where_none_is_known(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    driver.processes = [[(7, 100), (8, 5)], [(7, 20), (9, None)]]
    assert gpus.process_mib({7}) == 120 and gpus.process_mib({7, 8}) == 125
    assert gpus.process_mib({9}) is None and gpus.process_mib(()) is None


def test_provenance_says_what_made_a_figure(driver, monkeypatch, tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"x")
    monkeypatch.setenv("ETAP_COMMIT", "abc")
    monkeypatch.setattr(sys, "argv", ["/bin/etap", "bench", "a b"])
    made = provenance.provenance("python -m x", packages=("pytest", "no-such"), library=library, note="n")
    assert (made.gpu, made.driver, made.gpus_of_the_machine) == ("Fake 0", "580.1", 2)
    assert made.clocks == ["1980 MHz", "700.00 W"] and made.versions.keys() == {"pytest"}
    assert (made.commit, made.command, made.note) == ("abc", "etap bench 'a b'", "n")
    assert made.library_sha256 == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    monkeypatch.setattr(sys, "argv", ["x.py", "1"])
    assert provenance.provenance("python -m x", versions={"vllm": "1"}).command == "python -m x 1"


@pytest.mark.parametrize(
    "command, shown",
    [
        ("etap e2e x --note 'a b' --gpus 2", "etap e2e x --gpus 2"),
        ("etap e2e x --note=a --skip 'b c'", "etap e2e x --skip 'b c'"),
        ("etap e2e --note", "etap e2e"),
        ("", ""),
    ],
)
def test_a_command_without_its_note(command, shown):
    assert provenance.without_note(command) == shown


def test_without_a_driver_the_gpu_is_unknown(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    made = provenance.provenance("p")
    assert (made.gpu, made.driver, made.gpus_of_the_machine) == ("unknown", "unknown", 0)
    assert gpus.used_mib() is None and gpus.process_mib({1}) is None


def test_the_commit_is_that_of_the_sources(monkeypatch):
    monkeypatch.delenv("ETAP_COMMIT", raising=False)
    assert provenance.commit() not in ("", provenance.UNKNOWN) or not (results.FOLDER.parent / ".git").exists()


class Number(BaseModel):
    value: int


def test_a_file_is_replaced_in_one_step_and_read_as_it_was_written(tmp_path):
    path = tmp_path / "results.json"
    results.write({"value": 1}, path)
    results.write(Number(value=2), path)
    assert results.read(path, Number) == Number(value=2) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text, words", [('{"value": "x"}', "value: "), ("[]", "file: "), ("{", "r.json: "), (None, "r.json")]
)
def test_a_file_of_something_else_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"r\.json: .*{words}" if words.endswith(": ") and words != "r.json: " else words
    ):
        results.read(path, Number)


class Numbers(BaseModel):
    many: list[int]
    one: Number


def test_an_error_is_short_whatever_the_file_has(tmp_path):
    path = tmp_path / "r.json"
    results.write({"many": ["x" * 1000] * 20}, path)
    with pytest.raises(ValueError) as error:
        results.read(path, Numbers)
    assert str(error.value).startswith(f"{path}: many.0: ") and str(error.value).endswith("; and 9 more")
    assert len(str(error.value)) < 3000
    results.write({"many": [], "other": ["x" * 1000] * 20}, path)
    with pytest.raises(ValueError) as error:
        results.read(path, Numbers)
    assert str(error.value) == f"{path}: one: Field required"


def test_an_output_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    results.must_be_writable(tmp_path / "new" / "r.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "new", tmp_path / "file" / "r.json"):
        with pytest.raises(ValueError, match=f"--output: wanted a file that can be written, got {path}"):
            results.must_be_writable(path)


PAGE = "a\n<!-- bench targets: 1 x 1K; 16 x 4K -->\nold\n<!-- /bench -->\nb\n<!-- e2e x.y-z -->\n<!-- /e2e -->\nc\n"


def test_the_places_of_a_page_are_filled_and_nothing_else_changes():
    first, second = results.places(PAGE)
    assert (first.kind, first.name, first.rows, first.body) == ("bench", "targets", ("1 x 1K", "16 x 4K"), "old")
    assert (second.kind, second.name, second.rows, second.body) == ("e2e", "x.y-z", (), "")
    made = results.filled(PAGE, lambda place: f"{place.name}\n\\1")
    assert made == PAGE.replace("old", "targets\n\\1").replace("z -->\n", "z -->\nx.y-z\n\\1\n")
    assert results.filled(made, lambda place: f"{place.name}\n\\1") == made

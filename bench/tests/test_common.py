"""What all of bench shares: lengths, stopping, GPUs, provenance, configuration and results files, and its commands."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from pydantic import BaseModel

from bench import __main__ as commands
from bench.common import configs, gpus, provenance, results, units
from bench.common.stopping import Stopped, stopping


@pytest.mark.parametrize("text, tokens", [("1", 1), ("4096", 4096), ("4K", 4096), ("4k", 4096), ("1M", 1048576)])
def test_tokens_can_be_given_in_k_and_m(text, tokens):
    assert units.parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "0", "0K", "-1", "1.5", "4KB", "64Q", "1e3", "²", "٤"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ValueError, match="^--x: wanted a number of tokens"):
        units.parse_tokens(text, "--x: ")


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


@pytest.fixture
def driver(monkeypatch):
    """NVML with two GPUs of 1000 MiB, 1 and 9000 MiB in use, and the processes (pid, bytes) of each."""

    def unknown(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    opened: list[int] = []
    running = [[(7, 100), (8, 5)], [(7, 20), (9, None)]]
    fake = {
        "Init": lambda: opened.append(1), "Shutdown": opened.pop, "DeviceGetCount": lambda: 2,
        "DeviceGetHandleByIndex": lambda index: index if index < 2 else unknown(),
        "DeviceGetHandleByUUID": ["GPU-0", "GPU-1"].index, "SystemGetDriverVersion": lambda: "580.1",
        "DeviceGetName": lambda gpu: f"Fake {gpu}", "DeviceGetEnforcedPowerLimit": lambda gpu: 700000,
        "DeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=1000 << 20, used=(1, 9000)[gpu] << 20),
        "DeviceGetMaxClockInfo": lambda gpu, kind: unknown() if kind == pynvml.NVML_CLOCK_MEM else 1980,
        "DeviceGetComputeRunningProcesses": lambda gpu: [
            SimpleNamespace(pid=pid, usedGpuMemory=mib and mib << 20) for pid, mib in running[gpu]
        ],
    }  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, function in fake.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    yield
    assert not opened, "NVML was left open"


@pytest.mark.parametrize(
    "visible, names, used",
    [
        (None, ["Fake 0", "Fake 1"], 9001),
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
    assert gpus.process_mib({7}) == 120 and gpus.process_mib({7, 8}) == 125
    assert gpus.process_mib({9}) is None and gpus.process_mib(()) is None


def test_provenance_says_what_made_a_figure(driver, monkeypatch, tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETAP_COMMIT", "abc")
    monkeypatch.setattr(sys, "argv", [commands.__file__, "kernels", "a b", str(library)])
    made = provenance.provenance("python -m x", packages=("pytest", "no-such"), library=library, note="n")
    assert (made.gpu, made.driver, made.gpus_of_the_machine) == ("Fake 0", "580.1", 2)
    assert made.clocks == ["1980 MHz", "700.00 W"] and made.versions.keys() == {"pytest"}
    assert (made.commit, made.command, made.note) == ("abc", "python -m bench kernels 'a b' lib.so", "n")
    assert made.library_sha256 == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    monkeypatch.setattr(sys, "argv", ["x.py", "1"])
    assert provenance.provenance("python -m x", versions={"vllm": "1"}).command == "python -m x 1"


def test_without_a_driver_the_gpu_is_unknown(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    made = provenance.provenance("p")
    assert (made.gpu, made.driver, made.gpus_of_the_machine) == ("unknown", "unknown", 0)
    assert gpus.used_mib() is None and gpus.process_mib({1}) is None


def test_configurations_are_found_by_name_in_any_case_with_an_organisation_and_by_path(tmp_path):
    assert configs.find("grids", "targets").is_file()
    model = configs.find("models", "deepseek-r1", ".json")
    assert configs.find("models", "deepseek-ai/DeepSeek-R1", ".json") == configs.find("models", str(model)) == model
    for name, text in (
        ("targest", "grid: wanted a file or one of .*targets"),
        ("./x.toml", "grid: wanted a file that"),
    ):
        with pytest.raises(ValueError, match=text):
            configs.find("grids", name)


class Number(BaseModel):
    value: int


def test_a_file_is_replaced_in_one_step_and_read_as_it_was_written(tmp_path):
    path = tmp_path / "results.json"
    results.write({"value": 1}, path)
    results.write(Number(value=2), path)
    assert results.read(path, Number) == Number(value=2) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text, key", [('{"value": "x"}', "value: "), ("[]", "file: "), ("{", ""), (None, "")])
def test_a_file_of_something_else_is_refused_by_name_and_key(tmp_path, text, key):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=rf"r\.json.*{key}"):
        results.read(tmp_path / "r.json", Number)


def test_a_file_that_cannot_be_written_is_refused_before_a_run(tmp_path):
    results.must_be_writable(tmp_path / "new" / "r.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.json"):
        with pytest.raises(ValueError, match="--output: wanted a file that can be written"):
            results.must_be_writable(path)


# Commands


def bench(*words: str, isolated: bool = False) -> subprocess.CompletedProcess:
    python = [sys.executable, *(["-S"] if isolated else []), "-m", "bench", *words]
    root = Path(commands.__file__).parents[1]
    return subprocess.run(python, cwd=root, capture_output=True, text=True, timeout=120)


def test_the_commands_are_listed_without_requirements_and_others_refused():
    listed, unknown = bench("--help", isolated=True), bench("kernel", isolated=True)
    assert listed.returncode == 0 and all(name in listed.stdout for name in commands.COMMANDS)
    assert unknown.returncode == 2 and "wanted one of these commands, got kernel" in unknown.stderr


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_is_a_function(name):
    module, function = commands.COMMANDS[name].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_command_reads_its_own_options(capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["report", "--help"])
    assert end.value.code == 0 and "python -m bench report" in capsys.readouterr().out

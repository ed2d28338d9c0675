"""What all of bench shares: lengths, stopping, GPUs, provenance, configuration and results files, and its commands."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import pynvml
import pytest

from bench import __main__ as commands
from bench.common import configs, gpus, provenance, results, units
from bench.common.stopping import Stopped, stopping


def test_tokens_are_written_in_k():
    assert [units.in_k(tokens) for tokens in (0, 512, 1024, 1000, 65536)] == ["0", "512", "1K", "1000", "64K"]
    assert units.load_text(16, 16384, 256, "cached") == "16 x 16K/256, cached"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_and_the_handler_comes_back(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"by {number.name}"), stopping():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_provenance_says_what_made_a_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "gpus", lambda: [gpus.Gpu("H200", 1000, "580.1", ["1980 MHz"])])
    (library := tmp_path / "lib.so").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETAP_COMMIT", "abc")
    monkeypatch.setenv("ETAP_LIBRARY", str(library))
    monkeypatch.setattr(sys, "argv", ["python -m bench x", "a b", str(library)])
    made = provenance.provenance("python -m bench x", "n")
    assert (made["gpu"], made["driver"], made["clocks"]) == ("H200", "580.1", ["1980 MHz"])
    assert (made["commit"], made["command"], made["note"]) == ("abc", "python -m bench x 'a b' lib.so", "n")
    assert "torch" in made["versions"] and made["library_sha256"].startswith("2d711642b726b044")


def test_without_a_driver_the_gpu_is_unknown(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert provenance.provenance("p")["gpu"] == "unknown" and gpus.used_mib() is gpus.process_mib({1}) is None


def test_configurations_are_found_by_name_in_any_case_with_an_organisation_and_by_path():
    model = configs.find("models", "deepseek-r1", ".json")
    assert configs.find("models", "deepseek-ai/DeepSeek-R1", ".json") == configs.find("models", str(model)) == model
    with pytest.raises(ValueError, match="grid: wanted a file or one of .*targets"):
        configs.find("grids", "targest")


def test_a_file_is_replaced_whole_and_one_that_cannot_be_written_is_refused(tmp_path):
    results.must_be_writable(path := tmp_path / "new" / "r.json")
    results.write({"value": 1}, path)
    results.write({"value": 2, "rows": [{"a": 1}]}, path)
    assert results.read_json(path) == {"value": 2, "rows": [{"a": 1}]} and list(path.parent.iterdir()) == [path]
    for wrong in (tmp_path, path / "r.json"):
        with pytest.raises(ValueError, match="--output: wanted a file that can be written"):
            results.must_be_writable(wrong)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_is_a_function(name):
    module, function = commands.COMMANDS[name].split(":")
    assert callable(getattr(importlib.import_module(module), function))

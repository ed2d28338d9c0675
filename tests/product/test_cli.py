"""The command line as a user meets it: through its installed entry point, on a machine without and with a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etap_backend import _library, cli

PROGRAM = "from etap_backend.cli import app; app(prog_name='etap')"


def etap(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment},
        cwd=Path(__file__).parent,  # not the source tree's root, which would hide the installed package
        capture_output=True,
        text=True,
    )


def test_the_demo_on_the_cpu_says_which_path_ran_and_its_error():
    run = etap("demo", "--device", "cpu", "--seed", "1")
    assert run.returncode == 0, run.stderr
    assert "Ran the reference executor in plain torch on the CPU, no GPU kernel (the CPU was asked for)." in run.stdout
    ours, plain = map(
        float, re.search(r"error +(\S+) relative RMSE .* plain bfloat16 torch has (\S+)", run.stdout).groups()
    )
    assert 0 < ours < 2 * plain < 0.1


@pytest.mark.gpu
def test_the_demo_on_a_gpu_runs_the_kernels():
    run = etap("demo")
    assert run.returncode == 0, run.stderr
    assert "Ran the compiled sm_90a kernels on NVIDIA" in run.stdout


def test_without_a_gpu_the_demo_refuses_to_pretend():
    run = etap("demo", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 2 and "torch sees no CUDA device" in run.stderr


def test_the_demo_notices_a_wrong_result(monkeypatch):
    decode = cli.etap_backend.mla_decode

    def wrong(*arguments, **options):
        out, lse = decode(*arguments, **options)
        return out.mul_(1.01), lse

    monkeypatch.setattr(cli.etap_backend, "mla_decode", wrong)
    with pytest.raises(cli.typer.Exit) as caught:
        cli.demo(cli.Device.cpu)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_without_the_library_nothing_is_well(command, tmp_path):
    run = etap(command, **{_library.PATH_VARIABLE: str(tmp_path / "gone.so")})
    assert run.returncode == 1 and "no compiled library at" in run.stdout and "Traceback" not in run.stderr


def test_the_doctor_without_a_gpu_says_what_is_missing_and_what_to_do():
    run = etap("doctor", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1
    assert re.search(
        r"GPU .* broken .* torch sees no CUDA device .* run where nvidia-smi lists a Hopper GPU", run.stdout
    )
    assert re.search(r"library .* ok .* ABI version", run.stdout)


@pytest.mark.gpu
def test_the_doctor_on_a_gpu_is_content():
    run = etap("doctor")
    assert run.returncode == 0, run.stdout
    assert re.search(r"GPU .* ok .* driver .* ok .* library .* ok", run.stdout, re.DOTALL)


def test_an_engine_that_does_not_come_up_is_reported_with_its_own_words():
    assert cli._why_probe_fails("raise RuntimeError('its own words')") == "RuntimeError: its own words"
    assert cli._why_probe_fails("pass") is None


def test_help_names_every_command():
    run = etap("--help")
    assert run.returncode == 0
    for command in ("doctor", "demo", "bench", "plan", "e2e"):
        assert re.search(rf"{command} ", run.stdout)

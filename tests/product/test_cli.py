"""The command line as a user meets it: in a process of its own, on a machine without and with a GPU."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import etap_backend
from etap_backend import _library, cli, demo, doctor, engine_contract

# A shell's background job ignores Ctrl-C, and what it starts inherits that.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from etap_backend.cli import main; sys.exit(main())"
)
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent  # not the source tree's root, which would hide the installed package


def etap(*words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM, *words]
    variables = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, env=variables, cwd=HERE, capture_output=True, text=True)


def test_help_names_every_command():
    run = etap("--help")
    assert run.returncode == 0
    for command in ("doctor", "configs", "demo", "check", *cli.LAB):
        assert re.search(rf"^ +{command}\b", run.stdout, re.MULTILINE)
    assert etap().returncode == 2


def test_help_of_the_checks_names_every_check():
    run = etap("check", "--help")
    assert run.returncode == 0
    assert all(re.search(rf"^ +{name}( |$)", run.stdout, re.MULTILINE) for name in cli.CHECKS)


def test_the_version_is_the_package_s():
    assert etap("--version").stdout == f"etap-backend {etap_backend.__version__}\n"


@pytest.mark.parametrize(
    "words, text",
    [
        (["demo", "--seed", str(2**64)], "--seed: wanted an integer from 0 to 18446744073709551615, got 184467"),
        (["demo", "--seed", "9" * 5000], "--seed: wanted an integer from 0 to 18446744073709551615, got 999"),
        (["demo", "--seed", "one"], "--seed: wanted an integer from 0 to 18446744073709551615, got one"),
        (["demo", "--heads", "0"], "--heads: wanted an integer from 1 to 128, got 0"),
        (["demo", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["doctor", "more"], "unrecognized arguments: more"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["check", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(words, text):
    run = etap(*words)
    assert run.returncode == 2 and text in run.stderr and "Traceback" not in run.stderr
    assert len(run.stderr) < 500


def test_the_demo_on_the_cpu_says_which_path_ran_and_its_error_and_no_time():
    run = etap("demo", "--device", "cpu", "--seed", str(2**64 - 1))
    assert run.returncode == 0, run.stderr
    assert "Ran the reference executor in plain torch on the CPU, no GPU kernel (the CPU was asked for)." in run.stdout
    assert "says nothing about speed" in run.stdout and "us a call" not in run.stdout
    ours, plain = map(
        float, re.search(r"error +(\S+) relative RMSE .* plain bfloat16 torch has (\S+)", run.stdout).groups()
    )
    assert 0 < ours < 2 * plain < 0.1


def etap_into(output, words: tuple[str, ...], unbuffered: str) -> subprocess.CompletedProcess:
    """`etap` with a standard output of one's own, which Python holds back until the end, or not."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, env=variables, cwd=HERE, stdout=output, stderr=subprocess.PIPE, text=True)


WRITING = [(("doctor",), ""), (("configs",), ""), (("configs",), "1"), (("plan", "deepseek-r1", "--gpu", "H200"), "")]


@pytest.mark.parametrize("words, unbuffered", WRITING)
def test_an_output_that_takes_no_more_is_said_in_one_line(words, unbuffered):
    with open("/dev/full", "w") as full:
        run = etap_into(full, words, unbuffered)
    assert run.returncode == os.EX_IOERR
    assert run.stderr == "etap: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words, unbuffered", WRITING)
def test_a_reader_that_leaves_ends_a_command_without_a_word(words, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        run = etap_into(pipe, words, unbuffered)
    # typer and rich, which write for the laboratory, have a status of their own for that.
    assert (run.returncode, run.stderr) == (1 if words[0] in cli.LAB else 141, "")


def test_every_configuration_of_a_server_is_listed_with_its_path_and_purpose():
    lines = etap("configs").stdout.splitlines()
    paths = [Path(line) for line in lines[::2]]
    names = {f"{engine}/{path.name}" for engine in ("vllm", "sglang") for path in ROOT.glob(f"configs/{engine}/*")}
    assert {f"{path.parent.name}/{path.name}" for path in paths} == names and len(paths) == len(names)
    assert all(path.is_file() for path in paths)
    assert all(line.startswith("    ") and len(line.split()) > 5 and "--config" not in line for line in lines[1::2])


@pytest.mark.gpu
def test_the_demo_on_a_gpu_runs_the_kernels():
    run = etap("demo")
    assert run.returncode == 0, run.stderr
    assert "Ran the compiled sm_90a kernels on NVIDIA" in run.stdout
    assert re.search(r"time +[1-9]\d* us a call", run.stdout)


def test_without_a_gpu_the_demo_refuses_to_pretend():
    run = etap("demo", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 2 and "torch sees no CUDA device" in run.stderr


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_the_demo_notices_a_wrong_result(monkeypatch, capsys, factor):
    decode = demo.mla_decode

    def wrong(*arguments, **options):
        out, lse = decode(*arguments, **options)
        return out.mul_(factor), lse

    monkeypatch.setattr(demo, "mla_decode", wrong)
    assert cli.main(["demo", "--device", "cpu"]) == 1
    assert "this result is wrong" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_without_the_library_nothing_is_well(command, tmp_path):
    run = etap(command, **{_library.PATH_VARIABLE: str(tmp_path / "gone.so")})
    assert run.returncode == 1 and "no compiled library at" in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_the_doctor_without_a_gpu_says_what_is_missing_and_what_to_do():
    run = etap("doctor", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1
    assert re.search(r"GPU +broken +torch sees no CUDA device\n +run where nvidia-smi lists a Hopper GPU", run.stdout)
    assert re.search(r"library +ok +ABI version", run.stdout)


@pytest.mark.gpu
def test_the_doctor_on_a_gpu_is_content():
    run = etap("doctor")
    assert run.returncode == 0, run.stdout
    assert re.search(r"GPU +ok .*driver +ok .*library +ok", run.stdout, re.DOTALL)


@pytest.mark.parametrize(
    "version, verdict",
    [
        ("579.99.01", "BROKEN"),
        ("580", "OK"),
        ("580.65.06", "OK"),
        ("590.1", "OK"),
        ("", "BROKEN"),
        ("No devices were found", "BROKEN"),
    ],
)
def test_the_first_driver_that_runs_the_kernels_is_580(monkeypatch, tmp_path, version, verdict):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {version}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.check_driver().verdict is doctor.Verdict[verdict]


@pytest.fixture(scope="module")
def plugin():
    """A plugin for an engine whose distribution is pytest's, so that it is installed here."""
    engine = engine_contract.Engine("Engine", "pytest", "ETAP", oldest="1.0", newest=version("pytest"))
    lists = ("pytest.etap_plugins", "ENGINE_PLUGINS", lambda value: value.split(","))
    return doctor.Plugin(engine, "--attention-backend ETAP", *lists, "pass", "None")


@pytest.fixture
def entry_point(plugin, tmp_path, monkeypatch):
    """A distribution on the path whose entry point `etap` is in the engine's group."""
    folder = tmp_path / "plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{plugin.entry_points}]\netap = plugin:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_engine_is_absent_or_lacks_the_entry_point_or_has_an_active_plugin(plugin, request):
    absent = doctor.check_plugin(replace(plugin, engine=replace(plugin.engine, package="no-such-engine")))
    assert absent.verdict is doctor.Verdict.ABSENT
    assert absent.remedy == "pip install 'no-such-engine>=1.0' to serve with it"
    assert "no entry point etap" in doctor.check_plugin(plugin).found
    request.getfixturevalue("entry_point")
    active = doctor.check_plugin(plugin)
    assert active.verdict is doctor.Verdict.OK and active.found == f"{version('pytest')}, tested, plugin active"
    assert "ENGINE_PLUGINS" in active.remedy and "--attention-backend ETAP selects it" in active.remedy


def test_a_newer_engine_is_not_broken_and_the_doctor_says_that_it_was_not_tested(plugin, entry_point):
    newer = doctor.check_plugin(replace(plugin, engine=replace(plugin.engine, newest="1.5")))
    assert newer.verdict is doctor.Verdict.OK
    assert newer.found == f"{version('pytest')}, not tested (Engine 1.0 to 1.5 were), plugin active"


def test_each_engine_reads_its_list_of_plugins_by_its_own_rule():
    """vLLM 0.26's `VLLM_PLUGINS` in envs.py, SGLang 0.5.17's `SGLANG_PLUGINS` in srt/plugins."""
    lists = {plugin.allow_list: plugin.allowed for plugin in doctor.PLUGINS}
    assert lists["VLLM_PLUGINS"]("") == [""] and lists["VLLM_PLUGINS"]("mine, etap") == ["mine", " etap"]
    assert lists["SGLANG_PLUGINS"]("") is None and lists["SGLANG_PLUGINS"]("mine, etap") == ["mine", "etap"]


@pytest.mark.parametrize("allowed, verdict", [("", "OFF"), ("other", "OFF"), ("etap", "OK"), ("other,etap", "OK")])
def test_a_plugin_that_was_turned_off_is_not_broken(plugin, entry_point, monkeypatch, allowed, verdict):
    monkeypatch.setenv(plugin.allow_list, allowed)
    assert doctor.check_plugin(plugin).verdict is doctor.Verdict[verdict]


@pytest.mark.parametrize(
    "why_not, said",
    [
        ("None", "sparse attention (DeepSeek-V3.2, GLM-5) too: --with-it"),
        ("'it lacks\\na part'", "no sparse attention (DeepSeek-V3.2, GLM-5): it lacks"),
        ("1 / 0", "no sparse attention (DeepSeek-V3.2, GLM-5): ZeroDivisionError: division by zero"),
    ],
)
def test_what_an_engine_says_of_sparse_attention_is_told_and_breaks_nothing(
    plugin, entry_point, monkeypatch, capsys, why_not, said
):
    probe = "print('the engine says this')"
    sparse = replace(plugin, probe=probe, why_not_sparse=why_not, sparse="--with-it")
    finding = doctor.check_plugin(sparse)
    assert finding.verdict is doctor.Verdict.OK and finding.sparse[0] == said
    assert finding.sparse[1] == "no DeepSeek-V4: it is not served in this engine"
    served = doctor.check_plugin(replace(sparse, why_not_v4="None", v4="--so")).sparse
    assert served == (said, "DeepSeek-V4 too: --so")
    monkeypatch.setattr(doctor, "PLUGINS", (sparse,))
    doctor.run()
    printed = capsys.readouterr().out
    assert all(f"{line}\n" in printed for line in finding.sparse)


def test_an_engine_that_does_not_come_up_is_reported_with_its_own_words(plugin, entry_point):
    broken = doctor.check_plugin(replace(plugin, probe="raise RuntimeError('its own words')"))
    assert broken.verdict is doctor.Verdict.BROKEN
    assert broken.found.endswith("not usable: RuntimeError: its own words")


@pytest.mark.parametrize("command, module", [("demo", "torch"), ("plan", "typer"), ("bench", "torch")])
def test_ctrl_c_ends_quietly_also_while_a_library_is_imported(command, module, tmp_path):
    # In place of the library one that says when its import has begun, and takes long.
    (tmp_path / f"{module}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command],
        env=environment, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")


def test_ctrl_c_in_a_program_of_the_laboratory_ends_quietly(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_hand_over", interrupted)
    assert cli.main(["plan"]) == 130


@pytest.mark.parametrize("module, requirement", [("vllm", "etap-backend[vllm]"), ("tvm_ffi", "etap-backend")])
def test_what_a_command_lacks_is_named_with_what_brings_it(monkeypatch, capsys, module, requirement):
    def lacking(*_):
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr(cli, "_hand_over", lacking)
    assert cli.main(["check", "answers"]) == 2
    error = capsys.readouterr().err
    assert error == f"etap check answers needs {module}, which is not installed: pip install '{requirement}'\n"
    assert cli.main(["plan", "kimi-k2"]) == 2
    assert capsys.readouterr().err.startswith(f"etap plan needs {module}, ")


def test_a_missing_part_of_what_is_installed_is_no_matter_of_installing(monkeypatch):
    def lacking(*_):
        raise ModuleNotFoundError("No module named 'torch.part'", name="torch.part")

    monkeypatch.setattr(cli, "_hand_over", lacking)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["bench"])


def test_the_package_offers_its_names_and_no_others():
    program = "import etap_backend; print(all(hasattr(etap_backend, name) for name in etap_backend.__all__))"
    run = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        etap_backend.nothing  # noqa: B018

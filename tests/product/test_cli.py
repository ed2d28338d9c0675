"""The command line as a user meets it, on a machine without and with a GPU."""

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

# A shell's background job ignores Ctrl-C, and its children inherit that.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from etap_backend.cli import main; sys.exit(main())"
)
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent  # the source tree's root would hide the installed package


@pytest.fixture
def etap(capsys):
    """Run `etap` with these words in this process; gives exit status, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(list(words))
        except SystemExit as end:  # argparse
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


def started(words: tuple[str, ...], output, unbuffered: str = "") -> subprocess.CompletedProcess:
    """`etap` as a process, with this standard output."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, env=variables, cwd=HERE, stdout=output, stderr=subprocess.PIPE, text=True)


def test_help_names_every_command(etap):
    status, text, _ = etap("--help")
    assert status == 0
    assert all(re.search(rf"^ +{command}\b", text, re.MULTILINE) for command in cli.COMMANDS)
    assert etap()[0] == 2
    assert etap("--version")[1] == f"etap-backend {etap_backend.__version__}\n"


@pytest.mark.parametrize("command", cli.MOVED)
def test_a_command_that_left_says_where_it_went(etap, command):
    status, _, errors = etap(command, "--help")
    assert status == 2 and "python -m bench" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    "words, text",
    [
        (["demo", "--seed", str(2**64)], "--seed: wanted an integer from 0 to 18446744073709551615, got 184467"),
        (["demo", "--seed", "9" * 5000], "--seed: wanted an integer from 0 to"),
        (["demo", "--heads", "0"], "--heads: wanted an integer from 1 to 128, got 0"),
        (["demo", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["doctor", "more"], "unrecognized arguments: more"),
        (["plan", "--count", "many"], "--count: invalid int value: 'many'"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_impossible_words_are_refused_in_one_line(etap, words, text):
    status, _, errors = etap(*words)
    assert status == 2 and text in errors and "Traceback" not in errors


def test_the_demo_on_the_cpu_says_which_path_ran_and_its_error_and_no_time(etap):
    status, text, errors = etap("demo", "--device", "cpu", "--seed", str(2**64 - 1))
    assert status == 0, errors
    assert "Ran the reference executor in plain torch on the CPU, no GPU kernel (the CPU was asked for)." in text
    assert "says nothing about speed" in text and "us per call" not in text
    found = re.search(r"error +(\S+) relative RMSE .* plain bfloat16 torch has (\S+)", text)
    error, plain = map(float, found.groups())
    assert 0 < error < 2 * plain < 0.1


@pytest.mark.parametrize("words, unbuffered", [(("configs",), ""), (("configs",), "1"), (("plan",), "")])
def test_a_full_disk_is_said_in_one_line(words, unbuffered):
    with open("/dev/full", "w") as full:
        run = started(words, full, unbuffered)
    assert run.returncode == os.EX_IOERR
    assert run.stderr == "etap: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", [("doctor",), ("configs",)])
def test_a_reader_that_leaves_ends_a_command_silently(words):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        run = started(words, pipe)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.parametrize("status, words", [(0, "configs"), (0, "--version"), (2, "nothing"), (2, "plan --tp 0")])
def test_without_outputs_a_command_ends_with_its_status(status, words):
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "etap_backend", *words.split()]
    assert subprocess.run(command, cwd=HERE).returncode == status
    command[2] = 'exec "$@" >&-'
    errors = subprocess.run(command, cwd=HERE, capture_output=True, text=True).stderr
    assert bool(errors) == bool(status) and "Traceback" not in errors


@pytest.mark.parametrize("module", ["etap_backend", "etap_backend.cli"])
def test_the_package_is_its_command(module):
    run = subprocess.run([sys.executable, "-m", module, "configs"], capture_output=True, text=True)
    assert run.returncode == 0 and "vllm serve --config FILE" in run.stdout
    run = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("usage: etap ")


@pytest.mark.parametrize("command, module", [("demo", "torch"), ("plan", "torch")])
def test_ctrl_c_ends_silently_also_while_a_library_is_imported(command, module, tmp_path):
    # This stands for the library, says when its import has begun, and takes long.
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


def test_every_configuration_of_a_server_is_listed_with_its_path(etap):
    status, text, _ = etap("configs")
    paths = [Path(line.strip()) for line in text.splitlines() if line.startswith(" ")]
    wanted = {path for engine in ("vllm", "sglang") for path in (ROOT / "configs" / engine).glob("*.yaml")}
    assert status == 0 and all(path.is_file() for path in paths)
    assert {(path.parent.name, path.name) for path in paths} == {(path.parent.name, path.name) for path in wanted}


@pytest.mark.gpu
def test_the_demo_on_a_gpu_runs_the_kernels(etap):
    status, text, errors = etap("demo")
    assert status == 0, errors
    assert "Ran the compiled sm_90a kernels on NVIDIA" in text
    assert re.search(r"time +[1-9]\d* us per call", text)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_the_demo_refuses_to_pretend(etap, no_gpu):
    status, _, errors = etap("demo", "--device", "cuda")
    assert status == 2 and "torch sees no CUDA device" in errors


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_the_demo_notices_a_wrong_result(monkeypatch, etap, factor):
    decode = demo.mla_decode

    def wrong(*arguments, **options):
        out, lse = decode(*arguments, **options)
        return out.mul_(factor), lse

    monkeypatch.setattr(demo, "mla_decode", wrong)
    status, _, errors = etap("demo", "--device", "cpu")
    assert status == 1 and "this result is wrong" in errors


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "gone.so"))
    _library.library.cache_clear()
    yield
    _library.library.cache_clear()


def test_without_the_library_nothing_is_well(etap, no_library):
    for words in ("demo", "--device", "cpu"), ("doctor",):
        status, text, errors = etap(*words)
        assert status == 1 and "no compiled library at" in text + errors
    status, _, errors = etap("plan", "--batch", "7919")  # no other test asks for it: the library's answers are cached
    assert status == 2 and errors.startswith("etap plan: no compiled library at")


def test_the_doctor_without_a_gpu_says_what_is_missing_and_what_to_do(etap, no_gpu):
    status, text, _ = etap("doctor")
    assert status == 1
    assert re.search(r"GPU +broken +torch sees no CUDA device\n +run where nvidia-smi lists a Hopper GPU", text)
    assert re.search(r"library +ok +ABI version", text)


@pytest.mark.parametrize(
    "value, verdict, found",
    [
        ("", "OK", "ETAP_SHARED_PREFIX=0"),
        ("1", "OK", "ETAP_SHARED_PREFIX=1"),
        ("on", "BROKEN", "wanted 0 or 1, got 'on'"),
    ],
)
def test_the_doctor_says_what_the_plugins_flags_turn_on(monkeypatch, value, verdict, found):
    monkeypatch.setenv("ETAP_SHARED_PREFIX", value)
    finding = doctor.check_flags()
    assert finding.verdict is doctor.Verdict[verdict] and found in finding.found


@pytest.mark.gpu
def test_the_doctor_on_a_gpu_is_content(etap):
    status, text, _ = etap("doctor")
    assert status == 0, text
    assert re.search(r"driver +ok .*GPU +ok .*library +ok", text, re.DOTALL)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes the libcuda.so.1 that programs load: it says this version, and runs this at cuInit."""

    def make(version: int, init: str) -> None:
        source = tmp_path / "libcuda.c"
        source.write_text(
            f"#include <unistd.h>\nint cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n"
            f"int cuInit(unsigned flags) {{ {init}; }}\n"
        )
        library = tmp_path / "libcuda.so.1"
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        for tool in "nvidia-smi", "nvidia-debugdump":  # a driver is not judged by its tools
            (tmp_path / tool).write_text("#!/bin/sh\nsleep 600\n")
            (tmp_path / tool).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(
    "version, status, verdict, found",
    [
        (12080, 0, "BROKEN", "CUDA 12.8"),
        (12090, 100, "BROKEN", "CUDA 12.9"),
        (13000, 0, "OK", "CUDA 13.0"),
        (13010, 100, "OK", "CUDA 13.1"),
        (13000, 804, "BROKEN", "cuInit fails with error 804"),
    ],
)
def test_the_first_driver_that_runs_the_kernels_has_cuda_13(driver, version, status, verdict, found):
    driver(version, f"return {status}")
    finding = doctor.check_driver()
    assert finding.verdict is doctor.Verdict[verdict] and found in finding.found


def test_a_library_that_is_no_driver_is_none(driver, tmp_path):
    driver(13000, "return 0")
    (tmp_path / "libcuda.so.1").write_text("")
    finding = doctor.check_driver()
    assert finding.verdict is doctor.Verdict.BROKEN and "no driver" in finding.found


def test_a_driver_that_hangs_ends_the_doctor(driver, etap, monkeypatch):
    driver(13000, "sleep(600); return 0")
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 2)
    monkeypatch.setattr(doctor, "check_gpu", lambda: pytest.fail("torch would hang"))
    status, text, _ = etap("doctor")
    assert status == 1 and re.search(r"driver +broken +no answer after 2 s\n +reset", text)


def test_a_probe_is_not_waited_for_after_its_time_whatever_it_started(plugin, entry_point, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 2)
    child = f"sleep 20; touch {tmp_path}/waited"
    endless = replace(plugin, probe=f"import subprocess\nsubprocess.run(['sh', '-c', {child!r}])")
    assert doctor.check_plugin(endless).found.endswith("no answer after 2 s")
    assert not (tmp_path / "waited").exists()


@pytest.mark.parametrize("number, reason", [(0, "No module named 'vllm'"), (1, "this is a source tree")])
def test_an_engine_is_imported_from_where_its_command_imports_it(number, reason, tmp_path, monkeypatch):
    """`vllm` is a script; `python -m sglang.launch_server` begins with the working directory."""
    probed = doctor.PLUGINS[number]
    (tmp_path / f"{probed.engine.package}.py").write_text("raise RuntimeError('this is a source tree')")
    monkeypatch.chdir(tmp_path)
    assert reason in doctor._probe(probed)[0]


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
    assert absent.verdict is doctor.Verdict.ABSENT and "pip install 'no-such-engine>=1.0'" in absent.remedy
    assert "no entry point etap" in doctor.check_plugin(plugin).found
    request.getfixturevalue("entry_point")
    active = doctor.check_plugin(plugin)
    assert active.verdict is doctor.Verdict.OK and active.found == f"{version('pytest')}, tested, plugin active"
    assert "ENGINE_PLUGINS" in active.remedy and "--attention-backend ETAP selects it" in active.remedy
    older = doctor.check_plugin(replace(plugin, engine=replace(plugin.engine, oldest="999.0", newest="999.1")))
    assert older.verdict is doctor.Verdict.BROKEN and "supports Engine 999.0 and 999.1" in older.found
    assert "pip install 'pytest>=999.0'" in older.remedy
    newer = doctor.check_plugin(replace(plugin, engine=replace(plugin.engine, newest="1.5")))
    assert newer.verdict is doctor.Verdict.OK and "not tested (Engine 1.0 and 1.5 are)" in newer.found


def test_each_engine_reads_its_list_of_plugins_by_its_own_rule():
    """vLLM's `VLLM_PLUGINS` in envs.py, SGLang's `SGLANG_PLUGINS` in srt/plugins."""
    lists = {plugin.allow_list: plugin.allowed for plugin in doctor.PLUGINS}
    assert lists["VLLM_PLUGINS"]("") == [""] and lists["VLLM_PLUGINS"]("mine, etap") == ["mine", " etap"]
    assert lists["SGLANG_PLUGINS"]("") is None and lists["SGLANG_PLUGINS"]("mine, etap") == ["mine", "etap"]


@pytest.mark.parametrize("allowed, verdict", [("", "OFF"), ("other", "OFF"), ("other,etap", "OK")])
def test_a_plugin_that_was_turned_off_is_not_broken(plugin, entry_point, monkeypatch, allowed, verdict):
    monkeypatch.setenv(plugin.allow_list, allowed)
    assert doctor.check_plugin(plugin).verdict is doctor.Verdict[verdict]


@pytest.mark.parametrize(
    "why_not, line",
    [
        ("None", "sparse attention (DeepSeek-V3.2, GLM-5) too: --with-it"),
        ("'it lacks\\na part'", "no sparse attention (DeepSeek-V3.2, GLM-5): it lacks"),
        ("1 / 0", "no sparse attention (DeepSeek-V3.2, GLM-5): ZeroDivisionError: division by zero"),
    ],
)
def test_sparse_attention_is_reported_and_breaks_nothing(plugin, entry_point, why_not, line):
    probe = "print('the engine says this')"
    sparse = replace(plugin, probe=probe, why_not_sparse=why_not, sparse="--with-it", why_not_v4="None", v4="--so")
    finding = doctor.check_plugin(sparse)
    assert finding.verdict is doctor.Verdict.OK and finding.sparse == (line, "DeepSeek-V4 too: --so")


def test_an_engine_that_does_not_load_is_reported_with_its_own_words(plugin, entry_point):
    broken = doctor.check_plugin(replace(plugin, probe="raise RuntimeError('its own words')"))
    assert broken.verdict is doctor.Verdict.BROKEN
    assert broken.found.endswith("not usable: RuntimeError: its own words")


@pytest.mark.parametrize("verdict, said", [("BROKEN", 2), ("OK", 0)])
def test_an_engine_that_lacks_something_without_a_driver_is_not_blamed(
    plugin, entry_point, monkeypatch, etap, verdict, said
):
    """Engines' libraries link to the driver's: without it they do not load, or not with sparse attention."""
    sparse = replace(plugin, engine=replace(plugin.engine, name="Other"), why_not_sparse="'it lacks a part'")
    broken = replace(plugin, probe="raise RuntimeError('libcuda.so.1')")
    monkeypatch.setattr(doctor, "PLUGINS", (sparse, broken))
    monkeypatch.setattr(doctor, "check_driver", lambda: doctor.Finding(doctor.Verdict[verdict], "", ""))
    assert etap("doctor")[1].count(doctor.DRIVER_FIRST) == said


@pytest.mark.parametrize(
    "module, requirement", [("vllm", "etap-backend[vllm]"), ("tvm_ffi", "etap-backend"), (None, "")]
)
def test_a_missing_module_is_named_with_the_requirement_that_brings_it(monkeypatch, etap, module, requirement):
    def lacking(*_):
        raise ModuleNotFoundError(f"No module named '{module}'", name=module or "torch.part")

    monkeypatch.setattr(cli, "_run", lacking)
    if module is None:  # a part of an installed package is not a matter of installing
        with pytest.raises(ModuleNotFoundError):
            etap("plan")
    else:
        status, _, errors = etap("plan", "kimi-k2")
        assert status == 2 and errors.endswith(f"needs {module}, which is not installed: pip install '{requirement}'\n")


@pytest.mark.parametrize("module", ["torch", "tvm_ffi"])
@pytest.mark.parametrize("error", ["OSError('lib.so: cannot open')", "ImportError('lib.so: undefined symbol')"])
def test_a_requirement_that_does_not_load_is_named_in_one_line(tmp_path, module, error):
    (tmp_path / f"{module}.py").write_text(f"raise {error}")
    if module == "tvm_ffi":
        (tmp_path / "torch.py").write_text("version = __version__ = Tensor = Size = None")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "etap_backend", "doctor"]
    run = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"etap doctor: {module} is installed and does not load: lib.so")


def test_the_package_refuses_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        etap_backend.nothing  # noqa: B018

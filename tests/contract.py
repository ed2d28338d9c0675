"""Runs the engines' contract tests, each version of an engine in its own environment, on a machine that needs no GPU.

    python tests/contract.py [--wheel dist/etap_backend-*.whl] [pytest arguments]
    python tests/contract.py --rest
    python tests/contract.py --engine vllm-0.34.0
    python tests/contract.py --newest
    python tests/contract.py --install [--rest]

Without an option it tests the newest supported version of each engine, with the tests that FIRST names. --rest runs
what that leaves out, in every tested version. --engine runs every test in any version, which is resolved when its
environment is made unless it has a lock file; --newest does so in those that the package index has beyond the tested
ones, and says where there is none. --install makes the environments and tests nothing.

It needs a C compiler with binutils and a package index. Environments lie in .contract/ and share their files, by hard
links, with the installer's cache in build/cache (or UV_CACHE_DIR) and with .venv; one is made anew only when its lock
file changes. Packages that UNUSED matches are left out, because nothing imports them where there is no GPU. Two engines
are tested at a time, each with its output in .contract/ENGINE.log, which is shown where a test failed. An engine that
cannot be installed is skipped with a word, unless ETAP_REQUIRE_ENGINES is 1: then the run fails. Locks are made in
tests/ENGINE/locks by the command in each one's head.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = ROOT / ".contract"
INSTALL_BYTES = 9 * 2**30  # the largest environment takes 8, where it shares no file with another
INSTALL_SECONDS = 1800
TEST_SECONDS = 3600  # of an engine that hangs: the slowest takes 10 minutes of a core
REPORT_SECONDS = 20
AT_ONCE = 2  # engines under test: each is one process that mostly imports
SHOWN_LINES = 100  # of the log of an engine whose tests failed

# What a newcomer doubts first: that the plugin is found, is selected, decodes and leaves prefill to the engine.
FIRST = {
    "vllm": ("registration", "selection", "layer"),
    "sglang": ("registration", "arguments", "layer"),
}
# Compilers, kernels in domain-specific languages and video decoders: 2.2 GB that only a GPU's code paths import.
UNUSED = re.compile(
    r"(nvidia-(cuda-(nvcc|crt|cccl|nvdisasm)|nvvm|mathdx|cutlass-dsl[\w-]*)|tilelang|z3-solver|pynvvideocodec"
    r"|tokenspeed-(triton|mla)|quack-kernels)=="
)


@dataclass(frozen=True)
class Engine:
    """One version of an engine. Its tests, locks and test-only plugin lie in tests/NAME."""

    name: str
    version: str
    libraries: tuple[str, ...]
    """Folders in site-packages whose libraries import the driver's, which a machine without a GPU lacks."""
    variables: tuple[tuple[str, str], ...]
    """What the environment of its tests has besides; CONTRACT stands for the folder of the installation."""

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / str(self)

    @property
    def lock(self) -> Path:
        return self.folder / f"locks/{self}.txt"

    @property
    def fake_hopper(self) -> Path:
        return self.folder / "fake_hopper"


def _vllm(version: str) -> Engine:
    variables = {
        "CUDA_VISIBLE_DEVICES": "",  # with it vLLM keeps Triton, which its worker imports, where there is no driver
        "VLLM_CACHE_ROOT": "CONTRACT/cache",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Engine("vllm", version, ("vllm",), tuple(variables.items()))


def _sglang(version: str) -> Engine:
    variables = {
        "TRITON_INTERPRET": "1",  # SGLang's own kernels fill block tables and write the KV cache
        "SGLANG_CACHE_DIR": "CONTRACT/cache",
        "FLASHINFER_WORKSPACE_BASE": "CONTRACT/cache",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }
    return Engine("sglang", version, ("sgl_kernel", "flash_mla"), tuple(variables.items()))


MAKE = {"vllm": _vllm, "sglang": _sglang}
# The one whose tests take longest begins, so that none of AT_ONCE waits for it in the end.
ENGINES = {str(engine): engine for engine in (_vllm("0.33.0"), _vllm("0.32.0"), _sglang("0.5.22"), _sglang("0.5.23"))}
DEFAULT = ("vllm-0.33.0", "sglang-0.5.23")  # the newest of each


def engine_named(text: str) -> Engine:
    """The engine that `vllm-0.34.0` stands for."""
    name, _, version = text.partition("-")
    if name not in MAKE or not version[:1].isdigit():
        raise argparse.ArgumentTypeError(f"wanted an engine and its version, as {', '.join(ENGINES)}, got {text}")
    return MAKE[name](version)


def newest_engines() -> list[Engine]:
    """Those of the package index that are newer than every tested one."""
    found = []
    for name, make in MAKE.items():
        command = (sys.executable, "-m", "pip", "index", "versions", name)
        listed = run(*command, capture_output=True, text=True, timeout=INSTALL_SECONDS).stdout
        version = re.search(r"^[\w-]+ \(([^)]+)\)", listed, re.MULTILINE)[1]
        tested = [engine.version for engine in ENGINES.values() if engine.name == name]
        newer = all(numbers(version) > numbers(one) for one in tested)
        print(f"{name}: the newest is {version}, {'not' if newer else 'among those'} tested", flush=True)
        found += [make(version)] if newer else []
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))


def run(*command: object, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], check=True, **kwargs)


def find_uv() -> str:
    """Path of uv: this environment's, the machine's, or one installed from the package index."""
    beside = Path(sys.executable).with_name("uv")
    if found := str(beside) if beside.exists() else shutil.which("uv"):
        return found
    tools = ENVIRONMENTS / "uv"
    if not (tools / "bin/uv").exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "uv", timeout=INSTALL_SECONDS)
    return str(tools / "bin/uv")


def stamp_of(engine: Engine) -> str:
    """Hash of everything that an environment is made of, except the package under test."""
    asked = engine.lock.read_bytes() if engine.lock.exists() else str(requirements(engine)).encode()
    parts = [sys.version.encode(), asked, UNUSED.pattern.encode()]
    parts += [path.read_bytes() for path in sorted(engine.fake_hopper.glob("*.*"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def requirements(engine: Engine) -> list[object]:
    """What the installer is told: what a lock file names, or without one this version and what it asks for."""
    if engine.lock.exists():
        lines = engine.lock.read_text().splitlines()
        return ["--no-deps", *(line for line in lines if line[:1] not in ("", "#") and not UNUSED.match(line))]
    bounds = {option: engine.lock.with_name(f"{option}.txt") for option in ("constraints", "overrides")}
    given = [(f"--{option}", file.relative_to(HERE)) for option, file in bounds.items() if file.exists()]
    return [*(part for pair in given for part in pair), f"{engine.name}=={engine.version}", "pytest"]


class NotInstalledError(Exception):
    """An engine's environment cannot be made."""


def free_disk() -> int:
    return shutil.disk_usage(ROOT).free


def make_environment(uv: str, engine: Engine) -> None:
    """Install an engine, unless its environment is there and its stamp the same."""
    environment, stamp = engine.environment, engine.environment / "contract.stamp"
    if stamp.exists() and stamp.read_text() == stamp_of(engine):
        return
    if (free := free_disk()) < INSTALL_BYTES:
        raise NotInstalledError(f"wanted {INSTALL_BYTES >> 30} GiB of free disk, got {free >> 30} GiB")
    asked, start = requirements(engine), time.monotonic()
    print(f"{engine}: downloads and installs {len(asked) - 1} packages", flush=True)
    install = (uv, "pip", "install", "--quiet", "--python", environment)
    try:
        run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
        run(*install, *asked, cwd=HERE, timeout=INSTALL_SECONDS)
        run(*install, "--no-deps", engine.fake_hopper, timeout=INSTALL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{Path(uv).name} failed: {error}") from error
    stamp.write_text(stamp_of(engine))
    print(f"{engine}: installed in {time.monotonic() - start:.0f} s", flush=True)


def install_wheel(uv: str, environment: Path, wheel: Path) -> None:
    # Without dependencies, so that it cannot move what the engine pins.
    install = (uv, "pip", "install", "--quiet", "--no-deps", "--python", environment)
    run(*install, "--reinstall-package", "etap-backend", wheel, timeout=INSTALL_SECONDS)


def build_libcuda(environment: Path, folders: tuple[str, ...]) -> Path:
    """A libcuda.so.1 that has every function these libraries import, and says "no device" (100) to each.

    The engines import those libraries, and they do not load on a machine without a driver.
    """
    folder = environment / "libcuda"
    if (folder / "libcuda.so.1").exists():
        return folder
    (packages,) = environment.glob("lib/python3*/site-packages")
    libraries = sorted(path for name in folders for path in (packages / name).rglob("*.so"))
    symbols = run("nm", "-D", "--undefined-only", *libraries, capture_output=True, text=True).stdout
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w*)$", symbols, re.MULTILINE)))
    if not functions:
        raise RuntimeError(f"no driver function found in {len(libraries)} libraries of {packages}: {folders}")
    folder.mkdir(exist_ok=True)
    source = folder / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
    compiler = os.environ.get("CC", "cc")
    run(compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source)
    return folder


def contract_variables(engine: Engine) -> dict[str, str]:
    foreign = ("VLLM_", "SGLANG_", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    folder = build_libcuda(engine.environment, engine.libraries)
    library_path = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    own = {name: value.replace("CONTRACT", str(engine.environment)) for name, value in engine.variables}
    return variables | own | {
        "ETAP_CONTRACT": engine.name,
        "LD_LIBRARY_PATH": ":".join(library_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the other core is another engine's
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def find_wheel(given: Path | None) -> Path:
    wheels = [given] if given else sorted((ROOT / "dist").glob("etap_backend-*.whl"))
    if len(wheels) != 1 or not wheels[0].is_file():
        sys.exit(f"wheel: wanted --wheel or exactly one in dist/, got {[str(wheel) for wheel in wheels]}")
    return wheels[0].resolve()


def tests_of(engine: Engine, part: str) -> list[Path]:
    """Files of an engine's tests: all, those that FIRST names, or the rest of what FIRST leaves out."""
    everything = sorted(engine.folder.glob("test_contract_*.py"))
    first = [engine.folder / f"test_contract_{name}.py" for name in FIRST[engine.name]]
    if part == "first":
        return first
    tested_before = first if part == "rest" and str(engine) in DEFAULT else []
    return [path for path in everything if path not in tested_before]


def test(engine: Engine, part: str, pytest_arguments: list[str]) -> bool:
    """Run an engine's tests in its environment; print how far they are, and how they ended."""
    # Deprecations are between the engine and its dependencies.
    options = ["-q", "--import-mode=importlib", "-W", "ignore::DeprecationWarning"]
    command = [engine.environment / "bin/pytest", *tests_of(engine, part), *options, *pytest_arguments]
    log, start, told = ENVIRONMENTS / f"{engine}.log", time.monotonic(), None
    with log.open("w") as output:
        variables = contract_variables(engine)
        process = subprocess.Popen(command, cwd=ENVIRONMENTS, env=variables, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and time.monotonic() - start < TEST_SECONDS:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REPORT_SECONDS)
            reached = re.findall(r"\[ *(\d+%)\]$", log.read_text(errors="replace"), re.MULTILINE)[-1:]
            if process.poll() is None and reached and reached != told:
                told = reached
                print(f"{engine}: {told[0]} of its tests after {time.monotonic() - start:.0f} s", flush=True)
        passed = process.poll() == 0
        if process.poll() is None:
            process.kill()
            output.write(f"ended after {TEST_SECONDS} s\n")
    lines = log.read_text(errors="replace").splitlines()
    shown = lines[-1:] if passed else [f"the end of {log}:", *lines[-SHOWN_LINES:]]
    print(f"{engine}, {time.monotonic() - start:.0f} s: " + "\n".join(shown), flush=True)
    return passed


def check_all(engines: list[Engine], part: str, wheel: Path | None, pytest_arguments: list[str]) -> None:
    """Install engines one by one and test them AT_ONCE at a time; without a wheel only install."""
    uv, installing, skipped, failed = find_uv(), threading.Lock(), [], []

    def check(engine: Engine) -> None:
        with installing:
            try:
                make_environment(uv, engine)
            except NotInstalledError as reason:
                skipped.append(f"{engine}: not installed and not tested, {reason}")
                print(skipped[-1], flush=True)
                return
            if wheel:
                install_wheel(uv, engine.environment, wheel)
        if wheel and not test(engine, part, pytest_arguments):
            failed.append(str(engine))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(check, engines))
    if skipped and os.environ.get("ETAP_REQUIRE_ENGINES") == "1":
        sys.exit("\n".join(skipped))
    if failed:
        sys.exit(f"contract tests failed: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to test; default: the only one in dist/")
    parser.add_argument("--rest", action="store_true", help="what a run without an option leaves out, in every version")
    parser.add_argument("--engine", type=engine_named, action="append", help="every test, in this version; repeatable")
    parser.add_argument("--newest", action="store_true", help="every test, in what is newer than the tested versions")
    parser.add_argument("--install", action="store_true", help="make the environments and test nothing")
    arguments, pytest_arguments = parser.parse_known_args()
    if arguments.newest:
        engines = newest_engines()
    else:
        engines = arguments.engine or [ENGINES[name] for name in (ENGINES if arguments.rest else DEFAULT)]
    part = "all" if arguments.engine or arguments.newest else "rest" if arguments.rest else "first"
    ENVIRONMENTS.mkdir(exist_ok=True)
    os.environ.setdefault("UV_CACHE_DIR", str(ROOT / "build/cache"))
    check_all(engines, part, None if arguments.install else find_wheel(arguments.wheel), pytest_arguments)


if __name__ == "__main__":
    main()

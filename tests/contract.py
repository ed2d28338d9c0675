"""Runs the engines' contract tests, each supported version in its own environment, on a machine that needs no GPU.

    python tests/contract.py [--wheel dist/etap_backend-*.whl] [--engine vllm-0.26.0] [pytest arguments]
    python tests/contract.py --newest
    python tests/contract.py --install

Both ends of the tested versions have a lock file. --engine takes any other version too, which is resolved when its
environment is made; --newest those that the package index has beyond the tested ones, and says where there is none.

Needs a C compiler with binutils and a package index. Environments live in .contract/, 20 GB on disk, and are made anew
only when their lock file changes; --install makes them and tests nothing. Two engines are tested at a time, each with
its output in .contract/ENGINE.log, which is shown where a test failed. Where the disk is small they go one by one, and
each makes room for the next; an engine for which there is none even so is skipped, with a word, unless
ETAP_REQUIRE_ENGINES is 1. Locks are made in tests/ENGINE/locks by the command in each one's head.
"""

import argparse
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
INSTALL_BYTES = 11 * 2**30  # the largest environment takes 9.7
CACHED_BYTES = 50 * 2**30  # free disk from which all environments and the installer's cache fit
INSTALL_SECONDS = 1200
TEST_SECONDS = 1200
AT_ONCE = 2  # engines under test: each is one process that mostly imports
SHOWN_LINES = 100  # of the log of an engine whose tests failed


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
    def tests(self) -> Path:
        return HERE / self.name

    @property
    def lock(self) -> Path:
        return self.tests / f"locks/{self}.txt"

    @property
    def fake_hopper(self) -> Path:
        return self.tests / "fake_hopper"


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
ENGINES = {str(engine): engine for engine in (_vllm("0.26.0"), _vllm("0.33.0"), _sglang("0.5.17"), _sglang("0.5.23"))}


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
    """Path of uv: the machine's, or one installed from the package index."""
    if found := shutil.which("uv"):
        return found
    tools = ENVIRONMENTS / "uv"
    if not (tools / "bin/uv").exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "uv", timeout=INSTALL_SECONDS)
    return str(tools / "bin/uv")


def is_made(engine: Engine) -> bool:
    stamp = ENVIRONMENTS / str(engine) / "contract.stamp"
    return stamp.exists() and stamp.read_text() == stamp_of(engine)


def stamp_of(engine: Engine) -> str:
    """Hash of everything that an environment is made of, except the package under test."""
    asked = engine.lock.read_bytes() if engine.lock.exists() else str(requirements(engine)).encode()
    parts = [sys.version.encode(), asked]
    parts += [path.read_bytes() for path in sorted(engine.fake_hopper.glob("*.*"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def requirements(engine: Engine) -> list[object]:
    """What the installer is told: a lock file, or without one this version and what it asks for."""
    if engine.lock.exists():
        return ["--no-deps", "--requirement", engine.lock.relative_to(HERE)]
    bounds = {option: engine.lock.with_name(f"{option}.txt") for option in ("constraints", "overrides")}
    given = [(f"--{option}", file.relative_to(HERE)) for option, file in bounds.items() if file.exists()]
    return [*(part for pair in given for part in pair), f"{engine.name}=={engine.version}", "pytest"]


class NoRoomError(Exception):
    """Too little free disk for an environment."""


def free_disk() -> int:
    return shutil.disk_usage(ROOT).free


def make_room() -> None:
    """Remove environments of other engines until one more fits."""
    for engine in ENGINES.values():
        if free_disk() >= INSTALL_BYTES:
            return
        shutil.rmtree(ENVIRONMENTS / str(engine), ignore_errors=True)
    if free_disk() < INSTALL_BYTES:
        raise NoRoomError(f"wanted {INSTALL_BYTES >> 30} GiB of free disk to install it, got {free_disk() >> 30} GiB")


def make_environment(uv: str, engine: Engine) -> Path:
    """The environment of one engine, installed when its stamp differs."""
    environment = ENVIRONMENTS / str(engine)
    if is_made(engine):
        return environment
    shutil.rmtree(environment, ignore_errors=True)
    # A cache shares its files with the environments: with one, their removal would free nothing.
    cache = () if free_disk() >= CACHED_BYTES else ("--no-cache",)
    make_room()
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    install = (uv, "pip", "install", "--quiet", *cache, "--python", environment)
    run(*install, *requirements(engine), cwd=HERE, timeout=INSTALL_SECONDS)
    run(*install, "--no-deps", engine.fake_hopper, timeout=INSTALL_SECONDS)
    (environment / "contract.stamp").write_text(stamp_of(engine))
    return environment


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


def contract_variables(engine: Engine, environment: Path) -> dict[str, str]:
    foreign = ("VLLM_", "SGLANG_", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    folder = build_libcuda(environment, engine.libraries)
    library_path = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    own = {name: value.replace("CONTRACT", str(environment)) for name, value in engine.variables}
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


def test(engine: Engine, environment: Path, pytest_arguments: list[str]) -> bool:
    """Run an engine's tests in its environment, and print how they ended."""
    # Deprecations are between the engine and its dependencies.
    options = ("-q", "--import-mode=importlib", "-W", "ignore::DeprecationWarning")
    tests = sorted(engine.tests.glob("test_contract_*.py"))
    command = [environment / "bin/pytest", *tests, *options, *pytest_arguments]
    log = ENVIRONMENTS / f"{engine}.log"
    start = time.monotonic()
    with log.open("w") as output:
        variables = contract_variables(engine, environment)
        process = subprocess.Popen(command, cwd=ENVIRONMENTS, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            passed = process.wait(TEST_SECONDS) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            output.write(f"ended after {TEST_SECONDS} s\n")
            passed = False
    lines = log.read_text(errors="replace").splitlines()
    shown = lines[-1:] if passed else [f"the end of {log}:", *lines[-SHOWN_LINES:]]
    print(f"{engine}, {time.monotonic() - start:.0f} s: " + "\n".join(shown), flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to test; default: the only one in dist/")
    parser.add_argument("--engine", type=engine_named, action="append", help=f"default: {', '.join(ENGINES)}")
    parser.add_argument("--newest", action="store_true", help="test what is newer than the tested versions instead")
    parser.add_argument("--install", action="store_true", help="make the environments, where the disk has room for all")
    arguments, pytest_arguments = parser.parse_known_args()
    engines = newest_engines() if arguments.newest else arguments.engine or list(ENGINES.values())
    ENVIRONMENTS.mkdir(exist_ok=True)
    roomy = free_disk() >= CACHED_BYTES or all(map(is_made, engines))
    if arguments.install or not engines:
        for engine in engines if roomy else ():
            make_environment(find_uv(), engine)
        return
    wheel = find_wheel(arguments.wheel)
    uv = find_uv()
    installing = threading.Lock()
    skipped = []

    def check(engine: Engine) -> bool:
        with installing:
            try:
                environment = make_environment(uv, engine)
            except NoRoomError as reason:
                skipped.append(f"{engine}: skipped, {reason}")
                print(skipped[-1], flush=True)
                return True
            install_wheel(uv, environment, wheel)
        return test(engine, environment, pytest_arguments)

    with ThreadPoolExecutor(AT_ONCE if roomy else 1) as pool:
        passed = list(pool.map(check, engines))
    if skipped and os.environ.get("ETAP_REQUIRE_ENGINES") == "1":
        sys.exit("\n".join(skipped))
    if failed := [str(engine) for engine, fine in zip(engines, passed, strict=True) if not fine]:
        sys.exit(f"contract tests failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

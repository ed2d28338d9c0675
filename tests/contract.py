"""Runs the engines' contract tests, each supported version in its own environment, on a machine that needs no GPU.

    python tests/contract.py [--wheel dist/etap_backend-*.whl] [--engine vllm-0.26.0] [pytest arguments]

Needs a C compiler with binutils and a package index. Environments live in .contract/ and are made anew only when their
lock file changes. Where the disk is small each one makes room for the next; an engine for which there is none even so
is skipped, with a word, unless ETAP_REQUIRE_ENGINES is 1. Locks are made in tests/ENGINE/locks by the command in each
one's head.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = ROOT / ".contract"
INSTALL_BYTES = 11 * 2**30  # the largest environment takes 9.7
CACHED_BYTES = 50 * 2**30  # free disk from which all environments and the installer's cache fit
INSTALL_SECONDS = 1200
TEST_SECONDS = 900


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


ENGINES = {str(engine): engine for engine in (_vllm("0.26.0"), _vllm("0.33.0"), _sglang("0.5.17"), _sglang("0.5.23"))}


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


def stamp_of(engine: Engine) -> str:
    """Hash of everything that an environment is made of, except the package under test."""
    parts = [sys.version.encode(), engine.lock.read_bytes()]
    parts += [path.read_bytes() for path in sorted(engine.fake_hopper.glob("*.*"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


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
    stamp = environment / "contract.stamp"
    if stamp.exists() and stamp.read_text() == stamp_of(engine):
        return environment
    shutil.rmtree(environment, ignore_errors=True)
    # A cache shares its files with the environments: with one, their removal would free nothing.
    cache = () if free_disk() >= CACHED_BYTES else ("--no-cache",)
    make_room()
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    install = (uv, "pip", "install", "--quiet", "--no-deps", *cache, "--python", environment)
    run(*install, "--requirement", engine.lock, timeout=INSTALL_SECONDS)
    run(*install, engine.fake_hopper, timeout=INSTALL_SECONDS)
    stamp.write_text(stamp_of(engine))
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
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def find_wheel(given: Path | None) -> Path:
    wheels = [given] if given else sorted((ROOT / "dist").glob("etap_backend-*.whl"))
    if len(wheels) != 1 or not wheels[0].is_file():
        sys.exit(f"wheel: wanted --wheel or exactly one in dist/, got {[str(wheel) for wheel in wheels]}")
    return wheels[0].resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to test; default: the only one in dist/")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="an engine's version; default: all")
    arguments, pytest_arguments = parser.parse_known_args()
    wheel = find_wheel(arguments.wheel)
    ENVIRONMENTS.mkdir(exist_ok=True)
    uv = find_uv()
    failed, skipped = [], []
    for name in arguments.engine or ENGINES:
        engine = ENGINES[name]
        start = time.monotonic()
        try:
            environment = make_environment(uv, engine)
        except NoRoomError as reason:
            skipped.append(f"{name}: skipped, {reason}")
            print(skipped[-1], flush=True)
            continue
        install_wheel(uv, environment, wheel)
        installed = time.monotonic()
        # Deprecations are between the engine and its dependencies.
        options = ("--import-mode=importlib", "-W", "ignore::DeprecationWarning")
        tests = sorted(engine.tests.glob("test_contract_*.py"))
        command = [environment / "bin/pytest", *tests, *options, *pytest_arguments]
        variables = contract_variables(engine, environment)
        outcome = subprocess.run(command, cwd=ENVIRONMENTS, env=variables, timeout=TEST_SECONDS)
        done = time.monotonic()
        print(f"{engine}: install {installed - start:.0f} s, tests {done - installed:.0f} s", flush=True)
        if outcome.returncode:
            failed.append(name)
    if skipped and os.environ.get("ETAP_REQUIRE_ENGINES") == "1":
        sys.exit("\n".join(skipped))
    if failed:
        sys.exit(f"contract tests failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

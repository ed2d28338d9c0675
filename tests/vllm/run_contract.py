"""Runs the vLLM contract tests, each supported vLLM in its own environment, on a machine that needs no GPU.

    python tests/vllm/run_contract.py [--wheel dist/etap_backend-*.whl] [--engine 0.26.0] [pytest arguments]

Needs a C compiler with binutils and a package index. Environments live in .contract/ and are made anew only when their
lock file changes. Locks are made in tests/vllm/locks by the command in each one's head.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".contract"
ENGINES = ("0.26.0", "0.33.0")
INSTALL_BYTES = 12 * 2**30
INSTALL_SECONDS = 1200
TEST_SECONDS = 900


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


def stamp_of(lock: Path) -> str:
    """Hash of everything that an environment is made of, except the package under test."""
    parts = [sys.version.encode(), lock.read_bytes()]
    parts += [path.read_bytes() for path in sorted((HERE / "fake_hopper").glob("*.*"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_environment(uv: str, engine: str) -> Path:
    """The environment of one vLLM, installed when its stamp differs."""
    environment = ENVIRONMENTS / f"vllm-{engine}"
    lock = HERE / f"locks/vllm-{engine}.txt"
    stamp = environment / "contract.stamp"
    if stamp.exists() and stamp.read_text() == stamp_of(lock):
        return environment
    free = shutil.disk_usage(ROOT).free
    if free < INSTALL_BYTES:
        sys.exit(f"vLLM {engine}: wanted {INSTALL_BYTES >> 30} GiB of free disk to install it, got {free >> 30} GiB")
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    install = (uv, "pip", "install", "--quiet", "--no-deps", "--python", environment)
    run(*install, "--requirement", lock, timeout=INSTALL_SECONDS)
    run(*install, HERE / "fake_hopper", timeout=INSTALL_SECONDS)
    stamp.write_text(stamp_of(lock))
    return environment


def install_wheel(uv: str, environment: Path, wheel: Path) -> None:
    # Without dependencies, so that it cannot move what the engine pins.
    install = (uv, "pip", "install", "--quiet", "--no-deps", "--python", environment)
    run(*install, "--reinstall-package", "etap-backend", wheel, timeout=INSTALL_SECONDS)


def build_libcuda(environment: Path) -> Path:
    """A libcuda.so.1 that has every function vLLM's libraries import, and says "no device" (100) to each.

    vLLM's CUDA platform imports those libraries, and they do not load on a machine without a driver.
    """
    folder = environment / "libcuda"
    if (folder / "libcuda.so.1").exists():
        return folder
    (packages,) = environment.glob("lib/python3*/site-packages")
    libraries = sorted((packages / "vllm").rglob("*.so"))
    symbols = run("nm", "-D", "--undefined-only", *libraries, capture_output=True, text=True).stdout
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w*)$", symbols, re.MULTILINE)))
    if not functions:
        raise RuntimeError(f"no driver function found in {len(libraries)} libraries of {packages / 'vllm'}")
    folder.mkdir(exist_ok=True)
    source = folder / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
    compiler = os.environ.get("CC", "cc")
    run(compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source)
    return folder


def contract_variables(environment: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    library_path = [str(build_libcuda(environment)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return variables | {
        "ETAP_CONTRACT": "vllm",
        "LD_LIBRARY_PATH": ":".join(library_path),
        "CUDA_VISIBLE_DEVICES": "",  # with it vLLM keeps Triton, which its worker imports, where there is no driver
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(environment / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def find_wheel(given: Path | None) -> Path:
    wheels = [given] if given else sorted((ROOT / "dist").glob("etap_backend-*.whl"))
    if len(wheels) != 1 or not wheels[0].is_file():
        sys.exit(f"wheel: wanted --wheel or exactly one in dist/, got {[str(wheel) for wheel in wheels]}")
    return wheels[0].resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to test; default: the only one in dist/")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="a vLLM version; default: all")
    arguments, pytest_arguments = parser.parse_known_args()
    wheel = find_wheel(arguments.wheel)
    ENVIRONMENTS.mkdir(exist_ok=True)
    uv = find_uv()
    failed = []
    for engine in arguments.engine or ENGINES:
        start = time.monotonic()
        environment = make_environment(uv, engine)
        install_wheel(uv, environment, wheel)
        installed = time.monotonic()
        # Deprecations are between the engine and its dependencies.
        options = ("--import-mode=importlib", "-W", "ignore::DeprecationWarning")
        tests = [environment / "bin/pytest", *sorted(HERE.glob("test_contract_*.py")), *options, *pytest_arguments]
        outcome = subprocess.run(tests, cwd=ENVIRONMENTS, env=contract_variables(environment), timeout=TEST_SECONDS)
        done = time.monotonic()
        print(f"vLLM {engine}: install {installed - start:.0f} s, tests {done - installed:.0f} s", flush=True)
        if outcome.returncode:
            failed.append(engine)
    if failed:
        sys.exit(f"vLLM contract tests failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""The wheel of `make wheel`: what is in it, whom it fits, and that it promises no more than its library holds."""

import configparser
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

import etap_backend
from etap_backend import cli, doctor

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
LIBRARY = "etap_backend/lib/libetap_backend.so"


@pytest.fixture(scope="module")
def wheel_path() -> Path:
    (path,) = DIST.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_path):
    with zipfile.ZipFile(wheel_path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel.read(f"etap_backend-{etap_backend.__version__}.dist-info/METADATA"))


def newest_glibc(wheel) -> Version:
    """The newest glibc whose symbols the library asks for."""
    with wheel.open(LIBRARY) as file:
        sections = ELFFile(file).iter_sections()
        needed = next(section for section in sections if isinstance(section, GNUVerNeedSection))
        names = [aux.name for _, auxiliaries in needed.iter_versions() for aux in auxiliaries]
    return max(Version(name.removeprefix("GLIBC_")) for name in names if name.startswith("GLIBC_"))


def test_one_wheel_serves_every_python_and_every_torch(wheel_path):
    name, version, _, tags = parse_wheel_filename(wheel_path.name)
    assert (name, str(version)) == ("etap-backend", etap_backend.__version__)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")}


def test_its_platform_is_the_oldest_glibc_that_its_library_loads_with(wheel_path, wheel):
    platforms = {tag.platform for tag in parse_wheel_filename(wheel_path.name)[3]}
    oldest = min(Version(".".join(re.match(r"manylinux_(\d+)_(\d+)_x86_64", name).groups())) for name in platforms)
    assert oldest >= newest_glibc(wheel)
    assert oldest <= Version("2.34"), "Ubuntu 22.04 and RHEL 9 must be served"


def test_it_holds_the_package_and_one_library(wheel):
    names = [name for name in wheel.namelist() if not name.endswith("/")]
    assert [name for name in names if ".so" in name] == [LIBRARY]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "etap_backend").rglob("*.py")}
    sources |= {f"etap_backend/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.*") if path.is_file()}
    packaged = {name for name in names if not name.startswith("etap_backend-")} - {LIBRARY}
    assert packaged == sources
    assert wheel.getinfo(LIBRARY).file_size < 8 * 2**20


def requirements_of(metadata, extra: str | None) -> dict[str, Requirement]:
    """What the wheel requires beside the product's own requirements when this extra is asked for, on every Python."""
    found = {}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        marker = str(requirement.marker or "")
        if (f'extra == "{extra}"' in marker) if extra else ("extra" not in marker):
            found[requirement.name] = requirement
    return found


def test_the_product_requires_torch_unpinned_and_tvm_ffi_and_no_more(metadata):
    requirements = requirements_of(metadata, None)
    assert set(requirements) == {"apache-tvm-ffi", "torch"}
    assert not requirements["torch"].specifier
    tvm_ffi = requirements["apache-tvm-ffi"].specifier
    versions = ("0.1.9", "0.1.10", "0.1.13", "0.2")
    assert [version in tvm_ffi for version in versions] == [False, True, True, False]
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_command_line_knows_what_the_laboratory_s_extra_installs(metadata):
    names = requirements_of(metadata, "lab").keys() - {"tomli"}  # which only Python 3.10 needs
    brought = importlib.metadata.packages_distributions()
    found = [canonicalize_name(name) for module in cli.LAB_MODULES for name in brought.get(module, ())]
    assert names == set(found) - {"tomli"} and len(cli.LAB_MODULES) == len(names) + 1


def test_the_doctor_asks_for_the_engines_that_the_wheel_supports(metadata):
    for plugin in doctor.PLUGINS:
        (requirement,) = requirements_of(metadata, plugin.engine.package).values()
        assert str(requirement.specifier) == f">={plugin.engine.oldest}"


def closure(*names: str) -> set[str]:
    """Distributions that these need on this machine, themselves among them."""
    found: set[str] = set()
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(canonicalize_name(requirement.name))
    return found


@pytest.fixture(scope="module")
def bare_environment(wheel_path, tmp_path_factory) -> Path:
    """An environment with torch, tvm_ffi, what they need, and the wheel without its dependencies."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in closure("torch", "apache-tvm-ffi"):
        # Links, because torch takes gigabytes.
        for file in importlib.metadata.files(name):
            top = Path(file.parts[0])
            if top.name != ".." and not (packages / top).exists():
                (packages / top).symlink_to(Path(file.locate()).parents[len(file.parts) - 1] / top)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, wheel_path], check=True)
    return folder


def etap(environment: Path, *words: str) -> subprocess.CompletedProcess:
    """`etap WORDS` as that environment installed it, with nothing of this process's own environment."""
    variables = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [environment / "bin/etap", *words], env=variables, cwd=environment, capture_output=True, text=True
    )


def test_beside_torch_and_tvm_ffi_the_wheel_needs_nothing_for_its_own_commands(bare_environment):
    doctor_run = etap(bare_environment, "doctor")
    assert re.search(rf"library +ok .*{re.escape(str(bare_environment))}", doctor_run.stdout), doctor_run.stderr
    demo_run = etap(bare_environment, "demo")
    assert demo_run.returncode == 0 and "Ran the reference executor" in demo_run.stdout, demo_run.stderr
    assert doctor_run.stderr + demo_run.stderr == "", "such as a warning of a missing numpy"


@pytest.mark.parametrize("words", [(name,) for name in cli.LAB] + [("check", name) for name in cli.CHECKS])
def test_without_its_extra_a_command_says_what_to_install(bare_environment, words):
    run = etap(bare_environment, *words, "--help")
    assert run.returncode == 2 and run.stderr.endswith("not installed: pip install 'etap-backend[lab]'\n")


def test_its_entry_points_name_what_is_in_it(wheel):
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(f"etap_backend-{etap_backend.__version__}.dist-info/entry_points.txt").decode())
    assert parser["console_scripts"]["etap"] == "etap_backend.cli:main"
    assert parser["vllm.general_plugins"]["etap"] == "etap_backend.vllm:register"
    assert parser["sglang.srt.plugins"]["etap"] == "etap_backend.sglang:register"
    for group in parser.sections():
        for target in parser[group].values():
            module = target.split(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist())

"""The wheel of `make wheel`: what is in it, whom it fits, and that it promises no more than its library holds."""

import configparser
import email
import re
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

import etap_backend

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
    assert wheel.getinfo(LIBRARY).file_size < 32 * 2**20


def test_it_is_torch_free_at_build_time_and_unpinned_at_run_time(metadata):
    requirements = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist")) if not r.marker}
    assert set(requirements) == {"apache-tvm-ffi", "torch", "typer", "rich", "pydantic"}
    assert not requirements["torch"].specifier
    tvm_ffi = requirements["apache-tvm-ffi"].specifier
    assert ["0.1.10" in tvm_ffi, "0.1.13" in tvm_ffi, "0.1.9" in tvm_ffi, "0.2" in tvm_ffi] == [
        True,
        True,
        False,
        False,
    ]
    assert metadata["Requires-Python"] == ">=3.10"


def test_its_entry_points_name_what_is_in_it(wheel):
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(f"etap_backend-{etap_backend.__version__}.dist-info/entry_points.txt").decode())
    assert parser["console_scripts"]["etap"] == "etap_backend.cli:app"
    assert parser["vllm.general_plugins"]["etap"] == "etap_backend.vllm:register"
    assert parser["sglang.srt.plugins"]["etap"] == "etap_backend.sglang:register"
    for group in parser.sections():
        for target in parser[group].values():
            module = target.split(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist())

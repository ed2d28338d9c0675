"""The wheel of `make wheel`: its contents, the platforms that it fits, and what it needs."""

import configparser
import email
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
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
from etap_backend import doctor

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


def information(wheel, name: str) -> str:
    """A file of the wheel's dist-info."""
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_string(information(wheel, "METADATA"))


def newest_glibc(wheel) -> Version:
    """The newest glibc whose symbols the library asks for."""
    with wheel.open(LIBRARY) as file:
        sections = ELFFile(file).iter_sections()
        needed = next(section for section in sections if isinstance(section, GNUVerNeedSection))
        names = [aux.name for _, auxiliaries in needed.iter_versions() for aux in auxiliaries]
    return max(Version(name.removeprefix("GLIBC_")) for name in names if name.startswith("GLIBC_"))


def test_one_wheel_serves_every_python_and_every_torch(wheel_path):
    name, version, _, tags = parse_wheel_filename(wheel_path.name)
    assert (name, version.base_version) == ("etap-backend", Version(etap_backend.__version__).base_version)
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
    sources |= {"etap_backend/_build.py", "etap_backend/py.typed"}
    sources |= {f"etap_backend/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.*") if path.is_file()}
    packaged = {name for name in names if not name.startswith("etap_backend-")} - {LIBRARY}
    assert packaged == sources
    assert wheel.getinfo(LIBRARY).file_size < 3 * 2**20


def test_its_version_names_its_build(wheel, wheel_path, metadata):
    version = str(parse_wheel_filename(wheel_path.name)[1])
    assert metadata["Version"] == version
    assert f'VERSION = "{version}"' in wheel.read("etap_backend/_build.py").decode()
    assert Version(version).local or not Version(version).is_prerelease, "only a release has no build behind it"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A source tree of one version under git, in which wheel_version.py runs."""
    files = {"etap_backend/__init__.py": '__version__ = "1.2.dev0"\n', "csrc/x.cu": "", "pyproject.toml": ""}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    return tmp_path


def git(*words: str) -> str:
    who = ("-c", "user.name=one", "-c", "user.email=one@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], capture_output=True, text=True, check=True).stdout.strip()


def build_version() -> str:
    specification = importlib.util.spec_from_file_location("wheel_version", ROOT / "csrc/cmake/wheel_version.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.dynamic_metadata("version", {})


def test_no_two_builds_have_the_same_version(checkout):
    clean = build_version()
    assert re.fullmatch(rf"1\.2\.dev0\+g{git('rev-parse', '--short=9', 'HEAD')}", clean)
    (checkout / "csrc/x.cu").write_text("another")
    changed = build_version()
    (checkout / "csrc/x.cu").write_text("yet another")
    changed_again = build_version()
    git("commit", "-qam", "second")
    committed = build_version()
    shutil.rmtree(checkout / ".git")
    assert build_version() == changed_again, "the same sources, wherever they are"
    assert len({clean, changed, changed_again, committed}) == 4
    assert all(Version(version).public == "1.2.dev0" for version in (clean, changed, changed_again, committed))


def test_a_tagged_commit_builds_the_release(checkout):
    git("tag", "v1.2.dev0")
    assert build_version() == "1.2.dev0"
    (checkout / "PKG-INFO").write_text("Metadata-Version: 2.4\nVersion: 1.2.dev0+gabc\n")
    assert build_version() == "1.2.dev0+gabc", "a source distribution keeps its own"


def test_the_licenses_of_what_the_library_contains_travel_with_it(wheel):
    texts = {name: information(wheel, f"licenses/{name}") for name in ("LICENSE", "csrc/THIRD_PARTY_NOTICES")}
    assert "Apache License" in texts["LICENSE"] and "[name of copyright owner]" not in texts["LICENSE"]
    for holder in ("CUTLASS", "CUB", "libcu++", "TVM FFI", "CUDA Runtime", "2017 - 2025 NVIDIA CORPORATION"):
        assert holder in texts["csrc/THIRD_PARTY_NOTICES"]


def test_the_readme_of_an_index_has_no_link_that_leads_nowhere(metadata):
    text = metadata.get_payload()
    assert text.startswith("\n# etap-backend") or text.startswith("# etap-backend")
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == [] and "https://arxiv.org" in text


@pytest.mark.exhaustive
def test_a_source_distribution_is_built_and_holds_what_a_wheel_is_made_of(tmp_path):
    tree = tmp_path / "tree"  # without environments, of whose files each would be looked at
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, tree]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = git("-C", str(ROOT), "ls-files", "csrc", "etap_backend", "configs", "LICENSE", "README.md").splitlines()
    assert set(tracked) <= names
    assert not any(name.startswith(("bench/", "tests/", "results/", "docs/")) for name in names)
    assert not any(name.endswith(".so") for name in names)


def requirements_of(metadata, extra: str | None) -> dict[str, Requirement]:
    """The requirements that this extra adds; the wheel's own requirements without one."""
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


def test_the_extras_are_the_engines(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {plugin.engine.package for plugin in doctor.PLUGINS}


def test_the_doctor_asks_for_the_engines_that_the_wheel_supports(metadata):
    for plugin in doctor.PLUGINS:
        (requirement,) = requirements_of(metadata, plugin.engine.package).values()
        assert str(requirement.specifier) == f">={plugin.engine.oldest}"


def closure(*names: str) -> set[str]:
    """These distributions and those that they need on this machine."""
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
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", wheel_path], check=True)
    return folder


def etap(environment: Path, *words: str) -> subprocess.CompletedProcess:
    """`etap WORDS` as that environment installed it, with nothing of this process's own environment."""
    variables = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [environment / "bin/etap", *words], env=variables, cwd=environment, capture_output=True, text=True
    )


@pytest.mark.exhaustive
def test_beside_torch_and_tvm_ffi_the_wheel_needs_nothing_for_its_own_commands(bare_environment):
    doctor_run = etap(bare_environment, "doctor")
    assert re.search(rf"library +ok .*{re.escape(str(bare_environment))}", doctor_run.stdout), doctor_run.stderr
    demo_run, plan_run = etap(bare_environment, "demo"), etap(bare_environment, "plan", "deepseek-v3.2")
    assert demo_run.returncode == 0 and "Ran the reference executor" in demo_run.stdout, demo_run.stderr
    assert plan_run.returncode == 0 and "With ETAP a step gives" in plan_run.stdout, plan_run.stderr
    assert etap(bare_environment, "configs").stdout.count(str(bare_environment)) == 32
    assert doctor_run.stderr + demo_run.stderr + plan_run.stderr == "", "such as a warning of a missing numpy"
    python = [bare_environment / "bin/python", "-m", "etap_backend", "demo"]  # imports the sources in this checkout
    run = subprocess.run(python, env={"PATH": os.environ["PATH"]}, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_its_entry_points_name_what_is_in_it(wheel):
    parser = configparser.ConfigParser()
    parser.read_string(information(wheel, "entry_points.txt"))
    assert parser["console_scripts"]["etap"] == "etap_backend.cli:main"
    assert parser["vllm.general_plugins"]["etap"] == "etap_backend.vllm.registration:register"
    assert parser["sglang.srt.plugins"]["etap"] == "etap_backend.sglang:register"
    for group in parser.sections():
        for target in parser[group].values():
            module = target.split(":")[0].replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & set(wheel.namelist())

"""The compiled library from outside: what it needs, what it offers, what is in its kernels, and who may load it."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection

import etap_backend
from etap_backend import _library, doctor
from support import sass

SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+")
SYSTEM_VERSIONS = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+")
WEAK_HOOKS = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
BOUND = {
    *("abi_version", "arguments", "constants", "decode_shape", "stack_shape"),
    *("build_schedule", "build_shared_schedule", "check_decode", "decode", "decode_launches"),
    *("check_sparse_decode", "sparse_decode", "sparse_decode_launches"),
    *("sparse_decode_shape", "sparse_splits"),
    *("check_top_k", "top_k", "top_k_launch"),
}


@cache
def dynamic_symbols() -> dict[str, str | None]:
    """Every dynamic symbol with the version it is imported in ("" for none), or None where the library defines it."""
    with _library.library_path().open("rb") as file:
        elf = ELFFile(file)
        sections = list(elf.iter_sections())
        needed = next(section for section in sections if isinstance(section, GNUVerNeedSection))
        of_symbol = next(section for section in sections if isinstance(section, GNUVerSymSection))
        names = {aux["vna_other"]: aux.name for _, auxiliaries in needed.iter_versions() for aux in auxiliaries}
        symbols = {}
        for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                symbols[symbol.name] = None
            elif symbol.name:
                symbols[symbol.name] = names.get(of_symbol.get_symbol(index)["ndx"], "")
        return symbols


@cache
def cuobjdump(*options: str) -> str:
    return sass.cuobjdump(_library.library_path(), *options)


def kernels() -> dict[str, str]:
    """SASS of each kernel by its mangled name."""
    return sass.kernels(cuobjdump("-sass"))


def test_it_imports_nothing_but_the_system_and_tvm_ffi():
    foreign = [
        name
        for name, version in dynamic_symbols().items()
        if version is not None
        and not SYSTEM_VERSIONS.fullmatch(version)
        and not name.startswith("TVMFFI")
        and name not in WEAK_HOOKS
    ]
    assert foreign == []


def test_it_needs_no_library_but_the_system():
    with _library.library_path().open("rb") as file:
        dynamic = next(s for s in ELFFile(file).iter_sections() if isinstance(s, DynamicSection))
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    assert needed and [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []


def test_it_exports_the_bound_functions_and_nothing_else():
    defined = {name for name, version in dynamic_symbols().items() if version is None and name}
    assert defined == {f"__tvm_ffi_{name}" for name in BOUND}


def test_it_holds_code_for_sm_90a_only():
    architectures = set(re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("-lelf")))
    assert architectures == {"sm_90a"}


def columns_of(kernel: str) -> set[int]:
    """WGMMA's N in the kernels of a name: of whole tiles and, but for float16, of parts; with rope and without."""
    found = [sass for name, sass in kernels().items() if re.search(kernel, name)]
    whole_tiles_alone = re.match(r".*1[01](transposed|query_major)6Traits.*half_t", kernel)
    assert len(found) == (1 if whole_tiles_alone else 2)
    (columns,) = {frozenset(map(int, re.findall(r"[HQ]GMMA\.64x(\d+)x", sass))) for sass in found}
    return set(columns)


@pytest.mark.parametrize("row_tile", [8, 16, 32])
@pytest.mark.parametrize(
    "traits",
    [
        "10transposed6Traits.*bfloat16_tEL",
        "10transposed6Traits.*half_tEL",
        "14transposed_fp86Traits.*half_tEL",
        "14transposed_fp86Traits.*float_e4m3_tEL",
        "6sparse14GatheredTraitsINS_10transposed6Traits.*bfloat16_tEL",
    ],
)
def test_each_transposed_kernel_multiplies_on_the_tensor_cores_with_its_rows_on_n(traits, row_tile):
    columns = columns_of(rf"decode_kernelINS_{traits}i{row_tile}E")
    assert max(columns) == row_tile, "M is the 64 tokens of a tile, N the query rows and no more"


@pytest.mark.parametrize("traits", ["14transposed_fp817SharedTilesTraits", "11mixed_major6Traits"])
def test_64_rows_of_an_fp8_cache_are_on_n(traits):
    assert max(columns_of(rf"decode_kernelINS_{traits}E")) == 64


@pytest.mark.parametrize(
    "traits",
    [
        "11query_major6Traits.*half_t",
        "11query_major6Traits.*bfloat16_t",
        "6sparse14GatheredTraitsINS_11query_major6Traits.*bfloat16_t",
    ],
)
def test_64_rows_of_a_16_bit_cache_are_on_m(traits):
    assert columns_of(rf"decode_kernelINS_{traits}") == {64, 128}, "N is a tile's tokens, and 128 value dims"


def test_no_kernel_spills_or_has_a_stack():
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", cuobjdump("-res-usage"))
    assert {name for name, *_ in usage} == set(kernels())
    assert [name for name, _, stack, local in usage if (stack, local) != ("0", "0")] == []
    assert [name for name, sass in kernels().items() if re.search(r"\b(STL|LDL)\b", sass)] == []


def test_importing_the_package_neither_loads_it_nor_touches_cuda():
    program = (
        "import etap_backend, torch; from etap_backend._library import library;"
        "assert library.cache_info().currsize == 0; assert not torch.cuda.is_initialized()"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=Path(__file__).parent)


@pytest.fixture
def fresh_loader():
    _library.library.cache_clear()
    yield
    _library.library.cache_clear()


def test_a_missing_library_is_reported_with_what_to_do(fresh_loader, monkeypatch, tmp_path):
    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "nothing.so"))
    with pytest.raises(ImportError, match="nothing.so: correct or unset ETAP_LIBRARY"):
        _library.library()
    monkeypatch.setenv(_library.PATH_VARIABLE, "")
    monkeypatch.setattr(etap_backend, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match=f"{tmp_path}/{_library.FILE}: install the etap-backend wheel"):
        _library.library()


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """The library in an installed distribution, and beside the imported sources none."""
    library, path = _library.library_path(), tmp_path / "site/etap_backend" / _library.FILE
    information = tmp_path / "site/etap_backend-1.0.dist-info"
    path.parent.mkdir(parents=True)
    path.symlink_to(library)
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: etap-backend\nVersion: 1.0\n")
    monkeypatch.delenv(_library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(etap_backend, "__path__", [str(tmp_path / "checkout/etap_backend")])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return path


def test_sources_that_hide_the_installed_package_take_its_library(fresh_loader, installed):
    """`python -m` puts the working directory, perhaps a checkout, before the installed packages."""
    assert _library.library_path() == installed
    finding = doctor.check_library()
    assert finding.verdict is doctor.Verdict.OK and str(installed) in finding.found
    assert "sources in" in finding.remedy


def test_an_editable_install_has_its_library_in_another_folder_of_the_package(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(etap_backend, "__path__", [str(tmp_path / "checkout"), str(tmp_path / "site/etap_backend")])
    assert _library.library_path() == installed


def test_a_file_that_is_no_library_is_reported(fresh_loader, monkeypatch, tmp_path):
    (tmp_path / "text.so").write_text("not a library")
    monkeypatch.setenv(_library.PATH_VARIABLE, str(tmp_path / "text.so"))
    with pytest.raises(ImportError, match="text.so does not load as the library of etap-backend: "):
        _library.library()


@pytest.mark.parametrize("newer", [1, -1], ids=["an older library", "a newer library"])
def test_a_library_of_another_version_is_refused(fresh_loader, monkeypatch, newer):
    built = _library.ABI_VERSION
    monkeypatch.setattr(_library, "ABI_VERSION", built + newer)
    with pytest.raises(ImportError, match=f"has ABI version {built}, this package wants {built + newer}:"):
        _library.library()

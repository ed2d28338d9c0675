"""What both engines' plugins share: versions, and the names that an engine lacks."""

import pytest
from packaging.version import Version

from etap_backend import engine_contract

ENGINE = engine_contract.Engine("vLLM", "vllm", "ETAP", oldest="0.32.0", newest="0.33.0")
VERSIONS = (
    "0.9.1", "0.31.9", "0.32", "0.32.0", "0.32.0+cu130", "0.32.1.dev5+g0123456.cu130", "0.32.2.post1", "0.33.0rc1",
    "0.33.1", "0.33.10", "0.34", "0.34.1", "1.0.0", "0.99.0",
)  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_its_versions_numbers_three_at_least(version):
    found = engine_contract.release(version)
    assert len(found) >= 3 and Version(".".join(map(str, found))) == Version(Version(version).base_version)


@pytest.mark.parametrize("version", VERSIONS)
def test_only_an_older_version_is_refused_and_only_a_newer_one_is_untested(monkeypatch, version):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": version}.get)
    base = Version(Version(version).base_version)
    refused = f"ETAP supports vLLM 0.32.0 and 0.33.0, this is vLLM {version}"
    assert ENGINE.why_too_old() == (refused if base < Version("0.32") else None)
    assert ENGINE.is_tested == (Version("0.32") <= base <= Version("0.33.0"))
    if base > Version("0.33.0"):
        assert version in ENGINE.why_untested() and "was not tested" in ENGINE.why_untested()


class Base:
    field: int

    def __new__(cls, size):
        made = super().__new__(cls)
        made.rank = 0
        return made

    def __init__(self, size):
        self.size = size

    def extended(self, one, two=2, **more): ...

    def open(self, one, two): ...

    @staticmethod
    def called(one, *, two): ...


def test_a_failed_import_is_named(monkeypatch):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": "0.99.0"}.get)

    def classes():
        from json import gone

        return [gone]

    reason = ENGINE.why_lacking(engine_contract.lacking(classes))
    assert reason.startswith("vLLM 0.99.0 lacks what ETAP uses: ImportError: cannot import name 'gone' from 'json'")


def test_the_first_words_of_a_failed_import_are_told():
    """Those of sgl_kernel begin with an empty line."""

    def classes():
        raise ImportError("\n[sgl_kernel] could not load any library!\n\nAttempted locations: ...")

    assert engine_contract.lacking(classes) == ["ImportError: [sgl_kernel] could not load any library!"]
    assert engine_contract.lacking(lambda: [][0]) == ["IndexError: list index out of range"]


def test_a_name_that_is_lacked_twice_is_named_once(monkeypatch):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": "0.99.0"}.get)
    assert ENGINE.why_lacking(["one", "another", "one"]) == "vLLM 0.99.0 lacks what ETAP uses: one; another"
    assert ENGINE.why_lacking([]) is None


def test_overrides_that_the_base_lacks_or_calls_differently_are_named():
    class Plugin(Base):
        field = 1
        size = 2

        def extended(self, one): ...

        def open(self, **everything): ...

        @staticmethod
        def called(one): ...

        def newer(self): ...

        def renamed(self): ...

        def _own(self): ...

        @engine_contract.override
        def _gone(self): ...

    base = f"{__name__}:Base"
    wanted = [
        f"{base}.extended: new parameters two",
        f"{base}.called: new parameters two",
        f"{base}.renamed",
        f"{base}._gone",
    ]
    optional = ["newer", "field", "size"]
    assert engine_contract.misfits(Plugin, optional) == wanted
    assert engine_contract.lacking(lambda: [Plugin, Base], optional)[:4] == wanted


def test_overrides_of_a_class_between_are_checked_too():
    shared = type("Shared", (), {"__module__": "etap_backend.vllm.impl", "renamed": lambda self: None})
    assert engine_contract.misfits(type("Plugin", (shared, Base), {})) == [f"{__name__}:Base.renamed"]

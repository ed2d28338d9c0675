"""What the plugins of both engines share: versions, and how they find by name what an engine lacks."""

import pytest
from packaging.version import Version

from etap_backend import engine_contract

ENGINE = engine_contract.Engine("vLLM", "vllm", "ETAP", oldest="0.26.0", newest="0.33.0")
VERSIONS = (
    "0.9.1", "0.25.9", "0.26", "0.26.0", "0.26.0+cu130", "0.26.1.dev5+g0123456.cu130", "0.30.2.post1", "0.33.0rc1",
    "0.33.1", "0.33.10", "0.34", "0.34.0", "0.34.1", "1.0.0", "0.99.0",
)  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_its_versions_numbers_three_at_least(version):
    found = engine_contract.release(version)
    assert len(found) >= 3 and Version(".".join(map(str, found))) == Version(Version(version).base_version)


@pytest.mark.parametrize("version", VERSIONS)
def test_only_an_older_version_is_refused_and_only_a_newer_one_is_untested(monkeypatch, version):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": version}.get)
    base = Version(Version(version).base_version)
    assert (ENGINE.why_too_old() is not None) == (base < Version("0.26"))
    assert ENGINE.is_tested == (Version("0.26") <= base <= Version("0.33.0"))
    if base > Version("0.33.0"):
        assert version in ENGINE.why_untested() and "vLLM 0.26.0 to 0.33.0" in ENGINE.why_untested()


class Base:
    field: int

    def __new__(cls, size):
        made = super().__new__(cls)
        made.rank = 0
        return made

    def __init__(self, size):
        self.size = size

    def asked(self, one, two=2, **more): ...

    def answered(self, one, two): ...

    @staticmethod
    def called(one, *, two): ...


def test_what_cannot_be_imported_is_lacked_by_its_name(monkeypatch):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": "0.99.0"}.get)

    def classes():
        from json import gone

        return [gone]

    reason = ENGINE.why_lacking(engine_contract.lacking(classes))
    assert reason.startswith("vLLM 0.99.0 lacks what ETAP uses: ImportError: cannot import name 'gone' from 'json'")


def test_what_is_lacked_several_times_is_named_once(monkeypatch):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": "0.99.0"}.get)
    assert ENGINE.why_lacking(["one", "another", "one"]) == "vLLM 0.99.0 lacks what ETAP uses: one; another"
    assert ENGINE.why_lacking([]) is None


def test_methods_that_nobody_asks_for_or_nobody_can_call_are_named():
    class Ours(Base):
        field = 1
        size = 2

        def asked(self, one): ...

        def answered(self, **all_there_is): ...

        @staticmethod
        def called(one): ...

        def newer(self): ...

        def renamed(self): ...

        def _own(self): ...

        @engine_contract.override
        def _gone(self): ...

    base = f"{__name__}:Base"
    wanted = [
        f"{base}.asked: new parameters two",
        f"{base}.called: new parameters two",
        f"{base}.renamed",
        f"{base}._gone",
    ]
    of_some = ["newer", "field", "size"]
    assert engine_contract.misfits(Ours, of_some) == wanted
    assert engine_contract.lacking(lambda: [Ours, Base], of_some)[:4] == wanted


def test_methods_of_a_class_of_ours_between_are_looked_at_too():
    shared = type("Shared", (), {"__module__": "etap_backend.vllm.impl", "renamed": lambda self: None})
    assert engine_contract.misfits(type("Ours", (shared, Base), {})) == [f"{__name__}:Base.renamed"]

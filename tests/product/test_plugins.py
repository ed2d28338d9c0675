"""What the plugins of both engines share: versions, and how they find by name what an engine lacks."""

import ast
import re
from pathlib import Path

import pytest
from packaging.version import Version

import etap_backend
from etap_backend import engine_contract
from etap_backend.engine_contract import Use
from etap_backend.sglang import versions as sglang
from etap_backend.vllm import versions as vllm

ENGINE = engine_contract.Engine("vLLM", "vllm", "ETAP", oldest="0.26.0", newest="0.33.0")
VERSIONS = (
    "0.9.1", "0.25.9", "0.26", "0.26.0", "0.26.0+cu130", "0.26.1.dev5+g0123456.cu130", "0.30.2.post1", "0.33.0rc1",
    "0.33.1", "0.33.10", "0.34", "0.34.0", "0.34.1", "1.0.0", "0.99.0",
)  # fmt: skip
USES = {"vllm": vllm.USES + vllm.SPARSE_USES, "sglang": (*sglang.REGISTRATION_USES, *sglang.USES, *sglang.SPARSE_USES)}


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


@pytest.mark.parametrize(
    "use, lacking",
    [
        (Use("json:dumps"), []),
        (Use("json:gone"), "json:gone"),
        (Use("json.gone:dumps"), "json.gone (ModuleNotFoundError: No module named 'json.gone')"),
        (Use("json", has="dumps loads"), []),
        (Use("json", has="dumps gone"), "json.gone"),
        (Use("json", has="gone|dumps"), []),
        (Use("json", has="gone|lost"), "json.gone|lost"),
        (Use("logging:LogRecord", has="getMessage msg"), []),
        (Use("etap_backend.engine_contract:Use", has="target lacking"), []),
        (Use("etap_backend.engine_contract:Use", has="gone"), "etap_backend.engine_contract:Use.gone"),
        (Use(f"{__name__}:Base", has="size asked", positional=1), []),
        (Use(f"{__name__}:Base", has="rank gone"), f"{__name__}:Base.gone"),
        (Use(f"{__name__}:Base", positional=2), f"{__name__}:Base: too many positional arguments"),
        (Use(f"{__name__}:Base.asked", positional=2, keywords="two three"), []),
        (
            Use(f"{__name__}:Base.asked", positional=1),
            f"{__name__}:Base.asked: missing a required argument: 'one'",
        ),
        (Use(f"{__name__}:Base.asked", positional=1, keywords="two **"), []),
        (
            Use(f"{__name__}:Base.called", positional=1, keywords="two three"),
            f"{__name__}:Base.called: got an unexpected keyword argument 'three'",
        ),
    ],
    ids=str,
)
def test_what_is_lacking_is_named(use, lacking):
    assert use.lacking() == ([lacking] if lacking else [])


def test_a_module_that_several_uses_lack_is_named_once(monkeypatch):
    monkeypatch.setattr(engine_contract.importlib.metadata, "version", {"vllm": "0.99.0"}.get)
    uses = [
        Use("json.gone:dumps"),
        Use("json.gone:loads"),
        Use("json:gone"),
    ]
    reason = ENGINE.why_lacking(name for use in uses for name in use.lacking())
    module = "json.gone (ModuleNotFoundError: No module named 'json.gone')"
    assert reason == f"vLLM 0.99.0 lacks what ETAP uses: {module}; json:gone"


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

    base = f"{__name__}:Base"
    found = engine_contract.misfits(Ours, ["newer", "field", "size"])
    assert found == [f"{base}.asked: new parameters two", f"{base}.called: new parameters two", f"{base}.renamed"]


def imported(tree, engine):
    """Targets of what a module of ours imports of an engine; not what it tries, and can do without."""
    tried = {
        node
        for attempt in ast.walk(tree)
        if isinstance(attempt, ast.Try) and "ImportError" in map(ast.unparse, (one.type for one in attempt.handlers))
        for part in attempt.body
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == engine)
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == engine and node not in tried:
            yield from (f"{node.module}:{name.name}" for name in node.names)


@pytest.mark.parametrize("engine", USES)
def test_all_that_our_sources_import_of_an_engine_is_looked_for(engine):
    """As a name in a module, a module, or the class of a method."""
    looked_for = {use.target for use in USES[engine]}
    looked_for |= {f"{use.target}:{name}" for use in USES[engine] for name in use.has.split()}
    known = {name.replace(":", ".") for name in looked_for}
    known |= {name.rsplit(".", 1)[0] for name in known}
    found = {}
    for path in sorted((Path(etap_backend.__file__).parent / engine).glob("*.py")):
        found |= {target: path.name for target in imported(ast.parse(path.read_text()), engine)}
    # Registration says itself that there is no such registry; the loader of plugins is the doctor's.
    apart = ("vllm.v1.attention.backends.registry:", "sglang.srt:plugins")
    names = {target.replace(":", "."): target for target in found if not target.startswith(apart)}
    assert len(names) > 15 and not {names[name] for name in names.keys() - known}


def test_all_variables_of_vllm_that_every_version_reads_are_looked_for():
    (looked_for,) = (use.has.split() for use in vllm.USES if use.target == "vllm.envs")
    paths = [path for path in Path(vllm.__file__).parent.glob("*.py") if path.name != "versions.py"]
    assert set(re.findall(r"\benvs\.(\w+)", "".join(path.read_text() for path in paths))) == set(looked_for)

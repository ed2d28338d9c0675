"""Who may import whom: the package no bench, nobody in a circle or in a function; and importing it stays light."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import etap_backend
from etap_backend import cli

PACKAGE = Path(etap_backend.__file__).parent

LAZY = {
    ("etap_backend.vllm.registration", "_register"),  # the module imports vLLM's registry of models, which may change
    ("etap_backend.sglang", "register"),  # SGLang does too; `etap doctor` imports the package without SGLang
    ("etap_backend.vllm.v4_selection", "select"),  # the layer's module imports what serves a model
    ("etap_backend.vllm.v4_selection", "why_no_layers"),
    ("etap_backend.sglang.registration", "_classes"),  # the backends' modules import the engine's models
}
"""The functions that may import this package's modules when they are called, each with its reason."""


@dataclass(frozen=True)
class Import:
    """One import of this package's modules; `function` is the innermost one around it, None at the top level."""

    importer: str
    imported: str
    function: str | None


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def module_of(name: str) -> str:
    """The module that `name` is or is in; the package's own names are in the modules that they come from."""
    head, _, tail = name.rpartition(".")
    if head == "etap_backend" and tail in etap_backend._MODULES:
        return etap_backend._MODULES[tail]
    while name not in trees():
        name = name.rpartition(".")[0]
    return name


def names_in(node: ast.AST) -> list[str]:
    """Full names of this package that a node imports or takes from it as attributes."""
    match node:
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases, level=0):
            names = [f"{module}.{alias.name}" for alias in aliases]
        case ast.Attribute(value=ast.Name(id="etap_backend"), attr=attribute):
            names = [f"etap_backend.{attribute}"]
        case _:
            names = []
    return [name for name in names if name.split(".")[0] == "etap_backend"]


def imports_below(importer: str, node: ast.AST, function: str | None) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        # An attribute of the package uses what was imported at the top.
        where = None if isinstance(child, ast.Attribute) else function
        yield from (Import(importer, module_of(name), where) for name in names_in(child))
        inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        yield from imports_below(importer, child, inside)


@cache
def imports() -> tuple[Import, ...]:
    found = [i for name, tree in trees().items() for i in imports_below(name, tree, None)]
    return tuple(i for i in found if i.imported not in ("etap_backend", i.importer))


def test_the_graph_is_that_of_this_package():
    known = {(i.importer, i.imported) for i in imports()}
    assert ("etap_backend.dense", "etap_backend._operator") in known
    assert ("etap_backend.doctor", "etap_backend.limits") in known


def test_nothing_imports_in_a_circle():
    graph: dict[str, set[str]] = {}
    for i in imports():
        graph.setdefault(i.importer, set()).add(i.imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_import_hides_in_a_function():
    hidden = [i for i in imports() if i.function]
    assert [i for i in hidden if (i.importer, i.function) not in LAZY] == []


def foreign(tree: ast.Module) -> set[str]:
    """Top-level names of the modules outside the standard library that a module imports."""
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    return names - sys.stdlib_module_names - {"etap_backend"}


def test_each_room_imports_what_its_user_has_installed():
    """The package's own requirements everywhere; an engine and what it brings in that engine's plugin only."""
    own, engines = {"torch", "tvm_ffi"}, ("etap_backend.vllm", "etap_backend.sglang", "etap_backend.compat")
    wrong = {
        name: more for name, tree in trees().items() if not name.startswith(engines) if (more := foreign(tree) - own)
    }
    assert wrong == {}
    assert [name for name, tree in trees().items() if {"bench", "tests", "support"} & foreign(tree)] == []


def test_every_command_is_a_module_with_a_run():
    for module in cli.COMMANDS.values():
        assert "run" in {node.name for node in trees()[module].body if isinstance(node, ast.FunctionDef)}


def test_the_package_and_its_command_line_wait_for_no_torch():
    program = (
        "import sys, etap_backend, etap_backend.cli\n"
        "heavy = [name for name in ('torch', 'tvm_ffi', 'vllm') if name in sys.modules]\n"
        "print(heavy, all(hasattr(etap_backend, name) for name in etap_backend.__all__))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[] True\n"


def test_beside_torch_the_package_costs_little_and_wants_no_temporary_folder(run_program):
    """torch.compile's modules take longer to import than torch itself, and write to that folder."""
    program = """
import sys, tempfile, torch
tempfile._candidate_tempdir_list = lambda: []
before = set(sys.modules)
import etap_backend, etap_backend.doctor
from etap_backend.compat import flash_attn_interface, flash_mla, flashinfer
for name in etap_backend.__all__:
    getattr(etap_backend, name)
new = {name for name in set(sys.modules) - before if name.startswith("torch")}
schedule = etap_backend.DecodeSchedule(1, 1, device="cpu").build(torch.ones(1, dtype=torch.int32))
q, table = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
etap_backend.mla_decode(q, q, table, torch.ones(1, dtype=torch.int32), schedule, softmax_scale=1)
print(sorted(new), "torch._dynamo" in sys.modules)
"""
    assert run_program(program)[0] == "[] False\n"

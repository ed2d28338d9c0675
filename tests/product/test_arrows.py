"""Who may import whom: the product no laboratory, a table no kernel, nobody in a circle or hidden in a function."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import etap_backend
from etap_backend import cli

PACKAGE = Path(etap_backend.__file__).parent
LAB = "etap_backend.lab"

LAZY = {
    ("etap_backend.vllm", "register"),  # vLLM loads plugins in processes that never select a backend
    ("etap_backend.sglang", "register"),  # SGLang too; and `etap doctor` imports the package where there is no SGLang
    ("etap_backend.vllm.v4_selection", "select"),  # the layer's module imports what serves a model
    ("etap_backend.vllm.v4_selection", "why_no_layers"),
    ("etap_backend.sglang.registration", "_classes"),  # the backends' modules import the engine's models
}
"""The functions that may import modules of this package when they are called, each with its reason."""


@dataclass(frozen=True)
class Import:
    """One import of a module of this package; `function` is the innermost one around it, None at the top level."""

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
    """The module that `name` is, or is in; names that the package itself offers are in the modules they come from."""
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
        # An attribute of the package is a use of what was imported at the top.
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
    assert any(i.importer.startswith(LAB) and not i.imported.startswith(LAB) for i in imports())


def test_the_product_imports_no_laboratory():
    wrong = [i for i in imports() if not i.importer.startswith(LAB) and i.imported.startswith(LAB)]
    assert wrong == []
    naming = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and LAB in str(node.value) and not name.startswith(LAB)
    }
    assert naming <= {"etap_backend.cli"}, "only the command line hands over to the laboratory, by name"


def test_nothing_imports_in_a_circle():
    graph: dict[str, set[str]] = {}
    for i in imports():
        graph.setdefault(i.importer, set()).add(i.imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_import_hides_in_a_function():
    hidden = [i for i in imports() if i.function]
    assert [i for i in hidden if (i.importer, i.function) not in LAZY] == []


@pytest.mark.parametrize("name, program", [*cli.LAB.items(), *cli.CHECKS.items()])
def test_the_command_line_hands_over_to_functions_that_are_there(name, program):
    body = trees()[program.module].body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {
        target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if vars(target).get("id")
    }
    assert program.function in names


@pytest.mark.parametrize("module", ["etap_backend", "etap_backend.cli", "etap_backend.lab.tables"])
def test_neither_the_command_line_nor_a_table_waits_for_torch_or_loads_a_kernel(module):
    program = f"import sys, {module}; print([name for name in ('torch', 'tvm_ffi', 'vllm') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

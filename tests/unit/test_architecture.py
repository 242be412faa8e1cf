"""Which module of untorch imports which: no circles, the run half imports no build half and no torch.

Imports are read from the source, at the top and inside functions; those under ``if TYPE_CHECKING`` do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
RUN_HALF = (
    "untorch.runtime", "untorch.archive", "untorch.trust", "untorch.llm", "untorch.serve", "untorch.predictor",
    "untorch.integrations", "untorch.speech", "untorch.pipeline",
)  # fmt: skip
BUILD_HALF = ("untorch.export", "untorch.quant", "untorch.ops", "untorch.torch_compile", "untorch.cli")


@dataclass(frozen=True)
class Import:
    """``importer`` imports ``name``, a dotted name that may be a module or what a module has."""

    importer: str
    name: str
    in_function: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SOURCE / "untorch").rglob("*.py"))}


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(importer: str, source: str) -> Iterator[Import]:
    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.orelse:
                yield from walk(child, in_function)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, in_function)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer}: relative import"
            for alias in node.names:
                yield Import(importer, f"{node.module}.{alias.name}", in_function)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


IMPORTS = [item for name, path in MODULES.items() for item in imports_of(name, path.read_text())]


def modules_behind(item: Import) -> set[str]:
    """The modules that the import executes: the one it names, and packages above it that are not the importer's own."""
    parts = item.name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    found = [prefix for prefix in prefixes if prefix in MODULES]
    own = [found[-1]] if found else []
    return {name for name in (*own, *found) if not f"{item.importer}.".startswith(f"{name}.")}


def circles(edges: dict[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[frozenset[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = set()
            while True:
                component.add(last := stack.pop())
                if last == name:
                    break
            if len(component) > 1:
                result.append(frozenset(component))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return result


def graph() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for item in IMPORTS:
        edges[item.importer] |= modules_behind(item)
    return edges


def is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_no_import_circle() -> None:
    assert [sorted(circle) for circle in circles(graph())] == []


def test_the_run_half_imports_no_build_half_and_no_torch() -> None:
    wrong = [
        f"{item.importer} imports {item.name}"
        for item in IMPORTS
        if (item.importer == "untorch" or is_below(item.importer, RUN_HALF))
        and (is_below(item.name, BUILD_HALF) or item.name.split(".")[0] in ("torch", "triton"))
    ]
    assert wrong == []


def test_the_command_line_imports_the_build_half_in_functions_only() -> None:
    packages = tuple(name for name in BUILD_HALF if name != "untorch.cli")
    wrong = [
        f"{item.importer} imports {item.name}"
        for item in IMPORTS
        if is_below(item.importer, ("untorch.cli",))
        and not item.in_function
        and (is_below(item.name, packages) or item.name.split(".")[0] == "torch")
    ]
    assert wrong == []


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        f"{item.importer} imports {item.name}"
        for item in IMPORTS
        if is_below(item.name, ("untorch.cli",)) and not is_below(item.importer, ("untorch.cli", "untorch.__main__"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [frozenset("bc")]),
        ({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, [frozenset("de"), frozenset("abc")]),
    ],
)
def test_circles_are_found(edges: dict[str, set[str]], expected: list[frozenset[str]]) -> None:
    assert circles(edges) == expected


def test_what_counts_as_an_import() -> None:
    source = """
from typing import TYPE_CHECKING
import untorch.export
if TYPE_CHECKING:
    import torch
def f():
    from untorch.runtime import errors
"""
    found = list(imports_of("untorch.cli.x", source))
    assert [(item.name, item.in_function) for item in found] == [
        ("typing.TYPE_CHECKING", False), ("untorch.export", False), ("untorch.runtime.errors", True),
    ]  # fmt: skip
    assert modules_behind(found[2]) == {"untorch.runtime", "untorch.runtime.errors"}
    assert modules_behind(Import("untorch.runtime.program", "untorch.runtime.errors", False)) == {
        "untorch.runtime.errors"
    }

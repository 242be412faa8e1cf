"""The public names of the package, their docstrings, and the stub of the native module."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import untorch
from untorch import _core

STUB = pathlib.Path(untorch.__path__[0]) / "_core.pyi"


def test_names_are_public_or_private() -> None:
    """In a new process: here, other tests have imported more submodules."""
    code = "import untorch; print(*sorted(n for n in dir(untorch) if not n.startswith('_')))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    assert names - set(untorch.__all__) == {"runtime"}
    assert set(untorch.__all__) <= names
    assert sorted(untorch.__all__) == untorch.__all__


@pytest.mark.parametrize("name", untorch.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    doc = inspect.getdoc(getattr(untorch, name))
    assert doc is not None
    first = doc.partition("\n\n")[0]
    assert first.endswith("."), first
    assert "->" not in first, "a signature is no docstring"


def test_modules_that_need_torch_are_named() -> None:
    code = "import untorch\nfor name in ('export', 'serve', 'nope'):\n try: getattr(untorch, name)\n except AttributeError as e: print(e)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "untorch.export needs torch and is not imported with untorch: import untorch.export\n"
        "untorch.serve is not imported with untorch: import untorch.serve\n"
        "module 'untorch' has no attribute 'nope'\n"
    )


def test_the_stub_has_what_the_native_module_has() -> None:
    tree = ast.parse(STUB.read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert {node.name for node in nodes} == {name for name in dir(_core) if not name.startswith("_")}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            stub = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            real = set(vars(getattr(_core, node.name)))
            assert stub <= real, node.name
            assert {name for name in real if not name.startswith("_")} <= stub, node.name

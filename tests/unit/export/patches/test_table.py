"""The table of patches: every entry has its test, and nothing outside the folder patches torch."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from untorch.export.patches import PATCHES, Patch
from untorch.export.patches.cpu import torch_version
from untorch.export.patches.registry import replaced

ROOT = Path(__file__).resolve().parents[4]
SOURCE = ROOT / "src" / "untorch"
PATCHED = ("torch", "triton")
# Files outside the folder that may assign to attributes of torch.
ALLOWED: set[str] = set()


@pytest.mark.parametrize("patch", PATCHES.values(), ids=lambda patch: patch.name)
def test_every_patch_says_what_why_and_for_which_versions(patch: Patch) -> None:
    assert patch.replaces and patch.versions and patch.why.endswith(".")


@pytest.mark.parametrize("patch", PATCHES.values(), ids=lambda patch: patch.name)
def test_every_patch_has_a_test(patch: Patch) -> None:
    file, _, name = patch.test.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def resolve(name: str) -> Any:
    first, *parts = name.split(".")
    found, path = importlib.import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        # Modules by import: torch loads some only when they are used.
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


@pytest.mark.filterwarnings("ignore")  # of modules that are imported here first
@pytest.mark.parametrize("patch", PATCHES.values(), ids=lambda patch: patch.name)
def test_what_is_replaced_is_there(patch: Patch) -> None:
    """A name that torch gave up would be patched in vain."""
    if patch.versions.startswith("<") and torch_version() >= tuple(map(int, patch.versions[2:].split("."))):
        pytest.skip("not for this torch")
    if any(name.startswith("triton") for name in patch.replaces):
        pytest.importorskip("triton")
    if any(name.startswith("torchvision") for name in patch.replaces):
        pytest.importorskip("torchvision")
    for name in patch.replaces:
        if name != "torch._C._cuda_getCurrentRawStream":  # a torch without CUDA has none
            resolve(name)


def imported_names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.split(".")[0] in PATCHED}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PATCHED:
            found |= {a.asname or a.name for a in node.names}
    return found


def root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def patches_in(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "vars") and node.args:
            targets = [] if ast.unparse(node.func) == "vars" else [ast.Attribute(node.args[0], "x")]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and root(target) in names:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(module.startswith("unittest") for module in modules):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.slow
def test_nothing_outside_the_folder_patches_torch() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        if name.startswith("export/patches/"):
            continue
        if lines := list(patches_in(path.read_text())):
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert found.keys() >= ALLOWED, "a file no longer patches torch: take it off the list"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch\ntorch.cuda.is_available = f", 1),
        ("from torch._inductor import config\nconfig.cpp.threads += 1", 1),
        ("from torch import nn as n\ndel n.Linear.forward", 1),
        ("def f():\n    from torch.utils import cpp_extension\n    setattr(cpp_extension, 'CUDA_HOME', x)", 1),
        ("import triton.backends\ntriton.backends.backends['nvidia'] = x", 1),
        ("from unittest import mock", 1),
        ("import torch\nx.training = torch.no_grad\nnode.meta['val'] = torch.zeros(3)\ny = torch.float32", 0),
    ],
)
def test_patches_are_found(source: str, count: int) -> None:
    assert len(list(patches_in(source))) == count


def test_what_was_replaced_is_put_back() -> None:
    class Owner:
        @staticmethod
        def kept() -> int:
            return 1

        value = property(lambda self: 2)

    before = dict(vars(Owner))
    with replaced(Owner, "kept", lambda: 3), replaced(Owner, "value", 4), replaced(Owner, "new", 5):
        assert (Owner.kept(), Owner.value, Owner.new) == (3, 4, 5)  # type: ignore[attr-defined]
    assert dict(vars(Owner)) == before

"""Patches of how libraries are written: no paths of the build machine, and the table of what they were compiled for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from untorch.export import compile as export_compile
from untorch.export import export, inductor, patches
from untorch.export.patches.library import INTERFACE_SYMBOL

pytestmark = pytest.mark.filterwarnings("ignore")


class Counter(torch.nn.Module):
    """A changed buffer, a weight that is not, and a check in the generated code, which names its file."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([0.0, 0.5, 0.0, 0.0]))
        self.table = torch.nn.Parameter(torch.arange(24.0).reshape(6, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.table[rows] + self.count


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from test_library import Counter
from untorch.export import export
export(Counter(), (torch.tensor([0, 3]),), sys.argv[1], keep_sources=True, progress=False)
"""


def content(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def library(path: Path) -> bytes:
    return next(data for name, data in content(path).items() if name.endswith(".so"))


@pytest.mark.slow
def test_equal_models_give_equal_bytes_without_paths(tmp_path: Path) -> None:
    """Two processes that have nothing in common but the machine: folders, cache, temporary files, hash seed, name."""
    files = []
    for i, seed in enumerate(("1", "2")):
        folder = tmp_path / f"machine{i}"
        (folder / "tmp").mkdir(parents=True)
        files.append(folder / f"name{i}.pt2")
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
        }
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, files[i].name], check=True, cwd=folder, env=environment
        )
    first, second = map(content, files)
    assert list(first) == list(second)
    assert [name for name in first if first[name] != second[name]] == []
    assert files[0].read_bytes() == files[1].read_bytes()
    paths = (str(tmp_path), str(Path(torch.__file__).parent), str(Path.home()) + "/", sys.prefix, os.getcwd())
    for name, data in first.items():
        assert [path for path in paths if path.encode() in data] == [], name


def table(path: Path) -> dict[str, Any]:
    text = re.search(rb'\{"inputs": .*?\}\]\}(?=\0)', library(path))
    assert text is not None
    parsed: dict[str, Any] = json.loads(text.group())
    return parsed


@pytest.mark.slow
def test_libraries_tell_what_they_were_compiled_for(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    export(Counter(), (torch.tensor([0, 3]),), path, progress=False)
    manifest = json.loads(content(path)["model/extra/untorch.json"])
    method, told = manifest["methods"]["forward"], table(path)
    assert told["inputs"] == method["inputs"]
    constants = {c["name"]: (c["shape"], c["strides"], c["mutated"]) for c in method["constants"]}
    assert constants == {"count": ([4], [1], True), "table": ([6, 4], [4, 1], False)}
    assert {c["name"]: (c["shape"], c["strides"], c["mutated"]) for c in told["constants"]} == constants


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library without either patch."""
    path = tmp_path_factory.mktemp("plain") / "model.pt2"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(export_compile, "interface_table", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(inductor, "neutral_paths", lambda _: contextlib.nullcontext())
        export(Counter(), (torch.tensor([0, 3]),), path, progress=False)
    return library(path)


@pytest.mark.slow
def test_torchs_libraries_have_no_table(plain: bytes) -> None:
    assert INTERFACE_SYMBOL.encode() not in plain


def test_torchs_libraries_carry_paths(plain: bytes) -> None:
    assert str(Path(torch.__file__).parent).encode() in plain


def test_the_patches_are_in_force_only_meanwhile() -> None:
    from torch._inductor import codecache, cpp_builder

    before = codecache.write, cpp_builder._get_shared_cflags
    with patches.neutral_paths(Path("/nowhere")):
        assert "ffile-prefix-map=/nowhere/=" in cpp_builder._get_shared_cflags(True)
    assert (codecache.write, cpp_builder._get_shared_cflags) == before


def declarations() -> list[list[str]]:
    """What two writers got of an array; without the patch, the second is where the first one was in memory."""
    from itertools import count

    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch.utils._ordered_set import OrderedSet

    wrapper = CppWrapperCpu.__new__(CppWrapperCpu)
    wrapper.int_array_id, wrapper.declared_int_array_vars = count(), OrderedSet()
    wrapper.codegen_int_array_var_cache = {}
    lines: list[str] = []
    wrapper.codegen_int_array_var("{2L, 3L}", lines.append)
    found, address = [list(lines)], id(lines)
    fresh: list[list[str]] = []
    del lines
    for _ in range(100):
        fresh.append([])
    same = next((one for one in fresh if id(one) == address), fresh[0])
    wrapper.codegen_int_array_var("{2L, 3L}", same.append)
    return [*found, same]


def test_arrays_are_declared_wherever_they_are_used() -> None:
    with patches.library.declared_arrays():
        first, second = declarations()
    assert len(first) == len(second) == 1


def test_a_writer_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 and 2.12 remember a declaration by the id of the bound method."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    seen: list[Any] = []
    monkeypatch.setattr(
        CppWrapperCpu, "codegen_int_array_var", lambda self, array, writeline, **_: seen.append(writeline)
    )
    wrapper, first, second = CppWrapperCpu.__new__(CppWrapperCpu), list[str](), list[str]()
    with patches.library.declared_arrays():
        for lines in (first, first, second):
            wrapper.codegen_int_array_var("{1L}", lines.append, graph=None)
        wrapper.codegen_int_array_var("{1L}", first.extend, graph=None)
    assert seen[0] is seen[1] and seen[0].__self__ is first and seen[2].__self__ is second
    assert seen[3] == first.extend


def test_torch_forgets_declarations() -> None:
    first, second = declarations()
    assert len(first) == 1
    assert second == []

"""Every C shim that PyTorch's headers declare for CUDA is exported, or listed as unsupported with a reason."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType

import pytest
import torch

from tests.native.shim import ROOT, library_path

INCLUDE = pathlib.Path(torch.__file__).parent / "include"


def load(path: str) -> ModuleType:
    """A module by its file: neither the scripts nor the package need to be installed."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


list_shims = load("scripts/list_shims.py")
unsupported: dict[str, str] = load("src/untorch/runtime/unsupported.py").UNSUPPORTED_SHIMS


def lacking(names: list[str]) -> set[str]:
    missing: list[str] = list_shims.missing(names, pathlib.Path(library_path()))
    return set(missing)


@pytest.fixture(autouse=True)
def cuda_build() -> None:
    if lacking(["aoti_torch_cuda_convolution"]):
        pytest.skip("this library was built without nvcc: it has no CUDA operators")


def test_everything_declared_is_exported_or_explained() -> None:
    names = list_shims.declared_cuda(INCLUDE)
    assert len(names) > 170
    assert sorted(lacking(names) - unsupported.keys()) == []


def test_what_is_declared_for_cuda() -> None:
    names = list_shims.declared_cuda(INCLUDE)
    assert {"aoti_torch_cuda_mm_out", "aoti_torch_create_cuda_guard"} <= set(names)
    assert not [name for name in names if name.startswith("aoti_torch_cpu_")]


def test_cuda_blocks_alone() -> None:
    text = "int a;\n#ifdef USE_CUDA\n#if X\nint b;\n#endif\n#endif // USE_CUDA\nint c;"
    assert list_shims.only_cuda(text).split("\n") == ["#if X", "int b;", "#endif", "#endif // USE_CUDA"]

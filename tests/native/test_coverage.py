"""Every C shim that PyTorch's headers declare for the CPU is exported, or listed as unsupported with a reason."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType

import torch
from shim import ROOT, library_path

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


def test_everything_declared_is_exported_or_explained() -> None:
    names = list_shims.declared(INCLUDE)
    assert len(names) > 300
    missing = set(list_shims.missing(names, pathlib.Path(library_path())))
    assert sorted(missing - unsupported.keys()) == []


def test_the_list_of_unsupported_shims_is_true() -> None:
    names = sorted(unsupported)
    still_missing = list_shims.missing(names, pathlib.Path(library_path()))
    assert sorted(set(names) - set(still_missing)) == []
    assert all(reason for reason in unsupported.values())


def test_cuda_blocks_and_comments_are_left_out() -> None:
    text = "#ifdef USE_CUDA\n#if X\nint a;\n#endif\nint b;\n#endif // USE_CUDA\nint c;"
    assert list_shims.without_cuda(text) == "int c;"
    assert "aoti_torch_create_cuda_guard" not in list_shims.declared(INCLUDE)

"""Patches for targets on NVIDIA GPUs: where the toolkit is, hooks for the kernels that Inductor keeps, and
their objects."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from untorch.export.patches import cuda
from untorch.export.patches.cuda import kept_kernels, kernel_accesses, kernel_objects, kernel_sources
from untorch.export.toolkit import cuda_home


def test_torch_still_takes_the_folder_above_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = tmp_path / "cuda-13"
    for file in ("include/cuda_runtime.h", "bin/nvcc"):
        (toolkit / file).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / file).touch(mode=0o755)
    links = tmp_path / "usr" / "bin"
    links.mkdir(parents=True)
    (links / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(links))
    assert cpp_extension._find_cuda_home() == str(links.parent)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(links.parent))
    assert cuda_home() == toolkit


def test_torch_still_has_no_hook_for_the_kernels_it_keeps() -> None:
    """What is kept goes into Inductor's own table of cubins, without the configuration's launcher or key."""
    pytest.importorskip("triton")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    assert list(inspect.signature(CachingAutotuner.save_gpu_kernel).parameters) == ["self", "stream", "launcher"]
    source = inspect.getsource(CachingAutotuner.save_gpu_kernel)
    assert "CudaKernelParamCache.set" in source or "set(key, params" in source
    assert "callback" not in source and "hook" not in source
    before = CachingAutotuner.save_gpu_kernel
    with kept_kernels(lambda kernel, launcher: None):
        assert CachingAutotuner.save_gpu_kernel is not before
    assert CachingAutotuner.save_gpu_kernel is before


def test_torch_still_runs_the_autotune_block_and_drops_it() -> None:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    source = inspect.getsource(PythonWrapperCodegen.generate_and_run_autotune_block)
    assert "exec(" in source and "return" not in source.replace("return None", "")
    before = PythonWrapperCodegen.generate_and_run_autotune_block
    with kernel_sources(lambda definitions, calls: None):
        assert PythonWrapperCodegen.generate_and_run_autotune_block is not before
    assert PythonWrapperCodegen.generate_and_run_autotune_block is before


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each compilation of a kernel to Triton's IR; none gets to its end."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    found = []

    def generate_ttir(kernel: Any, kwargs: dict[str, Any], *_: Any) -> Any:
        found.append(kwargs)
        raise NotImplementedError

    monkeypatch.setattr(wrap, "generate_ttir", generate_ttir)
    monkeypatch.setattr(wrap.log, "disabled", True)
    return found


def accesses(kernel: object, **kwargs: Any) -> None:
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    wrap.identify_accessed_tensors(kernel, kwargs, {})


def test_torch_still_compiles_a_kernel_at_each_call(compiled: list[dict[str, Any]]) -> None:
    kernel = object()
    accesses(kernel, x=torch.ones(2), BLOCK=64)
    accesses(kernel, x=torch.ones(2), BLOCK=64)
    assert len(compiled) == 2


class Kernel:
    """Of x, count and a constant."""

    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in ("x", "count", "BLOCK"))


def test_a_kernel_is_compiled_once_for_arguments_of_the_same_kind(compiled: list[dict[str, Any]]) -> None:
    """A new autotuner around the same kernel is the same kernel."""
    kernel = Kernel()
    with kernel_accesses():
        for count in (2, 3, 2):
            accesses(SimpleNamespace(fn=kernel, configs=[]), x=torch.ones(2), count=count, BLOCK=64)
        accesses(SimpleNamespace(fn=kernel, configs=[]), x=torch.zeros(5), count=2, BLOCK=64)
        assert len(compiled) == 1
        accesses(kernel, x=torch.ones(2).half(), count=2, BLOCK=64)
        accesses(kernel, x=torch.ones(2), count=1, BLOCK=64)
        accesses(kernel, x=torch.ones(2), count=16, BLOCK=64)
        accesses(kernel, x=torch.ones(2), count=2**31, BLOCK=64)
        accesses(kernel, x=torch.ones(2), count=True, BLOCK=64)
        accesses(kernel, x=torch.ones(2), count=2, BLOCK=32)
        accesses(kernel, x=torch.ones(2), count=2, BLOCK=33)
        accesses(kernel, x=None, count=2, BLOCK=64)
        accesses(Kernel(), x=torch.ones(2), count=2, BLOCK=64)
        accesses(
            SimpleNamespace(fn=kernel, configs=[SimpleNamespace(kwargs={"T": 1})]), x=torch.ones(2), count=2, BLOCK=64
        )
        assert len(compiled) == 11


def test_objects_of_kernels_are_named_after_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 one object is made of each file of code, under the name of the kernel that comes last."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import convert_cubin_to_obj

    assert 'obj_file = cubin_file + ".o"' in inspect.getsource(convert_cubin_to_obj)
    made: list[tuple[str, str]] = []

    def convert(cubin_file: str, kernel_name: str, *_: str) -> str:
        made.append((Path(cubin_file).read_text(), kernel_name))
        return f"{cubin_file}.o"

    monkeypatch.setattr(codecache, "convert_cubin_to_obj", convert)
    monkeypatch.setattr(cuda, "torch_version", lambda: (2, 12))
    code = tmp_path / "same.cubin"
    code.write_text("code")
    with kernel_objects():
        names = ["a_0", "b_1", "c" * 250]  # a file's name has 255 characters at most
        objects = [codecache.convert_cubin_to_obj(str(code), name, "ld", "objcopy") for name in names]
    assert len(set(objects)) == 3 and made == [("code", name) for name in names]
    monkeypatch.setattr(cuda, "torch_version", lambda: (2, 13))
    with kernel_objects():
        assert codecache.convert_cubin_to_obj is convert

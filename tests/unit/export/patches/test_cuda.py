"""Patches for targets on NVIDIA GPUs: where the toolkit is, and hooks for the kernels that Inductor keeps."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from untorch.export.patches.cuda import kept_kernels, kernel_sources
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

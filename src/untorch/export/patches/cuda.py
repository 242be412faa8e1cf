"""Patches for targets on NVIDIA GPUs: where the toolkit is, and which kernels Inductor keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from untorch.export.patches.registry import patch, replaced
from untorch.export.toolkit import cuda_home

__all__ = ["kept_kernels", "kernel_sources", "toolkit_folder"]


@patch(
    "torch.utils.cpp_extension.CUDA_HOME",
    versions="2.11–2.15",
    why="torch takes the folder above the first nvcc on the PATH for the toolkit, also where that is a link or a "
    "script, and then finds no headers.",
    test="test_cuda.py::test_torch_still_takes_the_folder_above_nvcc",
)
@contextlib.contextmanager
def toolkit_folder() -> Iterator[None]:
    """The generated code is compiled with the toolkit that ``cuda_home`` finds."""
    from torch.utils import cpp_extension

    with replaced(cpp_extension, "CUDA_HOME", str(cuda_home())):
        yield


@patch(
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.save_gpu_kernel",
    versions="2.11–2.15",
    why="Inductor does not report which configuration of a kernel it took.",
    test="test_cuda.py::test_torch_still_has_no_hook_for_the_kernels_it_keeps",
)
@contextlib.contextmanager
def kept_kernels(on_kernel: Callable[[Any, Any], None], saves: bool = True) -> Iterator[None]:
    """``on_kernel(kernel, launcher)`` is called for each kernel that Inductor keeps. saves: Inductor gets it, too."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original: Any = CachingAutotuner.save_gpu_kernel

    def save_gpu_kernel(self: Any, stream: Any, launcher: Any) -> Any:
        on_kernel(self, launcher)
        return original(self, stream, launcher) if saves else None

    with replaced(CachingAutotuner, "save_gpu_kernel", save_gpu_kernel):
        yield


@patch(
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block",
    versions="2.11–2.15",
    why="The Python of a method's Triton kernels, which `untorch tune FILE` runs later, is dropped once it has run.",
    test="test_cuda.py::test_torch_still_runs_the_autotune_block_and_drops_it",
)
@contextlib.contextmanager
def kernel_sources(on_source: Callable[[str, str], None]) -> Iterator[None]:
    """``on_source(definitions, calls)`` is called with the Python of the kernels of each graph that is compiled."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    original: Any = PythonWrapperCodegen.generate_and_run_autotune_block

    def patched(self: Any) -> None:
        on_source(self.kernel_autotune_defs.getvalue(), self.kernel_autotune_calls.getvalue())
        original(self)

    with replaced(PythonWrapperCodegen, "generate_and_run_autotune_block", patched):
        yield

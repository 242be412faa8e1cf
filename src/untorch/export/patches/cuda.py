"""Patches for targets on NVIDIA GPUs: where the toolkit is, which kernels Inductor keeps, and what kernels write."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from untorch.export.patches.cpu import torch_version
from untorch.export.patches.registry import patch, replaced
from untorch.export.toolkit import cuda_home

__all__ = ["kept_kernels", "kernel_accesses", "kernel_objects", "kernel_sources", "toolkit_folder"]


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


@patch(
    "torch._inductor.codecache.convert_cubin_to_obj",
    versions="< 2.13",
    why="Objects are named after a kernel's code: with two kernels of the same code, one overwrites the other and is "
    "linked twice.",
    test="test_cuda.py::test_objects_of_kernels_are_named_after_their_code",
)
@contextlib.contextmanager
def kernel_objects() -> Iterator[None]:
    """Each kernel has an object of its own."""
    from torch._inductor import codecache

    original: Any = getattr(codecache, "convert_cubin_to_obj", None)
    if original is None or torch_version() >= (2, 13):
        yield
        return

    def patched(cubin_file: str, kernel_name: str, *args: Any, **kwargs: Any) -> Any:
        # The name itself can be 200 characters, more than a file's name has room for behind a hash.
        own = f"{cubin_file}.{hashlib.sha256(kernel_name.encode()).hexdigest()[:16]}"
        shutil.copyfile(cubin_file, own)
        return original(own, kernel_name, *args, **kwargs)

    with replaced(codecache, "convert_cubin_to_obj", patched):
        yield


@patch(
    "torch._higher_order_ops.triton_kernel_wrap.identify_accessed_tensors",
    versions="2.11–2.15",
    why="Which arguments a Triton kernel of ours writes is found by compiling it to Triton's IR, four times for every "
    "call in the graph: half of the time of a language model's compilation.",
    test="test_cuda.py::test_torch_still_compiles_a_kernel_at_each_call",
)
@contextlib.contextmanager
def kernel_accesses() -> Iterator[None]:
    """What a Triton kernel reads and writes is found once for arguments of the same types and constants."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    # 2.11 has the function under another name.
    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    replaces = next(name for name in names if hasattr(wrap, name))
    original: Any = getattr(wrap, replaces)
    known: dict[Any, Any] = {}
    kernels: dict[int, Any] = {}  # kept, so that no other one gets its id

    def patched(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
        if tma_descriptor_metadata:
            return original(kernel, kwargs, tma_descriptor_metadata)
        # An autotuner is made for each launch that chooses warps or stages; the kernel in it is the same one.
        function = kernel if hasattr(kernel, "params") else getattr(kernel, "fn", kernel)
        configs = getattr(kernel, "configs", ())
        if not hasattr(function, "params"):
            return original(kernel, kwargs, tma_descriptor_metadata)
        kernels[id(function)] = function
        constants = {parameter.name for parameter in function.params if parameter.is_constexpr}
        key = (
            id(function), repr(configs[0].kwargs if configs else None),
            *((name, _kind(value, name in constants)) for name, value in kwargs.items()),
        )  # fmt: skip
        if key not in known:
            known[key] = original(kernel, kwargs, tma_descriptor_metadata)
        return known[key]

    with replaced(wrap, replaces, patched):
        yield


def _kind(value: Any, is_constant: bool) -> Any:
    """What a kernel's IR depends on: a tensor's dtype, that a number varies, or the value itself."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Expr):
        return "varies"
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return "tensor", dtype
    if isinstance(value, int) and not isinstance(value, bool) and not is_constant:
        return "int", value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    # 1, 1.0 and True are equal, and other constants to Triton.
    return type(value), value if isinstance(value, bool | int | float | str | None) else repr(value)

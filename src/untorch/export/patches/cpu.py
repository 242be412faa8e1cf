"""Patches of Inductor's C++ code generation: the vector ISA, -march, parallel loops, sums in tiles, reductions of
bytes, images that are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from untorch.export.patches.registry import patch, replaced

__all__ = [
    "gathered_channels_last", "has_cpp_march", "march", "reduced_bytes", "scattered_tiles", "small_loops",
    "torch_version", "vector_isa",
]  # fmt: skip


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def has_cpp_march() -> bool:
    """Whether this torch has the option ``cpp.march``."""
    from torch._inductor import config

    return hasattr(config.cpp, "march")


@patch(
    "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
    versions="2.11–2.15",
    why="Inductor probes a vector ISA by loading a library that it links like the model. With libuntorch.so among "
    "custom_op_libs the probe cannot be loaded, and Inductor silently generates scalar code. A CPU other than the "
    "build machine's cannot be probed at all.",
    test="test_cpu.py::test_the_isa_probe_still_fails_with_custom_op_libs",
)
@contextlib.contextmanager
def vector_isa(bits: int) -> Iterator[None]:
    """Inductor generates code for vectors of so many bits, without a probe; 0: scalar code."""
    from torch._inductor import cpu_vec_isa

    isas: list[Any] = []
    if bits:
        base: Any = cpu_vec_isa.VecAVX512 if bits == 512 else cpu_vec_isa.VecAVX2

        class Chosen(base):  # type: ignore[misc]
            """The ISA of the target, taken as given instead of being probed."""

            def __bool__(self) -> bool:
                return True

            def __hash__(self) -> int:
                return hash(str(self))

        isas.append(Chosen())
    with replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: isas):
        yield


@patch(
    "torch._inductor.cpp_builder._get_optimization_cflags",
    versions="< 2.13",
    why="There is no cpp.march: the flag -march=native is fixed.",
    test="test_cpu.py::test_torch_has_cpp_march",
)
@contextlib.contextmanager
def march(name: str) -> Iterator[None]:
    """The host code is compiled with -march=name."""
    from torch._inductor import cpp_builder

    original = cpp_builder._get_optimization_cflags

    def patched(*args: Any, **kwargs: Any) -> Any:
        def fixed(flags: list[str]) -> list[str]:
            return [f"march={name}" if flag == "march=native" else flag for flag in flags]

        result = original(*args, **kwargs)
        return (fixed(result[0]), *result[1:]) if isinstance(result, tuple) else fixed(result)

    with replaced(cpp_builder, "_get_optimization_cflags", patched):
        yield


@patch(
    "torch._inductor.codegen.cpp.CppKernel.decide_parallel_depth",
    versions="2.11–2.15",
    why="With cpp.dynamic_threads Inductor opens a parallel region for every loop, however small; starting threads "
    "costs more than a few thousand elements do. Loops whose size is known and small stay on one thread.",
    test="test_cpu.py::test_torch_still_parallelises_small_loops",
)
@contextlib.contextmanager
def small_loops() -> Iterator[None]:
    """Small loops of known size run on one thread."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppKernel

    original: Any = CppKernel.decide_parallel_depth

    def patched(self: Any, max_parallel_depth: Any, threads: int) -> Any:
        if any(not getattr(size, "is_number", True) for size in self.call_ranges):
            return original(self, max_parallel_depth, threads)  # may be large when it runs
        with config.patch({"cpp.dynamic_threads": False}):
            return original(self, max_parallel_depth, threads)

    with replaced(CppKernel, "decide_parallel_depth", patched):
        yield


@patch(
    "torch._inductor.codegen.cpp.CppTile2DKernel.store",
    versions="2.11–2.15",
    why="Sums into computed places (fold, index_put, scatter_add) of a transposed source: in loops tiled in two "
    "dimensions, the place within a tile is added twice, and memory behind the result is written.",
    test="test_cpu.py::test_torch_still_scatters_tiles_beside_their_place",
)
@contextlib.contextmanager
def scattered_tiles() -> Iterator[None]:
    """Sums from tiles go where they belong."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

    original: Any = CppTile2DKernel.store
    of_vectors: Any = CppVecKernel.store

    def patched(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if is_atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            # Its index_expr, that of tiles, adds the place within the tile.
            of_vectors(self, name, index, value, mode)
        else:
            original(self, name, index, value, mode)

    with replaced(CppTile2DKernel, "store", patched):
        yield


@patch(
    "torch._inductor.ir.Reduction.create",
    versions="2.11–2.15",
    why="A loop over bytes loads 16 into a vector of 64 (8 of 32), and min, max, argmin and argmax reduce the others, "
    "which are zeros, as well: the least of positive numbers is 0. Positions of those are read from behind an array.",
    test="test_cpu.py::test_torch_still_reduces_more_bytes_than_it_loads",
)
@contextlib.contextmanager
def reduced_bytes() -> Iterator[None]:
    """Bytes become int32 before their extrema are computed: vectors of these have no more values than are loaded."""
    from torch._inductor.ir import Reduction
    from torch._inductor.lowering import to_dtype
    from torch._inductor.virtualized import ops

    original: Any = Reduction.create

    def create(
        cls: Any, device: torch.device, dst_dtype: torch.dtype, src_dtype: torch.dtype, inner_fn: Any, ranges: Any,
        reduction_ranges: Any, reduction_type: str, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        def widened(index: Any, reduction_index: Any) -> Any:
            found = inner_fn(index, reduction_index)
            if isinstance(found, tuple):  # argmin's and argmax's, with the position
                return ops.to_dtype(found[0], torch.int32, src_dtype=src_dtype), *found[1:]
            return ops.to_dtype(found, torch.int32, src_dtype=src_dtype)

        rest = (ranges, reduction_ranges, reduction_type, *args)
        bytes_on_cpu = device.type == "cpu" and src_dtype in (torch.int8, torch.uint8)
        if not bytes_on_cpu or reduction_type not in ("min", "max", "argmin", "argmax"):
            return original(device, dst_dtype, src_dtype, inner_fn, *rest, **kwargs)
        if reduction_type in ("argmin", "argmax"):
            return original(device, dst_dtype, torch.int32, widened, *rest, **kwargs)
        result = original(device, torch.int32, torch.int32, widened, *rest, **kwargs)
        result.realize()
        return to_dtype(result, dst_dtype)

    with replaced(Reduction, "create", classmethod(create)):
        yield


@patch(
    "torch._inductor.ir.ComputedBuffer.get_fill_order",
    versions="2.11–2.15",
    why="An image that is gathered pixel by pixel, as interpolate() does, gets the row-major layout also where the "
    "source is channels last: indices that are tensors have no strides that Inductor could compare. Each value is then "
    "gathered alone, which takes several times as long.",
    test="test_cpu.py::test_torch_still_gathers_row_by_row",
)
@contextlib.contextmanager
def gathered_channels_last() -> Iterator[None]:
    """Images of pixels that are gathered from images channels last are channels last."""
    from torch._inductor import dependencies
    from torch._inductor.ir import ComputedBuffer, get_device_type
    from torch._inductor.utils import is_gpu
    from torch._inductor.virtualized import V

    original: Any = ComputedBuffer.get_fill_order

    def patched(self: Any) -> Any:
        order = original(self)
        if order is None or list(order) != [3, 2, 1, 0] or is_gpu(get_device_type(self)):
            return order
        reads = [read for read in self.get_read_writes().reads if isinstance(read, dependencies.MemoryDep)]
        if not any(read.is_indirect() for read in reads):
            return order
        (index, _), _ = dependencies.index_vars_squeeze(self.data.get_pointwise_size(), self.data.get_reduction_size())
        strides = [V.graph.sizevars.stride_hints(read.index, index) for read in reads]
        return [1, 3, 2, 0] if all(list(row[1:]) == [1, 0, 0] for row in strides) else order

    with replaced(ComputedBuffer, "get_fill_order", patched):
        yield

"""A fake CUDA: the patches by which torch and Triton see a GPU in the process that cross-compiles for it."""

from __future__ import annotations

import ast
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from untorch.export.gpus import GpuModel
from untorch.export.patches.fake_driver import Convolution, Driver, Properties
from untorch.export.patches.indexing import read_index, write_index
from untorch.export.patches.registry import patch, replaced

__all__ = ["fake_cuda", "forget_the_machine"]

_TEST = "test_fake_cuda.py::"


@contextlib.contextmanager
def fake_cuda(
    gpu: GpuModel, values: Mapping[int, torch.Tensor], choose_launcher: Callable[[Any], Any]
) -> Iterator[None]:
    """torch and Triton see ``gpu``.

    values: the values of fake tensors, by their id.
    choose_launcher: takes one of a CachingAutotuner's launchers, as none can be timed.
    """
    with (
        torch_cuda(gpu), device_interface(gpu), fake_tensor_device(), contiguous(), copy(),
        indexing(), convolution_layout(), same_tensor(values), uniform_values(), joint_graph_patterns(),
        triton_driver(gpu), autotune_block(choose_launcher),
    ):  # fmt: skip
        yield


def forget_the_machine() -> None:
    """Clears torch's caches: they say that there is no GPU, and therefore no use for Triton."""
    from torch._inductor import utils
    from torch.utils import _triton

    for module in (utils, _triton):
        for value in vars(module).values():
            if callable(forget := getattr(value, "cache_clear", None)):
                forget()


@contextlib.contextmanager
def _all_replaced(owner: Any, **values: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(replaced(owner, name, value))
        yield


@patch(
    "torch.cuda.is_available", "torch.cuda.device_count", "torch.cuda.current_device",
    "torch.cuda.get_device_properties", "torch.cuda.get_device_name", "torch.cuda.get_device_capability",
    "torch.cuda._exchange_device", "torch.cuda._maybe_exchange_device", "torch.cuda.set_device",
    "torch.cuda.synchronize", "torch.cuda._lazy_init", "torch.cuda.is_initialized", "torch.cuda.get_rng_state",
    "torch.cuda.set_rng_state", "torch.version.cuda",
    versions="2.11–2.13",
    why="They ask the driver for devices and their properties.",
    test=_TEST + "test_torch_still_asks_the_driver",
)  # fmt: skip
@contextlib.contextmanager
def torch_cuda(gpu: GpuModel) -> Iterator[None]:
    """torch.cuda describes ``gpu``, and changes nothing."""
    properties = Properties(gpu)
    with (
        _all_replaced(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_properties=lambda device=None: properties,
            get_device_name=lambda device=None: properties.name,
            get_device_capability=lambda device=None: gpu.capability,
            _exchange_device=lambda device: 0,
            _maybe_exchange_device=lambda device: 0,
            set_device=lambda device: None,
            synchronize=lambda device=None: None,
            _lazy_init=lambda: None,
            is_initialized=lambda: True,
            get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
            set_rng_state=lambda state, device=None: None,
        ),
        contextlib.nullcontext() if torch.version.cuda is not None else replaced(torch.version, "cuda", "13.0"),
    ):
        yield


@patch(
    "torch._dynamo.device_interface.CudaInterface", "torch._C._cuda_getCurrentRawStream",
    versions="2.11–2.13",
    why="Inductor asks for devices, capabilities and streams through this class, which asks the driver.",
    test=_TEST + "test_inductors_interface_still_asks_the_driver",
)  # fmt: skip
@contextlib.contextmanager
def device_interface(gpu: GpuModel) -> Iterator[None]:
    """Inductor's view of CUDA devices is ``gpu``."""
    from torch._dynamo.device_interface import CudaInterface

    properties, (major, minor) = Properties(gpu), gpu.capability
    has_streams = hasattr(torch._C, "_cuda_getCurrentRawStream")
    with (
        _all_replaced(
            CudaInterface,
            get_device_properties=staticmethod(lambda device=None: properties),
            exchange_device=staticmethod(lambda device: 0),
            maybe_exchange_device=staticmethod(lambda device: 0),
            get_compute_capability=staticmethod(lambda device=None: 10 * major + minor),
        ),
        _all_replaced(
            CudaInterface.Worker,
            get_device_properties=staticmethod(lambda device=None: properties),
            current_device=staticmethod(lambda: 0),
        ),
        contextlib.nullcontext() if has_streams else replaced(torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
    ):
        yield


@patch(
    "torch._subclasses.fake_tensor.init_gpu_context",
    "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",
    versions="2.11–2.13",
    why="A fake tensor on a GPU starts CUDA.",
    test=_TEST + "test_a_fake_tensor_on_a_gpu_still_starts_cuda",
)
@contextlib.contextmanager
def fake_tensor_device() -> Iterator[None]:
    """Fake tensors on the GPU are made without CUDA."""
    from torch._subclasses import fake_tensor

    with (
        replaced(fake_tensor, "init_gpu_context", lambda device=None: None),
        replaced(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True)),
    ):
        yield


@patch(
    "torch.Tensor.contiguous",
    versions="2.11–2.13",
    why="It makes the tensor's device the current one, which fails in a fork of a process that uses CUDA.",
    test=_TEST + "test_contiguous_still_sets_the_current_device",
)
@contextlib.contextmanager
def contiguous() -> Iterator[None]:
    """Tensor.contiguous is the operator alone."""

    def method(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.contiguous.default(self, memory_format=memory_format)
        return made

    with replaced(torch.Tensor, "contiguous", method):
        yield


@patch(
    "torch.Tensor.copy_",
    versions="2.11–2.13",
    why="It makes the tensor's device the current one: Inductor cannot put values into a part of a tensor.",
    test=_TEST + "test_copy_still_sets_the_current_device",
)
@contextlib.contextmanager
def copy() -> Iterator[None]:
    """Tensor.copy_ is the operator alone."""

    def method(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.copy_.default(self, src, non_blocking)
        return made

    with replaced(torch.Tensor, "copy_", method):
        yield


@patch(
    "torch.Tensor.__getitem__", "torch.Tensor.__setitem__", "torch.Tensor.nonzero",
    versions="2.11–2.15",
    why="They make the tensor's device the current one: masks fail, and decompositions that index (grid_sample, "
    "unfold).",
    test=_TEST + "test_indexing_still_sets_the_current_device",
)  # fmt: skip
@contextlib.contextmanager
def indexing() -> Iterator[None]:
    """Indexing of tensors on the GPU is made of operators."""
    read, write = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def getitem(self: torch.Tensor, index: Any) -> Any:
        return read_index(self, index) if self.device.type == "cuda" else read(self, index)

    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        (write_index if self.device.type == "cuda" else write)(self, index, value)

    def nonzero(self: torch.Tensor, *, as_tuple: bool = False) -> Any:
        found: torch.Tensor = torch.ops.aten.nonzero.default(self)
        return found.unbind(1) if as_tuple else found

    with _all_replaced(torch.Tensor, __getitem__=getitem, __setitem__=setitem, nonzero=nonzero):
        yield


@patch(
    "torch._inductor.graph.is_same_tensor",
    versions="2.11–2.13",
    why="It compares addresses, and fake tensors have none: tensors that differ would be one constant.",
    test=_TEST + "test_torch_still_compares_addresses",
)
@contextlib.contextmanager
def same_tensor(values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Fake tensors are the same if their values, by their id, are."""
    from torch._inductor import graph
    from torch._subclasses.fake_tensor import FakeTensor

    original: Any = vars(graph)["is_same_tensor"]

    def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
        first, second = values.get(id(a)), values.get(id(b))
        if first is not None and second is not None:
            return bool(original(first, second))
        return a is b if isinstance(a, FakeTensor) or isinstance(b, FakeTensor) else bool(original(a, b))

    with replaced(graph, "is_same_tensor", is_same_tensor):
        yield


@patch(
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value",
    versions="2.11–2.13",
    why="It reads the values of small tensors, which fake ones do not have, and computes on the GPU.",
    test=_TEST + "test_torch_still_computes_constants_on_the_gpu",
)
@contextlib.contextmanager
def uniform_values() -> Iterator[None]:
    """Constants are worked out on the CPU; those of the module are unknown."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    original = UniformValueConstantFolder._deduce_value

    def deduce_value(self: Any, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.unknown_value
        with _OnTheHost():  # type: ignore[no-untyped-call]
            return original(self, node)

    with replaced(UniformValueConstantFolder, "_deduce_value", deduce_value):
        yield


@patch(
    "torch._C._select_conv_backend", "torch._C._conv_determine_backend_memory_format",
    versions="2.11–2.13",
    why="A torch without CUDA has no cuDNN, and expects other layouts of a convolution's result.",
    test=_TEST + "test_a_torch_without_cudnn_still_expects_another_layout",
)  # fmt: skip
@contextlib.contextmanager
def convolution_layout() -> Iterator[None]:
    """The result of a convolution has the layout that the runtime gives it on a GPU."""
    with (
        replaced(torch._C, "_select_conv_backend", Convolution.select),
        replaced(torch._C, "_conv_determine_backend_memory_format", Convolution.memory_format),
    ):
        yield


@patch(
    "torch._inductor.fx_passes.joint_graph.lazy_init",
    versions="2.11–2.13",
    why="It traces patterns on the GPU. They are traced on the CPU before.",
    test=_TEST + "test_torch_still_traces_its_patterns_on_the_device",
)
@contextlib.contextmanager
def joint_graph_patterns() -> Iterator[None]:
    """No patterns are traced."""
    from torch._inductor.fx_passes import joint_graph

    with replaced(joint_graph, "lazy_init", lambda input_device=None: None):
        yield


@patch(
    "triton.runtime.driver._active", "triton.backends.backends",
    versions="2.11–2.13",
    why="Triton's driver asks for the GPU, and loads each kernel into it.",
    test=_TEST + "test_triton_still_needs_a_driver",
)  # fmt: skip
@contextlib.contextmanager
def triton_driver(gpu: GpuModel) -> Iterator[None]:
    """Triton compiles for ``gpu`` and loads nothing."""
    import triton.backends
    import triton.runtime

    driver = Driver(gpu)

    class Backend:
        def __new__(cls) -> Any:
            return driver

        is_active = staticmethod(lambda: True)

    backends = triton.backends.backends
    nvidia = backends["nvidia"]
    backends["nvidia"] = type(nvidia)(compiler=nvidia.compiler, driver=Backend)
    active = triton.runtime.driver._active
    triton.runtime.driver._active = driver
    try:
        yield
    finally:
        backends["nvidia"] = nvidia
        triton.runtime.driver._active = active


@patch(
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block",
    versions="2.11–2.13",
    why="It runs the kernels to time them.",
    test=_TEST + "test_torch_still_runs_kernels_to_time_them",
)
@contextlib.contextmanager
def autotune_block(choose_launcher: Callable[[Any], Any]) -> Iterator[None]:
    """Every kernel's configurations are compiled, several kernels at a time, and ``choose_launcher`` keeps one."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compile_and_choose(self: Any) -> None:
        kernel: Any
        self.kernel_autotune_defs.splice("\nasync_compile.wait(globals())\ndel async_compile\n")
        scope: dict[str, Any] = {}
        with replaced(CachingAutotuner, "precompile", lambda self, *args, **kwargs: None):
            exec(self.kernel_autotune_defs.getvalue(), scope)
        kernels = [value for value in scope.values() if isinstance(value, CachingAutotuner)]
        # LLVM runs without Python's lock, and ptxas is a process.
        with (
            _one_parser(),
            ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="untorch-triton") as pool,
        ):
            list(pool.map(lambda kernel: kernel.precompile(warm_cache_only=True), kernels))
        for kernel in kernels:
            if not kernel.launchers:
                kernel.precompile()
            kernel.launchers = [choose_launcher(kernel)]
            kernel.save_gpu_kernel(0, kernel.launchers[0])

    with replaced(PythonWrapperCodegen, "generate_and_run_autotune_block", compile_and_choose):
        yield


@contextlib.contextmanager
def _one_parser() -> Iterator[None]:
    """One thread at a time parses Python: 3.11 counts the depth of trees for all threads together, and fails."""
    lock, original = threading.Lock(), ast.parse

    def parse(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return original(*args, **kwargs)

    with replaced(ast, "parse", parse):
        yield


class _OnTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that are asked for a tensor on a GPU make it in the host's memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_map(moved, (args, kwargs or {}))
        return func(*args, **kwargs)

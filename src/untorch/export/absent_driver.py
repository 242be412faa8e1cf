"""What torch and Triton see of a GPU that is not there, in the process that compiles for it.

What is replaced, all of it in torch 2.11 to 2.13 and Triton 3.6:

| what | why |
|---|---|
| torch.cuda, CudaInterface | they ask the driver for devices and their properties |
| FakeTensorMode.avoid_device_init, init_gpu_context | a fake tensor on a GPU starts CUDA |
| Tensor.contiguous | it makes the tensor's device the current one, which fails in a fork of a process that uses CUDA |
| Triton's driver | it asks for the GPU and loads each kernel into it |
| PythonWrapperCodegen.generate_and_run_autotune_block | it runs the kernels |
| inductor.graph.is_same_tensor | it compares addresses, and fake tensors have none |
| UniformValueConstantFolder._deduce_value | it reads the values of small tensors, and makes such of one element there |
| _C._select_conv_backend and what it is for | a torch without CUDA has no cuDNN: other layouts of results |
| joint_graph.lazy_init | a torch without CUDA cannot trace its patterns on a GPU: they are traced on the CPU before |
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from untorch.export.errors import CompileError
from untorch.export.gpus import GpuModel
from untorch.export.kernel_choice import choose

__all__ = ["DEVICE", "forget_the_machine", "pretend", "stub_driver"]

DEVICE = torch.device("cuda", 0)
# What generated code calls; without any, some linkers leave the library out.
_DRIVER_FUNCTIONS = ("cuLaunchKernel", "cuLaunchKernelEx", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload",
    "cuFuncSetAttribute", "cuGetErrorString", "cuTensorMapEncodeTiled")  # fmt: skip


def stub_driver(path: Path, compiler: str) -> None:
    """Writes a libcuda.so to link with; the machine that runs the file has the real one."""
    source = "".join(f"int {name}(void) {{ return 999; }}\n" for name in _DRIVER_FUNCTIONS)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(path)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def forget_the_machine() -> None:
    """Torch remembers that there was no GPU, and with it no use for Triton."""
    from torch._inductor import utils
    from torch.utils import _triton

    for module in (utils, _triton):
        for value in vars(module).values():
            if callable(forget := getattr(value, "cache_clear", None)):
                forget()


class _Properties:
    """What torch.cuda.get_device_properties gives."""

    def __init__(self, gpu: GpuModel) -> None:
        self.name = f"NVIDIA {gpu.name}"
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.multiprocessors
        self.total_memory = gpu.memory
        self.L2_cache_size = gpu.l2
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = gpu.shared_memory
        self.shared_memory_per_multiprocessor = gpu.shared_memory + 1024
        self.regs_per_multiprocessor = gpu.registers
        self.max_threads_per_multi_processor = gpu.threads
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.gcnArchName = ""
        self.is_integrated = False


class _Utils:
    """The part of Triton's driver that looks at kernels."""

    def __init__(self, gpu: GpuModel) -> None:
        self._gpu = gpu

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled registers, most threads) of a kernel, which is not loaded."""
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            done = subprocess.run(
                [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", done)
        if usage is None:
            raise RuntimeError(f"cuobjdump says nothing of the registers of {name}: {done[:200]}")
        return 1, 1, int(usage[1]), int(usage[2]) // 4, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Under the names that Triton has for them."""
        return {
            "max_shared_mem": self._gpu.shared_memory, "max_num_regs": self._gpu.registers, "warpSize": 32,
            "multiprocessor_count": self._gpu.multiprocessors, "sm_clock_rate": 0, "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }  # fmt: skip


class _Launcher:
    """Takes the place of what would launch a kernel."""

    global_scratch_size, global_scratch_align, profile_scratch_size = 0, 1, 0

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kernel was to be launched while compiling for a GPU that is not there")


class _Driver:
    """Triton's driver for a GPU that is not there."""

    launcher_cls = _Launcher

    def __init__(self, gpu: GpuModel) -> None:
        self._gpu = gpu
        self.utils = _Utils(gpu)

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        major, minor = self._gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int | None = None) -> int:
        """The null stream."""
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """(9, 0) for sm_90."""
        return self._gpu.capability

    def get_active_torch_device(self) -> torch.device:
        """As torch names it."""
        return DEVICE

    @staticmethod
    def is_active() -> bool:
        """It is the one to take."""
        return True


@contextlib.contextmanager
def pretend(gpu: GpuModel, values: dict[int, torch.Tensor], tuning: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """torch and Triton see ``gpu``. values: of fake tensors, by their id. tuning: which configurations to take."""
    from unittest import mock

    import triton.backends
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import graph
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._subclasses import fake_tensor

    properties, driver = _Properties(gpu), _Driver(gpu)
    major, minor = gpu.capability
    same_tensor: Any = vars(graph)["is_same_tensor"]
    deduce = UniformValueConstantFolder._deduce_value

    def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
        first, second = values.get(id(a)), values.get(id(b))
        if first is not None and second is not None:
            return bool(same_tensor(first, second))
        fakes = fake_tensor.FakeTensor
        return a is b if isinstance(a, fakes) or isinstance(b, fakes) else bool(same_tensor(a, b))

    def deduce_value(self: Any, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.unknown_value
        with _OnTheHost():  # type: ignore[no-untyped-call]
            return deduce(self, node)

    class Backend:
        def __new__(cls) -> Any:
            return driver

        is_active = staticmethod(lambda: True)

    cuda = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (major, minor), "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0, "set_device": lambda device: None,
        "synchronize": lambda device=None: None, "_lazy_init": lambda: None, "is_initialized": lambda: True,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }  # fmt: skip
    interface: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties, "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0, "get_compute_capability": lambda device=None: 10 * major + minor,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))

        for name, value in cuda.items():
            replace(torch.cuda, name, value)
        for name, value in interface.items():
            replace(CudaInterface, name, staticmethod(value))
        replace(CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: properties))
        replace(CudaInterface.Worker, "current_device", staticmethod(lambda: 0))
        if torch.version.cuda is None:
            replace(torch.version, "cuda", "13.0")
        if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
            replace(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
        replace(torch._C, "_select_conv_backend", _Convolution.select)
        replace(torch._C, "_conv_determine_backend_memory_format", _Convolution.memory_format)
        replace(fake_tensor, "init_gpu_context", lambda device=None: None)
        replace(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True))
        replace(torch.Tensor, "contiguous", _contiguous)
        replace(graph, "is_same_tensor", is_same_tensor)
        replace(UniformValueConstantFolder, "_deduce_value", deduce_value)
        replace(joint_graph, "lazy_init", lambda input_device=None: None)
        replace(
            PythonWrapperCodegen, "generate_and_run_autotune_block", lambda self: _choose_kernels(self, gpu, tuning)
        )
        nvidia = triton.backends.backends["nvidia"]
        stack.enter_context(
            mock.patch.dict(triton.backends.backends, nvidia=type(nvidia)(compiler=nvidia.compiler, driver=Backend))
        )
        replace(triton.runtime.driver, "_active", driver)
        yield


def _contiguous(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.contiguous.default(self, memory_format=memory_format)
    return made


class _OnTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that are asked for a tensor on a GPU make it in the host's memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_map(moved, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Convolution:
    """The layout of a convolution's result, by the rule of native/shims/cuda/convolution.cpp, which is cuDNN's."""

    @staticmethod
    def select(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
        bias_sizes: Any = None,
    ) -> bool:
        """Whether cuDNN would be asked; torch hands that on to ``memory_format``."""
        if weight.dim() == 3 or input.dtype == torch.float64 or input.numel() == 0 or weight.numel() == 0:
            return False
        return not (transposed and any(extra >= step for extra, step in zip(output_padding, stride, strict=False)))

    @staticmethod
    def memory_format(input: torch.Tensor, weight: torch.Tensor, by_library: bool) -> torch.memory_format:
        """Channels last where one of the operands is."""
        from torch._prims_common import suggest_memory_format

        formats = [suggest_memory_format(tensor) for tensor in (input, weight)] if by_library else []
        return next((found for found in formats if found != torch.contiguous_format), torch.contiguous_format)


def _choose_kernels(wrapper: Any, gpu: GpuModel, tuning: Mapping[str, Mapping[str, Any]]) -> None:
    """Compiles every kernel's configurations and keeps one."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernel: Any
    wrapper.kernel_autotune_defs.splice("\nasync_compile.wait(globals())\ndel async_compile\n")
    scope: dict[str, Any] = {}
    exec(wrapper.kernel_autotune_defs.getvalue(), scope)
    for kernel in [value for value in scope.values() if isinstance(value, CachingAutotuner)]:
        if not kernel.launchers:
            kernel.precompile()
        kernel.launchers = [choose(gpu, kernel, tuning)]
        kernel.save_gpu_kernel(0, kernel.launchers[0])

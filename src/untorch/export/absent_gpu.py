"""Compiles for a GPU that this machine does not have: in a process of its own, where torch is made to see it.

The model is traced and changed on the CPU. In the child process its tensors become fake ones on the GPU, which have a
shape and no memory, and AOTInductor compiles the graph: Triton and ptxas need no GPU. Of several configurations of a
kernel the one that spills fewest registers is taken, as none can be timed. The values go from the parent straight into
the file.

What is replaced in the child, all of it in torch 2.11 to 2.13 and Triton 3.6:

| what | why |
|---|---|
| torch.cuda, CudaInterface | they ask the driver for devices and their properties |
| FakeTensorMode.avoid_device_init, init_gpu_context | a fake tensor on a GPU starts CUDA |
| Triton's driver | it asks for the GPU and loads each kernel into it |
| PythonWrapperCodegen.generate_and_run_autotune_block | it runs the kernels |
| inductor.graph.is_same_tensor | it compares addresses, and fake tensors have none |
| UniformValueConstantFolder._deduce_value | it reads the values of small tensors |
| joint_graph.lazy_init | a torch without CUDA cannot trace its patterns on a GPU: they are traced on the CPU before |
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import subprocess
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.gpus import GpuModel
from untorch.export.passes import PassReport
from untorch.runtime.errors import UnsupportedError, UntorchError

__all__ = ["Produced", "compile_elsewhere", "refuse_native_attention", "require_triton", "stub_driver"]

_DEVICE = torch.device("cuda", 0)
# What generated code calls; without any, some linkers leave the library out.
_DRIVER_FUNCTIONS = ("cuLaunchKernel", "cuLaunchKernelEx", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload",
    "cuFuncSetAttribute", "cuGetErrorString", "cuTensorMapEncodeTiled")  # fmt: skip


@dataclass
class Produced:
    """What AOTInductor made: its files, the constants' values by FQN, and which of them lie on the GPU."""

    paths: list[str]
    tensors: dict[str, torch.Tensor]
    on_gpu: frozenset[str]


@dataclass
class _Failure:
    """An error of torch's or Triton's in the child: many cannot be pickled."""

    reason: str
    trace: str


class _ChildError(Exception):
    """Shows where in the child it was."""


Compile = Callable[[fx.GraphModule, tuple[Any, ...], dict[str, Any]], list[Any]]


def require_triton() -> None:
    """Raises UnsupportedError where Triton, or torch's version of it, is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "export: arch: kernels for a GPU that is not there are compiled by Triton, which is not installed: "
            "install the triton that belongs to this torch (3.6 for torch 2.11 to 2.13)"
        ) from error


def stub_driver(path: Path, compiler: str) -> None:
    """Writes a libcuda.so to link with; the machine that runs the file has the real one."""
    source = "".join(f"int {name}(void) {{ return 999; }}\n" for name in _DRIVER_FUNCTIONS)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(path)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _tensors_by_name(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """All parameters, buffers and other tensors of a module and its submodules, by their FQN."""
    found: dict[str, torch.Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for values in (owner._parameters, owner._buffers, vars(owner)):
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}.{name}" if prefix else name] = value
    return found


def refuse_native_attention(module: fx.GraphModule, passes: list[PassReport], method: str, gpu: GpuModel) -> None:
    """Raises CompileError for attention that is left to torch.

    Its choice among the fused operators asks the GPU, and without one it would be plain math without a word.
    """
    for node in module.graph.nodes:
        if node.target != torch.ops.aten.scaled_dot_product_attention.default:
            continue
        where = source_line(node)
        skipped = [report.skipped.get(node.name) for report in passes if report.name == "choose_attention"]
        reason = next((text for text in skipped if text), "native: the pass choose_attention was switched off")
        raise CompileError(
            f"method {method!r}: {node.name}{f' ({where})' if where else ''} would be left to PyTorch's fused "
            f"operators, which are chosen on the GPU, and {gpu.name} is not here ({reason}): use attention='math' for "
            f"plain matrix products, or compile on such a GPU"
        )


def compile_elsewhere(
    name: str, module: fx.GraphModule, example: tuple[Any, dict[str, Any]], gpu: GpuModel, compile_graph: Compile
) -> Produced:
    """``compile_graph(module, args, kwargs)`` in a child process that takes ``gpu`` for its own.

    Raises CompileError, or what the call raised if that is an error of untorch's.
    """
    values = _tensors_by_name(module)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="untorch-") as folder:
        path = Path(folder) / "produced"
        child = context.Process(target=_child, args=(path, module, example, gpu, compile_graph))
        with warnings.catch_warnings():
            # The child uses one thread, and neither locks nor the GPU of its parent.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            child.start()
        try:
            child.join()
        finally:
            if child.is_alive():
                child.kill()
                child.join()
        if not path.exists():
            raise CompileError(
                f"method {name!r}: the process that compiles for {gpu.name} ended with exit code {child.exitcode}"
            )
        result = torch.load(path, weights_only=False)
    if isinstance(result, UntorchError):
        raise result
    if isinstance(result, _Failure):
        raise CompileError(f"method {name!r}: AOTInductor failed: {result.reason}") from _ChildError(result.trace)
    paths, on_gpu, made = result
    missing = [fqn for fqn, source in on_gpu.items() if source not in values]
    if missing:
        raise CompileError(f"method {name!r}: AOTInductor made constants whose values are not known: {missing}")
    return Produced(paths, {fqn: values[source] for fqn, source in on_gpu.items()} | made, frozenset(on_gpu))


def _child(
    path: Path, module: fx.GraphModule, example: tuple[Any, dict[str, Any]], gpu: GpuModel, compile_graph: Compile
) -> None:
    """Writes (paths, the module's tensors by their names there, others), an error, or what is left of a foreign one."""
    torch.set_num_threads(1)  # the parent's threads are not here
    _forget_the_machine()
    result: Any
    try:
        from torch._inductor.fx_passes import joint_graph

        joint_graph.lazy_init(torch.device("cpu"))
        values: dict[int, torch.Tensor] = {}
        with torch.no_grad(), _seen(gpu, values):
            args, kwargs = _place(module, example, values)
            names = {tensor.untyped_storage()._cdata: fqn for fqn, tensor in _tensors_by_name(module).items()}
            on_gpu, made, paths = {}, {}, []
            for item in compile_graph(module, args, kwargs):
                if not isinstance(item, dict):
                    paths.append(item)
                    continue
                for fqn, (tensor, _) in item.items():
                    if isinstance(tensor, torch._subclasses.FakeTensor):
                        # A constant of the code has another name there; the copy of one that is written, other memory.
                        on_gpu[fqn] = names.get(tensor.untyped_storage()._cdata, fqn)
                    else:
                        made[fqn] = tensor
        result = (paths, on_gpu, made)
    except UntorchError as error:
        result = error
    except Exception as error:
        result = _Failure(str(error) or type(error).__name__, traceback.format_exc())
    partial = path.with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(path)


def _forget_the_machine() -> None:
    """Torch remembers that there was no GPU, and with it no use for Triton."""
    from torch._inductor import utils
    from torch.utils import _triton

    for module in (utils, _triton):
        for value in vars(module).values():
            if callable(forget := getattr(value, "cache_clear", None)):
                forget()


def _place(
    module: fx.GraphModule, example: tuple[Any, dict[str, Any]], values: dict[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes the module and its graphs one for the GPU; gives the example inputs there.

    ``values`` gets the values of the fake tensors by their id.
    """
    mode = _fake_mode(module)
    mode.allow_non_fake_inputs = True
    placed: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_DEVICE)
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made

    def moved(value: Any) -> Any:
        return _DEVICE if isinstance(value, torch.device) else value

    for owner in module.modules():
        tensors: Any
        for tensors in (owner._parameters, owner._buffers, vars(owner)):
            for name, tensor in list(tensors.items()):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if id(tensor) not in placed:
                    placed[id(tensor)] = fake(tensor)
                    values[id(placed[id(tensor)])] = tensor
                tensors[name] = placed[id(tensor)]
        if isinstance(owner, fx.GraphModule):
            for node in owner.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, moved)
                node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
                if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                    node.meta["val"] = fake(node.meta["val"])
            owner.recompile()
    args, kwargs = pytree.tree_map_only(torch.Tensor, fake, example)
    return tuple(args), dict(kwargs)


def _fake_mode(module: fx.GraphModule) -> Any:
    """The mode whose symbols the graph's sizes are made of."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for node in module.graph.nodes:
        if isinstance(value := node.meta.get("val"), FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


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
        return _DEVICE

    @staticmethod
    def is_active() -> bool:
        """It is the one to take."""
        return True


@contextlib.contextmanager
def _seen(gpu: GpuModel, values: dict[int, torch.Tensor]) -> Iterator[None]:
    """torch and Triton see ``gpu``. ``values``: of fake tensors, by their id."""
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
        return self.unknown_value if node.op == "get_attr" else deduce(self, node)

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
        replace(fake_tensor, "init_gpu_context", lambda device=None: None)
        replace(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True))
        replace(graph, "is_same_tensor", is_same_tensor)
        replace(UniformValueConstantFolder, "_deduce_value", deduce_value)
        replace(joint_graph, "lazy_init", lambda input_device=None: None)
        replace(PythonWrapperCodegen, "generate_and_run_autotune_block", _choose_kernels)
        nvidia = triton.backends.backends["nvidia"]
        stack.enter_context(
            mock.patch.dict(triton.backends.backends, nvidia=type(nvidia)(compiler=nvidia.compiler, driver=Backend))
        )
        triton.runtime.driver.set_active(driver)
        yield


def _choose_kernels(wrapper: Any) -> None:
    """Compiles every kernel's configurations and keeps the one that spills fewest registers."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernel: Any
    wrapper.kernel_autotune_defs.splice("\nasync_compile.wait(globals())\ndel async_compile\n")
    scope: dict[str, Any] = {}
    exec(wrapper.kernel_autotune_defs.getvalue(), scope)
    for kernel in [value for value in scope.values() if isinstance(value, CachingAutotuner)]:
        if not kernel.launchers:
            kernel.precompile()
        kernel.launchers = [min(kernel.launchers, key=lambda launcher: launcher.n_spills)]
        kernel.save_gpu_kernel(0, kernel.launchers[0])

"""CUDA targets: the GPU that a model is compiled for and on, the toolkit's files, and moving models to the GPU."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from untorch.export.errors import CompileError
from untorch.export.gpus import GpuModel, find_gpu
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = ["CudaTarget", "Mover", "cuda_home", "driver_library", "ptxas_version", "resolve_device", "resolve_devices"]

_DEVICE = re.compile(r"cuda(?::(\d{1,4}))?")
_HEADER = Path("include") / "cuda_runtime.h"


@dataclass(frozen=True)
class CudaTarget:
    """The GPU that compiles and tunes the kernels, as torch calls it ("cuda:0"), and its architecture ("sm_90").

    ``absent``: the GPU to compile for, where it is not there and nothing can be tuned.
    """

    device: str
    architecture: str
    absent: GpuModel | None = None

    @property
    def home(self) -> str:
        """The device on which the model lies while it is compiled."""
        return self.device if self.absent is None else "cpu"


def resolve_devices(device: object, arch: Any = None) -> tuple[CudaTarget | None, ...]:
    """What export()'s ``device`` and ``arch``, one or several, mean here. Raises as ``resolve_device``."""
    if isinstance(arch, str) or not isinstance(arch, Sequence):
        return (resolve_device(device, arch),)
    if not arch:
        raise InvalidArgumentError("export: arch: expected the name of a GPU, or a list of them, got an empty one")
    targets = tuple(resolve_device(device, name) for name in arch)
    architectures = [target.architecture for target in targets if target is not None]
    for architecture in architectures:
        if architectures.count(architecture) > 1:
            names = [name for name, found in zip(arch, architectures, strict=True) if found == architecture]
            raise InvalidArgumentError(
                f"export: arch: {' and '.join(map(repr, names))} are both {architecture}: a file has one code for it"
            )
    return targets


def resolve_device(device: object, arch: str | None = None) -> CudaTarget | None:
    """What export()'s ``device`` and ``arch`` mean here; None for the CPU.

    Raises UnsupportedError or InvalidArgumentError if this machine cannot compile for it.
    """
    if arch is not None:
        return _absent(device, arch)
    if device == "cpu":
        return None
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise UnsupportedError(f"export: device: expected 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"export: device={device!r} needs PyTorch with CUDA, and {torch.__version__} was built without it: install "
            f"a CUDA build on a machine with an NVIDIA GPU, or name the GPU to compile for: arch='sm_90'"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"export: device={device!r} needs a GPU on the build machine, since kernels are compiled and tuned on it, "
            f"and torch finds none: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or name the GPU to compile for: "
            f"arch='sm_90'"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if match[1] is None else int(match[1])
    if index >= count:
        raise InvalidArgumentError(
            f"export: device={device!r}: this machine has {count} GPU{'s' if count > 1 else ''}, the last is "
            f"cuda:{count - 1}"
        )
    cuda_home()
    driver_library()
    major, minor = torch.cuda.get_device_capability(index)
    return CudaTarget(f"cuda:{index}", f"sm_{major}{minor}")


def _absent(device: object, arch: str) -> CudaTarget:
    from untorch.export.absent_gpu import require_triton

    if device != "cuda":
        raise InvalidArgumentError(
            f"export: arch={arch!r} names a GPU that need not be here: device must be 'cuda', got {device!r}"
        )
    gpu = find_gpu(arch)
    require_triton()
    cuda_home()
    return CudaTarget("cuda:0", gpu.architecture, gpu)


def ptxas_version(architecture: str) -> str | None:
    """The version of the assembler that Triton has for an architecture, "12.8"; None where it does not tell."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        text = get_ptxas_version(int(architecture.removeprefix("sm_")))
    except Exception:  # Triton's own interface, for a line that people read
        return None
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def cuda_home() -> Path:
    """The folder of the CUDA toolkit, whose headers the generated code includes."""
    from torch.utils import cpp_extension

    nvcc = shutil.which("nvcc")
    candidates = [
        cpp_extension.CUDA_HOME, nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda", *_wheels(),
    ]  # fmt: skip
    for candidate in candidates:
        if candidate and (Path(candidate) / _HEADER).is_file():
            return Path(candidate)
    tried = ", ".join(dict.fromkeys(str(c) for c in candidates if c))
    raise UnsupportedError(
        f"export: compiling for CUDA needs the toolkit's headers, and no {_HEADER} was found below {tried}: install "
        f"the CUDA toolkit{f' {torch.version.cuda}' if torch.version.cuda else ''} or NVIDIA's wheel of its runtime "
        f"(nvidia-cuda-runtime, nvidia-cuda-crt), or set CUDA_HOME"
    )


def _wheels() -> list[Path]:
    """Where NVIDIA's wheels have their headers, beside those of CUDA 13 and newer."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [home for folder in folders for home in sorted(Path(folder).glob("cu[0-9]*"), reverse=True)]


def driver_library() -> Path:
    """A libcuda.so to link with: the driver that this process has open, or the toolkit's stub.

    The linker wants a file of that name; many machines have only the driver's libcuda.so.1.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            opened = line.rstrip("\n").split(None, 5)[-1]
            if os.path.basename(opened).startswith("libcuda.so") and os.path.isfile(opened):
                return Path(opened)
    home = cuda_home()
    for folder in ("lib64/stubs", "lib/stubs", "targets/x86_64-linux/lib/stubs", "targets/sbsa-linux/lib/stubs"):
        if (path := home / folder / "libcuda.so").is_file():
            return path
    raise UnsupportedError("export: compiling for CUDA links libcuda.so, and neither the driver nor a stub was found")


class Mover:
    """Copies modules and inputs to the GPU; the caller's own stay as and where they are.

    One object serves all methods of a file, so what methods share is copied once and stays shared.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._there: dict[int, torch.Tensor] = {}
        self._keep: list[torch.Tensor] = []  # the dictionary is by id: those must not be used again

    def module(self, name: str, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its parameters and buffers on the GPU; itself, if it has any there already."""
        own = [*module.parameters(), *module.buffers()]
        if any(tensor.device.type == self._device.type for tensor in own):
            return module
        for tensor in own:
            self._remember(tensor)
        copied = self._copied(name, module)
        assert isinstance(copied, torch.nn.Module)
        return copied

    def program(self, name: str, program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
        """The exported program on the GPU; itself, if anything of it is there already."""
        inputs = pytree.tree_leaves(program.example_inputs)
        values = [node.meta.get("val") for node in program.graph.nodes]
        tensors = [*program.state_dict.values(), *program.constants.values(), *inputs, *pytree.tree_leaves(values)]
        if any(isinstance(t, torch.Tensor) and t.device.type == self._device.type for t in tensors):
            return program
        from torch.export.passes import move_to_device_pass

        for tensor in (*program.state_dict.values(), *program.constants.values()):
            if isinstance(tensor, torch.Tensor):
                self._remember(tensor)
        copied = self._copied(name, program)  # the pass changes the program that it is given
        try:
            moved = move_to_device_pass(copied, str(self._device))
        except Exception as error:
            raise CompileError(
                f"method {name!r}: the exported program cannot be moved to {self._device}: {error}"
            ) from error
        moved.example_inputs = self.tree(program.example_inputs)
        return moved

    def tree(self, values: Any) -> Any:
        """A tree of example inputs on the GPU, each tensor with its strides."""
        return pytree.tree_map_only(torch.Tensor, self._moved, values)

    def _copied(self, name: str, value: Any) -> Any:
        from untorch.export.torch_patches import treespec_warning

        try:
            with treespec_warning():
                return copy.deepcopy(value, dict(self._there))
        except Exception as error:
            raise CompileError(
                f"method {name!r}: a copy of the model for {self._device} cannot be made ({error}): move it there "
                f"yourself, model.to({str(self._device)!r}), with its inputs"
            ) from error

    def _remember(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._there:
            return
        moved = self._moved(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        self._there[id(tensor)] = moved
        self._keep.append(tensor)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if id(tensor) in self._there:
            return self._there[id(tensor)]
        value = tensor.detach()
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return value.to(self._device)
        # The stretch of memory that it looks at is copied as it lies, so that strides stay, also overlapping ones.
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = value.as_strided((reach + 1 if tensor.numel() else 0,), (1,))
        return flat.to(self._device).as_strided(tensor.shape, tensor.stride())

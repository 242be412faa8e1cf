"""What ``export`` is asked to compile: its arguments as methods, each with its options, its CPU and its device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from untorch.export.compile import MethodInput
from untorch.export.cuda import CudaTarget, Mover, resolve_devices
from untorch.export.errors import OptionError
from untorch.export.gpus import GpuModel
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.targets import CpuTarget, resolve_cpu
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["MethodPlan", "Movers", "plan_methods", "read_methods", "read_path"]

# Of the file as a whole: its check, what is printed, and what is decided for all methods together.
_OF_THE_FILE = ("verify", "progress", "quantize")
_KEYS = ("model", "args", "kwargs", "dynamic_shapes", "device", "arch", "options")


@dataclass(frozen=True)
class MethodRequest:
    """A method as the caller gave it, and what it says for itself alone."""

    method: MethodInput
    device: Any = None
    arch: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodPlan:
    """How one method is compiled: for each of ``gpus``, None for the CPU. Several are of different architectures."""

    method: MethodInput
    options: ExportOptions
    target: CpuTarget
    gpus: tuple[CudaTarget | None, ...]


def plan_methods(requests: Sequence[MethodRequest], device: str, arch: Any, options: ExportOptions) -> list[MethodPlan]:
    """The methods' own choices, and for the rest those of the call. Raises what export raises for them."""
    plans = []
    for request in requests:
        name = request.method.name
        for key in request.options:
            if key in _OF_THE_FILE:
                of_methods = f": options.{key} has names of methods" if key == "quantize" else ""
                raise OptionError(f"export: method {name!r}: {key} is an option of the whole file{of_methods}")
        try:
            own = resolve_options(options, request.options)
        except OptionError as error:
            raise OptionError(f"export: method {name!r}: {error}") from error
        # A device of its own brings no GPU that the call names for the others.
        own_arch = request.arch if request.arch is not None or request.device is not None else arch
        own_device = device if request.device is None else request.device
        gpus = resolve_devices(own_device, own_arch)
        plans.append(MethodPlan(request.method, own, resolve_cpu(own.cpu), gpus))
        for gpu in gpus:
            if gpu is not None and gpu.absent is not None:
                _check_absent(request.method, own, gpu.absent)
    return plans


class Movers:
    """Moves methods to their GPUs; what methods share is copied to each GPU once."""

    def __init__(self) -> None:
        self._movers: dict[str, Mover] = {}

    def move(self, method: MethodInput, gpu: CudaTarget) -> MethodInput:
        """The method on the GPU."""
        mover = self._movers.setdefault(gpu.device, Mover(gpu.device))
        if isinstance(method.model, torch.export.ExportedProgram):
            return replace(method, model=mover.program(method.name, method.model))
        model = mover.module(method.name, method.model)
        if model is method.model:
            return method
        return replace(method, model=model, args=mover.tree(method.args), kwargs=mover.tree(method.kwargs))


def read_methods(model: Any, args: Any, kwargs: dict[str, Any] | None, dynamic_shapes: Any) -> list[MethodRequest]:
    """export's arguments as methods. Raises InvalidArgumentError."""
    if not isinstance(model, Mapping):
        return [MethodRequest(_checked(MethodInput("forward", model, args, kwargs, dynamic_shapes)))]
    if args is not None or kwargs is not None or dynamic_shapes is not None:
        raise InvalidArgumentError(
            "export: with a dictionary of methods, args, kwargs and dynamic_shapes belong into its entries"
        )
    if not model:
        raise InvalidArgumentError("export: the dictionary of methods is empty")
    return [_method(name, entry) for name, entry in model.items()]


def read_path(path: Any) -> Path:
    """The path to write. Raises InvalidArgumentError."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"export: path: expected a path that ends in .pt2, got {type(path).__name__}")
    target = Path(path)
    if target.suffix != ".pt2" or not target.stem:
        raise InvalidArgumentError(f"export: path: expected a path that ends in .pt2, got {str(path)!r}")
    return target


def _method(name: Any, entry: Any) -> MethodRequest:
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgumentError(f"export: a method's name must be a Python identifier, got {name!r}")
    if isinstance(entry, torch.export.ExportedProgram):
        return MethodRequest(MethodInput(name, entry, None))
    if isinstance(entry, Mapping):
        if unknown := entry.keys() - set(_KEYS):
            raise InvalidArgumentError(
                f"export: method {name!r}: unknown keys {', '.join(sorted(map(repr, unknown)))}; known are "
                f"{', '.join(_KEYS)}"
            )
        if "model" not in entry:
            raise InvalidArgumentError(f"export: method {name!r}: the key 'model' is missing")
        method = MethodInput(name, entry["model"], entry.get("args"), entry.get("kwargs"), entry.get("dynamic_shapes"))
        options = entry.get("options") or {}
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(
                f"export: method {name!r}: options: expected a dictionary of fields of ExportOptions, got "
                f"{type(options).__name__}"
            )
        return MethodRequest(_checked(method), entry.get("device"), entry.get("arch"), options)
    if isinstance(entry, tuple) and len(entry) == 2:
        return MethodRequest(_checked(MethodInput(name, entry[0], entry[1])))
    raise InvalidArgumentError(
        f"export: method {name!r}: expected (model, args), a dictionary or an ExportedProgram, got "
        f"{type(entry).__name__}"
    )


def _checked(method: MethodInput) -> MethodInput:
    where = f"export: method {method.name!r}"
    if isinstance(method.model, torch.export.ExportedProgram):
        if method.args is not None or method.kwargs is not None or method.dynamic_shapes is not None:
            raise InvalidArgumentError(f"{where}: an ExportedProgram has its own inputs: leave args and the like out")
        return method
    if not isinstance(method.model, torch.nn.Module):
        raise InvalidArgumentError(
            f"{where}: model: expected a torch.nn.Module or an ExportedProgram, got {type(method.model).__name__}"
        )
    if method.args is None and method.kwargs is not None:
        method.args = ()
    if isinstance(method.args, list):
        method.args = tuple(method.args)
    if not isinstance(method.args, tuple):
        raise InvalidArgumentError(
            f"{where}: args: expected a tuple of example inputs, got {type(method.args).__name__}: write (x,) for one"
        )
    return method


def _check_absent(method: MethodInput, options: ExportOptions, gpu: GpuModel) -> None:
    if options.verify:
        raise InvalidArgumentError(
            f"export: verify=True runs the file, and with arch it is compiled for a GPU ({gpu.name}) that is taken to "
            f"be elsewhere: leave verify out, and run it there"
        )
    model = method.model
    tensors = model.state_dict() if isinstance(model, torch.nn.Module) else model.state_dict
    there = {t.device.type for t in tensors.values() if isinstance(t, torch.Tensor)} - {"cpu"}
    if there:
        raise InvalidArgumentError(
            f"export: method {method.name!r}: with arch the model is traced on the CPU, and it has tensors on "
            f"{', '.join(sorted(there))}: move it with model.cpu()"
        )

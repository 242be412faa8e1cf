"""Copies methods to the GPU that compiles them; the caller's modules and inputs stay as and where they are."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.patches import treespec_warning
from untorch.progress import Progress

__all__ = ["Mover", "Movers", "copy_as_it_lies"]


class Movers:
    """One Mover a device, so that what methods share is copied to each GPU once."""

    def __init__(self) -> None:
        self._movers: dict[str, Mover] = {}

    def move(self, method: Method, progress: Progress | None = None) -> Method:
        """The method with its tensors on its target's ``tensor_home``; itself, where that is the CPU."""
        home = method.target.tensor_home
        if home == "cpu":
            return method
        mover = self._movers.setdefault(home, Mover(home))
        with (progress or Progress(False)).step(f"{method.name}: move"):
            if isinstance(method.model, torch.export.ExportedProgram):
                return replace(method, model=mover.program(method.name, method.model))
            model = mover.module(method.name, method.model)
            if model is method.model:
                return method
            return replace(method, model=model, args=mover.tree(method.args), kwargs=mover.tree(method.kwargs))


class Mover:
    """Copies modules and inputs to the GPU; the caller's own stay as and where they are.

    One object serves all methods of a file, so what methods share is copied once and stays shared.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._there: dict[int, torch.Tensor] = {}
        self._modules: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}  # by id, with the copy
        self._keep: list[torch.Tensor] = []  # the dictionary is by id: those must not be used again

    def module(self, name: str, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its parameters and buffers on the GPU; itself, if it has any there already."""
        if (known := self._modules.get(id(module))) is not None:
            return known[1]
        own = [*module.parameters(), *module.buffers()]
        if any(tensor.device.type == self._device.type for tensor in own):
            return module
        for tensor in own:
            self._remember(tensor)
        copied = self._copied(name, module)
        assert isinstance(copied, torch.nn.Module)
        self._modules[id(module)] = module, copied
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
        return _copied_to(tensor, self._device)


def copy_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also overlapping ones, on the same device."""
    return _copied_to(tensor, tensor.device).requires_grad_(tensor.requires_grad)


def _copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = tensor.detach()
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return value.to(device, copy=True)
    # The stretch of memory that it looks at is copied as it lies, so that strides stay, also overlapping ones.
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = value.as_strided((reach + 1 if tensor.numel() else 0,), (1,))
    return flat.to(device, copy=True).as_strided(tensor.shape, tensor.stride())

"""Example inputs that are one tensor, or a weight of the model: traced apart.

torch.export knows tensors by identity. Of ``export(model, (x, x))`` it takes one input for both, and ignores the other;
an input that is a weight of the model stands for the weight, too.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from untorch.export.move import copy_as_it_lies

__all__ = ["separate_inputs", "warn_of_shared_inputs"]


def separate_inputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any] | None, Any, list[str]]:
    """The inputs with copies of tensors that came before, the dynamic shapes, and a note for each copy."""
    from torch.export import dynamic_shapes as torch_shapes

    known = {id(tensor): f"the model's {name}" for name, tensor in _own_tensors(model)}
    try:
        combined: Any = torch_shapes._combine_args(model, args, kwargs)
        found: Any = pytree.tree_leaves_with_path(combined)
        named = [
            (f"{path[0].key}{pytree.keystr(path[1:])}", leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)
        ]
    except Exception:  # torch.export says what is wrong with them
        return args, kwargs, dynamic_shapes, []
    notes = []
    for name, tensor in named:
        if (first := known.setdefault(id(tensor), name)) is not name:
            notes.append(f"traced apart: {name}, the same tensor as {first} in the example")
    if not notes:
        return args, kwargs, dynamic_shapes, []
    if isinstance(dynamic_shapes, torch_shapes.ShapesCollection):  # it knows tensors by identity
        collection: Any = dynamic_shapes
        dynamic_shapes = collection.dynamic_shapes(model, args, kwargs)
    seen = {id(tensor) for _, tensor in _own_tensors(model)}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return copy_as_it_lies(tensor)
        seen.add(id(tensor))
        return tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, apart, (args, kwargs))
    return args, kwargs, dynamic_shapes, notes


def warn_of_shared_inputs(name: str, program: torch.export.ExportedProgram) -> None:
    """Warns if inputs of a program were one tensor and some of them are not read: torch.export may have lost them."""
    assert program.example_inputs is not None
    leaves = pytree.tree_leaves(program.example_inputs)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[int, str] = {}
    for leaf, given in zip(leaves, program.graph_signature.user_inputs, strict=False):
        if not isinstance(leaf, torch.Tensor) or not isinstance(given, str) or given not in nodes:
            continue
        before = first.setdefault(id(leaf), given)
        if before != given and not (nodes[before].users and nodes[given].users):
            warnings.warn(
                f"export: method {name!r}: the exported program's inputs {before} and {given} were one tensor when "
                f"torch.export traced it, and it reads one of them alone: call torch.export.export with a tensor for "
                f"each, such as x.clone()",
                UserWarning,
                stacklevel=2,
            )


def _own_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, buffers and plain attributes, by their names."""
    found = []
    for prefix, part in model.named_modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor):
                    found.append((f"{prefix}.{name}" if prefix else name, tensor))
    return found

"""Complex numbers in Inductor's graphs become tensors: AOTInductor writes int and float arguments into the file only.

``full`` of a complex number becomes ``complex`` of two real ones. A number in the place of a tensor, which PyTorch's
decompositions leave where an operator has no code for complex numbers, becomes a tensor without dimensions. Defaults of
``alpha`` and ``beta`` are named: generated code passes them, and the list of extern nodes has what the graph names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["ComplexScalars"]

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class ComplexScalars(CustomGraphPass):
    """Runs on the graph that is about to be lowered."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        for node in list(graph.nodes):
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            value = node.meta.get("val")
            if node.target is torch.ops.aten.full.default and _is_complex(value):
                with graph.inserting_before(node):
                    arguments: Any = node.args
                    made = _full(graph, list(arguments[0]), complex(arguments[1]), value)
                node.replace_all_uses_with(made)
                graph.erase_node(node)
            elif _is_complex(value) or any(_is_complex(arg.meta.get("val")) for arg in node.all_input_nodes):
                _replace_numbers(graph, node)
                _name_defaults(node)

    def uuid(self) -> str:
        """For Inductor's caches."""
        return "untorch complex scalars 1"


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _REAL


def _full(graph: fx.Graph, size: list[Any], number: complex, value: torch.Tensor) -> fx.Node:
    """``full`` where ``value``, a fake tensor, has the dtype, device and fake mode."""
    real = _REAL[value.dtype]
    parts = []
    for part in (number.real, number.imag):
        made = graph.call_function(
            torch.ops.aten.full.default,
            (size, part),
            {"dtype": real, "layout": torch.strided, "device": value.device, "pin_memory": False},
        )
        made.meta["val"] = value.new_empty([_size(n) for n in size], dtype=real)
        parts.append(made)
    whole = graph.call_function(torch.ops.aten.complex.default, tuple(parts))
    whole.meta["val"] = value.new_empty([_size(n) for n in size])
    return whole


def _size(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


def _replace_numbers(graph: fx.Graph, node: fx.Node) -> None:
    """Tensors for Python numbers where the operator's schema has a tensor."""
    assert isinstance(node.target, torch._ops.OpOverload)
    value: Any = next(v for n in (node, *node.all_input_nodes) if _is_complex(v := n.meta.get("val")))
    given: Any
    for i, (argument, given) in enumerate(zip(node.target._schema.arguments, node.args, strict=False)):
        is_number = isinstance(given, int | float | complex) and not isinstance(given, bool)
        if isinstance(argument.real_type, torch.TensorType) and is_number:
            with graph.inserting_before(node):
                node.update_arg(i, _full(graph, [], complex(given), value))


def _name_defaults(node: fx.Node) -> None:
    """Numbers with a default as keyword arguments; add, which has a C function, takes them either way."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target is torch.ops.aten.add.Tensor:
        return
    for argument in node.target._schema.arguments[len(node.args) :]:
        default = argument.default_value
        is_number = isinstance(argument.real_type, torch.NumberType) and isinstance(default, int)
        if is_number and argument.kwarg_only and argument.name not in node.kwargs:
            node.update_kwarg(argument.name, default)

"""Linear layers in a graph, by any operator: aten.linear, GEMMs with a constant, those of 4-bit and 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from untorch.export.passes.calls import arguments_of
from untorch.export.passes.epilogues import value_of
from untorch.ops import int4, nvfp4, w8a8
from untorch.ops.int4_layout import N_TILE

__all__ = ["LinearCall", "read_linear"]

_aten = torch.ops.aten
_TRANSPOSES = {_aten.t.default, _aten.numpy_T.default, _aten.transpose.int, _aten.permute.default}


@dataclass(frozen=True)
class LinearCall:
    """One call: x · Wᵀ + bias.

    weights: the get_attr nodes of its tensors, the one with the values first.
    dims: along which of each tensor's dimensions the outputs lie.
    outputs: the columns of its result, with padding.
    inputs: the columns of x.
    family: "linear" (rows of the weight are outputs), "mm" (columns are), "int4", "nvfp4" or "w8a8".
    kind: what calls must have in common to be one: the family, sizes of K, dtypes, options.
    """

    node: fx.Node
    x: fx.Node
    weights: tuple[fx.Node, ...]
    dims: tuple[int, ...]
    bias: Any
    outputs: int
    inputs: int
    family: str
    kind: tuple[Any, ...]


def read_linear(node: fx.Node) -> LinearCall | None:
    """The call, if the node is one with tensors of the module as its weight."""
    if node.op != "call_function" or value_of(node) is None:
        return None
    if node.target == int4.OPERATOR:
        return _quantised(node, "int4", ("weight", "scale_and_zero"), (0, 1), ("group_size",))
    if node.target == nvfp4.OPERATOR:
        return _quantised(node, "nvfp4", ("weight_packed", "block_scale", "global_scale"), (0, 0, 0), ("prefill",))
    if node.target == w8a8.OPERATOR:
        call = _quantised(node, "w8a8", ("weight", "scale"), (0, 0), ())
        # Blocks of outputs must not begin within another layer's.
        return None if call is not None and _has_part_of_a_block(call) else call
    if node.target == _aten.linear.default:
        x, weight, bias = arguments_of(node).values()
        return _dense(node, x, weight, bias, "linear")
    if node.target == _aten.addmm.default:
        given = arguments_of(node)
        if given["alpha"] != 1 or given["beta"] != 1:
            return None
        x, weight, bias = given["mat1"], given["mat2"], given["self"]
    elif node.target in (_aten.mm.default, _aten.matmul.default):
        (x, weight), bias = list(arguments_of(node).values())[:2], None
    else:
        return None
    value = value_of(x)
    if value is None or value.dim() < 2:
        return None
    if _is_transpose(weight):
        return _dense(node, x, weight.args[0], bias, "linear")
    return _dense(node, x, weight, bias, "mm")


def _dense(node: fx.Node, x: Any, weight: Any, bias: Any, family: str) -> LinearCall | None:
    value, given = value_of(weight), value_of(x)
    if value is None or given is None or weight.op != "get_attr" or value.dim() != 2:
        return None
    if given.dtype != value.dtype or not value.dtype.is_floating_point:
        return None
    outputs, inputs = value.shape if family == "linear" else value.shape[::-1]
    kind = (family, int(inputs), value.dtype, str(value.device))
    return LinearCall(
        node, x, (weight,), (0 if family == "linear" else 1,), bias, int(outputs), int(inputs), family, kind
    )


def _quantised(
    node: fx.Node, family: str, names: tuple[str, ...], dims: tuple[int, ...], options: tuple[str, ...]
) -> LinearCall | None:
    given = arguments_of(node)
    weights = tuple(given[name] for name in names)
    values = [value_of(weight) for weight in weights]
    x = value_of(given["x"])
    if x is None or any(weight.op != "get_attr" for weight in weights) or any(value is None for value in values):
        return None
    packed, *scales = (value for value in values if value is not None)
    is_tiles = packed.dtype == torch.int32
    outputs = int(packed.shape[0]) * (N_TILE if is_tiles else 1)
    kind = (
        family, packed.dtype, tuple(packed.shape[1:]), tuple(scale.dtype for scale in scales), x.dtype,
        tuple(given[name] for name in options), str(packed.device),
        scales[0].dim() if family == "w8a8" else None,
    )  # fmt: skip
    return LinearCall(node, given["x"], weights, dims, given["bias"], outputs, int(x.shape[-1]), family, kind)


def _has_part_of_a_block(call: LinearCall) -> bool:
    scale = value_of(call.weights[1])
    return scale is not None and scale.dim() == 2 and call.outputs % w8a8.SCALE_BLOCK != 0


def _is_transpose(node: Any) -> bool:
    """Whether the node is the transpose of a matrix of the module."""
    if not isinstance(node, fx.Node) or node.target not in _TRANSPOSES:
        return False
    arguments: list[Any] = list(node.args)
    source, *dims = arguments
    value = value_of(source)
    if value is None or source.op != "get_attr" or value.dim() != 2:
        return False
    if node.target == _aten.transpose.int:
        return {dim % 2 for dim in dims} == {0, 1}
    return node.target != _aten.permute.default or [dim % 2 for dim in dims[0]] == [1, 0]

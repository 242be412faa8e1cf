"""What PT2E's quantising and dequantising operators (``convert_pt2e``) say about a layer's activations and weight."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from untorch.export.passes.calls import arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import value_of
from untorch.ops.int8_layout import INT8_MAX_K

__all__ = ["RANGES", "Activations", "LeftError", "activations", "int8_weight", "is_bytes", "pt2e_name",
           "static_activations"]  # fmt: skip

_NAMESPACE = "quantized_decomposed."
# The ranges of uint8 and int8, and what takes their zero points to uint8's.
RANGES = {(0, 255, torch.uint8): 0, (-128, 127, torch.int8): 128}
_LEAST_SCALE = 2.0**-126  # its reciprocal is finite


class LeftError(Exception):
    """Why a layer stays in floating point."""


@dataclass(frozen=True)
class Activations:
    """What is quantised, and how: ``input_range``, ``scale`` and ``zero`` as ``untorch.ops.int8`` has them."""

    source: fx.Node
    input_range: str
    scale: float
    zero: int


def is_bytes(node: fx.Node) -> bool:
    """Whether the node gives uint8 that an operator of ours made, maybe in another shape."""
    value = value_of(node)
    return value is not None and value.dtype == torch.uint8 and node.op == "call_function" and not pt2e_name(node)


def activations(node: fx.Node) -> Activations:
    """What a layer's activations are dequantised from, with a static or a dynamic range. Raises LeftError."""
    if pt2e_name(node) not in ("dequantize_per_tensor.tensor", "dequantize_per_tensor.tensor2"):
        return Activations(*_with_range(static_activations(node)))
    given = list(arguments_of(node).values())
    quantize, scale, zero, dtype = given[0], given[1], given[2], given[5]
    choose = scale.args[0] if isinstance(scale, fx.Node) and scale.target == operator.getitem else None
    same = (
        pt2e_name(quantize) in ("quantize_per_tensor.tensor", "quantize_per_tensor.tensor2")
        and list(arguments_of(quantize).values())[1:6] == given[1:6]
        and pt2e_name(choose) == "choose_qparams.tensor"
        and isinstance(zero, fx.Node) and zero.target == operator.getitem
        and (scale.args, zero.args) == ((choose, 0), (choose, 1))
        and choose.args[0] is quantize.args[0]  # type: ignore[union-attr]
    )  # fmt: skip
    if not same:
        raise LeftError("its activations have a dynamic range that choose_qparams does not give")
    assert isinstance(choose, fx.Node)
    source, low, high, least, kind = arguments_of(choose).values()
    if (low, high, dtype) not in RANGES or kind != dtype or given[3:5] != [low, high]:
        raise LeftError(f"its activations have the range {low} to {high}, expected 0 to 255 or -128 to 127")
    return Activations(source, "tensor", max(float(least), _LEAST_SCALE), 0)


def _with_range(found: tuple[fx.Node, float, int]) -> tuple[fx.Node, str, float, int]:
    return found[0], "static", found[1], found[2]


def static_activations(node: fx.Node) -> tuple[fx.Node, float, int]:
    """What is quantised, in floating point or in uint8 already, with its scale and its zero point in uint8.

    Raises LeftError.
    """
    if pt2e_name(node) != "dequantize_per_tensor.default":
        raise LeftError("its activations are not quantised with a range for the whole tensor")
    given = list(arguments_of(node).values())
    quantize = given[0]
    if is_bytes(quantize) and given[3:6] == [0, 255, torch.uint8]:
        return quantize, float(given[1]), int(given[2])
    if pt2e_name(quantize) != "quantize_per_tensor.default" or list(arguments_of(quantize).values())[1:6] != given[1:6]:
        raise LeftError("its activations are dequantised otherwise than they were quantised")
    scale, zero, low, high, dtype = given[1:6]
    if (low, high, dtype) not in RANGES:
        raise LeftError(f"its activations have the range {low} to {high}, expected 0 to 255 or -128 to 127")
    return quantize.args[0], float(scale), int(zero) + RANGES[low, high, dtype]


def int8_weight(node: fx.Node, constants: Constants, dims: int, axis: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k, …] of ``dims`` dimensions and its scales [n], from a weight whose outputs lie along ``axis``.

    Raises LeftError.
    """
    if pt2e_name(node) not in ("dequantize_per_channel.default", "dequantize_per_tensor.default"):
        raise LeftError("its weight is not quantised")
    given = arguments_of(node)
    if not constants.is_known(given["input"]):
        raise LeftError("its weight is computed, not a constant")
    values = constants.value(given["input"]).transpose(0, axis)
    if values.dtype != torch.int8 or values.dim() != dims or values[:1].numel() > INT8_MAX_K:
        raise LeftError(
            f"its weight is {values.dtype} {tuple(values.shape)}, expected int8 with at most {INT8_MAX_K} inputs"
        )
    zeros: torch.Tensor | None
    if "axis" not in given:
        scales = torch.full((values.shape[0],), float(given["scale"]))
        zeros = torch.tensor(given["zero_point"])
    else:
        if given["axis"] % dims != axis:
            raise LeftError(f"the scales of its weight are along the axis {given['axis']}, expected {axis}")
        parts = [given["scales"], given["zero_points"]]
        if not all(part is None or constants.is_known(part) for part in parts):
            raise LeftError("the scales of its weight are computed, not constants")
        scales = constants.value(given["scales"])
        zeros = None if given["zero_points"] is None else constants.value(given["zero_points"])
    if zeros is not None and bool(zeros.any()):
        raise LeftError("its weight has zero points, expected a symmetric range")
    return values, scales


def pt2e_name(node: object) -> str:
    """The operator of PT2E without its namespace, or ""."""
    target = str(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""
    return target.removeprefix(_NAMESPACE) if target.startswith(_NAMESPACE) else ""

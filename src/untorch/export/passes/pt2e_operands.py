"""What PT2E's quantising and dequantising operators (``convert_pt2e``) say about a layer's activations and weight."""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.calls import arguments_of
from untorch.export.passes.constants import Constants
from untorch.ops import byte_max_pool, int8_convolution
from untorch.ops.int8_layout import INT8_MAX_K

__all__ = ["BYTES", "RANGES", "LeftError", "int8_weight", "pt2e_name", "static_activations"]

_NAMESPACE = "quantized_decomposed."
# The ranges of uint8 and int8, and what takes their zero points to uint8's.
RANGES = {(0, 255, torch.uint8): 0, (-128, 127, torch.int8): 128}
# Operators whose results are uint8 where something dequantises them.
BYTES = (int8_convolution.OPERATOR, byte_max_pool.OPERATOR)


class LeftError(Exception):
    """Why a layer stays in floating point."""


def static_activations(node: fx.Node) -> tuple[fx.Node, float, int]:
    """What is quantised, in floating point or in uint8 already, with its scale and its zero point in uint8.

    Raises LeftError.
    """
    if pt2e_name(node) == "dequantize_per_tensor.tensor":
        raise LeftError(
            "its activations have a dynamic range for the whole tensor, and int8_linear has one a row: export the "
            "model that is not quantised with quantize='int8'"
        )
    if pt2e_name(node) != "dequantize_per_tensor.default":
        raise LeftError("its activations are not quantised with a static range for the whole tensor")
    given = list(arguments_of(node).values())
    quantize = given[0]
    if quantize.target in BYTES and given[3:6] == [0, 255, torch.uint8]:
        return quantize, float(given[1]), int(given[2])
    if pt2e_name(quantize) != "quantize_per_tensor.default" or list(arguments_of(quantize).values())[1:6] != given[1:6]:
        raise LeftError("its activations are dequantised otherwise than they were quantised")
    scale, zero, low, high, dtype = given[1:6]
    if (low, high, dtype) not in RANGES:
        raise LeftError(f"its activations have the range {low} to {high}, expected 0 to 255 or -128 to 127")
    return quantize.args[0], float(scale), int(zero) + RANGES[low, high, dtype]


def int8_weight(node: fx.Node, constants: Constants, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k, …] of ``dims`` dimensions and its scales [n]. Raises LeftError."""
    if pt2e_name(node) not in ("dequantize_per_channel.default", "dequantize_per_tensor.default"):
        raise LeftError("its weight is not quantised")
    given = arguments_of(node)
    if not constants.is_known(given["input"]):
        raise LeftError("its weight is computed, not a constant")
    values = constants.value(given["input"])
    if values.dtype != torch.int8 or values.dim() != dims or values[:1].numel() > INT8_MAX_K:
        raise LeftError(
            f"its weight is {values.dtype} {tuple(values.shape)}, expected int8 with at most {INT8_MAX_K} inputs"
        )
    zeros: torch.Tensor | None
    if "axis" not in given:
        scales = torch.full((values.shape[0],), float(given["scale"]))
        zeros = torch.tensor(given["zero_point"])
    else:
        if given["axis"] != 0:
            raise LeftError(f"the scales of its weight are along the axis {given['axis']}, expected 0")
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

"""``convert_torchao``: linear layers with torchao's tile-packed int4 weights become ``Int4Linear``, bit for bit.

torchao packs with the same function of aten, so its tensors are taken as they are. Two classes of it are known by what
they have: ``Int4TilePackedTo4dTensor`` (qdata, scale_and_zero, block_size), and before that an affine quantised tensor
with a ``tensor_impl`` (packed_weight, scale_and_zero) and block_size. torchao itself is not needed here.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

from untorch.quant.linear import Int4Linear
from untorch.quant.modules import module_nbytes, replace_modules
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.select import linears
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = ["convert_torchao"]


def convert_torchao(module: nn.Module) -> QuantizationReport:
    """Replaces the linear layers whose weights torchao has packed in int4 tiles, in place.

    Raises InvalidArgumentError if there is none, and UnsupportedError for one with scaled activations.
    """
    start = time.perf_counter()
    before = module_nbytes(module)
    replacements: dict[int, nn.Module] = {}
    layers, skipped = [], {}
    for linear, names in linears(module):
        found = _tile_packed(linear.weight)
        if found is None:
            skipped[names[0]] = f"its weight is a {type(linear.weight).__name__}, not torchao's in int4 tiles"
            continue
        packed, scale_and_zero, group_size = found
        if getattr(linear.weight, "act_pre_scale", None) is not None:
            raise UnsupportedError(f"convert_torchao: {names[0]}: its activations are scaled (act_pre_scale)")
        fields: dict[str, Any] = {"group_size": group_size, "method": "torchao"}
        features: dict[str, Any] = {"in_features": linear.in_features, "out_features": linear.out_features}
        try:
            layer = Int4Linear(packed.contiguous(), scale_and_zero.contiguous(), linear.bias, **features, **fields)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"convert_torchao: {names[0]}: {error}") from error
        replacements[id(linear)] = layer.train(linear.training)
        report = LayerReport(
            names=tuple(names),
            shape=(linear.out_features, linear.in_features),
            packed_shape=(8 * packed.shape[0], 32 * packed.shape[1] * packed.shape[3]),
            dtype=str(scale_and_zero.dtype).removeprefix("torch."),
            error=math.nan,
            nbytes_before=layer.weight_nbytes,
            nbytes_after=layer.weight_nbytes,
            **fields,
        )
        layers.append(report)
    if not layers:
        raise InvalidArgumentError(
            "convert_torchao: no linear layer has torchao's tile-packed int4 weight (Int4TilePackedTo4dTensor)"
        )
    replace_modules(module, replacements)
    return QuantizationReport(tuple(layers), skipped, before, module_nbytes(module), time.perf_counter() - start)


def _tile_packed(weight: Any) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """(packed, scale_and_zero, group_size), or None for another kind of weight."""
    holder = getattr(weight, "tensor_impl", weight)
    packed = getattr(holder, "qdata", getattr(holder, "packed_weight", None))
    scale_and_zero, block_size = getattr(holder, "scale_and_zero", None), getattr(weight, "block_size", None)
    if not isinstance(packed, torch.Tensor) or not isinstance(scale_and_zero, torch.Tensor) or not block_size:
        return None
    if packed.dtype != torch.int32 or packed.dim() != 4:
        return None
    return packed, scale_and_zero, int(block_size[-1])

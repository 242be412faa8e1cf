"""``convert_torchao``: linear layers that torchao's ``quantize_`` changed become ours, with the weights as they are.

| torchao's tensor | becomes |
|---|---|
| Int4TilePackedTo4dTensor, and its predecessor with a ``tensor_impl`` | Int4Linear: the packing function is the same |
| IntxUnpackedToInt8Tensor of int4, groups of 32 to 256 | Int4Linear; activations are not quantised |
| IntxUnpackedToInt8Tensor of int8, an output a scale, int8_asym_per_token | Int8Linear, asymmetric rows |
| Int8Tensor with dynamic rows of activations | Int8Linear; for GPUs and symmetric rows W8A8Linear |
| Float8Tensor of E4M3 with dynamic rows of activations | for GPUs W8A8Linear |

The rest is left alone, by name and with the reason. Tensors are known by the names of their classes and by what they
have; torchao itself is not needed here.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import nn

from untorch.ops.int4 import GROUP_SIZES
from untorch.ops.int4_layout import pack_int4
from untorch.ops.int8_layout import INT8_MAX_K
from untorch.ops.w8a8 import INT8_MAX_K as W8_MAX_K
from untorch.quant.int8 import Int8Linear
from untorch.quant.linear import Int4Linear, padded_features
from untorch.quant.modules import module_nbytes, replace_modules
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.schemes import Target, check_target
from untorch.quant.select import linears
from untorch.quant.w8a8 import W8A8Linear
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = ["convert_torchao", "is_torchao"]

_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


class _LeftError(Exception):
    """Why a layer stays as it is."""


def is_torchao(weight: object) -> bool:
    """Whether it is one of torchao's quantised tensors."""
    return type(weight).__module__.startswith("torchao.") or type(weight).__name__ in _KINDS


def convert_torchao(
    module: nn.Module, *, target: Target = "cpu", float8: bool = True, allow_nothing: bool = False
) -> QuantizationReport:
    """Replaces the linear layers whose weights torchao quantised in a way that there are kernels for, in place.

    target: what the layers are for, "cpu" or "cuda": ``Int8Linear`` is for CPUs, ``W8A8Linear`` for GPUs.
    float8: for "cuda", whether layers may become ``W8A8Linear`` in FP8, which needs sm_89.
    allow_nothing: that no layer can be replaced is no error; the report says why.

    Activations are quantised by our kernels: symmetric rows have the scale max|x| / 127, where torchao's have
    max|x| / 127.5.

    Raises InvalidArgumentError if there is none, and UnsupportedError for one with scaled activations.
    """
    start = time.perf_counter()
    check_target(target)
    before = module_nbytes(module)
    replacements: dict[int, nn.Module] = {}
    layers, skipped = [], {}
    for linear, names in linears(module):
        try:
            if getattr(linear.weight, "act_pre_scale", None) is not None:
                if not allow_nothing:
                    raise UnsupportedError(f"convert_torchao: {names[0]}: its activations are scaled (act_pre_scale)")
                raise _LeftError("its activations are scaled (act_pre_scale): torchao's operators stay")
            layer, packed_shape, dtype = _converted(linear, target, float8)
        except _LeftError as reason:
            skipped[names[0] or "(the module itself)"] = str(reason)
            continue
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"convert_torchao: {names[0]}: {error}") from error
        replacements[id(linear)] = layer.train(linear.training)
        report = LayerReport(
            names=tuple(names),
            shape=(linear.out_features, linear.in_features),
            packed_shape=packed_shape,
            dtype=str(dtype).removeprefix("torch."),
            group_size=layer.group_size if isinstance(layer, Int4Linear) else linear.in_features,
            method="torchao",
            error=math.nan,
            nbytes_before=layer.weight_nbytes,
            nbytes_after=layer.weight_nbytes,
            quantized_dtype=_dtype_of(layer),
        )
        layers.append(report)
    if not layers and not allow_nothing:
        kinds = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise InvalidArgumentError(
            f"convert_torchao: no linear layer has torchao's tile-packed int4 weight (Int4TilePackedTo4dTensor), or "
            f"another that can be converted: {kinds or 'the module has no linear layer'}"
        )
    replace_modules(module, replacements)
    return QuantizationReport(tuple(layers), skipped, before, module_nbytes(module), time.perf_counter() - start)


_Layer = Int4Linear | Int8Linear | W8A8Linear


def _converted(linear: nn.Linear, target: Target, float8: bool) -> tuple[_Layer, tuple[int, int], torch.dtype]:
    """The layer, its packed shape and the dtype that the weight stands for. Raises _LeftError."""
    weight: Any = linear.weight
    kind = type(weight).__name__
    if kind == "Int8Tensor":
        layer = _int8(linear, weight, target)
        return layer, _shape_of(layer), weight.dtype
    if kind == "IntxUnpackedToInt8Tensor":
        return _intx(linear, weight, target)
    if kind == "Float8Tensor":
        if target == "cuda" and not float8:
            raise _LeftError("its weight is float8, which needs sm_89 or newer: torchao's operators stay")
        layer = _float8(linear, weight, target)
        return layer, _shape_of(layer), weight.dtype
    found = _tile_packed(weight)
    if found is None:
        raise _LeftError(f"its weight is a {kind}, not torchao's in int4 tiles")
    packed, scale_and_zero, group_size = found
    made = Int4Linear(
        packed.contiguous(), scale_and_zero.contiguous(), linear.bias, in_features=linear.in_features,
        out_features=linear.out_features, group_size=group_size, method="torchao",
    )  # fmt: skip
    return made, (8 * packed.shape[0], 32 * packed.shape[1] * packed.shape[3]), scale_and_zero.dtype


def _int8(linear: nn.Linear, weight: Any, target: Target) -> Int8Linear | W8A8Linear:
    """Of an Int8Tensor: qdata int8 [n, k], scale [n, 1]."""
    how = weight.act_quant_kwargs
    if weight.act_quant_scale is not None:
        raise _LeftError("its activations have static ranges: torchao's operators stay")
    if how is None:
        raise _LeftError(
            "its weight is int8 and its activations are not (weight-only): torchao's operators stay, which widen the "
            "weight: quantize='int8' on the original model quantises activations, too"
        )
    if type(how.granularity).__name__ != "PerRow":
        raise _LeftError("its activations have one range for the whole tensor, expected one a row")
    symmetric = str(how.mapping_type).endswith("SYMMETRIC") and not str(how.mapping_type).endswith("ASYMMETRIC")
    return _int8_layer(linear, weight, "symmetric" if symmetric else "asymmetric", target)


def _int8_layer(linear: nn.Linear, weight: Any, input_range: str, target: Target) -> Int8Linear | W8A8Linear:
    n, k = linear.out_features, linear.in_features
    if target == "cuda" and input_range != "symmetric":
        raise _LeftError("its activations have asymmetric ranges, which are for CPUs: torchao's operators stay")
    if k > (most := INT8_MAX_K if target == "cpu" else W8_MAX_K):
        raise _LeftError(f"it has {k} inputs, and the sums of more than {most} do not fit int32")
    if list(weight.block_size) != [1, k] or weight.scale.numel() != n:
        raise _LeftError(f"its weight has scales for blocks of {list(weight.block_size)}, expected one an output")
    if weight.zero_point is not None and bool(weight.zero_point.any()):
        raise _LeftError("its weight has zero points, expected a symmetric range")
    if target == "cuda":
        return W8A8Linear.from_values(weight.qdata, weight.scale.reshape(n).float(), linear.bias, method="torchao")
    return Int8Linear.from_values(
        weight.qdata, weight.scale.reshape(n).float(), linear.bias, method="torchao", input_range=input_range
    )


def _float8(linear: nn.Linear, weight: Any, target: Target) -> W8A8Linear:
    """Of a Float8Tensor: qdata float8 [n, k], scale [n, 1], or [1, 1] for the whole."""
    n, k = linear.out_features, linear.in_features
    if target == "cpu":
        raise _LeftError("its weight is float8: torchao's operators stay, which dequantise it where it is weight-only")
    how = getattr(weight, "act_quant_kwargs", None)
    if how is None:
        raise _LeftError("its weight is float8 and its activations are not (weight-only): torchao's operators stay")
    if getattr(weight, "act_quant_scale", None) is not None:
        raise _LeftError("its activations have static ranges: torchao's operators stay")
    if type(how.granularity).__name__ != "PerRow":
        raise _LeftError("its activations have one range for the whole tensor, expected one a row")
    if weight.qdata.dtype != torch.float8_e4m3fn:
        raise _LeftError(f"its weight is {str(weight.qdata.dtype).removeprefix('torch.')}, expected float8_e4m3fn")
    if weight.scale.numel() not in (1, n) or list(weight.block_size)[-1] != k:
        raise _LeftError(f"its weight has scales for blocks of {list(weight.block_size)}, expected one an output")
    scale = weight.scale.float().reshape(-1).expand(n).contiguous()
    return W8A8Linear.from_values(weight.qdata, scale, linear.bias, method="torchao")


def _intx(linear: nn.Linear, weight: Any, target: Target) -> tuple[_Layer, tuple[int, int], torch.dtype]:
    """Of an IntxUnpackedToInt8Tensor: qdata int8 [n, k], scale and zero_point [n, k / group_size]."""
    n, k = linear.out_features, linear.in_features
    activations, group = weight.activation_quantization, int(list(weight.block_size)[-1])
    if weight.target_dtype == torch.int8:
        if str(activations).rpartition(".")[2].lower() != "int8_asym_per_token":
            raise _LeftError("its weight is int8 and its activations are not quantised a row: torchao's operators stay")
        layer = _int8_layer(linear, weight, "asymmetric", target)
        return layer, _shape_of(layer), weight.dtype
    name = str(weight.target_dtype).removeprefix("torch.")
    if name != "int4":
        raise _LeftError(f"its weight is {name}, expected int4 or int8")
    if weight.block_size[0] != 1 or group not in GROUP_SIZES:
        raise _LeftError(f"its weight has blocks of {list(weight.block_size)}, expected [1, 32], 64, 128 or 256")
    rows, padded = padded_features(k, n, group)
    scale = weight.scale.reshape(n, -1)
    zero = torch.zeros_like(scale) if weight.zero_point is None else -weight.zero_point.reshape(n, -1) * scale
    stored = torch.stack((scale, zero.to(scale.dtype)), -1).transpose(0, 1)
    stored = nn.functional.pad(stored, (0, 0, 0, rows - n, 0, padded // group - stored.shape[0]))
    values = nn.functional.pad(weight.qdata.to(torch.int16) + 8, (0, padded - k, 0, rows - n), value=8)
    made = Int4Linear(
        pack_int4(values), stored.contiguous(), linear.bias, in_features=k, out_features=n, group_size=group,
        method="torchao",
    )  # fmt: skip
    return made, (rows, padded), weight.dtype


def _dtype_of(layer: _Layer) -> str:
    if isinstance(layer, W8A8Linear):
        return layer.dtype
    return "int4" if isinstance(layer, Int4Linear) else "int8"


def _shape_of(layer: Int8Linear | W8A8Linear) -> tuple[int, int]:
    if isinstance(layer, W8A8Linear):
        return layer.weight_values.shape[0], layer.weight_values.shape[1]
    panels, words, outputs, values = layer.packed_weight.shape
    return panels * outputs, words * values


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

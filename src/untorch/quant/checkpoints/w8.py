"""Checkpoints in eight bits: what the tensors of a linear layer mean, w = weight · scale, format by format.

| format | weight [n, k] | scale |
|---|---|---|
| float-quantized | float8_e4m3fn | weight_scale: [] or [1], [n, 1], or of blocks [⌈n / 128⌉, ⌈k / 128⌉] |
| int-quantized | int8 | weight_scale: [] or [1], or [n, 1] |
| naive-quantized | either | likewise |
| fp8 | float8_e4m3fn | weight_scale_inv, of blocks [⌈n / 128⌉, ⌈k / 128⌉]; or one, as weight_scale |
| fbgemm_fp8 | float8_e4m3fn | weight_scale [n, 1] |
| modelopt_fp8 | float8_e4m3fn | weight_scale [] |

The first three are compressed-tensors', the last is ModelOpt's algorithm FP8. All call the values of a layer "weight",
as they do where it is not quantised: a layer is quantised where its weight has eight bits, or a scale lies beside it.

For GPUs scales for activations (input_scale, activation_scale, input_scale_ub) are not read: rows of activations get
the scale of their own largest value when the layer runs. For CPUs int8 of compressed-tensors has the range of
activations that the file says: of rows or of the whole tensor, symmetric or not, dynamic or static (``read_inputs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from untorch.ops.w8a8 import INT8_MAX_K, SCALE_BLOCK
from untorch.quant.checkpoints.files import Checkpoint
from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = ["COMPRESSED_W8", "FBGEMM", "FP8", "MODELOPT_FP8", "W8_FORMATS", "InputRange", "W8Weight", "check_w8_config",
           "read_inputs", "read_w8", "w8_form_of_tensors", "w8_layer_names"]  # fmt: skip

COMPRESSED_W8 = ("float-quantized", "int-quantized", "naive-quantized")
FP8, FBGEMM, MODELOPT_FP8 = "fp8", "fbgemm_fp8", "modelopt_fp8"
W8_FORMATS = (*COMPRESSED_W8, FP8, FBGEMM, MODELOPT_FP8)
_DTYPES = {"int-quantized": (torch.int8,), "naive-quantized": (torch.float8_e4m3fn, torch.int8)}
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_INVERSE = "weight_scale_inv"


@dataclass(frozen=True)
class W8Weight:
    """values: int8 or float8_e4m3fn [n, k]. scale: float32 [n], or [⌈n / 128⌉, ⌈k / 128⌉].

    zero_point: [n] of int8 that is not symmetric, or None.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


@dataclass(frozen=True)
class InputRange:
    """How activations are quantised, as ``Int8Linear`` takes it; ``zero`` is that of uint8."""

    kind: str = "asymmetric"
    scale: float = 0.0
    zero: int = 0


def w8_form_of_tensors(checkpoint: Checkpoint) -> str | None:
    """The format of a file without a configuration, by the tensors; None for another."""
    names = [name.removesuffix(".weight_scale") for name in checkpoint.names if name.endswith(".weight_scale")]
    if any(name.endswith(f".{_INVERSE}") for name in checkpoint.names):
        return FP8
    kinds = {checkpoint.kind(f"{name}.weight") for name in names}
    return "float-quantized" if "F8_E4M3" in kinds else "int-quantized" if "I8" in kinds else None


def w8_layer_names(checkpoint: Checkpoint) -> list[str]:
    """The layers that are quantised in the file, in its order."""
    found = []
    for name in checkpoint.names:
        layer, _, last = name.rpartition(".")
        quantised = last == "weight" and checkpoint.kind(name) in ("F8_E4M3", "I8")
        if quantised or last in ("weight_scale", _INVERSE):
            found.append(layer)
    return list(dict.fromkeys(found))


def check_w8_config(checkpoint: Checkpoint, form: str) -> None:
    """Raises UnsupportedError if the configuration says that weights or scales are of another kind."""
    config = checkpoint.config
    if form in COMPRESSED_W8:
        for name, weights in _groups(checkpoint):
            _check_group(checkpoint, name, weights)
    block = config.get("weight_block_size")
    if form == FP8 and block is not None and list(block) != [SCALE_BLOCK, SCALE_BLOCK]:
        raise UnsupportedError(
            f"{checkpoint.path}: expected weight_block_size [{SCALE_BLOCK}, {SCALE_BLOCK}], the configuration says "
            f"{block!r}"
        )
    if (kind := config.get("fmt", "e4m3")) != "e4m3":
        raise UnsupportedError(f"{checkpoint.path}: expected float8 of the format 'e4m3', it says {kind!r}")


def read_inputs(checkpoint: Checkpoint, name: str) -> InputRange:
    """What compressed-tensors' file says about the activations of an int8 layer; asymmetric rows where it says nothing.

    Raises InvalidFileError or UnsupportedError.
    """
    stated = _inputs(checkpoint)
    if not stated:
        return InputRange()
    bits, kind = stated.get("num_bits", 8), stated.get("type", "int")
    if bits != 8 or kind != "int":
        raise UnsupportedError(
            f"{checkpoint.path}: {name}: expected activations of 8 bits and type 'int', the configuration says "
            f"{bits!r} and {kind!r}"
        )
    symmetric = bool(stated.get("symmetric", True))
    strategy = str(stated.get("strategy", "token" if stated.get("dynamic") else "tensor"))
    if strategy not in ("token", "tensor") or (strategy == "tensor" and stated.get("dynamic") and symmetric):
        raise UnsupportedError(
            f"{checkpoint.path}: {name}: expected activations with a range a token, or one for the tensor that is "
            f"static or asymmetric; the configuration says {strategy!r}, dynamic {stated.get('dynamic')!r}, symmetric "
            f"{symmetric}"
        )
    if stated.get("dynamic"):
        if strategy == "tensor":
            return InputRange("tensor", 2.0**-126)
        return InputRange("symmetric" if symmetric else "asymmetric")
    scale = checkpoint.tensor(f"{name}.input_scale").float()
    zero = 0
    if f"{name}.input_zero_point" in checkpoint:
        given = checkpoint.tensor(f"{name}.input_zero_point")
        if given.numel() != 1:
            raise InvalidFileError(
                f"{checkpoint.path}: {name}.input_zero_point: expected one number, got {list(given.shape)}"
            )
        zero = int(given)
    if scale.numel() != 1 or not 0 < float(scale) < float("inf") or not -128 <= zero <= 127:
        raise InvalidFileError(
            f"{checkpoint.path}: {name}: expected one input_scale above 0, and an input_zero_point from -128 to 127, "
            f"got {scale.flatten().tolist()[:3]} and {zero}"
        )
    return InputRange("static", float(scale), zero + 128)


def _inputs(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Of the groups of layers, which must agree, as we do not match targets."""
    groups = checkpoint.config.get("config_groups")
    found = [
        group.get("input_activations") or {}
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict)
    ]
    keys = ("num_bits", "type", "symmetric", "strategy", "dynamic")
    if len({tuple(str(each.get(key)) for key in keys) for each in found}) > 1:
        raise UnsupportedError(f"{checkpoint.path}: layers have activations of different kinds, which is not read")
    return found[0] if found and isinstance(found[0], dict) else {}


def read_w8(checkpoint: Checkpoint, name: str, form: str, *, zero_points: bool = False) -> W8Weight:
    """Of a layer of the file. zero_points: weights may have some. Raises InvalidFileError or UnsupportedError."""
    if f"{name}.pre_quant_scale" in checkpoint:
        raise UnsupportedError(f"{checkpoint.path}: {name}: its activations are scaled (pre_quant_scale): not read")
    values = checkpoint.expect(f"{name}.weight", _DTYPES.get(form, (torch.float8_e4m3fn,)), (None, None))
    n, k = values.shape
    zero = None
    if values.dtype == torch.int8:
        if zero_points and f"{name}.weight_zero_point" in checkpoint:
            zero = checkpoint.tensor(f"{name}.weight_zero_point").reshape(-1)
            if zero.numel() not in (1, n):
                raise InvalidFileError(
                    f"{checkpoint.path}: {name}.weight_zero_point: expected [{n}, 1], got {list(zero.shape)}"
                )
            zero = zero.expand(n)
        else:
            _check_zeros(checkpoint, name)
        if k > INT8_MAX_K:
            raise UnsupportedError(
                f"{checkpoint.path}: {name}: it has {k} inputs, and the sums of more than {INT8_MAX_K} do not fit int32"
            )
    elif bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise InvalidFileError(f"{checkpoint.path}: {name}: its weight has values that are not finite")
    key = _INVERSE if form == FP8 and f"{name}.{_INVERSE}" in checkpoint else "weight_scale"
    scale = _scale(checkpoint, f"{name}.{key}", n, k, values.dtype)
    return W8Weight(values, scale, zero)


def _scale(checkpoint: Checkpoint, name: str, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """float32 [n] or of blocks, from one number, [n, 1] or blocks."""
    tensor = checkpoint.tensor(name)
    blocks = (-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
    shape = tuple(tensor.shape)
    known = [(), (1,), (n,), (n, 1), *([blocks] if dtype == torch.float8_e4m3fn else [])]
    if tensor.dtype not in _SCALES or shape not in known:
        kinds = " or ".join(str(kind).removeprefix("torch.") for kind in _SCALES)
        shapes = ", ".join(str(list(each)) for each in [(1,), *known[3:]])
        raise InvalidFileError(
            f"{checkpoint.path}: {name}: expected {kinds} of a shape of {shapes}, got "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidFileError(f"{checkpoint.path}: {name}: it has scales that are not finite")
    scale = tensor.float()
    if shape in ((), (1,)):
        return scale.reshape(1).repeat(n)
    return scale.reshape(n) if shape in ((n,), (n, 1)) else scale


def _check_zeros(checkpoint: Checkpoint, name: str) -> None:
    """Weights are symmetric: a zero point is absent, or 0."""
    asymmetric = any(weights.get("symmetric") is False for _, weights in _groups(checkpoint))
    key = f"{name}.weight_zero_point"
    if (asymmetric or key in checkpoint) and bool(checkpoint.tensor(key).any()):
        raise UnsupportedError(
            f"{checkpoint.path}: {name}: its weight has zero points other than 0, expected a symmetric one"
        )


def _groups(checkpoint: Checkpoint) -> list[tuple[str, Mapping[str, Any]]]:
    """What the configuration says about the weights of each group of layers."""
    groups = checkpoint.config.get("config_groups")
    return [
        (str(name), group["weights"])
        for name, group in (groups.items() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]


def _check_group(checkpoint: Checkpoint, name: str, weights: Mapping[str, Any]) -> None:
    strategy, block = weights.get("strategy", "channel"), weights.get("block_structure")
    stated = {
        "num_bits": (weights.get("num_bits", 8), (8,)),
        "type": (weights.get("type", "float"), ("float", "int")),
        "strategy": (strategy, ("tensor", "channel", "block")),
    }
    for key, (said, expected) in stated.items():
        if said not in expected:
            kinds = " or ".join(map(repr, expected))
            raise UnsupportedError(
                f"{checkpoint.path}: {name}: expected {key} {kinds} for weights, the configuration says {said!r}"
            )
    sizes = block.split("x") if isinstance(block, str) else block
    if strategy == "block" and [str(size) for size in sizes or ()] != [str(SCALE_BLOCK)] * 2:
        raise UnsupportedError(
            f"{checkpoint.path}: {name}: expected block_structure [{SCALE_BLOCK}, {SCALE_BLOCK}] for weights, the "
            f"configuration says {block!r}"
        )

"""What the tensors of a linear layer in integers of four or eight bits mean: values, scales and zero points.

All are w = (q − zero_point)·scale with q from 0 to 15, eight to an int32, the first in the lowest four bits:

| format | q | scale | zero point |
|---|---|---|---|
| pack-quantized | weight_packed [n, ⌈k / 8⌉], along k | weight_scale [n, groups] | 8, or weight_zero_point [⌈n / 8⌉, groups] |
| gptq | qweight [k / 8, n], along k | scales [groups, n] | qzeros [groups, n / 8], less one in version 1 |
| awq | qweight [k, n / 8], along n, in the order 0 2 4 6 1 3 5 7 | scales [groups, n] | qzeros [groups, n / 8], so ordered |

The first two also have eight bits: q from 0 to 255, four to an int32, and 128 in the place of 8.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from untorch.quant.checkpoints.files import Checkpoint
from untorch.quant.checkpoints.nvfp4 import MODELOPT, NVFP4_PACKED
from untorch.quant.checkpoints.w8 import (
    COMPRESSED_W8,
    FBGEMM,
    FP8,
    MODELOPT_FP8,
    W8_FORMATS,
    w8_form_of_tensors,
    w8_layer_names,
)
from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = ["FORMATS", "METHODS", "QuantizedWeight", "find_format", "layer_names"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# What a quantised layer has. ModelOpt's has both: one of them alone is an error, not another layer.
_SUFFIXES = {
    "pack-quantized": (".weight_packed",),
    "gptq": (".qweight",),
    "awq": (".qweight",),
    MODELOPT: (".weight_scale", ".weight_scale_2"),
    NVFP4_PACKED: (".weight_packed",),
}
# What a configuration's quant_method may be.
METHODS = ("compressed-tensors", "gptq", "awq", "modelopt", "modelopt_fp4", FP8, FBGEMM)
_COMPRESSED = ("pack-quantized", NVFP4_PACKED, *COMPRESSED_W8)
_MODELOPT = {"NVFP4": MODELOPT, "FP8": MODELOPT_FP8}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class QuantizedWeight:
    """values: uint8 [n, k]. scale: floating point [n, groups]. zero_point: float32 [n, groups]. group_size: of k."""

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    group_size: int
    bits: int = 4


def find_format(checkpoint: Checkpoint) -> str:
    """Which format the file has, by its configuration, or by its tensors' names. Raises UnsupportedError."""
    method = str(checkpoint.config.get("quant_method", ""))
    suffixes = {name.rpartition(".")[2] for name in checkpoint.names}
    if method == "compressed-tensors":
        found = str(checkpoint.config.get("format", "pack-quantized"))
        if found not in _COMPRESSED:
            raise UnsupportedError(
                f"{checkpoint.path}: compressed-tensors' format {found!r} is not read, only "
                f"{', '.join(map(repr, _COMPRESSED))} are"
            )
        return found
    if method in ("modelopt", "modelopt_fp4"):
        algorithm = str(checkpoint.config.get("quant_algo", "NVFP4"))
        if algorithm not in _MODELOPT:
            raise UnsupportedError(
                f"{checkpoint.path}: ModelOpt's algorithm {algorithm!r} is not read, only 'NVFP4' and 'FP8' are"
            )
        return _MODELOPT[algorithm]
    if method in ("gptq", "awq", FP8, FBGEMM):
        return method
    if method:
        raise UnsupportedError(f"{checkpoint.path}: quantisation by {method!r} is not read, expected {_known()}")
    if "weight_scale_2" in suffixes:
        return MODELOPT
    if "weight_packed" in suffixes:
        return NVFP4_PACKED if "weight_global_scale" in suffixes else "pack-quantized"
    if "qweight" in suffixes:
        # They name their tensors alike. Each has its own packed dimension.
        name = next(name for name in checkpoint.names if name.endswith(".qweight")).removesuffix("qweight")
        return "gptq" if checkpoint.tensor(name + "qweight").shape[1] == _columns(checkpoint, name) else "awq"
    if (form := w8_form_of_tensors(checkpoint)) is not None:
        return form
    raise UnsupportedError(
        f"{checkpoint.path}: it has no weights in four or eight bits that are known, expected {_known()}"
    )


def layer_names(checkpoint: Checkpoint, form: str) -> list[str]:
    """The linear layers that are quantised in the file, in its order."""
    if form in W8_FORMATS:
        return w8_layer_names(checkpoint)
    suffixes = _SUFFIXES[form]
    found = (name.removesuffix(suffix) for name in checkpoint.names for suffix in suffixes if name.endswith(suffix))
    return list(dict.fromkeys(found))


def _known() -> str:
    return f"compressed-tensors ({', '.join(_COMPRESSED)}), gptq, awq, {FP8}, {FBGEMM} or modelopt (NVFP4, FP8)"


def _columns(checkpoint: Checkpoint, prefix: str) -> int:
    return int(checkpoint.tensor(prefix + "scales").shape[-1])


def _unpack(packed: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 [a, b] to values uint8 [a, 32 / bits · b], the lowest bits first."""
    most = (1 << bits) - 1
    return torch.stack([((packed >> shift) & most).to(torch.uint8) for shift in range(0, 32, bits)], -1).flatten(1)


def _bits(checkpoint: Checkpoint, name: str, bits: object, *known: int) -> int:
    if bits not in known:
        wanted = " or ".join(map(str, known))
        raise UnsupportedError(f"{checkpoint.path}: {name}: expected {wanted} bits, the configuration says {bits!r}")
    assert isinstance(bits, int)
    return bits


def _group_size(checkpoint: Checkpoint, name: str, k: int, groups: int, stated: object) -> int:
    """The group size, if ``groups`` of it cover k. A configuration says -1 or None for one group."""
    if isinstance(stated, int) and stated > 0:
        size = stated
    elif groups == 1:
        size = k
    elif groups and k % groups == 0:
        size = k // groups
    else:
        size = 0
    if size <= 0 or -(-k // size) != groups:
        raise InvalidFileError(f"{checkpoint.path}: {name}: {groups} scales an output do not fit {k} inputs")
    return size


def _compressed_tensors_weights(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """What the configuration says about weights; several groups of layers must agree, as we do not match targets."""
    groups = checkpoint.config.get("config_groups")
    found = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    keys = ("num_bits", "group_size", "actorder", "type")
    if len({tuple(str(weights.get(key)) for key in keys) for weights in found}) > 1:
        raise UnsupportedError(f"{checkpoint.path}: {name}: layers are quantised in different ways, which is not read")
    return found[0] if found else {}


def _pack_quantized(checkpoint: Checkpoint, name: str) -> QuantizedWeight:
    stated = _compressed_tensors_weights(checkpoint, name)
    bits = _bits(checkpoint, name, stated.get("num_bits", 4), 4, 8)
    if stated.get("type", "int") != "int":
        raise UnsupportedError(f"{checkpoint.path}: {name}: expected integers, got the type {stated['type']!r}")
    shape = checkpoint.expect(f"{name}.weight_shape", (torch.int64, torch.int32), (2,))
    n, k = (int(size) for size in shape)
    word = 32 // bits
    packed = checkpoint.expect(f"{name}.weight_packed", (torch.int32,), (n, -(-k // word)))
    scale = checkpoint.expect(f"{name}.weight_scale", _FLOATS, (n, None))
    groups = scale.shape[1]
    size = _group_size(checkpoint, name, k, groups, stated.get("group_size"))
    if f"{name}.weight_g_idx" in checkpoint:
        _check_order(
            checkpoint, checkpoint.expect(f"{name}.weight_g_idx", (torch.int32, torch.int64), (k,)), name, size
        )
    zero_point = torch.full((n, groups), float(1 << (bits - 1)))
    if f"{name}.weight_zero_point" in checkpoint:
        zeros = checkpoint.expect(f"{name}.weight_zero_point", (torch.int32,), (-(-n // word), groups))
        zero_point = _unpack(zeros.T.contiguous(), bits)[:, :n].T.float()
    return QuantizedWeight(_unpack(packed, bits)[:, :k], scale, zero_point, size, bits)


def _check_order(checkpoint: Checkpoint, g_idx: torch.Tensor, name: str, size: int) -> None:
    """-1 throughout: not used."""
    if bool((g_idx == -1).all()) or torch.equal(g_idx.long(), torch.arange(len(g_idx)) // size):
        return
    raise UnsupportedError(
        f"{checkpoint.path}: {name}: its groups are not of neighbouring inputs (activation order), which the layout "
        f"cannot hold: take a checkpoint without desc_act, or with static groups"
    )


def _gptq(checkpoint: Checkpoint, name: str) -> QuantizedWeight:
    bits = _bits(checkpoint, name, checkpoint.config.get("bits", 4), 4, 8)
    qweight = checkpoint.expect(f"{name}.qweight", (torch.int32,), (None, None))
    k, n = 32 // bits * qweight.shape[0], qweight.shape[1]
    scales, zeros, size = _scales(checkpoint, name, k, n, bits)
    if f"{name}.g_idx" in checkpoint:
        g_idx = checkpoint.expect(f"{name}.g_idx", (torch.int32, torch.int64), (k,))
        _check_order(checkpoint, g_idx, name, size)
    zero_point = _unpack(zeros, bits).int()
    if checkpoint.config.get("checkpoint_format", "gptq") != "gptq_v2":
        zero_point = (zero_point + 1) & ((1 << bits) - 1)
    return QuantizedWeight(_unpack(qweight.T.contiguous(), bits), scales.T, zero_point.T.float(), size, bits)


def _awq(checkpoint: Checkpoint, name: str) -> QuantizedWeight:
    _bits(checkpoint, name, checkpoint.config.get("bits", checkpoint.config.get("w_bit", 4)), 4)
    version = str(checkpoint.config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedError(f"{checkpoint.path}: AWQ's version {version!r} is not read, only 'gemm' is")
    qweight = checkpoint.expect(f"{name}.qweight", (torch.int32,), (None, None))
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    scales, zeros, size = _scales(checkpoint, name, k, n)
    values, zero_point = (_in_order(_unpack(packed)) for packed in (qweight, zeros))
    return QuantizedWeight(values.T, scales.T, zero_point.T.float(), size)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """Undoes AWQ's order within each eight."""
    eights = values.reshape(values.shape[0], -1, 8)
    ordered = torch.empty_like(eights)
    ordered[..., list(_AWQ_ORDER)] = eights
    return ordered.flatten(1)


def _scales(checkpoint: Checkpoint, name: str, k: int, n: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, int]:
    scales = checkpoint.expect(f"{name}.scales", _FLOATS, (None, n))
    zeros = checkpoint.expect(f"{name}.qzeros", (torch.int32,), (scales.shape[0], n * bits // 32))
    stated = checkpoint.config.get("group_size", checkpoint.config.get("q_group_size"))
    return scales, zeros, _group_size(checkpoint, name, k, scales.shape[0], stated)


FORMATS: dict[str, Callable[[Checkpoint, str], QuantizedWeight]] = {
    "pack-quantized": _pack_quantized,
    "gptq": _gptq,
    "awq": _awq,
}

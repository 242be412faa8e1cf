"""``load_checkpoint``: linear layers of a module become those of a checkpoint in four or eight bits."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import nn

from untorch.ops.int4 import GROUP_SIZES
from untorch.ops.int4_layout import pack_int4
from untorch.ops.int8_layout import INT8_GROUP
from untorch.quant.checkpoints.files import Checkpoint, open_checkpoint
from untorch.quant.checkpoints.formats import FORMATS, QuantizedWeight, find_format, layer_names
from untorch.quant.checkpoints.nvfp4 import NVFP4_FORMATS, check_config, excluded
from untorch.quant.checkpoints.w8 import W8_FORMATS, check_w8_config, read_inputs, read_w8
from untorch.quant.int8 import Int8Linear
from untorch.quant.linear import Int4Linear, padded_features
from untorch.quant.modules import module_nbytes, replace_modules
from untorch.quant.nvfp4_linear import NVFP4Linear, check_prefill
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.schemes import Target, check_target
from untorch.quant.select import linears
from untorch.quant.w8a8 import W8A8Linear
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["int4_layer", "int8_layer", "load_checkpoint"]

_Layer = Int4Linear | Int8Linear | NVFP4Linear | W8A8Linear


def load_checkpoint(
    module: nn.Module,
    path: str | Path,
    *,
    prefix: str = "",
    prefill: str = "exact",
    target: Target = "cuda",
    progress: bool = True,
) -> QuantizationReport:
    """Replaces the linear layers that a checkpoint names by ``Int4Linear``, ``Int8Linear``, ``NVFP4Linear`` or
    ``W8A8Linear`` in place.

    Read are .safetensors of compressed-tensors (``pack-quantized``), GPTQ and AWQ (``gemm``), in int4; those of
    ModelOpt and compressed-tensors (``nvfp4-pack-quantized``) in NVFP4; and in eight bits those of compressed-tensors
    (``float-quantized``, ``int-quantized``, ``naive-quantized``), DeepSeek-V3 and Qwen3 (``fp8``, also with blocks of
    128 × 128), ``fbgemm_fp8`` and ModelOpt (FP8), whose layers are for GPUs. With target="cpu" int8 becomes
    ``Int8Linear``, also with zero points, and so do weights of GPTQ and ``pack-quantized`` in eight bits, in groups or
    not; their activations have the ranges that compressed-tensors states, else asymmetric ones of rows.

    Values and scales are taken over as they are, without another rounding; a divisor of NVFP4 becomes its reciprocal.
    Symmetric weights of int4 have zeros of 0. Zero points become (8 − zero_point)·scale, in the scale's dtype if it
    holds all of a layer's exactly, else scales and zeros are stored in float32; scales of eight bits always are. For
    GPUs scales for activations (``input_scale``) are not read: activations stay as they are, or get the scale of their
    row's largest value in ``W8A8Linear``. Biases are taken from the file if it has them. All other tensors of the file
    (embeddings, norms) are the caller's to load.

    Args:
        module: Changed in place, whole or not at all.
        path: A .safetensors file, or a folder with such files. A config.json beside them is read.
        prefix: What the file's names have in front of the module's, such as "model.".
        prefill: For NVFP4, how GPUs may compute GEMMs at large M: as for ``quantize``.
        target: What layers in eight bits are for, "cuda" or "cpu". Those of four bits are for both.
        progress: Show the running layer when stderr is a terminal.

    Raises:
        InvalidArgumentError: No such file, or the module does not fit it, or prefill is unknown or not for its format.
        InvalidFileError: The file is damaged, or its tensors do not fit each other.
        UnsupportedError: Another format, other bits, an order of activations; or safetensors is not installed.
    """
    from untorch.progress import Progress

    start = time.perf_counter()
    check_target(target)
    check_prefill("load_checkpoint", prefill)
    checkpoint = open_checkpoint(path)
    form = find_format(checkpoint)
    if prefill != "exact" and form not in NVFP4_FORMATS:
        raise InvalidArgumentError(
            f"load_checkpoint: prefill: {path} is in {'eight bits' if form in W8_FORMATS else 'int4'} ({form}), which "
            f"has 'exact' alone; got {prefill!r}"
        )
    if form in NVFP4_FORMATS:
        check_config(checkpoint)
    elif form in W8_FORMATS:
        check_w8_config(checkpoint, form)
    names = layer_names(checkpoint, form)
    if not names:
        raise InvalidFileError(f"{path}: it is a {form} checkpoint and has no quantised layer")
    layers_of = {name: (linear, tuple(own)) for linear, own in linears(module) for name in own}
    places = {name: name.removeprefix(prefix) for name in names}
    if missing := [place for name, place in places.items() if place not in layers_of or not name.startswith(prefix)]:
        raise InvalidArgumentError(
            f"load_checkpoint: {path}: the module has no linear layer {', '.join(missing)}; it has "
            f"{', '.join(layers_of) or 'none'}; prefix is what the file's names have in front of the module's"
        )
    before = module_nbytes(module)
    replacements: dict[int, nn.Module] = {}
    reports = []
    with Progress(progress).step(f"read {form}") as show, torch.no_grad():
        for number, (name, place) in enumerate(places.items(), 1):
            show(f"{number} of {len(places)}: {place}")
            linear, own_names = layers_of[place]
            if id(linear) in replacements:
                raise InvalidArgumentError(f"load_checkpoint: {path}: two layers of the file are {place} of the module")
            layer = _layer(checkpoint, name, form, linear, prefill, target)
            # A module on the meta device has no weights yet: those of the file stay where they were read.
            there = layer if linear.weight.is_meta else layer.to(linear.weight.device)
            replacements[id(linear)] = there.train(linear.training)
            reports.append(_report(layer, linear, own_names))
    others = [own[0] for linear, own in linears(module) if id(linear) not in replacements]
    skipped = {own: _why_not(checkpoint, prefix + own) for own in others}
    replace_modules(module, replacements)
    return QuantizationReport(tuple(reports), skipped, before, module_nbytes(module), time.perf_counter() - start)


def int4_layer(weight: QuantizedWeight, bias: torch.Tensor | None, method: str) -> Int4Linear:
    """The layer of a weight in another format. Scales of 16 bits give each weight exactly, computed in float32."""
    n, k = weight.values.shape
    repeat, group_size = _split(weight.group_size, k)
    packed_n, packed_k = padded_features(k, n, group_size)
    zero = (8 - weight.zero_point) * weight.scale.float()
    exact = torch.equal(zero.to(weight.scale.dtype).float(), zero)
    pair = torch.stack((weight.scale.float(), zero), -1).to(weight.scale.dtype if exact else torch.float32)
    groups = -(-k // group_size)
    pair = pair.repeat_interleave(repeat, 1)[:, :groups]
    padded = nn.functional.pad(pair, (0, 0, 0, packed_k // group_size - groups, 0, packed_n - n))
    values = nn.functional.pad(weight.values, (0, packed_k - k, 0, packed_n - n), value=8)
    return Int4Linear(
        pack_int4(values), padded.transpose(0, 1).contiguous(), bias,
        in_features=k, out_features=n, group_size=group_size, method=method,
    )  # fmt: skip


def _split(group_size: int, k: int) -> tuple[int, int]:
    """How many of our groups hold one of the file's, and our group size."""
    if group_size >= k:  # one group an output: any size will do
        return -(-k // 128), 128
    for size in reversed(GROUP_SIZES):
        if group_size % size == 0:
            return group_size // size, size
    raise UnsupportedError(f"groups of {group_size} cannot be held: expected a multiple of 32")


def int8_layer(weight: QuantizedWeight, bias: torch.Tensor | None, method: str) -> Int8Linear:
    """The layer of a weight of eight bits, in groups or not. Raises UnsupportedError."""
    k, groups = weight.values.shape[1], weight.scale.shape[1]
    if groups > 1 and (k % groups or weight.group_size * groups != k or weight.group_size % INT8_GROUP):
        raise UnsupportedError(
            f"groups of {weight.group_size} cannot be held: expected a multiple of {INT8_GROUP} that divides {k} inputs"
        )
    values = (weight.values.to(torch.int16) - 128).to(torch.int8)
    scales, zero = weight.scale.float(), weight.zero_point - 128
    if groups == 1:
        scales, zero = scales[:, 0], zero[:, 0]
    return Int8Linear.from_values(values, scales, bias, method=method, zero_point=zero)


def _layer(checkpoint: Checkpoint, name: str, form: str, linear: nn.Linear, prefill: str, target: Target) -> _Layer:
    if form in W8_FORMATS:
        return _eight_bits(checkpoint, name, form, linear, target)
    if form in NVFP4_FORMATS:
        nvfp4 = NVFP4_FORMATS[form](checkpoint, name)
        n, half_k = nvfp4.packed.shape
        _check_features(checkpoint, name, n, 2 * half_k, linear)
        bias = _bias(checkpoint, name, linear)
        return NVFP4Linear.from_weight(nvfp4, bias, in_features=linear.in_features, method=form, prefill=prefill)
    weight = FORMATS[form](checkpoint, name)
    n, k = weight.values.shape
    _check_features(checkpoint, name, n, k, linear)
    if not bool(torch.isfinite(weight.scale).all()):
        raise InvalidFileError(f"{checkpoint.path}: {name}: it has scales that are not finite")
    bias = _bias(checkpoint, name, linear)
    if weight.bits == 4:
        return int4_layer(weight, bias, form)
    if target == "cuda":
        raise UnsupportedError(
            f"{checkpoint.path}: {name}: {form} in 8 bits is read for CPUs alone (target='cpu'): for GPUs take a "
            "checkpoint in 4 bits, or one of compressed-tensors in int8"
        )
    try:
        return int8_layer(weight, bias, form)
    except UnsupportedError as error:
        raise UnsupportedError(f"{checkpoint.path}: {name}: {error}") from error


def _eight_bits(
    checkpoint: Checkpoint, name: str, form: str, linear: nn.Linear, target: Target
) -> Int8Linear | W8A8Linear:
    w8 = read_w8(checkpoint, name, form, zero_points=target == "cpu")
    n, k = w8.values.shape
    _check_features(checkpoint, name, n, k, linear)
    bias = _bias(checkpoint, name, linear)
    # Of float8 CPUs have no kernel: export says so.
    if target == "cuda" or w8.values.dtype != torch.int8:
        return W8A8Linear.from_values(w8.values, w8.scale, bias, method=form)
    how = read_inputs(checkpoint, name)
    return Int8Linear.from_values(
        w8.values, w8.scale, bias, method=form, input_range=how.kind, input_scale=how.scale, input_zero=how.zero,
        zero_point=w8.zero_point,
    )  # fmt: skip


def _check_features(checkpoint: Checkpoint, name: str, n: int, k: int, linear: nn.Linear) -> None:
    if (n, k) != (linear.out_features, linear.in_features):
        raise InvalidArgumentError(
            f"load_checkpoint: {checkpoint.path}: {name} has {k} → {n} features, the module's layer "
            f"{linear.in_features} → {linear.out_features}"
        )


def _why_not(checkpoint: Checkpoint, name: str) -> str:
    pattern = excluded(checkpoint, name)
    return "not in the file" if pattern is None else f"not in the file, which leaves out {pattern!r}"


def _bias(checkpoint: Checkpoint, name: str, linear: nn.Linear) -> torch.Tensor | None:
    if f"{name}.bias" not in checkpoint:
        return linear.bias
    bias = checkpoint.tensor(f"{name}.bias")
    if tuple(bias.shape) != (linear.out_features,) or not bias.dtype.is_floating_point:
        raise InvalidFileError(
            f"{checkpoint.path}: {name}.bias: expected floating point [{linear.out_features}], got "
            f"{str(bias.dtype).removeprefix('torch.')} {list(bias.shape)}"
        )
    # GPTQ files have a bias of zeros where the model has none.
    if linear.bias is None and not bool(bias.any()):
        return None
    return bias.to(linear.weight.dtype)


def _report(layer: _Layer, linear: nn.Linear, names: tuple[str, ...]) -> LayerReport:
    if isinstance(layer, W8A8Linear):
        dtype, (n, k) = layer.dtype, tuple(layer.weight_values.shape)
    elif isinstance(layer, Int8Linear):
        panels, words, outputs, values = layer.packed_weight.shape
        dtype, n, k = "int8", panels * outputs, words * values
    else:
        dtype = "int4" if isinstance(layer, Int4Linear) else "nvfp4"
        n, k = padded_features(linear.in_features, linear.out_features, layer.group_size)
    return LayerReport(
        names=names, shape=(linear.out_features, linear.in_features), packed_shape=(n, k),
        dtype=str(linear.weight.dtype).removeprefix("torch."), group_size=layer.group_size, method=layer.method,
        error=math.nan, nbytes_before=linear.weight.numel() * linear.weight.element_size(),
        nbytes_after=layer.weight_nbytes, prefill=layer.prefill if isinstance(layer, NVFP4Linear) else "exact",
        quantized_dtype=dtype,
    )  # fmt: skip

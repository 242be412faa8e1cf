"""``quantize``: quantises a module in place, in one dtype or by patterns of layers' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from untorch.quant.by_rules import Quantizers, quantize_by_rules
from untorch.quant.exposed import expose_linears, restore_plain
from untorch.quant.modules import device_type
from untorch.quant.quantizer import Quantizer, show_steps
from untorch.quant.report import QuantizationReport
from untorch.quant.rules import QuantizeRules, layers_of
from untorch.quant.schemes import Target, check_target
from untorch.quant.select import Selector
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["quantize"]


def quantize(
    module: nn.Module,
    dtype: str | Mapping[str, Any] = "int4",
    *,
    group_size: int | None = None,
    method: str | None = None,
    prefill: str = "exact",
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    embeddings: bool = False,
    device: str | torch.device | None = None,
    target: Target | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Replaces linear layers of ``module`` by ``Int4Linear``, ``Int8Linear``, ``W8A8Linear`` or ``NVFP4Linear``, in
    place, and reports each; for nvfp4 also the experts of transformers' models by ``NVFP4Experts``, see
    ``quantize_experts``, and for int4 on CPUs by ``Int4Experts``.

    Layers are taken that are an nn.Linear with a float32, bfloat16 or float16 weight, and not a subclass; so are the
    projections of nn.MultiheadAttention, called q_proj, k_proj, v_proj and out_proj, and transformers' Conv1D. Without
    ``include``, those that would not get smaller are left alone. Layers that share one weight share the packed one. If
    something else reads the weight too, such as a tied embedding, it stays there in floating point, and the report
    says so.

    Args:
        module: Changed in place. Its biases and everything else stay as they are.
        dtype: "int4": 16 values, a scale and a zero for each group, in the dtype of the weight. "int8": a scale an
            output; activations are quantised too, a row at a time when the layer is called, and CPUs and GPUs multiply
            in integers. "fp8": likewise in float8_e4m3fn, for GPUs alone. "nvfp4": floating point of four bits, a scale
            in float8_e4m3fn for each 16 inputs, and a scale of all. Or a dictionary of patterns of layers' names, with
            a dtype, a dictionary of ``QuantizeOptions``' fields, or None for floating point: the first pattern that
            matches a layer decides. The options below, but for device, target and progress, are then those of each
            pattern.
        group_size: For int4, inputs that share a scale: 32, 64, 128 (None) or 256. For nvfp4 16, which cannot be
            chosen; int8 and fp8 have no groups. Inputs that fill no group are padded.
        method: For int4 "hqq" (None): the zeros are optimised so that outliers do not spoil the rest (half-quadratic
            quantisation). "rtn": rounded to the nearest of 16 steps between the group's least and largest value.
            "symmetric": the same from -8 to 7 steps of a scale alone; on CPUs zeros then take no memory.
            For int8 "rtn" (None): to the nearest of 255 steps, the output's largest magnitude at the end. For fp8
            "rtn" (None): to the nearest value, the output's largest magnitude at 448, the largest of E4M3.
            For nvfp4 "search" (None): each scale is that of the least squared error. "rtn": the scale that makes the
            largest value 6, E2M1's largest.
        prefill: For nvfp4, how GPUs may compute linear layers at large M. "exact": with the activations as they
            are. "fp8": faster, activations and weights rounded to float8_e4m3fn, in rows with a scale each, from
            compute capability 8.9 on. "fp4": activations rounded to NVFP4, on sm_100, sm_103, sm_120 and sm_121. Other
            GPUs refuse the layers. Small M, experts, and the CPU are always exact.
        include: Which layers and experts: patterns of dotted names ("layers.*.mlp.*", as in a shell), or functions of
            (name, module). None: all.
        exclude: Which of them not, likewise.
        embeddings: For int4 and int8, also tables of embeddings, by ``Int4Embedding`` and ``Int8Embedding``, for GPUs
            ``W8Embedding``. A linear layer that is tied to one shares its tensors.
        device: Where to compute, such as "cuda". None: where each weight lies. The result lies where the weight was.
        target: What the module will run on: "cpu" or "cuda". int8 has other layers for GPUs than for CPUs, and fp8 is
            for GPUs. None: "cuda" if weights of the module lie on a GPU, else "cpu".
        progress: Show the running layer when stderr is a terminal.

    Raises:
        InvalidArgumentError: An argument is unknown, a pattern matches nothing, nothing is left to quantise, or a
            weight is not finite.
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"quantize: module: expected a torch.nn.Module, got {type(module).__name__}")
    if type(module) is nn.Linear:
        raise InvalidArgumentError(
            "quantize: module: an nn.Linear cannot be replaced in place: put it into another module, such as "
            "nn.Sequential(linear)"
        )
    if target is not None:
        check_target(target)
    target = target or device_type(module)
    if isinstance(dtype, Mapping):
        given = {"group_size": group_size, "method": method, "include": include, "exclude": exclude}
        given["prefill"] = None if prefill == "exact" else prefill
        given["embeddings"] = embeddings or None
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InvalidArgumentError(
                f"quantize: {wrong[0]}: not beside patterns of layers: give it for a pattern, such as "
                f"{{'*': {{'dtype': 'int4', '{wrong[0]}': …}}}}"
            )
        rules = QuantizeRules.read(dtype)
        expose_linears(module, in_place=True)
        try:
            with show_steps(progress, None) as show:
                return quantize_by_rules(
                    module, rules.assign(layers_of(module)), Quantizers(), show, device, target=target
                )[1]
        finally:
            restore_plain(module)
    quantizer = Quantizer(dtype, group_size=group_size, method=method, prefill=prefill, device=device, target=target)
    expose_linears(module, in_place=True)
    try:
        return quantizer.apply(module, include, exclude, progress=progress, embeddings=embeddings)
    finally:
        restore_plain(module)

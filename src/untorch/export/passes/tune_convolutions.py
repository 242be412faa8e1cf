"""Chooses cuDNN's algorithm for each convolution by timing, where the file is made on a GPU of its kind.

The choice travels in the file, as a text in the call. Where cuDNN, GPU or sizes are others, cuDNN chooses there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.calls import arguments_of
from untorch.export.passes.report import PassReport
from untorch.ops.fused_convolution import OPERATOR, Tuning, tune

__all__ = ["tune_convolutions"]

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def tune_convolutions(module: fx.GraphModule) -> PassReport:
    """Gives each ``untorch::fused_convolution`` the plan of its fastest algorithm for its example's sizes.

    Whether float32 ones may use TF32 is as torch.backends says, which the manifest records.
    """
    report = PassReport("tune_convolutions")
    backends: Any = torch.backends
    tf32 = backends.cudnn.conv.fp32_precision == "tf32"
    known: dict[Any, Tuning] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not OPERATOR:
            continue
        arguments = arguments_of(node)
        operands = [arguments[name] for name in ("x", "weight", "bias", "residual")]
        if operands[1].meta["val"].dim() < operands[0].meta["val"].dim():
            report.skipped[node.name] = "it is depthwise: its kernel is not cuDNN's"
            continue
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups", "activation")
        rest = [arguments[name] for name in names]
        shapes = [None if operand is None else _example_sizes(operand.meta["val"]) for operand in operands]
        dtype, device = operands[0].meta["val"].dtype, _gpu_of(operands[1].meta["val"])
        if device is None:
            report.skipped[node.name] = "there is no GPU to time it on"
            continue
        key = (dtype, *map(str, shapes), *map(str, rest))
        if key not in known:
            tensors = [None if shape is None else torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
            for index in (0, 3):
                if (tensor := tensors[index]) is not None:
                    tensors[index] = tensor.to(memory_format=_MEMORY_FORMATS[tensor.dim()])
            given: list[Any] = [*tensors, *rest, tf32]
            known[key] = tune(*given)
        found = known[key]
        if not found.plan:
            report.skipped[node.name] = "cuDNN has one algorithm for it"
            continue
        node.update_arg(len(OPERATOR._schema.arguments) - 1, found.plan)
        report.changed.append(f"{node.name}: {found.first_us:.1f} to {found.best_us:.1f} µs")
    return report


def _example_sizes(value: torch.Tensor) -> list[int]:
    return [size if isinstance(size, int) else size.node.hint for size in value.shape]


def _gpu_of(value: torch.Tensor) -> torch.device | None:
    """Where the tensor lies; None for the CPU, as in a graph for a GPU that this machine lacks."""
    return value.device if value.device.type == "cuda" else None

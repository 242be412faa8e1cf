"""Models that torchao's ``quantize_`` changed: linear layers become ours before tracing, and the rest is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from untorch.export.method import Method
from untorch.export.quantize import serves_fp8, shallow_copy
from untorch.progress import Progress
from untorch.quant.checkpoints.torchao import convert_torchao, is_torchao
from untorch.quant.report import QuantizationReport
from untorch.quant.schemes import Target
from untorch.quant.select import linears

__all__ = ["convert_methods", "join_reports"]


def convert_methods(methods: Sequence[Method], progress: Progress) -> list[Method]:
    """The methods; those with torchao's weights have a copy of their module with our layers, and say so in
    ``quantization``. Layers without a kernel of ours keep torchao's operators, and are in its ``skipped``.
    """
    done: dict[tuple[str, str], tuple[nn.Module, QuantizationReport]] = {}
    result = []
    for method in methods:
        key = method.name, method.target.device
        if key not in done and isinstance(method.model, nn.Module):
            names = {name for part, every in linears(method.model) if is_torchao(part.weight) for name in every[:1]}
            if names:
                with progress.step(f"{method.name}: convert torchao's layers"):
                    target: Target = method.target.device  # type: ignore[assignment]
                    model = shallow_copy(method.name, method.model)
                    same = [each.target.architecture for each in methods if each.name == method.name]
                    float8 = all(serves_fp8(architecture) for architecture in same)
                    report = convert_torchao(model, target=target, float8=float8, allow_nothing=True)
                skipped = {name: reason for name, reason in report.skipped.items() if name in names}
                done[key] = model, dataclasses.replace(report, skipped=skipped)
        if key in done:
            model, report = done[key]
            method = dataclasses.replace(method, model=model, quantization=report)
        result.append(method)
    return result


def join_reports(methods: Sequence[Method], before: Sequence[Method]) -> list[Method]:
    """The methods behind ``quantize_methods``, with what ``convert_methods`` said about them before it."""
    result = []
    for method, converted in zip(methods, before, strict=True):
        first, second = converted.quantization, method.quantization
        if first is not None and second is not None and first is not second:
            joined = dataclasses.replace(
                second, layers=first.layers + second.layers, skipped={**second.skipped, **first.skipped},
                module_nbytes_before=first.module_nbytes_before, seconds=first.seconds + second.seconds,
            )  # fmt: skip
            method = dataclasses.replace(method, quantization=joined)
        result.append(method)
    return result

"""Computes 1 x 1 convolutions before an image is enlarged, and not after it.

    conv(cat(a, up(b), up(c)))  =  conv_a(a) + up(conv_b(b)) + up(conv_c(c))

Enlarging mixes pixels of one channel with weights whose sum is one, a 1 x 1 convolution mixes channels of one pixel, so
the order does not matter; the convolution then has fewer pixels. Decoders of segmentation networks (SegFormer, HRNet,
DeepLab) are written so. A batch norm of inference behind the convolution goes into its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import add_dense_constant
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import fold_batch_norm, is_inference_norm
from untorch.export.passes.epilogues import only_user, value_of
from untorch.export.passes.report import PassReport

__all__ = ["resize_after_convolution"]

_aten = torch.ops.aten
_RESIZES = {
    _aten.upsample_bilinear2d.vec, _aten.upsample_bilinear2d.default, _aten.upsample_nearest2d.vec,
    _aten.upsample_nearest2d.default, _aten.upsample_bicubic2d.vec, _aten.upsample_bicubic2d.default,
    _aten._upsample_nearest_exact2d.vec, _aten._upsample_nearest_exact2d.default,
}  # fmt: skip
# So many times more pixels behind the resizing than before it, at least.
_GROWTH = 2
_MIN_CHANNELS = 16


@dataclass(frozen=True)
class _Part:
    """Some input channels of a convolution, from ``first`` on; ``resize`` gives them where it is to come later."""

    node: fx.Node
    first: int
    count: int
    resize: fx.Node | None


def resize_after_convolution(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place."""
    report = PassReport("resize_after_convolution")
    found = [node for node in module.graph.nodes if node.target == _aten.conv2d.default]
    found = [node for node in found if _resizes_before(node)]
    if not found:
        return report
    constants, aliases = Constants(module), Aliases(module.graph)
    for node in found:
        parts = _parts(node)
        if reason := _reason_to_skip(node, parts, constants, aliases):
            report.skipped[node.name] = reason
            continue
        report.changed.append(node.name)
        _replace(module, node, parts, constants)
    module.graph.eliminate_dead_code(lambda node: node.target not in _RESIZES and node.target != _aten.cat.default)
    return report


def _resizes_before(convolution: fx.Node) -> bool:
    return any(part.target in _RESIZES for part in _inputs(convolution))


def _inputs(convolution: fx.Node) -> list[fx.Node]:
    """What a convolution's channels are put together from."""
    x = arguments_of(convolution)["input"]
    value = value_of(x)
    if value is None or value.dim() != 4:
        return []
    if x.target != _aten.cat.default or arguments_of(x)["dim"] not in (1, -3) or only_user(x) is not convolution:
        return [x]
    return list(x.args[0])


def _parts(convolution: fx.Node) -> list[_Part]:
    parts, first = [], 0
    outputs = convolution.meta["val"].shape[1]
    for node in _inputs(convolution):
        count = node.meta["val"].shape[1]
        moves = node.target in _RESIZES and len(node.users) == 1 and _gains(node, count, outputs)
        source = node.args[0] if not moves and _is_identity(node) else node
        assert isinstance(source, fx.Node)
        parts.append(_Part(source, first, count, node if moves else None))
        first += count
    return parts


def _is_identity(node: fx.Node) -> bool:
    """Whether a resizing keeps the size, as decoders do with the largest of their images."""
    if node.target not in _RESIZES:
        return False
    scales = [value for name, value in arguments_of(node).items() if name.startswith("scale")]
    before, after = (value.meta["val"].shape for value in (node.args[0], node))  # type: ignore[union-attr]
    return set(scales) == {None} and all(statically_known_true(a == b) for a, b in zip(before, after, strict=True))


def _gains(resize: fx.Node, channels: Any, outputs: Any) -> bool:
    """Whether the convolution has much fewer pixels before it, and the resizing not many more channels behind it."""
    before, after = (value.meta["val"].shape[2:] for value in (resize.args[0], resize))  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in (*before, *after, channels, outputs)):
        return False
    enough = channels >= _MIN_CHANNELS and outputs <= 2 * channels
    return bool(enough and math.prod(before) * _GROWTH <= math.prod(after))


def _reason_to_skip(
    node: fx.Node, parts: list[_Part], constants: Constants, aliases: Aliases
) -> str | None:  # fmt: skip
    given = arguments_of(node)
    value = value_of(given["weight"])
    if value is None or list(value.shape[2:]) != [1, 1] or given["groups"] != 1:
        return "its kernel is not 1 x 1, or it has groups"
    if set(given["stride"]) != {1} or given["padding"] not in ([0], [0, 0], "valid", "same"):
        return "it has a stride or padding"
    for name in ("weight", "bias"):
        if given[name] is not None and not constants.is_known(given[name]):
            return f"the {name} is computed, or the model writes into it: it is no constant"
    if not any(part.resize is not None for part in parts):
        return "nothing before it is enlarged much, by sizes that are known and for it alone"
    if any(aliases.is_written(part.node) for part in parts) or aliases.is_written(node):
        return "the model writes into its input or its result"
    return None


def _replace(module: fx.GraphModule, node: fx.Node, parts: list[_Part], constants: Constants) -> None:
    graph = module.graph
    given = arguments_of(node)
    weight = constants.value(given["weight"]).detach()
    bias = None if given["bias"] is None else constants.value(given["bias"]).detach()
    last, norm = node, only_user(node)
    if norm is not None and weight.dtype == torch.float32 and is_inference_norm(norm, node, constants):
        own = arguments_of(norm)
        operands = [own[name] for name in ("weight", "bias", "running_mean", "running_var")]
        values = [None if operand is None else constants.value(operand).detach() for operand in operands]
        weight, bias = fold_batch_norm(weight, bias, values, own["eps"])
        last = norm
    with graph.inserting_before(node):
        kept = [part for part in parts if part.resize is None]
        results: list[fx.Node] = []
        for group in [kept, *([part] for part in parts if part.resize is not None)]:
            if not group:
                continue
            columns = [weight[:, part.first : part.first + part.count] for part in group]
            rows = add_dense_constant(
                module, f"{node.name}_weight_{len(results)}", torch.cat(columns, 1), given["weight"]
            )
            # The sum has the bias once.
            added = None
            if bias is not None and not results:
                added = add_dense_constant(module, f"{node.name}_bias", bias, given["weight"])
            resize = group[0].resize
            sources = [part.node if resize is None else resize.args[0] for part in group]
            x = sources[0] if len(sources) == 1 else add_call(graph, node, _aten.cat.default, (sources, 1))
            result = add_call(graph, node, _aten.conv2d.default, (x, rows, added))
            if resize is not None:
                result = add_call(graph, node, resize.target, (result, *resize.args[1:]), dict(resize.kwargs))
            results.append(result)
        result = results[-1]
        for other in reversed(results[:-1]):
            result = add_call(graph, node, _aten.add.Tensor, (other, result))
    last.replace_all_uses_with(result)
    if last is not node:
        graph.erase_node(last)
    graph.erase_node(node)

"""Gives convolutions and linear layers static uint8 activations, from calibration batches.

Runs behind the passes that pack convolutions and fuse what follows them, so what is observed is what the kernels pass
on: after batch norm, activation and residual sum. A packed convolution becomes ``untorch::int8_convolution`` with an
int8 weight; an ``untorch::int8_linear``, whose weight is int8 since before tracing, gets a static range.

A convolution's result is uint8 where another convolution reads it, through max pooling and views too, so a chain of
convolutions stays in bytes. Other readers get it dequantised; what the program returns stays float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from untorch.export.passes.attributes import add_constant, remove_unused
from untorch.export.passes.calibration import PLAN, CalibrationPlan, observe
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport
from untorch.ops import byte_max_pool, int8_convolution, packed_convolution
from untorch.ops.int8 import OPERATOR as LINEAR
from untorch.ops.int8_layout import INT8_MAX_K
from untorch.quant.int8 import int8_error, quantize_int8
from untorch.quant.observers import scale_and_zero
from untorch.quant.report import LayerReport

__all__ = ["quantize_activations"]

_aten = torch.ops.aten
_CONVOLUTION = packed_convolution.OPERATOR
# They pass bytes on as they are: the range stays, and the least byte pads.
_PASSES_ON = {_aten.max_pool2d.default, _aten.squeeze.dim, _aten.unsqueeze.default}


@dataclass(frozen=True)
class _Bytes:
    """x ≈ scale · (u − zero)."""

    scale: float
    zero: int


def quantize_activations(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place, where the module's ``meta`` has a plan. Raises CompileError."""
    report = PassReport("quantize_activations")
    plan: CalibrationPlan | None = module.meta.get(PLAN)
    if plan is None:
        return report
    constants = Constants(module)
    chosen: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target != _CONVOLUTION:
            continue
        if reason := _reason_to_skip(node, plan, constants):
            report.skipped[node.name] = plan.skipped[_layer(node)] = reason
        else:
            chosen.append(node)
    linears = [node for node in module.graph.nodes if node.op == "call_function" and node.target == LINEAR]
    linears = [node for node in linears if arguments_of(node)["input_range"] != "static"]
    if not chosen and not linears:
        return report
    observed = {arguments_of(node)["x"] for node in (*chosen, *linears)} | set(chosen)
    observed |= {residual for node in chosen if (residual := arguments_of(node)["residual"]) is not None}
    observers = observe(module, observed, plan)
    ranges = {node: _Bytes(*scale_and_zero(*observer.range())) for node, observer in observers.items()}
    _Rewriter(module, set(chosen), ranges, constants, plan).run()
    for node in linears:
        _make_static(node, ranges[arguments_of(node)["x"]])
    report.changed += [node.name for node in (*chosen, *linears)]
    module.graph.eliminate_dead_code()
    remove_unused(module)
    return report


def _layer(node: fx.Node) -> str:
    return str(node.meta.get("weight_name", node.name)).removesuffix(".weight")


def _reason_to_skip(node: fx.Node, plan: CalibrationPlan, constants: Constants) -> str:
    """Why a packed convolution stays in float32, or ""."""
    given = arguments_of(node)
    if reason := plan.excluded.get(_layer(node)):
        return reason
    weight, x = given["weight"], value_of(given["x"])
    if x is None or not constants.is_known(weight) or not (given["bias"] is None or constants.is_known(given["bias"])):
        return "its weight is computed, not a constant"
    taps, channels = given["kernel"][0] * given["kernel"][1], x.shape[1]
    if not isinstance(channels, int) or taps * (channels // given["groups"]) > INT8_MAX_K:
        return f"an output has more than {INT8_MAX_K} weights, whose sums do not fit int32"
    depthwise = packed_convolution.is_depthwise(channels, given["out_channels"], given["groups"])
    if depthwise and taps > int8_convolution.MAX_DEPTHWISE_TAPS:
        return f"its depthwise kernel has more than {int8_convolution.MAX_DEPTHWISE_TAPS} elements"
    if not bool(torch.isfinite(constants.value(weight)).all()):
        return "its weight has values that are not finite"
    return ""


def _passes_on(node: fx.Node) -> bool:
    """Whether bytes can pass; of max pooling where images have fixed sizes."""
    if node.target not in _PASSES_ON:
        return False
    value = value_of(node)
    if node.target != _aten.max_pool2d.default:
        return True
    return value is not None and value.dim() == 4 and all(isinstance(size, int) for size in value.shape[2:])


def _pair(values: Any) -> list[int]:
    found = [values] if isinstance(values, int) else list(values)
    return found * 2 if len(found) == 1 else found


def _make_static(node: fx.Node, scale: _Bytes) -> None:
    given = arguments_of(node)
    given |= {"input_range": "static", "input_scale": scale.scale, "input_zero": scale.zero}
    node.args, node.kwargs = tuple(given.values()), {}


class _Rewriter:
    """Makes the convolutions of integers, in graph order, and says which values are bytes."""

    def __init__(
        self,
        module: fx.GraphModule,
        chosen: set[fx.Node],
        ranges: dict[fx.Node, _Bytes],
        constants: Constants,
        plan: CalibrationPlan,
    ) -> None:
        self._module, self._graph, self._constants, self._plan = module, module.graph, constants, plan
        self._chosen, self._ranges = chosen, ranges
        self._bytes = {node for node in chosen if self._becomes_bytes(node)}
        self._stored: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._made: dict[fx.Node, tuple[fx.Node, _Bytes]] = {}  # old value: its bytes

    def run(self) -> None:
        order = [node for node in self._graph.nodes if node in self._chosen or _passes_on(node)]
        for node in order:
            if node in self._chosen:
                self._replace(node)
            elif node.args[0] in self._made and self._has_byte_reader(node):
                source, scale = self._made[node.args[0]]
                self._made[node] = self._pass_on(node, source), scale
        for node, (made, scale) in reversed(self._made.items()):
            self._dequantize_for_others(node, made, scale)

    def _becomes_bytes(self, node: fx.Node) -> bool:
        return self._has_byte_reader(node) and all(user.op != "output" for user in node.users)

    def _has_byte_reader(self, node: fx.Node) -> bool:
        return any(user in self._chosen or (_passes_on(user) and self._has_byte_reader(user)) for user in node.users)

    def _replace(self, node: fx.Node) -> None:
        given = arguments_of(node)
        x, residual = given["x"], given["residual"]
        source, scale = self._made.get(x, (x, self._ranges[x]))
        added, added_scale = self._made.get(residual, (residual, _Bytes(0.0, 0)))
        gives = self._ranges[node] if node in self._bytes else _Bytes(0.0, 0)
        weight, factor, sums = self._weights(node, given)
        with self._graph.inserting_before(node):
            made = add_call(
                self._graph, node, int8_convolution.OPERATOR,
                (
                    source, weight, factor, sums, given["bias"], added, given["out_channels"], given["kernel"],
                    given["stride"], given["padding"], given["dilation"], given["groups"], given["activation"],
                    given["residual_first"], "static", scale.scale, scale.zero, added_scale.scale, added_scale.zero,
                    gives.scale, gives.zero, given["channels_last"],
                ),
            )  # fmt: skip
        if node in self._bytes:
            self._made[node] = made, gives
        else:
            node.replace_all_uses_with(made)
            self._graph.erase_node(node)
            if node in self._ranges:  # a value that convolutions quantise themselves
                self._ranges[made] = self._ranges[node]

    def _pass_on(self, node: fx.Node, source: fx.Node) -> fx.Node:
        with self._graph.inserting_before(node):
            if node.target != _aten.max_pool2d.default:
                return add_call(self._graph, node, node.target, (source, *node.args[1:]), dict(node.kwargs))
            given = arguments_of(node)
            kernel, padding, dilation = (_pair(given[name]) for name in ("kernel_size", "padding", "dilation"))
            stride = _pair(given["stride"]) if given["stride"] else kernel
            sizes = [int(size) for size in node.meta["val"].shape[2:]]
            arguments = (source, sizes, kernel, stride, padding, dilation, False)
            return add_call(self._graph, node, byte_max_pool.OPERATOR, arguments)

    def _dequantize_for_others(self, node: fx.Node, made: fx.Node, scale: _Bytes) -> None:
        others = [user for user in node.users if user not in self._made and user not in self._chosen]
        if others:
            with self._graph.inserting_before(node):
                value = add_call(self._graph, made, _aten.to.dtype, (made, torch.float32))
                if scale.zero:
                    value = add_call(self._graph, made, _aten.sub.Tensor, (value, float(scale.zero)))
                value = add_call(self._graph, made, _aten.mul.Tensor, (value, scale.scale))
            for user in others:
                user.replace_input_with(node, value)
        if not node.users:
            self._graph.erase_node(node)

    def _weights(self, node: fx.Node, given: dict[str, object]) -> tuple[fx.Node, ...]:
        """get_attr nodes of the packed int8 weight, its scales and its sums; each weight once."""
        source, groups, kernel = given["weight"], given["groups"], given["kernel"]
        assert isinstance(source, fx.Node)
        assert isinstance(groups, int)
        assert isinstance(kernel, list)
        if source in self._stored:
            return self._stored[source]
        packed = self._constants.value(source)
        out_channels = given["out_channels"]
        assert isinstance(out_channels, int)
        if given["winograd"]:
            plain = packed_convolution.unpack_winograd_weight(packed)
        else:
            plain = packed_convolution.unpack_weight(packed, out_channels, kernel)
        rows = plain.reshape(out_channels, -1)
        values, scales = quantize_int8(rows)
        weight, sums = int8_convolution.pack_int8_convolution(values.reshape(plain.shape), groups)
        depthwise = packed_convolution.is_depthwise(plain.shape[1] * groups, out_channels, groups)
        padded = int8_convolution.pad_channels(scales, groups, depthwise)
        name = str(source.target).replace(".", "_")
        with self._graph.inserting_after(source):
            stored = tuple(
                add_constant(self._module, f"{name}_{part}", tensor, source)
                for part, tensor in (("int8", weight), ("scale", padded), ("column_sums", sums))
            )
        for entry, tensor in zip(stored, (weight, padded, sums), strict=True):
            entry.meta["val"] = source.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)
        self._stored[source] = stored
        shape = int(rows.shape[0]), int(rows.shape[1])
        self._plan.layers.append(
            LayerReport(
                (_layer(node),), shape, (int(sums.numel()), weight.numel() // int(sums.numel())), "float32", shape[1],
                "rtn", int8_error(rows, values, scales), rows.numel() * 4,
                weight.numel() + 4 * padded.numel() + 4 * sums.numel(),
            )
        )  # fmt: skip
        return stored

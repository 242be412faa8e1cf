"""Makes ``untorch::int8_convolution`` from 2-D convolutions that PT2E quantised with static ranges.

``convert_pt2e`` (torchao, X86InductorQuantizer, XNNPACKQuantizer) leaves, in floating point:

    conv2d(dequantize(quantize(x)), dequantize_per_channel(int8 constant), bias) → [activation] → [+ dequantize(…)]
    → [activation] → quantize → dequantize → …

Nodes are taken in graph order, so what a convolution reads may be another one's bytes by then. What follows it goes
into its epilogue, the quantising operator last. Max pooling between dequantising and quantising operators of the same
range pools bytes. int8 activations become uint8, whose zero points are 128 more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import activation_of, only_user, same_layout, value_of
from untorch.export.passes.pt2e_operands import BYTES, RANGES, LeftError, int8_weight, pt2e_name, static_activations
from untorch.export.passes.report import PassReport
from untorch.ops import byte_max_pool
from untorch.ops.int8_convolution import MAX_DEPTHWISE_TAPS, OPERATOR, pack_int8_convolution, pad_channels
from untorch.ops.packed_convolution import is_depthwise

__all__ = ["serve_pt2e_convolutions"]

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.conv2d.default, _aten.conv2d.padding}
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)
_QUANTIZE, _DEQUANTIZE = "quantize_per_tensor.default", "dequantize_per_tensor.default"


def serve_pt2e_convolutions(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. What quantised and dequantised stays in the graph, where dead code is dropped later."""
    report = PassReport("serve_pt2e_convolutions")
    nodes = module.graph.nodes
    quantised = any(pt2e_name(node).startswith("dequantize") for node in nodes)
    if quantised and any(node.target in _CONVOLUTIONS for node in nodes):
        _Server(module, report).run()
        module.graph.eliminate_dead_code()
    return report


class _Server:
    def __init__(self, module: fx.GraphModule, report: PassReport) -> None:
        self._module, self._graph, self._report = module, module.graph, report
        self._constants = Constants(module)
        self._stored: dict[tuple[fx.Node, int], tuple[fx.Node, ...]] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target in _CONVOLUTIONS:
                if not any(pt2e_name(source).startswith("dequantize") for source in node.all_input_nodes):
                    continue
                try:
                    self._serve(node)
                except LeftError as reason:
                    self._report.skipped[node.name] = f"it is computed in floating point: {reason}"
                else:
                    self._report.changed.append(node.name)
            elif pt2e_name(node) == _QUANTIZE:
                self._give_bytes(node)
            elif node.target == _aten.max_pool2d.default:
                self._pool(node)
            elif node.target in _ADDITIONS:
                self._add(node)
            elif node.args and activation_of(node) is not None:
                self._activate(node)

    def _serve(self, node: fx.Node) -> None:
        given = arguments_of(node)
        source, scale, zero = static_activations(given["input"])
        value, weight, bias = value_of(source), value_of(given["weight"]), value_of(given["bias"])
        if value is None or value.dtype not in (torch.float32, torch.uint8) or weight is None or value.dim() != 4:
            raise LeftError("its activations are not float32 of four dimensions")
        if given["bias"] is not None and (bias is None or bias.dtype != torch.float32 or bias.dim() != 1):
            raise LeftError("its bias is not float32")
        kernel, groups = list(weight.shape[2:]), given["groups"]
        if is_depthwise(value.shape[1], weight.shape[0], groups) and kernel[0] * kernel[1] > MAX_DEPTHWISE_TAPS:
            raise LeftError(f"its depthwise kernel has more than {MAX_DEPTHWISE_TAPS} elements")
        stride, dilation = _pair(given["stride"]), _pair(given["dilation"])
        padding = _padding(given["padding"], kernel, dilation)
        constants = self._weight(given["weight"], groups, node)
        with self._graph.inserting_before(node):
            made = add_call(
                self._graph, node, OPERATOR,
                (
                    source, *constants, given["bias"], None, int(weight.shape[0]), kernel, stride, padding, dilation,
                    groups, "none", False, "static", scale, zero, 0.0, 0, 0.0, 0, False,
                ),
            )  # fmt: skip
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)

    def _weight(self, node: fx.Node, groups: int, user: fx.Node) -> tuple[fx.Node, ...]:
        key = node, groups
        if key not in self._stored:
            values, scales = int8_weight(node, self._constants, 4)
            packed, sums = pack_int8_convolution(values, groups)
            depthwise = is_depthwise(values.shape[1] * groups, values.shape[0], groups)
            tensors = packed, pad_channels(scales.float(), groups, depthwise), sums
            with self._graph.inserting_before(next(iter(self._graph.nodes))):
                self._stored[key] = tuple(
                    add_constant(self._module, f"{node.name}_{name}", tensor, node)
                    for name, tensor in zip(("packed", "scale", "column_sums"), tensors, strict=True)
                )
            for entry, tensor in zip(self._stored[key], tensors, strict=True):
                entry.meta["val"] = user.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)
        return self._stored[key]

    def _open(self, node: Any) -> dict[str, Any] | None:
        """The arguments of a convolution that nothing but one call reads, and that gives no bytes yet."""
        if not isinstance(node, fx.Node) or node.target != OPERATOR or only_user(node) is None:
            return None
        given = arguments_of(node)
        return given if given["output_scale"] == 0 else None

    def _replace(self, node: fx.Node, convolution: fx.Node, given: dict[str, Any]) -> fx.Node:
        """The convolution with other arguments in the place of ``node``, which reads it."""
        with self._graph.inserting_before(node):
            made = add_call(self._graph, convolution, OPERATOR, tuple(given.values()))
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)
        self._graph.erase_node(convolution)
        return made

    def _activate(self, node: fx.Node) -> None:
        source = node.args[0]
        given = self._open(source)
        if given is None or given["activation"] != "none":
            return
        assert isinstance(source, fx.Node)
        given |= {"activation": activation_of(node), "residual_first": given["residual"] is not None}
        self._replace(node, source, given)

    def _add(self, node: fx.Node) -> None:
        if node.kwargs.get("alpha", 1) != 1:
            return
        for source, other in (node.args[:2], node.args[1::-1]):
            given = self._open(source)
            if given is None or given["residual"] is not None or not same_layout(other, node):
                continue
            if node.target == _aten.add_.Tensor and source is not node.args[0]:
                continue  # It writes into the other operand.
            assert isinstance(source, fx.Node)
            assert isinstance(other, fx.Node)
            given["residual"] = other
            try:
                residual, scale, zero = static_activations(other)
            except LeftError:
                pass
            else:
                if residual.target in BYTES:
                    given |= {"residual": residual, "residual_scale": scale, "residual_zero": zero}
            self._replace(node, source, given)
            return

    def _give_bytes(self, node: fx.Node) -> None:
        source, scale, zero, low, high, dtype = list(arguments_of(node).values())[:6]
        given = self._open(source)
        if given is None or (low, high, dtype) not in RANGES or not self._only_dequantised(node):
            return
        zero = int(zero) + RANGES[low, high, dtype]
        given |= {"output_scale": float(scale), "output_zero": zero}
        readers = list(node.users)
        made = self._replace(node, source, given)
        self._read_bytes(readers, made, float(scale), zero)

    def _only_dequantised(self, node: fx.Node) -> bool:
        wanted = list(arguments_of(node).values())[1:6]
        return bool(node.users) and all(
            pt2e_name(user) == _DEQUANTIZE and list(arguments_of(user).values())[1:6] == wanted for user in node.users
        )

    def _read_bytes(self, readers: list[fx.Node], made: fx.Node, scale: float, zero: int) -> None:
        for reader in readers:
            reader.args, reader.kwargs = (made, scale, zero, 0, 255, torch.uint8), {}

    def _pool(self, node: fx.Node) -> None:
        """quantize(max_pool(dequantize(bytes))) of one range."""
        source, quantize = node.args[0], only_user(node)
        if not isinstance(source, fx.Node) or quantize is None or pt2e_name(quantize) != _QUANTIZE:
            return
        try:
            read, scale, zero = static_activations(source)
        except LeftError:
            return
        _, out_scale, out_zero, low, high, dtype = list(arguments_of(quantize).values())[:6]
        value = value_of(node)
        same = (low, high, dtype) in RANGES and (float(out_scale), out_zero + RANGES[low, high, dtype]) == (scale, zero)
        if read.target not in BYTES or not same or not self._only_dequantised(quantize) or value is None:
            return
        if value.dim() != 4 or not all(isinstance(size, int) for size in value.shape[2:]):
            return
        given = arguments_of(node)
        kernel = _pair(given["kernel_size"])
        stride = _pair(given["stride"]) if given["stride"] else kernel
        sizes = [int(size) for size in value.shape[2:]]
        readers = list(quantize.users)
        with self._graph.inserting_before(quantize):
            arguments = (read, sizes, kernel, stride, _pair(given["padding"]), _pair(given["dilation"]), False)
            made = add_call(self._graph, node, byte_max_pool.OPERATOR, arguments)
        quantize.replace_all_uses_with(made)
        self._graph.erase_node(quantize)
        self._graph.erase_node(node)
        self._read_bytes(readers, made, scale, zero)


def _padding(padding: Any, kernel: list[int], dilation: list[int]) -> list[int]:
    if padding == "valid":
        return [0, 0]
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(size % 2 for size in reach):
            raise LeftError("it pads one side more than the other (padding='same' of an even kernel)")
        return [size // 2 for size in reach]
    return _pair(padding)


def _pair(values: Any) -> list[int]:
    found = [values] if isinstance(values, int) else list(values)
    return found * 2 if len(found) == 1 else found

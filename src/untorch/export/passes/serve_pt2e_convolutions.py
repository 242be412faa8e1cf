"""Makes ``untorch::int8_convolution`` from 1-D and 2-D convolutions that PT2E quantised.

``convert_pt2e`` (torchao, X86InductorQuantizer, XNNPACKQuantizer) leaves, in floating point:

    conv2d(dequantize(quantize(x)), dequantize_per_channel(int8 constant), bias) → [activation] → [+ dequantize(…)]
    → [activation] → quantize → dequantize → …

Nodes are taken in graph order, so what a convolution reads may be another one's bytes by then. What follows it goes
into its epilogue, the quantising operator last. Max pooling between dequantising and quantising operators of the same
range pools bytes. int8 activations become uint8, whose zero points are 128 more.

A 1-D convolution gets a height of one. A transposed one of stride s becomes a convolution with s · s times the outputs,
one for each place of a pixel in its block of s × s, whose results are put in order: the kernel's elements that meet at
one place are a kernel of ceil(k / s) × ceil(k / s). Operators that only move values stand behind the convolution
then, and what would go into its epilogue passes them.

Ranges are static, or dynamic for the whole tensor (choose_qparams).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import activation_of, only_user, same_layout, value_of
from untorch.export.passes.pt2e_operands import (
    RANGES,
    LeftError,
    activations,
    int8_weight,
    is_bytes,
    pt2e_name,
    static_activations,
)
from untorch.export.passes.report import PassReport
from untorch.ops import byte_max_pool
from untorch.ops.int8_convolution import MAX_DEPTHWISE_TAPS, OPERATOR, pack_int8_convolution, pad_channels
from untorch.ops.packed_convolution import is_depthwise

__all__ = ["serve_pt2e_convolutions"]

_aten = torch.ops.aten
_LINES = {_aten.conv1d.default, _aten.conv1d.padding}
_TRANSPOSED = _aten.conv_transpose2d.input
_CONVOLUTIONS = {_aten.conv2d.default, _aten.conv2d.padding, _TRANSPOSED, *_LINES}
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


# Calls that only move values: operators and their arguments behind the first.
_Moves = tuple[tuple[Any, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class _Shape:
    """A 2-D convolution in the place of the layer."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    repeat: int = 1  # of each output, with its bias
    behind: _Moves = ()


class _Server:
    def __init__(self, module: fx.GraphModule, report: PassReport) -> None:
        self._module, self._graph, self._report = module, module.graph, report
        self._constants = Constants(module)
        self._stored: dict[tuple[fx.Node, int], tuple[fx.Node, ...]] = {}
        self._behind: dict[fx.Node, _Moves] = {}  # by the last of them

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
        found = activations(given["input"])
        value, weight, bias = value_of(found.source), value_of(given["weight"]), value_of(given["bias"])
        dims = 3 if node.target in _LINES else 4
        if value is None or value.dtype not in (torch.float32, torch.uint8) or weight is None or value.dim() != dims:
            raise LeftError(f"its activations are not float32 of {'three' if dims == 3 else 'four'} dimensions")
        if given["bias"] is not None and (bias is None or bias.dtype != torch.float32 or bias.dim() != 1):
            raise LeftError("its bias is not float32")
        shape = self._shape(node, given, weight)
        out_channels = int(weight.shape[1 if node.target == _TRANSPOSED else 0]) * shape.repeat
        taps = shape.kernel[0] * shape.kernel[1]
        if is_depthwise(value.shape[1], out_channels, shape.groups) and taps > MAX_DEPTHWISE_TAPS:
            raise LeftError(f"its depthwise kernel has more than {MAX_DEPTHWISE_TAPS} elements")
        constants = self._weight(given["weight"], shape, node)
        with self._graph.inserting_before(node):
            source, added = found.source, given["bias"]
            if node.target in _LINES:
                source = add_call(self._graph, source, _aten.unsqueeze.default, (source, 2))
            if added is not None and shape.repeat > 1:
                added = add_call(self._graph, added, _aten.repeat_interleave.self_int, (added, shape.repeat))
            arguments = (
                source, *constants, added, None, out_channels, shape.kernel, shape.stride, shape.padding,
                shape.dilation, shape.groups, "none", False, found.input_range, found.scale, found.zero,
                0.0, 0, 0.0, 0, False,
            )  # fmt: skip
            made = self._emit(node, arguments, shape.behind)
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)

    def _emit(self, like: fx.Node, arguments: tuple[Any, ...], behind: _Moves) -> fx.Node:
        made = add_call(self._graph, like, OPERATOR, arguments)
        for target, rest in behind:
            made = add_call(self._graph, like, target, (made, *rest))
        if behind:
            self._behind[made] = behind
        return made

    def _shape(self, node: fx.Node, given: dict[str, Any], weight: torch.Tensor) -> _Shape:
        kernel = [int(size) for size in weight.shape[2:]]
        if node.target == _TRANSPOSED:
            return _transposed(node, given, kernel)
        dims = len(kernel)
        stride, dilation = _sizes(given["stride"], dims), _sizes(given["dilation"], dims)
        padding = _padding(given["padding"], kernel, dilation)
        if dims == 1:
            squeeze: _Moves = ((_aten.squeeze.dim, (2,)),)
            lists = [1, *kernel], [1, *stride], [0, *padding], [1, *dilation]
            return _Shape(*lists, given["groups"], behind=squeeze)
        return _Shape(kernel, stride, padding, dilation, given["groups"])

    def _weight(self, node: fx.Node, shape: _Shape, user: fx.Node) -> tuple[fx.Node, ...]:
        key = node, shape.groups
        if key not in self._stored:
            transposed = user.target == _TRANSPOSED
            values, scales = int8_weight(node, self._constants, 3 if user.target in _LINES else 4, int(transposed))
            if user.target in _LINES:
                values = values.unsqueeze(2)
            if transposed:
                values = _by_place(values, _sizes(arguments_of(user)["stride"], 2), shape.kernel)
                scales = scales.repeat_interleave(shape.repeat)
            packed, sums = pack_int8_convolution(values, shape.groups)
            depthwise = is_depthwise(values.shape[1] * shape.groups, values.shape[0], shape.groups)
            tensors = packed, pad_channels(scales.float(), shape.groups, depthwise), sums
            with self._graph.inserting_before(next(iter(self._graph.nodes))):
                self._stored[key] = tuple(
                    add_constant(self._module, f"{node.name}_{name}", tensor, node)
                    for name, tensor in zip(("packed", "scale", "column_sums"), tensors, strict=True)
                )
            for entry, tensor in zip(self._stored[key], tensors, strict=True):
                entry.meta["val"] = user.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)
        return self._stored[key]

    def _convolution(self, node: Any) -> fx.Node | None:
        """The convolution that gives the node, maybe with moves between."""
        for _ in self._behind.get(node, ()):
            node = node.args[0]
        return node if isinstance(node, fx.Node) and node.target == OPERATOR else None

    def _open(self, node: Any) -> dict[str, Any] | None:
        """The arguments of a convolution that nothing but one call reads, and that gives no bytes yet."""
        convolution = self._convolution(node)
        if convolution is None or only_user(node) is None or only_user(convolution) is None:
            return None
        given = arguments_of(convolution)
        return given if given["output_scale"] == 0 else None

    def _replace(self, node: fx.Node, last: fx.Node, given: dict[str, Any]) -> fx.Node:
        """The convolution with other arguments in the place of ``node``, which reads ``last``."""
        convolution = self._convolution(last)
        assert convolution is not None
        with self._graph.inserting_before(node):
            made = self._emit(convolution, tuple(given.values()), self._behind.get(last, ()))
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)
        while last is not convolution:
            last, old = last.args[0], last  # type: ignore[assignment]
            self._graph.erase_node(old)
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
            if source in self._behind:
                continue  # The sum is of other shapes than the convolution's.
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
                if is_bytes(residual):
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
        if not is_bytes(read) or not same or not self._only_dequantised(quantize) or value is None:
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


def _transposed(node: fx.Node, given: dict[str, Any], kernel: list[int]) -> _Shape:
    """y[q·s + r − padding] = Σ over t of x[q − t] · w[r + s·t]: for each place r in 0 … s − 1 a convolution."""
    stride, padding = _sizes(given["stride"], 2), _sizes(given["padding"], 2)
    value, result = value_of(given["input"]), value_of(node)
    if given["groups"] != 1 or _sizes(given["dilation"], 2) != [1, 1]:
        raise LeftError("it is transposed, with groups or dilation")
    assert value is not None
    assert result is not None
    sizes = [*value.shape[2:], *result.shape[2:]]
    if not all(isinstance(size, int) for size in sizes):
        raise LeftError("it is transposed, and its images have sizes that vary")
    taps = [-(-k // s) for k, s in zip(kernel, stride, strict=True)]
    rows, columns = (int(size) + t - 1 for size, t in zip(sizes[:2], taps, strict=True))
    whole = [rows * stride[0], columns * stride[1]]
    if any(p + int(size) > all_ for p, size, all_ in zip(padding, sizes[2:], whole, strict=True)):
        raise LeftError("it is transposed, with more output padding than its kernel covers")
    channels = int(result.shape[1])
    moves: list[tuple[Any, tuple[Any, ...]]] = []
    if stride != [1, 1]:
        moves = [
            (_aten.reshape.default, ([-1, channels, *stride, rows, columns],)),
            (_aten.permute.default, ([0, 1, 4, 2, 5, 3],)),
            (_aten.reshape.default, ([-1, channels, *whole],)),
        ]
    for dim, (p, size, all_) in enumerate(zip(padding, sizes[2:], whole, strict=True), 2):
        if (p, size) != (0, all_):
            moves.append((_aten.slice.Tensor, (dim, p, p + int(size))))
    reach = [t - 1 for t in taps]
    return _Shape(taps, [1, 1], reach, [1, 1], 1, stride[0] * stride[1], tuple(moves))


def _by_place(values: torch.Tensor, stride: list[int], taps: list[int]) -> torch.Tensor:
    """[O, C, kh, kw] of a transposed convolution to [O · sh · sw, C, th, tw], the kernels of the places, mirrored."""
    out, channels, height, width = values.shape
    down, across = (s * t - size for s, t, size in zip(stride, taps, (height, width), strict=True))
    padded = torch.nn.functional.pad(values, (0, across, 0, down))
    split = padded.reshape(out, channels, taps[0], stride[0], taps[1], stride[1]).flip(2, 4)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(-1, channels, *taps).contiguous()


def _padding(padding: Any, kernel: list[int], dilation: list[int]) -> list[int]:
    if padding == "valid":
        return [0] * len(kernel)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(size % 2 for size in reach):
            raise LeftError("it pads one side more than the other (padding='same' of an even kernel)")
        return [size // 2 for size in reach]
    return _sizes(padding, len(kernel))


def _sizes(values: Any, dims: int) -> list[int]:
    found = [values] if isinstance(values, int) else list(values)
    return found * dims if len(found) == 1 else found


def _pair(values: Any) -> list[int]:
    return _sizes(values, 2)

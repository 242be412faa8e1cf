"""Fuses the linear layers of a decoder between one attention and the next into ``untorch::decoder_linears``.

    o projection → + residual → RMSNorm → gate and up → silu(gate) · up → down → + residual → RMSNorm → q, k and v

One token is bound by launches between GEMVs; the operator has one launch. It runs behind merge_linears, which makes one
layer of gate and up, and of q, k and v. Where the second norm is read by anything but one such layer (the last norm of
a model, LoRA), the operator ends with the norm.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.attributes import add_dense_constant, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.decoder_match import Norm, Swiglu, find_swiglu, is_check, match_norm, reason_no_swiglu
from untorch.export.passes.epilogues import same_layout, value_of
from untorch.export.passes.linear_calls import LinearCall, read_linear
from untorch.export.passes.probes import SHAPE_ONLY, operator_name
from untorch.export.passes.report import PassReport
from untorch.ops.decoder_linears import OPERATOR

__all__ = ["fuse_decoder_linears"]

_aten = torch.ops.aten

_FIRST_ARCHITECTURE = 90  # with the kernel for one token
_DTYPES = (torch.bfloat16, torch.float16)
_INNER_K_TILES = 8
_K_UNIT, _N_UNIT, _MOST_WIDTH = 256, 16, 8192
# A next layer of more outputs than so many widths is no q, k and v: a model's head.
_NEXT_WIDTHS = 4


@dataclass(frozen=True)
class _Layers:
    """Nodes of one fusion. ``hidden`` and ``stream`` are the residual sums behind o and down.

    nodes: all that the operator computes, without checks.
    """

    o: LinearCall
    hidden: fx.Node
    residual_at: int  # of the arguments of ``hidden``
    norm: Norm
    swiglu: Swiglu
    stream: fx.Node
    next_norm: Norm
    next: LinearCall | None
    nodes: tuple[fx.Node, ...]

    @property
    def linears(self) -> list[LinearCall]:
        return [self.o, self.swiglu.gate_up, self.swiglu.down, *([] if self.next is None else [self.next])]


def fuse_decoder_linears(module: fx.GraphModule, architecture: str | None, *, dense: bool = False) -> PassReport:
    """Runs the pass in place, behind merge_linears. A layer that is left alone is reported by its down projection.

    dense: layers in bfloat16 and float16 as well. The operator takes them, one after the other: their GEMVs are bound
        by memory, and one kernel gains nothing (decision 0067).
    """
    report = PassReport("fuse_decoder_linears")
    if architecture is None or int(architecture.removeprefix("sm_").rstrip("af")) < _FIRST_ARCHITECTURE:
        report.not_run = f"it is for sm_{_FIRST_ARCHITECTURE} and newer, and the method is for {architecture}"
        return report
    found = [(node, swiglu) for node in module.graph.nodes if (swiglu := find_swiglu(node)) is not None]
    if not found:
        return report
    matcher = _Matcher(module, report, dense)
    taken: set[fx.Node] = set()
    accepted = []
    for node, swiglu in found:
        layers = swiglu if isinstance(swiglu, str) else matcher.match(swiglu)
        if isinstance(layers, _Layers) and not taken.isdisjoint(layers.nodes):
            layers = "one of its layers is a part of what was fused before it"
        if isinstance(layers, str):
            report.skipped[node.name] = layers
            continue
        taken.update(layers.nodes)
        accepted.append(layers)
    report.skipped = {name: reason for name, reason in report.skipped.items() if name not in {n.name for n in taken}}
    for layers in accepted:
        _replace(module, layers, matcher.constants)
        report.changed.append(" + ".join(call.node.name for call in layers.linears))
    if accepted:
        remove_unused(module)
    return report


class _Matcher:
    """What the pass knows of a graph before it changes it."""

    def __init__(self, module: fx.GraphModule, report: PassReport, dense: bool) -> None:
        self.constants, self._dense = Constants(module), dense
        self._aliases = Aliases(module.graph)
        self._report = report
        self._known: dict[str, Any] = {}

    def match(self, swiglu: Swiglu) -> _Layers | str:
        """The layers around it, or why they stay."""
        down, gate_up = swiglu.down, swiglu.gate_up
        if (dtype := down.x.meta["val"].dtype) not in _DTYPES:
            return f"its dtype is {str(dtype).removeprefix('torch.')}: expected bfloat16 or float16"
        sum_of_down = _residual_sum(down.node)
        if isinstance(sum_of_down, str):
            return sum_of_down
        stream, hidden_at, behind_down = sum_of_down
        hidden = stream.args[hidden_at]
        assert isinstance(hidden, fx.Node)
        sum_of_o = self._o_projection(hidden)
        if isinstance(sum_of_o, str):
            return sum_of_o
        o, residual_at, behind_o = sum_of_o
        for call, name in ((o, "o"), (gate_up, "gate and up"), (down, "down")):
            if reason := self._reason_to_skip(call, o):
                return f"{name}: {reason}"
        norm = match_norm(hidden, self.constants, self._known)
        if isinstance(norm, str):
            return f"{hidden.name}: {norm}"
        if norm.readers != [gate_up.node]:
            return f"its norm is not read by gate and up alone: {', '.join(user.name for user in norm.readers)}"
        known = {stream, *norm.nodes}
        if others := [user.name for user in hidden.users if user not in known and not is_check(user)]:
            return f"{hidden.name} is also read by {', '.join(others)}"
        if reason := reason_no_swiglu(swiglu, self._known):
            return reason
        next_norm = match_norm(stream, self.constants, self._known)
        if isinstance(next_norm, str):
            return f"{stream.name}: {next_norm}"
        following = self._next(next_norm, o)
        nodes = [
            o.node, *behind_o, hidden, *norm.nodes, gate_up.node, *swiglu.nodes, down.node, *behind_down, stream,
            *next_norm.nodes, *([] if following is None else [following.node]),
        ]  # fmt: skip
        layers = _Layers(o, hidden, residual_at, norm, swiglu, stream, next_norm, following, tuple(nodes))
        return self._reason_against(layers) or layers

    def _o_projection(self, hidden: fx.Node) -> tuple[LinearCall, int, list[fx.Node]] | str:
        """The layer that ``hidden`` adds to the residual stream, where the stream is in its arguments, and the views
        of the layer's result."""
        for at in (1, 0):  # the sum of a residual stream and what was computed from it
            node, views = (hidden.args[at] if len(hidden.args) == 2 else None), []
            while isinstance(node, fx.Node) and operator_name(node) in SHAPE_ONLY:
                views.append(node)
                node = node.args[0]
            call = read_linear(node) if isinstance(node, fx.Node) else None
            if call is None:
                continue
            found = _residual_sum(call.node)
            if not isinstance(found, str) and found[0] is hidden:
                return call, found[1], views
        return "what it adds to is no sum of a residual stream and one linear layer"

    def _reason_to_skip(self, call: LinearCall, like: LinearCall, bias: bool = False) -> str | None:
        """Why the operator does not take the layer beside ``like``, if it does not."""
        x, value = call.x.meta["val"], call.node.meta["val"]
        if call.family not in ("int4", "linear"):
            kind = "is a GEMM with columns of a constant" if call.family == "mm" else f"is {call.family}"
            return f"it {kind}, no int4 layer and none with a dense weight [n, k]"
        if call.family == "linear" and not self._dense:
            return "its weight is dense: its GEMV reads at the memory's speed by itself"
        if value.dtype != x.dtype or x.dtype != like.x.meta["val"].dtype:
            return f"its dtype is {str(x.dtype).removeprefix('torch.')}, and that of o is another"
        if call.family != like.family:
            return f"its weight is {call.family}, and that of o is {like.family}"
        if not all(self.constants.is_known(weight) for weight in call.weights):
            return "its weight is no constant"
        if call.family == "int4":
            values, scales = (weight.meta["val"] for weight in call.weights)
            if _group_size(call) != _group_size(like):
                return f"its group size is {_group_size(call)}, and that of o is {_group_size(like)}"
            if 2 * values.shape[3] != _INNER_K_TILES or values.shape[1] * 128 != call.inputs:
                return f"its weight is not packed with inner_k_tiles {_INNER_K_TILES}, or padded"
            if scales.dtype != x.dtype:
                return f"its scales are {str(scales.dtype).removeprefix('torch.')}"
        if not bias and call.bias is not None:
            return "it has a bias"
        if call.inputs % _K_UNIT or call.outputs % _N_UNIT:
            return (
                f"it has {call.inputs} inputs and {call.outputs} outputs: expected multiples of {_K_UNIT} and {_N_UNIT}"
            )
        if (call is like and call.inputs > _MOST_WIDTH) or like.outputs > _MOST_WIDTH:
            return f"it has {max(like.inputs, like.outputs)} inputs or outputs: expected at most {_MOST_WIDTH}"
        return None

    def _next(self, norm: Norm, o: LinearCall) -> LinearCall | None:
        """The layer that alone reads the norm, if the operator takes it."""
        if len(norm.readers) != 1:
            return None
        [node] = norm.readers
        call = read_linear(node)
        if call is None or call.x not in norm.ends:
            return None
        if call.outputs > _NEXT_WIDTHS * max(o.inputs, o.outputs):
            return None  # a head, which the report does not name
        reason = self._reason_to_skip(call, o, bias=True)
        bias = value_of(call.bias)
        if call.bias is not None and (
            bias is None or not self.constants.is_known(call.bias) or call.bias.op != "get_attr"
            or bias.shape != (call.outputs,) or bias.dtype != node.meta["val"].dtype
        ):  # fmt: skip
            reason = "its bias is not a constant of one number for each output"
        if reason:
            self._report.skipped[node.name] = f"it stays apart: {reason}"
            return None
        return call

    def _reason_against(self, layers: _Layers) -> str | None:
        """What the layers have that keeps them from being one node."""
        for norm in (layers.norm, layers.next_norm):
            if not self._is_representable(norm.weight, layers.hidden.meta["val"].dtype):
                return f"{norm.weight.name}, the weight of a norm, has digits that the activations' dtype has not"
        if any(self._aliases.is_written(node) for node in layers.nodes):
            return "the model writes into one of its values"
        if self._aliases.is_written(layers.o.x):
            node = layers.o.node
            while node is not layers.hidden:
                if is_mutating(node):
                    return f"{node.name} may write into the input of o"
                node = node.next
        results = [layers.stream, *(layers.next_norm.ends if layers.next is None else [layers.next.node])]
        residual = layers.hidden.args[layers.residual_at]
        assert isinstance(residual, fx.Node)
        for node in results:
            if not _is_dense(node.meta["val"]):
                return f"{node.name} is not contiguous"
            if not _can_be_shaped(node.meta["val"], residual.meta["val"]):
                return f"{node.name} has several sizes that vary, and others than the residual stream"
        return None

    def _is_representable(self, weight: fx.Node, dtype: torch.dtype) -> bool:
        if weight.meta["val"].dtype == dtype:
            return True
        value = self.constants.value(weight)
        return bool(torch.equal(value.to(dtype).to(value.dtype), value))


def _residual_sum(linear: fx.Node) -> tuple[fx.Node, int, list[fx.Node]] | str:
    """The sum that alone reads the layer's result, or views of it; where the other summand is; and the views."""
    node, views = linear, []
    while True:
        users = [user for user in node.users if not is_check(user)]
        if len(users) != 1:
            return f"{node.name} is read by {len(users)} nodes, expected a residual sum alone"
        [user] = users
        if operator_name(user) not in SHAPE_ONLY or user.args[0] is not node:
            break
        views.append(user)
        node = user
    if user.target != _aten.add.Tensor or user.kwargs.get("alpha", 1) != 1:
        return f"what follows {node.name} is no residual sum: {user.name}"
    at = 0 if user.args[1] is node else 1
    if user.args[0] is user.args[1] or not same_layout(user.args[at], node) or not same_layout(user, node):
        return f"{user.name} adds values of several shapes, strides or dtypes"
    return user, at, views


def _group_size(call: LinearCall) -> int:
    return int(arguments_of(call.node)["group_size"]) if call.family == "int4" else 0


def _is_dense(value: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _varying(value: torch.Tensor) -> list[int]:
    return [i for i, size in enumerate(value.shape) if not isinstance(size, int)]


def _can_be_shaped(value: torch.Tensor, residual: torch.Tensor) -> bool:
    if len(_varying(value)) < 2:
        return True
    return value.dim() == residual.dim() and all(
        statically_known_true(value.shape[i] == residual.shape[i]) for i in _varying(value)
    )


def _replace(module: fx.GraphModule, layers: _Layers, constants: Constants) -> None:
    graph, hidden = module.graph, layers.hidden
    residual = hidden.args[layers.residual_at]  # read here: what was fused before may have replaced it
    assert isinstance(residual, fx.Node)
    replaced: list[tuple[fx.Node, fx.Node]] = []
    _drop_checks(layers.nodes)
    with graph.inserting_before(hidden):

        def rows(node: fx.Node) -> fx.Node:
            return add_call(graph, node, _aten.reshape.default, (node, [-1, int(node.meta["val"].shape[-1])]))

        def copy(constant: fx.Node) -> fx.Node:
            node = graph.get_attr(str(constant.target))
            node.meta = dict(constant.meta)
            return node

        def weights(call: LinearCall | None) -> tuple[fx.Node | None, fx.Node | None]:
            if call is None:
                return None, None
            found = [copy(weight) for weight in call.weights]
            return found[0], found[1] if call.family == "int4" else None

        def vector(norm: Norm) -> fx.Node:
            value = constants.value(norm.weight)
            dtype, width = hidden.meta["val"].dtype, int(hidden.meta["val"].shape[-1])
            if norm.weight.op == "get_attr" and value.dtype == dtype and value.dim() == 1 and value.is_contiguous():
                return copy(norm.weight)
            return add_dense_constant(module, f"{norm.weight.name}_row", value.reshape(width).to(dtype), norm.weight)

        def shaped(flat: fx.Node, like: fx.Node) -> fx.Node:
            value = like.meta["val"]
            varying = _varying(value)
            sizes: list[Any] = [-1 if i in varying else int(size) for i, size in enumerate(value.shape)]
            for i in varying[1:]:
                sizes[i] = add_call(graph, like, _aten.sym_size.int, (residual, i))
            return add_call(graph, like, _aten.reshape.default, (flat, sizes))

        following, swiglu = layers.next, layers.swiglu
        bias = None if following is None or following.bias is None else copy(following.bias)
        call = add_call(
            graph, swiglu.down.node, OPERATOR,
            (
                rows(layers.o.x), rows(residual), *weights(layers.o), vector(layers.norm), *weights(swiglu.gate_up),
                *weights(swiglu.down), vector(layers.next_norm), *weights(following), bias, _group_size(layers.o),
                layers.norm.eps, layers.next_norm.eps,
            ),
        )  # fmt: skip
        out, stream = (add_call(graph, swiglu.down.node, operator.getitem, (call, i)) for i in range(2))
        results = layers.next_norm.ends if following is None else (following.node,)
        replaced += [(node, shaped(out, node)) for node in results]
        replaced.append((layers.stream, shaped(stream, layers.stream)))
    for before, after in replaced:
        before.replace_all_uses_with(after)
    mine = set(layers.nodes)
    for node in reversed(graph.nodes):
        if node in mine and not node.users:
            graph.erase_node(node)


def _drop_checks(nodes: Iterable[fx.Node]) -> None:
    """Erases the checks of values that will not be there."""
    for node in nodes:
        for user in list(node.users):
            if is_check(user):
                node.graph.erase_node(user)

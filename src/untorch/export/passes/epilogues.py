"""What passes that fuse a layer with the nodes behind it share: activations, and when two nodes can become one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.mutations import is_mutating
from untorch.export.passes.calls import arguments_of

__all__ = ["FusedLinear", "activation_of", "only_user", "same_layout", "value_of", "with_epilogue"]

_aten = torch.ops.aten
_ACTIVATIONS: dict[object, str] = {
    _aten.relu.default: "relu", _aten.relu_.default: "relu",
    _aten.silu.default: "silu", _aten.silu_.default: "silu",
    _aten.tanh.default: "tanh", _aten.tanh_.default: "tanh",
    _aten.sigmoid.default: "sigmoid", _aten.sigmoid_.default: "sigmoid",
    _aten.gelu.default: "gelu", _aten.gelu_.default: "gelu",
    _aten.relu6.default: "relu6", _aten.relu6_.default: "relu6",
    _aten.hardswish.default: "hardswish", _aten.hardswish_.default: "hardswish",
    _aten.hardsigmoid.default: "hardsigmoid", _aten.hardsigmoid_.default: "hardsigmoid",
}  # fmt: skip
_CLAMPS = {
    _aten.hardtanh.default, _aten.hardtanh_.default, _aten.clamp.default, _aten.clamp_.default,
}  # fmt: skip


def activation_of(node: fx.Node) -> str | None:
    """The activation that the node applies to its first argument, by the name that fused operators have for it."""
    if node.target in _CLAMPS:
        return "relu6" if list(arguments_of(node).values())[1:] == [0, 6] else None
    name = _ACTIVATIONS.get(node.target)
    if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh":
        return "gelu_tanh"
    return name


def value_of(node: object) -> torch.Tensor | None:
    """The node's example value, if it is a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def only_user(node: fx.Node) -> fx.Node | None:
    """The call that is the only one to read the node."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def same_layout(node: object, like: fx.Node) -> bool:
    """Same dtype, shape and strides as ``like``: no broadcasting, and the result keeps its layout."""
    value, expected = value_of(node), value_of(like)
    if value is None or expected is None or value.dtype != expected.dtype or value.dim() != expected.dim():
        return False
    pairs = [*zip(value.shape, expected.shape, strict=True), *zip(value.stride(), expected.stride(), strict=True)]
    return all(statically_known_true(a == b) for a, b in pairs)


@dataclass
class FusedLinear:
    """What becomes one GEMM: ``nodes`` in graph order, the last of them gives the result."""

    nodes: list[fx.Node]
    activation: str = "none"
    residual: fx.Node | None = None


def with_epilogue(linear: fx.Node) -> FusedLinear:
    """The linear layer with the activation and the residual sum of the same layout that follow it, if they can."""
    found = FusedLinear([linear])
    user = only_user(linear)
    activation = activation_of(user) if user is not None and user.args[0] is linear else None
    if user is not None and activation is not None and _same_memory(linear, user):
        found.activation = activation
        found.nodes.append(user)
    last = found.nodes[-1]
    user = only_user(last)
    if user is None or user.target not in (_aten.add.Tensor, _aten.add_.Tensor) or user.kwargs.get("alpha", 1) != 1:
        return found
    left, right = user.args[0], user.args[1]
    if user.target == _aten.add_.Tensor and left is not last:
        return found  # It writes into the other operand.
    other = right if left is last else left
    if other is last or not same_layout(other, last) or not same_layout(user, last):
        return found
    if not _same_memory(linear, user):
        return found
    assert isinstance(other, fx.Node)
    found.residual = other
    found.nodes.append(user)
    return found


def _same_memory(first: fx.Node, last: fx.Node) -> bool:
    """Nothing between the two nodes writes into memory: the GEMM can be computed at the later one."""
    node = first.next
    while node is not last:
        if is_mutating(node) and node.args[0] is not first:
            return False
        node = node.next
    return True

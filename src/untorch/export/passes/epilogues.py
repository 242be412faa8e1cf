"""What passes that fuse a layer with the nodes behind it share: activations, and when two nodes can become one."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.export.passes.calls import arguments_of

__all__ = ["activation_of", "only_user", "same_layout", "value_of"]

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

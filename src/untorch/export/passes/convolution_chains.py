"""Convolutions in a graph, with what can be computed in the same kernel: batch norm, activation, residual sum.

What passes share that make one operator of conv(x, W, b) → [batch norm] → [activation] → [+ residual] → [activation].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import activation_of, only_user, same_layout

__all__ = [
    "ADDITIONS", "CONVOLUTIONS", "Chain", "chain_of", "fold_batch_norm", "is_inference_norm", "is_transposed",
    "move_activations", "pads_unevenly", "per_dimension", "sizes_of", "writes_between",
]  # fmt: skip

_aten = torch.ops.aten
CONVOLUTIONS = {
    _aten.conv1d.default, _aten.conv1d.padding, _aten.conv2d.default, _aten.conv2d.padding, _aten.conv3d.default,
    _aten.conv3d.padding, _aten.convolution.default, _aten.conv_transpose1d.default, _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
}  # fmt: skip
ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)

_VIEWS = {
    _aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.transpose.int, _aten.permute.default,
    _aten.squeeze.dim, _aten.unsqueeze.default,
}  # fmt: skip


@dataclass
class Chain:
    """What becomes one call: ``nodes`` in graph order, the last of them gives the result."""

    nodes: list[fx.Node]
    batch_norm: fx.Node | None = None
    activation: str = "none"
    addition: fx.Node | None = None
    residual_first: bool = False

    @property
    def last(self) -> fx.Node:
        """Gives the chain's result."""
        return self.nodes[-1]

    def residual(self) -> Any:
        """The other operand of the sum, as the graph is now."""
        if self.addition is None:
            return None
        before = self.nodes[self.nodes.index(self.addition) - 1]
        left, right = self.addition.args[:2]
        return right if left is before else left


def chain_of(
    node: fx.Node,
    constants: Constants,
    aliases: Aliases,
    taken: set[fx.Node],
    activations: tuple[str, ...] | None = None,
    residual_last: bool = True,
) -> Chain:
    """The longest chain from the convolution ``node`` on, without the nodes of chains that are ``taken``.

    activations: those that it may have; None for all. residual_last: a sum may follow the activation.
    """
    chain = Chain([node])
    reads = set(aliases.group(node.all_input_nodes[0]))
    user = _next(chain, reads, taken)
    if user is not None and is_inference_norm(user, chain.last, constants):
        chain.nodes.append(user)
        chain.batch_norm = user
        user = _next(chain, reads, taken)
    _take_activation(chain, user, activations)
    user = _next(chain, reads, taken)
    if chain.activation != "none" and not residual_last:
        return chain
    if user is None or user.target not in ADDITIONS or user.kwargs.get("alpha", 1) != 1:
        return chain
    left, right = user.args[:2]
    if user.target == _aten.add_.Tensor and left is not chain.last:
        return chain  # It writes into the other operand.
    other = right if left is chain.last else left
    if other is chain.last or not same_layout(other, chain.last) or not same_layout(user, chain.last):
        return chain
    assert isinstance(other, fx.Node)
    chain.nodes.append(user)
    chain.addition = user
    if chain.activation == "none":
        user = _next(chain, reads | set(aliases.group(other)), taken)
        if user is not None and not writes_between(chain.last, user, set(aliases.group(other)), chain.nodes):
            chain.residual_first = _take_activation(chain, user, activations)
    return chain


def _take_activation(chain: Chain, user: fx.Node | None, activations: tuple[str, ...] | None) -> bool:
    name = activation_of(user) if user is not None and user.args and user.args[0] is chain.last else None
    if user is None or name is None or (activations is not None and name not in activations):
        return False
    chain.activation = name
    chain.nodes.append(user)
    return True


def _next(chain: Chain, reads: set[fx.Node], taken: set[fx.Node]) -> fx.Node | None:
    """The only reader of the result so far, unless something writes in between into what the chain reads."""
    user = only_user(chain.last)
    if user is None or user in taken or writes_between(chain.nodes[0], user, reads, chain.nodes):
        return None
    return user


def writes_between(first: fx.Node, last: fx.Node, memory: set[fx.Node], own: list[fx.Node]) -> bool:
    """Whether a node between the two, and not one of ``own``, writes into ``memory``."""
    node = first.next
    while node is not last:
        if node in memory and is_mutating(node) and node not in own:
            return True
        node = node.next
    return False


def is_transposed(node: fx.Node) -> bool:
    """Whether the convolution is a transposed one."""
    arguments = arguments_of(node)
    return bool(arguments.get("transposed", "output_padding" in arguments))


def is_inference_norm(node: fx.Node, source: fx.Node, constants: Constants) -> bool:
    """Whether the node is a batch norm of ``source`` with statistics and factors that are constants."""
    if node.target != _aten.batch_norm.default or node.args[0] is not source:
        return False
    arguments = arguments_of(node)
    operands = [arguments[name] for name in ("weight", "bias", "running_mean", "running_var")]
    return (
        arguments["training"] is False
        and arguments["running_mean"] is not None
        and arguments["running_var"] is not None
        and all(operand is None or constants.is_known(operand) for operand in operands)
        and same_layout(node, source)
    )


def fold_batch_norm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: list[Any],
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the convolution with (y − mean) / √(variance + ε) · scale + shift behind it.

    norm: scale and shift, which may be None, mean and variance.
    """
    scale, shift, mean, variance = norm
    factor = (variance.double() + epsilon).rsqrt()
    if scale is not None:
        factor = factor * scale.double()
    offset = -mean.double() if bias is None else bias.double() - mean.double()
    offset = offset * factor
    if shift is not None:
        offset = offset + shift.double()
    shape = [-1] + [1] * (weight.dim() - 1)
    return (weight.double() * factor.reshape(shape)).to(weight.dtype), offset.to(weight.dtype)


def sizes_of(arguments: dict[str, Any], kernel: list[int]) -> list[list[int]]:
    """Kernel, stride, padding and dilation, one value a dimension."""
    stride, dilation = (per_dimension(arguments[name], len(kernel)) for name in ("stride", "dilation"))
    padding = arguments["padding"]
    if padding == "valid":
        padding = [0]
    elif padding == "same":
        padding = [dilation[d] * (kernel[d] - 1) // 2 for d in range(len(kernel))]
    return [kernel, stride, per_dimension(padding, len(kernel)), dilation]


def move_activations(graph: fx.Graph, convolutions: list[fx.Node]) -> None:
    """Computes activation(view(conv)) as view(activation(conv)): elementwise, so that the values are the same."""
    for node in convolutions:
        last: fx.Node = node
        user = only_user(node)
        while user is not None and user.target in _VIEWS and user.args[0] is last:
            last, user = user, only_user(user)
        if user is None or last is node or activation_of(user) is None or user.args[0] is not last:
            continue
        if is_mutating(user) or not same_layout(user, last):
            continue
        (first,) = node.users
        with graph.inserting_before(first):
            target = cast("torch._ops.OpOverload", user.target)
            moved = add_call(graph, user, target, (node, *user.args[1:]), user.kwargs)
        first.replace_input_with(node, moved)
        user.replace_all_uses_with(last)
        graph.erase_node(user)


def pads_unevenly(arguments: dict[str, Any], kernel: Iterable[int]) -> bool:
    """Whether the padding is "same" and an even kernel needs more of it on one side."""
    if arguments["padding"] != "same":
        return False
    sizes = list(kernel)
    dilation = per_dimension(arguments["dilation"], len(sizes))
    return any(d * (size - 1) % 2 for d, size in zip(dilation, sizes, strict=True))


def per_dimension(values: Any, count: int) -> list[int]:
    """One value a dimension, of a list that may have one for all."""
    return list(values) if len(values) == count else list(values) * count

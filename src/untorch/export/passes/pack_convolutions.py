"""Packs constant convolution weights at export, and fuses what follows: batch norm, activation, residual sum.

conv(x, W, b) → [batch norm] → [activation] → [+ residual] → [activation] becomes one ``untorch::packed_convolution``,
which computes channels last. An activation behind views of the result, such as the flattened tokens of a vision
transformer, moves before them first. Batch norm of inference goes into weight and bias, in float64. The weight is
stored once, in the kernel's own layout. Convolutions in half types are float32 by now: ``widen_half_convolutions`` runs
before. Their weights are stored in bfloat16 again where that was the type and there is a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.attributes import add_dense_constant, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import activation_of, only_user, same_layout, value_of
from untorch.export.passes.report import PassReport
from untorch.ops.packed_convolution import (
    BLOCK,
    OPERATOR,
    pack_bfloat16_weight,
    pack_weight,
    pack_winograd_weight,
    serves_bfloat16,
)

__all__ = ["CONVOLUTIONS", "ROUNDED_FROM", "fold_batch_norm", "is_inference_norm", "pack_convolutions"]

_aten = torch.ops.aten
CONVOLUTIONS = {
    _aten.conv1d.default, _aten.conv1d.padding, _aten.conv2d.default, _aten.conv2d.padding, _aten.conv3d.default,
    _aten.conv3d.padding, _aten.convolution.default, _aten.conv_transpose1d.default, _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
}  # fmt: skip
# In a node's metadata: the half type in which the model computes what is computed in float32.
ROUNDED_FROM = "untorch_rounded_from"
_WINOGRAD_SIZE = 12  # pixels
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)
_VIEWS = {
    _aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.transpose.int, _aten.permute.default,
    _aten.squeeze.dim, _aten.unsqueeze.default,
}  # fmt: skip


@dataclass
class _Chain:
    """What becomes one call: ``nodes`` in graph order, the last of them gives the result."""

    nodes: list[fx.Node]
    batch_norm: fx.Node | None = None
    activation: str = "none"
    addition: fx.Node | None = None
    residual_first: bool = False

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    def residual(self) -> Any:
        """The other operand of the sum, as the graph is now."""
        if self.addition is None:
            return None
        before = self.nodes[self.nodes.index(self.addition) - 1]
        left, right = self.addition.args[:2]
        return right if left is before else left


@dataclass
class _Packer:
    """The constants that calls read, each stored once."""

    module: fx.GraphModule
    constants: Constants
    stored: dict[tuple[fx.Node | None, ...], tuple[fx.Node, fx.Node | None]] = field(default_factory=dict)

    def operands(self, chain: _Chain, arguments: dict[str, Any], form: str) -> tuple[fx.Node, fx.Node | None]:
        """get_attr nodes of the packed weight and of the bias, batch norm included."""
        norm = arguments_of(chain.batch_norm) if chain.batch_norm is not None else {}
        sources = [norm.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
        key = (arguments["weight"], arguments["bias"], *sources, norm.get("eps"), arguments["groups"], form)
        if key not in self.stored:
            weight = self.constants.value(arguments["weight"])
            bias = None if arguments["bias"] is None else self.constants.value(arguments["bias"])
            if norm:
                values = [None if source is None else self.constants.value(source) for source in sources]
                weight, bias = fold_batch_norm(weight, bias, values, norm["eps"])
            if weight.dim() == 3:
                weight = weight.unsqueeze(-2)
            name = f"{arguments['weight'].name}_packed"
            weight = weight.detach()
            stored = _pack(weight, arguments["groups"], form)
            packed = self._add(name, stored, arguments["weight"])
            if bias is None or (not norm and arguments["bias"].op == "get_attr"):
                self.stored[key] = packed, arguments["bias"]
            else:
                self.stored[key] = packed, self._add(f"{name}_bias", bias.detach(), arguments["weight"])
        return self.stored[key]

    def _add(self, name: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
        with self.module.graph.inserting_after(like):
            return add_dense_constant(self.module, name, value, like)


def pack_convolutions(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. Weights that nothing else reads are removed from the module."""
    report = PassReport("pack_convolutions")
    graph = module.graph
    _split_transposed(module)
    _move_activations(graph)
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in CONVOLUTIONS]
    if not found:
        return report
    constants, aliases = Constants(module), Aliases(graph)
    packer = _Packer(module, constants)
    chains = []
    taken: set[fx.Node] = set()
    for node in found:
        if reason := _reason_to_skip(node, constants):
            report.skipped[node.name] = reason
            continue
        chain = _chain(node, constants, aliases, taken)
        taken.update(chain.nodes)
        chains.append(chain)
    for chain in chains:
        _replace(graph, chain, packer)
        report.changed.append(" + ".join(node.name for node in chain.nodes))
    remove_unused(module)
    return report


def _move_activations(graph: fx.Graph) -> None:
    """Computes activation(view(conv)) as view(activation(conv)): elementwise, so that the values are the same."""
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in CONVOLUTIONS]:
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


def _split_transposed(module: fx.GraphModule) -> None:
    """Makes a 1 x 1 convolution and a permutation of a transposed convolution whose windows do not overlap.

    Each pixel then gives kernel x O outputs: stride = kernel, no padding, no groups.
    """
    graph = module.graph
    found = [n for n in graph.nodes if n.op == "call_function" and n.target == _aten.conv_transpose2d.input]
    constants = Constants(module) if found else None
    for node in found:
        arguments = arguments_of(node)
        x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
        value = value_of(weight)
        shape = x.meta["val"].shape
        if constants is None or value is None or not all(isinstance(size, int) for size in shape) or len(shape) != 4:
            continue
        if not constants.is_known(weight) or (bias is not None and not constants.is_known(bias)):
            continue
        kernel = list(value.shape[2:])
        zeros = [*_expand(arguments["padding"], 2), *_expand(arguments["output_padding"], 2)]
        ones = [arguments["groups"], *_expand(arguments["dilation"], 2)]
        if _expand(arguments["stride"], 2) != kernel or any(zeros) or set(ones) != {1}:
            continue
        rows = constants.value(weight).detach().permute(2, 3, 1, 0).flatten(0, 2)[:, :, None, None]
        with graph.inserting_before(node):
            pointwise = add_dense_constant(module, f"{weight.name}_pointwise", rows, weight)
            repeated = None
            if bias is not None:
                values = constants.value(bias).detach().repeat(kernel[0] * kernel[1])
                repeated = add_dense_constant(module, f"{weight.name}_pointwise_bias", values, weight)
            y = add_call(graph, node, _aten.conv2d.default, (x, pointwise, repeated))
            n, _, h, w = shape
            out = int(value.shape[1])
            y = add_call(graph, node, _aten.reshape.default, (y, [n, *kernel, out, h, w]))
            y = add_call(graph, node, _aten.permute.default, (y, [0, 3, 4, 1, 5, 2]))
            y = add_call(graph, node, _aten.reshape.default, (y, [n, out, h * kernel[0], w * kernel[1]]))
        node.replace_all_uses_with(y)
        graph.erase_node(node)


def _pack(weight: torch.Tensor, groups: int, form: str) -> torch.Tensor:
    if form == "winograd":
        return pack_winograd_weight(weight)
    return pack_bfloat16_weight(weight, groups) if form == "bfloat16" else pack_weight(weight, groups)


def _reason_to_skip(node: fx.Node, constants: Constants) -> str | None:
    arguments = arguments_of(node)
    x, weight, bias = value_of(arguments["input"]), value_of(arguments["weight"]), arguments["bias"]
    if "output_padding" in arguments and (arguments.get("transposed", True)):
        return "it is transposed, and its windows overlap"
    if x is None or weight is None or x.dim() != weight.dim():
        return "the input has no batch dimension"
    if weight.dim() == 5:
        return "it has three spatial dimensions, the packed kernels are for one and two"
    for name, value in (("weight", weight), ("input", x)):
        if value.dtype != torch.float32 or value.device.type != "cpu":
            dtype = str(value.dtype).removeprefix("torch.")
            return f"the {name} is {dtype} on {value.device.type}, expected float32 on cpu"
    if arguments["padding"] == "same":
        dilation = _expand(arguments["dilation"], weight.dim() - 2)
        if any(d * (size - 1) % 2 for d, size in zip(dilation, weight.shape[2:], strict=True)):
            return "it pads one side more than the other (padding='same' of an even kernel)"
    for name, operand in (("weight", arguments["weight"]), ("bias", bias)):
        if operand is not None and not constants.is_known(operand):
            return f"the {name} is computed, or the model writes into it: it is no constant"
    if 0 in weight.shape:
        return "the weight is empty"
    return None


def _chain(node: fx.Node, constants: Constants, aliases: Aliases, taken: set[fx.Node]) -> _Chain:
    chain = _Chain([node])
    reads = set(aliases.group(node.all_input_nodes[0]))
    user = _next(chain, reads, taken)
    if user is not None and is_inference_norm(user, chain.last, constants):
        chain.nodes.append(user)
        chain.batch_norm = user
        user = _next(chain, reads, taken)
    _take_activation(chain, user)
    user = _next(chain, reads, taken)
    if user is None or user.target not in _ADDITIONS or user.kwargs.get("alpha", 1) != 1:
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
        if user is not None and not _writes_between(chain.last, user, set(aliases.group(other)), chain.nodes):
            chain.residual_first = _take_activation(chain, user)
    return chain


def _take_activation(chain: _Chain, user: fx.Node | None) -> bool:
    name = activation_of(user) if user is not None and user.args and user.args[0] is chain.last else None
    if user is None or name is None:
        return False
    chain.activation = name
    chain.nodes.append(user)
    return True


def _next(chain: _Chain, reads: set[fx.Node], taken: set[fx.Node]) -> fx.Node | None:
    """The only reader of the result so far, unless something writes in between into what the chain reads."""
    user = only_user(chain.last)
    if user is None or user in taken or _writes_between(chain.nodes[0], user, reads, chain.nodes):
        return None
    return user


def _writes_between(first: fx.Node, last: fx.Node, memory: set[fx.Node], own: list[fx.Node]) -> bool:
    node = first.next
    while node is not last:
        if node in memory and is_mutating(node) and node not in own:
            return True
        node = node.next
    return False


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


def _replace(graph: fx.Graph, chain: _Chain, packer: _Packer) -> None:
    node, last = chain.nodes[0], chain.last
    arguments = arguments_of(node)
    form = _form(node, arguments)
    weight, bias = packer.operands(chain, arguments, form)
    residual = chain.residual()
    x, original = arguments["input"], arguments["weight"].meta["val"]
    flat = original.dim() == 3
    lists = _lists(arguments, list(original.shape[2:]))
    if flat:
        lists = [[start, *values] for start, values in zip((1, 1, 0, 1), lists, strict=True)]
    with graph.inserting_before(last):
        if flat:
            x = add_call(graph, node, _aten.unsqueeze.default, (x, -2))
            residual = None if residual is None else add_call(graph, node, _aten.unsqueeze.default, (residual, -2))
        value = last.meta["val"]
        channels_last = (
            value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
        )
        call = (x, weight, bias, residual, int(original.shape[0]), *lists, arguments["groups"], chain.activation)
        fused = add_call(graph, last, OPERATOR, (*call, chain.residual_first, channels_last, form == "winograd"))
        result = add_call(graph, last, _aten.squeeze.dim, (fused, -2)) if flat else fused
    fused.meta["stack_trace"] = node.meta.get("stack_trace")
    fused.meta["weight_name"] = str(arguments["weight"].target) if arguments["weight"].op == "get_attr" else node.name
    last.replace_all_uses_with(result)
    for old in reversed(chain.nodes):
        graph.erase_node(old)


def _form(node: fx.Node, arguments: dict[str, Any]) -> str:
    """How the weight is stored: "plain", "winograd", or "bfloat16" where the model's convolution is in that type.

    Winograd stays float32: where there is no AVX512_BF16 it is faster than the direct kernels, elsewhere as fast.
    """
    if _uses_winograd(node, arguments):
        return "winograd"
    out_channels, inputs, *kernel = arguments["weight"].meta["val"].shape
    groups = arguments["groups"]
    serves = serves_bfloat16(inputs * groups, out_channels, [1, *kernel][-2:], groups)
    return "bfloat16" if serves and node.meta.get(ROUNDED_FROM) == torch.bfloat16 else "plain"


def _uses_winograd(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Whether Winograd's F(2 x 2, 3 x 3) is faster: for small images reading its larger weight costs more."""
    weight = arguments["weight"].meta["val"]
    out_channels, channels, *kernel = weight.shape
    if kernel != [3, 3] or channels % BLOCK or out_channels % BLOCK or arguments["groups"] != 1:
        return False
    if {*_expand(arguments["stride"], 2), *_expand(arguments["dilation"], 2)} != {1}:
        return False
    sizes = [size if isinstance(size, int) else size.node.hint for size in node.meta["val"].shape[2:]]
    return all(size is not None and size >= _WINOGRAD_SIZE for size in sizes)


def _lists(arguments: dict[str, Any], kernel: list[int]) -> list[list[int]]:
    """Kernel, stride, padding and dilation, one value a dimension."""
    stride, dilation = (_expand(arguments[name], len(kernel)) for name in ("stride", "dilation"))
    padding = arguments["padding"]
    if padding == "valid":
        padding = [0]
    elif padding == "same":
        padding = [dilation[d] * (kernel[d] - 1) // 2 for d in range(len(kernel))]
    return [kernel, stride, _expand(padding, len(kernel)), dilation]


def _expand(values: Any, count: int) -> list[int]:
    return list(values) if len(values) == count else list(values) * count

"""Makes one kernel of a convolution on CUDA and what follows it: batch norm, residual sum, activation.

conv(x, W, b) → [batch norm] → [+ residual] → [activation] becomes one ``untorch::fused_convolution``, which computes
channels last. Batch norm of inference goes into weight and bias, in float64. The weight is stored once, with the
channel innermost. cuDNN has ReLU compiled; other activations are fused with depthwise convolutions alone, whose kernel
is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import add_dense_constant, is_named, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import (
    CONVOLUTIONS,
    Chain,
    chain_of,
    fold_batch_norm,
    is_transposed,
    move_activations,
    pads_unevenly,
    per_dimension,
    sizes_of,
)
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport
from untorch.ops.fused_convolution import DTYPES, OPERATOR, is_depthwise, stored_weight

__all__ = ["fuse_convolutions"]

_NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass
class _Weights:
    """The constants that calls read, each stored once."""

    module: fx.GraphModule
    constants: Constants
    stored: dict[tuple[Any, ...], tuple[fx.Node, fx.Node | None]] = field(default_factory=dict)

    def operands(self, chain: Chain) -> tuple[fx.Node, fx.Node | None]:
        """get_attr nodes of weight and bias, batch norm included. There is a bias if anything follows."""
        arguments = arguments_of(chain.nodes[0])
        norm = arguments_of(chain.batch_norm) if chain.batch_norm is not None else {}
        sources = [norm.get(name) for name in _NORM]
        transposed, groups = is_transposed(chain.nodes[0]), arguments["groups"]
        follows = chain.addition is not None or chain.activation != "none"
        key = (arguments["weight"], arguments["bias"], *sources, norm.get("eps"), transposed, groups, follows)
        if key not in self.stored:
            node = arguments["weight"]
            weight = self.constants.value(node)
            bias = None if arguments["bias"] is None else self.constants.value(arguments["bias"])
            if norm:
                values = [None if source is None else self.constants.value(source) for source in sources]
                weight, bias = fold_batch_norm(weight, bias, values, norm["eps"])
            elif bias is None and follows and not transposed:  # cuDNN's compiled kernels have one
                bias = weight.new_zeros(weight.shape[0])
            name = f"{node.name}_channels_last"
            packed = self._add(name, stored_weight(weight.detach(), transposed, groups), node)
            if bias is None or (not norm and arguments["bias"] is not None and arguments["bias"].op == "get_attr"):
                self.stored[key] = packed, arguments["bias"]
            else:
                self.stored[key] = packed, self._add(f"{name}_bias", bias.detach(), node)
        return self.stored[key]

    def _add(self, name: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
        with self.module.graph.inserting_after(like):
            return add_dense_constant(self.module, name, value, like)


def fuse_convolutions(module: fx.GraphModule, keep: tuple[str, ...] = ()) -> PassReport:
    """Runs the pass in place: on all convolutions of a graph or on none, so that they have one layout.

    keep: names and patterns of weights that stay as they are.
    """
    report = PassReport("fuse_convolutions")
    graph = module.graph
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in CONVOLUTIONS]
    if not found:
        return report
    constants = Constants(module)
    reasons = {node: _reason_to_skip(node, constants, keep) for node in found}
    move_activations(graph, [node for node in found if reasons[node] is None and _is_depthwise(node)])
    aliases = Aliases(graph)
    chains: list[Chain] = []
    taken: set[fx.Node] = set()
    for node in found:
        if (reason := reasons[node]) is not None:
            report.skipped[node.name] = reason
            continue
        chain = _chain(node, constants, aliases, taken)
        taken.update(chain.nodes)
        chains.append(chain)
    if not any(_gains(chain) for chain in chains):
        report.skipped.update({chain.nodes[0].name: "nothing follows that it could compute" for chain in chains})
        return report
    weights = _Weights(module, constants)
    for chain in chains:
        _replace(graph, chain, weights)
        report.changed.append(" + ".join(node.name for node in chain.nodes))
    remove_unused(module)
    return report


def _gains(chain: Chain) -> bool:
    return chain.addition is not None or chain.activation != "none" or _is_depthwise(chain.nodes[0])


def _chain(node: fx.Node, constants: Constants, aliases: Aliases, taken: set[fx.Node]) -> Chain:
    activations = None if _is_depthwise(node) else ("relu",)
    chain = chain_of(node, constants, aliases, taken, activations, residual_last=False)
    if chain.batch_norm is not None and is_transposed(node):
        return Chain([node])  # its weight has the outputs in another dimension
    return chain


def _is_depthwise(node: fx.Node) -> bool:
    arguments = arguments_of(node)
    return is_depthwise(arguments["weight"].meta["val"], is_transposed(node), arguments["groups"])


def _reason_to_skip(node: fx.Node, constants: Constants, keep: tuple[str, ...]) -> str | None:
    arguments = arguments_of(node)
    x, weight, bias = value_of(arguments["input"]), value_of(arguments["weight"]), arguments["bias"]
    if x is None or weight is None or x.dim() != weight.dim():
        return "the input has no batch dimension"
    if weight.dim() == 3:
        return "it has one spatial dimension"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        dtypes = [str(value.dtype).removeprefix("torch.") for value in (x, weight)]
        return f"input and weight are {dtypes[0]} and {dtypes[1]}, expected float32, bfloat16 or float16"
    if pads_unevenly(arguments, weight.shape[2:]):
        return "it pads one side more than the other (padding='same' of an even kernel)"
    for name, operand in (("weight", arguments["weight"]), ("bias", bias)):
        if operand is not None and not constants.is_known(operand):
            return f"the {name} is computed, or the model writes into it: it is no constant"
        if operand is not None and operand.op == "get_attr" and any(is_named(operand.target, form) for form in keep):
            return f"keep_weights names its {name}"
    return "the weight is empty" if 0 in weight.shape else None


def _replace(graph: fx.Graph, chain: Chain, weights: _Weights) -> None:
    node, last = chain.nodes[0], chain.last
    arguments = arguments_of(node)
    weight, bias = weights.operands(chain)
    spatial = list(arguments["weight"].meta["val"].shape[2:])
    _, stride, padding, dilation = sizes_of(arguments, spatial)
    transposed = is_transposed(node)
    extra = per_dimension(arguments["output_padding"], len(spatial)) if transposed else [0] * len(spatial)
    value = last.meta["val"]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = not value.is_contiguous() and value.is_contiguous(memory_format=formats[value.dim()])
    with graph.inserting_before(last):
        fused = add_call(
            graph, last, OPERATOR,
            (
                arguments["input"], weight, bias, chain.residual(), stride, padding, dilation, transposed, extra,
                arguments["groups"], chain.activation, channels_last, "",
            ),
        )  # fmt: skip
    fused.meta["stack_trace"] = node.meta.get("stack_trace")
    last.replace_all_uses_with(fused)
    for old in reversed(chain.nodes):
        graph.erase_node(old)

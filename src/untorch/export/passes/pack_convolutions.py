"""Packs constant convolution weights at export, and fuses what follows: batch norm, activation, residual sum.

conv(x, W, b) → [batch norm] → [activation] → [+ residual] → [activation] becomes one ``untorch::packed_convolution``,
which computes channels last. An activation behind views of the result, such as the flattened tokens of a vision
transformer, moves before them first. Batch norm of inference goes into weight and bias, in float64. The weight is
stored once, in the kernel's own layout. Convolutions in half types are float32 by now: ``widen_half_convolutions`` runs
before. Their weights are stored in bfloat16 again where that was the type and there is a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.attributes import add_dense_constant, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.convolution_chains import (
    CONVOLUTIONS,
    Chain,
    chain_of,
    fold_batch_norm,
    move_activations,
    pads_unevenly,
    per_dimension,
    sizes_of,
)
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport
from untorch.ops.packed_convolution import (
    BLOCK,
    OPERATOR,
    pack_bfloat16_weight,
    pack_small_groups_weight,
    pack_weight,
    pack_winograd_weight,
    serves_bfloat16,
    serves_small_groups,
)

__all__ = ["ROUNDED_FROM", "pack_convolutions"]

_aten = torch.ops.aten
# In a node's metadata: the half type in which the model computes what is computed in float32.
ROUNDED_FROM = "untorch_rounded_from"
_WINOGRAD_SIZE = 12  # pixels
# Products of an output with a weight in bfloat16: with fewer, rounding the input costs more than is saved.
_FEWEST_PRODUCTS = 24


@dataclass
class _Packer:
    """The constants that calls read, each stored once."""

    module: fx.GraphModule
    constants: Constants
    amx: bool
    stored: dict[tuple[fx.Node | None, ...], tuple[fx.Node, fx.Node | None]] = field(default_factory=dict)

    def operands(self, chain: Chain, arguments: dict[str, Any], form: str) -> tuple[fx.Node, fx.Node | None]:
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


def pack_convolutions(module: fx.GraphModule, amx: bool = False) -> PassReport:
    """Runs the pass in place. Weights that nothing else reads are removed from the module.

    ``amx``: the file is for CPUs that have it.
    """
    report = PassReport("pack_convolutions")
    graph = module.graph
    _split_transposed(module)
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in CONVOLUTIONS]
    move_activations(graph, found)
    if not found:
        return report
    constants, aliases = Constants(module), Aliases(graph)
    packer = _Packer(module, constants, amx)
    chains = []
    taken: set[fx.Node] = set()
    for node in found:
        if reason := _reason_to_skip(node, constants):
            report.skipped[node.name] = reason
            continue
        chain = chain_of(node, constants, aliases, taken)
        taken.update(chain.nodes)
        chains.append(chain)
    for chain in chains:
        _replace(graph, chain, packer)
        report.changed.append(" + ".join(node.name for node in chain.nodes))
    remove_unused(module)
    return report


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
        zeros = [*per_dimension(arguments["padding"], 2), *per_dimension(arguments["output_padding"], 2)]
        ones = [arguments["groups"], *per_dimension(arguments["dilation"], 2)]
        if per_dimension(arguments["stride"], 2) != kernel or any(zeros) or set(ones) != {1}:
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
    if form == "small groups":
        return pack_small_groups_weight(weight)
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
    if pads_unevenly(arguments, weight.shape[2:]):
        return "it pads one side more than the other (padding='same' of an even kernel)"
    for name, operand in (("weight", arguments["weight"]), ("bias", bias)):
        if operand is not None and not constants.is_known(operand):
            return f"the {name} is computed, or the model writes into it: it is no constant"
    if 0 in weight.shape:
        return "the weight is empty"
    return None


def _replace(graph: fx.Graph, chain: Chain, packer: _Packer) -> None:
    node, last = chain.nodes[0], chain.last
    arguments = arguments_of(node)
    form = _form(node, arguments, packer.amx)
    weight, bias = packer.operands(chain, arguments, form)
    residual = chain.residual()
    x, original = arguments["input"], arguments["weight"].meta["val"]
    flat = original.dim() == 3
    lists = sizes_of(arguments, list(original.shape[2:]))
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


def _form(node: fx.Node, arguments: dict[str, Any], amx: bool) -> str:
    """How the weight is stored: "plain", "winograd", "small groups", or "bfloat16" as the model's convolution.

    Winograd stays float32: where there is no AVX512_BF16 it is faster than the direct kernels, with it as fast; AMX's
    direct kernel is to be preferred.
    """
    is_bfloat16 = node.meta.get(ROUNDED_FROM) == torch.bfloat16
    if _uses_winograd(node, arguments) and not (amx and is_bfloat16):
        return "winograd"
    out_channels, inputs, *kernel = arguments["weight"].meta["val"].shape
    groups = arguments["groups"]
    if len(kernel) == 2 and serves_small_groups(inputs * groups, out_channels, sizes_of(arguments, kernel), groups):
        return "small groups"
    if not is_bfloat16 or math.prod([inputs, *kernel]) < _FEWEST_PRODUCTS:
        return "plain"
    return "bfloat16" if serves_bfloat16(inputs * groups, out_channels, [1, *kernel][-2:], groups) else "plain"


def _uses_winograd(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Whether Winograd's F(2 x 2, 3 x 3) is faster: for small images reading its larger weight costs more."""
    weight = arguments["weight"].meta["val"]
    out_channels, channels, *kernel = weight.shape
    if kernel != [3, 3] or channels % BLOCK or out_channels % BLOCK or arguments["groups"] != 1:
        return False
    if {*per_dimension(arguments["stride"], 2), *per_dimension(arguments["dilation"], 2)} != {1}:
        return False
    sizes = [size if isinstance(size, int) else size.node.hint for size in node.meta["val"].shape[2:]]
    return all(size is not None and size >= _WINOGRAD_SIZE for size in sizes)

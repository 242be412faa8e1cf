"""Packs constant linear weights at export, and fuses the activation and the residual sum that follow.

linear(x, W, b) → [activation] → [+ residual] becomes one ``untorch::packed_linear``. The weight is stored once in the
kernel's own layout, so nothing is repacked at run time, and the result is written to memory once. GEMMs with a constant
right operand (addmm, mm, matmul; GPT-2's layers) are linear layers with the transposed weight.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from untorch.export.mutations import find_mutations
from untorch.export.passes.attributes import add_constant, remove_unused, set_attribute
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.epilogues import value_of, with_epilogue
from untorch.export.passes.report import PassReport
from untorch.ops.packed_linear import BLOCK, OPERATOR, pack_weight

__all__ = ["pack_linears"]

_aten = torch.ops.aten

# Below one block, more than half of the packed GEMM could be padding, and AOTInductor's own code is as good.
_MIN_OUT_FEATURES = BLOCK
_MIN_IN_FEATURES = 4

_GEMMS = {_aten.addmm.default, _aten.mm.default, _aten.matmul.default}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack_linears(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. Weights that nothing else reads are removed from the module."""
    report = PassReport("pack_linears")
    mutated = find_mutations(module.graph).attributes
    _make_linears(module, mutated)
    packed: dict[str, tuple[str, int]] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target != _aten.linear.default:
            continue
        if reason := _reason_to_skip(module, node, mutated):
            report.skipped[node.name] = reason
            continue
        weight_node = node.args[1]
        source = str(weight_node.target)
        if source not in packed:
            packed[source] = _store_packed(module, source)
        target, out_features = packed[source]
        found = with_epilogue(node)
        last = found.nodes[-1]
        with module.graph.inserting_before(last):
            weight = module.graph.get_attr(target)
            bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
            arguments = (node.args[0], weight, bias, found.residual, found.activation, out_features)
            fused = module.graph.call_function(OPERATOR, arguments)
        fused.meta = {**last.meta, "stack_trace": node.meta.get("stack_trace")}
        value = weight_node.meta.get("val")
        if value is not None:
            weight.meta["val"] = value.new_empty(operator.attrgetter(target)(module).shape)
        last.replace_all_uses_with(fused)
        for old in reversed(found.nodes):
            module.graph.erase_node(old)
        report.changed.append(" + ".join(n.name for n in found.nodes))
    if packed:
        remove_unused(module)
    return report


def _make_linears(module: fx.GraphModule, mutated: frozenset[str]) -> None:
    """GEMMs with a constant matrix on the right become linear layers, if those can be packed.

    Not its transpose: that is mostly an embedding's table, which is stored once for all methods that read it.
    """
    graph = module.graph
    made: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _GEMMS:
            continue
        bias, x, weight = _operands(node)
        value = value_of(x)
        if value is None or not isinstance(weight, fx.Node) or weight.op != "get_attr":
            continue
        tensor = operator.attrgetter(str(weight.target))(module)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dim() != 2 or value.dim() < 2:
            continue
        if tensor.dtype not in _DTYPES or tensor.device.type != "cpu" or str(weight.target) in mutated:
            continue
        inputs, outputs = tensor.shape
        if outputs < _MIN_OUT_FEATURES or inputs < _MIN_IN_FEATURES:
            continue
        added = value_of(bias)
        if bias is not None and (added is None or list(added.shape) != [outputs]):
            continue  # a residual sum, or broadcast otherwise
        source = str(weight.target)
        with graph.inserting_before(node):
            if source not in made:
                turned = tensor.detach().t().contiguous()
                rows = add_constant(module, f"{source.replace('.', '_')}_transposed", turned, weight)
                made[source] = str(rows.target)
            else:
                rows = graph.get_attr(made[source])
                rows.meta = dict(weight.meta)
            if (like := value_of(weight)) is not None:
                rows.meta["val"] = like.new_empty(tensor.shape[::-1])
            linear = graph.call_function(_aten.linear.default, (x, rows, bias))
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """What is added, the left and the right operand; the right one is None where the sum is scaled."""
    given = arguments_of(node)
    if node.target == _aten.addmm.default:
        scaled = given["alpha"] != 1 or given["beta"] != 1
        return given["self"], given["mat1"], None if scaled else given["mat2"]
    left, right = list(given.values())[:2]
    return None, left, right


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason_to_skip(module: fx.GraphModule, node: fx.Node, mutated: frozenset[str]) -> str | None:
    x, weight = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return "the weight is computed, not a constant"
    if str(weight.target) in mutated:
        return f"the model writes into the weight {weight.target}"
    tensor = operator.attrgetter(str(weight.target))(module)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"the weight is a {type(tensor).__name__}, expected a plain tensor"
    if tensor.dtype not in _DTYPES:
        return f"the weight is {_name(tensor.dtype)}, expected float32, bfloat16 or float16"
    if tensor.dim() != 2 or tensor.device.type != "cpu":
        return f"the weight has {tensor.dim()} dimensions on {tensor.device.type}, expected 2 on cpu"
    if tensor.shape[0] < _MIN_OUT_FEATURES or tensor.shape[1] < _MIN_IN_FEATURES:
        return (
            f"it is too small to gain: {tensor.shape[1]} → {tensor.shape[0]} features, packing starts at "
            f"{_MIN_IN_FEATURES} → {_MIN_OUT_FEATURES}"
        )
    for name, argument in (("the input", x), ("the bias", bias)):
        value = value_of(argument)
        if argument is not None and (value is None or value.dtype != tensor.dtype):
            return f"{name} is not a {_name(tensor.dtype)} tensor, as the weight is"
    return None


def _store_packed(module: fx.GraphModule, source: str) -> tuple[str, int]:
    weight = operator.attrgetter(source)(module)
    prefix, _, name = source.rpartition(".")
    owner = module.get_submodule(prefix)
    target = f"{name}_packed"
    while hasattr(owner, target):
        target += "_"
    set_attribute(owner, target, torch.nn.Parameter(pack_weight(weight.detach()), requires_grad=False))
    return (f"{prefix}.{target}" if prefix else target), int(weight.shape[0])

"""Makes ``untorch::w4a8_linear``, which multiplies in integers, from ``untorch::int4_linear`` with constant weights;
``untorch::int4_moe`` gets its weights in that layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.mutations import find_mutations
from untorch.export.passes.attributes import add_constant, attribute, remove_unused
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.report import PassReport
from untorch.ops import int4, int4_moe, w4a8
from untorch.ops.int4_layout import unpack_int4
from untorch.ops.w4a8_layout import pack_w4a8

__all__ = ["REPACKED", "quantize_int4_activations"]

# In the module's meta: pairs of names, of the int4 weight with its scales, and of the tensors that the pass made.
REPACKED = "untorch_repacked_int4"


def quantize_int4_activations(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. Weights that nothing else reads are removed from the module."""
    report = PassReport("quantize_int4_activations")
    repacker = _Repacker(module)
    for node in [node for node in module.graph.nodes if node.target in (int4.OPERATOR, int4_moe.OPERATOR)]:
        given = arguments_of(node)
        is_linear = node.target == int4.OPERATOR
        x = value_of(given["x" if is_linear else "hidden_states"])
        # Of each weight the names of the arguments, and its inputs.
        inputs = 0 if x is None else int(x.shape[-1])
        weights = {("weight", "scale_and_zero"): inputs}
        if not is_linear:
            weights = {("w13", "w13_scale_and_zero"): inputs, ("w2", "w2_scale_and_zero"): given["intermediate"]}
        if reason := repacker.reason_to_skip([given[name] for names in weights for name in names], x):
            report.skipped[node.name] = reason
            continue
        with module.graph.inserting_before(node):
            for names, inputs in weights.items():
                made = repacker.repacked(given[names[0]], given[names[1]], given["group_size"], inputs)
                given |= dict(zip(names, made, strict=True))
            if is_linear:
                outputs = node.meta["val"].shape[-1]
                arguments = given["x"], given["weight"], given["scale_and_zero"], given["group_size"], outputs
                result = add_call(module.graph, node, w4a8.OPERATOR, (*arguments, given["bias"]))
            else:
                result = add_call(module.graph, node, int4_moe.OPERATOR, tuple(given.values()))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        report.changed.append(node.name)
    if repacker.packed:
        module.meta[REPACKED] = [(names[:2], made) for names, made in repacker.packed.items()]
        remove_unused(module)
    return report


class _Repacker:
    """Repacks weights of a module, each once for a number of inputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._mutated = find_mutations(module.graph).attributes
        self.packed: dict[tuple[str, str, int], tuple[str, str]] = {}

    def reason_to_skip(self, tensors: list[Any], x: torch.Tensor | None) -> str:
        """Why a call stays as it is, or ""."""
        if x is None or any(not isinstance(part, fx.Node) or part.op != "get_attr" for part in tensors):
            return "the weight is computed, not a constant"
        if written := [str(part.target) for part in tensors if str(part.target) in self._mutated]:
            return f"the model writes into the weight {written[0]}"
        if any((value := value_of(part)) is not None and value.dim() == 3 and value.dtype == torch.int32
               for part in tensors):  # fmt: skip
            return "its weights are packed for integers already"
        return ""

    def repacked(self, weight: fx.Node, scales: fx.Node, group_size: int, inputs: int) -> list[fx.Node]:
        """Nodes of the weight and its scales for w4a8_linear, where the graph inserts at the moment."""
        module, names = self._module, (str(weight.target), str(scales.target))
        k = -(-inputs // group_size) * group_size
        key = *names, k
        if key not in self.packed:
            values = unpack_int4(attribute(module, names[0]).detach())[:, :k]
            made = pack_w4a8(values, attribute(module, names[1]).detach()[: k // group_size])
            nodes = [
                add_constant(module, f"{name.replace('.', '_')}_w4a8", tensor, like)
                for name, tensor, like in zip(names, made, (weight, scales), strict=True)
            ]
            self.packed[key] = str(nodes[0].target), str(nodes[1].target)
        else:
            nodes = [module.graph.get_attr(name) for name in self.packed[key]]
        for part, like in zip(nodes, (weight, scales), strict=True):
            stored = attribute(module, str(part.target))
            fake = value_of(like)
            if fake is not None:
                part.meta["val"] = fake.new_empty(stored.shape, dtype=stored.dtype)
        return nodes

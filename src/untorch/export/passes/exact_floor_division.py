"""Keeps integer division by, or of, a 0-D constant an integer division.

Inductor puts a 0-D constant into its code as a number of which it forgets that it is an integer (reported for CUDA with
torch 2.12, https://github.com/pytorch/pytorch/issues/186164, and seen on CPUs with 2.13): a division that rounds down
then rounds to zero, one that rounds to zero gives garbage or kills the process, and fmod of one does not compile.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.attributes import attribute
from untorch.export.passes.constants import Constants, is_alias
from untorch.export.passes.report import PassReport

__all__ = ["exact_floor_division"]

_aten = torch.ops.aten
_DIVISIONS = {
    _aten.floor_divide.default, _aten.floor_divide_.Tensor, _aten.div.Tensor_mode, _aten.div_.Tensor_mode,
    _aten.fmod.Tensor, _aten.fmod_.Tensor,
}  # fmt: skip


def exact_floor_division(module: fx.GraphModule) -> PassReport:
    """Gives such a constant to the division as ``aten.full``: the same value, dtype and device, and an integer tensor.

    Looked at are divisions with a rounding mode and fmod, of integers or booleans. Others are right: remainder, and
    divisions by Python numbers, by sizes and by tensors that are no constants.
    """
    report = PassReport("exact_floor_division")
    constants = Constants(module)
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in _DIVISIONS or not _is_integral(node):
            continue
        changed = False
        for operand in dict.fromkeys(node.all_input_nodes):
            source = _source(operand)
            if source is None:
                continue
            if not constants.is_known(source):
                report.skipped[node.name] = f"{source.target} is not a constant: the model writes into it"
                continue
            tensor = attribute(module, str(source.target))
            with module.graph.inserting_before(node):
                full = module.graph.call_function(
                    _aten.full.default, ([], tensor.item()), {"dtype": tensor.dtype, "device": tensor.device}
                )
            full.meta = dict(operand.meta)
            node.replace_input_with(operand, full)
            changed = True
        if changed:
            report.changed.append(node.name)
    return report


def _is_integral(node: fx.Node) -> bool:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return all(
        not value.is_floating_point() and not value.is_complex() for value in values if isinstance(value, torch.Tensor)
    )


def _source(node: fx.Node) -> fx.Node | None:
    """The get_attr of a 0-D tensor that ``node`` is, or only renames."""
    while node.op == "call_function" and is_alias(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    value = node.meta.get("val")
    return node if node.op == "get_attr" and isinstance(value, torch.Tensor) and value.dim() == 0 else None

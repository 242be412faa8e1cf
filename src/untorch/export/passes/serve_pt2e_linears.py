"""Makes ``untorch::int8_linear`` from linear layers that PT2E quantised, with static or dynamic ranges of tensors.

``convert_pt2e`` (torchao, X86InductorQuantizer, XNNPACKQuantizer) leaves a linear layer in floating point between
operators that quantise and dequantise:

    linear(dequantize_per_tensor(quantize_per_tensor(x, s, z)), dequantize_per_channel(int8 constant, scales), bias)

where s and z are numbers, or come from choose_qparams(x).

Inductor would compute that in float32, from a weight that constant folding has widened. Here it becomes one product of
integers. What is left in floating point is in the report, by name and with the reason.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.constants import Constants
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.pt2e_operands import LeftError, activations, int8_weight, pt2e_name
from untorch.export.passes.report import PassReport
from untorch.ops.int8 import OPERATOR
from untorch.ops.int8_layout import pack_int8, padded_outputs

__all__ = ["serve_pt2e_linears"]

_LINEAR = torch.ops.aten.linear.default


def serve_pt2e_linears(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. What quantised and dequantised stays in the graph, where dead code is dropped later."""
    report = PassReport("serve_pt2e_linears")
    if not any(pt2e_name(node).startswith("dequantize") for node in module.graph.nodes):
        return report
    constants = Constants(module)
    stored: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
    for node in list(module.graph.nodes):
        sources = [pt2e_name(source) for source in node.all_input_nodes]
        if node.op != "call_function" or pt2e_name(node) or not any(name.startswith("dequantize") for name in sources):
            continue
        try:
            if node.target != _LINEAR:
                raise LeftError("only linear layers and convolutions are computed in integers")
            _serve(module, node, constants, stored)
        except LeftError as reason:
            report.skipped[node.name] = f"it is computed in floating point: {reason}"
        else:
            report.changed.append(node.name)
    return report


def _serve(
    module: fx.GraphModule,
    node: fx.Node,
    constants: Constants,
    stored: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]],
) -> None:
    x, weight, bias = arguments_of(node).values()
    found = activations(x)
    source = found.source
    value = value_of(source)
    if value is None or value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LeftError("its activations are not float32, bfloat16 or float16")
    added = value_of(bias)
    if bias is not None and (added is None or added.dtype != value.dtype or added.dim() != 1):
        raise LeftError("its bias has another dtype than its activations")
    if weight not in stored:
        values, scales = int8_weight(weight, constants, 2)
        packed, sums = pack_int8(values)
        padded = torch.nn.functional.pad(scales.float(), (0, padded_outputs(len(scales)) - len(scales)))
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            made = [
                add_constant(module, f"{weight.name}_{name}", tensor, weight)
                for name, tensor in (("packed", packed), ("scale", padded), ("column_sums", sums))
            ]
        for entry, tensor in zip(made, (packed, padded, sums), strict=True):
            entry.meta["val"] = value.new_empty(tensor.shape, dtype=tensor.dtype)
        stored[weight] = made[0], made[1], made[2]
    out_features = value_of(weight).shape[0]  # type: ignore[union-attr]
    with module.graph.inserting_before(node):
        how = found.input_range, found.scale, found.zero
        given = (source, *stored[weight], bias, None, "none", out_features, *how)
        fused = module.graph.call_function(OPERATOR, given)
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    module.graph.erase_node(node)

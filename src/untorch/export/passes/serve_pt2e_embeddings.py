"""Reads single rows of tables of embeddings that PT2E quantised (torchao's EmbeddingQuantizer).

``convert_pt2e`` leaves embedding(dequantize_per_channel(constant, scales, zero points), ids), which dequantises the
whole table at every call. Here the rows of the ids are gathered, their scales and zero points likewise, and those rows
alone are dequantised: Inductor makes one loop of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.pt2e_operands import pt2e_name
from untorch.export.passes.report import PassReport

__all__ = ["serve_pt2e_embeddings"]

_aten = torch.ops.aten


def serve_pt2e_embeddings(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place."""
    report = PassReport("serve_pt2e_embeddings")
    for node in list(module.graph.nodes):
        if node.target != _aten.embedding.default:
            continue
        table = node.args[0]
        if pt2e_name(table) in ("dequantize_per_channel.default", "dequantize_per_tensor.default"):
            if (reason := _serve(module.graph, node, table)) is None:
                report.changed.append(node.name)
            else:
                report.skipped[node.name] = f"its whole table is dequantised at every call: {reason}"
    return report


def _serve(graph: fx.Graph, node: fx.Node, table: fx.Node) -> str | None:
    given = arguments_of(table)
    values, dtype = given["input"], value_of(node)
    if not isinstance(values, fx.Node) or values.op != "get_attr":
        return "it is computed, not a constant"
    assert dtype is not None
    by_row = "axis" in given
    if by_row and given["axis"] != 0:
        return f"its scales are along the axis {given['axis']}, expected 0"
    ids = node.args[1]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(graph, node, target, args, kwargs)

    def of_rows(numbers: Any) -> Any:
        """A number a row, as [..., 1] for the rows of the ids."""
        if not isinstance(numbers, fx.Node):
            return numbers
        return call(_aten.embedding.default, call(_aten.unsqueeze.default, numbers, 1), ids)

    with graph.inserting_before(node):
        rows = call(_aten.to.dtype, call(_aten.embedding.default, values, ids), torch.float32)
        scale = of_rows(given["scales"] if by_row else given["scale"])
        zero = of_rows(given["zero_points"] if by_row else given["zero_point"])
        shifted = rows if zero is None else call(_aten.sub.Tensor, rows, zero)
        made = call(_aten.mul.Tensor, shifted, scale)
        made = call(_aten.to.dtype, made, dtype.dtype)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return None

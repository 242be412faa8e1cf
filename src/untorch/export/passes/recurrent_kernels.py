"""Gives ``untorch::causal_conv1d`` and ``untorch::gated_delta_rule`` of methods for CUDA their Triton kernels."""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.errors import CompileError
from untorch.export.passes.attributes import add_constant
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.report import PassReport
from untorch.ops import causal_conv1d, gated_delta_rule

__all__ = ["recurrent_kernels"]


def recurrent_kernels(module: fx.GraphModule) -> PassReport:
    """Replaces each call. The state pool stays the argument that is written.

    Raises CompileError for keys that are wider than the kernel's.
    """
    report = PassReport("recurrent_kernels")
    plain = (causal_conv1d.OPERATOR, gated_delta_rule.OPERATOR)
    calls = [node for node in module.graph.nodes if node.target in plain]
    if not calls:
        return report
    from untorch.ops.linear_attention.launch import MOST_WIDTH
    from untorch.ops.linear_attention.operators import CAUSAL_CONV1D, GATED_DELTA_RULE

    # Two elements a row: rows that begin at multiples of 16 bytes are one kind of pointer to Triton.
    offsets = sorted({arguments_of(node)["offset"] for node in calls})
    rows = {offset: row for row, offset in enumerate(offsets)}
    states = arguments_of(calls[0])["states"].meta["val"]
    values = torch.tensor(offsets, device=states.device)[:, None].repeat(1, 2)
    with module.graph.inserting_before(calls[0]):
        table = add_constant(module, "state_offsets", values, calls[0])
        table.meta["val"] = states.fake_mode.from_tensor(values)
    for node in calls:
        given = arguments_of(node)
        if given["offset"] % 16:
            raise CompileError(f"{node.name}: offset: expected a multiple of 16 on a GPU, got {given['offset']}")
        if node.target == gated_delta_rule.OPERATOR and (width := given["k"].meta["val"].shape[2]) > MOST_WIDTH:
            raise CompileError(
                f"{node.name}: gated_delta_rule: expected keys of at most {MOST_WIDTH} on a GPU, got {width}"
            )
        with module.graph.inserting_before(node):
            row = add_call(module.graph, node, torch.ops.aten.select.int, (table, 0, rows[given["offset"]]))
            given["offset"] = add_call(module.graph, node, torch.ops.aten.select.int, (row, 0, 0))
        node.target = CAUSAL_CONV1D if node.target == causal_conv1d.OPERATOR else GATED_DELTA_RULE
        node.args = tuple(given[argument.name] for argument in node.target._schema.arguments)
        report.changed.append(node.name)
    module.recompile()
    return report

"""Fuses the activation and the residual sum that follow an int8 linear layer into its epilogue.

int8_linear(x, …) → [activation] → [+ residual] becomes one ``untorch::int8_linear``: the result is written to memory
once, while the sums of its tile are in registers or L1.
"""

from __future__ import annotations

from torch import fx

from untorch.export.passes.calls import arguments_of
from untorch.export.passes.epilogues import with_epilogue
from untorch.export.passes.report import PassReport
from untorch.ops.int8 import OPERATOR

__all__ = ["fuse_int8_linears"]


def fuse_int8_linears(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place."""
    report = PassReport("fuse_int8_linears")
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target != OPERATOR:
            continue
        given = arguments_of(node)
        if given["activation"] != "none" or given["residual"] is not None:
            continue  # it has its epilogue
        found = with_epilogue(node)
        last = found.nodes[-1]
        if last is node:
            continue
        given |= {"residual": found.residual, "activation": found.activation}
        with module.graph.inserting_before(last):
            fused = module.graph.call_function(OPERATOR, tuple(given.values()))
        fused.meta = {**last.meta, "stack_trace": node.meta.get("stack_trace")}
        last.replace_all_uses_with(fused)
        for old in reversed(found.nodes):
            module.graph.erase_node(old)
        report.changed.append(" + ".join(part.name for part in found.nodes))
    return report

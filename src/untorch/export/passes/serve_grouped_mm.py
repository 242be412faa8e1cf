"""Gives transformers' grouped GEMM, which is a Python function without a C function, to ``untorch::moe_grouped_mm``.

transformers 5 calls ``transformers::grouped_mm_fallback`` in exported mixtures of experts whose weights are not
bfloat16, because PyTorch's ``_grouped_mm`` refuses them while it traces. As a custom operator, it would go to the proxy
executor.
"""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.report import PassReport
from untorch.ops import moe_grouped_mm

__all__ = ["serve_grouped_mm"]

_FALLBACK = "transformers.grouped_mm_fallback.default"  # by name: transformers need not be installed


def serve_grouped_mm(module: fx.GraphModule) -> PassReport:
    """Replaces each call, whose result has the same shape, strides and rows of zeros behind the last group.

    Other dtypes than bfloat16, float16 and float32 stay. Offsets become int32, as the C function takes them.
    """
    report = PassReport("serve_grouped_mm")
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or str(node.target) != _FALLBACK:
            continue
        given = arguments_of(node)
        x, weight, offs = given["input"], given["weight"], given["offs"]
        dtypes = [source.meta["val"].dtype for source in (x, weight)]
        if dtypes[0] not in moe_grouped_mm.DTYPES or dtypes[0] != dtypes[1]:
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            report.skipped[node.name] = f"the dtypes are {names}, expected one of bfloat16, float16 and float32"
            continue
        with graph.inserting_before(node):
            if offs.meta["val"].dtype != torch.int32:
                offs = add_call(graph, node, torch.ops.aten.to.dtype, (offs, torch.int32))
            call = add_call(graph, node, moe_grouped_mm.OPERATOR, (x, weight, offs))
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        report.changed.append(node.name)
    return report

"""Gives grouped GEMMs of tokens that are sorted by expert to ``untorch::moe_grouped_mm``.

transformers 5 calls ``transformers::grouped_mm_fallback`` in exported mixtures of experts whose weights are not
bfloat16, because PyTorch's ``_grouped_mm`` refuses them while it traces. As a custom operator, it would go to the proxy
executor. ``_grouped_mm`` itself has a C function, which the headers of torch 2.11 do not declare for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.report import PassReport
from untorch.ops import moe_grouped_mm

__all__ = ["serve_grouped_mm"]

_FALLBACK = "transformers.grouped_mm_fallback.default"  # by name: transformers need not be installed
_GROUPED_MM = "aten._grouped_mm.default"


def serve_grouped_mm(module: fx.GraphModule) -> PassReport:
    """Replaces each call, whose result has the same shape, strides and rows of zeros behind the last group.

    Other dtypes than bfloat16, float16 and float32 stay, and of ``_grouped_mm`` groups of columns or of K, and results
    whose rows are padded. Offsets become int32, as the C function takes them.
    """
    report = PassReport("serve_grouped_mm")
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or str(node.target) not in (_FALLBACK, _GROUPED_MM):
            continue
        given = arguments_of(node)
        ours = str(node.target) == _FALLBACK
        x, weight, offs = (given[name] for name in (("input", "weight", "offs") if ours else ("self", "mat2", "offs")))
        if reason := _reason_to_skip(node, x, weight, {} if ours else given):
            report.skipped[node.name] = reason
            continue
        with graph.inserting_before(node):
            if offs.meta["val"].dtype != torch.int32:
                offs = add_call(graph, node, torch.ops.aten.to.dtype, (offs, torch.int32))
            call = add_call(graph, node, moe_grouped_mm.OPERATOR, (x, weight, offs))
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        report.changed.append(node.name)
    return report


def _reason_to_skip(node: fx.Node, x: fx.Node, weight: fx.Node, given: dict[str, Any]) -> str | None:
    values = [source.meta["val"] for source in (x, weight)]
    if values[0].dim() != 2 or values[1].dim() != 3:
        return "the groups are not rows"
    dtypes = [value.dtype for value in values]
    if dtypes[0] not in moe_grouped_mm.DTYPES or dtypes[0] != dtypes[1]:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"the dtypes are {names}, expected one of bfloat16, float16 and float32"
    if given.get("bias") is not None or given.get("out_dtype") not in (None, dtypes[0]):
        return "it has a bias or another result dtype"
    if given and not node.meta["val"].is_contiguous():
        return "the rows of its result are padded"
    return None

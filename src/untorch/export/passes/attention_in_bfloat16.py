"""Computes attention of float32 tensors in bfloat16, whose dot products CPUs with AVX512_BF16 or AMX have."""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.epilogues import value_of
from untorch.export.passes.layouts import replace_in_layout
from untorch.export.passes.report import PassReport

__all__ = ["attention_in_bfloat16"]

_aten = torch.ops.aten


def attention_in_bfloat16(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place."""
    report = PassReport("attention_in_bfloat16")
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target != _aten.scaled_dot_product_attention.default:
            continue
        given = arguments_of(node)
        if reason := _reason_to_skip(given):
            report.skipped[node.name] = reason
            continue
        with graph.inserting_before(node):
            for name in ("query", "key", "value"):
                given[name] = add_call(graph, node, _aten.to.dtype, (given[name], torch.bfloat16))
            # Masks stay as they are: the kernel adds them to scores in float32.
            keywords = {name: given.pop(name) for name in ("scale", "enable_gqa")}
            attended = add_call(graph, node, node.target, tuple(given.values()), keywords)
            result = add_call(graph, node, _aten.to.dtype, (attended, torch.float32))
        replace_in_layout(graph, node, result)
        report.changed.append(node.name)
    return report


def _reason_to_skip(given: dict[str, object]) -> str:
    """Why a call stays in float32, or ""."""
    values = [value_of(given[name]) for name in ("query", "key", "value")]
    if any(value is None or value.dtype != torch.float32 for value in values):
        return "it is not in float32"
    query, _, value = values
    assert query is not None
    assert value is not None
    if query.dim() != 4 or given["dropout_p"] or query.shape[-1] != value.shape[-1]:
        return "the library's kernel does not compute it: it has dropout, no heads, or values of another width"
    return ""

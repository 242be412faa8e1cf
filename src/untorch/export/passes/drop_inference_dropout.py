"""Removes dropout that is switched off. It computes nothing, but stands between a linear and what can be fused in."""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.passes.report import PassReport

__all__ = ["drop_inference_dropout"]

_DROPOUTS = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.dropout_.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
}


def drop_inference_dropout(module: fx.GraphModule) -> PassReport:
    """Replaces dropout(x, p, train=False) by x."""
    report = PassReport("drop_inference_dropout")
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in _DROPOUTS:
            continue
        train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
        if train is not False:
            report.skipped[node.name] = "the dropout is active: the model was exported in training mode"
            continue
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
        report.changed.append(node.name)
    return report

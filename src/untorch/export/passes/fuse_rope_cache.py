"""Fuses norms of query and key heads, rotary embedding and the write of pages before paged attention on GPUs.

linear → [RMSNorm of heads] → rotation → paged attention, for q and for k, becomes one ``untorch::rope_cache_triton``
whose result the attention reads. v goes to its pages in the same launch, from where the linear layer left it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from untorch.export.mutations import Aliases
from untorch.export.passes.calls import add_call, arguments_of
from untorch.export.passes.equal_nodes import equal_nodes
from untorch.export.passes.report import PassReport
from untorch.ops import computed_once

__all__ = ["fuse_rope_cache"]

_aten = torch.ops.aten


def fuse_rope_cache(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place, behind paged_attention_kernels. What computed the heads is left as dead code."""
    report = PassReport("fuse_rope_cache")
    calls = [node for node in module.graph.nodes if str(node.target) == "untorch.paged_attention_triton.default"]
    if not calls:
        return report
    from untorch.ops.attention.rope_operator import OPERATOR

    equal = equal_nodes(module.graph, Aliases(module.graph))
    tables: dict[fx.Node, fx.Node] = {}
    known: dict[str, Any] = {}
    for node in calls:
        given = arguments_of(node)
        if given["k"] is None:
            report.skipped[node.name] = "it reads the pages of another layer"
            continue
        found = _match(given, equal, known)
        if isinstance(found, str):
            report.skipped[node.name] = found
            continue
        q, k = found
        graph = module.graph
        cos, sin = (equal[table] for table in (q.cos, q.sin))
        for table in (cos, sin):
            if table not in tables:
                with graph.inserting_after(table):
                    tables[table] = add_call(graph, table, computed_once.OPERATOR, (table,))
        with graph.inserting_before(node):
            heads = [_as_heads(graph, node, rotation.source, given[name]) for rotation, name in ((q, "q"), (k, "k"))]
            weights = [_as_row(graph, node, rotation.weight) for rotation in (q, k)]
            eps = q.eps if q.weight is not None else k.eps
            own = (*heads, given["v"], *weights, tables[cos], tables[sin])
            pages = (given[name] for name in ("pool", "slot_mapping", "offset", "aligned", "block"))
            fused = add_call(graph, node, OPERATOR, (*own, *pages, eps, q.interleaved))
        node.args = tuple((given | {"q": fused, "k": None, "v": None}).values())
        report.changed.append(node.name)
    return report


def _match(given: dict[str, Any], equal: dict[fx.Node, fx.Node], known: dict[str, Any]) -> tuple[Any, Any] | str:
    """The rotations of q and k, or why they cannot be one launch. known: as match_rotation takes it."""
    from untorch.export.passes.rotary_match import match_rotation

    found = []
    for name in ("q", "k"):
        if len(given[name].users) > 1:
            return f"{name} is also read by something else"
        rotation = match_rotation(given[name], known)
        if isinstance(rotation, str):
            return f"{name}: {rotation}"
        found.append(rotation)
    q, k = found
    if (equal[q.cos], equal[q.sin], q.interleaved) != (equal[k.cos], equal[k.sin], k.interleaved):
        return "q and k are rotated by different tables"
    if q.weight is not None and k.weight is not None and q.eps != k.eps:
        return f"the norms of q and k have different eps, {q.eps} and {k.eps}"
    return q, k


def _as_heads(graph: fx.Graph, like: fx.Node, source: fx.Node, heads: fx.Node) -> fx.Node:
    _, count, width = heads.meta["val"].shape
    return add_call(graph, like, _aten.reshape.default, (source, [-1, int(count), int(width)]))


def _as_row(graph: fx.Graph, like: fx.Node, weight: fx.Node | None) -> fx.Node | None:
    if weight is None or weight.meta["val"].dim() == 1:
        return weight
    return add_call(graph, like, _aten.reshape.default, (weight, [-1]))

"""Turns copies of views (permute_copy, slice_copy …) back into views, where no reader sees a difference.

They come from programs that were functionalised before. Each would be computed and stored.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from untorch.export.mutations import Aliases, is_mutating
from untorch.export.passes.calls import example_result
from untorch.export.passes.report import PassReport

__all__ = ["restore_views", "view_of"]


def restore_views(module: fx.GraphModule) -> PassReport:
    """Replaces an operator with the tag view_copy by the one whose schema is the same but for the aliasing.

    It stays a copy where the graph writes into its source, its result or anything that shares memory with them; where
    an output would come to share memory with an input, a tensor of the module or another output; where an output would
    get other strides; and where an operator behind it does not take the view's strides. One that stays, and gives
    several tensors (split_copy), becomes the view and a clone of each, which AOTInductor can compile.
    """
    report = PassReport("restore_views")
    aliases = Aliases(module.graph)
    returned = set(module.graph.output_node().all_input_nodes)
    for node in list(module.graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.view_copy not in target.tags:
            continue
        view = view_of(target)
        if view is None:
            report.skipped[node.name] = f"{target} has no counterpart that is a view"
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            report.skipped[node.name] = "its source is not a node of the graph"
            continue
        if reason := _reason_to_skip(aliases, source, node, returned) or _replace(module.graph, node, view):
            report.skipped[node.name] = reason
            _clone_parts(module.graph, node, view)
            continue
        aliases.join(source, node)
        report.changed.append(node.name)
    return report


def view_of(copy: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The view operator that ``copy`` copies: aten::x_copy → aten::x with the same arguments, or None."""
    namespace, name = copy._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_copy"), None)
    view = getattr(packet, copy._overloadname, None)
    if not name.endswith("_copy") or view is None or copy._schema.is_mutable or view._schema.is_mutable:
        return None
    ours, its = copy._schema, view._schema
    if not its.returns or any(value.alias_info is None for value in its.returns):
        return None
    same = [(a.name, str(a.type), a.kwarg_only) for a in ours.arguments] == [
        (a.name, str(a.type), a.kwarg_only) for a in its.arguments
    ]
    same = same and [str(value.type) for value in ours.returns] == [str(value.type) for value in its.returns]
    return view if same else None


def _reason_to_skip(aliases: Aliases, source: fx.Node, node: fx.Node, returned: set[fx.Node]) -> str | None:
    for item, what in ((source, "its source"), (node, "its result")):
        if aliases.is_written(item):
            return f"the model writes into {what}"
    if not returned.intersection(aliases.group(node)):
        return None
    if returned.intersection(aliases.group(source)):
        return "an output would become a view of another output"
    if any(item.op in ("placeholder", "get_attr") for item in aliases.group(source)):
        return "an output would become a view of an input or of a tensor of the module"
    return None


def _replace(graph: fx.Graph, node: fx.Node, view: torch._ops.OpOverload) -> str | None:
    """Changes the node's target, and the example values behind it; or changes nothing and returns why."""
    mode = next((v.fake_mode for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, FakeTensor)), None)
    if mode is None:
        return "its result has no example value"
    values: dict[fx.Node, object] = {}
    copy, node.target = node.target, view
    item = node
    reason = None
    while reason is None and item.op != "root":
        if item is node or not values.keys().isdisjoint(item.all_input_nodes):
            reason = _propagate(item, values, mode)
        item = item.next
    if reason is not None:
        node.target = copy
        return reason
    for changed, value in values.items():
        changed.meta["val"] = value
    return None


def _clone_parts(graph: fx.Graph, node: fx.Node, view: torch._ops.OpOverload) -> None:
    if not isinstance(node.meta.get("val"), list | tuple) or any(u.target is not operator.getitem for u in node.users):
        return
    node.target = view
    for part in list(node.users):
        layout = torch.contiguous_format if part.meta["val"].is_contiguous() else torch.preserve_format
        with graph.inserting_after(part):
            clone = graph.call_function(torch.ops.aten.clone.default, (part,), {"memory_format": layout})
        clone.meta = dict(part.meta)
        part.replace_all_uses_with(clone)
        clone.replace_input_with(clone, part)


def _propagate(node: fx.Node, values: dict[fx.Node, object], mode: FakeTensorMode) -> str | None:
    """Computes the node's example value from ``values``, and keeps it there if its layout differs from the old one."""
    if node.op == "output":
        if not values.keys().isdisjoint(node.all_input_nodes):
            return "an output would get other strides"
        return None
    if node.op == "call_module":
        return None
    if not callable(node.target) or isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"{node.name} may depend on the strides"
    if is_mutating(node) or node.meta.get("unbacked_bindings"):
        return f"{node.name} may depend on the strides"
    try:
        # Example values stand in for the arguments, which map_arg's types do not foresee.
        inputs: Any = (node.args, node.kwargs)
        args, kwargs = fx.map_arg(inputs, lambda source: cast(Any, values.get(source, source.meta.get("val"))))
        with mode:
            value = example_result(node.target, args, kwargs)
    except Exception as error:
        return f"{node.name} does not take the view's strides: {str(error).splitlines()[0] if str(error) else error!r}"
    old, new = pytree.tree_leaves(node.meta.get("val")), pytree.tree_leaves(value)
    if len(old) != len(new) or not all(_same_layout(a, b) for a, b in zip(old, new, strict=True)):
        values[node] = value
    return None


def _same_layout(old: object, new: object) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return type(old) is type(new)
    return all(statically_known_true(a == b) for a, b in zip(old.stride(), new.stride(), strict=True))

"""Removes what nothing uses: nodes that only compute, and the tensors and graphs that only they read."""

from __future__ import annotations

import torch
from torch import fx

from untorch.export.mutations import is_mutating
from untorch.export.passes.attributes import remove_attribute
from untorch.export.passes.constants import is_pure
from untorch.export.passes.report import PassReport

__all__ = ["drop_dead_code"]


def drop_dead_code(module: fx.GraphModule) -> PassReport:
    """Runs the pass in place. Writes and checks stay, and so do random numbers and graphs, which the report says."""
    report = PassReport("drop_dead_code")
    for node in reversed(module.graph.nodes):
        if node.users or node.op in ("placeholder", "output", "call_module"):
            continue
        if is_pure(node):
            module.graph.erase_node(node)
            report.changed.append(node.name)
        elif not is_mutating(node) and _has_result(node):
            report.skipped[node.name] = "its result is not used, but it may do more than compute"
    report.changed.reverse()
    used = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
    for target in _attributes(module):
        if not any(name == target or name.startswith(f"{target}.") or target.startswith(f"{name}.") for name in used):
            remove_attribute(module, target)
            report.changed.append(target)
    return report


def _has_result(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or bool(node.target._schema.returns)


def _attributes(module: fx.GraphModule) -> list[str]:
    """Every tensor and every graph of the module and of the plain modules in it, by name, outer graphs first."""
    found = []
    inside: tuple[str, ...] = ()
    for prefix, owner in list(module.named_modules(remove_duplicate=False)):
        if prefix.startswith(inside):
            continue
        if isinstance(owner, fx.GraphModule) and owner is not module:
            found.append(prefix)
            inside = (*inside, f"{prefix}.")
            continue
        names = [*owner._parameters, *owner._buffers]
        names += [name for name, value in vars(owner).items() if isinstance(value, torch.Tensor)]
        found += [f"{prefix}.{name}" if prefix else name for name in names]
    return found

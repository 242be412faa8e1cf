"""flex_attention on the CPU: GEMMs and a softmax, with the functions for scores and masks compiled in between.

Inductor's kernel for CPUs calls libtorch's C++ functions. This is what PyTorch's eager flex_attention computes: the
function of the block mask counts, and not its table of blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from untorch.export.passes.report import PassReport

__all__ = ["decompose_flex_attention"]


def decompose_flex_attention(module: fx.GraphModule) -> PassReport:
    """Replaces each call by PyTorch's own definition of it; what made its table of blocks becomes dead and goes."""
    report = PassReport("decompose_flex_attention")
    target = getattr(torch.ops.higher_order, "flex_attention", None)
    nodes = [node for node in module.graph.nodes if target is not None and node.target is target]
    for node in nodes:
        _decompose(module, node)
        report.changed.append(node.name)
    if nodes:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        module.recompile()
    return report


def _decompose(module: fx.GraphModule, node: fx.Node) -> None:
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.fx.experimental.proxy_tensor import make_fx

    arguments: Any = node.args
    query, key, value, score, block_mask, scale, _, score_buffers, mask_buffers = arguments
    score_mod, mask_mod = module.get_submodule(score.target), module.get_submodule(block_mask[-1].target)
    operands: list[Any] = [query, key, value, *score_buffers, *mask_buffers]
    count = 3 + len(score_buffers)

    def attention(*values: Any) -> Any:
        mask = (*block_mask[:-1], mask_mod)
        q, k, v = values[:3]
        return math_attention(q, k, v, score_mod, mask, scale, {}, values[3:count], values[count:])

    examples = [operand.meta["val"] if isinstance(operand, fx.Node) else operand for operand in operands]
    mode = detect_fake_mode(examples)
    assert mode is not None
    with mode:
        body = make_fx(attention)(*examples)
    _inline(module, node, body, operands)


def _inline(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, operands: list[Any]) -> None:
    """Puts the nodes of ``body`` in the place of a node that gives a tuple."""
    values: dict[fx.Node, Any] = {}
    arguments = iter(operands)
    with module.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(arguments)
            elif inner.op == "output":
                results = fx.map_arg(inner.args[0], lambda n: values[n])
            else:
                copied = values[inner] = module.graph.node_copy(inner, lambda n: values[n])
                if inner.op == "get_attr":
                    copied.target = _attribute(module, f"{node.name}_{inner.target}", getattr(body, inner.target))
                copied.meta = {**inner.meta, "stack_trace": node.meta.get("stack_trace")}
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _attribute(module: fx.GraphModule, name: str, tensor: torch.Tensor) -> str:
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, tensor)
    return name

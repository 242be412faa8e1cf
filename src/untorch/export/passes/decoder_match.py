"""Finds RMSNorms and SwiGLUs by what the graph computes: by evaluating it, not by the form of its nodes.

Operators between two values may only be those of such functions. With random values, for a norm large and small ones,
whose ``eps`` decides, they have to give what the function gives. Then they are that function, whatever the model's code
looks like.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import fx

from untorch.export.passes.constants import Constants
from untorch.export.passes.linear_calls import LinearCall, read_linear
from untorch.export.passes.probes import SHAPE_ONLY, evaluate, operator_name, outline, probe_size, small_numbers

__all__ = ["Norm", "Swiglu", "find_swiglu", "is_check", "match_norm", "reason_no_swiglu"]

_CASTS = {"to", "_to_copy", "type_as", "float", "contiguous", "clone"}
_NORM = {
    *SHAPE_ONLY, *_CASTS, "pow", "square", "mul", "mean", "sum", "div", "add", "rsqrt", "sqrt", "reciprocal",
    "rms_norm", "sym_size",
}  # fmt: skip
_PARTS = {"slice", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
_ACTIVATIONS = {"silu", "sigmoid", "gelu", "relu", "relu6", "tanh", "hardswish", "mish", "leaky_relu", "elu"}
_SWIGLU = {*SHAPE_ONLY, *_CASTS, *_PARTS, *_ACTIVATIONS, "mul", "div", "neg", "exp", "add", "pow", "square", "sym_size"}
# Relative, and of the largest value.
_TOLERANCE = {
    torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6), torch.float16: (6e-3, 1e-4),
    torch.bfloat16: (4e-2, 1e-3),
}  # fmt: skip
_SCALES = (1.0, 1e-3)  # of a norm's probes: in the second one, eps is as large as the mean of squares
_CHECKS = {"_assert_tensor_metadata"}


def is_check(node: fx.Node) -> bool:
    """Whether the node only checks dtype and layout of what it reads."""
    return operator_name(node) in _CHECKS


@dataclass(frozen=True)
class Norm:
    """ends: the nodes, views of each other, that are weight · x / √(mean(x²) + eps) along the last dimension of x.

    nodes: all that compute them, without checks. weight: the node of a constant with one number a column.
    """

    nodes: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]
    weight: fx.Node
    eps: float

    @property
    def readers(self) -> list[fx.Node]:
        """What reads the norm."""
        inside = set(self.nodes)
        return list(
            dict.fromkeys(user for end in self.ends for user in end.users if user not in inside and not is_check(user))
        )


@dataclass(frozen=True)
class Swiglu:
    """What is computed from one linear layer, ``gate_up``, by ``nodes``, the last of which ``down`` reads."""

    down: LinearCall
    gate_up: LinearCall
    nodes: tuple[fx.Node, ...]


def match_norm(x: fx.Node, constants: Constants, known: dict[str, Any]) -> Norm | str:
    """The only RMSNorm of x, or why it has none. known: what was found in other layers, by their outlines."""
    nodes: dict[fx.Node, None] = {}
    leaves: dict[fx.Node, None] = {}
    waiting = [user for user in x.users if not is_check(user)]
    position = {node: i for i, node in enumerate(x.graph.nodes)} if waiting else {}
    while waiting:
        waiting.sort(key=position.__getitem__, reverse=True)
        node = waiting.pop()
        if node in nodes or operator_name(node) not in _NORM:
            continue
        others = [n for n in node.all_input_nodes if n is not x and n not in nodes]
        if not all(constants.is_known(n) or isinstance(n.meta.get("val"), int | torch.SymInt) for n in others):
            continue
        nodes[node] = None
        leaves |= dict.fromkeys(n for n in others if constants.is_known(n))
        waiting += [user for user in node.users if user not in nodes and not is_check(user)]
    ends = [node for node in nodes if any(user not in nodes and not is_check(user) for user in node.users)]
    if not ends:
        return "no RMSNorm of all tokens follows it"
    value = x.meta["val"]
    width = int(value.shape[-1])
    weights = [n for n in leaves if n.meta["val"].numel() == width and n.meta["val"].is_floating_point()]
    if len(weights) != 1:
        return f"what follows it has {len(weights)} constant weights of its width, and an RMSNorm has one"
    key = f"{outline(nodes, (x, *weights))}\n{[list(nodes).index(end) for end in ends]}"
    if key not in known:
        others = [n for n in leaves if n not in weights]
        known[key] = _find_eps(x, list(nodes), ends, weights[0], others, constants)
    found = known[key]
    return found if isinstance(found, str) else Norm(tuple(nodes), tuple(ends), weights[0], found)


def _find_eps(
    x: fx.Node, nodes: list[fx.Node], ends: list[fx.Node], weight: fx.Node, others: list[fx.Node], constants: Constants
) -> float | str:
    """eps of the norm that all ``ends`` are, or why they are none."""
    generator = torch.Generator().manual_seed(0)
    value, given = x.meta["val"], weight.meta["val"]
    factors = torch.randn(tuple(map(probe_size, given.shape)), generator=generator).to(given.device, given.dtype)
    known = {weight: factors, **{node: constants.value(node) for node in others}}
    found = []
    for scale in _SCALES:
        # A mean that is not 0 tells an RMSNorm from a layer norm.
        probe = (torch.randn(tuple(map(probe_size, value.shape)), generator=generator) + 1) * scale
        probe = probe.to(value.device, value.dtype)
        try:
            found.append((probe, evaluate(nodes, known | {x: probe})))
        except Exception as error:
            return f"what follows it cannot be evaluated: {str(error).splitlines()[0]}"
    for eps in small_numbers(nodes):
        if all(_same(results[end], _rms_norm(probe, factors, eps)) for probe, results in found for end in ends):
            return eps
    return "what follows it are not the values of an RMSNorm"


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double().flatten()).to(x.dtype)


def find_swiglu(node: fx.Node) -> Swiglu | str | None:
    """What may be a gated activation between two linear layers, the node being the second; None where nothing is.

    A text says why it is not one that could be one operator. Values are not looked at.
    """
    down = read_linear(node)
    if down is None or read_linear(down.x) is not None:
        return None
    found, waiting, linears = {down.x}, [down.x], set()
    names, foreign = set(), []
    while waiting:
        inner = waiting.pop()
        name = operator_name(inner)
        names.add(name)
        operands = [source for source in inner.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        if inner.op != "call_function" or name not in _SWIGLU or (name == "add" and len(operands) > 1):
            foreign.append(inner)
            if torch.Tag.pointwise not in getattr(inner.target, "tags", ()) or len(operands) > 1:
                continue
        for source in inner.all_input_nodes:
            if source in found or isinstance(source.meta.get("val"), int | torch.SymInt):
                continue
            if read_linear(source) is not None:
                linears.add(source)
                continue
            found.add(source)
            waiting.append(source)
    if not names & {"mul"} or not names & {*_ACTIVATIONS, "exp"}:
        return None
    if foreign:
        return f"{foreign[0].name} is no part of a SwiGLU"
    if len(linears) != 1:
        return "gate and up are no merged linear layer"
    [gate_up] = linears
    call = read_linear(gate_up)
    assert call is not None
    return Swiglu(down, call, tuple(n for n in node.graph.nodes if n in found))


def reason_no_swiglu(swiglu: Swiglu, known: dict[str, Any]) -> str | None:
    """Why the values between the two layers are not silu(gate) · up, if they are not. known: as of ``match_norm``."""
    inside = {*swiglu.nodes, swiglu.down.node}
    for node in (swiglu.gate_up.node, *swiglu.nodes):
        if any(user not in inside and not is_check(user) for user in node.users):
            return f"{node.name}, between gate, up and down, is also read by something else"
    key = outline(swiglu.nodes, (swiglu.gate_up.node,))
    if key not in known:
        known[key] = _reason_no_swiglu(swiglu)
    reason: str | None = known[key]
    return reason


def _reason_no_swiglu(swiglu: Swiglu) -> str | None:
    value = swiglu.gate_up.node.meta["val"]
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(tuple(map(probe_size, value.shape)), generator=generator).mul_(2).to(value.device, value.dtype)
    try:
        result = evaluate(swiglu.nodes, {swiglu.gate_up.node: probe})[swiglu.down.x]
    except Exception as error:
        return f"its input cannot be evaluated: {str(error).splitlines()[0]}"
    first, second = probe.double().chunk(2, -1)
    if _same(result, (F.silu(first) * second).to(value.dtype)):
        return None
    if _same(result, (F.silu(second) * first).to(value.dtype)):
        return "the rows of the up projection come before those of the gate"
    return "its input is not silu(gate) · up"


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the values are the same in the same order, as another shape too."""
    if found.numel() != expected.numel() or found.dtype != expected.dtype or found.dtype not in _TOLERANCE:
        return False
    relative, absolute = _TOLERANCE[found.dtype]
    largest = float(expected.double().abs().max())
    return math.isfinite(largest) and torch.allclose(
        found.double().flatten(), expected.double().flatten(), rtol=relative, atol=absolute * largest
    )

"""Equal layers of a graph become calls of one function, which Inductor compiles once.

A decoder of 36 layers is 36 times the same graph with other weights. Inductor lowers, schedules and writes each of
them, and the C++ compiler compiles each of them. ``outline_layers`` finds sequences of nodes that occur several times,
gives the first one a graph of its own whose inputs are what it reads, weights too, and replaces each by a call (the
higher-order operator ``invoke_subgraph``). patches/layers.py makes a C++ function of that graph.

What is done before, AOTAutograd and Inductor's passes, sees a few of the layers alone: see shortening.py.

It changes the graph that Inductor is about to lower: nothing is functional there any more, so a layer may write into
what it is given (a KV cache), which Inductor is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from untorch.export.outline.calls import MAY_BE_UNALIGNED, OWN_NUMBERS, WRITTEN_OPERANDS, make_calls
from untorch.export.outline.equal import FEWEST_CALLS, Body, find_layers
from untorch.export.outline.gather import gather
from untorch.export.outline.shortening import LengthenError, Shortened, lengthen, shorten

__all__ = [
    "FEWEST_CALLS", "MAY_BE_UNALIGNED", "OWN_NUMBERS", "WRITTEN_OPERANDS", "LengthenError", "Outlined", "Shortened",
    "lengthen", "outline_layers", "shorten",
]  # fmt: skip


@dataclass(frozen=True)
class Outlined:
    """A function that was made: its name, how many nodes it has, and how often it is called."""

    name: str
    nodes: int
    calls: int


def outline_layers(module: fx.GraphModule) -> list[Outlined]:
    """Replaces equal sequences of nodes by calls, in place. ``module`` is what Inductor lowers."""
    outlined: list[Outlined] = []
    gather(module.graph)
    taken: set[fx.Node] = set()
    while True:
        layers = find_layers(Body.of(module.graph, taken))
        if layers is None:
            break
        name = f"layer_{len(outlined)}"
        taken |= make_calls(module, name, layers)
        outlined.append(Outlined(name, len(layers[0].nodes), len(layers)))
    if outlined:
        module.graph.lint()
        module.recompile()
    return outlined

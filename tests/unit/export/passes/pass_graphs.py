"""What the tests of the passes share: an unlifted graph, its targets in short, and results of an exported file."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import untorch
from untorch.export import export
from untorch.export.verify import to_numpy


def unlift(model: nn.Module, *args: Any, dynamic: Any = None) -> fx.GraphModule:
    """The graph that the passes get."""
    with torch.no_grad():
        module = torch.export.export(model.eval(), args, dynamic_shapes=dynamic).module()
    assert isinstance(module, fx.GraphModule)
    return module


def targets(module: fx.GraphModule) -> list[str]:
    """The graph's calls and attributes in order: "mul.Tensor", "self.weight"."""
    found = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            found.append(f"self.{node.target}")
        elif node.op == "call_function":
            name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
            found.append(name.removeprefix("aten.").removesuffix(".default"))
    return found


def close(module: fx.GraphModule) -> None:
    """What run_passes does behind its passes."""
    module.graph.lint()
    module.recompile()


def assert_same(got: Any, expected: Any, **tolerance: float) -> None:
    """Bitwise, if no tolerance is given; dtypes, shapes and strides too."""
    got, expected = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def exported(model: nn.Module, args: Sequence[Any], folder: Path, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """The flat outputs of the exported file, and the report of its method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = export(copy.deepcopy(model).eval(), tuple(args), folder / "model.pt2", progress=False, **options)
    with untorch.load(folder / "model.pt2") as program:
        results = program(*(to_numpy(value) for value in args))
        values = [torch.from_numpy(value).clone() for value in pytree.tree_leaves(results)]
    return values, report.methods["forward"]

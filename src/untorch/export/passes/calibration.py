"""Calibration: a method's graph runs the calibration batches, and observers see the values that will be quantised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.export.errors import CompileError
from untorch.export.mutations import find_mutations
from untorch.export.passes.attributes import attribute
from untorch.quant.observers import Observer, make_observer
from untorch.quant.options import QuantizeOptions
from untorch.quant.report import LayerReport

__all__ = ["PLAN", "CalibrationPlan", "observe"]

# Where a module's ``meta`` has its plan.
PLAN = "untorch_calibration"


@dataclass
class CalibrationPlan:
    """What the pass ``quantize_activations`` needs, and what it did.

    excluded: modules that stay as they are, by name, with the reason.
    show: is told which batch runs.
    layers, skipped: the convolutions, for the method's QuantizationReport.
    """

    options: QuantizeOptions
    excluded: dict[str, str] = field(default_factory=dict)
    show: Callable[[str], None] = lambda where: None
    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def observe(module: fx.GraphModule, nodes: Iterable[fx.Node], plan: CalibrationPlan) -> dict[fx.Node, Observer]:
    """Runs the plan's batches through the graph; gives each node's observer. The module's tensors stay as they are.

    Raises CompileError: there is no batch, one does not fit the method's inputs, or a value of it has no finite number.
    """
    options = plan.options
    observers = {node: make_observer(options.observer, options.percentile) for node in nodes}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    batches = list(options.calibration)
    if not batches:
        raise CompileError("option quantize: calibration: expected at least one batch, got none")
    runner = _Runner(module, observers)
    with torch.no_grad(), _unchanged(module):
        for number, batch in enumerate(batches, 1):
            plan.show(f"calibrate: batch {number} of {len(batches)}")
            values = _leaves(batch)
            expected = [node for node in inputs if node.meta.get("val") is not None]
            if len(values) != len(inputs):
                raise CompileError(
                    f"option quantize: calibration: batch {number}: expected {len(inputs)} inputs "
                    f"({', '.join(node.name for node in inputs)}), got {len(values)}"
                )
            for node, value in zip(expected, values, strict=False):
                _check(number, node, value)
            try:
                runner.number = number
                runner.run(*values, enable_io_processing=False)
            except CompileError:
                raise
            except Exception as error:
                raise CompileError(
                    f"option quantize: calibration: batch {number} does not run through the graph: "
                    f"{str(error).splitlines()[0]}: give batches with the shapes of the example inputs, or "
                    f"dynamic_shapes"
                ) from error
    return observers


class _Runner(fx.Interpreter):
    """Runs the graph and shows observers their nodes' values. number: of the batch."""

    number = 0

    def __init__(self, module: fx.GraphModule, observers: Mapping[fx.Node, Observer]) -> None:
        super().__init__(module)
        self._observers = observers

    def run_node(self, node: fx.Node) -> Any:
        # What torch.export checks about the example inputs is no concern of a batch.
        value: Any = None if node.op == "call_module" else super().run_node(node)
        if isinstance(value, torch.Tensor) and node in self._observers:
            if value.numel() and not bool(torch.isfinite(value).any()):
                raise CompileError(
                    f"option quantize: calibration: batch {self.number}: {node.name}: expected finite values, "
                    f"of which a range can be made, got none in {list(value.shape)}: check the batch"
                )
            self._observers[node].update(value)
        return value


def _leaves(batch: Any) -> list[Any]:
    """The flat inputs of a batch, as the graph has them."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return pytree.tree_leaves(((), dict(batch)))
    return pytree.tree_leaves((tuple(batch), {}))


def _check(number: int, node: fx.Node, value: Any) -> None:
    expected = node.meta["val"]
    if not isinstance(expected, torch.Tensor):
        return
    same = isinstance(value, torch.Tensor) and value.dtype == expected.dtype and value.dim() == expected.dim()
    if not same or any(isinstance(b, int) and a != b for a, b in zip(value.shape, expected.shape, strict=True)):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        wanted = f"{expected.dtype} {[str(size) for size in expected.shape]}".replace("'", "")
        raise CompileError(f"option quantize: calibration: batch {number}: {node.name}: expected {wanted}, got {got}")


@contextlib.contextmanager
def _unchanged(module: fx.GraphModule) -> Iterator[None]:
    """Takes back what the graph writes into the module's tensors."""
    kept = {name: attribute(module, name).detach().clone() for name in find_mutations(module.graph).attributes}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                attribute(module, name).copy_(value)

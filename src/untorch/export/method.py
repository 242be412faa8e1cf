"""``Method``: one method of a file for one target, from what the caller gave to what is written.

Stages take a Method and return one, in turn: planned (``methods.plan_methods``), quantised
(``quantize.quantize_methods``), moved (``move.Movers``), traced (``tracing.trace_method``), compiled
(``compile.begin_compile``), written and verified (``exporter.export``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import torch
from torch import fx

from untorch.export.mutations import Mutations
from untorch.export.options import ExportOptions
from untorch.export.passes.calibration import CalibrationPlan
from untorch.export.passes.report import PassReport
from untorch.export.size_guards import SizeGuard
from untorch.export.target import CpuTarget, Produced, Target
from untorch.export.verify import OutputDifference
from untorch.export.weights import Constant
from untorch.quant.report import QuantizationReport

__all__ = ["Compiled", "Method", "MethodReport", "Traced"]


@dataclass(frozen=True)
class MethodReport:
    """What was made of one method. ``differences`` is filled by verify=True, one entry an output.

    ``quantization`` is what the option quantize did to it, None if it did not.
    """

    name: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any] | None]
    operators: list[str] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    differences: list[OutputDifference] = field(default_factory=list)
    quantization: QuantizationReport | None = None


@dataclass(frozen=True)
class Traced:
    """A method as a graph, with its tensors as attributes of ``module``, which the passes change.

    refusal: what torch.export said with PyTorch's fused attention, where it refused the method for that.
    notes: what was traced otherwise than asked for, for the report.
    guards: the conditions on sizes that the compiled code checks.
    """

    program: torch.export.ExportedProgram
    module: fx.GraphModule
    refusal: str | None = None
    notes: list[str] = field(default_factory=list)
    guards: list[SizeGuard] = field(default_factory=list)


@dataclass(frozen=True)
class Compiled:
    """A method's code and constants, ready to be written.

    files: the entries of the archive by name; library and extern_nodes are two of the names.
    features: the CPU features that the host code needs.
    kernel_calls: what the profiler knows of the code's calls, as JSON.
    """

    files: dict[str, bytes]
    library: str
    extern_nodes: str | None
    constants: list[Constant]
    mutations: Mutations
    features: list[str]
    produced: Produced
    kernel_calls: bytes | None = None


_Record = TypeVar("_Record")


class _Stage(Generic[_Record]):
    """An attribute that one stage sets once, and that must not be read before."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, method: None, owner: type) -> _Stage[_Record]: ...

    @overload
    def __get__(self, method: Method, owner: type) -> _Record: ...

    def __get__(self, method: Method | None, owner: type) -> _Stage[_Record] | _Record:
        if method is None:
            return self
        assert self._name in vars(method), f"method {method.name!r}: {self._name} is not set yet"
        record: _Record = vars(method)[self._name]
        return record

    def __set__(self, method: Method, record: _Record) -> None:
        assert self._name not in vars(method), f"method {method.name!r}: {self._name} is set already"
        vars(method)[self._name] = record


@dataclass
class Method:
    """One method for one target; several targets of one name are several Methods.

    name, model, args, kwargs, dynamic_shapes: as the caller gave them. Quantising and moving make Methods with copies.
    options, target: what it is compiled with and for.
    quantization: what the option quantize did to its module.
    calibration: the batches that static int8 is calibrated with when it is compiled.
    defers_guards: where torch.export would constrain a dynamic size, the constraint is checked when the method runs.
    traced, compiled, report: the records of the stages of these names.
    """

    name: str
    model: torch.nn.Module | torch.export.ExportedProgram
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    dynamic_shapes: Any = None
    options: ExportOptions = field(default_factory=ExportOptions)
    target: Target = field(default_factory=CpuTarget)
    quantization: QuantizationReport | None = None
    calibration: CalibrationPlan | None = None
    defers_guards: bool = False

    traced = _Stage[Traced]()
    compiled = _Stage[Compiled]()
    report = _Stage[MethodReport]()

    @property
    def module(self) -> fx.GraphModule:
        """The traced graph, which the passes change and AOTInductor compiles."""
        return self.traced.module

    @property
    def program(self) -> torch.export.ExportedProgram:
        """The exported program."""
        return self.traced.program

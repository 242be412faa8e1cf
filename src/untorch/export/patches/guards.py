"""Patches of AOTInductor: conditions on sizes that the generated code checks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from untorch.export.patches.registry import patch, replaced
from untorch.export.size_guards import SizeGuard

__all__ = ["checked_sizes"]


@patch(
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_inputs",
    versions="2.11–2.15",
    why="AOTInductor drops the guards of a program: code that was traced with an even size takes an odd one, and gives "
    "the results of another branch.",
    test="test_guards.py::test_torch_still_drops_guards",
)
@contextlib.contextmanager
def checked_sizes(guards: Sequence[SizeGuard]) -> Iterator[None]:
    """A call with sizes that break one of the guards is an error."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    original: Any = CppWrapperCpu.codegen_inputs

    def codegen_inputs(self: Any) -> None:
        original(self)
        if V.graph.is_const_graph or V.graph.name:  # neither constants nor a branch's graph has the inputs
            return
        for guard in guards:
            condition = self.codegen_cpp_sizevar(guard.expression, simplify=False)
            text = json.dumps(
                f"the sizes of the inputs: expected {guard.brief}, as for the example inputs; the model does something "
                f"else otherwise: export it with examples of these sizes"
            )
            self.prefix.writeline(f"AOTI_TORCH_CHECK({condition}, {text});")

    with replaced(CppWrapperCpu, "codegen_inputs", codegen_inputs):
        yield

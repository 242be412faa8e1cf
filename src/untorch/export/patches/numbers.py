"""Patches of AOTInductor for Python numbers: inputs that vary, and bounds of slices that a model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from untorch.export.patches.registry import patch, replaced

__all__ = ["open_slices", "varying_numbers"]


@patch(
    "torch._inductor.compile_fx._extract_inputs_from_exported_gm",
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.generate_input_output_runtime_checks",
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_model_constructor",
    versions="2.13–2.15",
    why="AOTInductor reads a Python int that varies from a tensor without dimensions, but takes no graph that has one: "
    "it becomes None, and asserts forbid it in tables of names and in checks that the loader makes itself.",
    test="test_numbers.py::test_torch_still_refuses_numbers",
)
@contextlib.contextmanager
def varying_numbers() -> Iterator[None]:
    """Graphs may have inputs that are ints."""
    import sympy  # type: ignore[import-untyped]
    from torch._inductor import compile_fx
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V

    checks: Any = CppWrapperCpu.generate_input_output_runtime_checks
    constructor: Any = CppWrapperCpu.codegen_model_constructor

    def numbers() -> dict[str, Any]:
        return {name: value for name, value in V.graph.graph_inputs.items() if isinstance(value, sympy.Expr)}

    def extract(module: torch.fx.GraphModule, examples: Any) -> Any:
        values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
        kept = [value if isinstance(value, torch.Tensor | torch.SymInt) else None for value in values]
        return kept if any(value is not None for value in kept) else examples

    def generate_checks(self: Any) -> None:
        if not numbers():
            checks(self)
            return
        self.prefix.splice_aot(
            """
            static bool _check_aoti_runtime_check_inputs_env() { return false; }
            static void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
            """
        )

    def generate_constructor(self: Any) -> None:
        found = numbers()
        V.graph.graph_inputs.update(dict.fromkeys(found))
        try:
            constructor(self)
        finally:
            V.graph.graph_inputs.update(found)

    with (
        replaced(compile_fx, "_extract_inputs_from_exported_gm", extract),
        replaced(CppWrapperCpu, "generate_input_output_runtime_checks", generate_checks),
        replaced(CppWrapperCpu, "codegen_model_constructor", generate_constructor),
    ):
        yield


@patch(
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_dynamic_slice_size",
    versions="2.11–2.15",
    why="The code that computes the size of x[:n.item()] has the word None where the slice has no other bound: it does "
    "not compile.",
    test="test_numbers.py::test_torch_still_writes_none_into_code",
)
@contextlib.contextmanager
def open_slices() -> Iterator[None]:
    """A slice without a start begins at 0, and one without an end ends with its dimension."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    original: Any = CppWrapperCpu.codegen_dynamic_slice_size

    def codegen(self: Any, node: Any) -> None:
        node.start = 0 if node.start is None else node.start
        node.end = node.size if node.end is None else node.end
        original(self, node)

    with replaced(CppWrapperCpu, "codegen_dynamic_slice_size", codegen):
        yield

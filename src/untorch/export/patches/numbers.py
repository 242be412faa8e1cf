"""Patches of AOTInductor for inputs that are numbers: torch generates code for them, and its front refuses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from untorch.export.patches.registry import patch, replaced

__all__ = ["varying_numbers"]


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

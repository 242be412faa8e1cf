"""Programmatic dependent launch of Triton kernels: their sources, and what torch's launcher lacks."""

from __future__ import annotations

import ast

import pytest

from untorch.export.patches.launches import dependent_launches, with_dependent_launch

HEAD = "import triton\nimport triton.language as tl\n\n@triton.jit\ndef helper(x):\n    return x + 1\n\n"
DECORATORS = "@triton_heuristics.pointwise(size_hints={'x': 8})\n@triton.jit\n"
BEGIN = ["tl.extra.cuda.gdc_launch_dependents()", "tl.extra.cuda.gdc_wait()"]


def body_of(source: str) -> list[str]:
    kernel = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "k")
    return [ast.unparse(statement) for statement in kernel.body]


def test_torch_still_launches_without_the_attribute() -> None:
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    plain = CUDADeviceOpOverrides().kernel_driver()
    assert "cuLaunchKernel(" in plain
    assert "PROGRAMMATIC" not in plain
    before = DeferredTritonCallWrapper.generate_launch_kernel
    with dependent_launches():
        text = CUDADeviceOpOverrides().kernel_driver()
        assert text.startswith(plain)
        assert "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION" in text
        assert DeferredTritonCallWrapper.generate_launch_kernel is not before
    assert CUDADeviceOpOverrides().kernel_driver() == plain
    assert DeferredTritonCallWrapper.generate_launch_kernel is before


@pytest.mark.parametrize(("docstring", "expected"), [("", []), ('    """What it is."""\n', ["'What it is.'"])])
def test_the_kernel_waits_before_all_else(docstring: str, expected: list[str]) -> None:
    quotes = '"""'
    docstring = docstring.replace('"""', quotes)
    source = f"{HEAD}{DECORATORS}def k(\n    x, N: tl.constexpr,\n):\n{docstring}    y = helper(x)\n    z = y\n"
    changed = with_dependent_launch(source)
    assert changed is not None
    assert [line.replace('"""', "'") for line in body_of(changed)[: len(expected)]] == expected
    assert body_of(changed)[len(expected) :] == [*BEGIN, "y = helper(x)", "z = y"]


def test_a_source_that_is_escaped() -> None:
    """As Inductor writes kernels of users between three quotes."""
    source = DECORATORS + 'def k(x):\n    \\"\\"\\"Of one: "a\\\\b".\\"\\"\\"\n    y = x\n'
    changed = with_dependent_launch(source)
    assert changed is not None
    assert changed.startswith(DECORATORS + 'def k(x):\n    \\"\\"\\"Of one')
    assert body_of(ast.literal_eval(f"'''{changed}'''"))[1:] == [*BEGIN, "y = x"]


@pytest.mark.parametrize("source", [
    HEAD,  # nothing that Inductor launches
    DECORATORS + "def k(x): y = x\n",
    DECORATORS + "def k(x)\n    y = x\n",
    "x = 1\\\n+ 1\n" + DECORATORS + "def k(x):\n    y = x\n",  # lines that the quotes would join
])  # fmt: skip
def test_sources_that_stay(source: str) -> None:
    assert with_dependent_launch(source) is None

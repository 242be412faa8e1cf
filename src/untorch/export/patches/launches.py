"""A patch for GPUs from sm_90 on: the model's Triton kernels are launched with programmatic dependent launch (PDL)."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

from untorch.export.patches.registry import patch, replaced

__all__ = ["dependent_launches", "with_dependent_launch"]

_BEGIN = ("tl.extra.cuda.gdc_launch_dependents()", "tl.extra.cuda.gdc_wait()")

# Drivers before CUDA 12.3 do not capture such launches in graphs.
_LAUNCHER = """
[[maybe_unused]] static void launchDependentKernel(
        CUfunction func, uint32_t gridX, uint32_t gridY, uint32_t gridZ, uint32_t numWarps, uint32_t sharedMemBytes,
        void* args[], cudaStream_t stream) {
    static const bool captured = [] {
        int version = 0;
        return cuDriverGetVersion(&version) == CUDA_SUCCESS && version >= 12030;
    }();
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = gridX;
    config.gridDimY = gridY;
    config.gridDimZ = gridZ;
    config.blockDimX = 32 * numWarps;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = sharedMemBytes;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = captured ? 1 : 0;
    CUDA_DRIVER_CHECK(cuLaunchKernelEx(&config, func, args, nullptr));
}
"""


def with_dependent_launch(source: str) -> str | None:
    """The source of a kernel, as it is between three quotes, that lets the next kernel start and then waits for the one
    before it; None where the kernel is not found in it.

    All that the kernel reads and writes comes after the wait. The next kernel waits for this one's end, and so for the
    end of all before it.
    """
    try:
        text = ast.literal_eval(f"'''{source}'''")
        tree = ast.parse(text)
    except SyntaxError:
        return None
    lines = source.split("\n")
    if len(lines) != len(text.split("\n")):
        return None
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if not any("triton_heuristics" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
            first = node.body[1]  # behind the docstring
        if first.lineno == node.lineno:
            return None
        at = first.lineno - 1
        lines[at:at] = [" " * first.col_offset + line for line in _BEGIN]
        return "\n".join(lines)
    return None


@patch(
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.define_kernel",
    "torch._inductor.codegen.cpp_wrapper_gpu.DeferredTritonCallWrapper.generate_launch_kernel",
    "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.kernel_driver",
    versions="2.11–2.15",
    why="Generated C++ launches each kernel behind the end of the one before it, also with triton.enable_pdl: about a "
    "microsecond in which the GPU reads nothing.",
    test="test_launches.py::test_torch_still_launches_without_the_attribute",
)
@contextlib.contextmanager
def dependent_launches() -> Iterator[None]:
    """Triton kernels, of Inductor and of operators, start while the kernel before them ends."""
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    define: Any = PythonWrapperCodegen.define_kernel
    generate: Any = DeferredTritonCallWrapper.generate_launch_kernel
    driver: Any = CUDADeviceOpOverrides.kernel_driver
    dependent: set[str] = set()

    def define_kernel(
        self: Any, kernel_name: str, kernel_body: str, metadata: str | None = None, gpu: bool = True, *rest: Any,
        **more: Any,
    ) -> None:  # fmt: skip
        before, quotes, inside = kernel_body.partition("'''")
        source, end, after = inside.rpartition("'''")
        if gpu and before.strip().startswith("async_compile.triton(") and end:
            changed = with_dependent_launch(source)
            if changed is not None:
                kernel_body = before + quotes + changed + end + after
                dependent.add(kernel_name)
        define(self, kernel_name, kernel_body, metadata, gpu, *rest, **more)

    def generate_launch_kernel(self: Any, prefix: Any, wrapper: Any, kernel_var_name: str, params: Any) -> None:
        known = len(prefix._lines)
        generate(self, prefix, wrapper, kernel_var_name, params)
        if params["inductor_meta"]["kernel_name"] not in dependent:
            return
        for i, line in enumerate(prefix._lines[known:], known):
            if isinstance(line, str) and line.lstrip().startswith("launchKernel("):
                prefix._lines[i] = line.replace("launchKernel(", "launchDependentKernel(", 1)

    with (
        replaced(PythonWrapperCodegen, "define_kernel", define_kernel),
        replaced(DeferredTritonCallWrapper, "generate_launch_kernel", generate_launch_kernel),
        replaced(CUDADeviceOpOverrides, "kernel_driver", lambda self: driver(self) + _LAUNCHER),
    ):
        yield

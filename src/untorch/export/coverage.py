"""Does the runtime have everything that a compiled model calls? All gaps at once, each with the user's source line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from untorch.export.errors import UnsupportedOperatorsError
from untorch.export.library import runtime_functions
from untorch.ops import byte_max_pool, int8_convolution, packed_convolution, packed_linear, w8a8
from untorch.runtime.coverage import has_kernel, names_for_models
from untorch.runtime.errors import UnsupportedError
from untorch.runtime.unsupported import BUILT_WITHOUT_CUDA, UNSUPPORTED_SHIMS, has_cuda_kernels

__all__ = [
    "FIRST_WITH_FP8",
    "FIRST_WITH_INT8",
    "MissingOperator",
    "called_function",
    "find_missing",
    "origins_in_wrapper",
    "refuse_complex_convolutions",
    "refuse_custom_operators",
    "refuse_other_devices",
    "sm_number",
    "source_line",
    "source_place",
]

_SOURCE_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_SHIM_CALL = re.compile(r"\b((?:aoti_torch|torch)_\w+)\(")
_PROXY_CALL = re.compile(r"aoti_torch_proxy_executor_call_function\(\s*proxy_executor\s*,\s*(\d+)")
_FOR_CPUS = {
    "untorch.int8_linear.default": (
        "linear layers in int8 for CPUs (Int8Linear)",
        "leave it to export(…, quantize='int8'), or quantise with target='cuda', which makes those for GPUs",
    ),
    "untorch.w4a8_linear.default": (
        "int4 layers with activations in int8",
        "leave int8_activations out, which keeps activations in floating point",
    ),
    "untorch.nvfp4_int8_linear.default": (
        "NVFP4 layers with activations in int8",
        "leave int8_activations out, which keeps activations in floating point",
    ),
}
# The first GPUs whose kernels multiply W8A8 layers, sm_…
FIRST_WITH_INT8, FIRST_WITH_FP8 = 80, 89
_CONVOLUTION = re.compile(r"aten\._?conv(olution|\d)|aten\.conv_transpose")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')
_LIBRARY_CODE = (
    "/torch/",
    "/site-packages/",
    "/dist-packages/",
    "/untorch/export/",
    "/untorch/ops/",
    "/untorch/quant/",
    "/untorch/torch_compile/",
    "<",
)
# Namespaces of PyTorch's operators, and ours, all of which Inductor knows.
_OF_TORCH = frozenset({
    "aten", "export", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "prims",
    "quantized", "quantized_decomposed", "rngprims", "sparse", "untorch", "_native", "_quantized",
})  # fmt: skip
# Operators that call an object of this process (untorch.torch_compile), and those whose weights are tensors.
_TENSOR_OPERATORS = {
    "untorch::run_linear": "untorch::nvfp4_linear",
    "untorch::run_moe": "untorch::nvfp4_moe",
}
# A declaration may give a function another symbol; calls use the function's name.
_RENAMED = (packed_convolution, packed_linear, int8_convolution, byte_max_pool)
_SYMBOLS = dict(re.findall(r'(\w+)\([^)]*\) __asm__\("(\w+)"\)', "".join(operator.C_SHIM for operator in _RENAMED)))


@dataclass(frozen=True)
class MissingOperator:
    """One thing that the runtime lacks.

    ``kind`` is "shim" (a C function), "kernel" (an operator without one, on the CPU), or "cuda kernel" (likewise, on
    CUDA).
    """

    kind: str
    name: str
    sources: tuple[str, ...] = ()

    @property
    def todo(self) -> str:
        """Why it is missing, and what to do."""
        if self.kind != "shim" and (instead := _tensor_operator(self.name)):
            return (
                f"it calls a runner, an object of the process that registered it, which a file cannot hold; call "
                f"{instead}, whose weights are tensors"
            )
        if self.kind == "kernel":
            advice = f'register a kernel with untorch.register_kernel("{self.name}", fn), or change the model'
            return f"it has no C shim and no registered kernel; {advice}"
        if self.kind == "cuda kernel":
            return (
                "it has no C shim and no kernel for CUDA; register one that works on arrays on the GPU with "
                f'untorch.register_kernel("{self.name}", fn, device="cuda"), change the model, or export it for the CPU'
            )
        if reason := UNSUPPORTED_SHIMS.get(self.name):
            return f"{reason}; change the model"
        if self.name.startswith("aoti_torch_cuda_") and not _has_cuda_shims():
            return BUILT_WITHOUT_CUDA
        return "libuntorch.so does not have it; change the model, or update untorch"

    def __str__(self) -> str:
        where = f" ({'; '.join(self.sources)})" if self.sources else ""
        what = "C function" if self.kind == "shim" else "operator"
        return f"{what} {self.name}{where}: {self.todo}"


def origins_in_wrapper(source: str) -> tuple[dict[str, set[str]], dict[int, set[str]]]:
    """From the generated wrapper: C function → names of graph nodes, and index of an external call → names.

    Inductor writes the source nodes of each call as a comment above it.
    """
    shims: dict[str, set[str]] = {}
    externals: dict[int, set[str]] = {}
    names: set[str] = set()
    for line in source.splitlines():
        if match := _SOURCE_NODES.search(line):
            names = {name.strip() for name in match[1].split(",") if name.strip()}
        elif match := _PROXY_CALL.search(line):
            externals.setdefault(int(match[1]), set()).update(names)
        else:
            for name in _SHIM_CALL.findall(line):
                shims.setdefault(_SYMBOLS.get(name, name), set()).update(names)
    return shims, externals


def source_line(node: fx.Node) -> str | None:
    """The innermost line of the user's own code that made the node, as "file:line: text"."""
    if (frame := _own_frame(node)) is None:
        return None
    path, line, _, text = frame
    return f"{path}:{line}" + (f": {text.strip()}" if text else "")


def source_place(node: fx.Node) -> str | None:
    """The same without the text: "file:line". Where all is library code, of the library above torch."""
    trace = node.meta.get("stack_trace")
    frames = [frame for frame in _FRAME.findall(trace) if "/torch/" not in frame[0]] if trace else []
    frame = next((f for f in reversed(frames) if not any(part in f[0] for part in _LIBRARY_CODE)), None)
    frame = frame or (frames[-1] if frames else _own_frame(node))
    return None if frame is None else f"{frame[0]}:{frame[1]}"


def called_function(name: str) -> str:
    """The symbol of a C function that generated code calls by this name."""
    return str(_SYMBOLS.get(name, name))


def _own_frame(node: fx.Node) -> tuple[str, str, str, str] | None:
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if trace else []
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARY_CODE)] or frames
    return own[-1] if own else None


def refuse_complex_convolutions(graph: fx.Graph, where: str) -> None:
    """Raises UnsupportedError for a convolution of complex numbers: Inductor ends with an AssertionError there."""
    for node in graph.nodes:
        if node.op != "call_function" or not _CONVOLUTION.match(str(node.target)):
            continue
        values = [value for other in node.all_input_nodes if isinstance(value := other.meta.get("val"), torch.Tensor)]
        dtype = next((value.dtype for value in values if value.dtype.is_complex), None)
        if dtype is not None:
            line = source_line(node)
            raise UnsupportedError(
                f"{where}: operator {node.target} of {str(dtype).removeprefix('torch.')}"
                + (f" ({line})" if line else "")
                + ": there is no convolution of complex numbers. Write it with real and imaginary parts: "
                "torch.complex(conv(x.real, w.real) - conv(x.imag, w.imag), "
                "conv(x.real, w.imag) + conv(x.imag, w.real))"
            )


def refuse_other_devices(graph: fx.Graph, where: str, device: str, architecture: str | None) -> None:
    """Raises UnsupportedError for quantised layers that the method's device has no kernels for."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reason = _for_gpus(node, device, architecture)
        if device != "cpu" and (layer := _FOR_CPUS.get(str(node.target))) is not None:
            reason = f"{layer[0]} have no kernel for GPUs: {layer[1]}"
        if reason:
            line = source_line(node)
            raise UnsupportedError(f"{where}: operator {node.target}" + (f" ({line})" if line else "") + f": {reason}")


def refuse_custom_operators(graph: fx.Graph, where: str, device: str) -> None:
    """Raises UnsupportedOperatorsError for operators of other libraries than PyTorch that nothing serves.

    PyTorch's own are left to the code that Inductor generates.
    """
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or _may_compile(target):
            continue
        name = _operator_name(target)
        if not has_kernel(name, device):
            found.setdefault(name, []).extend(filter(None, [source_line(node)]))
    kind = "kernel" if device == "cpu" else "cuda kernel"
    raise_if_missing([MissingOperator(kind, name, tuple(dict.fromkeys(lines))) for name, lines in found.items()], where)


def _may_compile(target: torch._ops.OpOverload) -> bool:
    """Whether Inductor may have code, another operator or a C function for the operator."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    if target.namespace in _OF_TORCH or target in lowerings or target in decompositions or target.py_kernels:
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(_operator_name(target), "CompositeImplicitAutograd")


def _operator_name(target: torch._ops.OpOverload) -> str:
    """As extern nodes have it: "namespace::operator", with the overload's name unless it is the default one."""
    name: str = target._schema.name
    return name if target._overloadname == "default" else f"{name}.{target._overloadname}"


def sm_number(architecture: str | None) -> int:
    """89 for "sm_89"; a large one where the architecture is not known."""
    return 1 << 30 if architecture is None else int(architecture.removeprefix("sm_").rstrip("af"))


def _for_gpus(node: fx.Node, device: str, architecture: str | None) -> str:
    """Why the target cannot multiply a W8A8 layer, or ""."""
    if node.target != w8a8.OPERATOR:
        return ""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
    is_int8 = isinstance(weight, fx.Node) and weight.meta["val"].dtype == torch.int8
    layers = f"linear layers in {'int8' if is_int8 else 'fp8'} for GPUs (W8A8Linear)"
    if device == "cpu":
        return (
            f"{layers} have no kernel for CPUs: export it with device='cuda', or quantise the model in floating point "
            "with export(…, quantize='int8')"
        )
    first = FIRST_WITH_INT8 if is_int8 else FIRST_WITH_FP8
    return (
        ""
        if sm_number(architecture) >= first
        else f"{layers} need sm_{first} or newer, and the method is for {architecture}"
    )


def find_missing(
    symbols: Iterable[str],
    extern_nodes: str | None,
    available: frozenset[str],
    *,
    wrapper: str | None = None,
    nodes: Mapping[str, fx.Node] | None = None,
    device: str = "cpu",
) -> list[MissingOperator]:
    """What of ``symbols`` and of the operators in the extern nodes JSON the runtime does not have on ``device``."""
    lines = dict(sources_of(symbols := list(symbols), kernel_targets(extern_nodes), wrapper, nodes))
    callable_names = names_for_models(available)
    missing = [MissingOperator("shim", name, lines[name]) for name in symbols if name not in callable_names]
    kind = "kernel" if device == "cpu" else "cuda kernel"
    return missing + [
        MissingOperator(kind, target, lines[target])
        for target in dict.fromkeys(kernel_targets(extern_nodes))
        if _tensor_operator(target) or not has_kernel(target, device)
    ]


def function_calls(wrapper: str) -> list[str]:
    """The C functions that a generated wrapper calls; those that it only declares are not among them."""
    lines = (line for line in wrapper.splitlines() if not line.lstrip().startswith("extern "))
    return sorted({_SYMBOLS.get(name, name) for line in lines for name in _SHIM_CALL.findall(line)})


def kernel_targets(extern_nodes: str | None) -> list[str]:
    """The operators in the extern nodes JSON, in its order: those that go through the proxy executor."""
    return [str(node.get("target", "")) for node in _parse_extern_nodes(extern_nodes)]


def sources_of(
    functions: Iterable[str], kernels: list[str], wrapper: str | None, nodes: Mapping[str, fx.Node] | None
) -> list[tuple[str, tuple[str, ...]]]:
    """For each function and each kernel, once and in order, the user's lines behind its calls in the wrapper."""
    shims, externals = origins_in_wrapper(wrapper) if wrapper else ({}, {})
    found: dict[str, set[str]] = {name: shims.get(name, set()) for name in functions}
    for i, target in enumerate(kernels):
        found[target] = found.get(target, set()) | externals.get(i, set())
    result = []
    for name, origins in found.items():
        lines = (source_line(nodes[origin]) for origin in sorted(origins) if nodes and origin in nodes)
        result.append((name, tuple(dict.fromkeys(line for line in lines if line))))
    return result


def raise_if_missing(missing: list[MissingOperator], what: str) -> None:
    """Raises UnsupportedOperatorsError that lists everything in ``missing``."""
    if missing:
        count = f"{len(missing)} operator{'s' if len(missing) > 1 else ''}"
        lines = "".join(f"\n  {entry}" for entry in missing)
        raise UnsupportedOperatorsError(f"{what}: the runtime lacks {count}:{lines}", tuple(missing))


def _parse_extern_nodes(text: str | None) -> list[dict[str, Any]]:
    if text is None:
        return []
    nodes = json.loads(text).get("nodes", [])
    return [entry.get("node", {}) for entry in nodes]


def _tensor_operator(target: str) -> str | None:
    """What a model calls instead of an operator that calls a runner; None for other operators.

    A kernel that is registered for one does not serve it: its runner's id means nothing in another process.
    """
    return _TENSOR_OPERATORS.get(target.partition(".")[0])


@lru_cache(maxsize=1)
def _has_cuda_shims() -> bool:
    """False for a library that was built without nvcc."""
    return has_cuda_kernels(runtime_functions())

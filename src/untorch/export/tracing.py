"""Tracing: torch.export of one method, again with math attention where fused attention constrains a dynamic size.

While it traces on a GPU, torch.export asks the fused operator that PyTorch would take for the result's strides. With a
mask that is the memory-efficient one, which pads masks to multiples of 8, and its padding becomes a constraint on a
dynamic size: "length = 8·_length - 4". Math attention adds no constraint. The graph has the operator as a whole either
way, so both graphs are equal where untorch's kernels or math replace it.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.method import Method, Traced
from untorch.export.passes.report import PassReport
from untorch.export.patches import packed_sequences, recurrent_shapes
from untorch.progress import Progress
from untorch.runtime.errors import InvalidArgumentError, UntorchError
from untorch.runtime.log import INFO, log

__all__ = ["export_program", "refuse_fused_attention", "trace_method"]


def trace_method(method: Method, progress: Progress | None = None) -> Method:
    """torch.export of the method, for its target: sets ``traced``. Raises CompileError or InvalidArgumentError."""
    with method.target.compile_context():
        with (progress or Progress(False)).step(f"{method.name}: torch.export"):
            program, refusal = export_program(method, method.target.retries_with_math_attention(method.options))
        module = program.module()
    assert isinstance(module, fx.GraphModule)
    method.traced = Traced(program, module, refusal)
    return method


def export_program(method: Method, retry: bool) -> tuple[torch.export.ExportedProgram, str | None]:
    """The method's program, and why torch.export refused it with PyTorch's fused attention, if it did.

    retry: what is refused is traced again with math attention. Raises CompileError with what torch.export said first.
    """
    if isinstance(method.model, torch.export.ExportedProgram):
        if method.model.example_inputs is None:
            raise InvalidArgumentError(
                f"method {method.name!r}: the exported program has no example inputs, which AOTInductor needs: export "
                f"it again with torch.export.export"
            )
        return method.model, None
    try:
        return _exported(method), None
    except UntorchError:
        raise
    except Exception as error:
        refusal = error
    if retry:
        try:
            with sdpa_kernel(SDPBackend.MATH):
                program = _exported(method)
            log(INFO, "method %s is traced with math attention: torch.export said: %s", method.name, refusal)
            return program, str(refusal)
        except Exception:  # then it was not attention, and the first error says more
            pass
    raise CompileError(f"method {method.name!r}: torch.export failed: {refusal}") from refusal


def _exported(method: Method) -> torch.export.ExportedProgram:
    assert isinstance(method.model, torch.nn.Module)
    assert method.args is not None
    with contextlib.ExitStack() as stack:
        if method.target.device == "cpu" and method.options.passes.get("serve_recurrent", True):
            stack.enter_context(recurrent_shapes())
            stack.enter_context(packed_sequences())
        return torch.export.export(
            method.model, method.args, method.kwargs, dynamic_shapes=method.dynamic_shapes, strict=method.options.strict
        )


def refuse_fused_attention(method: Method, passes: list[PassReport]) -> None:
    """Raises CompileError for attention that the passes left to PyTorch's fused operators, where those were refused."""
    for node in method.module.graph.nodes:
        if node.target != torch.ops.aten.scaled_dot_product_attention.default:
            continue
        where = source_line(node)
        reasons = [report.skipped[node.name] for report in passes if node.name in report.skipped]
        raise CompileError(
            f"method {method.name!r}: torch.export failed: {method.traced.refusal}\nIt succeeds with math attention, "
            f"but {node.name}{f' ({where})' if where else ''} would be PyTorch's fused operator "
            f"({'; '.join(reasons) or 'no pass changed it'}): use attention='math' for GEMMs and a softmax, or a "
            f"static size"
        )

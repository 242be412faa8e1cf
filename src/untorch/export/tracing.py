"""torch.export of one method, and of one whose attention PyTorch's fused operators on a GPU would tie to a size.

While it traces on a GPU, torch.export asks the fused operator that PyTorch would take for the result's strides. With a
mask that is the memory-efficient one, which pads masks to multiples of 8, and what its padding asks becomes a bound of
a size that was to vary: "length = 8·_length - 4". Plain math asks nothing. The operator stands in the graph as a whole
either way, so where untorch's kernels or math take its place, that graph is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from untorch.export.coverage import source_line
from untorch.export.errors import CompileError
from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport
from untorch.runtime.errors import InvalidArgumentError, UntorchError

if TYPE_CHECKING:
    from untorch.export.compile import MethodInput

__all__ = ["export_program", "refuse_fused_attention"]


def export_program(
    method: MethodInput, options: ExportOptions, on_gpu: bool
) -> tuple[torch.export.ExportedProgram, str | None]:
    """The method's program, and why torch.export refused it with PyTorch's fused attention, if it did.

    on_gpu: the method's tensors lie on one. Raises CompileError with what torch.export said at first.
    """
    if isinstance(method.model, torch.export.ExportedProgram):
        if method.model.example_inputs is None:
            raise InvalidArgumentError(
                f"method {method.name!r}: the exported program has no example inputs, which AOTInductor needs: export "
                f"it again with torch.export.export"
            )
        return method.model, None
    try:
        return _exported(method, options), None
    except UntorchError:
        raise
    except Exception as error:
        refusal = error
    if on_gpu and options.attention != "native":
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return _exported(method, options), str(refusal)
        except Exception:  # then it was not attention, and the first error says more
            pass
    raise CompileError(f"method {method.name!r}: torch.export failed: {refusal}") from refusal


def _exported(method: MethodInput, options: ExportOptions) -> torch.export.ExportedProgram:
    assert isinstance(method.model, torch.nn.Module)
    assert method.args is not None
    return torch.export.export(
        method.model, method.args, method.kwargs, dynamic_shapes=method.dynamic_shapes, strict=options.strict
    )


def refuse_fused_attention(method: str, module: fx.GraphModule, passes: Sequence[PassReport], refusal: str) -> None:
    """Raises CompileError for attention that is left to PyTorch's fused operators, for which the program is not."""
    for node in module.graph.nodes:
        if node.target != torch.ops.aten.scaled_dot_product_attention.default:
            continue
        where = source_line(node)
        reasons = [report.skipped[node.name] for report in passes if node.name in report.skipped]
        raise CompileError(
            f"method {method!r}: torch.export failed: {refusal}\nIt does not where attention is not PyTorch's, but "
            f"{node.name}{f' ({where})' if where else ''} would be ({'; '.join(reasons) or 'no pass changed it'}): use "
            f"attention='math' for plain matrix products, or a size that does not vary"
        )

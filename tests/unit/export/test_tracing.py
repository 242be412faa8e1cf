"""torch.export of a method: what it refuses for PyTorch's fused attention is traced with plain math."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from untorch.export.compile import MethodInput, TracedMethod, _run_passes
from untorch.export.cuda import CudaTarget
from untorch.export.errors import CompileError
from untorch.export.options import ExportOptions
from untorch.export.tracing import export_program, refuse_fused_attention

REFUSAL = "Constraints violated (length)!\nSuggested fixes:\n  length = 8*_length - 4"


class Attention(nn.Module):
    """Cannot be traced while fused operators are allowed; with ``never`` not at all."""

    def __init__(self, never: bool = False) -> None:
        super().__init__()
        self.never = never

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        if self.never or torch.backends.cuda.flash_sdp_enabled():
            raise ValueError(REFUSAL)
        return nn.functional.scaled_dot_product_attention(q, q, q)


def method(never: bool = False) -> MethodInput:
    return MethodInput("decode", Attention(never), (torch.randn(1, 2, 5, 16),))


def test_a_refused_method_is_traced_with_plain_attention() -> None:
    program, refusal = export_program(method(), ExportOptions(), on_gpu=True)
    assert refusal == REFUSAL
    assert torch.ops.aten.scaled_dot_product_attention.default in {node.target for node in program.graph.nodes}
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(
    ("never", "options", "on_gpu"),
    [(True, ExportOptions(), True), (False, ExportOptions(attention="native"), True), (False, ExportOptions(), False)],
)
def test_what_is_refused(never: bool, options: ExportOptions, on_gpu: bool) -> None:
    with pytest.raises(CompileError) as error:
        export_program(method(never), options, on_gpu)
    assert str(error.value) == f"method 'decode': torch.export failed: {REFUSAL}"


def test_the_report_says_so() -> None:
    pytest.importorskip("triton")
    options, gpu = ExportOptions(attention="math"), CudaTarget("cuda:0", "sm_90")
    program, refusal = export_program(method(), options, on_gpu=True)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    first, *_ = _run_passes(TracedMethod(method(), program, module, refusal), options, gpu)
    assert first.changed == [
        "traced with plain attention: with PyTorch's fused operators torch.export said: Constraints violated (length)!"
    ]
    assert torch.ops.aten.scaled_dot_product_attention.default not in {node.target for node in module.graph.nodes}


def test_attention_that_would_be_pytorchs_is_refused() -> None:
    program, refusal = export_program(method(), ExportOptions(), on_gpu=True)
    assert refusal is not None
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    with pytest.raises(CompileError) as error:
        refuse_fused_attention("decode", module, [], refusal)
    text = str(error.value)
    assert text.startswith(
        f"method 'decode': torch.export failed: {REFUSAL}\nIt does not where attention is not PyTorch's"
    )
    assert "no pass changed it" in text
    assert text.endswith("use attention='math' for plain matrix products, or a size that does not vary")

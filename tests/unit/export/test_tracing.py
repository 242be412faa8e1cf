"""torch.export of a method: what it refuses for PyTorch's fused attention is traced with plain math."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from untorch.export.compile import _run_passes
from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.options import ExportOptions
from untorch.export.target import CpuTarget, CudaTarget
from untorch.export.tracing import export_program, refuse_fused_attention
from untorch.runtime.errors import UnsupportedError

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


def method(never: bool = False, **options: Any) -> Method:
    """For a GPU, though it is traced on the CPU here."""
    return Method(
        "decode", Attention(never), (torch.randn(1, 2, 5, 16),), options=ExportOptions(**options),
        target=CudaTarget("sm_90", "cuda:0"),
    )  # fmt: skip


def test_a_refused_method_is_traced_with_plain_attention() -> None:
    traced = export_program(method(), retry=True)
    assert traced.refusal == REFUSAL
    assert torch.ops.aten.scaled_dot_product_attention.default in {node.target for node in traced.program.graph.nodes}
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(
    ("never", "attention", "on_gpu"), [(True, "auto", True), (False, "native", True), (False, "auto", False)]
)
def test_what_is_refused(never: bool, attention: Any, on_gpu: bool) -> None:
    target = CudaTarget("sm_90", "cuda:0") if on_gpu else CpuTarget()
    retry = target.retries_with_math_attention(ExportOptions(attention=attention))
    assert retry is (on_gpu and attention == "auto")
    with pytest.raises(CompileError) as error:
        export_program(method(never), retry)
    text = str(error.value)
    assert text.startswith(f"method 'decode': torch.export failed: {REFUSAL}\n  at {__file__}:")
    assert "in forward: raise ValueError(REFUSAL)\n  Write length = 8*_length - 4 in dynamic_shapes" in text


def traced(**options: Any) -> Method:
    made = method(**options)
    made.traced = export_program(made, retry=True)
    assert made.traced.refusal is not None
    return made


def test_the_report_says_so() -> None:
    pytest.importorskip("triton")
    made = traced(attention="math")
    first, *_ = _run_passes(made)
    assert first.changed == [
        "traced with math attention: with PyTorch's fused operators torch.export said: Constraints violated (length)!"
    ]
    targets = {node.target for node in made.module.graph.nodes}
    assert torch.ops.aten.scaled_dot_product_attention.default not in targets


def test_attention_that_would_be_pytorchs_is_refused() -> None:
    with pytest.raises(CompileError) as error:
        refuse_fused_attention(traced(), [])
    text = str(error.value)
    assert text.startswith(
        f"method 'decode': torch.export failed: {REFUSAL}\nIt succeeds with math attention, but scaled_dot_product_att"
    )
    assert "would be PyTorch's fused operator (no pass changed it)" in text
    assert text.endswith("use attention='math' for GEMMs and a softmax, or a static size")


def test_sparse_tensors_are_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(3).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.adjacency @ x

    with pytest.raises(
        UnsupportedError, match=r"method 'f': adjacency has the layout torch.sparse_coo, and .* keep adj"
    ):
        export_program(Method("f", Sparse(), (torch.ones(3, 2),)), retry=False)


@pytest.mark.filterwarnings("ignore")
def test_scripted_parts_are_named() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.jit.script(nn.Linear(3, 2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(x)

    with pytest.raises(CompileError, match="head is a ScriptModule, which torch.export does not trace: use the module"):
        export_program(Method("f", Scripted(), (torch.ones(3),)), retry=False)

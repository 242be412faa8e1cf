"""Inputs that are numbers: AOTInductor generates code for them, and refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from untorch.export.compile import generate_code
from untorch.export.method import Method
from untorch.export.patches import varying_numbers


class Head(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x[:n] * n


SHAPES = {"x": None, "n": torch.export.Dim.DYNAMIC}


@pytest.mark.filterwarnings("ignore")
def test_torch_still_refuses_numbers(tmp_path: Path) -> None:
    program = torch.export.export(Head(), (torch.ones(9), 4), dynamic_shapes=SHAPES)
    with pytest.raises(Exception, match="None"):
        torch._inductor.aot_compile(
            program.module(),
            (torch.ones(9), 4),
            {},
            options={"aot_inductor.output_path": str(tmp_path)},  # type: ignore[arg-type]
        )


@pytest.mark.filterwarnings("ignore")
def test_code_reads_the_number_from_a_tensor(tmp_path: Path) -> None:
    method = Method("forward", Head(), (torch.ones(9), 4), None, SHAPES)
    with varying_numbers():
        code = generate_code(method, tmp_path)
    assert "aoti_torch_item_int64(inputs[1], &" in code.wrapper
    assert "_check_aoti_runtime_check_inputs_env() { return false; }" in code.wrapper

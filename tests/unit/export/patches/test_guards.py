"""Guards of a program, which AOTInductor drops and the generated code checks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch.export import Dim

import untorch
from untorch.export import export
from untorch.export.compile import generate_code
from untorch.export.method import Method


class Even(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2 == 0:
            return x * 2
        return x - 1


@pytest.mark.filterwarnings("ignore")
def test_torch_still_drops_guards(tmp_path: Path) -> None:
    program = torch.export.export(Even(), (torch.ones(4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    code = generate_code(Method("forward", program), tmp_path)
    assert "%" not in code.wrapper.partition("run_impl")[2].partition("inputs.clear")[0]
    assert "expected (x.shape[0] % 2) == 0" not in code.wrapper


@pytest.mark.slow
def test_a_call_for_another_branch_is_refused(tmp_path: Path) -> None:
    report = export(
        Even(), (torch.ones(4),), tmp_path / "model.pt2", dynamic_shapes=({0: Dim.DYNAMIC},), progress=False
    )
    (traced,) = (entry for entry in report.methods["forward"].passes if entry.name == "torch_export")
    assert traced.changed[0].startswith(f"checked at each call: (x.shape[0] % 2) == 0 ({__file__}:")
    with untorch.load(tmp_path / "model.pt2") as program:
        assert program(numpy.ones(6, numpy.float32)).tolist() == [2] * 6
        with pytest.raises(untorch.ModelError) as error:
            program(numpy.ones(5, numpy.float32))
    text = str(error.value)
    assert "the sizes of the inputs: expected (x.shape[0] % 2) == 0 (test_guards.py:" in text
    assert "in forward: if x.shape[0] % 2 == 0:), as for the example inputs; the model does something else" in text
    assert str(Path(__file__).parent) not in text

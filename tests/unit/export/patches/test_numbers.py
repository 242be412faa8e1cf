"""Numbers: inputs that vary, for which AOTInductor generates code and refuses it, and bounds of slices."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy
import pytest
import torch

import untorch
from untorch.export import export
from untorch.export.compile import generate_code
from untorch.export.method import Method
from untorch.export.patches import generated_only, varying_numbers


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


class Slices(torch.nn.Module):
    """Bounds that it reads from tensors."""

    def forward(self, x: torch.Tensor, n: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = n.item()
        sums = torch.stack([x[:end].sum() for end in ends.tolist()])
        return sums, x[:k] * 2, x[k:] + 1, x[:k:3] + 1, x[k::4] * 3, x[-k:] + 1, x[:-k] + 1, x[1:k:2] * 1, x[k:7:2] - 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_still_writes_none_into_code(tmp_path: Path) -> None:
    x, n = torch.ones(9), torch.tensor(4)
    program = torch.export.export(Slices(), (x, n, torch.tensor([2, 3])))
    with generated_only() as generated, contextlib.suppress(Exception):
        torch._inductor.aot_compile(program.module(), (x, n, torch.tensor([2, 3])), {})
    assert "_st_index = None < 0" in generated[0][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_slices_with_computed_bounds(tmp_path: Path) -> None:
    model, x = Slices(), torch.arange(9.0)
    export(model, (x, torch.tensor(4), torch.tensor([2, 3])), tmp_path / "slices.pt2", progress=False)
    with untorch.load(tmp_path / "slices.pt2") as program:
        for k in (4, 0, 1, 3, 8, 9, 12, -2, -20):
            ends = torch.tensor([k, 9 - k])
            got = program.forward(x.numpy(), numpy.int64(k), ends.numpy())
            for one, other in zip(got, model(x, torch.tensor(k), ends), strict=True):
                numpy.testing.assert_array_equal(one, other, str(k))

"""Models that compute gradients in their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from untorch.export.errors import CompileError
from untorch.export.method import Method
from untorch.export.tracing import export_program


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.register_buffer("scale", torch.tensor(2.0))


class Forces(Energy):
    """Energies and forces of atoms, as interatomic potentials have them."""

    def forward(self, batch: dict[str, torch.Tensor], *, pairs: bool = True) -> dict[str, Any]:
        x = batch["positions"]
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.net(x).sum() * self.scale
            if pairs:
                energy = energy + torch.exp(-(x[:, None] - x[None]).pow(2).sum(-1)).sum()
            (gradient,) = torch.autograd.grad([energy], [x], create_graph=self.training)
        return {"energy": energy, "forces": -gradient, "unit": "eV"}


class Transformed(Energy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.func.grad(lambda y: self.net(y).sum())(x), torch.func.jacrev(self.net)(x[0])


def check(model: nn.Module, samples: list[Any], **given: Any) -> None:
    traced = export_program(Method("f", model.eval(), samples[0], **given), False)
    assert "traced through autograd: the model computes gradients" in traced.notes
    for sample in samples:
        results, expected = (pytree.tree_leaves(run(*sample)) for run in (traced.program.module(), model))
        for result, wanted in zip(results, expected, strict=True):
            if isinstance(wanted, torch.Tensor):
                torch.testing.assert_close(result, wanted)
            else:
                assert result == wanted


@pytest.mark.filterwarnings("ignore")
def test_forces_of_any_number_of_atoms() -> None:
    # Three atoms: as many as coordinates, and not the same size.
    samples = [({"positions": torch.randn(n, 3)},) for n in (3, 5, 1)]
    check(Forces(), samples, dynamic_shapes={"batch": {"positions": {0: Dim("atoms")}}})


@pytest.mark.filterwarnings("ignore")
def test_transforms_of_functions() -> None:
    check(Transformed(), [(torch.randn(4, 3),), (torch.randn(4, 3),)])


@pytest.mark.filterwarnings("ignore")
def test_a_branch_on_a_size_that_varies() -> None:
    class Branch(Energy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def energy(y: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.net(y).sum() if y.shape[0] % 2 else y.sum()
                return result

            gradient: torch.Tensor = torch.func.grad(energy)(x)
            return gradient

    method = Method("f", Branch(), (torch.randn(4, 3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(CompileError, match="The model computes gradients in its forward"):
        export_program(method, False)

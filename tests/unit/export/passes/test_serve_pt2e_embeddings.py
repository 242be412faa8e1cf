"""Embeddings that PT2E quantised: rows alone are dequantised."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators that convert_pt2e leaves
from torch import nn

from tests.unit.export.passes.pass_graphs import close, targets, unlift
from untorch.export.passes.serve_pt2e_embeddings import serve_pt2e_embeddings

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports

Q = torch.ops.quantized_decomposed


class Table(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("values", torch.randint(0, 256, (20, 6), dtype=torch.uint8))
        size = 6 if form == "columns" else 20
        self.register_buffer("scales", torch.rand(size))
        self.register_buffer("zeros", torch.randint(0, 256, (size,)))
        self.form = form

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.form == "one scale":
            table = Q.dequantize_per_tensor.default(self.values, 0.02, 7, 0, 255, torch.uint8)
        else:
            values = self.values + 1 if self.form == "computed" else self.values
            axis = int(self.form == "columns")
            table = Q.dequantize_per_channel.default(values, self.scales, self.zeros, axis, 0, 255, torch.uint8)
        return nn.functional.embedding(ids, table)


@pytest.mark.parametrize("form", ["rows", "one scale"])
def test_rows_are_dequantised_alone(form: str) -> None:
    model, ids = Table(form), torch.randint(0, 20, (2, 3))
    module = unlift(model, ids)
    report = serve_pt2e_embeddings(module)
    close(module)
    module.graph.eliminate_dead_code()
    assert (report.changed, report.skipped) == (["embedding"], {})
    assert not any("dequantize" in name for name in targets(module))
    assert torch.equal(module(ids), model(ids))


@pytest.mark.parametrize(
    ("form", "reason"),
    [("computed", "it is computed, not a constant"), ("columns", "its scales are along the axis 1, expected 0")],
)
def test_what_stays_is_in_the_report(form: str, reason: str) -> None:
    module = unlift(Table(form), torch.randint(0, 20, (2, 3)))
    before = targets(module)
    report = serve_pt2e_embeddings(module)
    assert report.skipped == {"embedding": f"its whole table is dequantised at every call: {reason}"}
    assert targets(module) == before

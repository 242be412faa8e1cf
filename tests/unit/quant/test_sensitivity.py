"""The sensitivity of layers: the error of the outputs when one layer alone is quantised."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from untorch.quant import layer_sensitivity, quantize
from untorch.runtime.errors import InvalidArgumentError

from .test_apply import NAMES, Model


def test_it_is_the_error_with_the_layer_alone() -> None:
    model = Model().train()
    ids = torch.randint(0, 100, (2, 7))
    seen: list[str] = []
    found = layer_sensitivity(model, {"dtype": "int4", "method": "rtn"}, [((ids,), {})], seen.append)
    assert list(found) == seen == NAMES
    assert model.training
    for name in ("layers.0.down", "head"):
        alone = copy.deepcopy(model).eval()
        quantize(alone, "int4", method="rtn", include=name, progress=False)
        with torch.no_grad():
            expected, now = model.eval()(ids), alone(ids)
        torch.testing.assert_close(found[name], float((now - expected).norm() / expected.norm()), rtol=1e-4, atol=0)
        model.train()
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in NAMES)


def test_layers_that_are_not_reached_have_0_and_buffers_stay() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1  # type: ignore[operator]
            return {"y": self.used(x) * self.calls, "n": torch.ones(3, dtype=torch.int64)}

    torch.manual_seed(0)
    model = Counting()
    found = layer_sensitivity(model, "int8", [((torch.randn(2, 64),), {}), ((), {"x": torch.randn(1, 64)})])
    assert 1e-4 < found["used"] < 0.05
    assert found["unused"] == 0
    assert float(model.calls) == 0


def test_errors() -> None:
    with pytest.raises(InvalidArgumentError, match="batches: expected at least one"):
        layer_sensitivity(Model(), "int8", [])
    with pytest.raises(InvalidArgumentError, match="the outputs in floating point are not finite"):
        layer_sensitivity(nn.Sequential(nn.Linear(4, 4)), "int8", [((torch.full((1, 4), torch.nan),), {})])

"""``swiglu_of``: which gate a module has, by its values."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from untorch.quant.swiglu import SwiGLU, swiglu_of


class Gated(nn.Module):
    """With ``_apply_gate`` as transformers writes it."""

    def __init__(
        self, given: SwiGLU, names: tuple[str, str] = ("alpha", "limit"), dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.given, self.dtype = given, dtype
        for name, value in zip(names, (given.alpha, given.limit), strict=True):
            setattr(self, name, value)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.to(self.dtype or gate_up.dtype)
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.given.interleaved else gate_up.chunk(2, -1)
        if self.given.limit is not None:
            gate, up = gate.clamp(max=self.given.limit), up.clamp(-self.given.limit, self.given.limit)
        return gate * torch.sigmoid(gate * self.given.alpha) * (up + self.given.beta)


@hypothesis.given(
    alpha=st.sampled_from([1.0, 1.702, 0.5]),
    beta=st.sampled_from([0.0, 1.0]),
    limit=st.sampled_from([None, 7.0, 0.7, 30.0, 2]),
    interleaved=st.booleans(),
    names=st.sampled_from([("alpha", "limit"), ("swiglu_alpha", "swiglu_limit")]),
    dtype=st.sampled_from([None, torch.float32]),
)
def test_what_it_finds(
    alpha: float, beta: float, limit: float | None, interleaved: bool, names: tuple[str, str], dtype: torch.dtype | None
) -> None:
    given = SwiGLU(alpha, beta, limit, interleaved)
    assert swiglu_of(Gated(given, names, dtype)) == given


def test_the_function() -> None:
    gate, up = torch.randn(2, 50, dtype=torch.float64) * 5
    torch.testing.assert_close(SwiGLU()(gate, up), F.silu(gate) * up)
    assert torch.equal(SwiGLU(limit=math.inf)(gate, up), SwiGLU()(gate, up))
    clamped = SwiGLU(1.702, 1.0, 2.0)(gate, up)
    torch.testing.assert_close(clamped, SwiGLU(1.702, 1.0)(gate.clamp(max=2), up.clamp(-2, 2)))


class LimitedAfter(Gated):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).clamp(max=0.5) * up.clamp(-0.5, 0.5)


class Gelu(Gated):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate) * up


class Returns(Gated):
    def __init__(self, value: Any) -> None:
        super().__init__(SwiGLU())
        self.value = value

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def with_act_fn(activation: nn.Module | None) -> nn.Module:
    module = nn.Module()
    module.act_fn = activation
    return module


@pytest.mark.parametrize(
    "module",
    [
        LimitedAfter(SwiGLU(limit=0.5)), Gelu(SwiGLU()), Returns(None), Returns(torch.ones(3)),
        Returns(torch.ones(1, 100).int()), Returns(RuntimeError("no")), nn.Module(), with_act_fn(None),
        with_act_fn(nn.GELU()),
    ],
)  # fmt: skip
def test_another_gate(module: nn.Module) -> None:
    assert swiglu_of(module) is None


@pytest.mark.parametrize("changes", [{"alpha": 1.5}, {"alpha": None}, {"limit": 6.9}, {"limit": None}, {"limit": -7.0}])
def test_numbers_that_the_gate_does_not_use(changes: dict[str, float | None]) -> None:
    module = Gated(SwiGLU(1.702, 1.0, 7.0))
    for name, value in changes.items():
        setattr(module, name, value)
    assert swiglu_of(module) is None


def test_without_a_gate_it_is_the_activation() -> None:
    assert swiglu_of(with_act_fn(nn.SiLU())) == SwiGLU()

"""flex_attention becomes GEMMs and a softmax with the same values, and what made its table of blocks goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from untorch.export.method import Method
from untorch.export.passes.decompose_flex_attention import decompose_flex_attention
from untorch.export.tracing import export_program

pytestmark = pytest.mark.filterwarnings("ignore")


class Attention(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        self.call = call

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.call(self, q, k, v)


def biased(self: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + self.slope[h] * (j - i)

    return flex_attention(q, k, v, score_mod=bias)


def windowed(self: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < 5)

    mask = create_block_mask(window, None, None, q.shape[2], k.shape[2], device="cpu")
    return flex_attention(q, k, v, block_mask=mask, scale=0.3)


def grouped(self: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flex_attention(q, k[:, :2], v[:, :2], score_mod=lambda s, b, h, i, j: torch.tanh(s / 5) * 5, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.parametrize("call", [biased, windowed, grouped])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values(call: Callable[..., Any], dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Attention(call).eval()
    args = tuple(torch.randn(2, 4, 12, 8) for _ in range(3))
    shapes = ({2: Dim("length")},) * 3 if dynamic and call is not windowed else None
    with torch.no_grad():
        traced = export_program(Method("f", model, args, None, shapes), False)
        report = decompose_flex_attention(traced.module)
        assert report.changed == ["flex_attention"]
        targets = {node.target for node in traced.module.graph.nodes}
        assert torch.ops.higher_order.flex_attention not in targets
        assert not any(getattr(target, "__module__", "").endswith("predispatch") for target in targets)
        for sample in [args, *([tuple(x[:, :, :7] for x in args)] if shapes else [])]:
            torch.testing.assert_close(traced.module(*sample), model(*sample), rtol=1e-5, atol=1e-5)


def test_other_graphs_stay() -> None:
    traced = export_program(Method("f", nn.Linear(3, 4), (torch.ones(2, 3),)), False)
    before = traced.module.code
    assert decompose_flex_attention(traced.module).changed == []
    assert traced.module.code == before

"""Tests of recurrent_kernels: what replaces the operators, and values of the graph on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.native.state_batches import conv_batch
from untorch.export.errors import CompileError
from untorch.export.passes.recurrent_kernels import recurrent_kernels
from untorch.export.passes.table import PASSES
from untorch.ops import causal_conv1d, gated_delta_rule

pytest.importorskip("triton")
TABLES = ("states", "state_slots", "cu_seqlens_q", "seqlens_k")


class Layers(nn.Module):
    """A convolution and a delta rule over one pool, then the convolution again with another state."""

    def __init__(self, offsets: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.offsets, self.width = offsets, width
        self.weight = nn.Parameter(torch.randn(2 * width, 4))

    def forward(self, x: torch.Tensor, g: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        first, second, third = self.offsets
        y = causal_conv1d.OPERATOR(x, self.weight, None, *tables, first, True)
        heads = y.unflatten(1, (2, self.width))
        out = gated_delta_rule.OPERATOR(heads, heads, heads, g, g.sigmoid(), *tables, second, True, 0.5)
        result: torch.Tensor = causal_conv1d.OPERATOR(out.flatten(1), self.weight, None, *tables, third, False)
        return result


def traced(
    offsets: tuple[int, int, int] = (0, 64, 192), width: int = 8
) -> tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    given: dict[str, Any] = conv_batch([(5, 20), (3, 3)], 2 * width, 4)
    given["states"] = torch.randn(4, 192 + 2 * width * width + 64)
    args = (given["x"], -torch.rand(8, 2), *(given[name] for name in TABLES))
    with torch.no_grad():
        return torch.export.export(Layers(offsets, width), args).module(), args


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_they_take_the_operators_places() -> None:
    module, args = traced()
    expected_args, found_args = ([x.clone() for x in args] for _ in range(2))
    expected = module(*expected_args)
    report = recurrent_kernels(module)
    assert report.changed == ["causal_conv1d", "gated_delta_rule", "causal_conv1d_1"] and not report.skipped
    names = [str(node.target) for node in module.graph.nodes if str(node.target).startswith("untorch.")]
    assert names == [
        f"untorch.{name}_triton.default" for name in ("causal_conv1d", "gated_delta_rule", "causal_conv1d")
    ]
    assert module.state_offsets.tolist() == [[0, 0], [64, 64], [192, 192]]
    torch.testing.assert_close(module(*found_args), expected, rtol=0, atol=0)
    for found, wanted in zip(found_args, expected_args, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_what_the_kernels_cannot_serve() -> None:
    module, _ = traced((0, 65, 200))
    with pytest.raises(CompileError) as caught:
        recurrent_kernels(module)
    assert str(caught.value) == "gated_delta_rule: offset: expected a multiple of 16 on a GPU, got 65"
    module, _ = traced(width=520)
    with pytest.raises(CompileError) as caught:
        recurrent_kernels(module)
    assert str(caught.value) == (
        "gated_delta_rule: gated_delta_rule: expected keys of at most 512 on a GPU, got 520"
    )  # fmt: skip


def test_they_are_for_gpus() -> None:
    [entry] = [entry for entry in PASSES if entry.name == "recurrent_kernels"]
    assert entry.devices == ("cuda",)

"""Positions that are tensors, where torch.export makes Python numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export.patches import tensor_positions


class Model(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        x = x.clone()
        result = self.fn(x, i)
        return x if result is None else result


def column(x: torch.Tensor, i: torch.Tensor) -> None:
    x[:, i] = torch.arange(4.0)


def element(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i, i] = 5


def added(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i] += 1


def with_a_slice(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i, 1:3] = torch.arange(2.0)


def bounds(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i:, :i] = 0


def with_an_array(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i, torch.tensor([0, 2])] = 2


def with_a_mask(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i, x[0] > 0] = 2


def in_a_list(x: torch.Tensor, i: torch.Tensor) -> None:
    x[[i, 0], 1] = 1


def a_list(x: torch.Tensor, i: torch.Tensor) -> None:
    x[[i, i]] = 1


WRITES = [column, element, added, with_a_slice, bounds, with_an_array, with_a_mask, in_a_list, a_list]
READS = [
    lambda x, i: x[i, torch.tensor([0, 2])],
    lambda x, i: x[:, None, i, ...],
    lambda x, i: x.narrow(0, i, 1),
    lambda x, i: torch.narrow(x, 1, i, 1),
]


def test_torch_still_refuses_positions() -> None:
    for fn in (element, bounds, READS[0], READS[2]):
        with pytest.raises(Exception, match="u0"):
            torch.export.export(Model(fn), (torch.randn(4, 4), torch.tensor(2)))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("fn", [*WRITES, *READS])
def test_positions(fn: Any) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    with tensor_positions():
        traced = torch.export.export(Model(fn), (x, torch.tensor(2))).module()
    for position in (2, 0, 1, 3):
        i = torch.tensor(position)
        # Once something has replaced Tensor.__getitem__, as tests of cross-compilation do, eager PyTorch takes the length
        # of a tensor in a list for the rest of the process.
        expected = Model(fn)(x, position if fn is in_a_list else i)
        assert torch.equal(traced(x, i), expected), position

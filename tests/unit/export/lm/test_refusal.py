"""Which layer an error of a model's code names, and which errors stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from untorch import InvalidArgumentError
from untorch.export import CompileError
from untorch.export.lm.refusal import MaskError, refusals


class Raises(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def run(error: Exception) -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Raises(error)))
    with refusals(model, "Model", "over pages"):
        model(torch.zeros(1))


def test_the_innermost_module_is_named() -> None:
    with pytest.raises(CompileError) as caught:
        run(KeyError("a"))
    assert str(caught.value) == "Model: 1.0 (Raises) fails over pages: KeyError: 'a'"
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(CompileError) as caught:
        run(MaskError("it reads its mask"))
    assert str(caught.value) == "Model: 1.0 (Raises): it reads its mask"


def test_refusals_of_others_stay() -> None:
    for error in (CompileError("known"), InvalidArgumentError("known")):
        with pytest.raises(type(error)) as caught:
            run(error)
        assert caught.value is error


def test_errors_outside_of_modules() -> None:
    with pytest.raises(CompileError) as caught, refusals(nn.Identity(), "Model", "over pages"):
        raise ValueError("a")
    assert str(caught.value) == "Model: its forward fails over pages: ValueError: a"

"""Tests of crop_kernels: taps that read padding alone are removed; results stay the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_graphs import assert_same, close, unlift
from torch import nn

from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.crop_kernels import crop_kernels


def cropped(convolution: nn.Module, *sizes: int, keep: tuple[str, ...] = ()) -> list[int]:
    """The kernel's sizes behind the pass, which must not change the result."""
    x = torch.randn(2, convolution.in_channels, *sizes)  # type: ignore[call-overload]
    model = nn.Sequential(convolution).eval()
    with torch.no_grad():
        expected = model(x)
        module = unlift(model, x)
        report = crop_kernels(module, keep)
        close(module)
        assert_same(module(x), expected, rtol=1e-4, atol=1e-5)
    (weight,) = (parameter for parameter in module.state_dict().values() if parameter.dim() > 1)
    assert bool(report.changed) == (list(weight.shape[2:]) != list(convolution.kernel_size))  # type: ignore[call-overload]
    return list(weight.shape[2:])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(
    ("convolution", "sizes", "kernel"),
    [
        (nn.Conv2d(4, 6, 3, padding=1), (1, 1), [1, 1]),
        (nn.Conv2d(4, 6, 3, padding=1), (1, 5), [1, 3]),
        (nn.Conv2d(4, 6, 3, padding=1), (2, 2), [3, 3]),
        (nn.Conv2d(4, 6, 5, padding=2), (2, 9), [3, 5]),
        (nn.Conv2d(4, 6, 3, padding=1, stride=2), (2, 2), [2, 2]),
        (nn.Conv2d(4, 6, 3, padding=6, dilation=6, groups=2), (5, 7), [1, 3]),
        (nn.Conv2d(4, 6, 3, padding="same"), (1, 1), [1, 1]),
        (nn.Conv2d(4, 6, 4, padding="same"), (1, 1), [4, 4]),  # more padding on one side
        (nn.Conv1d(4, 6, 7, padding=3, bias=False), (1,), [1]),
        (nn.Conv3d(4, 6, 3, padding=1), (1, 4, 1), [1, 3, 1]),
        (nn.ConvTranspose2d(4, 6, 3, padding=1), (1, 1), [3, 3]),
    ],
)
def test_taps_that_are_read(convolution: nn.Module, sizes: tuple[int, ...], kernel: list[int]) -> None:
    assert cropped(convolution, *sizes) == kernel


def test_weights_that_are_kept() -> None:
    assert cropped(nn.Conv2d(4, 6, 3, padding=1), 1, 1, keep=("0.weight",)) == [3, 3]


@given(
    length=st.integers(1, 6), size=st.integers(1, 5), stride=st.integers(1, 3), padding=st.integers(0, 6),
    dilation=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_geometry(length: int, size: int, stride: int, padding: int, dilation: int) -> None:
    if length + 2 * padding <= dilation * (size - 1):
        return
    convolution = nn.Conv1d(3, 4, size, stride, padding, dilation)
    assert cropped(convolution, length)[0] <= size


def test_sizes_that_vary_stay() -> None:
    x = torch.randn(2, 4, 1, 3)
    model = nn.Conv2d(4, 6, 3, padding=1).eval()
    module = unlift(model, x, dynamic=({3: torch.export.Dim("width", min=2, max=9)},))
    assert not crop_kernels(module).changed


def test_it_runs_with_the_others() -> None:
    x = torch.randn(1, 4, 1, 1)
    module = unlift(nn.Conv2d(4, 6, 3, padding=1).eval(), x)
    reports = {report.name: report for report in run_passes(module, ExportOptions(), "cpu")}
    assert reports["crop_kernels"].changed

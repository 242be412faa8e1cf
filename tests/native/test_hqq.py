"""HQQ's kernel on the CPU against its definition in float64, group by group, at every level of instructions."""

from __future__ import annotations

import pytest
import torch

from tests.native.shim import ShimError, call


def hqq(weight: torch.Tensor, group: int, groups: int | None = None) -> torch.Tensor:
    """[n, groups, 2]: scales and zeros."""
    out = torch.full((weight.shape[0], -(-weight.shape[1] // group) if groups is None else groups, 2), torch.nan)
    call("untorch_hqq", out, weight, group)
    return out


def mean_error(part: torch.Tensor, scale: float, zero: float) -> float:
    q = ((part - zero) / scale).round().add(8).clamp(0, 15) if scale else torch.full_like(part, 8.0)
    return float(((q - 8) * scale + zero - part).abs().mean())


def best_of_group(part: torch.Tensor) -> tuple[float, float]:
    """The scale, and the mean absolute error of the zero that HQQ keeps, step by step as published, in float64."""
    low, high = float(part.min()), float(part.max())
    if low == high:
        return 0.0, 0.0
    s = 15 / (high - low)
    z, beta, best = float(round(-low * s)), 10.0, float("inf")
    for _ in range(20):
        q = (part * s + z).round().clamp(0, 15)
        error = part - (q - z) / s
        mean = float(error.abs().mean())
        if mean >= best:
            break
        best = mean
        size = error.abs()
        shrunk = error.sign() * (size - size.clamp(min=1e-30) ** (0.7 - 1) / beta).clamp(min=0)
        z = float((q - (part - shrunk) * s).mean())
        beta *= 1.01
    return 1 / s, best


def check(weight: torch.Tensor, group: int) -> None:
    """Where a value lies between two steps the ways part: a group's zero is another one then, as good on average."""
    found = hqq(weight, group)
    errors, least = 0.0, 0.0
    for row, line in zip(found.double(), weight.double(), strict=True):
        for (scale, zero), part in zip(row.tolist(), line.split(group), strict=True):
            wanted, best = best_of_group(part)
            assert scale == pytest.approx(wanted, rel=1e-5)
            errors, least = errors + mean_error(part, scale, zero), least + best
    assert errors <= 1.02 * least + 1e-6 * float(weight.abs().max())


@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0, 50.0])
def test_as_published(size: float) -> None:
    """Errors below and above 0.17, where the power begins to matter."""
    torch.manual_seed(0)
    normal = torch.randn(6, 256) * size
    tails = torch.distributions.StudentT(2.0).sample((6, 256)) * size  # type: ignore[no-untyped-call]
    for group in (32, 64, 128, 256):
        check(normal, group)
        check(tails, group)
        check(normal + 3 * size, group)


def test_groups_of_every_length() -> None:
    torch.manual_seed(1)
    for k in (*range(1, 40), 63, 65, 127, 129):
        check(torch.randn(4, k), 64)


def test_rows_apart_and_groups_of_nothing() -> None:
    torch.manual_seed(2)
    wide = torch.randn(5, 300)
    found = hqq(wide[:, 7:107], 32, 6)
    assert torch.equal(found[:, :4], hqq(wide[:, 7:107].contiguous(), 32))
    assert not found[:, 4:].any()
    assert hqq(wide[:0], 32).shape == (0, 10, 2)


def test_equal_values_have_no_scale() -> None:
    weight = torch.tensor([0.0, 1.0, -3.14, 1e-40, 3e38])[:, None].expand(5, 64).contiguous()
    found = hqq(weight, 64)
    assert not found[..., 0].any()
    assert torch.equal(found[:, 0, 1], weight[:, 0])


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    torch.manual_seed(3)
    weight = torch.randn(400, 512)  # enough for several threads
    found = hqq(weight, 128)
    assert torch.equal(found[399:], hqq(weight[399:], 128))


@pytest.mark.parametrize(
    ("out", "weight", "group", "text"),
    [
        (torch.empty(2, 1, 2), torch.ones(2, 32).bfloat16(), 32,
         "argument 'weight' must be float32 of two dimensions, the last one dense, got bfloat16 of shape [2, 32]"),
        (torch.empty(2, 1, 2), torch.ones(32, 2).T, 32,
         "argument 'weight' must be float32 of two dimensions, the last one dense, got float32 of shape [2, 32]"),
        (torch.empty(2, 1, 2), torch.ones(2, 32), 0, "group_size must be 1 to 1024, got 0"),
        (torch.empty(2, 1, 2), torch.ones(2, 32), 1025, "group_size must be 1 to 1024, got 1025"),
        (torch.empty(2, 1, 2), torch.ones(2, 33), 32,
         "argument 'out' must be contiguous float32 [2, at least 2, 2], got float32 of shape [2, 1, 2]"),
        (torch.empty(2, 1, 2).double(), torch.ones(2, 32), 32,
         "argument 'out' must be contiguous float32 [2, at least 1, 2], got float64 of shape [2, 1, 2]"),
    ],
)  # fmt: skip
def test_refusals(out: torch.Tensor, weight: torch.Tensor, group: int, text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("untorch_hqq", out, weight, group)
    assert str(error.value) == f"hqq: {text}"

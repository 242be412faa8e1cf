"""RTN, with zeros and without, and HQQ: against definitions written out group by group, with padding, and what holds for any weight."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from untorch.ops import chunks
from untorch.quant.methods import quantize_int4, quantize_int4_reference, quantize_weight, relative_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def restored(values: torch.Tensor, scale_and_zero: torch.Tensor, group: int) -> torch.Tensor:
    scale = scale_and_zero[..., 0].T.float().repeat_interleave(group, 1)
    zero = scale_and_zero[..., 1].T.float().repeat_interleave(group, 1)
    return (values.float() - 8) * scale + zero


def rtn_of_group(weights: list[float]) -> list[int]:
    low, high = min(weights), max(weights)
    return [round((w - low) / (high - low) * 15) for w in weights]


def hqq_of_group(weights: list[float]) -> tuple[float, float]:
    """Scale and zero of one group, step by step as published."""
    low, high = min(weights), max(weights)
    s = 15 / (high - low)
    z, beta, best, kept = float(round(-low * s)), 10.0, float("inf"), 0.0
    for _ in range(20):
        q = [min(max(round(w * s + z), 0), 15) for w in weights]
        errors = [w - (a - z) / s for w, a in zip(weights, q, strict=True)]
        mean = sum(map(abs, errors)) / len(errors)
        if mean >= best:
            break
        best, kept = mean, z
        shrunk = [(1 if e > 0 else -1) * max(abs(e) - abs(e) ** (0.7 - 1) / beta, 0.0) if e else 0.0 for e in errors]
        z = sum(a - (w - e) * s for a, w, e in zip(q, weights, shrunk, strict=True)) / len(q)
        beta *= 1.01
    return 1 / s, (8 - kept) / s


def test_rtn_is_the_nearest_of_sixteen_steps() -> None:
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    values, scale_and_zero = quantize_weight(weight, 64, "rtn")
    for row in range(5):
        for group in range(2):
            part = weight[row, 64 * group : 64 * group + 64]
            assert values[row, 64 * group : 64 * group + 64].tolist() == rtn_of_group(part.tolist())
            assert scale_and_zero[group, row, 0] == pytest.approx((part.max() - part.min()) / 15)
    step = scale_and_zero[..., 0].T.repeat_interleave(64, 1)
    assert ((restored(values, scale_and_zero, 64) - weight).abs() <= 0.5001 * step).all()


def test_symmetric_is_the_nearest_of_sixteen_steps_around_0() -> None:
    """From -8 to 7 of them: the value of the largest magnitude has -8."""
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    values, scale_and_zero = quantize_weight(weight, 64, "symmetric")
    assert not scale_and_zero[..., 1].any()
    for row in range(5):
        for group in range(2):
            part = weight[row, 64 * group : 64 * group + 64].tolist()
            scale = max(part, key=abs) / -8
            assert scale_and_zero[group, row, 0] == pytest.approx(scale)
            expected = [min(round(w / scale) + 8, 15) for w in part]
            assert values[row, 64 * group : 64 * group + 64].tolist() == expected
            assert expected[part.index(scale * -8)] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["rtn", "symmetric"])
def test_the_library_gives_the_same_bits(method: str, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 200, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight[3] = 0
    got, expected = (make(weight, 64, method, 40, 256) for make in (quantize_int4, quantize_int4_reference))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[2] == pytest.approx(expected[2], rel=1e-5)


def test_hqq_is_as_published() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 96, generator=generator) * torch.rand(6, 1, generator=generator)
    _, scale_and_zero = quantize_weight(weight, 32, "hqq")
    for row in range(6):
        for group in range(3):
            scale, zero = hqq_of_group(weight[row, 32 * group : 32 * group + 32].double().tolist())
            assert scale_and_zero[group, row].tolist() == pytest.approx([scale, zero], rel=1e-4, abs=1e-6)


@hypothesis.given(
    n=st.integers(1, 20),
    k=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128, 256]),
    method=st.sampled_from(["rtn", "symmetric", "hqq"]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    shift=st.sampled_from([0.0, 1.0, -5.0]),
    seed=st.integers(0, 2**31),
)
@hypothesis.example(n=1, k=1, group=32, method="rtn", dtype=torch.float16, scale=1e-6, shift=1.0, seed=106)
@hypothesis.settings(deadline=None, max_examples=80)
def test_no_weight_is_further_away_than_it_has_to_be(
    n: int, k: int, group: int, method: str, dtype: torch.dtype, scale: float, shift: float, seed: int
) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    weight = ((weight + shift) * scale).to(dtype)
    padded = -(-k // group) * group + group
    values, scale_and_zero = quantize_weight(weight, group, method, padded)
    assert values.shape == (n, padded)
    assert int(values.max()) <= 15
    assert scale_and_zero.shape == (padded // group, n, 2)
    assert scale_and_zero.dtype == dtype
    assert scale_and_zero.isfinite().all()
    assert not scale_and_zero[-1].any()  # nothing but padding
    back = restored(values, scale_and_zero, group)[:, :k]
    # For the scale and zero that are stored, no other value of the sixteen is nearer.
    zero = scale_and_zero[..., 1].T.float().repeat_interleave(group, 1)[:, :k]
    step = scale_and_zero[..., 0].T.float().repeat_interleave(group, 1)[:, :k]
    all_of_them = (torch.arange(16) - 8) * step.unsqueeze(-1) + zero.unsqueeze(-1)
    nearest = (all_of_them - weight.float().unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close((back - weight.float()).abs(), nearest, rtol=1e-3, atol=1e-6 * float(step.abs().max()))
    size = torch.linalg.vector_norm(weight.double()).clamp(min=1e-30)  # float16 may round all of it to zero
    own = torch.linalg.vector_norm((back - weight.float()).double()) / size
    assert relative_error(weight, values, scale_and_zero, group) == pytest.approx(float(own), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("method", ["rtn", "symmetric", "hqq"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_does_not_change_a_group(method: str, dtype: torch.dtype) -> None:
    weight = (torch.randn(7, 40, generator=torch.Generator().manual_seed(2)) + 3).to(dtype)
    values, scale_and_zero = quantize_weight(weight, 32, method, 128)
    whole, scales = quantize_weight(weight[:, :32].contiguous(), 32, method)
    assert torch.equal(values[:, :32], whole)
    assert torch.equal(scale_and_zero[:1], scales)
    # The group of 8 weights is what the same 8 give when they are repeated: same range, same means.
    repeated, scales = quantize_weight(weight[:, 32:].repeat(1, 4), 32, method)
    assert torch.equal(values[:, 32:40], repeated[:, :8])
    torch.testing.assert_close(scale_and_zero[1:2], scales)


@pytest.mark.parametrize("method", ["rtn", "hqq"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_are_exact(method: str, dtype: torch.dtype) -> None:
    weight = torch.tensor([0.0, 1.0, -3.14, 1e-6, 6e4]).to(dtype)[:, None].expand(5, 64).contiguous()
    values, scale_and_zero = quantize_weight(weight, 64, method)
    assert (values == 8).all()
    assert torch.equal(restored(values, scale_and_zero, 64), weight.float())
    assert relative_error(weight, values, scale_and_zero, 64) == 0.0
    assert relative_error(torch.zeros(2, 64), torch.full((2, 64), 8).byte(), torch.zeros(1, 2, 2), 64) == 0.0


@pytest.mark.parametrize("method", ["rtn", "symmetric", "hqq"])
def test_chunks_and_threads_do_not_matter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 200, generator=torch.Generator().manual_seed(3))
    once = quantize_weight(weight, 64, method, 256)
    monkeypatch.setattr(chunks, "_CHUNK", 700)
    for a, b in zip(once, quantize_weight(weight, 64, method, 256), strict=True):
        assert torch.equal(a, b)


def test_hqq_has_a_smaller_error_on_weights_with_outliers() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(64, 512, generator=generator)
    weight *= 1 + 10 * (torch.rand(64, 512, generator=generator) > 0.995)
    absolute = {}
    for method in ("rtn", "hqq"):
        values, scale_and_zero = quantize_weight(weight, 64, method)
        absolute[method] = float((restored(values, scale_and_zero, 64) - weight).abs().mean())
    assert absolute["hqq"] < 0.99 * absolute["rtn"]

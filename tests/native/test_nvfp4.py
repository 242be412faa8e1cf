"""NVFP4 on the CPU: the linear layer and the mixture of experts against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_weights import BF16, E4M3, F16, F32, Args, linear_refusals, random_weight
from tests.native.shim import Opt, ShimError, call
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4, pack_nvfp4_tiles

ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}
LINEAR, MOE = "aoti_torch_cpu_nvfp4_linear", "aoti_torch_cpu_nvfp4_moe"


def linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, world: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    got: torch.Tensor = call(LINEAR, x, packed, scales, world, Opt(bias), returns=1)
    return got


def close(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, rounding: float) -> bool:
    least = torch.finfo(got.dtype).smallest_normal * rounding  # half a step of subnormal numbers
    return bool(torch.all((got.double() - want).abs() <= want.abs() * rounding + size * 2.0**-18 + least))


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_nvfp4_linear(data: st.DataObject) -> None:
    draw = data.draw
    tiles = draw(st.sampled_from([0, 2, 4, 8]))
    n = draw(st.integers(1, 70)) if tiles == 0 else 8 * draw(st.integers(1, 12))
    k = 16 * max(tiles, 1) * draw(st.integers(1, 640 // (16 * max(tiles, 1))))
    seed = draw(st.integers(0, 99))
    packed, scales = random_weight(n, k, seed=seed)
    world = draw(st.sampled_from([torch.tensor(0.03), torch.tensor([2.5]), torch.rand(n) + 0.1]))
    dense = dequantize_nvfp4(packed, scales, world, torch.float64)
    width = k if draw(st.booleans()) else draw(st.integers(0, k))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    m = draw(st.integers(0, 10) | st.sampled_from([33, 200]))
    generator = torch.Generator().manual_seed(seed)
    match draw(st.sampled_from(["rows", "wide", "repeated", "batch", "transposed batch", "vector"])):
        case "wide":
            x = torch.randn(m, width + 3, generator=generator).to(dtype)[:, 3:]
        case "repeated":
            x = torch.randn(width, generator=generator).to(dtype).expand(m, width)
        case "batch":
            x = torch.randn(2, m, 1, width, generator=generator).to(dtype)
        case "transposed batch":
            x = torch.randn(m, 3, width, generator=generator).to(dtype).transpose(0, 1)
        case "vector":
            x = torch.randn(width, generator=generator).to(dtype)
        case _:
            x = torch.randn(m, width, generator=generator).to(dtype)
    bias = draw(st.sampled_from([None, torch.randn(n).to(dtype), torch.randn(2 * n).to(dtype)[::2]]))
    got = linear(x, packed if tiles == 0 else pack_nvfp4_tiles(packed, tiles), scales, world, bias)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*x.shape[:-1], n), dtype, True)
    added = torch.zeros(1).double() if bias is None else bias.double()
    dense = dense[:, :width]
    want, size = x.double() @ dense.t() + added, x.double().abs() @ dense.abs().t() + added.abs()
    assert close(got, want, size, ROUNDING[dtype])


def test_every_value() -> None:
    """Exact: all codes with all scales, in both layouts."""
    codes = torch.arange(16).repeat(256, 8)
    scales = torch.arange(256, dtype=torch.uint8).view(E4M3).reshape(256, 1).expand(256, 8).contiguous()
    finite = torch.isfinite(scales[:, 0].float())
    packed, eye = pack_nvfp4(codes), torch.eye(128)
    want = dequantize_nvfp4(packed, scales, torch.tensor(0.5))
    for weight in (packed, pack_nvfp4_tiles(packed)):
        got = linear(eye, weight, scales, torch.tensor(0.5)).t()
        assert torch.equal(got[finite], want[finite])
        assert got[~finite].isnan().all()


def refusal(change: dict[str, Any], text: str) -> Any:
    return pytest.param(change, text, id=text[:40])


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("args", "expected"), linear_refusals(zeros))
def test_refused_linear(args: Args, expected: str) -> None:
    with pytest.raises(ShimError) as error:
        call(LINEAR, *args[:4], Opt(args[4]), returns=1)
    assert str(error.value) == expected


def experts(e: int, k: int, width: int, two: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    (w13, w13_scale), (w2, w2_scale) = random_weight(e, 2 * width, k, seed=seed), random_weight(e, k, width, seed=seed)
    shape = (e, 2) if two else (e,)
    return {
        "w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale,
        "w13_global": torch.rand(shape) * 0.1 + 0.01, "w2_global": torch.rand(e) * 0.1 + 0.01,
    }  # fmt: skip


def moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    names = ("w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global")
    got: torch.Tensor = call(MOE, x, weights, ids, *(given[name] for name in names), returns=1)
    return got


def one_by_one(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, token by token; and the same of absolute values."""
    width = given["w13"].shape[1] // 2
    y, size = torch.zeros(x.shape).double(), torch.zeros(x.shape).double()
    for m in range(x.shape[0]):
        for j, expert in enumerate(ids[m].tolist()):
            if expert < 0:
                continue
            world = given["w13_global"][expert].reshape(-1).expand(2).repeat_interleave(width)
            w13 = dequantize_nvfp4(given["w13"][expert], given["w13_scale"][expert], world, torch.float64)
            w2 = dequantize_nvfp4(
                given["w2"][expert], given["w2_scale"][expert], given["w2_global"][expert], torch.float64
            )
            gate, up = (w13 @ x[m].double()).chunk(2)
            most_gate, most_up = (w13.abs() @ x[m].double().abs()).chunk(2)
            y[m] += float(weights[m, j]) * (w2 @ (F.silu(gate) * up))
            size[m] += abs(float(weights[m, j])) * (w2.abs() @ (most_gate * most_up))
    return y, size


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nvfp4_moe(data: st.DataObject) -> None:
    draw = data.draw
    e, k, width = draw(st.sampled_from([1, 3, 16, 256])), 16 * draw(st.integers(1, 6)), 16 * draw(st.integers(1, 4))
    m, top_k, seed = draw(st.sampled_from([0, 1, 2, 7, 40])), draw(st.integers(1, 8)), draw(st.integers(0, 99))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    given_weights = experts(e, k, width, draw(st.booleans()), seed)
    generator = torch.Generator().manual_seed(seed)
    low = draw(st.sampled_from([-1, 0]))
    ids = torch.randint(low, e, (m, top_k), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):
        ids[:] = e - 1  # all on one expert
    weights = torch.rand((m, top_k), generator=generator)
    x = torch.randn((m, k + 5), generator=generator).to(dtype)
    x = x[:, 5:] if draw(st.booleans()) else x[:, :k].contiguous()
    got = moe(x, weights, ids, given_weights)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((m, k), dtype, True)
    want, size = one_by_one(x, weights, ids, given_weights)
    assert close(got, want, size, ROUNDING[dtype])
    assert torch.equal(moe(x, weights, ids, given_weights), got)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        refusal({"x": torch.ones(3, 32).double()}, "argument 'hidden_states' must be float32, bfloat16 or float16"),
        refusal({"x": torch.ones(3, 2, 32)}, "argument 'hidden_states' must be 2-D"),
        refusal({"x": torch.ones(3, 48)}, r"argument 'w13' must have shape \[4, 64, 24\], got \[4, 64, 16\]"),
        refusal({"x": torch.ones(3, 33)}, "argument 'hidden_states' must have a multiple of 16"),
        refusal({"x": torch.ones(32, 3).t()}, "argument 'hidden_states' must have a contiguous last dimension"),
        refusal({"weights": torch.ones(3, 2).double()}, "argument 'topk_weights' must be float32, got float64"),
        refusal({"weights": torch.ones(2, 2)}, r"argument 'topk_weights' must have shape \[3, 2\], got \[2, 2\]"),
        refusal({"ids": torch.zeros(3, 2).long()}, "argument 'topk_ids' must be int32, got int64"),
        refusal({"ids": torch.zeros(3, 1).int()}, r"argument 'topk_ids' must have shape \[3, 2\], got \[3, 1\]"),
        refusal(
            {"ids": torch.full((3, 2), 4).int()}, "'topk_ids' must have experts from 0 to 3, or -1 .* got 4 for tok"
        ),
        refusal({"ids": torch.full((3, 2), -2).int()}, "'topk_ids' must have experts from 0 to 3, or -1 .* got -2"),
        refusal({"w13": torch.zeros(4, 48, 16).byte()}, r"two times a multiple of 16 rows, got shape \[4, 48, 16\]"),
        refusal({"w13": torch.zeros(4, 64, 16)}, "argument 'w13' must be uint8, got float32"),
        refusal({"w2": torch.zeros(4, 32, 15).byte()}, r"argument 'w2' must have shape \[4, 32, 16\]"),
        refusal({"w2_scale": torch.ones(4, 32, 2)}, "argument 'w2_scale' must be float8_e4m3fn"),
        refusal({"w13_scale": torch.ones(4, 2, 64).to(E4M3).mT}, "argument 'w13_scale' must be contiguous"),
        refusal({"w13_global": torch.ones(4, 3)}, r"argument 'w13_global' must have shape \[4, 2\], got \[4, 3\]"),
        refusal({"w2_global": torch.ones(())}, r"argument 'w2_global' must have shape \[4\], got \[\]"),
    ],
)
def test_refused_moe(change: dict[str, Any], text: str) -> None:
    given_weights = {**experts(4, 32, 32, False), **{name: v for name, v in change.items() if name.startswith("w1")}}
    given_weights |= {name: value for name, value in change.items() if name.startswith("w2")}
    x, weights = change.get("x", torch.ones(3, 32)), change.get("weights", torch.ones(3, 2))
    with pytest.raises(ShimError, match="nvfp4_moe: .*" + text):
        moe(x, weights, change.get("ids", torch.zeros(3, 2).int()), given_weights)

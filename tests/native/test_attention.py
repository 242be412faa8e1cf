"""Attention on the CPU against eager PyTorch: shapes, layouts, masks, GQA, dtypes, instruction sets and error texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import Opt, ShimError, call

from tests.native.instruction_sets import skip_if_own

NAME = "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"
EAGER = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Queries, keys, width, causal, with a mask.
CASES = ((50, 131, 64, False, False), (97, 97, 33, True, False), (1, 257, 16, False, True))
LAYOUTS = ["rows", "fused", "sequence first", "sliced", "transposed", "one batch"]


def heads(b: int, h: int, length: int, e: int, dtype: torch.dtype, layout: str = "rows", seed: int = 0) -> torch.Tensor:
    """A [b, h, length, e] tensor in one of the layouts that models have."""
    g = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64).to(dtype)

    if layout == "fused":
        return randn(b, length, 3, h, e)[:, :, 1].transpose(1, 2)
    if layout == "sequence first":
        return randn(length, b, h, e).permute(1, 2, 0, 3)
    if layout == "sliced":
        return randn(b, h, length, e + 5)[..., 2 : e + 2]
    if layout == "transposed":
        return randn(b, h, e, length).transpose(2, 3)
    if layout == "one batch":
        return randn(1, h, length, e).expand(b, h, length, e)
    return randn(b, h, length, e)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, causal: bool = False, scale: Any = None
) -> Any:
    return call(NAME, q, k, v, 0.0, causal, Opt(mask), Opt(scale, "double"), returns=2)


def verify(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, causal: bool = False, scale: Any = None
) -> None:
    out, lse = run(q, k, v, mask, causal, scale)
    # Eager's kernel takes the last dimension to be contiguous without looking: it gets values that are.
    dense = q if q.stride(-1) == 1 or q.size(-1) == 1 else q.contiguous()
    result, expected_lse = EAGER(dense, k.contiguous(), v.contiguous(), 0.0, causal, attn_mask=mask, scale=scale)
    expected = torch.empty_like(q).copy_(result)
    assert (out.dtype, out.shape, out.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (lse.dtype, lse.shape, lse.stride()) == (expected_lse.dtype, expected_lse.shape, expected_lse.stride())
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        lse, expected_lse, rtol=max(tolerance, 2e-5) if q.dtype != torch.float64 else 1e-12, atol=tolerance
    )


lengths = st.integers(1, 150)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), lengths, lengths, st.sampled_from([1, 7, 16, 20, 32, 64]),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from(list(TOLERANCE)),
)  # fmt: skip
def test_shapes_and_layouts(
    b: int, h: int, lq: int, lk: int, e: int, q: str, k: str, v: str, causal: bool, dtype: torch.dtype
) -> None:
    verify(
        heads(b, h, lq, e, dtype, q), heads(b, h, lk, e, dtype, k, 1), heads(b, h, lk, e, dtype, v, 2), causal=causal
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(2, 3), (1, 3), (2, 1), (1, 1), None]), st.booleans(), st.booleans(), st.booleans(),
    st.booleans(), st.sampled_from(list(TOLERANCE)), st.integers(1, 140),
)  # fmt: skip
def test_masks(batch: Any, rows: bool, cols: bool, expand: bool, causal: bool, dtype: torch.dtype, lk: int) -> None:
    lq = 50
    shape = (*(batch or ()), lq if rows else 1, lk if cols else 1)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    if rows and cols:
        mask = mask.masked_fill(mask < -1, float("-inf"))
    if expand:
        mask = mask.expand((2, 3, lq, lk) if batch else (lq, lk))
    q, k, v = (heads(2, 3, n, 16, dtype, seed=i) for i, n in enumerate((lq, lk, lk)))
    verify(q, k, v, mask=mask, causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float_mask_serves_half_queries(dtype: torch.dtype) -> None:
    x = heads(2, 3, 20, 16, dtype)
    verify(x, x, x, mask=torch.randn(20, 20))


@pytest.mark.parametrize("hidden", [1, 130, 260])
def test_rows_without_a_key_are_zero(hidden: int) -> None:
    """Masked rows, and rows whose first key blocks are masked."""
    q, k, v = (heads(1, 2, n, 32, torch.float32, seed=i) for i, n in enumerate((40, 300, 300)))
    mask = torch.zeros(40, 300)
    mask[3] = float("-inf")
    mask[7, :hidden] = float("-inf")
    mask[9, -hidden:] = float("-inf")
    verify(q, k, v, mask=mask)
    out, lse = run(q, k, v, mask)
    assert not out[:, :, 3].any() and not lse[:, :, 3].any()


def test_large_negative_masks() -> None:
    q = heads(1, 2, 40, 32, torch.float32)
    mask = torch.zeros(40, 40)
    mask[:, 20:] = torch.finfo(torch.float32).min
    mask[5] = torch.finfo(torch.float32).min
    verify(q, q, q, mask=mask)


@pytest.mark.parametrize("scale", [0.0, 0.3, -1.0, 10.0])
def test_scale(scale: float) -> None:
    q, k = heads(2, 3, 33, 16, torch.float32), heads(2, 3, 47, 16, torch.float32, seed=1)
    verify(q, k, k, scale=scale)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_grouped_heads(kv_heads: int, dtype: torch.dtype) -> None:
    k, v = (heads(2, kv_heads, 70, 32, dtype, seed=i) for i in (1, 2))
    verify(heads(2, 4, 60, 32, dtype), k, v)


def test_nan_stays_nan() -> None:
    q = heads(1, 1, 20, 16, torch.float32)
    k = q.clone()
    k[0, 0, 3, 2] = float("nan")
    assert run(q, k, q)[0].isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8), (2, 2, 5, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    q = torch.empty(shape)
    out, lse = run(q, q, q)
    assert out.shape == shape and lse.shape == shape[:3] and out.numel() == 0


def test_no_keys_give_zeros() -> None:
    q = torch.randn(2, 3, 5, 8)
    none = torch.empty(2, 3, 1, 8)[:, :, :0]
    out, lse = run(q, none, none)
    assert not out.any() and not lse.any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.ones(2, 5, 8)}, "argument 'query' must be 4-D (batch, heads, length, width), got shape [2, 5, 8]"),
        ({"k": torch.ones(1, 2, 5, 8).double()}, "argument 'key' must be float32 like 'query', got float64"),
        ({"v": torch.ones(1, 2, 5, 4)}, "argument 'value' must have the width 8 of 'query', got shape [1, 2, 5, 4]"),
        ({"v": torch.ones(1, 2, 4, 8)},
         "'key' and 'value' must agree in heads and length, got [1, 2, 5, 8] and [1, 2, 4, 8]"),
        ({"q": torch.ones(1, 3, 5, 8)}, "the 3 heads of 'query' must be a multiple of the 2 heads of 'key'"),
        ({"q": torch.ones(3, 2, 5, 8)},
         "the batch sizes differ: 'query' is [3, 2, 5, 8], 'key' is [1, 2, 5, 8], 'value' is [1, 2, 5, 8]"),
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "argument 'attn_mask' must be float32 like 'query', got bool"),
        ({"mask": torch.ones(2, 5, 5)}, "argument 'attn_mask' must be 2-D or 4-D, got shape [2, 5, 5]"),
        ({"mask": torch.ones(5, 4)}, "argument 'attn_mask' of shape [5, 4] does not broadcast to [1, 2, 5, 5]"),
        ({"q": torch.ones(1, 2, 5, 8, dtype=torch.int64)},
         "argument 'query' must be float16, bfloat16, float32 or float64, got int64"),
        ({"dropout": 0.5}, "dropout_p must be 0, got 0.5; export the model in eval mode"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], text: str) -> None:
    x = torch.ones(1, 2, 5, 8)
    with pytest.raises(ShimError) as caught:
        call(
            NAME, change.get("q", x), change.get("k", x), change.get("v", x), change.get("dropout", 0.0), False,
            Opt(change.get("mask")), Opt(None, "double"), returns=2,
        )  # fmt: skip
    assert str(caught.value) == f"_scaled_dot_product_flash_attention_for_cpu: {text}"


_LEVELS = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from test_attention import CASES, heads, run
out = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for lq, lk, e, causal, masked in CASES:
        q, k, v = (heads(2, 4, n, e, dtype, seed=i) for i, n in enumerate((lq, lk, lk)))
        mask = torch.randn(lq, lk, generator=torch.Generator().manual_seed(3)) if masked else None
        out += [x.float() for x in run(q, k[:, :2], v[:, :2], mask, causal)]
torch.save(out, sys.argv[1])
"""


def _values(path: Path, **environment: str) -> list[torch.Tensor]:
    env = {**os.environ, **environment}
    subprocess.run([sys.executable, "-c", _LEVELS, str(path), str(Path(__file__).parent)], check=True, env=env)
    values: list[torch.Tensor] = torch.load(path)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "v3", "v4", None])
def test_every_level_of_instructions_and_number_of_threads(isa: str | None, tmp_path: Path) -> None:
    """None: what this CPU has on top of v4, too."""
    if isa is not None:
        skip_if_own(isa)
    level = {} if isa is None else {"UNTORCH_ISA": isa}
    one = _values(tmp_path / "1", OMP_NUM_THREADS="1", **level)
    three = _values(tmp_path / "3", OMP_NUM_THREADS="3", **level)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    index = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for lq, lk, e, causal, masked in CASES:
            q, k, v = (heads(2, 4, n, e, dtype, seed=i).double() for i, n in enumerate((lq, lk, lk)))
            k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
            scores = q @ k.mT / e**0.5
            if masked:
                scores = scores + torch.randn(lq, lk, generator=torch.Generator().manual_seed(3))
            if causal:
                scores = scores.masked_fill(torch.ones(lq, lk).triu(1).bool(), float("-inf"))
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(one[index], (scores.softmax(-1) @ v).float(), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(one[index + 1], scores.logsumexp(-1).float(), rtol=1e-3, atol=1e-3)
            index += 2

"""RMS norm, grid sampling, distances, the trilinear product and dropout against PyTorch's eager operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, ShimError, call

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel() > 0:  # strides of dimensions of size 1 do not matter
        assert all(n == 1 or a == b for n, a, b in zip(want.shape, got.stride(), want.stride(), strict=True))
    bound = tolerance if tolerance is not None else TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rms_norm(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    x = torch.randn(shape).to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        x = x.transpose(0, 1)
    n = draw(st.integers(1, len(shape)))
    inner = list(x.shape[-n:])
    weight = torch.randn(inner).to(dtype) if draw(st.booleans()) else None
    eps = draw(st.sampled_from([None, 1e-3]))
    want = torch.ops.aten._fused_rms_norm(x, inner, weight, eps)
    got = call("aoti_torch_cpu__fused_rms_norm", x, inner, Opt(weight), Opt(eps, "double"), returns=2)
    close(got[0], want[0])
    close(got[1], want[1], TOLERANCE[dtype])


def test_rms_norm_large_and_mixed() -> None:
    x, weight = torch.randn(300, 515).bfloat16(), torch.randn(515)
    want = torch.ops.aten._fused_rms_norm(x, [515], weight, 1e-6)
    got = call("aoti_torch_cpu__fused_rms_norm", x, [515], Opt(weight), Opt(1e-6, "double"), returns=2)
    close(got[0], want[0])
    close(got[1], want[1], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1])
def test_grid_sampler_3d(mode: int, padding: int, align: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 5, 6, dtype=dtype).transpose(2, 3)
    grid = torch.rand(2, 7, 8, 9, 3, dtype=dtype) * 4 - 2
    if padding != 2:
        grid[0, 0, 0, 0] = torch.nan
        grid[0, 0, 0, 1] = 1e20
    want = torch.ops.aten.grid_sampler_3d(x, grid, mode, padding, align)
    close(call("aoti_torch_cpu_grid_sampler_3d", x, grid, mode, padding, align, returns=1), want, 1e-4)


@settings(max_examples=80, deadline=None)
@given(
    p=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, float("inf")]), mode=st.sampled_from([None, 0, 1, 2]),
    rows=st.integers(0, 40), columns=st.integers(0, 40), n=st.integers(0, 9), double=st.booleans(),
)  # fmt: skip
def test_cdist(p: float, mode: int | None, rows: int, columns: int, n: int, double: bool) -> None:
    dtype = torch.float64 if double else torch.float32
    x1 = torch.randn(3, 1, n, rows, dtype=dtype).transpose(-1, -2)
    x2 = torch.randn(2, columns, n, dtype=dtype)
    want = torch.ops.aten._cdist_forward(x1, x2, p, mode)
    got = call("aoti_torch_cpu__cdist_forward", x1, x2, p, Opt(mode, "int64"), returns=1)
    assert got.shape == want.shape
    if p == 2.0:  # |a|² + |b|² - 2 a·b is exact to a few ulp of |a|²; its root for near points is not
        got, want = got.square(), want.square()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_pdist(rows: int, p: float) -> None:
    x = torch.randn(rows, 7)
    want = torch.ops.aten._pdist_forward(x, p)
    close(call("aoti_torch_cpu__pdist_forward", x, p, returns=1), want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_trilinear(dtype: torch.dtype) -> None:
    # What torch.nn.Bilinear calls: x1 [batch, i], w [out, i, j], x2 [batch, j].
    x1, w, x2 = torch.randn(5, 4).to(dtype), torch.randn(3, 4, 6).to(dtype), torch.randn(5, 6).to(dtype)
    lists = ([1, 3], [0], [1, 2], [2, 3])
    want = torch.ops.aten._trilinear(x1.double(), w.double(), x2.double(), *lists, 1).to(dtype)
    got = call("aoti_torch_cpu__trilinear", x1, w, x2, *lists, 1, returns=1)
    close(got, want, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_trilinear_large() -> None:
    x1, w, x2 = torch.randn(20, 16), torch.randn(24, 16, 18), torch.randn(20, 18)
    lists = ([1, 3], [0], [1, 2], [2, 3])
    want = torch.ops.aten._trilinear(x1, w, x2, *lists, 1)
    torch.testing.assert_close(
        call("aoti_torch_cpu__trilinear", x1, w, x2, *lists, 1, returns=1), want, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_outside_of_training(dtype: torch.dtype) -> None:
    for x in (torch.randn(2, 3, 4).to(dtype).transpose(0, 2), torch.randn(3, 1).to(dtype).expand(3, 4)):
        want = torch.ops.aten.native_dropout(x, 0.5, False)
        got = call("aoti_torch_cpu_native_dropout", x, 0.5, Opt(0, "int32"), returns=2)
        close(got[0], want[0], 0.0)
        assert got[1].stride() == want[1].stride()
        assert torch.equal(got[1], want[1])


A = torch.zeros(4, 3)
V, G = torch.zeros(1, 1, 2, 2, 2), torch.zeros(1, 1, 1, 1, 3)
ERRORS = {
    "rms count": ("_fused_rms_norm", (A, [], None, None), 2, "argument 'normalized_shape' must have 1 to 2 values, got []"),
    "rms shape": ("_fused_rms_norm", (A, [4], None, None), 2, "argument 'input' must end in [4], got shape [4, 3]"),
    "rms weight": ("_fused_rms_norm", (A, [3], Opt(A[0, :2]), None), 2, "argument 'weight' must have shape [3], got [2]"),
    "grid input": ("grid_sampler_3d", (V[0], G, 0, 0, False), 1, "argument 'input' must be 5-D, got shape [1, 2, 2, 2]"),
    "grid": ("grid_sampler_3d", (V, G[..., :2], 0, 0, False), 1, "argument 'grid' must have shape [1, d, h, w, 3], got [1, 1, 1, 1, 2]"),
    "grid dtype": ("grid_sampler_3d", (V, G.double(), 0, 0, False), 1, "argument 'grid' must be float32 like input, got float64"),
    "grid mode": ("grid_sampler_3d", (V, G, 2, 0, False), 1, "argument 'interpolation_mode' must be 0 (bilinear) or 1 (nearest), got 2"),
    "grid padding": ("grid_sampler_3d", (V, G, 0, 3, False), 1, "argument 'padding_mode' must be 0 (zeros), 1 (border) or 2 (reflection), got 3"),
    "grid empty": ("grid_sampler_3d", (V[:, :, :0], G, 0, 0, False), 1, "argument 'input' must not be empty but for the batch, got shape [1, 1, 0, 2, 2]"),
    "cdist rows": ("_cdist_forward", (A, A[:, :2], 2.0, None), 1, "x1 and x2 must have rows of one length, got shapes [4, 3] and [4, 2]"),
    "cdist rank": ("_cdist_forward", (A, A[0], 2.0, None), 1, "x1 and x2 must be at least 2-D, got shapes [4, 3] and [3]"),
    "cdist p": ("_cdist_forward", (A, A, -1.0, None), 1, "argument 'p' must not be negative, got -1"),
    "cdist mode": ("_cdist_forward", (A, A, 2.0, Opt(3, "int64")), 1, "argument 'compute_mode' must be 0, 1 or 2, got 3"),
    "cdist dtypes": ("_cdist_forward", (A, A.double(), 2.0, None), 1, "x1 is float32 but x2 is float64"),
    "cdist dtype": ("_cdist_forward", (A.half(), A.half(), 2.0, None), 1, "dtype float16 is not supported, expected float32 or float64"),
    "cdist batch": ("_cdist_forward", (torch.zeros(2, 1, 3), torch.zeros(3, 1, 3), 2.0, None), 1, "the batch dimensions of [2, 1, 3] and [3, 1, 3] do not broadcast"),
    "pdist rank": ("_pdist_forward", (A[0], 2.0), 1, "argument 'self' must be 2-D, got shape [3]"),
    "trilinear": ("_trilinear", (A, A, A, [1], [0], [], [0], 0), 1, "the operands must have one number of dimensions once expanded, got shapes [4, 3], [4, 3] and [4, 3]"),
    "trilinear shapes": ("_trilinear", (A, A[:2], A, [], [], [], [0], 0), 1, "the operands do not broadcast: [4, 3], [2, 3] and [4, 3]"),
    "dropout p": ("native_dropout", (A, 2.0, Opt(0, "int32")), 2, "argument 'p' must be between 0 and 1, got 2"),
    "dropout train": ("native_dropout", (A, 0.5, Opt(1, "int32")), 2, "argument 'train' must be false, got true; call model.eval() before the export"),
    "dropout none": ("native_dropout", (A, 0.5, None), 2, "argument 'train' must be false, got none (which means true); call model.eval() before the export"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    name, args, returns, text = ERRORS[case]
    with pytest.raises(ShimError) as failure:
        call(f"aoti_torch_cpu_{name}", *args, returns=returns)
    assert str(failure.value) == f"{name}: {text}"

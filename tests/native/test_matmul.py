"""GEMM operators against eager PyTorch: dtypes, strides, empty operands, broadcasting and error texts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import ShimError, call

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128]
LAYOUTS = ["rows", "columns", "sliced", "strided", "expanded"]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12, torch.complex128: 1e-12}


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "rows", seed: int = 0) -> torch.Tensor:
    """A tensor of small values whose last two dimensions have the layout asked for."""
    generator = torch.Generator().manual_seed(seed)

    def values(*sizes: int) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            compute = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(*sizes, generator=generator, dtype=compute).to(dtype)
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, sizes, generator=generator).to(dtype)

    *batch, rows, cols = shape
    if layout == "columns":
        return values(*batch, cols, rows).transpose(-1, -2)
    if layout == "sliced":
        wide = values(*(max(n, 1) for n in batch), rows + 1, cols + 3)  # never without memory
        return wide[tuple(slice(n) for n in batch)][..., 1:, 2 : cols + 2]
    if layout == "strided":
        return values(*batch, rows * 2, cols * 3)[..., ::2, ::3]
    if layout == "expanded":
        return values(*batch, 1, cols).expand(*batch, rows, cols)
    return values(*shape)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE.get(expected.dtype, 2e-5)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 10)


sizes = st.integers(0, 40)
layouts = st.sampled_from(LAYOUTS)


@settings(max_examples=150, deadline=None)
@given(sizes, sizes, sizes, layouts, layouts, st.sampled_from(LAYOUTS[:4]), st.sampled_from(DTYPES))
def test_mm(m: int, n: int, k: int, a: str, b: str, c: str, dtype: torch.dtype) -> None:
    x, y, out = make((m, k), dtype, a), make((k, n), dtype, b, 1), make((m, n), dtype, c, 2)
    call("aoti_torch_cpu_mm_out", out, x, y)
    close(out, torch.mm(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 7, 12, 13, 130, 500])
@pytest.mark.parametrize(("n", "k"), [(1, 700), (33, 1100), (600, 70), (520, 400)])
@pytest.mark.parametrize("columns", [False, True])
def test_mm_blocks(m: int, n: int, k: int, columns: bool, dtype: torch.dtype) -> None:
    """Sizes that cross the blocks of the drivers, and the threads."""
    x, y, out = make((m, k), dtype), make((k, n), dtype, "columns" if columns else "rows", 1), make((m, n), dtype)
    call("aoti_torch_cpu_mm_out", out, x, y)
    expected = x.double() @ y.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-11 if dtype == torch.float64 else 5e-4)


def test_mm_leaves_the_rest_of_a_strided_out_alone() -> None:
    base = torch.full((6, 9), 7.0)
    call("aoti_torch_cpu_mm_out", base[1:4, 2:7], torch.ones(3, 4), torch.ones(4, 5))
    expected = torch.full((6, 9), 7.0)
    expected[1:4, 2:7] = 4.0
    assert torch.equal(base, expected)


@settings(max_examples=100, deadline=None)
@given(
    sizes, sizes, sizes, st.sampled_from(["full", "row", "column", "one", "scalar", "vector"]), layouts,
    st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from(DTYPES),
)  # fmt: skip
def test_addmm(m: int, n: int, k: int, form: str, b: str, beta: float, alpha: float, dtype: torch.dtype) -> None:
    shape = {"full": (m, n), "row": (1, n), "column": (m, 1), "one": (1, 1), "scalar": (1, 1), "vector": (1, n)}[form]
    added = make(shape, dtype, seed=3)
    added = added[0, 0] if form == "scalar" else added[0] if form == "vector" else added
    x, y, out = make((m, k), dtype), make((k, n), dtype, b, 1), make((m, n), dtype, seed=4)
    call("aoti_torch_cpu_addmm_out", out, added, x, y, beta, alpha)
    exact = dtype.is_floating_point and dtype not in (torch.float32, torch.float64)
    wide = [t.float() if exact else t for t in (added, x, y)]
    scalars = (beta, alpha) if dtype.is_floating_point or dtype.is_complex else (int(beta), int(alpha))
    close(out, torch.addmm(*wide, beta=scalars[0], alpha=scalars[1]).to(dtype))


def test_addmm_accumulates_in_place() -> None:
    out, x, y = make((5, 6), torch.float32), make((5, 7), torch.float32), make((7, 6), torch.float32, seed=1)
    expected = torch.addmm(out, x, y, beta=0.5)
    call("aoti_torch_cpu_addmm_out", out, out, x, y, 0.5, 1.0)
    close(out, expected)


@pytest.mark.parametrize("k", [0, 3])
def test_beta_zero_does_not_read_self(k: int) -> None:
    nan, out = torch.full((2, 2), float("nan")), torch.full((2, 2), float("nan"))
    call("aoti_torch_cpu_addmm_out", out, nan, torch.ones(2, k), torch.ones(k, 2), 0.0, 1.0)
    assert torch.equal(out, torch.full((2, 2), float(k)))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 5), sizes, sizes, sizes, layouts, layouts, st.sampled_from(DTYPES))
def test_bmm(batch: int, m: int, n: int, k: int, a: str, b: str, dtype: torch.dtype) -> None:
    x, y, out = make((batch, m, k), dtype, a), make((batch, k, n), dtype, b, 1), make((batch, m, n), dtype)
    call("aoti_torch_cpu_bmm_out", out, x, y)
    close(out, torch.bmm(x, y))


@pytest.mark.parametrize("dtype", FLOATS)
def test_bmm_in_threads(dtype: torch.dtype) -> None:
    x, y, out = make((9, 70, 65), dtype), make((9, 65, 60), dtype, "columns", 1), make((9, 70, 60), dtype)
    call("aoti_torch_cpu_bmm_out", out, x, y)
    close(out, torch.bmm(x.double(), y.double()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 6), (1, 5, 6), (5, 1), (6,), ()])
def test_baddbmm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    added = make((1, *shape) if len(shape) > 1 else (1, *shape, 1)[:3] if shape else (1, 1), dtype, seed=3).reshape(
        shape
    )
    x, y, out = make((3, 5, 4), dtype), make((3, 4, 6), dtype, "columns", 1), make((3, 5, 6), dtype)
    call("aoti_torch_cpu_baddbmm_out", out, added, x, y, 2.0, 3.0)
    exact = dtype in (torch.float16, torch.bfloat16)
    wide = [t.float() if exact else t for t in (added, x, y)]
    close(out, torch.baddbmm(*wide, beta=2, alpha=3).to(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_addbmm(batch: int, dtype: torch.dtype) -> None:
    added, x, y = make((1, 6), dtype)[0], make((batch, 5, 7), dtype, "strided"), make((batch, 7, 6), dtype, seed=1)
    got = call("aoti_torch_cpu_addbmm", added, x, y, 2.0, 3.0, returns=1)
    exact = dtype in (torch.float16, torch.bfloat16)
    wide = [t.float() if exact else t for t in (added, x, y)]
    close(got, torch.addbmm(*wide, beta=2, alpha=3).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_addmv(layout: str, dtype: torch.dtype) -> None:
    a, x, added = make((9, 21), dtype, layout), make((21, 2), dtype, seed=1)[:, 1], make((1, 9), dtype, seed=2)[0]
    got = call("aoti_torch_cpu_addmv", added, a, x, 2.0, 3.0, returns=1)
    exact = dtype in (torch.float16, torch.bfloat16)
    wide = [t.float() if exact else t for t in (added, a, x)]
    close(got, torch.addmv(*wide, beta=2, alpha=3).to(dtype))


def test_mm_plus_mm_and_the_old_names() -> None:
    a, b, c, d = (make((6, 6), torch.float32, seed=i) for i in range(4))
    out = torch.empty(6, 6)
    call("aoti_torch__mm_plus_mm_out", out, a, b, c, d)
    close(out, a @ b + c @ d)
    call("aoti_torch_mm_out", out, a, b)
    close(out, a @ b)
    call("aoti_torch_bmm_out", out[None], a[None], b[None])
    close(out, a @ b)


@pytest.mark.parametrize(
    ("out", "a", "b", "text"),
    [
        ((2, 2), (2,), (2, 2), "mm: argument 'self' must be 2-D, got shape [2]"),
        ((2, 2), (2, 3), (2, 2), "mm: the inner sizes differ: 'self' is [2, 3], 'mat2' is [2, 2]"),
        ((2, 3), (2, 3), (3, 2), "mm: argument 'out' must have shape [2, 2], got [2, 3]"),
    ],
)
def test_shape_errors(out: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShimError) as caught:
        call("aoti_torch_cpu_mm_out", torch.empty(out), torch.empty(a), torch.empty(b))
    assert str(caught.value) == text


def test_dtype_errors() -> None:
    x = torch.ones(2, 2)
    for args, text in (
        ((x, x, x.double()), "mm: 'self' and 'mat2' must have the same dtype, got float32 and float64"),
        ((x.double(), x, x), "mm: argument 'out' must be float32, got float64"),
        (
            (x.bool(), x.bool(), x.bool()),
            "mm: dtype bool is not supported, expected a floating, signed integer, uint8 or complex dtype; "
            "convert the operands",
        ),
    ):
        with pytest.raises(ShimError) as caught:
            call("aoti_torch_cpu_mm_out", *args)
        assert str(caught.value) == text


def test_broadcast_and_batch_errors() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ShimError, match=r"addmm: 'self' of shape \[3\] does not broadcast to \[2, 2\]"):
        call("aoti_torch_cpu_addmm_out", x, torch.ones(3), x, x, 1.0, 1.0)
    with pytest.raises(ShimError, match=r"addmm: 'self' must have the operands' dtype float32, got float64"):
        call("aoti_torch_cpu_addmm_out", x, x.double(), x, x, 1.0, 1.0)
    with pytest.raises(ShimError, match=r"addmm: 'self' of shape \[3\] does not broadcast to \[2, 2\]"):
        call("aoti_torch_cpu_addmm_out", x, torch.ones(3), x, x, 0.0, 1.0)
    with pytest.raises(ShimError, match=r"addmv: the inner sizes differ: 'mat' is \[2, 2\], 'vec' is \[3\]"):
        call("aoti_torch_cpu_addmv", torch.ones(2), x, torch.ones(3), 1.0, 1.0, returns=1)
    with pytest.raises(ShimError, match=r"bmm: the batch sizes differ: 'self' is \[1, 2, 2\], 'mat2' is \[2, 2, 2\]"):
        call("aoti_torch_cpu_bmm_out", x[None], x[None], x.expand(2, 2, 2))

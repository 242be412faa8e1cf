"""sort, topk, kthvalue, mode and median on the GPU against torch on the CPU: values, positions, NaN, ties, strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import call

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip
NAN = float("nan")
# Around the limits of the kernels: a warp's tile, a CTA's, rows sorted in one CTA.
LENGTHS = [1, 2, 31, 32, 127, 128, 129, 1000, 1024, 1025, 4095, 4096, 4097, 5000, 20000]


def sample(shape: list[int], dtype: torch.dtype, seed: int, distinct: int = 5) -> torch.Tensor:
    """Few distinct values by default, so that there are ties; floats hold NaN, infinities and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-distinct, distinct, shape, generator=generator)
    if dtype == torch.uint8 or dtype == torch.bool:
        x = x.abs() if dtype == torch.uint8 else x > 0
    x = x.to(dtype)
    if dtype.is_floating_point and x.numel() > 4:
        flat = x.view(-1)
        for value in (NAN, -0.0, float("inf"), -float("inf"), NAN):
            flat[torch.randint(x.numel(), (max(x.numel() // 50, 1),), generator=generator)] = value
    return x


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.allclose(got.cpu().double(), want.cpu().double(), rtol=0, atol=0, equal_nan=True)
    )


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same strides on the GPU."""
    if x.numel() == 0:
        return x.cuda()
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_sort_any_strides(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    x = sample(shape, dtype, draw(st.integers(0, 99)))
    if len(shape) > 1:
        x = x.permute(draw(st.permutations(range(len(shape)))))
    if x.dim() and draw(st.booleans()) and x.shape[0] > 1:
        x = x[::2]
    dim = draw(st.integers(-max(x.dim(), 1), max(x.dim(), 1) - 1))
    descending = draw(st.booleans())
    values, indices = call("aoti_torch_cuda_sort", on_gpu(x), dim, descending, returns=2)
    want = torch.sort(x, dim=dim, descending=descending, stable=True)
    assert same(values, want.values)
    assert torch.equal(indices.cpu(), want.indices)
    if x.numel():
        assert values.stride() == want.values.stride()
        assert indices.stride() == want.indices.stride()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_rows(n: int, dtype: torch.dtype, descending: bool) -> None:
    for rows in (1, 3):
        for distinct in (5, 100000 if dtype.itemsize > 2 else 100):
            x = sample([rows, n], dtype, n, distinct)
            values, indices = call("aoti_torch_cuda_sort_stable", x.cuda(), None, -1, descending, returns=2)
            want = torch.sort(x, descending=descending, stable=True)
            assert same(values, want.values)
            assert torch.equal(indices.cpu(), want.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((6000, 7), 0), ((5, 6000, 3), 1), ((3, 300000), 1), ((300000, 2), 0), ((9000, 4100), 1), ((20000, 3), 1)],
)
def test_sort_long_and_many(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(*shape, generator=generator).mul_(100).to(dtype)
    got = call("aoti_torch_cuda_sort", x.cuda(), dim, False, returns=2)
    want = torch.sort(x, dim=dim, stable=True)
    assert same(got[0], want.values)
    assert torch.equal(got[1].cpu(), want.indices)
    again = call("aoti_torch_cuda_sort", x.cuda(), dim, False, returns=2)
    assert torch.equal(got[1], again[1])


def test_extreme_keys() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        info = torch.iinfo(dtype)
        x = torch.tensor([info.max, 0, info.min, info.max - 1, info.min + 1, info.max, 1], dtype=dtype)
        for repeat in (1, 3000):
            y = x.repeat(repeat)
            for descending in (False, True):
                values, indices = call("aoti_torch_cuda_sort", y.cuda(), 0, descending, returns=2)
                want = torch.sort(y, descending=descending, stable=True)
                assert torch.equal(values.cpu(), want.values) and torch.equal(indices.cpu(), want.indices)


def top(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """topk with equal elements lowest index first."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim", "k"),
    [
        ((64, 8), 1, 2), ((1000, 256), 1, 8), ((5, 4097), 1, 1), ((5, 4097), 1, 4096), ((2, 9000), 1, 5000),
        ((1, 150000), 1, 50), ((7000, 3), 0, 100), ((4, 5000, 2), 1, 33), ((1500, 5000), 1, 3), ((12,), 0, 12),
        ((1, 1000000), 1, 1000), ((19, 1), 1, 1), ((3, 1, 6), 2, 2), ((19, 1, 6), 2, 2),
    ],
)  # fmt: skip
def test_topk(dtype: torch.dtype, largest: bool, shape: tuple[int, ...], dim: int, k: int) -> None:
    for distinct in (5, 50000 if dtype.itemsize > 2 else 100):
        x = sample(list(shape), dtype, k, distinct)
        values, indices = call("aoti_torch_cuda_topk", x.cuda(), k, dim, largest, True, returns=2)
        want = top(x, k, dim, largest)
        assert same(values, want[0])
        assert torch.equal(indices.cpu(), want[1])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 3), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_topk_and_kthvalue_any_length(
    n: int, rows: int, dtype: torch.dtype, largest: bool, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    x = sample([rows, n], dtype, n, data.draw(st.sampled_from([2, 100])))
    values, indices = call("aoti_torch_cuda_topk", x.cuda(), k, -1, largest, False, returns=2)
    want = top(x, k, 1, largest)
    assert same(values, want[0])
    assert torch.equal(indices.cpu(), want[1])
    values, indices = call("aoti_torch_cuda_kthvalue", x.cuda(), k, -1, True, returns=2)
    want = top(x, n, 1, False)
    assert same(values, want[0][:, k - 1 : k])
    assert torch.equal(indices.cpu(), want[1][:, k - 1 : k])


def test_topk_of_nothing_and_scalars() -> None:
    values, indices = call("aoti_torch_cuda_topk", torch.zeros(3, 4, device="cuda"), 0, 1, True, True, returns=2)
    assert values.shape == (3, 0) and indices.shape == (3, 0)
    values, indices = call("aoti_torch_cuda_topk", torch.tensor(4.0, device="cuda"), 1, 0, True, True, returns=2)
    assert values.item() == 4.0 and indices.item() == 0
    values, indices = call("aoti_torch_cuda_sort", torch.zeros(0, 4, device="cuda"), 0, False, returns=2)
    assert values.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64])
@pytest.mark.parametrize("n", [1, 2, 7, 1000, 4096, 4097, 70000, 1000000])
@pytest.mark.parametrize("nans", ["none", "some", "all"])
def test_median(dtype: torch.dtype, n: int, nans: str) -> None:
    x = torch.randint(-50000, 50000, (n,), generator=torch.Generator().manual_seed(n)).to(dtype)
    if nans != "none":
        if not dtype.is_floating_point:
            return
        x[:: 1 if nans == "all" else 3] = NAN
    for name in ("median", "nanmedian"):
        got = call(f"aoti_torch_cuda_{name}", x.cuda(), returns=1)
        assert same(got, getattr(torch, name)(x)), name
    y = x[: n // 6 * 6].view(2, n // 6, 3).transpose(0, 2)
    if y.numel():
        assert same(call("aoti_torch_cuda_nanmedian", on_gpu(y), returns=1), torch.nanmedian(y))


def test_median_of_nothing() -> None:
    assert call("aoti_torch_cuda_median", torch.zeros(0, device="cuda"), returns=1).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(("shape", "dim"), [((5, 7), 1), ((50, 3), 0), ((4, 6000), 1), ((2, 5000, 3), 1), ((), 0)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_mode(dtype: torch.dtype, shape: tuple[int, ...], dim: int, keepdim: bool) -> None:
    x = sample(list(shape), dtype, 3)
    if dtype.is_floating_point:
        x = x.nan_to_num(1.0)  # where NaN stands among the most frequent values torch's own devices differ
    values, indices = call("aoti_torch_cuda_mode", x.cuda(), dim, keepdim, returns=2)
    want = torch.mode(x, dim, True).values
    # Of equal elements torch's position is any; ours is the last.
    places = torch.arange(x.shape[dim] if x.dim() else 1)
    if x.dim():
        places = places.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    last = torch.where(x == want, places, -1).amax(dim, keepdim=True) if x.dim() else torch.tensor(0)
    assert same(values, want if keepdim or not x.dim() else want.squeeze(dim))
    assert torch.equal(indices.cpu(), last if keepdim or not x.dim() else last.squeeze(dim))


def test_a_capture_replays() -> None:
    x = torch.randn(3, 50000, device="cuda")
    from tests.native.shim import use_torch_stream

    names = [("sort", (1, False)), ("topk", (40, 1, True, True)), ("kthvalue", (7, 1, False))]
    for name, args in names:
        call(f"aoti_torch_cuda_{name}", x, *args, returns=2)  # kernels are loaded before the capture
    graph = torch.cuda.CUDAGraph()
    results = []
    # Relaxed: torch allocates here, and under compute-sanitizer it does so without its cache.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        use_torch_stream()
        results = [call(f"aoti_torch_cuda_{name}", x, *args, returns=2) for name, args in names]
    use_torch_stream()
    for _ in range(2):
        x.copy_(torch.randn(3, 50000))
        graph.replay()
        assert torch.equal(results[0][0], x.sort(1).values)
        assert torch.equal(results[1][0], x.topk(40, 1).values)
        assert torch.equal(results[2][0], x.kthvalue(7, 1).values)

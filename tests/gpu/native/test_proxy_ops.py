"""Native operators behind the proxy executor on the GPU: against torch, and torchvision where it is installed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.gpu.native.test_nn_other import draw_signal, is_defined, strides
from tests.native.proxy_ops import call_native
from tests.native.shim import ShimError, use_torch_stream
from tests.native.test_proxy_ops import greedy_nms, random_boxes

FLOATS = [torch.float32, torch.float64, torch.float16]


@pytest.fixture(autouse=True)
def stream() -> None:
    use_torch_stream()


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    out: torch.Tensor = call_native("torchvision::nms", dets=boxes, scores=scores, iou_threshold=threshold)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 300, 1000])
def test_nms(n: int, dtype: torch.dtype) -> None:
    boxes, scores = random_boxes(n, n, dtype)
    for threshold in (0.25, 0.5):  # exact in every dtype, so that ties on it fall alike
        got = nms(boxes.cuda(), scores.cuda(), threshold)
        assert got.is_contiguous() and got.tolist() == greedy_nms(boxes, scores, threshold)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 500, 4000])
def test_nms_is_torchvisions(n: int, dtype: torch.dtype) -> None:
    pytest.importorskip("torchvision")
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        corner = torch.rand(n, 2, generator=generator) * 20
        boxes = torch.cat([corner, corner + torch.rand(n, 2, generator=generator) * 6], 1).to(dtype).cuda()
        scores = torch.randint(0, n, (n,), generator=generator).to(dtype).cuda()
        for threshold in (0.1, 0.3, 0.7):
            assert torch.equal(nms(boxes, scores, threshold), torch.ops.torchvision.nms(boxes, scores, threshold))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_roi_align(ratio: int, aligned: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("torchvision")
    image = torch.randn(2, 5, 17, 23, device="cuda", dtype=dtype)
    corner = torch.rand(40, 2, device="cuda") * 20 - 3
    rois = torch.cat(
        [torch.randint(0, 2, (40, 1), device="cuda"), corner, corner + torch.rand(40, 2, device="cuda") * 15], 1
    )
    rois = rois.to(dtype)
    got = call_native(
        "torchvision::roi_align", input=image, rois=rois, spatial_scale=0.5, pooled_height=3, pooled_width=4,
        sampling_ratio=ratio, aligned=aligned,
    )  # fmt: skip
    want = torch.ops.torchvision.roi_align(image, rois, 0.5, 3, 4, ratio, aligned)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("top", [5, 100, 9000])
def test_bincount(top: int, dtype: torch.dtype) -> None:
    if top > torch.iinfo(dtype).max:
        pytest.skip("the dtype has no such values")
    for n in (0, 1, 1000, 100_000):
        x = torch.randint(0, top, (n,), device="cuda").to(dtype)
        for minlength in (0, 50):
            got = call_native("aten::bincount", self=x, weights=None, minlength=minlength)
            assert torch.equal(got, torch.bincount(x, minlength=minlength))
        for weights in (torch.rand(n, device="cuda"), torch.rand(n, device="cuda").half()):
            got = call_native("aten::bincount", self=x[::2], weights=weights[::2], minlength=3)
            want = torch.bincount(x[::2], weights[::2], 3)
            # Eager gives int64 for an empty tensor, whatever the weights are; compiled code expects their dtype.
            torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-4, atol=1e-5)
            assert got.dtype == (torch.float32 if weights.dtype == torch.float32 else torch.float64)
    if dtype != torch.uint8:
        with pytest.raises(ShimError) as caught:
            call_native("aten::bincount", self=torch.tensor([3, -2], device="cuda").to(dtype))
        assert str(caught.value) == "aten::bincount: argument 'self' holds -2, expected no negative value"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool],
)
def test_unique(dtype: torch.dtype) -> None:
    for shape in ((0,), (1,), (7, 3), (5000,), (100, 3)):
        x = torch.randint(0, 40, shape, device="cuda").to(dtype)
        for inverse, counts in ((True, True), (False, True), (True, False), (False, False)):
            flags = {"return_inverse": inverse, "return_counts": counts}
            for name, rest in (("_unique2", {"sorted": True}), ("unique_consecutive", {})):
                got = call_native(f"aten::{name}", 3, self=x, **rest, **flags)
                want = getattr(torch.ops.aten, name)(x, **rest, **flags)
                assert torch.equal(got[0], want[0])
                if inverse:
                    assert torch.equal(got[1], want[1])
                if counts:
                    assert torch.equal(got[2], want[2])


def test_unique_without_counts() -> None:
    x = torch.randint(0, 9, (50, 2), device="cuda")
    values, inverse = call_native("aten::_unique", 2, self=x, sorted=True, return_inverse=True)
    assert torch.equal(values[inverse], x) and torch.equal(values, x.unique())


def test_unique_keeps_every_nan() -> None:
    x = torch.tensor([1.0, float("nan"), 1.0, float("nan"), -0.0, 0.0], device="cuda")
    values, _, counts = call_native("aten::_unique2", 3, self=x, sorted=True, return_inverse=True, return_counts=True)
    assert values[:2].tolist() == [0, 1] and values.numel() == 4 and counts.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial(replacement: bool, dtype: torch.dtype) -> None:
    weights = torch.tensor([0.0, 1, 2, 0, 5, 2], device="cuda", dtype=dtype)
    rows = weights.repeat(20_000, 1)
    got = call_native("aten::multinomial", self=rows, num_samples=2, replacement=replacement)
    assert got.shape == (20_000, 2) and got.dtype == torch.int64
    assert not ((got == 0) | (got == 3)).any()
    share = torch.bincount(got[:, 0], minlength=6).float() / 20_000
    torch.testing.assert_close(share, weights.float() / 10, rtol=0, atol=0.02)
    if not replacement:
        assert (got[:, 0] != got[:, 1]).all()
        second = torch.bincount(got[got[:, 0] == 4][:, 1], minlength=6).float()
        torch.testing.assert_close(
            second / second.sum(), torch.tensor([0, 0.2, 0.4, 0, 0, 0.4], device="cuda"), rtol=0, atol=0.03
        )
    one = call_native("aten::multinomial", self=torch.rand(9000, device="cuda").to(dtype), num_samples=1)
    assert one.shape == (1,) and 0 <= int(one) < 9000
    many = call_native("aten::multinomial", self=torch.rand(9000, device="cuda").to(dtype) + 0.1, num_samples=5000)
    assert many.unique().numel() == 5000


@pytest.mark.parametrize(
    ("bad", "count", "text"),
    [
        ([1.0, -1.0], 1, "holds a weight that is negative, infinite or NaN"),
        ([1.0, 1.0, float("nan")], 2, "holds a weight that is negative, infinite or NaN"),
        ([0.0, 0.0], 1, "row 0 of argument 'self' has fewer weights above 0 than are drawn"),
        ([1.0, 0.0], 2, "row 0 of argument 'self' has fewer weights above 0 than are drawn"),
    ],
)
def test_multinomial_reports_bad_weights(bad: list[float], count: int, text: str) -> None:
    """The next operator does, once the kernel has run."""

    def draw_twice() -> None:
        call_native("aten::multinomial", self=torch.tensor(bad, device="cuda"), num_samples=count)
        torch.cuda.synchronize()
        call_native("aten::multinomial", self=torch.ones(2, device="cuda"), num_samples=1)

    with pytest.raises(ShimError, match=text):
        draw_twice()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(7, 9), (40, 50), (20, 11), (1, 1)])
def test_resize(size: tuple[int, int], mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 20, 31, device="cuda").to(dtype)
    for image in (x, x.to(memory_format=torch.channels_last)):
        for align_corners in (False, True):
            got = call_native(
                f"aten::_upsample_{mode}2d_aa", self=image, output_size=list(size), align_corners=align_corners,
                scales_h=None, scales_w=None,
            )  # fmt: skip
            try:
                want = functional.interpolate(image, size, mode=mode, align_corners=align_corners, antialias=True)
            except RuntimeError:  # torch's kernel has no shared memory for so wide a filter
                want = functional.interpolate(
                    image.cpu(), size, mode=mode, align_corners=align_corners, antialias=True
                ).cuda()
            tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            assert got.stride() == want.stride()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_grouped_mm_fallback(index: torch.dtype) -> None:
    x = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3, 64, 32, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([2, 2, 9], device="cuda", dtype=index)
    got = call_native("transformers::grouped_mm_fallback", input=x, weight=weight, offs=offs)
    torch.testing.assert_close(got, torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]]), rtol=2e-2, atol=2e-2)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fft_c2r(data: st.DataObject) -> None:
    """The half of a real signal's transform gives it back; other values what cuFFT makes of them in eager."""
    draw = data.draw
    half, dims = draw_signal(data, draw(st.sampled_from([torch.complex64, torch.complex128])))
    last, normalization = 2 * (half.shape[dims[-1]] - 1) + draw(st.integers(0, 1)), draw(st.integers(0, 2))
    if last == 0:
        last = 1
    before = half.clone()
    got = call_native("aten::_fft_c2r", self=half, dim=dims, normalization=normalization, last_dim_size=last)
    want = torch.ops.aten._fft_c2r(half, dims, normalization, last)
    assert torch.equal(half, before)
    assert not is_defined(half, dims) or strides(got) == strides(want)
    tolerance = 1e-4 if half.dtype == torch.complex64 else 1e-12
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("shape", [(1 << 20,), (1000003,), (3, 257, 64), (2, 16, 15, 14), (2, 3, 4, 5, 7)])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_fft_c2r_is_the_inverse(norm: str, shape: tuple[int, ...]) -> None:
    signal = torch.randn(shape, generator=torch.Generator().manual_seed(1)).cuda()
    dims = list(range(len(shape)))
    spectrum = torch.fft.rfftn(signal, norm=norm)
    code = {"backward": 2, "ortho": 1, "forward": 0}[norm]
    got = call_native("aten::_fft_c2r", self=spectrum, dim=dims, normalization=code, last_dim_size=shape[-1])
    torch.testing.assert_close(got, signal, rtol=1e-4, atol=1e-4)


def test_fft_c2r_of_nothing() -> None:
    empty = torch.zeros(0, 5, dtype=torch.complex64, device="cuda")
    got = call_native("aten::_fft_c2r", self=empty, dim=[1], normalization=0, last_dim_size=8)
    assert got.shape == (0, 8) and got.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", [((), ()), ((3, 5), (3, 5)), ((3, 1), (5,)), ((), (2, 3)), ((0, 4), (4,))])
def test_complex(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
    real, imag = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    assert torch.equal(call_native("aten::complex", real=real, imag=imag), torch.complex(real, imag))
    if real.dim() == 2:
        real = real.mT.contiguous().mT
        assert torch.equal(call_native("aten::complex", real=real, imag=imag), torch.complex(real, imag))

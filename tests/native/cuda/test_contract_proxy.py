"""What the native operators behind the proxy executor refuse on a GPU, and with which words: no GPU is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from tests.native.cuda.test_contract_select import blob
from tests.native.proxy_ops import call_native
from tests.native.shim import ShimError

__all__ = ["blob"]
Blob = Callable[..., ctypes.c_void_p]


def message(target: str, returns: int = 1, **arguments: object) -> str:
    with pytest.raises(ShimError) as caught:
        call_native(target, returns, **arguments)
    return str(caught.value)


def test_nms(blob: Blob) -> None:
    name = "torchvision::nms"
    text = message(name, dets=blob([3, 5]), scores=blob([3]), iou_threshold=0.5)
    assert text == f"{name}: argument 'dets' must be [n, 4], got [3, 5]"
    text = message(name, dets=blob([3, 4], torch.bfloat16), scores=blob([3]), iou_threshold=0.5)
    assert text == f"{name}: argument 'dets' is bfloat16, expected float32, float64 or float16"
    text = message(name, dets=blob([3, 4]), scores=blob([3], device=0), iou_threshold=0.5)
    assert text == f"{name}: argument 'scores' is on cpu, expected cuda"
    many = 1 << 19
    text = message(name, dets=blob([many, 4]), scores=blob([many]), iou_threshold=0.5)
    assert text == f"{name}: 524288 boxes, expected at most 262144"


def test_roi_align(blob: Blob) -> None:
    name = "torchvision::roi_align"
    rest = {
        "spatial_scale": 1.0, "pooled_height": 2, "pooled_width": 2, "sampling_ratio": -1, "aligned": False,
    }  # fmt: skip
    text = message(name, input=blob([2, 3, 4]), rois=blob([1, 5]), **rest)
    assert text == f"{name}: argument 'input' must be [batch, channels, height, width], got [2, 3, 4]"
    text = message(name, input=blob([1, 2, 3, 4]), rois=blob([1, 4]), **rest)
    assert text == f"{name}: argument 'rois' must be [n, 5], got [1, 4]"
    text = message(name, input=blob([1, 2, 3, 4]), rois=blob([1, 5], torch.float64), **rest)
    assert text == f"{name}: argument 'rois' is float64, expected float32 as 'input'"
    text = message(name, input=blob([1, 2, 3, 4]), rois=blob([1, 5]), **rest | {"pooled_width": 0})
    assert text == f"{name}: the pooled size is 2 × 0, expected 1 or more each"
    text = message(name, input=blob([1, 2, 3, 4], torch.int64), rois=blob([1, 5]), **rest)
    assert text == f"{name}: argument 'input' is int64, expected float32, float64, bfloat16 or float16"


def test_bincount(blob: Blob) -> None:
    name = "aten::bincount"
    text = message(name, self=blob([3]))
    assert text == f"{name}: argument 'self' must be one dimension of integers, got float32[3]"
    text = message(name, self=blob([3], torch.int64), weights=None, minlength=-2)
    assert text == f"{name}: 'minlength' is -2, expected 0 or more"
    text = message(name, self=blob([3], torch.int64), weights=blob([4]))
    assert text == f"{name}: argument 'weights' is [4], expected [3] as 'self'"


def test_unique(blob: Blob) -> None:
    text = message("aten::_unique2", 3, self=blob([3], torch.complex64))
    assert text == "aten::_unique2: dtype complex64 is not supported"
    text = message("aten::_unique2", 3, self=blob([1 << 31], torch.uint8))
    assert text == "aten::_unique2: 2147483648 elements, expected at most 2147483647"
    text = message("aten::unique_consecutive", 3, self=blob([3, 3]), dim=1)
    assert text == (
        "aten::unique_consecutive: 'dim' is 1 of a tensor of 2 dimensions; on a GPU only None is supported, or 0 for "
        "one dimension"
    )


def test_multinomial(blob: Blob) -> None:
    name = "aten::multinomial"
    assert message(name, self=blob([2, 3, 4]), num_samples=1) == f"{name}: argument 'self' must be 1-D or 2-D, got 3-D"
    text = message(name, self=blob([3], torch.int64), num_samples=1)
    assert text == f"{name}: dtype int64 is not supported, expected a floating type"
    text = message(name, self=blob([3]), num_samples=4)
    assert text == f"{name}: 'num_samples' is 4, expected at most the 3 categories without replacement"
    assert message(name, self=blob([3]), num_samples=0) == f"{name}: 'num_samples' is 0, expected 1 or more"
    assert message(name, self=blob([2, 0]), num_samples=1, replacement=True).endswith("has no categories")


@pytest.mark.parametrize("name", ["aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa"])
def test_resize(name: str, blob: Blob) -> None:
    text = message(name, self=blob([2, 3, 4]), output_size=[2, 2], align_corners=False)
    assert text == f"{name}: argument 'self' must be [batch, channels, height, width], got [2, 3, 4]"
    text = message(name, self=blob([1, 2, 3, 4]), output_size=[2], align_corners=False)
    assert text == f"{name}: 'output_size' must be 2 numbers above 0, got [2]"
    text = message(name, self=blob([1, 2, 0, 4]), output_size=[2, 2], align_corners=False)
    assert text == f"{name}: argument 'self' has no elements: [1, 2, 0, 4]"
    text = message(name, self=blob([1, 2, 3, 4], torch.uint8), output_size=[2, 2], align_corners=False)
    assert text == f"{name}: dtype uint8 is not supported on a GPU, expected a floating type"


def test_fft_c2r(blob: Blob) -> None:
    name = "aten::_fft_c2r"
    x = blob([4, 5], torch.complex64)
    rest = {"dim": [1], "normalization": 0, "last_dim_size": 8}
    text = message(name, self=blob([4, 5]), **rest)
    assert text == f"{name}: dtype float32 is not supported, expected complex64 or complex128"
    text = message(name, self=x, **rest | {"dim": [0, -2]})
    assert text == f"{name}: argument 'dim' names a dimension twice: [0, -2]"
    text = message(name, self=x, **rest | {"dim": []})
    assert text == f"{name}: argument 'dim' must name at least one dimension"
    for last in (7, 10, 0):
        text = message(name, self=x, **rest | {"last_dim_size": last})
        assert text == (
            f"{name}: 'last_dim_size' is {last} and dimension 1 of shape [4, 5] has 5 values, expected last_dim_size / "
            "2 + 1"
        )
    text = message(name, self=x, **rest | {"normalization": 3, "last_dim_size": 9})
    assert text == f"{name}: argument 'normalization' must be 0 (none), 1 (by root n) or 2 (by n), got 3"
    text = message(name, self=blob([0, 5], torch.complex64), **rest | {"dim": [0, 1]})
    assert text == f"{name}: dimension 0 of shape [0, 5] is empty"


def test_complex(blob: Blob) -> None:
    name = "aten::complex"
    text = message(name, real=blob([4, 5]), imag=blob([4, 5], torch.float64))
    assert text == f"{name}: argument 'imag' is float64, expected float32 as 'real'"
    text = message(name, real=blob([4], torch.float16), imag=blob([4], torch.float16))
    assert text == f"{name}: dtype float16 is not supported, expected float32 or float64"
    text = message(name, real=blob([4]), imag=blob([4], device=0))
    assert text == f"{name}: argument 'imag' is on cpu, expected cuda"
    assert message(name, real=blob([4, 5]), imag=blob([3, 5])).startswith(f"{name}: ")

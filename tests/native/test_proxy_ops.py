"""Native operators behind the proxy executor, on the CPU: values, their arguments in the file, error texts."""

from __future__ import annotations

import json

import pytest
import torch

from tests import torchvision_ops
from tests.native.proxy_ops import call_native, call_node, node_of
from tests.native.shim import ShimError

NMS = "torchvision::nms"


def greedy_nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    kept: list[int] = torchvision_ops.nms(boxes, scores, threshold).tolist()
    return kept


def random_boxes(n: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 20, (n, 2), generator=generator)
    size = torch.randint(1, 9, (n, 2), generator=generator)
    scores = torch.randint(0, max(n // 2, 1), (n,), generator=generator)  # with ties
    return torch.cat([corner, corner + size], 1).to(dtype), scores.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 200])
def test_nms(n: int, dtype: torch.dtype) -> None:
    boxes, scores = random_boxes(n, n, dtype)
    for threshold in (0.0, 0.25, 0.5):
        got = call_native(NMS, dets=boxes, scores=scores, iou_threshold=threshold)
        assert got.dtype == torch.int64 and got.tolist() == greedy_nms(boxes, scores, threshold)


def test_nms_takes_strides_and_half_types() -> None:
    boxes, scores = random_boxes(50, 1)
    want = greedy_nms(boxes, scores, 0.3)
    assert call_native(NMS, dets=boxes.t().contiguous().t(), scores=scores, iou_threshold=0.3).tolist() == want
    assert call_native(NMS, dets=boxes.half(), scores=scores.half(), iou_threshold=0.3).tolist() == want
    assert call_native(f"{NMS}.default", dets=boxes, scores=scores, iou_threshold=0.3).tolist() == want


def message(target: str, **arguments: object) -> str:
    with pytest.raises(ShimError) as caught:
        call_native(target, **arguments)
    return str(caught.value)


def test_nms_checks_its_arguments() -> None:
    boxes, scores = random_boxes(3, 0)
    text = message(NMS, dets=boxes[:, :3], scores=scores, iou_threshold=0.5)
    assert text == "torchvision::nms: argument 'dets' must be [n, 4], got [3, 3]"
    text = message(NMS, dets=boxes, scores=scores[:2], iou_threshold=0.5)
    assert text == "torchvision::nms: argument 'scores' must be [3] as there are boxes, got [2]"
    text = message(NMS, dets=boxes.long(), scores=scores, iou_threshold=0.5)
    assert text == "torchvision::nms: argument 'dets' is int64, expected float32, float64, bfloat16 or float16"


def test_arguments_that_the_file_lacks_or_has_otherwise() -> None:
    boxes, scores = random_boxes(3, 0)
    end = "in the file's list of extern nodes"
    text = message(NMS, dets=boxes, scores=scores)
    assert text == f"torchvision::nms: argument 'iou_threshold' of node `buf`: expected a number {end}"
    text = message(NMS, dets=boxes, scores=scores, iou_threshold="half")
    assert text == f"torchvision::nms: argument 'iou_threshold' of node `buf`: expected a number {end}"
    text = message(NMS, dets=1, scores=scores, iou_threshold=0.5)
    assert text == f"torchvision::nms: argument 'dets' of node `buf`: expected a tensor {end}"
    text = message(NMS, scores=scores, iou_threshold=0.5)
    assert text == f"torchvision::nms: argument 'dets' of node `buf`: expected a value {end}"
    # An integer passes for a number, as in Python.
    assert call_native(NMS, dets=boxes, scores=scores, iou_threshold=1).tolist() == greedy_nms(boxes, scores, 1)
    assert call_native(NMS, dets=boxes, scores=scores, iou_threshold=float("inf")).numel() == 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda n: n.pop("inputs"), 'node 0 has no "inputs"'),
        (lambda n: n["inputs"][0].pop("name"), 'node 0 argument 0 has no "name"'),
        (lambda n: n["inputs"][0].update(arg={}), "node 0 argument 0 must have one field `as_…`"),
        (lambda n: n["inputs"][0].update(arg={"as_int": 1, "as_bool": True}), "argument 0 must have one field `as_…`"),
        (lambda n: n["inputs"][2].update(arg={"as_float": "much"}), "node 0 argument 2 is not a number"),
        (lambda n: n["inputs"][2].update(arg={"as_bool": 3}), "node 0 argument 2 is not true or false"),
        (lambda n: n["outputs"][0].update(as_sym_bool=1), "node 0 result 0 must have one field `as_…`"),
        (
            lambda n: n.update(outputs=[{"as_float": 0.5}]),
            "node 0 result 0 must be a tensor, a list of tensors, an integer or none",
        ),
    ],
)
def test_a_malformed_node(change: object, text: str) -> None:
    boxes, scores = random_boxes(3, 0)
    node, ints, tensors = node_of(NMS, 1, {"dets": boxes, "scores": scores, "iou_threshold": 0.5})
    document = json.loads(node)
    change(document["node"])  # type: ignore[operator]
    with pytest.raises(ShimError) as caught:
        call_node(json.dumps(document), ints, tensors)
    assert text in str(caught.value)


def test_a_call_that_is_not_the_nodes() -> None:
    boxes, scores = random_boxes(3, 0)
    node, _, tensors = node_of(NMS, 1, {"dets": boxes, "scores": scores, "iou_threshold": 0.5})
    with pytest.raises(ShimError) as caught:
        call_node(node, [1], tensors)
    assert str(caught.value) == (
        "torchvision::nms: node `buf`: expected 0 integers and 3 tensors, got 1 and 3; the model library "
        "and its list of extern nodes do not belong together"
    )
    with pytest.raises(ShimError, match="expected 0 integers and 3 tensors, got 0 and 2"):
        call_node(node, [], tensors[:1])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_grouped_mm_fallback(index: torch.dtype) -> None:
    x, weight = torch.randn(9, 16), torch.randn(3, 16, 8)
    got = call_native(
        "transformers::grouped_mm_fallback", input=x, weight=weight, offs=torch.tensor([2, 2, 8], dtype=index)
    )
    want = torch.cat([x[:2] @ weight[0], x[2:8] @ weight[2], torch.zeros(1, 8)])
    torch.testing.assert_close(got, want)
    text = message("transformers::grouped_mm_fallback", input=x, weight=weight, offs=torch.tensor([1.0]))
    assert text.endswith("argument 'offs' is float32, expected int32 or int64")


def test_an_operator_for_cuda_alone() -> None:
    text = message("aten::bincount", self=torch.arange(3))
    assert text == "untorch_call_native_operator: `aten::bincount` has no native kernel on cpu"
    text = message("aten::linalg_qr", self=torch.ones(2, 2))
    assert text == "untorch_call_native_operator: there is no native kernel for `aten::linalg_qr`"


def random_regions(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Some of them reach outside of the image, some are empty."""
    corner = torch.rand(n, 2) * 16 - 4
    return torch.cat([torch.randint(0, 2, (n, 1)), corner, corner + torch.rand(n, 2) * 12 - 1], 1).to(dtype)


def check_all(got: object, want: object, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        other = other.to(dtype) if other.is_floating_point() else other
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


# Half types are computed in float32, and rounded once.
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATING)
def test_poolings_of_regions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    image, rois = torch.randn(2, 12, 9, 8).to(dtype), random_regions(24, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    form = {"spatial_scale": 0.75, "pooled_height": 3, "pooled_width": 2}
    for strided in (image, image.to(memory_format=torch.channels_last)):
        given = {"input": strided, "rois": rois}
        reference = {"input": image.to(wide), "rois": rois.to(wide)}
        for ratio in (-1, 2):
            for aligned in (True, False):
                more = {"sampling_ratio": ratio, "aligned": aligned}
                got = call_native("torchvision::roi_align", **given, **form, **more)
                check_all(got, torchvision_ops.roi_align(**reference, **form, **more), dtype)
            got = call_native("torchvision::ps_roi_align", 2, **given, **form, sampling_ratio=ratio)
            check_all(got, torchvision_ops.ps_roi_align(**reference, **form, sampling_ratio=ratio), dtype)
        check_all(
            call_native("torchvision::roi_pool", 2, **given, **form),
            torchvision_ops.roi_pool(**reference, **form), dtype,
        )  # fmt: skip
        check_all(
            call_native("torchvision::ps_roi_pool", 2, **given, **form),
            torchvision_ops.ps_roi_pool(**reference, **form), dtype,
        )  # fmt: skip
    empty = call_native("torchvision::roi_align", input=image, rois=rois[:0], **form, sampling_ratio=2, aligned=True)
    assert empty.shape == (0, 12, 3, 2)


def test_a_region_far_larger_than_the_image() -> None:
    """It has more samples than are kept."""
    image, rois = torch.randn(1, 2, 5, 4), torch.tensor([[0.0, -700, -700, 800, 800]])
    form = {"spatial_scale": 1.0, "pooled_height": 2, "pooled_width": 2, "sampling_ratio": -1, "aligned": True}
    got = call_native("torchvision::roi_align", input=image, rois=rois, **form)
    check_all(got, torchvision_ops.roi_align(input=image, rois=rois, **form), torch.float32)


def test_poolings_check_their_arguments() -> None:
    form = {"spatial_scale": 1.0, "pooled_height": 2, "pooled_width": 2}
    image, rois = torch.ones(2, 5, 4, 4), torch.tensor([[0.0, 0, 0, 2, 2], [2, 0, 0, 2, 2]])
    text = message("torchvision::roi_pool", input=image, rois=rois, **form)
    assert text == (
        "torchvision::roi_pool: region 1 of argument 'rois' is of an image that is not among the 2 of 'input'"
    )
    text = message("torchvision::roi_pool", input=image, rois=rois * float("nan"), **form)
    assert text.startswith("torchvision::roi_pool: region 0 of argument 'rois' is of an image")
    text = message("torchvision::ps_roi_pool", input=image, rois=rois[:1], **form)
    assert text == "torchvision::ps_roi_pool: argument 'input' has 5 channels, expected a multiple of the 4 bins"
    text = message("torchvision::roi_pool", input=image[:, :, :0], rois=rois[:1], **form)
    assert text == "torchvision::roi_pool: argument 'input' has no pixels: [2, 5, 0, 4]"
    text = message("torchvision::roi_pool", input=image, rois=rois.double(), **form)
    assert text == "torchvision::roi_pool: argument 'rois' is float64, expected float32 as 'input'"


DEFORM = "torchvision::deform_conv2d"
NAMES = ["stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups", "offset_groups", "use_mask"]


def deform_arguments(
    dtype: torch.dtype, numbers: tuple[object, ...], rows: int, columns: int
) -> dict[str, torch.Tensor | object]:
    form = dict(zip(NAMES, numbers, strict=True))
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, parts, use_mask = numbers
    height = (9 + 2 * pad_h - dilation_h * (rows - 1) - 1) // stride_h + 1  # type: ignore[operator]
    width = (8 + 2 * pad_w - dilation_w * (columns - 1) - 1) // stride_w + 1  # type: ignore[operator]
    kernel = rows * columns * parts  # type: ignore[operator]
    return {
        "input": torch.randn(2, 12, 9, 8).to(dtype),
        "weight": torch.randn(6, 12 // groups, rows, columns).to(dtype),  # type: ignore[operator]
        "offset": (torch.randn(2, 2 * kernel, height, width) * 2).to(dtype),
        "mask": (torch.rand(2, kernel, height, width) if use_mask else torch.zeros(2, 1)).to(dtype),
        "bias": torch.randn(6).to(dtype),
        **form,
    }


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    ("numbers", "rows", "columns"),
    [
        ((1, 1, 1, 1, 1, 1, 1, 1, True), 3, 3),
        ((2, 1, 0, 2, 1, 2, 2, 3, True), 2, 3),
        ((1, 2, 1, 0, 2, 1, 3, 1, False), 1, 3),
    ],
)
def test_deform_conv2d(numbers: tuple[object, ...], rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    arguments = deform_arguments(dtype, numbers, rows, columns)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    reference = {k: v.to(wide) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    want = torchvision_ops.deform_conv2d(**reference)  # type: ignore[arg-type]
    scale = float(want.abs().max())
    check_all(call_native(DEFORM, **arguments) / scale, want / scale, dtype)
    arguments["offset"] = arguments["offset"].transpose(2, 3).contiguous().transpose(2, 3)  # type: ignore[attr-defined]
    check_all(call_native(DEFORM, **arguments) / scale, want / scale, dtype)


def test_deform_conv2d_checks_its_arguments() -> None:
    given = deform_arguments(torch.float32, (1, 1, 1, 1, 1, 1, 1, 1, True), 3, 3)
    for change, text in (
        ({"offset": torch.ones(2, 9, 9, 8)}, "argument 'offset' must be [2, 18, 9, 8], got [2, 9, 9, 8]"),
        ({"mask": torch.ones(2, 9, 9, 7)}, "argument 'mask' must be [2, 9, 9, 8], got [2, 9, 9, 7]"),
        ({"bias": torch.ones(6).double()}, "argument 'bias' is float64, expected float32 as 'input'"),
        ({"groups": 5}, "12 input and 6 output channels do not divide into 5 groups and 1 offset groups"),
        ({"stride_h": 0}, "strides and dilations must be 1 or more, and paddings 0 or more"),
        ({"dilation_h": 9}, "the result would have -7 × 8 pixels"),
        (
            {"input": torch.ones(2, 12, 9, 8).int()},
            "argument 'input' is int32, expected float32, float64, bfloat16 or float16",
        ),
    ):
        assert message(DEFORM, **{**given, **change}) == f"{DEFORM}: {text}"

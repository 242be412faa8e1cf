"""Native operators behind the proxy executor, on the CPU: values, their arguments in the file, error texts."""

from __future__ import annotations

import json

import pytest
import torch

from tests.native.proxy_ops import call_native, call_node, node_of
from tests.native.shim import ShimError

NMS = "torchvision::nms"


def greedy_nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """torchvision's CPU kernel, word for word in what rounds: areas and overlaps in the boxes' dtype."""
    order = scores.sort(stable=True, descending=True).indices.tolist()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    gone: set[int] = set()
    for i in order:
        if i in gone:
            continue
        kept.append(i)
        low = torch.maximum(boxes[i, :2], boxes[:, :2])
        high = torch.minimum(boxes[i, 2:], boxes[:, 2:])
        size = (high - low).clamp(min=0)
        common = size[:, 0] * size[:, 1]
        overlap = common / (areas[i] + areas - common)
        gone |= set(torch.nonzero(overlap.double() > threshold)[:, 0].tolist())
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

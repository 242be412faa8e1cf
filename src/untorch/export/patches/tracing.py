"""Patches of tracing: no graphs on the terminal, and torchvision without what cannot be traced."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from untorch.export.patches.registry import patch, replaced

__all__ = [
    "no_graph_dump",
    "pooling_of_any_length",
    "results_of_any_size",
    "traceable_torchvision",
    "undetected_causal_masks",
]


@patch(
    "torch.export._trace.sys",
    versions="2.11–2.15",
    why="What torch.export refuses, it prints as a graph to stderr: thousands of lines in which the error is lost.",
    test="test_tracing.py::test_torch_still_prints_graphs",
)
@contextlib.contextmanager
def no_graph_dump() -> Iterator[None]:
    """torch.export prints nothing; what the model prints is shown."""
    from torch.export import _trace

    silent = types.SimpleNamespace(**{**vars(sys), "stderr": io.StringIO()})
    with replaced(_trace, "sys", silent):
        yield


@patch(
    "torch._library.fake_impl.FakeImplCtx.create_unbacked_symint",
    versions="2.11–2.15",
    why="Operators whose results depend on values, torchvision's nms for one, are taken to give two elements or more: "
    "the compiled model fails where it finds one box, or none.",
    test="test_tracing.py::test_torch_still_assumes_two_results",
)
@contextlib.contextmanager
def results_of_any_size() -> Iterator[None]:
    """Sizes that depend on values begin at zero, unless the operator says otherwise."""
    from torch._library.fake_impl import FakeImplCtx

    def create_unbacked_symint(self: Any, *, min: int = 0, max: int | None = None) -> Any:
        return self.new_dynamic_size(min=min, max=max)

    with replaced(FakeImplCtx, "create_unbacked_symint", create_unbacked_symint):
        yield


def _batched_nms(boxes: Any, scores: Any, idxs: Any, iou_threshold: float) -> Any:
    # The globals are those of torchvision.ops.boxes. Boxes of different classes are moved apart, as torchvision does it
    # for up to 1000 boxes, and where it is traced. The zero is for no boxes at all.
    largest = torch.cat([boxes.reshape(-1), boxes.new_zeros(1)]).max()
    offsets = idxs.to(boxes) * (largest + 1)
    return nms(boxes + offsets[:, None], scores, iou_threshold)  # type: ignore[name-defined]  # noqa: F821


def _decode(self: Any, rel_codes: Any, boxes: Any) -> Any:
    decoded = self.decode_single(rel_codes, torch.cat(boxes))
    return decoded.reshape(rel_codes.shape[0], rel_codes.shape[1] // 4, 4)


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


@patch(
    "torchvision.ops.boxes.batched_nms",
    "torchvision.ops.poolers",
    "torchvision.models.detection._utils.BoxCoder.decode",
    versions="torchvision 0.26–0.29",
    why="batched_nms and BoxCoder.decode branch on the number of boxes, and the pooling of several levels makes a "
    "Python number of it: torch.export cannot trace that.",
    test="test_tracing.py::test_torchvision_still_needs_the_number_of_boxes",
)
@contextlib.contextmanager
def traceable_torchvision() -> Iterator[None]:
    """batched_nms moves the boxes of each class apart, for any number of them. Nothing without torchvision."""
    boxes, poolers = sys.modules.get("torchvision.ops.boxes"), sys.modules.get("torchvision.ops.poolers")
    coder = getattr(sys.modules.get("torchvision.models.detection._utils"), "BoxCoder", None)
    function = getattr(boxes, "batched_nms", None)
    if not isinstance(function, types.FunctionType) or poolers is None:
        yield
        return
    # Its code, as users import the function itself.
    original = function.__code__
    function.__code__ = _batched_nms.__code__
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(poolers, "len", _length))
            if coder is not None:
                stack.enter_context(replaced(coder, "decode", _decode))
            yield
    finally:
        function.__code__ = original


@patch(
    "torch.nn.modules.transformer._detect_is_causal_mask",
    versions="2.11–2.15",
    why="nn.TransformerEncoder and nn.TransformerDecoder compare a mask with the causal one and branch: torch.export "
    "cannot trace that, unless the caller says is_causal.",
    test="test_tracing.py::test_torch_still_compares_masks",
)
@contextlib.contextmanager
def undetected_causal_masks() -> Iterator[None]:
    """A mask is taken as it is; being causal is a hint, and the mask says the same."""
    from torch.nn.modules import transformer

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with replaced(transformer, "_detect_is_causal_mask", detect):
        yield


@patch(
    "torch.max_pool1d",
    versions="2.11–2.15",
    why="torch.max_pool1d makes a number of the length: torch.export refuses one that varies.",
    test="test_tracing.py::test_torch_still_fixes_the_length_of_max_pool1d",
)
@contextlib.contextmanager
def pooling_of_any_length() -> Iterator[None]:
    """max_pool1d of a length that varies is max_pool2d of one row."""
    original = torch.max_pool1d

    def max_pool1d(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if not any(isinstance(size, torch.SymInt) for size in input.shape):
            return original(input, kernel_size, stride or kernel_size, padding, dilation, ceil_mode)
        kernel, step, pad, spread = (
            (before, value[0] if isinstance(value, list | tuple) else value)
            for before, value in ((1, kernel_size), (1, stride or kernel_size), (0, padding), (1, dilation))
        )
        return torch.max_pool2d(input.unsqueeze(-2), kernel, step, pad, spread, ceil_mode).squeeze(-2)

    with replaced(torch, "max_pool1d", max_pool1d):
        yield

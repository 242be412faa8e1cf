"""Recipe for object detection by queries: DETR, YOLOS, RT-DETR and their like."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.image import ImageModule, image_steps
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import MAX_BATCH

__all__ = ["DETECTORS", "write_object_detection"]


@dataclass(frozen=True)
class _Scores:
    """How scores are made of logits.

    candidates: how many pairs of a query and a label are looked at, of models with sigmoids; None: as many as queries.
    """

    activation: str
    candidates: int | None = None


# A softmax over labels and "no object", the last class; or, of models that were trained with a focal loss, a sigmoid
# for each label.
_SOFTMAX, _SIGMOID, _SIGMOID_OF_100 = _Scores("softmax"), _Scores("sigmoid"), _Scores("sigmoid", 100)
_SCORES = {
    "DetrForObjectDetection": _SOFTMAX,
    "TableTransformerForObjectDetection": _SOFTMAX,
    "YolosForObjectDetection": _SOFTMAX,
    "RTDetrForObjectDetection": _SIGMOID,
    "RTDetrV2ForObjectDetection": _SIGMOID,
    "DFineForObjectDetection": _SIGMOID,
    "ConditionalDetrForObjectDetection": _SIGMOID_OF_100,
    "DabDetrForObjectDetection": _SIGMOID_OF_100,
}
DETECTORS = tuple(_SCORES)
_SMALLEST = 64  # pixels of a side: backbones halve it five times


class Detections(ImageModule):
    """forward(pixel_values [batch, 3, height, width] float32) → logits [batch, queries, labels or
    labels + 1], bounding boxes [batch, queries, 4] as centre, width and height from 0 to 1; float32.
    """

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own, without the loss's outputs."""
        with _symbolic_lengths(self.model):
            found = self.model(pixel_values=pixel_values.to(self.dtype))
        return found.logits.float(), found.pred_boxes.float()


@contextmanager
def _symbolic_lengths(model: nn.Module) -> Iterator[None]:
    """``len`` of a tensor in the model's module is its first size, which may be symbolic.

    RT-DETR's forward takes it of a tensor [batch, …]: as an integer, it would fix the batch.
    """
    names = vars(sys.modules[type(model).__module__])
    names["len"] = lambda given: given.shape[0] if isinstance(given, torch.Tensor) else len(given)
    try:
        yield
    finally:
        del names["len"]


def write_object_detection(source: Source) -> Made:
    """…ForObjectDetection. Height and width are dynamic if the processor keeps the aspect ratio."""
    from torch.export import Dim

    if source.architecture not in DETECTORS:
        raise CompileError(
            f"export_folder: object-detection: expected {', '.join(DETECTORS)}, got {source.architecture}: write a "
            "script for untorch export SCRIPT:FUNCTION"
        )
    steps, shape = image_steps(source, is_fixed=False)
    axes: dict[int, Any] = {0: Dim("batch", min=1, max=MAX_BATCH)}
    # With the aspect ratio kept, up to its longest edge.
    longest = next((step[2] for step in steps if step[0] == "resize_edges"), None)
    if longest is not None:
        if longest < 2 * _SMALLEST:
            raise CompileError(
                f"export_folder: {source.folder}: its processor's longest_edge: expected at least {2 * _SMALLEST}, got "
                f"{longest}"
            )
        axes |= {2: Dim("height", min=_SMALLEST, max=longest), 3: Dim("width", min=_SMALLEST, max=longest)}
        # Multiples of patches, unlike each other.
        shape = (3, min(8 * _SMALLEST, longest) // 32 * 32, min(6 * _SMALLEST, longest - 32) // 32 * 32)
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    method = {"model": Detections(source.model), "args": (example,), "dynamic_shapes": (axes,)}
    scores = _SCORES[source.architecture]
    section = {"labels": source.labels(), "image_steps": steps, "activation": scores.activation}
    if scores.candidates is not None:
        section["candidates"] = scores.candidates
    return Made({"forward": method}, section)

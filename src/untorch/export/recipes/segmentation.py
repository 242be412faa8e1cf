"""Recipe for image segmentation: logits for each pixel of a smaller image, or a class and a mask of each query."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.recipes.image import ImageLogits, ImageModule, image_inputs, image_steps
from untorch.export.recipes.source import Made, Source
from untorch.runtime.errors import UnsupportedError

__all__ = ["QUERY_SEGMENTERS", "write_image_segmentation"]

# Those that segment by queries, with the side in pixels of the square in which their processor reads masks; None: masks
# are read as the model gives them.
QUERY_SEGMENTERS: dict[str, int | None] = {
    "Mask2FormerForUniversalSegmentation": 384,
    "MaskFormerForInstanceSegmentation": None,
}


class QueryMasks(ImageModule):
    """forward(pixel_values [batch, 3, height, width] float32) → class logits [batch, queries, labels + 1], mask logits
    [batch, queries, h, w]; float32.
    """

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer."""
        found = self.model(pixel_values=pixel_values.to(self.dtype), output_auxiliary_logits=False)
        return found.class_queries_logits.float(), found.masks_queries_logits.float()


def write_image_segmentation(source: Source) -> Made:
    """…ForSemanticSegmentation, Mask2Former and MaskFormer.

    The batch is dynamic; height and width are those that the processor makes. Raises UnsupportedError without scipy for
    those that need it.
    """
    by_queries = source.architecture in QUERY_SEGMENTERS
    if not by_queries and not source.architecture.endswith("ForSemanticSegmentation"):
        raise CompileError(
            f"export_folder: image-segmentation: expected …ForSemanticSegmentation, {', '.join(QUERY_SEGMENTERS)}, got "
            f"{source.architecture}: write a script for untorch export SCRIPT:FUNCTION"
        )
    if by_queries and importlib.util.find_spec("scipy") is None:  # for their losses, which are not exported
        raise UnsupportedError(
            f"export_folder: {source.folder}: transformers makes {source.architecture} with scipy alone: pip install "
            "scipy"
        )
    steps, shape = image_steps(source)
    section: dict[str, Any] = {"labels": source.labels(), "image_steps": steps}
    if by_queries:
        section |= {"by_queries": True, "mask_size": QUERY_SEGMENTERS[source.architecture]}
    module = (QueryMasks if by_queries else ImageLogits)(source.model)
    return Made({"forward": image_inputs(module, shape)}, section)

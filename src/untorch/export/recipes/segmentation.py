"""Recipe for semantic segmentation: SegFormer and others that give logits for each pixel of a smaller image."""

from __future__ import annotations

from untorch.export.errors import CompileError
from untorch.export.recipes.image import ImageLogits, image_inputs, image_steps
from untorch.export.recipes.source import Made, Source

__all__ = ["write_image_segmentation"]


def write_image_segmentation(source: Source) -> Made:
    """…ForSemanticSegmentation. The batch is dynamic; height and width are those that the processor makes."""
    if not source.architecture.endswith("ForSemanticSegmentation"):
        raise CompileError(
            f"export_folder: image-segmentation: expected …ForSemanticSegmentation, got {source.architecture}: "
            "instance and panoptic segmentation need a script for untorch export SCRIPT:FUNCTION"
        )
    steps, shape = image_steps(source)
    section = {"labels": source.labels(), "image_steps": steps}
    return Made({"forward": image_inputs(ImageLogits(source.model), shape)}, section)

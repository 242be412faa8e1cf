"""Recipe for image segmentation: logits for each pixel of a smaller image, or a class and a mask of each query."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from untorch.export.environment import environment
from untorch.export.errors import CompileError
from untorch.export.recipes.image import ImageLogits, ImageModule, image_inputs, image_steps
from untorch.export.recipes.source import Made, Source
from untorch.pipeline.segmentation import SUBTASKS
from untorch.runtime.errors import UnsupportedError

__all__ = ["QUERY_SEGMENTERS", "write_image_segmentation"]

# Those that segment by queries, with the side in pixels of the square in which their processor reads masks; None: masks
# are read as the model gives them.
QUERY_SEGMENTERS: dict[str, int | None] = {
    "Mask2FormerForUniversalSegmentation": 384,
    "MaskFormerForInstanceSegmentation": None,
    "OneFormerForUniversalSegmentation": None,
}


class QueryMasks(ImageModule):
    """forward(pixel_values [batch, 3, height, width] float32) → class logits [batch, queries, labels + 1], mask logits
    [batch, queries, h, w]; float32.
    """

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer."""
        found = self.model(pixel_values=pixel_values.to(self.dtype), output_auxiliary_logits=False)
        return found.class_queries_logits.float(), found.masks_queries_logits.float()


class TaskQueryMasks(ImageModule):
    """forward(pixel_values [batch, 3, height, width] float32, task_inputs [batch, sequence] int64) → as QueryMasks."""

    def forward(self, pixel_values: torch.Tensor, task_inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer, for the subtask whose tokens are given."""
        # transformers checks sizes with a tensor of them, which Inductor does not lower.
        with environment("TRANSFORMERS_DISABLE_TORCH_CHECK", "1"):
            found = self.model(
                pixel_values=pixel_values.to(self.dtype), task_inputs=task_inputs, output_auxiliary_logits=False
            )
        return found.class_queries_logits.float(), found.masks_queries_logits.float()


def write_image_segmentation(source: Source) -> Made:
    """…ForSemanticSegmentation, Mask2Former, MaskFormer and OneFormer.

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
    reads_task = source.architecture.startswith("OneFormer")
    # OneFormer's processor downloads this file, which it reads in training alone.
    changes: dict[str, Any] = {"class_info_file": None} if reads_task else {}
    steps, shape = image_steps(source, **changes)
    section: dict[str, Any] = {"labels": source.labels(), "image_steps": steps}
    if by_queries:
        section |= {"by_queries": True, "mask_size": QUERY_SEGMENTERS[source.architecture]}
    if reads_task:
        section["task_inputs"] = _task_inputs(source)
        return Made({"forward": _task_method(source.model, shape, section["task_inputs"])}, section)
    module = (QueryMasks if by_queries else ImageLogits)(source.model)
    return Made({"forward": image_inputs(module, shape)}, section)


def _task_inputs(source: Source) -> dict[str, list[int]]:
    """Tokens of each subtask's text, with zeros for padding, as OneFormerProcessor's. Raises CompileError."""
    length, found = int(source.model.config.task_seq_len), {}
    for subtask in SUBTASKS:
        ids = [int(one) for one in source.tokenizer(f"the task is {subtask}")["input_ids"]]
        if len(ids) > length:
            raise CompileError(
                f"export_folder: {source.folder}: config.json: task_seq_len: expected at least {len(ids)}, the tokens "
                f'of "the task is {subtask}", got {length}'
            )
        found[subtask] = ids + [0] * (length - len(ids))
    return found


def _task_method(model: Any, shape: tuple[int, ...], tokens: dict[str, list[int]]) -> dict[str, Any]:
    model.model.is_training = False  # it would read texts of the image
    method = image_inputs(TaskQueryMasks(model), shape)
    pixels, axes = method["args"][0], method["dynamic_shapes"][0]
    task_inputs = torch.tensor([tokens[SUBTASKS[0]]] * len(pixels))
    return {**method, "args": (pixels, task_inputs), "dynamic_shapes": (axes, {0: axes[0]})}

"""Image classification, and what tasks on images have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.base import Pipeline, numbered, read_count
from untorch.pipeline.image_steps import apply_steps, read_image
from untorch.pipeline.scores import activate, activation_of, best

__all__ = ["ImageClassification", "ImagePipeline"]


class ImagePipeline(Pipeline):
    """The package's image steps in front of a method."""

    def images(self, inputs: Sequence[Any], is_list: bool) -> Iterator[Any]:
        """Pillow images, RGB, one at a time. Raises InvalidArgumentError, which says which input is none."""
        for index, source in enumerate(inputs):
            with numbered(index if is_list else None):
                read = [read_image(source)]
            yield read.pop()  # only the caller keeps it

    def pixels(self, inputs: Sequence[Any], is_list: bool = False) -> NDArray[np.float32]:
        """[batch, 3, height, width]. Raises InvalidFileError for steps that are damaged."""
        images = [*self.images(inputs, is_list)]
        steps = self.settings.get("image_steps", list)
        try:
            return np.stack([apply_steps(image, steps) for image in images])
        except (TypeError, ValueError) as error:
            raise self.settings.damaged(f"image_steps: {error}") from None


class ImageClassification(ImagePipeline):
    """The best labels with their scores; top_k of them, 5 by default."""

    options = ("top_k", "function_to_apply")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        top_k = read_count("top_k", options.get("top_k", 5))
        name = activation_of(options, self.settings)
        logits = self.call("forward", {"pixel_values": self.pixels(inputs, is_list)})
        scores = activate(logits, name)
        labels = self.labels(logits.shape[-1])
        return [best(row, labels, top_k) for row in scores]

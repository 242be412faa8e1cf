"""Zero-shot image classification: images and labels in one space, by two methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from untorch.pipeline.image import ImagePipeline
from untorch.pipeline.scores import best, sigmoid, softmax
from untorch.pipeline.settings import Settings
from untorch.pipeline.tokens import Tokens
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["ZeroShotImageClassification"]


class ZeroShotImageClassification(ImagePipeline):
    """The candidate labels with their scores, falling. candidate_labels is needed."""

    options = ("candidate_labels", "hypothesis_template")

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self._tokens = Tokens(program, settings)

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        labels, template = _read_labels(options), options.get("hypothesis_template", "This is a photo of {}.")
        if not isinstance(template, str) or "{}" not in template:
            raise InvalidArgumentError(
                f"pipeline: hypothesis_template: expected a string with {{}}, got {template!r:.80}"
            )
        encodings = self._tokens.encode(
            [template.replace("{}", label) for label in labels], name="candidate_labels", advice="shorten the label"
        )
        texts = self.call("encode_text", self._tokens.arrays(encodings))
        images = self.call("encode_image", {"pixel_values": self.pixels(inputs, is_list)})
        scale, bias = self.settings.get("logit_scale", float), self.settings.get("logit_bias", float)
        logits = np.einsum("iw,tw->it", images, texts) * np.float32(scale) + np.float32(bias)
        scores = sigmoid(logits) if self.settings.get("activation", str) == "sigmoid" else softmax(logits)
        return [[{"score": one["score"], "label": one["label"]} for one in best(row, labels, None)] for row in scores]


def _read_labels(options: Mapping[str, Any]) -> list[str]:
    given = options.get("candidate_labels")
    labels = [label.strip() for label in given.split(",")] if isinstance(given, str) else given
    if not isinstance(labels, list | tuple) or not labels or not all(isinstance(label, str) for label in labels):
        raise InvalidArgumentError(
            f'pipeline: candidate_labels: expected a list of strings such as ["cat", "dog"], got {given!r:.80}'
        )
    return list(labels)

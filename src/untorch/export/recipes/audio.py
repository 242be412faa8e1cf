"""Recipe for audio classification: models that read a waveform (Wav2Vec2, HuBERT and the like)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Made, Source

__all__ = ["write_audio_classification"]

_LONGEST = 60  # seconds


class AudioLogits(nn.Module):
    """forward(input_values [1, samples] float32) → logits [1, labels] float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.train(model.training)

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        """The model's own logits."""
        logits: torch.Tensor = self.model(input_values.to(self.dtype)).logits
        return logits.float()


def write_audio_classification(source: Source) -> Made:
    """…ForSequenceClassification over a waveform, whose samples are dynamic. One waveform a call."""
    from torch.export import Dim
    from transformers import AutoFeatureExtractor

    kind: Any = AutoFeatureExtractor
    extractor: Any = kind.from_pretrained(source.folder, local_files_only=True)
    if type(extractor).__name__ != "Wav2Vec2FeatureExtractor":
        raise CompileError(
            "export_folder: audio-classification: expected a model on waveforms (Wav2Vec2FeatureExtractor), got "
            f"{type(extractor).__name__}: write a script for untorch export SCRIPT:FUNCTION"
        )
    rate, config = int(extractor.sampling_rate), source.model.config
    field = 1
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        field = (field - 1) * stride + kernel
    # Two frames: torch.export takes a size of one for a constant.
    fewest = field + int(torch.tensor(config.conv_stride).prod())
    section = {
        "labels": source.labels(), "activation": "softmax", "sampling_rate": rate,
        "normalize": bool(extractor.do_normalize), "min_samples": fewest, "max_samples": _LONGEST * rate,
    }  # fmt: skip
    example = torch.randn(1, max(rate, 2 * fewest), generator=torch.Generator().manual_seed(0))
    axes = ({1: Dim("samples", min=fewest, max=_LONGEST * rate)},)
    method = {"model": AudioLogits(source.model), "args": (example,), "dynamic_shapes": axes}
    return Made({"forward": method}, section)

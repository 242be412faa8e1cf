"""CTC models: one method from a waveform to logits, with the vocabulary of its characters."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport, write_package
from untorch.export.methods import read_methods, read_path
from untorch.export.options import ExportOptions, resolve_options
from untorch.runtime.errors import InvalidArgumentError
from untorch.speech.settings import SpeechSettings

__all__ = ["CTC_MODELS", "write_ctc"]

CTC_MODELS = (
    "Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC", "UniSpeechForCTC", "UniSpeechSatForCTC", "Data2VecAudioForCTC",
    "Wav2Vec2ConformerForCTC",
)  # fmt: skip
_VOCABULARY = "extra/speech/vocabulary.json"


class CtcLogits(nn.Module):
    """forward(waveform [1, samples] float32) → logits [1, frames, labels] float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.train(model.training)

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """The model's own logits."""
        logits: torch.Tensor = self.model(waveform.to(self.dtype)).logits
        return logits.float()


def write_ctc(
    model: nn.Module,
    path: str | os.PathLike[str],
    extractor: Any,
    tokenizer: Any,
    folder: Path | None,
    languages: Sequence[str],
    chunk_seconds: float,
    device: str,
    arch: str | Sequence[str] | None,
    options: ExportOptions | None,
    option_fields: dict[str, Any],
) -> ExportReport:
    """What ``speech_to_text`` does for a CTC model."""
    from torch.export import Dim

    resolved, target = resolve_options(options, option_fields), read_path(path)
    if len(languages) > 1:
        raise InvalidArgumentError(
            f"speech_to_text: languages: expected at most one, as a CTC model has one vocabulary, got {languages}"
        )
    if type(extractor).__name__ != "Wav2Vec2FeatureExtractor":
        raise InvalidArgumentError(
            "speech_to_text: feature_extractor: expected a Wav2Vec2FeatureExtractor, got " + type(extractor).__name__
        )
    config: Any = model.config
    rate, frame = int(extractor.sampling_rate), math.prod(config.conv_stride)
    # Two frames, as torch.export takes a size of one for a constant.
    fewest = _receptive_field(config.conv_kernel, config.conv_stride) + frame
    overlap = math.ceil(chunk_seconds * rate / 6 / frame) * frame
    longest = max(round(chunk_seconds * rate / frame) * frame, 3 * overlap)
    if overlap < fewest:
        raise InvalidArgumentError(
            f"speech_to_text: chunk_seconds: expected at least {6 * fewest / rate:.3g}, as a sixth of it has to cover "
            f"the {fewest} samples that a frame sees, got {chunk_seconds}"
        )
    vocabulary, section = _read_vocabulary(tokenizer, folder, int(config.vocab_size))
    method = CtcLogits(model)
    _check_frames(method, fewest, frame, config)
    settings = SpeechSettings(
        decoder="ctc", method="forward", sampling_rate=rate, chunk_samples=longest, architecture=type(model).__name__,
        languages=tuple(languages), normalize=bool(extractor.do_normalize), min_samples=fewest,
        overlap_samples=overlap, frame_samples=frame, vocabulary=_VOCABULARY, **section,
    )  # fmt: skip
    requests = read_methods(
        methods={
            "forward": {
                "model": method,
                "args": (torch.randn(1, rate, generator=torch.Generator().manual_seed(0)),),
                "dynamic_shapes": ({1: Dim("samples", min=fewest, max=longest)},),
            }
        }
    )
    # transformers views sizes that torch.export cannot tell apart from others: they always hold.
    requests = [replace(request, method=replace(request.method, defers_guards=True)) for request in requests]
    files = {_VOCABULARY: json.dumps(vocabulary, ensure_ascii=False).encode()}
    return write_package(requests, target, device, arch, resolved, {"speech": settings.to_json()}, files)


def _receptive_field(kernels: Sequence[int], strides: Sequence[int]) -> int:
    """Samples that one frame sees."""
    samples = 1
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        samples = (samples - 1) * stride + kernel
    return samples


def _check_frames(method: CtcLogits, fewest: int, frame: int, config: Any) -> None:
    """Raises CompileError if there is not a frame every ``frame`` samples."""
    field = _receptive_field(config.conv_kernel, config.conv_stride)
    training = method.training
    method.eval()
    try:
        for samples in (fewest, fewest + frame - 1, 4 * fewest + 7 * frame):
            with torch.no_grad():
                frames = method(torch.zeros(1, samples)).shape[1]
            expected = (samples - field) // frame + 1
            if frames != expected:
                raise CompileError(
                    f"speech_to_text: model: expected a frame every {frame} samples, {expected} of {samples} samples, "
                    f"got {frames}: its convolutions are not all that change the number of frames (add_adapter)"
                )
    finally:
        method.train(training)


def _read_vocabulary(tokenizer: Any, folder: Path | None, size: int) -> tuple[list[str], dict[str, Any]]:
    """The tokens by id, and fields of the settings."""
    if isinstance(tokenizer, str | os.PathLike):
        folder, tokenizer = Path(tokenizer), None
    if tokenizer is None and folder is not None and (folder / "vocab.json").is_file():
        from transformers import Wav2Vec2CTCTokenizer

        tokenizer = Wav2Vec2CTCTokenizer.from_pretrained(folder, local_files_only=True)
    if type(tokenizer).__name__ != "Wav2Vec2CTCTokenizer":
        got = "none" if tokenizer is None else type(tokenizer).__name__
        raise InvalidArgumentError(
            f"speech_to_text: tokenizer: expected a Wav2Vec2CTCTokenizer, or a folder with one, got {got}"
        )
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items() if 0 <= token_id < size}
    blank = tokenizer.pad_token_id
    if blank is None or blank not in by_id:
        raise InvalidArgumentError(
            f"speech_to_text: tokenizer: expected a padding token among the model's {size} labels, which is CTC's "
            f"blank, got {blank!r}"
        )
    if tokenizer.replace_word_delimiter_char != " ":
        raise InvalidArgumentError(
            "speech_to_text: tokenizer: expected words that are separated by spaces, got "
            f"{tokenizer.replace_word_delimiter_char!r}"
        )
    unknown = str(tokenizer.unk_token)
    section = {
        "blank_id": int(blank), "word_delimiter": str(tokenizer.word_delimiter_token),
        "lower_case": bool(tokenizer.do_lower_case),
    }  # fmt: skip
    return [by_id.get(token_id, unknown) for token_id in range(size)], section

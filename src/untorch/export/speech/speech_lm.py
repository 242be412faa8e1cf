"""Speech language models: the audio encoder as a method beside the language model's steps, and the prompt around it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport
from untorch.export.lm.build import Addition, write_language_model
from untorch.export.lm.source import read_tokenizer
from untorch.export.options import ExportOptions
from untorch.runtime.errors import InvalidArgumentError
from untorch.speech.settings import SpeechSettings

__all__ = ["SPEECH_LANGUAGE_MODELS", "write_speech_language_model"]

SPEECH_LANGUAGE_MODELS = ("VoxtralForConditionalGeneration",)
_METHOD = "encode_audio"
_MEL_FILTERS = "extra/speech/mel_filters.bin"
# Of Voxtral, as mistral_common encodes a request for a transcription. Names are special tokens.
_TEMPLATE = ("<s>", "[INST]", "[BEGIN_AUDIO]", "audio", "[/INST]", "lang:{language}", "[TRANSCRIBE]")
_TEXTS = ("audio", "lang:{language}")
_ARGUMENTS = ("max_positions", "block_size", "kv_dtype", "token_counts")


class AudioEncoder(nn.Module):
    """forward(features [1, n_mels, frames] float32) → embeddings [tokens, hidden] float32."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.audio_tower, self.projector = model.model.audio_tower, model.model.multi_modal_projector
        self.width = int(model.config.audio_config.intermediate_size)
        self.dtype = next(p.dtype for p in self.audio_tower.parameters() if p.is_floating_point())
        self.train(model.training)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Several frames of the encoder are one token."""
        hidden = self.audio_tower(features.to(self.dtype)).last_hidden_state
        found: torch.Tensor = self.projector(hidden.reshape(-1, self.width))
        return found.float()


def write_speech_language_model(
    model: Any,
    path: str | os.PathLike[str],
    extractor: Any,
    tokenizer: Any,
    folder: Path | None,
    languages: Sequence[str],
    device: str,
    arch: str | Sequence[str] | None,
    options: ExportOptions | None,
    arguments: dict[str, Any],
    option_fields: dict[str, Any],
) -> ExportReport:
    """What ``speech_to_text`` does for a speech language model."""
    if unknown := sorted(set(arguments) - set(_ARGUMENTS)):
        raise InvalidArgumentError(
            f"speech_to_text: language_model: expected {', '.join(_ARGUMENTS)}, got {', '.join(unknown)}"
        )
    if type(extractor).__name__ != "WhisperFeatureExtractor":
        raise InvalidArgumentError(
            "speech_to_text: feature_extractor: expected a WhisperFeatureExtractor, got " + type(extractor).__name__
        )
    audio = model.config.audio_config
    bins, mels = extractor.mel_filters.shape
    if mels != audio.num_mel_bins or getattr(extractor, "dither", 0.0):
        raise InvalidArgumentError(
            f"speech_to_text: feature_extractor: expected {audio.num_mel_bins} mel bins and no dither, got {mels} and "
            f"{extractor.dither}"
        )
    frames = 2 * int(audio.max_source_positions)  # the encoder's second convolution has the stride 2
    encoder = AudioEncoder(model)
    features = torch.randn(1, mels, frames, generator=torch.Generator().manual_seed(0))
    _check_encoder(model, encoder, features)
    files = read_tokenizer(tokenizer, folder)
    if files.tokenizer is None:
        raise InvalidArgumentError(
            "speech_to_text: tokenizer: expected one, as the prompt names special tokens, got none: a folder with "
            "tekken.json alone has to be converted to a tokenizer.json"
        )
    settings = SpeechSettings(
        decoder="causal_lm", method=_METHOD, sampling_rate=int(extractor.sampling_rate),
        chunk_samples=frames * int(extractor.hop_length), architecture=type(model).__name__,
        languages=tuple(languages), n_fft=2 * (bins - 1), hop_length=int(extractor.hop_length), n_mels=int(mels),
        mel_filters=_MEL_FILTERS, template=_template(files.tokenizer), placeholder=int(model.config.audio_token_id),
    )  # fmt: skip
    addition = Addition(
        {_METHOD: (encoder, (features,))},
        {"speech": settings.to_json()},
        {_MEL_FILTERS: np.ascontiguousarray(extractor.mel_filters, "<f4").tobytes()},
    )
    return write_language_model(
        model, path, addition, task="generate", inputs_embeds=True, tokenizer=tokenizer or folder, device=device,
        arch=arch, options=options, option_fields=option_fields, **arguments,
    )  # fmt: skip


def _check_encoder(model: Any, encoder: AudioEncoder, features: torch.Tensor) -> None:
    """Raises CompileError if the model makes other embeddings of the features."""
    training = model.training
    model.eval()
    encoder.eval()
    try:
        with torch.no_grad():
            found = encoder(features)
            wanted = model.get_audio_features(features.to(encoder.dtype), return_dict=True).pooler_output.float()
    finally:
        model.train(training)
        encoder.train(training)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
        raise CompileError(
            f"speech_to_text: model: {type(model).__name__}.get_audio_features does more than its encoder and projector"
        )


def _template(tokenizer: bytes) -> tuple[int | str, ...]:
    from tokenizers import Tokenizer

    known = Tokenizer.from_buffer(tokenizer)
    items: list[int | str] = []
    for item in _TEMPLATE:
        token_id = None if item in _TEXTS else known.token_to_id(item)
        if item not in _TEXTS and token_id is None:
            raise InvalidArgumentError(f"speech_to_text: tokenizer: expected a token {item}, which is in the prompt")
        items.append(item if token_id is None else token_id)
    return tuple(items)

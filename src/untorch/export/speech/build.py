"""``speech_to_text``: a speech model of transformers into one package that ``untorch.speech.Transcriber`` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport
from untorch.export.options import ExportOptions
from untorch.export.speech.ctc import CTC_MODELS, write_ctc
from untorch.export.speech.source import load_speech_model, read_feature_extractor, read_languages
from untorch.export.speech.speech_lm import SPEECH_LANGUAGE_MODELS, write_speech_language_model
from untorch.export.speech.whisper import WHISPER_MODELS, write_whisper
from untorch.export.streaming import with_streamed_weights
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["SPEECH_MODELS", "speech_to_text"]

SPEECH_MODELS = (*CTC_MODELS, *WHISPER_MODELS, *SPEECH_LANGUAGE_MODELS)


@with_streamed_weights
def speech_to_text(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    feature_extractor: Any = None,
    tokenizer: Any = None,
    languages: str | Sequence[str] = (),
    chunk_seconds: float = 30.0,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    language_model: dict[str, Any] | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile a speech model, in evaluation mode, and write it to ``path`` with all that turns audio into text.

    ``untorch.speech.Transcriber`` runs it, and ``untorch serve`` at ``/v1/audio/transcriptions``.

    Args:
        model: A model of transformers, or a local folder with one: Wav2Vec2ForCTC, HubertForCTC and the like,
            WhisperForConditionalGeneration, or VoxtralForConditionalGeneration.
        path: The file to write.
        feature_extractor: Of transformers. Default: the model's folder's.
        tokenizer: For CTC a Wav2Vec2CTCTokenizer; for others what ``causal_lm`` takes. Default: the model's folder's.
        languages: Those that may be asked for, ISO 639-1: of a CTC model the one that it was trained for. Default: of
            CTC models none, of Whisper all that it knows, of others any.
        chunk_seconds: For CTC: the longest audio that the model sees as a whole. Of longer one it sees windows, with a
            sixth of their length on each side for context.
        dtype: What the weights of a folder are converted to. Default: what its config says.
        device: As for ``export``.
        arch: As for ``export``.
        options: As for ``export``.
        language_model: For Voxtral: arguments of ``causal_lm``: max_positions, block_size, kv_dtype, token_counts.
        option_fields: Fields of ExportOptions that replace those in ``options``.

    Raises:
        CompileError: The model is none that is known, or what ``export`` and ``causal_lm`` raise.
        InvalidArgumentError: An argument is wrong. Also a ValueError.
    """
    if isinstance(chunk_seconds, bool) or not isinstance(chunk_seconds, int | float) or not 1 <= chunk_seconds <= 600:
        raise InvalidArgumentError(
            f"speech_to_text: chunk_seconds: expected a number from 1 to 600, got {chunk_seconds!r}"
        )
    codes = read_languages(languages)
    module, folder = load_speech_model(model, dtype)
    name = type(module).__name__
    if name not in SPEECH_MODELS:
        raise CompileError(
            f"speech_to_text: model: expected one of {', '.join(SPEECH_MODELS)}, got {name}: "
            "compile its parts with untorch.export.export"
        )
    if elsewhere := {str(parameter.device) for parameter in module.parameters()} - {"cpu"}:
        raise InvalidArgumentError(
            f"speech_to_text: model: expected its parameters on the CPU, got {', '.join(sorted(elsewhere))}: use "
            "model.cpu()"
        )
    extractor = read_feature_extractor(feature_extractor, folder)
    if name not in SPEECH_LANGUAGE_MODELS:
        if language_model:
            raise InvalidArgumentError(f"speech_to_text: language_model: {name} has none, got {language_model!r:.80}")
        if name in WHISPER_MODELS:
            return write_whisper(
                module, path, extractor, tokenizer, folder, codes, device, arch, options, option_fields
            )
        return write_ctc(
            module, path, extractor, tokenizer, folder, codes, chunk_seconds, device, arch, options, option_fields
        )
    return write_speech_language_model(
        module, path, extractor, tokenizer, folder, codes, device, arch, options, language_model or {}, option_fields
    )

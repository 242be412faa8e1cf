"""Whisper: the encoder and the decoder with its cache as methods, its special tokens, tokenizer and mel filters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport, write_package
from untorch.export.lm.source import read_tokenizer
from untorch.export.methods import read_methods, read_path
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.speech.whisper_model import Decode, Encode, WhisperDecoder
from untorch.runtime.errors import InvalidArgumentError
from untorch.speech.seq2seq_settings import Seq2SeqSettings
from untorch.speech.settings import SpeechSettings

__all__ = ["WHISPER_MODELS", "write_whisper"]

WHISPER_MODELS = ("WhisperForConditionalGeneration",)
_MEL_FILTERS = "extra/speech/mel_filters.bin"
_TOKENIZER = "extra/speech/tokenizer.json"
_EXAMPLE = 5  # tokens


def write_whisper(
    model: Any,
    path: str | os.PathLike[str],
    extractor: Any,
    tokenizer: Any,
    folder: Path | None,
    languages: Sequence[str],
    device: str,
    arch: str | Sequence[str] | None,
    options: ExportOptions | None,
    option_fields: dict[str, Any],
) -> ExportReport:
    """What ``speech_to_text`` does for Whisper."""
    from torch.export import Dim

    resolved, target = resolve_options(options, option_fields), read_path(path)
    config = model.config
    if type(extractor).__name__ != "WhisperFeatureExtractor":
        raise InvalidArgumentError(
            "speech_to_text: feature_extractor: expected a WhisperFeatureExtractor, got " + type(extractor).__name__
        )
    bins, mels = extractor.mel_filters.shape
    frames = 2 * int(config.max_source_positions)  # the encoder's second convolution has the stride 2
    hop = int(extractor.hop_length)
    if mels != config.num_mel_bins or getattr(extractor, "dither", 0.0) or int(extractor.n_samples) != frames * hop:
        raise InvalidArgumentError(
            f"speech_to_text: feature_extractor: expected {config.num_mel_bins} mel bins, {frames} frames and no "
            f"dither, got {mels}, {extractor.n_samples / hop:g} and {extractor.dither}"
        )
    file = read_tokenizer(tokenizer, folder).tokenizer
    if file is None:
        raise InvalidArgumentError(
            "speech_to_text: tokenizer: expected a tokenizer.json, or a folder with one, got none"
        )
    chunk_seconds = frames * hop / extractor.sampling_rate
    own = read_tokens(model, file, chunk_seconds)
    codes = _read_codes(own, languages)
    decoder = WhisperDecoder(model)
    encode, decode = Encode(model, decoder, own.start), Decode(decoder)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, mels, frames, generator=generator)
    _check(model, encode, decode, features, own.start)
    settings = SpeechSettings(
        decoder="seq2seq", method="encode", sampling_rate=int(extractor.sampling_rate), chunk_samples=frames * hop,
        architecture=type(model).__name__, languages=codes, n_fft=2 * (bins - 1), hop_length=hop, n_mels=int(mels),
        mel_filters=_MEL_FILTERS, seq2seq=own,
    )  # fmt: skip
    tokens = torch.arange(_EXAMPLE)[None] % own.vocabulary
    requests = read_methods(
        methods={
            "encode": {"model": encode, "args": (features,)},
            "decode": {
                "model": decode,
                "args": (tokens, torch.zeros(1, dtype=torch.int64)),
                "dynamic_shapes": ({1: Dim("tokens", min=1, max=own.max_tokens)}, None),
            },
        }
    )
    # Sizes that torch.export cannot tell apart from others: they always hold.
    requests = [replace(request, method=replace(request.method, defers_guards=True)) for request in requests]
    files = {_MEL_FILTERS: np.ascontiguousarray(extractor.mel_filters, "<f4").tobytes(), _TOKENIZER: file}
    return write_package(requests, target, device, arch, resolved, {"speech": settings.to_json()}, files)


def read_tokens(model: Any, tokenizer: bytes, chunk_seconds: float) -> Seq2SeqSettings:
    """The special tokens, of the generation config and the tokenizer.

    Raises InvalidArgumentError if one that is needed is missing.
    """
    from tokenizers import Tokenizer

    known, generation, config = Tokenizer.from_buffer(tokenizer), model.generation_config, model.config

    def named(name: str) -> int | None:
        found: int | None = known.token_to_id(name)
        return found if found is not None and found < config.vocab_size else None

    def needed(name: str, value: Any) -> int:
        found = value if isinstance(value, int) else named(name)
        if found is None:
            raise InvalidArgumentError(
                f"speech_to_text: tokenizer: expected a token {name}, which Whisper's prompt has, or a "
                "generation_config.json that names it"
            )
        return int(found)

    silence = named("<|nospeech|>")
    languages, tasks = getattr(generation, "lang_to_id", None) or {}, getattr(generation, "task_to_id", None) or {}
    start = needed("<|startoftranscript|>", config.decoder_start_token_id)
    is_multilingual = bool(languages) and getattr(generation, "is_multilingual", True)
    return Seq2SeqSettings(
        decode="decode", tokenizer=_TOKENIZER, max_tokens=int(config.max_target_positions),
        vocabulary=int(config.vocab_size), start=start, end=needed("<|endoftext|>", _one(generation.eos_token_id)),
        no_timestamps=needed("<|notimestamps|>", getattr(generation, "no_timestamps_token_id", None)),
        seconds_per_token=chunk_seconds / int(config.max_source_positions),
        previous=_first(getattr(generation, "prev_sot_token_id", None), named("<|startofprev|>")),
        no_speech=silence if silence is not None else named("<|nocaptions|>"),
        transcribe=_first(tasks.get("transcribe"), named("<|transcribe|>")) if is_multilingual else None,
        translate=_first(tasks.get("translate"), named("<|translate|>")) if is_multilingual else None,
        languages={name.strip("<|>"): int(value) for name, value in languages.items()} if is_multilingual else {},
        suppress=tuple(generation.suppress_tokens or ()), suppress_first=tuple(generation.begin_suppress_tokens or ()),
        max_first_time=getattr(generation, "max_initial_timestamp_index", None),
    )  # fmt: skip


def _one(given: Any) -> Any:
    return given[0] if isinstance(given, list | tuple) and given else given


def _first(*values: int | None) -> int | None:
    return next((int(value) for value in values if value is not None), None)


def _read_codes(own: Seq2SeqSettings, given: Sequence[str]) -> tuple[str, ...]:
    """The languages that may be asked for."""
    if not own.languages:
        return tuple(given) or ("en",)
    if unknown := sorted(set(given) - own.languages.keys()):
        raise InvalidArgumentError(
            f"speech_to_text: languages: expected some of {', '.join(own.languages)}, got {unknown[0]}"
        )
    return tuple(given) or tuple(own.languages)


def _check(model: Any, encode: Encode, decode: Decode, features: torch.Tensor, start: int) -> None:
    """Raises CompileError if the model gives other logits than the two methods."""
    tokens = torch.tensor([[start, 1, 2, 3, 1, 4]]) % model.config.vocab_size
    modules: list[nn.Module] = [model, encode, decode]
    training = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            found = [encode(features)]
            for begin, end in ((0, 3), (3, 4), (4, 6)):
                found.append(decode(tokens[:, begin:end], torch.tensor([begin])))
            dtype = next(model.parameters()).dtype
            wanted = model(input_features=features.to(dtype), decoder_input_ids=tokens, use_cache=False).logits.float()
    finally:
        for module, mode in zip(modules, training, strict=True):
            module.train(mode)
        decode.decoder.reset()
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    gap = max(float((one - wanted[:, i]).abs().max()) for one, i in zip(found, (0, 2, 3, 5), strict=True))
    if gap > limit * max(1.0, float(wanted.abs().max())):
        raise CompileError(
            f"speech_to_text: model: {type(model).__name__} gives other logits than its layers one by one, by "
            f"{gap:.2g}: use a version of transformers that untorch knows"
        )

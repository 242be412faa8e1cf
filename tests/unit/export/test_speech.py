"""``speech_to_text``: what it refuses before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import speech_models
from untorch.export import CompileError, speech_to_text
from untorch.export.speech.whisper import read_tokens
from untorch.runtime.errors import ArgumentTypeError, FileMissingError, InvalidArgumentError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module")
def ctc() -> dict[str, Any]:
    return {
        "model": speech_models.make_ctc(), "feature_extractor": speech_models.ctc_extractor(),
        "tokenizer": speech_models.ctc_tokenizer(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def voxtral() -> dict[str, Any]:
    model = speech_models.make_voxtral()
    return {
        "model": model, "feature_extractor": speech_models.voxtral_extractor(model),
        "tokenizer": speech_models.voxtral_tokenizer(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"chunk_seconds": 0}, InvalidArgumentError, "chunk_seconds: expected a number from 1 to 600, got 0"),
        ({"languages": "english"}, InvalidArgumentError, 'languages: expected codes of ISO 639-1 such as "en", got'),
        ({"languages": ("en", "fr")}, InvalidArgumentError, "languages: expected at most one"),
        (
            {"feature_extractor": None},
            InvalidArgumentError,
            "feature_extractor: expected one of transformers.*got none",
        ),
        (
            {"feature_extractor": transformers.WhisperFeatureExtractor()},
            InvalidArgumentError,
            "Wav2Vec2FeatureExtractor",
        ),
        (
            {"tokenizer": None},
            InvalidArgumentError,
            "tokenizer: expected a Wav2Vec2CTCTokenizer, or a folder.*got none",
        ),
        ({"language_model": {"block_size": 16}}, InvalidArgumentError, "language_model: Wav2Vec2ForCTC has none"),
        ({"dtype": torch.bfloat16}, InvalidArgumentError, "dtype: is for a folder"),
        ({"model": 7}, ArgumentTypeError, "model: expected a module or the path of a Hugging Face folder, got int"),
        ({"model": "nowhere"}, FileMissingError, "model: there is no folder nowhere"),
        ({"model": torch.nn.Linear(2, 2)}, CompileError, "model: expected one of Wav2Vec2ForCTC, .* got Linear"),
    ],
)
def test_ctc_refusals(ctc: dict[str, Any], change: dict[str, Any], error: type, text: str, tmp_path: Path) -> None:
    given = {**ctc, **change}
    with pytest.raises(error, match=f"speech_to_text: .*{text}"):
        speech_to_text(given.pop("model"), tmp_path / "m.pt2", **given)


def test_a_model_with_other_frames(ctc: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config(**{**ctc["model"].config.to_dict(), "add_adapter": True})
    model = transformers.Wav2Vec2ForCTC(config).eval()
    given = {**ctc, "model": model}
    with pytest.raises(CompileError, match=r"expected a frame every 320 samples, .* \(add_adapter\)"):
        speech_to_text(given.pop("model"), tmp_path / "m.pt2", **given)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"feature_extractor": speech_models.ctc_extractor()}, "expected a WhisperFeatureExtractor, got"),
        (
            {"feature_extractor": transformers.WhisperFeatureExtractor()},
            "expected 8 mel bins, 200 frames and no dither, got 80, 3000 and 0.0",
        ),
        ({"tokenizer": None}, "tokenizer: expected a tokenizer.json, or a folder with one, got none"),
        ({"languages": ("en", "es")}, "languages: expected some of en, de, fr, got es"),
        ({"language_model": {"block_size": 16}}, "language_model: WhisperForConditionalGeneration has none"),
    ],
)
def test_whisper_refusals(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    given = {
        "feature_extractor": speech_models.whisper_extractor(), "tokenizer": speech_models.whisper_tokenizer(), **change,
    }  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=f"speech_to_text: .*{text}"):
        speech_to_text(speech_models.make_whisper(), tmp_path / "m.pt2", **given)


def test_whispers_tokens() -> None:
    """Of the generation config; without it, of the tokenizer."""
    model, file = speech_models.make_whisper(), speech_models.whisper_tokenizer().backend_tokenizer.to_str().encode()
    own = read_tokens(model, file, 2.0)
    assert (own.start, own.end, own.no_timestamps, own.previous, own.no_speech) == (61, 60, 70, 68, 69)
    assert (own.languages, own.transcribe, own.translate) == ({"en": 62, "de": 63, "fr": 64}, 66, 65)
    assert (own.seconds_per_token, own.max_first_time, own.suppress[:2], own.suppress_first) == (
        0.02,
        20,
        (1, 2),
        (0, 60),
    )
    model.generation_config = transformers.GenerationConfig(eos_token_id=60)
    bare = read_tokens(model, file, 2.0)
    assert (bare.start, bare.end, bare.no_timestamps, bare.previous) == (61, 60, 70, 68)
    assert (bare.languages, bare.transcribe, bare.suppress, bare.max_first_time) == ({}, None, (), None)
    from tests.conformance.language_models import tokenizer

    with pytest.raises(InvalidArgumentError, match=r"tokenizer: expected a token <\|notimestamps\|>, which Whisper's"):
        read_tokens(model, tokenizer(), 2.0)


def test_a_whisper_with_other_layers(tmp_path: Path) -> None:
    model = speech_models.make_whisper()
    layer = model.model.decoder.layers[0]
    layer.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(CompileError, match="gives other logits than its layers one by one, by"):
        speech_to_text(
            model, tmp_path / "m.pt2", feature_extractor=speech_models.whisper_extractor(),
            tokenizer=speech_models.whisper_tokenizer(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"feature_extractor": transformers.WhisperFeatureExtractor()},
            "expected 8 mel bins and no dither, got 80 and",
        ),
        ({"feature_extractor": speech_models.ctc_extractor()}, "expected a WhisperFeatureExtractor, got"),
        ({"tokenizer": None}, "tokenizer: expected one, as the prompt names special tokens, got none"),
        ({"language_model": {"task": "embed"}}, "language_model: expected max_positions, .*, got task"),
    ],
)
def test_voxtral_refusals(voxtral: dict[str, Any], change: dict[str, Any], text: str, tmp_path: Path) -> None:
    given = {**voxtral, **change}
    with pytest.raises(InvalidArgumentError, match=f"speech_to_text: .*{text}"):
        speech_to_text(given.pop("model"), tmp_path / "m.pt2", **given)


def test_a_tokenizer_without_the_prompts_tokens(voxtral: dict[str, Any], tmp_path: Path) -> None:
    from tests.conformance.language_models import tokenizer

    (tmp_path / "tokenizer.json").write_bytes(tokenizer())
    given = {**voxtral, "tokenizer": tmp_path / "tokenizer.json"}
    with pytest.raises(InvalidArgumentError, match=r"tokenizer: expected a token \[INST\], which is in the prompt"):
        speech_to_text(given.pop("model"), tmp_path / "m.pt2", **given)

"""``speech_to_text``: what it refuses before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import speech_models
from untorch.export import CompileError, speech_to_text
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
        ({"model": "nowhere"}, FileMissingError, "model: nowhere has no config.json"),
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

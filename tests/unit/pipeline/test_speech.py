"""The pipeline of speech models: what it returns and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from untorch.pipeline.speech import SpeechRecognition
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError
from untorch.speech import Segment, SpeechSettings, Transcription, Word

SETTINGS = SpeechSettings("ctc", "forward", 16000, 3200, "Wav2Vec2ForCTC", min_samples=400, frame_samples=320)


class Program:
    path = "m.pt2"

    def __init__(self) -> None:
        self.manifest = {"speech": SETTINGS.to_json()}


class Transcriber:
    def __init__(self, has_words: bool, has_times: bool, result: Transcription) -> None:
        self.has_words, self.has_times, self.result, self.given = has_words, has_times, result, dict[str, Any]()

    def transcribe(self, source: Any, **given: Any) -> Transcription:
        self.given = given
        return self.result


def make(monkeypatch: pytest.MonkeyPatch, transcriber: Transcriber) -> SpeechRecognition:
    monkeypatch.setattr("untorch.pipeline.speech.Transcriber", lambda program: transcriber)
    return SpeechRecognition(Program(), owned=False)  # type: ignore[arg-type]


def test_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Transcription("a b", 2.0, "en", (Segment(" a", 0.0, 0.5), Segment(" b", 0.5, 1.5)))
    transcriber = Transcriber(False, True, result)
    pipeline = make(monkeypatch, transcriber)
    assert (pipeline.task, pipeline.architecture) == ("automatic-speech-recognition", "Wav2Vec2ForCTC")
    assert pipeline("a.wav", language="en") == {"text": " a b"}
    assert transcriber.given == {"language": "en"}
    assert pipeline(["a.wav"], return_timestamps=True) == [
        {"text": " a b", "chunks": [{"text": " a", "timestamp": (0.0, 0.5)}, {"text": " b", "timestamp": (0.5, 1.5)}]}
    ]
    assert transcriber.given == {"timestamps": True}
    for value in ("word", 1, "char"):
        with pytest.raises(InvalidArgumentError, match="return_timestamps: expected False or True for Wav2Vec2ForCTC"):
            pipeline("a.wav", return_timestamps=value)


def test_times_are_rounded_as_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Transcription("a", 2.0, "en", (Segment(" a", 7 * 0.02, 1.3800000000000001),))
    pipeline = make(monkeypatch, Transcriber(False, True, result))
    assert pipeline("a.wav", return_timestamps=True)["chunks"] == [{"text": " a", "timestamp": (0.14, 1.38)}]


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Transcription(
        "a b", 2.0, None, (Segment("a b", 0.0, 1.5, words=(Word("a", 0.0, 0.5), Word("b", 1.0, 1.5))),)
    )
    pipeline = make(monkeypatch, Transcriber(True, True, result))
    assert pipeline("a.wav", return_timestamps="word")["chunks"] == [
        {"text": "a", "timestamp": (0.0, 0.5)}, {"text": "b", "timestamp": (1.0, 1.5)},
    ]  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="expected False or 'word' for Wav2Vec2ForCTC, got True"):
        pipeline("a.wav", return_timestamps=True)
    with pytest.raises(
        ArgumentTypeError, match="unknown option 'top_k': automatic-speech-recognition takes batch_size"
    ):
        pipeline("a.wav", top_k=3)


def test_a_model_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = make(monkeypatch, Transcriber(False, False, Transcription("a b", 2.0)))
    assert pipeline("a.wav") == {"text": "a b"}
    with pytest.raises(InvalidArgumentError, match="return_timestamps: expected False for"):
        pipeline("a.wav", return_timestamps=True)


def test_errors_say_which_audio_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of options do not."""
    transcriber = Transcriber(False, False, Transcription("a", 2.0))
    pipeline = make(monkeypatch, transcriber)

    def transcribe(source: str, **given: Any) -> Transcription:
        if source != "a.wav":
            raise InvalidArgumentError(source)
        return transcriber.result

    monkeypatch.setattr(pipeline, "transcribe", transcribe)
    for text in ("audio: expected samples, got none", "transcribe: audio: expected at least 400 samples"):
        with pytest.raises(InvalidArgumentError) as caught:
            pipeline(["a.wav"] * 9 + [text])
        assert str(caught.value) == f"pipeline: inputs[9]: {text}"
        with pytest.raises(InvalidArgumentError) as caught:
            pipeline(text)
        assert str(caught.value) == text
    with pytest.raises(InvalidArgumentError, match="^transcribe: language: unknown$"):
        pipeline(["a.wav", "transcribe: language: unknown"])
